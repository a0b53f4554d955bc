"""Snapshots of runs in the states that a monitor has to show, made by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from asyncrl.messages.monitor import ActorView, Event, Gpu, Histogram, Resource, RunView, Snapshot, Wait

WALL = 1_790_000_000.0
ENGINE = {"generating": 0.86, "paused": 0.04, "waiting": 0.10}
WORKER = {"scoring": 0.2, "idle": 0.8}
RANK = {"training": 0.8, "waiting": 0.15, "publishing": 0.05}


SERVED = {"weights/version": 3, "eval/heldout/version_min": 2}
HELD_OUT = {
    **{"eval/heldout/pass_at/1": 0.25, "eval/heldout/pass_at/4": 0.5, "eval/heldout/component/form": 0.9},
    **{"eval/heldout/length_mean": 34.0, "eval/heldout/truncated_fraction": 0.625},
}


@dataclass
class Run:
    """A steady run: ``at(t)`` is its snapshot after t seconds."""

    rollouters: int = 4
    hosts: int = 2
    workers: int = 2
    ranks: int = 2
    engine: dict[str, float] = field(default_factory=lambda: dict(ENGINE))
    worker: dict[str, float] = field(default_factory=lambda: dict(WORKER))
    rank: dict[str, float] = field(default_factory=lambda: dict(RANK))
    phase: str = "running"
    step_s: float = 2.0
    steps: int = 100
    staleness_max: int = 4
    limit: float = 3.0
    outstanding: float = 200.0
    queued: float = 3.0
    scoring: float = 1.0
    lag: int = 0
    loop_busy: float = 0.08
    stalled: str = ""
    dead: tuple[str, ...] = ()
    lost_hosts: tuple[str, ...] = ()
    reason: str = ""
    exit_code: int = 0
    gpus: bool = False
    episodes: dict[str, float] = field(default_factory=dict)
    """Open in each rollouter, by stage; none where a prompt has one response."""
    events: list[Event] = field(default_factory=list)

    def at(self, t: float) -> Snapshot:
        step = min(self.steps, int(t / self.step_s))
        actors = [
            self._actor("controller/0", t, state="ready"),
            self._actor(
                "dataloader/0",
                t,
                state="ready",
                metrics={
                    "tickets/granted": 32.0 * t,
                    "tickets/outstanding": self.outstanding,
                    "tickets/gate": (self.limit + 1) * 64,
                    "staleness/limit": self.limit,
                },
                loop_busy=self.loop_busy,
            ),
            *(self._learner(i, t, step) for i in range(self.ranks)),
            self._actor(
                "parameter_server/0",
                t,
                state="ready",
                metrics={
                    "weights/updates_committed": 2.0 * t,
                    "weights/replicas_behind": 1.0,
                    "weights/replicas_paused": 0.0,
                    "weights/updates_failed": 0.0,
                },
            ),
            self._reward(t),
            *(self._rollouter(i, t, step) for i in range(self.rollouters)),
            *(self._episode_host(i, t) for i in range(self.rollouters if self.episodes else 0)),
        ]
        train = [self._line(n) for n in range(max(1, step - 63), step + 1)]
        return Snapshot(
            wall=WALL + t,
            run=RunView(
                name="sim-64",
                run_id="a1b2c3",
                phase=self.phase,
                attempt=1,
                age_s=t,
                step=step,
                steps=self.steps,
                version=step,
                reason=self.reason,
                exit_code=self.exit_code,
                lost_hosts=list(self.lost_hosts),
                stalled=self.stalled,
                staleness_max=self.staleness_max,
                groups_per_step=64,
                disk_free_bytes=10**11,
            ),
            actors=actors,
            train=train,
            updates=[
                {
                    "kind": "update",
                    "replica": f"rollouter/{n % max(1, self.rollouters)}",
                    "weights/version": step,
                    "weights/transport": "shm",
                    "weights/stage_s": 0.012,
                    "weights/pause_s": 0.0001,
                    "weights/load_s": 0.2,
                    "weights/resume_s": 0.00003,
                    "weights/stall_s": 0.2003,
                    "weights/bytes": 50331648,
                    "weights/encoded_bytes": 12582912,
                }
                for n in range(32 if step else 0)
            ],
            evals=[{"kind": "eval", "step": 3, "eval/heldout/mean": 0.25} | SERVED | HELD_OUT],
            events=self.events
            or [
                Event(number=1, wall=WALL, level="info", actor="controller/0", text="the run has begun"),
                Event(number=2, wall=WALL + 5, level="warning", actor="reward/0", text="worker 1 was killed: timeout"),
                Event(number=3, wall=WALL + 9, level="error", actor="rollouter/1", text="engine died and starts again"),
            ],
        )

    def between(self, older: float = 60.0, newer: float = 100.0, every: float = 5.0) -> list[Snapshot]:
        """Snapshots of a stretch of time."""
        count = round((newer - older) / every)
        return [self.at(older + every * n) for n in range(count + 1)]

    def _actor(self, name: str, t: float, *, state: str, loop_busy: float = 0.02, **facts) -> ActorView:
        index = int(name.partition("/")[2])
        spread = name.startswith(("rollouter/", "episodes/"))
        host = f"node{index * self.hosts // max(1, self.rollouters)}" if spread else "node0"
        condition = facts.pop("condition", "ready")
        if name in self.dead:
            condition, facts = "dead", {"restarts": 1}
        if host in self.lost_hosts:
            condition, facts = "lost", {}
        return ActorView(
            name=name,
            host=host,
            pid=1000 + index,
            incarnation=1,
            condition=condition,
            state=state,
            state_s=t % 7,
            heard_s=0.4,
            loop_busy=loop_busy,
            cpu=0.3,
            rss_bytes=300_000_000 + 1_000_000 * index,
            **facts,
        )

    def _rollouter(self, index: int, t: float, step: int) -> ActorView:
        return self._actor(
            f"rollouter/{index}",
            t,
            state="ready",
            version=max(0, step - self.lag),
            metrics={
                "rollout/in_flight": 16.0 - index % 3,
                "rollout/waiting": float(index % 3),
                "rollout/concurrency": 64.0,
                "rollout/trajectories": 64.0 * t,
                "rollout/sampled_tokens": (850.0 + 10 * (index % 7)) * t,
                "rollout/scoring": self.scoring,
                "rollout/kv_use": 0.42 + 0.01 * (index % 9),
                "rollout/served_version": float(max(0, step - self.lag)),
                "rollout/reprefill_tokens": 300.0 * t,
                "weights/stall_s": 0.2003,
                "rollout/drift": 0.012 + 0.001 * (index % 5),
                "rollout/drift_largest": 0.02 + 0.001 * (index % 5),
                "rollout/oldest_s": 4.5 + index % 5,
                **(self._episodes(t) if self.episodes else {}),
            },
            histograms=self._turns(t) if self.episodes else {},
            resources=[_resource("engine", self.engine, t)],
            waits=[Wait(whom="dataloader/0", what="RequestLeases", seconds=0.4, idle=True)],
        )

    def _episodes(self, t: float) -> dict[str, float]:
        whole = sum(self.episodes.values())
        return {
            "rollout/episodes": whole,
            "rollout/episodes_oldest_s": 90.0,
            "rollout/cost_factor": 1.12,
            "rollout/malformed_calls": 3.0,
            "rollout/episodes_ended/stop": 4.0 * t,
            "rollout/episodes_ended/length": 1.0,
            "rollout/episodes_failed/turn": 2.0,
            "rollout/episodes_failed/user": 1.0,
            "rollout/forks/edited": 12.0,
            **{f"rollout/episodes_at/{stage}": each for stage, each in self.episodes.items()},
            **{f"rollout/episode_s/{stage}": 16 * t * each / whole for stage, each in self.episodes.items()},
        }

    def _turns(self, t: float) -> dict[str, Histogram]:
        ended = int(4 * t)
        return {
            "rollout/turns": Histogram([0, 0, 0, ended, ended, 0, 0, *[0] * 10], 3.5 * 2 * ended),
            "rollout/prompt_tokens": Histogram([*[0] * 6, 7 * ended, *[0] * 9], 700.0 * 7 * ended),
        }

    def _episode_host(self, index: int, t: float) -> ActorView:
        return self._actor(
            f"episodes/{index}",
            t,
            state="ready",
            metrics={
                "episodes/open": sum(self.episodes.values()) - self.episodes.get("judge", 0.0),
                "episodes/waiting": 0.0,
                "episodes/played": 4.0 * t,
                "episodes/failed": 3.0,
                "episodes/tool_calls": 20.0 * t,
                "episodes/tool_errors": 2.0,
                "episodes/tool_mistakes": 1.0,
                "episodes/workers_killed": 1.0,
                "episodes/workers_died": 0.0,
            },
            resources=[_resource(f"worker/{n}", {"playing": 0.9, "idle": 0.1}, t) for n in range(2)],
        )

    def _learner(self, index: int, t: float, step: int) -> ActorView:
        figures = {"learner/tokens": 5200.0 * t}
        histograms = {}
        if index == 0:
            figures |= {
                "ledger/trained": 64.0 * step,
                "ledger/filtered": 12.0,
                "ledger/quarantined": 1.0,
                "buffer/groups": 20.0,
            }
            histograms = {
                "staleness/tokens": Histogram([9000 * (step > 0), 4000, 2500, 600, 40, *[0] * 8], 12000.0),
                "staleness/groups": Histogram([90 * (step > 0), 40, 25, 6, 1, *[0] * 8], 120.0),
            }
        gpus = [Gpu(index=index, utilisation=0.9, memory_bytes=61 * 10**9, memory_total_bytes=80 * 10**9)]
        return self._actor(
            f"learner/{index}",
            t,
            state="training",
            metrics=figures,
            histograms=histograms,
            resources=[_resource("rank", self.rank, t)],
            gpus=gpus if self.gpus else [],
        )

    def _reward(self, t: float) -> ActorView:
        return self._actor(
            "reward/0",
            t,
            state="ready",
            metrics={
                "reward/scored": 255.0 * t,
                "reward/queued": self.queued,
                "reward/running": 1.0,
                "reward/timed_out": 2.0,
                "reward/workers_killed": 1.0,
                "reward/failed": 0.0,
            },
            histograms={"reward/run_s": Histogram([10, 500, 300, 40, 9, 1, *[0] * 9], 3.0)},
            resources=[_resource(f"worker/{n}", self.worker, t) for n in range(self.workers)],
        )

    def _line(self, step: int) -> dict[str, object]:
        return {
            "kind": "train",
            "step": step,
            "loss/policy": 0.0123 - 0.0001 * step,
            "policy/grad_norm": 1.234,
            "policy/entropy": 2.1,
            "policy/behaviour_kl": 0.00042,
            "learner/lr": 1e-6,
            "reward/std": 0.25,
            "rollout/truncated_fraction": 0.625,
            "reward/mean": 0.2 + 0.6 * step / self.steps + 0.03 * (step * 7 % 5),
            "time/step_s": self.step_s,
            "time/train_s": 0.7 * self.step_s,
            "time/publish_s": 0.05 * self.step_s,
            "time/wait_for_groups_s": 0.25 * self.step_s,
            "staleness/limit": self.limit,
            "staleness/token_mean": 1.42,
            "staleness/token_max": 4.0,
            "staleness/late_groups": 1.0,
            "perf/mfu": 0.41 if self.gpus else None,
            "weights/gather_s": 0.038,
            "weights/updates": 4.0,
            "rollout/reprefill_tokens": 51200.0,
            "weights/publish_bytes": 50331648,
            "ledger/trained": 64 * step,
        }


def _resource(name: str, shares: dict[str, float], t: float) -> Resource:
    states = [state for state, share in shares.items() if share > 0]
    state = states[int(t) % len(states)]
    return Resource(
        name=name,
        state=state,
        awaiting={"waiting": "groups" if name == "rank" else "leases", "paused": "weights v7"}.get(state, ""),
        state_s=t % 5,
        seconds={state: share * t for state, share in shares.items()},
    )


def empty() -> Snapshot:
    """Only the controller is there."""
    return Snapshot(
        wall=WALL,
        run=RunView(
            name="sim-64", run_id="a1b2c3", phase="starting", attempt=1, age_s=0.4, step=0, steps=100, version=-1
        ),
        actors=[],
    )


def starting() -> Snapshot:
    """Some are there, some not."""
    run = Run(phase="starting")
    made = run.at(1.0)
    actors = [
        ActorView(name=actor.name, host=actor.host, condition="starting" if n % 2 else "absent", state="imports")
        for n, actor in enumerate(made.actors)
    ]
    waiting = [actor.name for actor in actors]
    view = replace(empty().run, age_s=1.0, waiting_for=waiting, staleness_max=4, groups_per_step=64)
    return Snapshot(wall=WALL + 1.0, run=view, actors=actors)


STATES = {
    "empty": lambda: [empty()],
    "starting": lambda: [starting()],
    "healthy": lambda: Run().between(),
    "gpus": lambda: Run(rollouters=8, hosts=2, ranks=4, gpus=True).between(),
    "stalled": lambda: Run(
        engine={"waiting": 1.0},
        stalled="nothing was trained for 120 s: learner/0 waits for groups of rollouter/2, which does not answer",
    ).between(),
    "dead_host": lambda: Run(lost_hosts=("node1",), dead=("rollouter/1",)).between(),
    "finished": lambda: Run(phase="done", steps=40, reason="").between(),
    "agents": lambda: Run(
        episodes={"tool search": 41.0, "engine": 9.0, "tool look_up_in_the_archive": 6.0, "judge": 4.0, "queue": 0.0},
        engine={"generating": 0.95, "waiting": 0.05},
        rank={"training": 0.3, "waiting": 0.7},
    ).between(),
}
"""Snapshots by what they show, oldest first."""
