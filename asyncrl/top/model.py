"""The Document, made of snapshots: here figures are given their meaning. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from asyncrl.snapshot import OVER, ActorView
from asyncrl.telemetry.catalogue import edges_of, quantile
from asyncrl.telemetry.metrics_line import (
    Line,
    component_numbers,
    eval_names,
    eval_numbers,
    is_eval_mean,
    number_in,
    pass_at_numbers,
    served_versions,
)
from asyncrl.telemetry.snapshots.rates import Shares, total
from asyncrl.top.episodes import episodes
from asyncrl.top.facts import Facts
from asyncrl.top.figures.bottleneck import Flow, Stage, Verdict, by_kind, find_bottleneck
from asyncrl.top.figures.document import (
    Document,
    EvalRow,
    LearningView,
    LedgerView,
    PhaseRow,
    RankRow,
    RewardView,
    RollouterRow,
    RunRow,
    StageRow,
    StalenessView,
    UpdateRow,
    WeightsView,
)
from asyncrl.top.source.history import GONE, History, Levels, served_version, versions_behind


def build(history: History) -> Document:
    """Document of the newest snapshot; there must be one."""
    snapshot = history.newest
    assert snapshot is not None
    facts = Facts(snapshot, history)
    rollouters = [rollouter(facts, actor) for actor in facts.of("rollouter")]
    pool, prompts, updates = reward(facts), ledger(facts), weights(facts, rollouters)
    verdict = bottleneck(facts, pool, prompts)
    return Document(
        wall=snapshot.wall,
        window_s=facts.window_s,
        run=run_row(facts, rollouters),
        bottleneck=verdict,
        stages=stages(facts, verdict, rollouters, pool, updates, prompts),
        rollouters=rollouters,
        ranks=[rank(facts, actor) for actor in facts.of("learner")],
        phases=phases(facts),
        learning=learning(facts),
        weights=updates,
        staleness=staleness(facts),
        reward=pool,
        ledger=prompts,
        episodes=episodes(facts),
        events=snapshot.events,
        actors=snapshot.actors,
    )


# --- the run and its learner ---

REWARDS = 40
AS_TOLD = (
    *("name", "run_id", "phase", "attempt", "age_s", "step", "steps", "version", "reason", "exit_code"),
    *("waiting_for", "lost_hosts", "aside", "stalled"),
)
"""Fields of the run that are as in the snapshot."""
PHASES = {
    "wait": "time/wait_for_groups_s",
    "train": "time/train_s",
    "publish": "time/publish_s",
    "step": "time/step_s",
}
"""Keys of a line of metrics by phase."""
LEARNING = {
    "loss": "loss/policy",
    "grad_norm": "policy/grad_norm",
    "entropy": "policy/entropy",
    "kl": "policy/behaviour_kl",
    "engine_kl": "policy/engine_kl",
    "lr": "learner/lr",
    "reward": "reward/mean",
    "reward_std": "reward/std",
    "truncated": "rollout/truncated_fraction",
}
"""Keys of a line of metrics by field of LearningView."""


def run_row(facts: Facts, rollouters: Sequence[RollouterRow]) -> RunRow:
    """Row of the run: its state, and its rates."""
    run = facts.run
    step_s, left = facts.step_mean("time/step_s"), run.steps - run.step
    goes_on = run.phase == "running" and not run.stalled and left > 0
    evals = {
        key.removeprefix("eval/").removesuffix("/mean"): (value, served_versions(line))
        for line in facts.snapshot.evals
        for key in filter(is_eval_mean, line)
        if (value := number_in(line, key)) is not None
    }
    eval_rows = {name: eval_row(eval_numbers(line, name)) for line in facts.snapshot.evals for name in eval_names(line)}
    told = [number_in(line, "reward/mean") for line in facts.snapshot.train[-REWARDS:]]
    rewards = [value for value in told if value is not None]
    return RunRow(
        **{name: getattr(run, name) for name in AS_TOLD},
        step_s=step_s,
        eta_s=left * step_s if step_s is not None and goes_on else None,
        tokens_per_s=total(row.tokens_per_s for row in rollouters),
        samples_per_s=facts.rate("rollouter", "rollout/trajectories"),
        reward=rewards[-1] if rewards else None,
        rewards=rewards,
        evals={name: value for name, (value, _) in evals.items()},
        eval_versions={name: versions for name, (_, versions) in evals.items() if versions is not None},
        eval_rows=eval_rows,
        down=_down(facts),
        disk_free_bytes=run.disk_free_bytes,
    )


def eval_row(numbers: Mapping[str, float]) -> EvalRow:
    """Row of an evaluation with these numbers."""
    return EvalRow(
        pass_at={str(k): value for k, value in pass_at_numbers(numbers).items()},
        components=component_numbers(numbers),
        truncated=numbers.get("truncated_fraction"),
        length_mean=numbers.get("length_mean"),
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
    return LearningView(step=facts.last.get("step"), **_numbers(facts.last, LEARNING))


def phases(facts: Facts) -> list[PhaseRow]:
    """Phases of a step, in the mean."""
    found = {name: facts.step_mean(key) for name, key in PHASES.items()}
    return [PhaseRow(name=name, seconds=seconds) for name, seconds in found.items() if seconds is not None]


def _numbers(line: Line, keys: Mapping[str, str]) -> dict[str, Any]:
    """Numbers of a line of metrics, by the names of its keys."""
    return {name: number_in(line, key) for name, key in keys.items()}


# --- actors ---


def rollouter(facts: Facts, actor: ActorView) -> RollouterRow:
    """A rollouter and its engine."""
    figures, gone = actor.figures, actor.condition in GONE
    now: Mapping[str, float] = {} if gone else figures
    in_flight = now.get("rollout/in_flight")
    return RollouterRow(
        **facts.placed(actor),
        **_state(facts, actor),
        in_flight=in_flight,
        waiting=now.get("rollout/waiting"),
        concurrency=now.get("rollout/concurrency"),
        tokens_per_s=facts.rate_of(actor, "rollout/sampled_tokens"),
        kv_use=now.get("rollout/kv_use"),
        version=None if gone else served_version(actor),
        lag=None if gone else versions_behind(facts.run, actor),
        restarts=actor.restarts + int(figures.get("rollout/engine_restarts", 0)),
        oldest_s=now.get("rollout/oldest_s") if in_flight else None,
        stall_s=now.get("weights/stall_s"),
        drift=now.get("rollout/drift"),
        drift_largest=figures.get("rollout/drift_largest"),
        drift_warnings=int(figures.get("rollout/drift_warnings", 0)),
    )


def rank(facts: Facts, actor: ActorView) -> RankRow:
    """A rank of the learner."""
    gone = actor.condition in GONE
    gpus = [] if gone else actor.gpus
    return RankRow(
        **facts.placed(actor),
        **_state(facts, actor),
        tokens_per_s=facts.rate_of(actor, "learner/tokens"),
        # A step is of all ranks, and so is its share of the peak.
        mfu=None if gone else number_in(facts.last, "perf/mfu"),
        rss_bytes=None if gone else actor.rss_bytes or None,
        gpu_bytes=sum(gpu.memory_bytes for gpu in gpus) if gpus else None,
        gpu_total_bytes=sum(gpu.memory_total_bytes for gpu in gpus) if gpus else None,
    )


def _state(facts: Facts, actor: ActorView) -> dict[str, Any]:
    """Fields of StateRow: of an actor's serial resource, or its own."""
    told = next(iter(actor.resources), actor)
    gone = actor.condition in GONE
    return {
        "state": "" if gone else told.state,
        "awaiting": "" if gone else told.awaiting,
        "state_s": 0.0 if gone else told.state_s,
        "states": facts.shares([actor]),
    }


# --- the pipeline ---

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
            # All that the run still trains is leased.
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

    def row(
        stage: Stage,
        role: str,
        shares: Shares,
        rate: float | None,
        unit: str,
        depth: float | None,
        of: str,
        limit: float | None = None,
    ) -> StageRow:
        """Depth in units ``of``."""
        actors = facts.of(role)
        return StageRow(
            stage=stage,
            actors=sum(actor.condition not in GONE for actor in actors),
            expected=len(actors),
            resources=sum(len(actor.resources) for actor in actors),
            rate=rate,
            unit=unit,
            depth=depth,
            depth_limit=limit,
            depth_unit=of,
            states=shares,
            kinds=by_kind(shares),
            bottleneck=stage == marked,
        )

    engines, learner = facts.states("rollouter"), _learner(facts)
    tokens, flight = total(each.tokens_per_s for each in rollouters), total(each.in_flight for each in rollouters)
    leased = facts.rate("dataloader", "tickets/granted")
    updates = facts.rate("parameter_server", "weights/updates_committed")
    known = None if weights.behind is None else float(sum(each.lag is not None for each in rollouters))
    step = float(facts.run.groups_per_step) or None
    at_hand = total((reward.queued, reward.running))
    return [
        row("dataloader", "dataloader", {}, leased, "groups", ledger.outstanding, "groups", ledger.gate),
        row("rollouters", "rollouter", engines, tokens, "tokens", flight, "samples"),
        row("reward", "reward", reward.states, reward.rate, "tasks", at_hand, "tasks"),
        row("learner", "learner", learner, _trained_per_s(facts), "groups", ledger.buffered, "groups", step),
        row("weights", "parameter_server", {}, updates, "updates", weights.behind, "behind", known),
    ]


def _trained_per_s(facts: Facts) -> float | None:
    step_s, groups = facts.step_mean("time/step_s"), facts.run.groups_per_step
    return groups / step_s if step_s and groups and facts.run.phase not in OVER else None


# --- weights, staleness, reward, ledger ---

UPDATE = {
    key.removeprefix("weights/"): key
    for key in (
        *("weights/stage_s", "weights/pause_s", "weights/load_s", "weights/resume_s", "weights/stall_s"),
        *("weights/bytes", "weights/encoded_bytes"),
    )
}
"""Keys of a line of metrics by field of UpdateRow."""


def weights(facts: Facts, rollouters: Sequence[RollouterRow]) -> WeightsView:
    """Publications and updates."""
    lags = [row.lag for row in rollouters if row.lag is not None]
    # 0 in the line of a step after which nothing is published.
    idle = [seconds for line in facts.snapshot.train if (seconds := number_in(line, "time/publish_s"))]
    again, updates = number_in(facts.last, "rollout/reprefill_tokens"), number_in(facts.last, "weights/updates")
    return WeightsView(
        idle_s=idle[-1] if idle else None,
        gather_s=number_in(facts.last, "weights/gather_s"),
        publish_bytes=number_in(facts.last, "weights/publish_bytes"),
        failures=facts.counted("parameter_server", "weights/updates_failed"),
        behind=sum(lag > 0 for lag in lags) if lags else None,
        paused=facts.level("parameter_server", "weights/replicas_paused"),
        reprefill_tokens=again / updates if again is not None and updates else None,
        updates=[
            UpdateRow(
                version=int(line.get("weights/version", -1)),
                replica=str(line.get("replica", "")),
                transport=str(line.get("weights/transport", "")),
                **_numbers(line, UPDATE),
            )
            for line in reversed(facts.snapshot.updates)
        ],
    )


def staleness(facts: Facts) -> StalenessView:
    """Versions between sampling and training."""
    histograms = next((actor.histograms for actor in facts.of("learner")), {})
    tokens, groups = (histograms.get(f"staleness/{what}") for what in ("tokens", "groups"))
    limit = facts.level("dataloader", "staleness/limit")
    return StalenessView(
        limit=number_in(facts.last, "staleness/limit") if limit is None else limit,
        max=facts.run.staleness_max,
        token_mean=number_in(facts.last, "staleness/token_mean"),
        token_max=number_in(facts.last, "staleness/token_max"),
        late_groups=number_in(facts.last, "staleness/late_groups"),
        late_trained=facts.counted("learner", "staleness/late_trained_groups"),
        late_masked=facts.counted("learner", "staleness/late_masked_groups"),
        edges=list(edges_of("staleness/tokens")),
        tokens=tokens.counts if tokens is not None else [],
        groups=groups.counts if groups is not None else [],
    )


def reward(facts: Facts) -> RewardView:
    """All reward pools together."""
    pools = facts.of("reward")
    buckets = len(edges_of("reward/run_s")) + 1
    spent = [each.counts for pool in pools if (each := pool.histograms.get("reward/run_s")) is not None]
    # Another version's pool may have other buckets.
    counts = [sum(bucket) for bucket in zip(*(one for one in spent if len(one) == buckets), strict=True)]
    return RewardView(
        workers=sum(len(pool.resources) for pool in facts.living("reward")),
        rate=facts.rate("reward", "reward/scored"),
        queued=facts.level("reward", "reward/queued"),
        running=facts.level("reward", "reward/running"),
        p50_s=quantile(counts, edges_of("reward/run_s"), 0.5),
        p99_s=quantile(counts, edges_of("reward/run_s"), 0.99),
        timeouts=facts.counted("reward", "reward/timed_out"),
        killed=facts.counted("reward", "reward/workers_killed"),
        failed=facts.counted("reward", "reward/failed"),
        states=facts.shares(pools),
    )


def ledger(facts: Facts) -> LedgerView:
    """Prompt groups by what became of them, and those under way."""
    return LedgerView(
        trained=facts.ledger_figure("ledger/trained"),
        filtered=facts.ledger_figure("ledger/filtered"),
        quarantined=facts.ledger_figure("ledger/quarantined"),
        left_out=facts.ledger_figure("ledger/left_out"),
        outstanding=facts.level("dataloader", "tickets/outstanding"),
        gate=facts.level("dataloader", "tickets/gate"),
        buffered=facts.buffered(),
        groups_per_step=facts.run.groups_per_step,
    )
