"""The run as a whole, and the phases of its steps. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.monitor.metrics_line import is_eval_mean, number_in, served_versions
from asyncrl.monitor.rates import total
from asyncrl.monitor.top.document import LearningView, PhaseRow, RollouterRow, RunRow
from asyncrl.monitor.top.model.facts import Facts

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
