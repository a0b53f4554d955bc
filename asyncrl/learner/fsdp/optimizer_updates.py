"""A rank's part of a step: scoring passes, then updates of the weights.

    score     log-probs without a gradient: of the reference and the teacher if the objective needs them; of the policy
              before its first update (the "proximal" policy) if the step has several updates
    update    forward and backward of each micro-batch: first the policy's, then the supervised ones, which are
              conversations of ``[sft]``; one exchange of sums among the ranks; one step of the optimizer

If rewards need the reference, ``refer`` scores with it before the step is planned.

Invariants: except for ``learner.balance``, the gradient does not depend on how the batch was cut. The denominator is
that of the whole update, over all ranks. Each local loss is multiplied by the world size, since FSDP takes the mean of
gradients. Ranks that share a row compute the loss of the whole row, and each has a part of its gradient
(packed_row.py). From the sums every rank computes the same loss, gradient norm and metrics, and so takes or refuses the
same update. An update is refused if a loss or the gradient norm is not finite. A refused update changes nothing, and
the step ends; earlier updates stay.

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
from asyncrl.learner.algorithm.losses import Objective, TokenBatch, TokenSums, supervised, token_sums
from asyncrl.learner.algorithm.packing import MicroBatch
from asyncrl.learner.algorithm.token_scores import recorded_targets
from asyncrl.learner.fsdp.model.lora import WithoutAdapters
from asyncrl.learner.fsdp.model.optimizers import Optimizer
from asyncrl.learner.fsdp.model.packed_row import PackedRow, make_row_sets
from asyncrl.learner.fsdp.model.policy import Policy, local, make_row
from asyncrl.learner.fsdp.ranks.ranks import OptimizerUpdateShape, Ranks, TermShape

SUPERVISED_LOSS = "supervised loss"
SUPERVISED_TEMPERATURE = 1.0
"""Divisor of the logits in the supervised loss."""


@dataclass(frozen=True, slots=True)
class RefusedUpdate:
    """An update that was not taken because a number was not finite."""

    what: str
    """Name of the number that is not finite: the loss, SUPERVISED_LOSS, or the gradient norm."""
    update: int
    """Index of the update in the step, from 0."""
    sequences: list[int]
    """Sequences with a log-prob or an advantage that is not finite: ascending indices into the update, or into its
    supervised term. If the list is empty, any sequence of the update may be the cause."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Metrics of the updates that were taken (``_combine``), and the update that was refused, if any."""

    metrics: dict[str, float]
    refused: RefusedUpdate | None
    scores: np.ndarray
    """Log-probs and entropies of this rank's recorded targets (token_scores.py) in the taken updates, in order:
    float32 [2, M], nats."""


@dataclass(frozen=True, slots=True)
class _Scored:
    """Log-probs of a micro-batch by each model, without a gradient: float32 [N], nats; None if the step needs none."""

    proximal: Tensor | None
    reference: Tensor | None
    teacher: Tensor | None


Scorer = Policy | WithoutAdapters
"""A model that scores rows."""


@dataclass(frozen=True, slots=True)
class Scorers:
    """The frozen models, each None if neither the objective nor the rewards need it, or if a server is the teacher."""

    reference: Scorer | None = None
    teacher: Scorer | None = None


class OptimizerUpdates:
    """Takes the steps of one rank; all ranks call each method together."""

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
        """The trained parameters."""
        policy.entropy_gradient = self._objective.needs_entropy_gradient

    def step(
        self,
        step: str,
        shapes: Sequence[OptimizerUpdateShape],
        batches: Sequence[MicroBatch],
        *,
        temperature: float,
        fresh: bool,
        rate: float,
    ) -> StepResult:
        """Take one step: score what the updates need, then take each update until one is refused.

        ``step`` names the step in errors. ``batches`` are this rank's micro-batches, update by update, as ``shapes``
        counts them. ``fresh``: whether the newest published weights are the ones that are trained; the metrics then
        compare the engines' log-probs with the policy's. ``rate`` is the learning rate.
        """
        rows = [self._row(batch) for batch in batches]
        policy_parts, supervised_parts = _split_batches(shapes)
        scored = self._score([rows[i] for part in policy_parts for i in part], temperature, several=len(shapes) > 1)
        # ``scored`` has the policy's micro-batches alone, in the order in which the updates take them.
        metrics: list[dict[str, float]] = []
        scores = [np.empty((2, 0), np.float32)]
        for number, shape in enumerate(shapes):
            outcome = self._update(
                step,
                shape,
                [(batches[i], rows[i], scored.pop(0)) for i in policy_parts[number]],
                [(batches[i], rows[i]) for i in supervised_parts[number]],
                rate=rate,
                temperature=temperature,
                # After the first update the weights are no longer the published ones.
                fresh=fresh and not number,
                is_first=not number,
            )
            if isinstance(outcome, _Taken):
                metrics.append(outcome.metrics)
                scores.append(outcome.scores)
            else:
                what, sequences = outcome
                refused = RefusedUpdate(what, number, sequences)
                return StepResult(_combine(metrics), refused, np.concatenate(scores, axis=1))
        return StepResult(_combine(metrics), None, np.concatenate(scores, axis=1))

    def refer(self, batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        """Score micro-batches with the reference alone. Returns float32 [N] for each of them, log-probs in nats."""
        assert self._scorers.reference is not None
        with torch.no_grad(), self._ranks.waiting("scoring by the reference"):
            scorer = self._scorers.reference
            logprobs = [self._score_row(scorer, self._row(batch), temperature) for batch in batches]
        self._reshard_frozen(scorer)
        # The reference may have scored with the weights of the policy.
        self._policy.reshard()
        return logprobs

    def _row(self, batch: MicroBatch) -> PackedRow:
        """Put a micro-batch on the device as a packed row, with its routes if it has any."""
        device = self._ranks.device
        experts, routes = self._policy.routers.experts, None
        if experts is not None and len(batch.routes):
            routes = batch.routes.reshape(len(batch.input_ids), experts.layers, experts.chosen)
        return make_row(
            batch.input_ids,
            batch.lengths,
            batch.predict,
            batch.targets,
            device,
            prefixes=batch.prefixes,
            sets=make_row_sets(batch.set_ids, batch.set_sizes, device),
            routes=routes,
        )

    def _score(self, rows: Sequence[PackedRow], temperature: float, *, several: bool) -> list[_Scored]:
        """Score rows with each model that the step needs; ``several``: whether it has more than one update."""

        def score_by(scorer: Scorer | None, name: str) -> list[Tensor | None]:
            if scorer is None:
                return [None] * len(rows)
            with torch.no_grad(), self._ranks.waiting(name):
                self._on_phase(name)
                logprobs = [self._score_row(scorer, row, temperature) for row in rows]
            self._reshard_frozen(scorer)
            return list(logprobs)

        proximal = score_by(self._policy if several else None, "scoring by the proximal policy")
        reference_scorer = self._scorers.reference if self._objective.needs_reference else None
        reference = score_by(reference_scorer, "scoring by the reference")
        teacher = score_by(self._scorers.teacher, "scoring by the teacher")
        return [_Scored(*each) for each in zip(proximal, reference, teacher, strict=True)]

    def _score_row(self, scorer: Scorer, row: PackedRow, temperature: float) -> Tensor:
        logprobs = scorer.score(row, temperature)[0]
        self._ranks.note_progress()
        return logprobs

    def _reshard_frozen(self, scorer: Scorer) -> None:
        """Reshard a frozen model: no backward pass follows, and the policy needs the memory.

        The policy itself stays as it is, also where it scores without its adapters.
        """
        if isinstance(scorer, Policy) and scorer is not self._policy:
            scorer.reshard()

    def _update(
        self,
        name: str,
        shape: OptimizerUpdateShape,
        members: Sequence[tuple[MicroBatch, PackedRow, _Scored]],
        supervised_members: Sequence[tuple[MicroBatch, PackedRow]],
        *,
        rate: float,
        temperature: float,
        fresh: bool,
        is_first: bool,
    ) -> _Taken | tuple[str, list[int]]:
        """Compute the gradient of one update, exchange the sums, and step the optimizer unless the update is refused.

        Before the step the gradient is clipped to ``learner.max_grad_norm``. ``members`` are this rank's micro-batches
        of the policy, ``supervised_members`` the supervised ones; a warm step has no ``members``. For a refused update
        it returns ``what`` and ``sequences`` of its RefusedUpdate. ``is_first``: no update of this step came before, so
        the current policy is the proximal one.
        """
        self._on_phase("forward and backward")
        # This resets the count of differing experts: scoring passes before the update do not count.
        self._policy.routers.take_differing()
        with self._ranks.waiting(name):
            results = [
                self._accumulate(*member, shape.policy, temperature=temperature, fresh=fresh, is_first=is_first)
                for member in members
            ]
            supervised_results = [self._accumulate_supervised(*member, shape) for member in supervised_members]
            # All ranks have the same names: each has the same number of micro-batches, some of them empty fillers.
            names = list(results[0].named) if results else []
            named = [_sum([result.named[each] for result in results]) for each in names]
            gradients = [local(p.grad) for p in self._parameters if p.grad is not None]
            square = torch.nn.utils.get_total_norm(gradients).double().square()
            own_sums = _totals([result.statistics.tolist() for result in results])
            self._on_phase("sums of all ranks")
            losses = [_sum([result.loss for result in part]) for part in (results, supervised_results)]
            # Columns of ``of_ranks``: policy's loss, supervised loss, square of the norm, experts that the routers
            # would not choose, all experts of the routes, named sums, token sums.
            values = [
                *losses,
                float(square),
                *self._policy.routers.take_differing(),
                *named,
                *(getattr(own_sums, item.name) for item in fields(own_sums)),
            ]
            of_ranks = self._ranks.all_gather(values, f"the sums of {name}")
        # The first five columns come before the named sums.
        first_named = 5
        # Each rank counts the routes of its own tokens, also if it shares rows.
        routed = of_ranks[:, 3:5].sum(axis=0)
        scores = _recorded_scores([batch for batch, *_ in members], results, shape.recorded)
        # Ranks that share rows have the same losses and token sums, so only the first of them counts.
        squares, of_ranks = of_ranks[: self._ranks.shards, 2], of_ranks[:: self._config.context_parallel]
        totals = _totals(of_ranks[:, first_named + len(names) :].tolist())
        self._on_phase("optimizer")
        # The norm is that of the first replica alone: all replicas have the same gradient.
        loss, nll, norm = (
            math.fsum(of_ranks[:, 0]),
            math.fsum(of_ranks[:, 1]),
            math.sqrt(math.fsum(squares)),
        )
        try:
            if not math.isfinite(loss):
                batches, logprobs = [batch for batch, *_ in members], [result.logprobs for result in results]
                return "loss", self._find_not_finite(shape.policy, batches, logprobs)
            if not math.isfinite(nll):
                assert shape.supervised is not None
                batches = [batch for batch, _ in supervised_members]
                logprobs = [result.logprobs for result in supervised_results]
                return SUPERVISED_LOSS, self._find_not_finite(shape.supervised, batches, logprobs)
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
        metrics = {"policy/grad_norm": norm, "learner/lr": rate}
        if routed[1]:
            metrics["policy/routes_differ"] = float(routed[0] / routed[1])
        if members:
            metrics = {"loss/policy": loss} | metrics | totals.metrics()
            for at, each in enumerate(names, start=first_named):
                metrics[f"loss/{each}"] = math.fsum(of_ranks[:, at]) / max(1.0, totals.count)
        if shape.supervised is not None:
            metrics["loss/sft"] = nll
        return _Taken(metrics, scores)

    def _accumulate(
        self,
        batch: MicroBatch,
        row: PackedRow,
        scored: _Scored,
        shape: TermShape,
        *,
        temperature: float,
        fresh: bool,
        is_first: bool,
    ) -> _Accumulated:
        """Add the gradient of the policy's loss on one micro-batch."""
        logprobs, entropies = self._policy.score(row, temperature)
        tokens = self._token_batch(batch, scored, logprobs, entropies, is_first=is_first)
        loss, named = self._objective(tokens, shape.denominator)
        total = loss * self._ranks.world_size
        named = dict(named)
        if self._config.balance:
            # A filler (sequence -1) counts 0 but keeps the graph, so that all ranks meet in the same layers.
            is_row = float(batch.sequences[0] >= 0)
            balance = self._policy.balance_loss(row) * is_row
            # FSDP divides by all ranks, and those that share a row have one loss together.
            total = total + balance * (self._config.balance * self._config.context_parallel / shape.micro_batches)
            # Times its tokens, since the sums of all micro-batches are divided by the number of tokens.
            named["balance"] = balance.detach() * len(batch.predict)
        torch.autograd.backward(total)
        self._ranks.note_progress()
        statistics = token_sums(tokens, fresh=fresh, cap=self._config.tis_cap)
        return _Accumulated(loss.detach(), statistics, named, logprobs.detach(), entropies.detach())

    def _accumulate_supervised(self, batch: MicroBatch, row: PackedRow, shape: OptimizerUpdateShape) -> _Accumulated:
        """Add the gradient of the supervised loss on one micro-batch; the returned loss lacks the coefficient."""
        assert shape.supervised is not None
        logprobs, _ = self._policy.score(row, SUPERVISED_TEMPERATURE)
        weights = torch.from_numpy(batch.weights).to(self._ranks.device)
        loss = (weights * supervised(logprobs)).sum() / shape.supervised.denominator
        torch.autograd.backward(loss * (shape.coefficient * self._ranks.world_size))
        self._ranks.note_progress()
        return _Accumulated(loss.detach(), torch.empty(0), {}, logprobs.detach(), torch.empty(0))

    def _token_batch(
        self, batch: MicroBatch, scored: _Scored, logprobs: Tensor, entropies: Tensor, *, is_first: bool
    ) -> TokenBatch:
        """Put what the loss needs of a micro-batch on the device; in the first update the policy itself is proximal.

        The teacher's log-probs are those of the frozen model in ``scored``, else those of a server in ``batch``.
        """

        def put(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(self._ranks.device)

        return TokenBatch(
            logprobs=logprobs,
            entropies=entropies,
            behaviour=put(batch.behaviour),
            proximal=logprobs.detach() if is_first or scored.proximal is None else scored.proximal,
            advantages=put(batch.advantages),
            weights=put(batch.weights),
            segments=put(batch.segments).long(),
            sequences=len(batch.sequences),
            staleness=put(batch.staleness),
            reference=scored.reference,
            teacher=put(batch.teacher) if scored.teacher is None and len(batch.teacher) else scored.teacher,
        )

    def _find_not_finite(
        self, shape: TermShape, batches: Sequence[MicroBatch], logprobs: Sequence[Tensor]
    ) -> list[int]:
        """All ranks together: find the sequences that make the loss not finite. Returns indices, ascending.

        These are the sequences with a log-prob, of the policy or the engine, or an advantage that is not finite. The
        result is empty if the loss is not finite for another reason.
        """
        flags = np.zeros(shape.sequences)
        for batch, values in zip(batches, logprobs, strict=True):
            # This expression is finite only if all three values are.
            bad = ~np.isfinite(values.cpu().numpy() - batch.behaviour + batch.advantages)
            indices = batch.sequences[batch.segments[bad]]
            flags[indices[indices >= 0]] = 1.0
        everyone = self._ranks.all_gather(flags.tolist(), "the search for what is not finite")
        return [int(i) for i in np.flatnonzero(everyone.any(axis=0))]


@dataclass(frozen=True, slots=True)
class _Accumulated:
    """Results of a micro-batch whose gradient has been added."""

    loss: Tensor
    statistics: Tensor
    """The fields of TokenSums, in order."""
    named: dict[str, Tensor]
    """Further sums that the objective reports, by name."""
    logprobs: Tensor
    entropies: Tensor


@dataclass(frozen=True, slots=True)
class _Taken:
    """An update that was taken: its metrics, and the scores of its recorded targets as in StepResult."""

    metrics: dict[str, float]
    scores: np.ndarray


def _recorded_scores(batches: Sequence[MicroBatch], results: Sequence[_Accumulated], recorded: int) -> np.ndarray:
    """Copy the log-probs and entropies of the first ``recorded`` sequences from the device: float32 [2, M]."""
    chosen = [at for at, batch in enumerate(batches) if ((batch.sequences >= 0) & (batch.sequences < recorded)).any()]
    if not chosen:
        return np.empty((2, 0), np.float32)
    columns = [results[at].logprobs for at in chosen], [results[at].entropies for at in chosen]
    # One copy, after the exchange of sums has waited for the device anyway.
    values: np.ndarray = torch.stack([torch.cat(column) for column in columns]).cpu().numpy()
    return values[:, recorded_targets([batches[at] for at in chosen], recorded)[0]]


def _split_batches(shapes: Sequence[OptimizerUpdateShape]) -> tuple[list[range], list[range]]:
    """Split a rank's micro-batches: for each update the indices of the policy's, and those of the supervised ones."""
    policy_parts, supervised_parts, start = [], [], 0
    for shape in shapes:
        supervised_start = start + shape.policy.micro_batches
        policy_parts.append(range(start, supervised_start))
        start += shape.micro_batches
        supervised_parts.append(range(supervised_start, start))
    return policy_parts, supervised_parts


def _sum(values: Sequence[Tensor]) -> float:
    """Add numbers in float64; 0 without any."""
    return float(torch.stack(list(values)).double().sum()) if values else 0.0


def _totals(rows: list[list[float]]) -> TokenSums:
    """Add up rows that each hold the fields of a TokenSums, in order."""
    totals = TokenSums()
    for row in rows:
        totals.add(TokenSums(*row))
    return totals


def _combine(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Combine the metrics of a step's updates: the mean of each, but the sum of counts and the maximum of maxima."""
    if len(updates) <= 1:
        return dict(*updates)
    combined = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        if name == "policy/engine_kl_tokens":
            combined[name] = math.fsum(values)
        elif name == "policy/ratio_max":
            combined[name] = max(values)
        else:
            combined[name] = math.fsum(values) / len(values)
    return combined
