"""A model whose samples a test writes and whose renders it reads."""

from pathlib import Path
from typing import Any

from chat_models import config_of

from asyncrl.text.chat.renderer import make_renderer
from asyncrl.text.tokenizer import tokenizer_of


class Spoken:
    """The renderer of a model's folder, as ``renderer_of`` makes it, and the tokenizer that it was given."""

    def __init__(self, folder: Path, **chat: Any) -> None:
        config = config_of(folder, **chat)
        self.tokenizer = tokenizer_of(config)
        self.renderer = make_renderer(config, self.tokenizer)

    def text(self, ids: list[int]) -> str:
        """Text of tokens, special ones included."""
        return self.tokenizer.decode(ids, keep_special=True)

    def sampled(self, text: str, *ends: int) -> list[int]:
        """Tokens of an answer that is ``text``, and those at its end."""
        return [*self.tokenizer.encode(text), *ends]
