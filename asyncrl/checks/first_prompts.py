"""The first prompts of the training data, as the dataloader would lease them, without reading the rest of the data.

Rows that cannot be used, and prompts over data.max_prompt_tokens, are passed over: the checks before a start report
them. Fails with DataError or ConfigError where the data cannot be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from asyncrl.chat.prompt import PromptEncoder
from asyncrl.config import Config
from asyncrl.dataloader.rows import BadRow, check_row, unpack
from asyncrl.dataloader.sources import open_source
from asyncrl.errors import ConfigError
from asyncrl.tokenizer import Tokenizer

LOOKED_AT = 1000
"""Rows among which usable prompts are looked for."""


@dataclass(frozen=True, slots=True)
class FirstPrompt:
    """A prompt: token ids int32 [P], its text as the model sees it, and its row."""

    ids: np.ndarray
    text: str
    row: dict[str, Any]


def first_prompts(config: Config, tokenizer: Tokenizer, count: int) -> list[FirstPrompt]:
    """At most ``count`` prompts, in the order of the data."""
    data = config.data
    _, rows, prompt_key = open_source(data)
    encode = PromptEncoder(tokenizer, data, config)
    found: list[FirstPrompt] = []
    for row in islice(rows, LOOKED_AT):
        try:
            checked = check_row(row, prompt_key, data.tools_column, continues=data.continue_final_message)
            ids, text = encode(checked.prompt, checked.tools)
        except ConfigError:
            raise
        except (BadRow, ValueError):
            continue
        if 0 < len(ids) <= data.max_prompt_tokens:
            found.append(FirstPrompt(np.array(ids, np.int32), text, unpack(checked.packed)))
        if len(found) == count:
            break
    return found
