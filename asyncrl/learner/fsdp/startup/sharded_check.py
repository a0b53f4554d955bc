"""The check at start, second part: whether the chosen way of scoring holds where it will run.

All ranks score random sequences together, in the compute type on the learner's device, with the sharded and, if
configured, compiled model that training uses. The sequences are the short ones of the first part, and one that passes
the window of the model's attention. A way that agreed in startup_check.py but not here is replaced by the next fastest:

    logits      in chunks, against the model's own, for the short sequences
    rows        several sequences a row, against each alone. The row holds the long sequence and one with the same
                beginning, between short ones. VARLEN is tried first if all ranks' devices support it, then the ways
                of the first part. VARLEN and PACKED (attention.py) are tried again with common beginnings shared

Rounding is measured where the model runs. In float32 each position has its own bound (rounding.py). In bfloat16 the
rounding is the root mean square by which the short sequences differ from the first part's float32. A way then agrees if
no stretch of a sequence differs by more than ROUNDINGS times that, as a root mean square.

FLOPS bounds the cost of each pass. All ranks compute the same, and the worst result of a rank decides.

Fails with ConfigError when the sharded model differs from the one that was loaded, and under ``packing = "required"``
when no way of packing agrees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.core.errors import ConfigError
from asyncrl.learner.fsdp.model import attention
from asyncrl.learner.fsdp.model.attention_kernels import choose_kernel
from asyncrl.learner.fsdp.model.packed_row import PackedRow
from asyncrl.learner.fsdp.model.policy import Attention, Policy
from asyncrl.learner.fsdp.ranks.ranks import Ranks
from asyncrl.learner.fsdp.startup.rounding import Distance, distance, measure_rounding, score_rows
from asyncrl.learner.fsdp.startup.startup_check import (
    LENGTHS,
    OURS,
    AgreeingWays,
    Scoring,
    cannot_share,
    make_batch,
    no_packing,
    no_sharing,
    random_tokens,
    short_tokens,
    slower_packing,
)

ROUNDINGS = 4.0
"""Factor from the measured rounding to the largest allowed difference of a stretch, in bfloat16."""
STRETCH = 32
"""Number of positions of a stretch: neighbouring positions whose differences are averaged."""
OTHER_MODEL = 1.0
"""Root mean square of differences, in nats, that no rounding explains: the sharded model must be another one."""
FLOPS = {"cpu": 5e10, "cuda": 1e14}
"""Floating-point operations of one pass over the long sequence, by type of device: about a second."""
PAST = 2 * STRETCH
"""Positions by which the long sequence is longer than the window."""
BEFORE = 2
"""Short sequences in the row before the long one."""
BEHIND = 8
"""The second sequence is the first half of the long one, and this many positions more."""
LONG = 2048
"""Longest length of the long sequence for a model without a window."""


def confirm_scoring(
    policy: Policy,
    choice: AgreeingWays,
    config: Config,
    ranks: Ranks,
    dtype: torch.dtype,
    *,
    path: str,
    is_trained: bool = True,
) -> Scoring:
    """All ranks together: set ``policy`` to the fastest way of ``choice`` that agrees for it, and return that way.

    ``dtype`` is the compute type, and ``path`` names the model in errors. The model that is trained chooses the
    attention kernel for all. Raises ConfigError on all ranks alike.
    """
    check = _Check(policy, choice, config, ranks, dtype, is_trained=is_trained)
    with ranks.waiting("the check at start"):
        scoring = check.run(path)
    scoring.apply(policy)
    policy.reshard()
    return scoring


def attention_window(model: Any) -> int | None:
    """Read from a model's configuration how many positions its narrowest windowed layer sees; None without one."""
    sizes = []
    # A model that does not name the types of its layers may have both.
    layers = set(getattr(model, "layer_types", None) or ("sliding_attention", "chunked_attention"))
    # Some models have a window in their configuration and switch it off.
    if "sliding_attention" in layers and getattr(model, "use_sliding_window", True):
        sizes.append(getattr(model, "sliding_window", None))
    if "chunked_attention" in layers:
        sizes.append(getattr(model, "attention_chunk_size", None))
    return min((size for size in sizes if size), default=None)


def head_shape(model: Any) -> attention.Heads:
    """Read the attention heads of a model from its configuration. Raises an error of any type if it lacks them."""
    heads = model.num_attention_heads
    return attention.Heads(
        queries=heads,
        keys=getattr(model, "num_key_value_heads", None) or heads,
        width=getattr(model, "head_dim", None) or model.hidden_size // heads,
        softcap=getattr(model, "attn_logit_softcapping", None),
    )


def long_length(window: int | None, *, longest: int, parameters: int, device: str) -> int:
    """Choose the length of the long sequence: past the window, but within FLOPS and the ``longest`` of training.

    The length is at least STRETCH, also if a limit is lower.
    """
    # A forward pass takes about 2 operations a parameter for each token.
    affordable = int(FLOPS[device] / (2 * parameters))
    wanted = LONG if window is None else window + PAST
    return max(STRETCH, min(longest, wanted, affordable))


class _Check:
    """One run of the check. Its methods are called by all ranks together."""

    def __init__(
        self,
        policy: Policy,
        choice: AgreeingWays,
        config: Config,
        ranks: Ranks,
        dtype: torch.dtype,
        *,
        is_trained: bool,
    ) -> None:
        self._is_trained = is_trained
        self._policy, self._choice, self._config, self._ranks = policy, choice, config, ranks
        self._dtype = dtype
        self._is_float32 = dtype == torch.float32
        # Compute type and device, for texts.
        self._where = f"in {str(dtype).removeprefix('torch.')} on {ranks.device.type}"
        self._seed = config.run.seed
        self._window = attention_window(policy.model.config.get_text_config())
        """Positions that the narrowest windowed layer sees, or None."""
        self._length = long_length(
            self._window,
            longest=config.longest_sequence,
            parameters=sum(parameter.numel() for parameter in policy.parameters()),
            device=ranks.device.type,
        )
        """Length of the long sequence."""

    def run(self, path: str) -> Scoring:
        """Try logits in chunks, then the ways for several sequences a row. Return the fastest way that agrees.

        If no way of packing agrees, that is one sequence a row; raises ConfigError if packing is required. Ways
        are compared with the truth, one sequence a row. In it the short sequences have the model's own logits, the long
        ones logits in chunks if these agree.
        """
        choice, warnings = self._choice, list(self._choice.warnings)
        tokens = short_tokens(self._policy, self._seed)
        experts = self._policy.routers.experts
        short = make_batch(tokens, self._ranks.device, experts)
        whole = self._score(short.single, choice.single, chunked=False)
        rounding = self._measure_rounding(whole, path)
        bounds = self._bounds(short.single, whole, rounding)

        chunked = choice.chunked
        if chunked:
            row, longest_slice = short.longest
            chunked_result = self._distance(
                self._score([row], choice.single, chunked=True), whole[longest_slice], bounds[longest_slice]
            )
            if not chunked_result.agrees:
                chunked = False
                finding = f"log-probs in chunks differ from the model's own logits {self._where} ({chunked_result})"
                warnings.append(f"{finding}; whole logits are held")
        if not choice.packed:
            return Scoring(False, choice.single, chunked, warnings)
        if self._window is not None and self._length <= self._window < self._config.longest_sequence:
            warnings.append(f"its window of {self._window} tokens takes too long to check here: {self._length} were")

        long = random_tokens(self._policy, [self._length, self._length // 2 + BEHIND], self._seed + 1)
        long[1][: self._length // 2] = long[0][: self._length // 2]
        # Number of positions in front of the long sequences.
        before = sum(LENGTHS[:BEFORE])
        rows = make_batch(long, self._ranks.device, experts).single
        alone = self._score(rows, choice.single, chunked=chunked)
        long_bounds = self._bounds(rows, alone, rounding)
        # The log-probs are in the order of the sequences in the batch below.
        truth = torch.cat([whole[:before], alone, whole[before:]])
        bounds = torch.cat([bounds[:before], long_bounds, bounds[before:]])
        batch = make_batch([*tokens[:BEFORE], *long, *tokens[BEFORE:]], self._ranks.device, experts)

        def compare(row: PackedRow, implementation: Attention) -> Distance:
            return self._distance(self._score([row], implementation, chunked=chunked), truth, bounds)

        results: dict[Attention, Distance] = {}
        ways, group = self._ways_to_try(warnings), self._policy.row_group
        if group is not None:
            # Ranks can share rows under our own attention alone.
            ways = [way for way in ways if way in ("varlen", OURS)]
        for implementation in ways:
            results[implementation] = result = compare(batch.packed, implementation)
            if not result.agrees:
                continue
            if implementation != ways[0]:
                warnings.append(slower_packing(implementation, f"{results[ways[0]]} {self._where}"))
            shared = choice.shared and implementation in ("varlen", OURS)
            if shared and not (shared_result := compare(batch.shared, implementation)).agrees:
                shared = False
                warnings.append(no_sharing(f"{shared_result} {self._where}"))
            return Scoring(True, implementation, chunked, warnings, shared)
        if group is not None:
            raise cannot_share(group.size, f"{results[OURS]} {self._where}")
        closest = min(results.values(), key=lambda result: result.ratio)
        warnings.append(no_packing(self._config.learner, f"{closest} {self._where}"))
        return Scoring(False, choice.single, chunked, warnings)

    def _bounds(self, rows: Sequence[PackedRow], scores: Tensor, rounding: float) -> Tensor:
        """Return the bound of each position of ``rows``, nats; the policy still scores as it did for ``scores``."""
        if not self._is_float32:
            return torch.full_like(scores, ROUNDINGS * max(rounding, torch.finfo(torch.float32).eps))
        self._ranks.note_progress()
        return measure_rounding(self._policy, rows, scores, self._dtype)

    def _ways_to_try(self, warnings: list[str]) -> list[Attention]:
        """Return the attention to try for several sequences a row, fastest first.

        VARLEN comes first if it works on the devices of all ranks; else a warning is added. If PACKED does not agree,
        or the device is not CUDA, VARLEN is left out without a warning: it supports less.
        """
        ways, device = self._choice.packed, self._ranks.device
        if "packed" not in ways or device.type != attention.DEVICE:
            return ways
        heads, problem = None, None
        try:
            heads = head_shape(self._policy.model.config.get_text_config())
        except Exception as error:
            # The configuration's class may be code of the model, which raises errors of any type.
            problem = f"the heads of its layers are not known: {type(error).__name__}: {error}"
        problems = self._ranks.agree(problem, "the check of attention in one kernel")
        if heads is not None and not problems:
            problem, texts = choose_kernel(
                device,
                self._dtype,
                heads,
                windowed=self._window is not None,
                agree=self._ranks.agree,
                is_policy=self._is_trained,
            )
            problems = [problem] if problem is not None else []
            warnings += texts
        if problems:
            warnings.append(f"attention over packed rows takes a kernel for each sequence: {problems[0]}")
            return ways
        return ["varlen", *ways]

    def _measure_rounding(self, whole: Tensor, path: str) -> float:
        """Return the root mean square of the distance from the first part's log-probs, nats.

        Raises ConfigError if it is above OTHER_MODEL.
        """
        loaded = torch.tensor(self._choice.truth, device=whole.device)
        rounding = self._worst_of_ranks(float((whole - loaded).square().mean().sqrt()))
        if not rounding <= OTHER_MODEL:
            finding = (
                f"log-probs {self._where} over {self._ranks.world_size} ranks are {rounding:.2g} nats from those loaded"
            )
            raise ConfigError([f"model.path: {path}: its {finding}; no rounding explains that"])
        return rounding

    def _score(self, rows: list[Any], implementation: Attention, *, chunked: bool) -> Tensor:
        # ``apply`` does not read ``packed``: the rows are given.
        Scoring(packed=False, attention=implementation, chunked=chunked).apply(self._policy)
        self._ranks.note_progress()
        return score_rows(self._policy, rows)

    def _distance(self, scores: Tensor, truth: Tensor, bounds: Tensor) -> Distance:
        """Return the distance from the truth: of a position in float32, else of a stretch.

        The ratio is the worst of all ranks, the difference in nats that of this rank.
        """
        result = distance(scores, truth, bounds)
        if not self._is_float32:
            squares = ((scores - truth) / bounds).double().square()
            stretches = squares.tensor_split(max(1, len(squares) // STRETCH))
            result = Distance(result.nats, float(torch.stack([stretch.mean() for stretch in stretches]).max().sqrt()))
        return Distance(result.nats, self._worst_of_ranks(result.ratio))

    def _worst_of_ranks(self, value: float) -> float:
        """Largest ``value`` of all ranks; infinity if one is not finite."""
        values = self._ranks.all_gather([value], "the check at start")[:, 0].tolist()
        return max(each if math.isfinite(each) else math.inf for each in values)
