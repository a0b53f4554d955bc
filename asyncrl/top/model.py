"""The stages of the pipeline with the one that sets the pace, weights, staleness, reward, ledger and episodes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from asyncrl.snapshot import OVER, ActorView
from asyncrl.telemetry.catalogue import EDGES, quantile
from asyncrl.telemetry.metrics_line import number_in
from asyncrl.telemetry.snapshots.rates import Shares, mean, total
from asyncrl.top.facts import UNHEARD, Facts, learning, phases, rank, rollouter, run_row
from asyncrl.top.figures.bottleneck import Flow, Stage, Verdict, by_kind, find_bottleneck
from asyncrl.top.figures.document import (
    Document,
    EpisodeHostRow,
    EpisodeStageRow,
    EpisodesView,
    LedgerView,
    RewardView,
    RollouterRow,
    StageRow,
    StalenessView,
    UpdateRow,
    WeightsView,
)
from asyncrl.top.source.history import GONE, History, Levels, stages_of


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


def weights(facts: Facts, rollouters: Sequence[RollouterRow]) -> WeightsView:
    """Publications and updates."""
    lags = [row.lag for row in rollouters if row.lag is not None]
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
                stage_s=number_in(line, "weights/stage_s"),
                pause_s=number_in(line, "weights/pause_s"),
                load_s=number_in(line, "weights/load_s"),
                resume_s=number_in(line, "weights/resume_s"),
                stall_s=number_in(line, "weights/stall_s"),
                bytes=number_in(line, "weights/bytes"),
                encoded_bytes=number_in(line, "weights/encoded_bytes"),
            )
            for line in reversed(facts.snapshot.updates)
        ],
    )


def staleness(facts: Facts) -> StalenessView:
    """Versions between sampling and training."""
    leader = next(iter(facts.of("learner")), None)
    tokens = leader.histograms.get("staleness/tokens") if leader is not None else None
    groups = leader.histograms.get("staleness/groups") if leader is not None else None
    limit = facts.level("dataloader", "staleness/limit")
    return StalenessView(
        limit=number_in(facts.last, "staleness/limit") if limit is None else limit,
        max=facts.run.staleness_max,
        token_mean=number_in(facts.last, "staleness/token_mean"),
        token_max=number_in(facts.last, "staleness/token_max"),
        late_groups=number_in(facts.last, "staleness/late_groups"),
        late_trained=facts.counted("learner", "staleness/late_trained_groups"),
        late_masked=facts.counted("learner", "staleness/late_masked_groups"),
        waited=facts.counted("learner", "staleness/waited_groups"),
        requeued=facts.counted("learner", "staleness/requeued_groups"),
        edges=list(EDGES["staleness/tokens"]),
        tokens=tokens.counts if tokens is not None else [],
        groups=groups.counts if groups is not None else [],
    )


def reward(facts: Facts) -> RewardView:
    """All reward pools together."""
    pools = facts.of("reward")
    spent = [each.counts for pool in pools if (each := pool.histograms.get("reward/run_s")) is not None]
    counts = [sum(bucket) for bucket in zip(*spent, strict=True)]
    return RewardView(
        workers=sum(len(pool.resources) for pool in facts.living("reward")),
        rate=facts.rate("reward", "reward/scored"),
        queued=facts.level("reward", "reward/queued"),
        running=facts.level("reward", "reward/running"),
        p50_s=quantile(counts, EDGES["reward/run_s"], 0.5),
        p99_s=quantile(counts, EDGES["reward/run_s"], 0.99),
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
        outstanding=facts.level("dataloader", "tickets/outstanding"),
        gate=facts.level("dataloader", "tickets/gate"),
        buffered=facts.buffered(),
        groups_per_step=facts.run.groups_per_step,
    )


def episodes(facts: Facts) -> EpisodesView | None:
    """The episodes; None where a prompt has one response."""
    rollouters, hosts = facts.of("rollouter"), facts.of("episodes")
    if not hosts:
        return None
    at, shares = stages_of(facts.living("rollouter")), _shares(facts)
    turns, prompts = _seen(facts, "rollout/turns"), _seen(facts, "rollout/prompt_tokens")
    names = sorted({*at, *shares}, key=lambda name: (-at.get(name, 0.0), -shares.get(name, 0.0), name))
    return EpisodesView(
        open=facts.level("rollouter", "rollout/episodes"),
        oldest_s=max((actor.figures.get("rollout/episodes_oldest_s", 0.0) for actor in rollouters), default=None),
        stages=[
            EpisodeStageRow(name=name, open=at.get(name), share=shares.get(name))
            for name in names
            if at.get(name) or shares.get(name)
        ],
        turns_mean=_mean(turns),
        turns_p95=quantile(turns[0], EDGES["rollout/turns"], 0.95),
        prompt_tokens_mean=_mean(prompts),
        cost_factor=mean(actor.figures.get("rollout/cost_factor") for actor in rollouters),
        reprefill_tokens=facts.counted("rollouter", "rollout/reprefill_tokens"),
        malformed_calls=facts.counted("rollouter", "rollout/malformed_calls"),
        ended=_family(rollouters, "rollout/episodes_ended/"),
        failed=_family(rollouters, "rollout/episodes_failed/"),
        forks=_family(rollouters, "rollout/forks/"),
        hosts=[_host(facts, actor) for actor in hosts],
    )


def _host(facts: Facts, actor: ActorView) -> EpisodeHostRow:
    gone = actor.condition in GONE
    return EpisodeHostRow(
        name=actor.name,
        host=actor.host,
        condition=facts.condition(actor),
        workers=0 if gone else len(actor.resources),
        kinds=by_kind(facts.shares([actor])),
        open=None if gone else actor.figures.get("episodes/open"),
        waiting=None if gone else actor.figures.get("episodes/waiting"),
        played=actor.figures.get("episodes/played"),
        failed=actor.figures.get("episodes/failed"),
        tool_calls=actor.figures.get("episodes/tool_calls"),
        tool_errors=total((actor.figures.get("episodes/tool_errors"), actor.figures.get("episodes/tool_mistakes"))),
        lost_workers=total((actor.figures.get("episodes/workers_killed"), actor.figures.get("episodes/workers_died"))),
        restarts=actor.restarts,
    )


def _family(actors: Iterable[ActorView], beginning: str) -> dict[str, float]:
    """Counters of which each has a name of its own, added up, the largest first."""
    found: dict[str, float] = {}
    for actor in actors:
        for name, value in actor.figures.items():
            if name.startswith(beginning) and value:
                name = name.removeprefix(beginning)
                found[name] = found.get(name, 0.0) + value
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def _shares(facts: Facts) -> Shares:
    """Shares of the time of episodes that have ended meanwhile, by stage."""
    spent: dict[str, float] = {}
    for actor in facts.of("rollouter"):
        if actor.condition in UNHEARD:
            continue
        before = facts.steps.before(actor)
        earlier = _family([before], "rollout/episode_s/") if before is not None else {}
        for stage, seconds in _family([actor], "rollout/episode_s/").items():
            spent[stage] = spent.get(stage, 0.0) + max(0.0, seconds - earlier.get(stage, 0.0))
    whole = sum(spent.values())
    return {stage: seconds / whole for stage, seconds in spent.items() if seconds > 0} if whole > 0 else {}


def _seen(facts: Facts, name: str) -> tuple[list[int], float]:
    """Values that the histograms of all rollouters have taken in meanwhile: counts by bucket, and the sum."""
    counts, whole = [0] * (len(EDGES[name]) + 1), 0.0
    for actor in facts.of("rollouter"):
        seen = facts.steps.histogram(actor, name)
        if seen is not None and len(seen.counts) == len(counts):
            counts = [one + other for one, other in zip(counts, seen.counts, strict=True)]
            whole += seen.sum
    return counts, whole


def _mean(seen: tuple[list[int], float]) -> float | None:
    counts, whole = seen
    return whole / sum(counts) if sum(counts) else None
