"""The stages of the pipeline, and which of them sets the pace. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from asyncrl.monitor.bottleneck import Flow, Stage, Verdict, by_kind, find_bottleneck
from asyncrl.monitor.rates import Shares, total
from asyncrl.monitor.top.document import LedgerView, RewardView, RollouterRow, StageRow, WeightsView
from asyncrl.monitor.top.levels import GONE, Levels
from asyncrl.monitor.top.model.facts import Facts
from asyncrl.snapshot import OVER

OPEN = 0.5
"""Share of what the gate admits below which nobody waits for the gate."""


def bottleneck(facts: Facts, reward: RewardView, ledger: LedgerView) -> Verdict:
    """The verdict on who waits on whom. Levels are means over the time of the shares: they swing with every step, and
    the verdict is not to."""
    return find_bottleneck(
        Flow(
            running=facts.run.phase == "running" and not facts.run.stalled,
            window_s=facts.stepping_s if facts.steps.seconds else facts.run.age_s,
            rollouters=facts.states("rollouter"),
            reward=reward.states,
            learner=_learner(facts),
            dataloader_busy=facts.over_window(lambda each: each.dataloader_busy),
            generating=facts.over_window(lambda each: each.generating),
            at_reward=facts.over_window(lambda each: each.at_reward),
            lag=facts.over_window(lambda each: each.lag),
            gate_open=_gate_open(facts),
            episodes=_episodes(facts),
            exhausted=facts.run.steps > 0
            and (ledger.outstanding or 0.0) >= (facts.run.steps - facts.run.step) * facts.run.groups_per_step,
        )
    )


def _episodes(facts: Facts) -> dict[str, float]:
    """Open episodes by stage."""
    stages = {stage for each in facts.window for stage in each.episodes}
    return {stage: level for stage in stages if (level := facts.over_window(partial(_at_stage, stage)))}


def _at_stage(stage: str, levels: Levels) -> float | None:
    return levels.episodes.get(stage)


def _learner(facts: Facts) -> Shares:
    """Shares of rank 0: the others follow it."""
    return facts.shares(facts.of("learner")[:1])


def _gate_open(facts: Facts) -> bool | None:
    """Whether there was much room at the gate all the time."""
    filled = [each.gate_filled for each in facts.window]
    known = [share for share in filled if share is not None]
    return max(known) < OPEN if len(known) == len(filled) else None


def stages(
    facts: Facts,
    bottleneck: Verdict,
    rollouters: Sequence[RollouterRow],
    reward: RewardView,
    weights: WeightsView,
    ledger: LedgerView,
) -> list[StageRow]:
    """The pipeline in the order of its flow."""
    marked = {"gate": "dataloader", "episodes": "rollouters"}.get(bottleneck.stage or "", bottleneck.stage)

    def row(stage: Stage, role: str, shares: Mapping[str, float], **figures: Any) -> StageRow:
        actors = facts.of(role)
        return StageRow(
            stage=stage,
            actors=sum(actor.condition not in GONE for actor in actors),
            expected=len(actors),
            resources=sum(len(actor.resources) for actor in actors),
            states=dict(shares),
            kinds=by_kind(shares),
            bottleneck=stage == marked,
            **figures,
        )

    return [
        row(
            "dataloader",
            "dataloader",
            {},
            rate=facts.rate("dataloader", "tickets/granted"),
            unit="groups",
            depth=ledger.outstanding,
            depth_limit=ledger.gate,
            depth_unit="groups",
        ),
        row(
            "rollouters",
            "rollouter",
            facts.states("rollouter"),
            rate=total(each.tokens_per_s for each in rollouters),
            unit="tokens",
            depth=total(each.in_flight for each in rollouters),
            depth_unit="samples",
        ),
        row(
            "reward",
            "reward",
            reward.states,
            rate=reward.rate,
            unit="tasks",
            depth=total((reward.queued, reward.running)),
            depth_unit="tasks",
        ),
        row(
            "learner",
            "learner",
            _learner(facts),
            rate=_trained_per_s(facts),
            unit="groups",
            depth=ledger.buffered,
            depth_limit=float(facts.run.groups_per_step) if facts.run.groups_per_step else None,
            depth_unit="groups",
        ),
        row(
            "weights",
            "parameter_server",
            {},
            rate=facts.rate("parameter_server", "weights/updates_committed"),
            unit="updates",
            depth=weights.behind,
            depth_limit=float(sum(each.lag is not None for each in rollouters)) if weights.behind is not None else None,
            depth_unit="behind",
        ),
    ]


def _trained_per_s(facts: Facts) -> float | None:
    step_s, groups = facts.step_mean("time/step_s"), facts.run.groups_per_step
    return groups / step_s if step_s and groups and facts.run.phase not in OVER else None
