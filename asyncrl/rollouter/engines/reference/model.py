"""A causal LM of transformers that continues one sequence at a time, in float32 on one thread, and its sampling noise.

Invariant: the continuation of a sequence and its log-probs are in every bit a function of the weights, its tokens, its
seed and the place where its sampled part begins. So its tokens are always fed in the same portions, however often it
was interrupted: the prompt at once, then each sampled token alone. A matrix product rounds differently with each number
of rows. For the same reason there is one thread, and attention as plain matrix products. The noise is a function of
(seed, position).

Everything is called on one thread. Fails with ConfigError for a folder without such a model, and with WeightsCorrupt
for weights that are not the model's; the old weights stay then.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import xxhash
from torch import Tensor

from asyncrl.config.training import ModelConfig
from asyncrl.core.errors import ConfigError, WeightsCorrupt

_BITS = 52


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for the token at ``position`` of a sequence, prompt included."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> (64 - _BITS)) / (1 << _BITS)


def seed_of(run_seed: int, engine: str, request: str) -> int:
    """Seed of a request that brings none of its own; 64 bits."""
    digest = hashlib.blake2b(f"{run_seed}/{engine}/{request}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(slots=True, kw_only=True)
class Continuation:
    """A sequence and the terms of its continuation."""

    ids: list[int]
    """The prompt and the sampled tokens."""
    prompt: int
    """Tokens of ``ids`` that are not sampled."""
    limit: int
    """Length at which it ends."""
    temperature: float
    """Temperature; 0 is greedy."""
    seed: int
    stop: frozenset[int]
    """Tokens at which it ends."""
    cache: Any = None
    """Keys and values of the first ``seen`` tokens."""
    seen: int = 0

    def forget(self) -> None:
        """Have keys and values computed again."""
        self.cache, self.seen = None, 0


@dataclass(slots=True)
class Sampled:
    """The next tokens of a sequence, each with its log-prob (nats, after temperature)."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None


class Model:
    """The model, without weights before the first ``load``."""

    def __init__(self, config: ModelConfig, stop_token_ids: Iterable[int]) -> None:
        import transformers

        assert config.path is not None
        torch.set_num_threads(1)
        transformers.utils.logging.disable_progress_bar()
        try:
            self._settings: Any = transformers.AutoConfig.from_pretrained(
                config.path, local_files_only=True, trust_remote_code=config.trust_remote_code
            )
            with torch.device("meta"):
                auto: Any = transformers.AutoModelForCausalLM
                empty = auto.from_config(self._settings, trust_remote_code=config.trust_remote_code)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ConfigError([f"model.path: {config.path} cannot be loaded as a causal LM: {error}"]) from error
        self._class: Any = type(empty)
        # Not every model can leave out unused logits.
        parameters = inspect.signature(self._class.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        text = self._settings.get_text_config()
        self.context: int | None = getattr(text, "max_position_embeddings", None)
        """Longest sequence, where there is a limit."""
        self.vocabulary: int = text.vocab_size
        self.stop = frozenset(stop_token_ids)
        """Tokens that end every sequence."""
        self._model: Any = None
        self.fed = 0
        """Portions computed so far, for those who watch from another thread."""

    # --- weights ---

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Replace all weights, by checkpoint name; tied ones need be there once. Takes the tensors over.

        Raises WeightsCorrupt.
        """
        try:
            # Into a new model: it knows how its checkpoints name things, and until it is whole the old one stays.
            model, info = self._class.from_pretrained(
                None,
                config=copy.deepcopy(self._settings),
                state_dict=dict(tensors),
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
            )
        except (ValueError, KeyError, RuntimeError) as error:
            raise WeightsCorrupt(f"transformers cannot load them: {error}", version=version) from error
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
            if wrong := sorted(map(str, info[what])):
                raise WeightsCorrupt(f"{what.replace('_', ' ')}: {', '.join(wrong[:3])}", version=version)
        self._model = model.eval().requires_grad_(False)

    def checksum(self) -> str:
        """Checksum over names and values."""
        digest = xxhash.xxh3_64()
        for name, tensor in sorted(self._model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    # --- tokens ---

    @torch.inference_mode()
    def advance(self, it: Continuation, count: int, interrupted: Callable[[], bool]) -> Sampled:
        """Sample up to ``count`` tokens; fewer at the end of the sequence or when ``interrupted`` says so."""
        sampled = Sampled()
        while len(sampled.tokens) < count and sampled.finish_reason is None and not interrupted():
            logits = self._feed(it)
            if logits is None:
                continue
            token, logprob = choose(logits, it.temperature, uniform(it.seed, len(it.ids)))
            it.ids.append(token)
            sampled.tokens.append(token)
            sampled.logprobs.append(logprob)
            if token in it.stop:
                sampled.finish_reason = "stop"
            elif len(it.ids) >= it.limit:
                sampled.finish_reason = "length"
        return sampled

    def _feed(self, it: Continuation) -> Tensor | None:
        """Compute the next portion; the logits [V] of the next token if it was the last one."""
        end = it.prompt if it.seen < it.prompt else it.seen + 1
        portion = torch.tensor([it.ids[it.seen : end]])
        output = self._model(input_ids=portion, past_key_values=it.cache, use_cache=True, **self._last_only)
        it.cache, it.seen = output.past_key_values, end
        self.fed += 1
        logits: Tensor = output.logits[0, -1]
        return logits if it.seen == len(it.ids) else None

    @torch.inference_mode()
    def score(self, ids: Sequence[int]) -> list[float]:
        """Log-prob (nats, temperature 1) of each token given those before it, from the second on."""
        logits = self._model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        self.fed += 1
        targets = torch.tensor(ids[1:])[:, None]
        scores: list[float] = torch.log_softmax(logits.double(), dim=-1).gather(1, targets)[:, 0].tolist()
        return scores


def choose(logits: Tensor, temperature: float, noise: float) -> tuple[int, float]:
    """A token and its log-prob (nats) under softmax(logits / temperature): the one in whose share of [0, 1) ``noise``
    falls, the shares in the order of the vocabulary. Temperature 0 takes the likeliest, its log-prob that of 1.
    """
    logprobs = torch.log_softmax(logits.double() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        token = int(logits.argmax())
    else:
        shares = logprobs.exp().cumsum(0)
        # ``right`` never takes a token whose share is 0; scaled, as the shares add up to 1 but for rounding.
        token = int(torch.searchsorted(shares, noise * shares[-1], right=True))
    return token, float(logprobs[token])
