"""From snapshots to what is shown of them. Pure; the only place where figures are given a meaning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from asyncrl.monitor.bottleneck import Flow, by_kind, find_bottleneck
from asyncrl.monitor.catalogue import EDGES, quantile
from asyncrl.monitor.rates import Interval, mean, median, total
from asyncrl.monitor.top.document import (
    Bottleneck,
    Document,
    LedgerView,
    PhaseRow,
    RankRow,
    RewardView,
    RollouterRow,
    RunRow,
    Stage,
    StageRow,
    StalenessView,
    UpdateRow,
    WeightsView,
)
from asyncrl.monitor.top.history import History
from asyncrl.snapshot import ActorView, Resource, Snapshot

STEPS_FOR_MEANS = 8
REWARDS = 40
OPEN = 0.5
"""Below this share of what the gate admits it is not what anybody waits for."""
GONE = frozenset({"absent", "dead", "lost"})
PHASES = (
    ("time/wait_for_groups_s", "wait"),
    ("time/train_s", "train"),
    ("time/publish_s", "publish"),
    ("time/step_s", "step"),
)


def role_of(actor: ActorView) -> str:
    """The role in its name, ROLE/INDEX."""
    return actor.name.partition("/")[0]


def build(history: History) -> Document:
    """What is shown of the newest snapshot; there must be one."""
    snapshot = history.newest
    assert snapshot is not None
    return _Builder(snapshot, history.recent(), history.steps()).document()


class _Builder:
    def __init__(self, snapshot: Snapshot, recent: Interval, steps: Interval | None) -> None:
        self.snapshot, self.run = snapshot, snapshot.run
        self.recent, self.steps = recent, steps or Interval(None, snapshot)
        self.window_s = 0.0 if steps is None else steps.seconds
        self.by_role: dict[str, list[ActorView]] = {}
        for actor in snapshot.actors:
            self.by_role.setdefault(role_of(actor), []).append(actor)
        self.rollouters = self.by_role.get("rollouter", [])
        self.learners = self.by_role.get("learner", [])
        self.last: Mapping[str, Any] = snapshot.train[-1] if snapshot.train else {}

    def document(self) -> Document:
        ranks = [self.rank(actor) for actor in self.learners]
        rollouters = [self.rollouter(actor) for actor in self.rollouters]
        reward = self.reward()
        weights, ledger = self.weights(), self.ledger()
        bottleneck = self.bottleneck(rollouters, reward, ledger)
        return Document(
            wall=self.snapshot.wall,
            window_s=self.window_s,
            run=self.run_row(rollouters, reward),
            bottleneck=bottleneck,
            stages=self.stages(bottleneck, rollouters, reward, weights, ledger),
            rollouters=rollouters,
            ranks=ranks,
            phases=self.phases(),
            weights=weights,
            staleness=self.staleness(),
            reward=reward,
            ledger=ledger,
            events=self.snapshot.events,
            actors=self.snapshot.actors,
        )

    # --- the run ---

    def run_row(self, rollouters: list[RollouterRow], reward: RewardView) -> RunRow:
        run, train = self.run, self.snapshot.train
        # Not the mean: the first step waits for engines and evaluations.
        step_s = median(_number(line, "time/step_s") for line in train[-STEPS_FOR_MEANS:])
        left = run.steps - run.step
        goes_on = run.phase == "running" and not run.stalled and left > 0
        eta_s = left * step_s if step_s is not None and goes_on else None
        rewards = [value for line in train[-REWARDS:] if (value := _number(line, "reward/mean")) is not None]
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
            samples_per_s=reward.rate,
            reward=rewards[-1] if rewards else None,
            rewards=rewards,
            evals={
                key.removeprefix("eval/").removesuffix("/mean"): float(value)
                for line in self.snapshot.evals
                for key, value in line.items()
                if key.startswith("eval/") and key.endswith("/mean") and isinstance(value, int | float)
            },
            reason=run.reason,
            exit_code=run.exit_code,
            waiting_for=run.waiting_for,
            lost_hosts=run.lost_hosts,
            stalled=run.stalled,
            disk_free_bytes=run.disk_free_bytes or None,
        )

    def phases(self) -> list[PhaseRow]:
        lines = self.snapshot.train[-STEPS_FOR_MEANS:]
        found = ((name, mean(_number(line, key) for line in lines)) for key, name in PHASES)
        return [PhaseRow(name=name, seconds=seconds) for name, seconds in found if seconds is not None]

    # --- the stages ---

    def bottleneck(self, rollouters: list[RollouterRow], reward: RewardView, ledger: LedgerView) -> Bottleneck:
        dataloader = next(iter(self.by_role.get("dataloader", [])), None)
        verdict = find_bottleneck(
            Flow(
                running=self.run.phase == "running" and not self.run.stalled,
                window_s=self.window_s if self.steps.seconds else self.run.age_s,
                rollouters=self.states("rollouter"),
                reward=reward.states,
                learner=self.steps.shares(_resources(self.learners[:1])),
                dataloader_busy=dataloader.loop_busy if dataloader is not None else None,
                generating=total(row.in_flight for row in rollouters),
                at_reward=self.sum(self.rollouters, "rollout/scoring"),
                lag=mean(row.lag for row in rollouters),
                gate_open=self.gate_open(),
                exhausted=self.run.steps > 0
                and (ledger.outstanding or 0.0) >= (self.run.steps - self.run.step) * self.run.groups_per_step,
            )
        )
        return Bottleneck(stage=verdict.stage, why=verdict.why)

    def stages(
        self,
        bottleneck: Bottleneck,
        rollouters: list[RollouterRow],
        reward: RewardView,
        weights: WeightsView,
        ledger: LedgerView,
    ) -> list[StageRow]:
        marked = "dataloader" if bottleneck.stage == "gate" else bottleneck.stage

        def row(stage: Stage, role: str, shares: Mapping[str, float], **figures: Any) -> StageRow:
            actors = self.by_role.get(role, [])
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
                rate=self.recent.total_rate(self.by_role.get("dataloader", []), "tickets/granted"),
                unit="groups",
                depth=ledger.outstanding,
                depth_limit=ledger.gate,
                depth_unit="groups",
            ),
            row(
                "rollouters",
                "rollouter",
                self.states("rollouter"),
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
                unit="samples",
                depth=total((reward.queued, reward.running)),
                depth_unit="samples",
            ),
            row(
                "learner",
                "learner",
                self.states("learner"),
                rate=self.trained_per_s(),
                unit="groups",
                depth=ledger.buffered,
                depth_limit=float(self.run.groups_per_step) if self.run.groups_per_step else None,
                depth_unit="groups",
            ),
            row(
                "weights",
                "parameter_server",
                {},
                rate=self.recent.total_rate(self.by_role.get("parameter_server", []), "weights/updates_committed"),
                unit="updates",
                depth=weights.behind,
                depth_limit=float(len(self.rollouters)) if weights.behind is not None else None,
                depth_unit="behind",
            ),
        ]

    def states(self, role: str) -> Mapping[str, float]:
        return self.steps.shares(_resources(self.by_role.get(role, [])))

    def trained_per_s(self) -> float | None:
        lines = self.snapshot.train[-STEPS_FOR_MEANS:]
        step_s = mean(_number(line, "time/step_s") for line in lines)
        return self.run.groups_per_step / step_s if step_s and self.run.groups_per_step else None

    # --- actors ---

    def rollouter(self, actor: ActorView) -> RollouterRow:
        figures, gone = actor.figures, actor.condition in GONE
        version = figures.get("rollout/served_version")
        version = actor.version if version is None else int(version)
        state, awaiting, state_s = _present(actor)
        return RollouterRow(
            name=actor.name,
            host=actor.host,
            condition=actor.condition,
            state="" if gone else state,
            awaiting="" if gone else awaiting,
            state_s=0.0 if gone else state_s,
            states=self.steps.shares(_resources([actor])),
            in_flight=None if gone else figures.get("rollout/in_flight"),
            waiting=None if gone else figures.get("rollout/waiting"),
            tokens_per_s=None if gone else self.recent.rate(actor, "rollout/sampled_tokens"),
            kv_use=None if gone else figures.get("rollout/kv_use"),
            version=None if gone or version < 0 else version,
            lag=None if gone or version < 0 else max(0, self.run.version - version),
            restarts=actor.restarts + int(figures.get("rollout/engine_restarts", 0)),
            oldest_s=None if gone else figures.get("rollout/oldest_s"),
        )

    def rank(self, actor: ActorView) -> RankRow:
        state, awaiting, state_s = _present(actor)
        return RankRow(
            name=actor.name,
            host=actor.host,
            condition=actor.condition,
            state=state,
            awaiting=awaiting,
            state_s=state_s,
            states=self.steps.shares(_resources([actor])),
            tokens_per_s=self.recent.rate(actor, "learner/tokens"),
            # A step is of all ranks, and so is its share of the peak.
            mfu=_number(self.last, "perf/mfu"),
            rss_bytes=actor.rss_bytes or None,
            gpu_bytes=sum(gpu.memory_bytes for gpu in actor.gpus) if actor.gpus else None,
            gpu_total_bytes=sum(gpu.memory_total_bytes for gpu in actor.gpus) if actor.gpus else None,
        )

    # --- panes ---

    def weights(self) -> WeightsView:
        servers = self.by_role.get("parameter_server", [])
        return WeightsView(
            gather_s=_number(self.last, "weights/gather_s"),
            publish_bytes=_number(self.last, "weights/publish_bytes"),
            failures=self.sum(servers, "weights/updates_failed"),
            behind=self.sum(servers, "weights/replicas_behind"),
            paused=self.sum(servers, "weights/replicas_paused"),
            updates=[
                UpdateRow(
                    version=int(line.get("weights/version", -1)),
                    replica=str(line.get("replica", "")),
                    transport=str(line.get("weights/transport", "")),
                    stage_s=_number(line, "weights/stage_s"),
                    pause_s=_number(line, "weights/pause_s"),
                    load_s=_number(line, "weights/load_s"),
                    resume_s=_number(line, "weights/resume_s"),
                    stall_s=_number(line, "weights/stall_s"),
                    bytes=_number(line, "weights/bytes"),
                    encoded_bytes=_number(line, "weights/encoded_bytes"),
                )
                for line in reversed(self.snapshot.updates)
            ],
        )

    def staleness(self) -> StalenessView:
        leader = self.learners[0] if self.learners else None
        tokens = leader.histograms.get("staleness/tokens") if leader is not None else None
        groups = leader.histograms.get("staleness/groups") if leader is not None else None
        limit = self.sum(self.by_role.get("dataloader", []), "staleness/limit")
        return StalenessView(
            limit=_number(self.last, "staleness/limit") if limit is None else limit,
            max=self.run.staleness_max,
            token_mean=_number(self.last, "staleness/token_mean"),
            token_max=_number(self.last, "staleness/token_max"),
            late_groups=_number(self.last, "staleness/late_groups"),
            edges=list(EDGES["staleness/tokens"]),
            tokens=tokens.counts if tokens is not None else [],
            groups=groups.counts if groups is not None else [],
        )

    def reward(self) -> RewardView:
        pools = self.by_role.get("reward", [])
        spent = next((each for pool in pools if (each := pool.histograms.get("reward/run_s")) is not None), None)
        counts = spent.counts if spent is not None else []
        return RewardView(
            workers=sum(len(pool.resources) for pool in pools),
            rate=self.recent.total_rate(pools, "reward/scored"),
            queued=self.sum(pools, "reward/queued"),
            running=self.sum(pools, "reward/running"),
            p50_s=quantile(counts, EDGES["reward/run_s"], 0.5),
            p99_s=quantile(counts, EDGES["reward/run_s"], 0.99),
            timeouts=self.sum(pools, "reward/timed_out"),
            killed=self.sum(pools, "reward/workers_killed"),
            failed=self.sum(pools, "reward/failed"),
            states=self.steps.shares(_resources(pools)),
        )

    def ledger(self) -> LedgerView:
        run, loaders = self.run, self.by_role.get("dataloader", [])
        limit = self.sum(loaders, "staleness/limit")
        size = run.groups_per_step
        return LedgerView(
            trained=self.ledger_figure("ledger/trained"),
            filtered=self.ledger_figure("ledger/filtered"),
            quarantined=self.ledger_figure("ledger/quarantined"),
            outstanding=self.sum(loaders, "tickets/outstanding"),
            gate=self.gate(limit),
            buffered=self.ledger_figure("buffer/groups"),
            groups_per_step=size,
        )

    def gate_open(self) -> bool | None:
        """Whether there was much room at both ends of the window."""
        full: list[float] = []
        for actor in self.by_role.get("dataloader", []):
            for view in (actor, self.steps.before(actor)):
                out, most = (view.figures.get(f"tickets/{name}") if view else None for name in ("outstanding", "gate"))
                if out is None or not most:
                    return None
                full.append(out / most)
        return max(full) < OPEN if full else None

    def gate(self, limit: float | None) -> float | None:
        told = self.sum(self.by_role.get("dataloader", []), "tickets/gate")
        if told is not None or limit is None or not self.run.groups_per_step:
            return told
        return (limit + 1) * self.run.groups_per_step

    def ledger_figure(self, name: str) -> float | None:
        """What the learner says now, or said with its last step."""
        told = self.sum(self.learners[:1], name)
        return _number(self.last, name) if told is None else told

    @staticmethod
    def sum(actors: Iterable[ActorView], figure: str) -> float | None:
        return total(actor.figures.get(figure) for actor in actors)


def _resources(actors: Iterable[ActorView]) -> list[tuple[ActorView, Resource]]:
    return [(actor, resource) for actor in actors if actor.condition not in GONE for resource in actor.resources]


def _present(actor: ActorView) -> tuple[str, str, float]:
    """State, whom it waits for and since when: of its serial resource, or its own."""
    for resource in actor.resources[:1]:
        return resource.state, resource.awaiting, resource.state_s
    return actor.state, actor.awaiting, actor.state_s


def _number(line: Mapping[str, Any], key: str) -> float | None:
    value = line.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
