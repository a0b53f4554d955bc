"""A causal LM of transformers that continues one sequence at a time, in float32 on one thread, and its sampling noise.

Invariant: equal weights, tokens, seed and prompt length give the same continuation and log-probs, bit for bit. A matrix
product rounds differently with each number of rows. So the model always computes a sequence in the same *portions*,
however often it is interrupted. The first is the whole prompt, and each further one a sampled token. For the same
reason it uses one thread, and attention as plain matrix products. The sampling noise is a function of (seed, position).

Everything is called on one thread. Fails with ConfigError for a folder without a causal LM. Fails with WeightsCorrupt
for weights that are not the model's, and keeps the old ones.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from torch import Tensor

from asyncrl.config.training import ModelConfig
from asyncrl.core.errors import ConfigError, WeightsCorrupt
from asyncrl.core.truncation import Truncation
from asyncrl.messages.routes import Experts
from asyncrl.weights.routers import Routers

_BITS = 52
"""Bits of the sampling noise: a float holds them exactly."""


def uniform(seed: int, position: int) -> float:
    """Return the noise, in [0, 1), that samples the token at ``position``; positions count from the prompt's start."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> (64 - _BITS)) / (1 << _BITS)


def seed_of(run_seed: int, engine: str, request: str) -> int:
    """Return the seed (64 bits) of a request that has none."""
    digest = hashlib.blake2b(f"{run_seed}/{engine}/{request}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(slots=True, kw_only=True)
class Continuation:
    """A sequence under way, and how it is to be continued."""

    ids: list[int]
    """The prompt, followed by the sampled tokens."""
    prompt: int
    """Number of tokens in the prompt."""
    limit: int
    """Number of tokens, prompt included, at which the sequence ends."""
    temperature: float
    """Temperature; 0 is greedy."""
    truncation: Truncation | None = None
    """Truncation of the distribution; None samples from the whole one."""
    seed: int
    stop: frozenset[int]
    """Tokens that end the sequence."""
    routed: int = 0
    """Number of the first tokens whose routes are known."""
    cache: Any = None
    """Keys and values of the first ``seen`` tokens."""
    seen: int = 0

    def forget(self) -> None:
        """Drop the keys and values, so that ``advance`` computes them again."""
        self.cache, self.seen = None, 0


@dataclass(slots=True)
class Sampled:
    """Newly sampled tokens of a sequence, each with its log-prob (nats, after temperature and truncation)."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sets: list[list[int]] = field(default_factory=list)
    """The set of each token; empty without a truncation."""
    finish_reason: Literal["stop", "length"] | None = None
    routes: list[np.ndarray] = field(default_factory=list)
    """Routes (messages/routes.py) of the tokens that were computed for the first time, in parts."""


class Model:
    """The model. It has no weights before the first ``load``."""

    def __init__(self, config: ModelConfig, stop_token_ids: Iterable[int], *, returns_routes: bool = False) -> None:
        """``returns_routes``: whether ``advance`` returns routes, if the model has experts."""
        import transformers

        assert config.path is not None
        torch.set_num_threads(1)
        transformers.utils.logging.disable_progress_bar()
        try:
            settings: Any = transformers.AutoConfig.from_pretrained(
                config.path, local_files_only=True, trust_remote_code=config.trust_remote_code
            )
            # Made without memory, only to find its class.
            with torch.device("meta"):
                auto: Any = transformers.AutoModelForCausalLM
                empty = auto.from_config(settings, trust_remote_code=config.trust_remote_code)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ConfigError([f"model.path: {config.path} cannot be loaded as a causal LM: {error}"]) from error
        self._class: Any = type(empty)
        """Class of the model in transformers."""
        # Not ``settings``, which may describe more than the language model.
        self._settings: Any = empty.config
        # Not every model can leave out unused logits.
        parameters = inspect.signature(self._class.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        """Argument by which the model computes the last logits alone; empty if it has none."""
        text = self._settings.get_text_config()
        self.context: int | None = getattr(text, "max_position_embeddings", None)
        """Longest sequence (tokens) that the model takes; None without a limit."""
        self.vocabulary: int = text.vocab_size
        self.stop = frozenset(stop_token_ids)
        """Tokens that end every sequence."""
        self.experts: Experts | None = Routers(empty).experts if returns_routes else None
        """The model's experts if it returns routes, else None."""
        self._model: Any = None
        """The model with its weights; None before the first ``load``."""
        self._routers: Routers | None = None
        """Routers of ``_model``, if it returns routes."""
        self.fed = 0
        """Number of portions computed so far, by which another thread sees progress."""

    # --- weights ---

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Replace all weights by ``tensors``, which has them by checkpoint name; of tied weights one name is enough.

        The model keeps the tensors, so the caller must not change them. Raises WeightsCorrupt.
        """
        try:
            # ``from_pretrained`` maps checkpoint names to parameters. The old model stays until the new one is whole.
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
        self._routers = Routers(model) if self.experts is not None else None

    def checksum(self) -> str:
        """Return a checksum of the names and values of all weights."""
        digest = xxhash.xxh3_64()
        for name, tensor in sorted(self._model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    # --- tokens ---

    @torch.inference_mode()
    def advance(self, sequence: Continuation, count: int, interrupted: Callable[[], bool]) -> Sampled:
        """Sample up to ``count`` tokens of a sequence; stops early at its end, or if ``interrupted`` returns True."""
        sampled = Sampled()
        while len(sampled.tokens) < count and sampled.finish_reason is None and not interrupted():
            logits = self._feed(sequence, sampled.routes)
            if logits is None:
                # Tokens sampled earlier are still to be fed.
                continue
            noise = uniform(sequence.seed, len(sequence.ids))
            if sequence.truncation is not None:
                logits = truncate(logits, sequence.temperature, sequence.truncation)
                sampled.sets.append(logits.isfinite().nonzero()[:, 0].tolist())
            token, logprob = choose(logits, sequence.temperature, noise)
            sequence.ids.append(token)
            sampled.tokens.append(token)
            sampled.logprobs.append(logprob)
            if token in sequence.stop:
                sampled.finish_reason = "stop"
            elif len(sequence.ids) >= sequence.limit:
                sampled.finish_reason = "length"
        return sampled

    def _feed(self, sequence: Continuation, routes: list[np.ndarray]) -> Tensor | None:
        """Compute the sequence's next portion; returns the next token's logits [V], None if more portions are left.

        Adds the routes of the portion to ``routes``, except those that are known.
        """
        end = sequence.prompt if sequence.seen < sequence.prompt else sequence.seen + 1
        portion = torch.tensor([sequence.ids[sequence.seen : end]])
        output = self._model(input_ids=portion, past_key_values=sequence.cache, use_cache=True, **self._last_only)
        if self._routers is not None and end > sequence.routed:
            assert self.experts is not None
            # The last ``end - routed`` routes: those before them are known.
            portion_routes = self._routers.recorded()[sequence.routed - end :]
            routes.append(portion_routes.numpy().astype(self.experts.dtype))
            sequence.routed = end
        sequence.cache, sequence.seen = output.past_key_values, end
        self.fed += 1
        logits: Tensor = output.logits[0, -1]
        return logits if sequence.seen == len(sequence.ids) else None

    @torch.inference_mode()
    def score(self, ids: Sequence[int]) -> list[float]:
        """Return the log-prob (nats, temperature 1) of each token except the first, given those before it."""
        logits = self._model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        self.fed += 1
        targets = torch.tensor(ids[1:])[:, None]
        scores: list[float] = torch.log_softmax(logits.double(), dim=-1).gather(1, targets)[:, 0].tolist()
        return scores


def truncate(logits: Tensor, temperature: float, truncation: Truncation) -> Tensor:
    """Return ``logits`` [V] with -inf for the tokens that the truncation cuts, in the order of vLLM.

    A temperature of 0 counts as 1; the likeliest token always stays.
    """
    logs = torch.log_softmax(logits.double() / (temperature or 1.0), dim=-1)
    logs = logs.where(logs.exp() >= truncation.min_p * logs.exp().max(), -torch.inf)
    # As in vLLM, tokens as likely as the last one stay too.
    least = logs.topk(min(truncation.top_k, len(logs))).values[-1]
    logs = torch.log_softmax(logs.where(logs >= least, -torch.inf), dim=-1)
    if truncation.top_p < 1:
        values, order = logs.sort(descending=True, stable=True)
        shares = values.exp()
        # A token is cut if the likelier ones reach top_p.
        values = values.where(shares.cumsum(0) - shares < truncation.top_p, -torch.inf)
        logs = torch.empty_like(logs).scatter_(0, order, values)
    return logits.where(logs.isfinite(), -torch.inf)


def choose(logits: Tensor, temperature: float, noise: float) -> tuple[int, float]:
    """Sample a token; returns it and its log-prob (nats) under softmax(logits / temperature). ``logits`` is [V].

    The probabilities, in the order of the vocabulary, divide [0, 1) into intervals. The token is the one whose interval
    contains ``noise``. Temperature 0 takes the likeliest token, and its log-prob at temperature 1.
    """
    logprobs = torch.log_softmax(logits.double() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        token = int(logits.argmax())
    else:
        shares = logprobs.exp().cumsum(0)
        # ``right=True`` never takes a token of probability 0. The noise is scaled, because the probabilities do not add
        # up to exactly 1.
        token = int(torch.searchsorted(shares, noise * shares[-1], right=True))
    return token, float(logprobs[token])
