"""The check at start, first part: whether the learner computes from a packed row the same as the model from each
sequence alone.

Some architectures leak from one packed sequence into the next. Some change their logits behind the head. Fast attention
ignores features that it does not know, such as a soft cap. Each of these silently trains on wrong ratios.

A way of scoring is a choice of rows, attention and logits (below). The check scores random sequences in each way, in
float32, with the loaded weights. It compares the log-probs with those of the slowest way, the "truth": one sequence a
row, transformers' plain attention, the model's own logits. A way agrees if measured rounding explains the difference at
every position (rounding.py). The learner takes the fastest way that agrees:

    rows        several sequences a row, else one; a common beginning of several in a row once, else in each
    attention   several sequences a row: ours, else transformers' choice, else the plain one; one: the last two
    logits      in chunks, else the model's own

The second part (sharded_check.py) repeats the comparison where the model will run.

With learner.context_parallel ranks share the rows under our attention alone.

Fails with ConfigError under ``packing = "required"`` when no way of packing agrees, and under learner.context_parallel
when our attention does not agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from asyncrl.config.training import LearnerConfig
from asyncrl.core.errors import ConfigError
from asyncrl.core.formatting import exact
from asyncrl.learner.algorithm.packing import find_shared_prefixes, lay_out
from asyncrl.learner.fsdp.model.packed_row import PackedRow
from asyncrl.learner.fsdp.model.policy import Attention, Policy, make_row
from asyncrl.learner.fsdp.model.recurrence import recurrent_modules
from asyncrl.learner.fsdp.startup.rounding import Distance, distance, measure_rounding, score_rows
from asyncrl.messages.routes import Experts

LENGTHS = (7, 1, 19, 12, 5)
"""Lengths of the random sequences: short, so that a leak from a neighbour makes a large difference."""
COMMON = 4
"""Number of tokens with which all longer sequences begin."""
_CPU = torch.device("cpu")
FOR_PACKED_ROWS: tuple[Attention, ...] = ("packed", "loaded", "plain")
"""Attention for several sequences a row, fastest first."""
OURS: Attention = "packed"
"""The only attention of FOR_PACKED_ROWS that computes a shared beginning once; VARLEN (attention.py) also does."""

MOVING_ROTATIONS = ("dynamic", "longrope")
"""Kinds of rotary embeddings that depend on the longest position that a rank computes."""


class Scoring(msgspec.Struct, frozen=True):
    """The way in which the learner scores, the same on all ranks."""

    packed: bool
    """Whether a row has several sequences."""
    attention: Attention
    chunked: bool
    """Whether logits are computed in chunks."""
    warnings: list[str] = []
    shared: bool = False
    """Whether a row holds a common beginning of several of its sequences once."""

    def apply(self, policy: Policy) -> None:
        """Make ``policy`` score this way."""
        policy.chunked = self.chunked
        policy.use_attention(self.attention)


class AgreeingWays(msgspec.Struct, frozen=True):
    """The ways of scoring that agree in float32."""

    packed: list[Attention]
    """Attention of FOR_PACKED_ROWS that agrees for several sequences a row, the fastest first; may be empty."""
    single: Attention
    """The fastest attention that agrees for one sequence a row."""
    shared: bool
    """Whether OURS also agrees when a common beginning of sequences is in the row once."""
    chunked: bool
    """Whether logits computed in chunks agree."""
    truth: list[float]
    """Log-probs of the random sequences in the slowest way, nats."""
    warnings: list[str]

    @property
    def scoring(self) -> Scoring:
        """The fastest of the ways."""
        attention = (*self.packed, self.single)[0]
        return Scoring(bool(self.packed), attention, self.chunked, self.warnings, self.shared)


@dataclass(frozen=True)
class CheckBatch:
    """The same sequences laid out in three ways; every position is scored."""

    packed: PackedRow
    """All sequences in one row."""
    shared: PackedRow
    """One row that has their common beginnings once."""
    single: list[PackedRow]
    """One row for each sequence."""

    @property
    def longest(self) -> tuple[PackedRow, slice]:
        """The row of the longest sequence alone, and the slice of its positions among those of all sequences."""
        lengths = [row.lengths[0] for row in self.single]
        at = lengths.index(max(lengths))
        return self.single[at], slice(sum(lengths[:at]), sum(lengths[: at + 1]))


def choose_scoring(
    policy: Policy,
    config: LearnerConfig,
    *,
    seed: int,
    device: torch.device = _CPU,
    on_pass: Callable[[], None] = lambda: None,
) -> AgreeingWays:
    """Score random sequences in each way, and return the ways that agree. Raises ConfigError.

    Chunks of logits are tried first, with plain attention; each attention is then tried with chunks, if these agree.
    All ranks call it together if ``policy`` is sharded. ``policy`` computes in float32 on ``device``, and is left set
    to the fastest way that agrees. ``on_pass`` is called before each pass but the first.
    """
    batch = make_batch(short_tokens(policy, seed), device, policy.routers.experts)
    longest, longest_slice = batch.longest
    Scoring(packed=False, attention="plain", chunked=False).apply(policy)
    truth = score_rows(policy, batch.single)
    on_pass()
    bounds = measure_rounding(policy, batch.single, truth, torch.float32)

    def compare(row: PackedRow, at: slice, attention: Attention, chunked: bool) -> Distance | str:
        """Score ``row`` in one way, and compare it with the truth at the positions ``at``.

        Returns the distance, or the error of a model that cannot score in this way.
        """
        on_pass()
        try:
            Scoring(packed=False, attention=attention, chunked=chunked).apply(policy)
            scores = score_rows(policy, [row])
        except (NotImplementedError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            # A model may raise any of these if it does not support this way of being called.
            # The failed pass may have left layers gathered.
            policy.reshard()
            return f"{type(error).__name__}: {error}"
        return distance(scores, truth[at], bounds[at])

    every = slice(len(truth))
    chunked_result = compare(longest, longest_slice, "plain", True)
    chunked = _agrees(chunked_result)
    single_result = compare(longest, longest_slice, "loaded", chunked)
    single: Attention = "loaded" if _agrees(single_result) else "plain"
    results: dict[Attention, Distance | str] = {}
    if config.packing != "off":
        results = {attention: compare(batch.packed, every, attention, chunked) for attention in FOR_PACKED_ROWS}
    packed = [attention for attention, result in results.items() if _agrees(result)]
    shared_result = compare(batch.shared, every, OURS, chunked) if OURS in packed else None

    if policy.row_group is not None and OURS not in packed:
        raise cannot_share(policy.row_group.size, str(results[OURS]))
    warnings = []
    if not chunked:
        warnings.append(
            f"log-probs in chunks differ from the model's own logits ({chunked_result}); whole logits are held"
        )
    if results and not packed:
        warnings.append(no_packing(config, str(results["plain"])))
    elif results and packed[0] != "packed":
        warnings.append(slower_packing(packed[0], str(results["packed"])))
    if shared_result is not None and not _agrees(shared_result):
        warnings.append(no_sharing(str(shared_result)))
    if not packed and single == "plain":
        finding = f"transformers' fast attention leaves out a part of the model's ({single_result})"
        warnings.append(f"{finding}; its plain one is slow")
    shared = shared_result is not None and _agrees(shared_result)
    choice = AgreeingWays(packed, single, shared, chunked, truth.tolist(), warnings)
    choice.scoring.apply(policy)
    return choice


def no_packing(config: LearnerConfig, found: str) -> str:
    """Return the warning that each row holds one sequence because packed rows do not agree; ``found`` is the distance.

    Raises ConfigError if the configuration requires packing.
    """
    finding = f"log-probs of a packed row differ from those of single sequences ({found})"
    if config.packing == "required":
        raise ConfigError([f'learner.packing: is "required", but with this model {finding}'])
    return f"{finding}; each row holds one sequence"


def sharing_problem(policy: Policy, size: int) -> str | None:
    """Return the reason that ``size`` ranks cannot share the rows of a policy; None if they can."""
    config = policy.model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or heads % size:
        return f"it has {heads} attention heads, which {size} does not divide"
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    others = [kind for kind in kinds if "linear" in kind or "attention" not in kind]
    if others or any(recurrent_modules(layer) for layer in policy.decoder_layers()):
        return "it has layers with a state (linear attention, convolutions), which need all tokens of a row on one rank"
    rotations = {str(getattr(module, "rope_type", "")) for module in policy.model.modules()}
    if any(kind in rotation for rotation in rotations for kind in MOVING_ROTATIONS):
        return f"its rotary embedding ({' or '.join(MOVING_ROTATIONS)}) depends on the longest position of a row"
    return None


def cannot_share(size: int, found: str) -> ConfigError:
    """Return the error for a model whose log-probs are not the same if ``size`` ranks share a row."""
    problem = f"is {size}, but with this model log-probs of a row that ranks share are not those of single sequences"
    return ConfigError([f"learner.context_parallel: {problem} ({found}); set it to 1"])


def no_sharing(found: str) -> str:
    """Return the warning that each sequence computes its own prompt because sharing does not agree."""
    return f"log-probs differ where the common beginning of sequences is computed once ({found}); each computes its own"


def sharing_cost(scoring: Scoring, *, samples: int, prompt_tokens: int, packing: str) -> str:
    """Return a warning about the cost of rows without shared prompts; empty if there is no cost, or packing is off.

    ``samples`` is the number of responses in a group, ``prompt_tokens`` the longest prompt.
    """
    if scoring.shared or packing == "off" or samples == 1:
        return ""
    more = exact((samples - 1) * prompt_tokens)
    return (
        f"the learner computes each prompt {samples} times a group (rollout.samples_per_prompt), not once. A prompt of "
        f"{exact(prompt_tokens)} tokens (data.max_prompt_tokens) costs {more} more tokens a group. Training is right "
        "but slower; shorter prompts cost less"
    )


def slower_packing(attention: Attention, found: str) -> str:
    """Return the warning that packed rows use ``attention``, because the fastest one does not agree."""
    packed, loaded, plain = "a kernel for each sequence", "transformers'", "transformers' plain one"
    named = {"packed": packed, "loaded": loaded, "plain": plain}[attention]
    return f"own attention over packed rows cannot be used ({found}); {named} is slower"


def _agrees(result: Distance | str) -> bool:
    """Whether a way agrees; a text is the error of a model that cannot score in this way."""
    return isinstance(result, Distance) and result.agrees


def random_tokens(policy: Policy, lengths: Sequence[int], seed: int) -> list[np.ndarray]:
    """Return random sequences of one token more than ``lengths``: the last token is only a target."""
    random = np.random.default_rng(seed)
    vocabulary = policy.model.get_input_embeddings().num_embeddings
    return [random.integers(0, vocabulary, n + 1) for n in lengths]


def short_tokens(policy: Policy, seed: int) -> list[np.ndarray]:
    """Return random sequences of one token more than LENGTHS; those longer than COMMON begin with the same tokens."""
    tokens = random_tokens(policy, LENGTHS, seed)
    for sequence in tokens:
        if len(sequence) > COMMON + 1:
            sequence[:COMMON] = tokens[0][:COMMON]
    return tokens


def make_batch(tokens: Sequence[np.ndarray], device: torch.device, experts: Experts | None) -> CheckBatch:
    """Lay these sequences out in rows in three ways; all score the same positions.

    Sequences whose first COMMON tokens are equal share the longest beginning that all of them have. With ``experts``
    the rows have routes, so that no router chooses another expert by its rounding.
    """
    inputs, targets = [t[:-1] for t in tokens], np.concatenate([t[1:] for t in tokens])
    lengths = [len(t) for t in inputs]
    layout = lay_out(inputs, find_shared_prefixes(inputs, [tuple(t[:COMMON].tolist()) for t in inputs]))
    places = np.concatenate(layout.places)

    def routes(of: Sequence[np.ndarray], length: int) -> np.ndarray | None:
        return None if experts is None else _routes_by_position(of, length, experts)

    single_places = [np.arange(n) for n in lengths]
    packed_places = [np.arange(end - n, end) for n, end in zip(lengths, np.cumsum(lengths), strict=True)]
    return CheckBatch(
        packed=make_row(
            np.concatenate(inputs),
            lengths,
            np.arange(sum(lengths)),
            targets,
            device,
            routes=routes(packed_places, sum(lengths)),
        ),
        shared=make_row(
            layout.input_ids,
            layout.lengths,
            places,
            targets,
            device,
            prefixes=layout.prefixes,
            routes=routes(layout.places, len(layout.input_ids)),
        ),
        single=[
            make_row(t[:-1], [n], own, t[1:], device, routes=routes([own], n))
            for t, n, own in zip(tokens, lengths, single_places, strict=True)
        ],
    )


def _routes_by_position(places: Sequence[np.ndarray], length: int, experts: Experts) -> np.ndarray:
    """Make random routes for a row of ``length`` tokens that holds sequences at ``places``: int64 [T, layers, chosen].

    They depend on a token's position in its sequence alone, so a common beginning has the same in all sequences.
    """
    longest = max(map(len, places))
    first = np.random.default_rng(0).integers(0, experts.count, (longest, experts.layers, 1))
    by_position = (first + np.arange(experts.chosen)) % experts.count
    routes = np.zeros((length, experts.layers, experts.chosen), np.int64)
    for own in places:
        routes[own] = by_position[: len(own)]
    return routes
