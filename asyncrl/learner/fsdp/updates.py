"""A rank's part of a step: scoring passes, then updates of the weights.

    score     log-probs without a gradient: by the reference and the teacher where the objective asks for them, and by
              the weights as they are, the proximal policy, where more than one update follows; by the reference also
              before the step is planned, where the rewards need it
    update    forward and backward of each micro-batch, those of the conversations of ``[sft]`` after those of
              the policy; one exchange of sums among the ranks; the optimizer

It keeps: the gradient does not depend on how the batch was cut, since the denominator is the update's over all ranks
and local losses are multiplied by the world size against FSDP's mean; from the sums every rank computes the same loss,
gradient norm and metrics, and takes or refuses the same update; a refused update changes nothing, and no other follows
it.

Fails with ConfigError when the user's loss raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from asyncrl.config.training import LearnerConfig
from asyncrl.learner.algorithm.losses import TokenBatch, supervised
from asyncrl.learner.algorithm.objective import Objective, TokenSums, token_sums
from asyncrl.learner.algorithm.packing import MicroBatch
from asyncrl.learner.fsdp.model.lora import WithoutAdapters
from asyncrl.learner.fsdp.model.optimizers import Optimizer
from asyncrl.learner.fsdp.model.policy import PackedRow, Policy, local, make_row
from asyncrl.learner.fsdp.ranks.ranks import Ranks, TermShape, UpdateShape

SUPERVISED_LOSS = "supervised loss"
SUPERVISED_TEMPERATURE = 1.0


@dataclass(frozen=True, slots=True)
class RefusedUpdate:
    """An update that was not taken."""

    what: str
    """Name of the number that is not finite: the loss, SUPERVISED_LOSS, or the gradient norm."""
    update: int
    """Number of the update in the step, counted from 0."""
    sequences: list[int]
    """Sequences of the update, or of its supervised term, with a loss that is not finite, ascending; none where only
    the gradient was."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Metrics of the updates that were taken, and the update that was not."""

    metrics: dict[str, float]
    refused: RefusedUpdate | None


@dataclass(frozen=True, slots=True)
class _Scored:
    """Log-probs of a micro-batch without a gradient, float32 [N] each; None where the step needs none."""

    proximal: Tensor | None
    reference: Tensor | None
    teacher: Tensor | None


Scorer = Policy | WithoutAdapters
"""A model that scores rows."""


@dataclass(frozen=True, slots=True)
class Scorers:
    """Frozen models, where the objective asks for them."""

    reference: Scorer | None = None
    teacher: Scorer | None = None


class Updates:
    """A rank's part of every step."""

    def __init__(
        self,
        policy: Policy,
        scorers: Scorers,
        optimizer: Optimizer,
        ranks: Ranks,
        objective: Objective,
        config: LearnerConfig,
        on_phase: Callable[[str], None],
    ) -> None:
        self._policy, self._scorers, self._optimizer, self._ranks = policy, scorers, optimizer, ranks
        self._config, self._on_phase = config, on_phase
        self._objective = objective
        self._parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        policy.entropy_gradient = self._objective.needs_entropy_gradient

    def step(
        self,
        step: str,
        shapes: Sequence[UpdateShape],
        batches: Sequence[MicroBatch],
        *,
        temperature: float,
        fresh: bool,
        rate: float,
    ) -> StepResult:
        """Take a step, named for errors: this rank's micro-batches, one update's after the other's."""
        rows = [self._row(batch) for batch in batches]
        mine, taught = _parts(shapes)
        scored = self._score([rows[i] for part in mine for i in part], temperature, several=len(shapes) > 1)
        metrics: list[dict[str, float]] = []
        for number, shape in enumerate(shapes):
            found = self._update(
                step,
                shape,
                [(batches[i], rows[i], scored.pop(0)) for i in mine[number]],
                [(batches[i], rows[i]) for i in taught[number]],
                rate=rate,
                temperature=temperature,
                fresh=fresh and not number,
                first=not number,
            )
            if isinstance(found, dict):
                metrics.append(found)
            else:
                what, sequences = found
                return StepResult(_mean(metrics), RefusedUpdate(what, number, sequences))
        return StepResult(_mean(metrics), None)

    def refer(self, batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        """Log-probs by the reference, in a pass of its own: float32 [N] for each micro-batch, nats."""
        assert self._scorers.reference is not None
        with torch.no_grad(), self._ranks.waiting("scoring by the reference"):
            scorer = self._scorers.reference
            found = [self._score_row(scorer, self._row(batch), temperature) for batch in batches]
        self._cut_up(scorer)
        # The reference may have scored with the weights of the policy.
        self._policy.reshard()
        return found

    def _row(self, batch: MicroBatch) -> PackedRow:
        return make_row(
            batch.input_ids, batch.lengths, batch.predict, batch.targets, self._ranks.device, prefixes=batch.prefixes
        )

    def _score(self, rows: Sequence[PackedRow], temperature: float, *, several: bool) -> list[_Scored]:
        def by(scorer: Scorer | None, name: str) -> list[Tensor | None]:
            if scorer is None:
                return [None] * len(rows)
            with torch.no_grad(), self._ranks.waiting(name):
                self._on_phase(name)
                found = [self._score_row(scorer, row, temperature) for row in rows]
            self._cut_up(scorer)
            return list(found)

        proximal = by(self._policy if several else None, "scoring by the proximal policy")
        wanted = self._scorers.reference if self._objective.needs_reference else None
        reference = by(wanted, "scoring by the reference")
        teacher = by(self._scorers.teacher, "scoring by the teacher")
        return [_Scored(*each) for each in zip(proximal, reference, teacher, strict=True)]

    def _score_row(self, scorer: Scorer, row: PackedRow, temperature: float) -> Tensor:
        logprobs = scorer.score(row, temperature)[0]
        self._ranks.mark()
        return logprobs

    def _cut_up(self, scorer: Scorer) -> None:
        """Let a frozen model keep nothing whole: no backward pass of it comes, and the policy needs the room."""
        if isinstance(scorer, Policy) and scorer is not self._policy:
            scorer.reshard()

    def _update(
        self,
        name: str,
        shape: UpdateShape,
        members: Sequence[tuple[MicroBatch, PackedRow, _Scored]],
        taught: Sequence[tuple[MicroBatch, PackedRow]],
        *,
        rate: float,
        temperature: float,
        fresh: bool,
        first: bool,
    ) -> dict[str, float] | tuple[str, list[int]]:
        """Metrics of an update, or the name of the number that was not finite and the sequences with one."""
        self._on_phase("forward and backward")
        with self._ranks.waiting(name):
            done = [
                self._accumulate(*member, shape.policy.denominator, temperature=temperature, fresh=fresh, first=first)
                for member in members
            ]
            said = [self._teach(*member, shape) for member in taught]
            # All ranks have the same names: each has as many micro-batches, fillers among them.
            names = list(done[0].named) if done else []
            named = [_sum([d.named[each] for d in done]) for each in names]
            gradients = [local(p.grad) for p in self._parameters if p.grad is not None]
            square = torch.nn.utils.get_total_norm(gradients).double().square()
            ours = _totals([d.statistics.tolist() for d in done])
            self._on_phase("sums of all ranks")
            losses = [_sum([d.loss for d in done]), _sum([d.loss for d in said])]
            values = [*losses, float(square), *named, *(getattr(ours, item.name) for item in fields(ours))]
            everyone = self._ranks.all_gather(values, f"the sums of {name}")
        totals = _totals(everyone[:, 3 + len(names) :].tolist())
        self._on_phase("optimizer")
        # The norm takes the squares of the first replica alone: all replicas have the same gradient.
        loss, nll, norm = (
            math.fsum(everyone[:, 0]),
            math.fsum(everyone[:, 1]),
            math.sqrt(math.fsum(everyone[: self._ranks.shards, 2])),
        )
        try:
            if not math.isfinite(loss):
                return "loss", self._not_finite(shape.policy, [m[0] for m in members], [d.logprobs for d in done])
            if not math.isfinite(nll):
                assert shape.supervised is not None
                batches, logprobs = [m[0] for m in taught], [d.logprobs for d in said]
                return SUPERVISED_LOSS, self._not_finite(shape.supervised, batches, logprobs)
            if not math.isfinite(norm):
                return "gradient norm", []
            if norm > self._config.max_grad_norm:
                for gradient in gradients:
                    gradient.mul_(self._config.max_grad_norm / norm)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            with self._ranks.waiting(f"the optimizer step of {name}"):
                self._optimizer.step()
        finally:
            # A refused update leaves no gradient to the next one.
            self._optimizer.zero_grad()
        found = {"policy/grad_norm": norm, "learner/lr": rate}
        if members:
            found = {"loss/policy": loss} | found | totals.metrics()
            for at, each in enumerate(names, start=3):
                found[f"loss/{each}"] = math.fsum(everyone[:, at]) / max(1.0, totals.count)
        if shape.supervised is not None:
            found["loss/sft"] = nll
        return found

    def _accumulate(
        self,
        batch: MicroBatch,
        row: PackedRow,
        scored: _Scored,
        denominator: float,
        *,
        temperature: float,
        fresh: bool,
        first: bool,
    ) -> _Accumulated:
        logprobs, entropies = self._policy.score(row, temperature)
        tokens = self._token_batch(batch, scored, logprobs, entropies, first=first)
        loss, named = self._objective(tokens, denominator)
        torch.autograd.backward(loss * self._ranks.world_size)
        self._ranks.mark()
        statistics = token_sums(tokens, fresh=fresh, cap=self._config.tis_cap)
        return _Accumulated(loss.detach(), statistics, dict(named), logprobs.detach())

    def _teach(self, batch: MicroBatch, row: PackedRow, shape: UpdateShape) -> _Accumulated:
        """Add the gradient of a micro-batch of conversations; its loss is a share of the mean, without coefficient."""
        assert shape.supervised is not None
        logprobs, _ = self._policy.score(row, SUPERVISED_TEMPERATURE)
        weights = torch.from_numpy(batch.weights).to(self._ranks.device)
        loss = (weights * supervised(logprobs)).sum() / shape.supervised.denominator
        torch.autograd.backward(loss * (shape.coefficient * self._ranks.world_size))
        self._ranks.mark()
        return _Accumulated(loss.detach(), torch.empty(0), {}, logprobs.detach())

    def _token_batch(
        self, batch: MicroBatch, scored: _Scored, logprobs: Tensor, entropies: Tensor, *, first: bool
    ) -> TokenBatch:
        def put(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(self._ranks.device)

        return TokenBatch(
            logprobs=logprobs,
            entropies=entropies,
            behaviour=put(batch.behaviour),
            proximal=logprobs.detach() if first or scored.proximal is None else scored.proximal,
            advantages=put(batch.advantages),
            weights=put(batch.weights),
            segments=put(batch.segments).long(),
            sequences=len(batch.sequences),
            staleness=put(batch.staleness),
            reference=scored.reference,
            teacher=put(batch.teacher) if scored.teacher is None and len(batch.teacher) else scored.teacher,
        )

    def _not_finite(self, shape: TermShape, batches: Sequence[MicroBatch], logprobs: Sequence[Tensor]) -> list[int]:
        """All ranks together: the sequences of the update with a token whose loss is not finite, ascending."""
        flags = np.zeros(shape.sequences)
        for batch, values in zip(batches, logprobs, strict=True):
            # The sum is finite only where all three are.
            bad = ~np.isfinite(values.cpu().numpy() - batch.behaviour + batch.advantages)
            indices = batch.sequences[batch.segments[bad]]
            flags[indices[indices >= 0]] = 1.0
        everyone = self._ranks.all_gather(flags.tolist(), "the search for what is not finite")
        return [int(i) for i in np.flatnonzero(everyone.any(axis=0))]


@dataclass(frozen=True, slots=True)
class _Accumulated:
    """Loss and sums of a micro-batch, left when its gradient has been added."""

    loss: Tensor
    statistics: Tensor
    """The fields of TokenSums."""
    named: dict[str, Tensor]
    logprobs: Tensor


def _parts(shapes: Sequence[UpdateShape]) -> tuple[list[range], list[range]]:
    """Places of each update's micro-batches of the policy, and of its supervised ones."""
    policy, taught, start = [], [], 0
    for shape in shapes:
        behind = start + shape.policy.micro_batches
        policy.append(range(start, behind))
        start += shape.micro_batches
        taught.append(range(behind, start))
    return policy, taught


def _sum(values: Sequence[Tensor]) -> float:
    return float(torch.stack(list(values)).double().sum()) if values else 0.0


def _totals(rows: list[list[float]]) -> TokenSums:
    totals = TokenSums()
    for row in rows:
        totals.add(TokenSums(*row))
    return totals


def _mean(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of a step: of one update as they are, of several their means, counts added and extremes kept."""
    if len(updates) <= 1:
        return dict(*updates)
    found = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        if name == "policy/engine_kl_tokens":
            found[name] = math.fsum(values)
        elif name == "policy/ratio_max":
            found[name] = max(values)
        else:
            found[name] = math.fsum(values) / len(values)
    return found
