"""The Document, made from snapshots: here and in views.py figures are given their meaning. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from asyncrl.snapshot import ENDING, OVER, ActorView, Resource, Snapshot
from asyncrl.telemetry.metrics_line import is_eval_mean, number_in, served_versions, without_first
from asyncrl.telemetry.snapshots.rates import Interval, Shares, mean, time_mean, total
from asyncrl.top.figures.document import LearningView, PhaseRow, RankRow, RollouterRow, RunRow
from asyncrl.top.source.history import GONE, History, Levels, level_of, living_in, served_version, versions_behind

STEPS_FOR_MEANS = 8
UNHEARD = GONE | {"silent", "condemned"}
"""Conditions in which nothing is known of what an actor does now."""


class Facts:
    """A snapshot with its past. The last words of an actor that is gone are no fact, but its counts are."""

    def __init__(self, snapshot: Snapshot, history: History) -> None:
        steps = history.steps()
        self.snapshot, self.run = snapshot, snapshot.run
        self.recent = history.recent()
        """Interval for rates."""
        self.steps = steps or Interval(None, snapshot)
        """Interval for shares."""
        self.window_s = 0.0 if steps is None else steps.seconds
        self.stepping_s = history.stepping_s()
        """Seconds of ``window`` in which the present learner has trained steps."""
        self.window = [moment.levels for moment in history.window()]
        """Levels over the time that shares are taken over, oldest first."""
        self.by_role: dict[str, list[ActorView]] = {}
        for actor in snapshot.actors:
            self.by_role.setdefault(actor.name.partition("/")[0], []).append(actor)
        self.last: Mapping[str, Any] = snapshot.train[-1] if snapshot.train else {}
        """Line of the newest step; empty before the first."""

    def condition(self, actor: ActorView) -> str:
        """Condition in the snapshot; ended, and not dead, where that is as it should be."""
        return "ended" if actor.condition == "dead" and self.run.phase in ENDING else actor.condition

    def of(self, role: str) -> list[ActorView]:
        """All actors of a role."""
        return self.by_role.get(role, [])

    def living(self, role: str) -> list[ActorView]:
        """Actors of a role that are not gone."""
        return living_in(self.snapshot, role)

    def level(self, role: str, figure: str) -> float | None:
        """A gauge, added up over the actors of a role that are not gone."""
        return level_of(self.living(role), figure)

    def over_window(self, level: Callable[[Levels], float | None]) -> float | None:
        """The mean of a level over the time that shares are taken over."""
        return time_mean([(each.wall, level(each)) for each in self.window])

    def counted(self, role: str, figure: str) -> float | None:
        """A counter, added up over the actors of a role."""
        return total(actor.figures.get(figure) for actor in self.of(role))

    def rate(self, role: str, figure: str) -> float | None:
        """Increase of a counter a second, added up over the actors of a role."""
        return total(self.rate_of(actor, figure) for actor in self.of(role))

    def rate_of(self, actor: ActorView, figure: str) -> float | None:
        """Increase of one actor's counter a second; None where the actor is not heard of."""
        return None if actor.condition in UNHEARD else self.recent.rate(actor, figure)

    def states(self, role: str) -> Shares:
        """Shares of the time of all resources of a role, by state."""
        return self.shares(self.of(role))

    def shares(self, actors: Iterable[ActorView]) -> Shares:
        """Shares of the time of all resources of actors that are heard of, by state."""
        pairs: list[tuple[ActorView, Resource]] = [
            (actor, resource) for actor in actors if actor.condition not in UNHEARD for resource in actor.resources
        ]
        return self.steps.shares(pairs)

    def step_mean(self, key: str) -> float | None:
        """The mean over the newest steps. None before the second of a learner."""
        return mean(number_in(line, key) for line in without_first(self.snapshot.train)[-STEPS_FOR_MEANS:])

    def ledger_figure(self, name: str) -> float | None:
        """A figure that the learner tells now, or told with its last step."""
        told = total(actor.figures.get(name) for actor in self.of("learner")[:1])
        return number_in(self.last, name) if told is None else told

    def buffered(self) -> float | None:
        """Groups in the learner's buffer."""
        told = total(actor.figures.get("buffer/groups") for actor in self.living("learner")[:1])
        return told if told is not None or self.run.phase in OVER else number_in(self.last, "buffer/groups")


REWARDS = 40
PHASES = (
    ("time/wait_for_groups_s", "wait"),
    ("time/train_s", "train"),
    ("time/publish_s", "publish"),
    ("time/step_s", "step"),
)


LEARNING = {
    "loss": "loss/policy",
    "grad_norm": "policy/grad_norm",
    "entropy": "policy/entropy",
    "kl": "policy/behaviour_kl",
    "engine_kl": "policy/engine_kl",
    "lr": "learner/lr",
    "reward": "reward/mean",
    "reward_std": "reward/std",
}
"""Keys of a line of metrics by field of LearningView."""


def run_row(facts: Facts, rollouters: Sequence[RollouterRow]) -> RunRow:
    """Row of the run: its state, and its rates."""
    run, train = facts.run, facts.snapshot.train
    step_s = facts.step_mean("time/step_s")
    left = run.steps - run.step
    goes_on = run.phase == "running" and not run.stalled and left > 0
    eta_s = left * step_s if step_s is not None and goes_on else None
    evals = {
        key.removeprefix("eval/").removesuffix("/mean"): (value, served_versions(line))
        for line in facts.snapshot.evals
        for key in filter(is_eval_mean, line)
        if (value := number_in(line, key)) is not None
    }
    rewards = [value for line in train[-REWARDS:] if (value := number_in(line, "reward/mean")) is not None]
    return RunRow(
        name=run.name,
        run_id=run.run_id,
        phase=run.phase,
        attempt=run.attempt,
        age_s=run.age_s,
        step=run.step,
        steps=run.steps,
        version=run.version,
        step_s=step_s,
        eta_s=eta_s,
        tokens_per_s=total(row.tokens_per_s for row in rollouters),
        samples_per_s=facts.rate("rollouter", "rollout/trajectories"),
        reward=rewards[-1] if rewards else None,
        rewards=rewards,
        evals={name: value for name, (value, _) in evals.items()},
        eval_versions={name: versions for name, (_, versions) in evals.items() if versions is not None},
        reason=run.reason,
        exit_code=run.exit_code,
        waiting_for=run.waiting_for,
        lost_hosts=run.lost_hosts,
        down=_down(facts),
        aside=run.aside,
        stalled=run.stalled,
        disk_free_bytes=run.disk_free_bytes or None,
    )


def _down(facts: Facts) -> list[str]:
    """Actors that are dead, silent or not ready again, or whose engine is not. A stalled run says who matters."""
    if facts.run.phase != "running" or facts.run.stalled:
        return []
    found = []
    for actor in facts.snapshot.actors:
        if actor.condition in ("dead", "condemned", "silent"):
            found.append(f"{actor.name} ({actor.condition})")
        elif actor.condition == "starting" and actor.restarts:
            found.append(f"{actor.name} (starting again)")
        elif actor.condition == "ready" and any(resource.state == "restarting" for resource in actor.resources):
            found.append(f"{actor.name} (engine restarting)")
    return found


def learning(facts: Facts) -> LearningView:
    """Figures of the newest step."""
    last = facts.last
    return LearningView(
        step=last.get("step"),
        **{name: number_in(last, key) for name, key in LEARNING.items()},
    )


def phases(facts: Facts) -> list[PhaseRow]:
    """Phases of a step, in the mean."""
    found = ((name, facts.step_mean(key)) for key, name in PHASES)
    return [PhaseRow(name=name, seconds=seconds) for name, seconds in found if seconds is not None]


def rollouter(facts: Facts, actor: ActorView) -> RollouterRow:
    """A rollouter and its engine."""
    figures, gone = actor.figures, actor.condition in GONE
    in_flight = None if gone else figures.get("rollout/in_flight")
    version = served_version(actor)
    state, awaiting, state_s = _present(actor)
    return RollouterRow(
        name=actor.name,
        host=actor.host,
        condition=facts.condition(actor),
        state="" if gone else state,
        awaiting="" if gone else awaiting,
        state_s=0.0 if gone else state_s,
        states=facts.shares([actor]),
        in_flight=in_flight,
        waiting=None if gone else figures.get("rollout/waiting"),
        concurrency=None if gone else figures.get("rollout/concurrency"),
        tokens_per_s=facts.rate_of(actor, "rollout/sampled_tokens"),
        kv_use=None if gone else figures.get("rollout/kv_use"),
        version=None if gone else version,
        lag=None if gone else versions_behind(facts.run, actor),
        restarts=actor.restarts + int(figures.get("rollout/engine_restarts", 0)),
        oldest_s=figures.get("rollout/oldest_s") if in_flight else None,
        stall_s=None if gone else figures.get("weights/stall_s"),
        drift=None if gone else figures.get("rollout/drift"),
        drift_largest=figures.get("rollout/drift_largest"),
        drift_warnings=int(figures.get("rollout/drift_warnings", 0)),
    )


def rank(facts: Facts, actor: ActorView) -> RankRow:
    """A rank of the learner."""
    gone = actor.condition in GONE
    state, awaiting, state_s = _present(actor)
    return RankRow(
        name=actor.name,
        host=actor.host,
        condition=facts.condition(actor),
        state="" if gone else state,
        awaiting="" if gone else awaiting,
        state_s=0.0 if gone else state_s,
        states=facts.shares([actor]),
        tokens_per_s=facts.rate_of(actor, "learner/tokens"),
        # A step is of all ranks, and so is its share of the peak.
        mfu=None if gone else number_in(facts.last, "perf/mfu"),
        rss_bytes=None if gone else actor.rss_bytes or None,
        gpu_bytes=sum(gpu.memory_bytes for gpu in actor.gpus) if actor.gpus and not gone else None,
        gpu_total_bytes=sum(gpu.memory_total_bytes for gpu in actor.gpus) if actor.gpus and not gone else None,
    )


def _present(actor: ActorView) -> tuple[str, str, float]:
    """State, whom it waits for, and seconds since it was entered: of an actor's serial resource, or its own."""
    for resource in actor.resources[:1]:
        return resource.state, resource.awaiting, resource.state_s
    return actor.state, actor.awaiting, actor.state_s
