"""Numbers that asyncrl-top shows: the screen is drawn from them, and ``--json`` prints them.

Durations in seconds, sizes in bytes, shares 0 to 1; ``wall`` is Unix time. An unknown figure is null, never 0.
Invariant: fields are added, never given another meaning; a change that breaks a reader raises SCHEMA.
docs/top.schema.json is this module's JSON schema, as ``python -m asyncrl.top.figures.document`` prints it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
from msgspec import Struct

from asyncrl.snapshot import ActorView, Count, Event
from asyncrl.top.figures.bottleneck import Kind, Stage, Verdict

SCHEMA = 1


class EvalRow(Struct, frozen=True, kw_only=True):
    """The newest round of an evaluation. A number that its line lacks is None, or absent."""

    pass_at: dict[str, float] = {}
    """pass@k by k."""
    components: dict[str, float] = {}
    """Mean of each component of the reward."""
    truncated: float | None = None
    """Share of the responses that a limit cut."""
    length_mean: float | None = None
    """Tokens of a response."""


class RunRow(Struct, frozen=True, kw_only=True):
    """The run as a whole."""

    name: str
    run_id: str
    phase: str
    """starting, running, preempting, draining, done or failed; one that was stopped or preempted is done, and its
    ``exit_code`` is not 0."""
    attempt: Count
    age_s: float
    step: Count
    steps: Count
    version: int
    """Version of the weights; -1 before the first."""
    step_s: float | None = None
    """Mean time of the newest steps, as ``phases``; without the first of a learner."""
    eta_s: float | None = None
    tokens_per_s: float | None = None
    """Tokens sampled a second."""
    samples_per_s: float | None = None
    """Trajectories generated to their end, a second."""
    reward: float | None = None
    """Mean reward of the newest step."""
    rewards: list[float] = []
    """Mean rewards of the newest steps, oldest first."""
    evals: dict[str, float] = {}
    """Newest mean reward of each evaluation."""
    eval_versions: dict[str, tuple[int, int]] = {}
    """The oldest and the newest version that sampled each evaluation."""
    eval_rows: dict[str, EvalRow] = {}
    """Other numbers of the newest round of each evaluation."""
    reason: str = ""
    exit_code: int = 0
    waiting_for: list[str] = []
    lost_hosts: list[str] = []
    down: list[str] = []
    """Actors of a running run that do not serve, each with its condition; those of lost hosts are not among them."""
    aside: dict[str, str] = {}
    """Replicas that are set aside, with the reasons; not among ``down``."""
    stalled: str = ""
    """The watchdog's report, while it holds."""
    disk_free_bytes: Count | None = None


class StageRow(Struct, frozen=True, kw_only=True):
    """A stage of the pipeline."""

    stage: Stage
    actors: Count
    """Actors that live."""
    expected: Count
    resources: Count = 0
    """Engines, workers, ranks."""
    rate: float | None = None
    """Work that it does a second, in ``unit``."""
    unit: str
    depth: float | None = None
    """Work that is in it or waits for it, in ``depth_unit``."""
    depth_limit: float | None = None
    depth_unit: str
    states: dict[str, float] = {}
    """Shares of the time of all of its resources by state, of the learner of that of rank 0; they add up to 1."""
    kinds: dict[Kind, float] = {}
    """The shares, added up by the kind of the state."""
    bottleneck: bool = False


class PlacedRow(Struct, frozen=True, kw_only=True):
    """An actor with its host."""

    name: str
    host: str
    condition: str
    """absent, starting, ready, silent, condemned, dead, lost (with its host), aside or ended (with the run)."""


class StateRow(PlacedRow, frozen=True, kw_only=True):
    """An actor with what it does, and its shares of time by state."""

    state: str
    awaiting: str
    state_s: float
    states: dict[str, float]


class RollouterRow(StateRow, frozen=True, kw_only=True):
    """A rollouter and its engine."""

    in_flight: float | None = None
    """Trajectories in flight."""
    waiting: float | None = None
    """Trajectories in flight that the engine has not begun with."""
    concurrency: float | None = None
    """Most calls that may be in its engine at a time."""
    tokens_per_s: float | None = None
    kv_use: float | None = None
    version: int | None = None
    """Version of the weights that its engine serves."""
    lag: Count | None = None
    """Versions behind the run's newest."""
    restarts: Count = 0
    """Restarts of the process and of its engine."""
    oldest_s: float | None = None
    """Age of the oldest trajectory."""
    stall_s: float | None = None
    """Generation time that its newest weight update cost."""
    drift: float | None = None
    """Drift of its engine from the learner after the last update, nats; docs/weights.md."""
    drift_largest: float | None = None
    """Largest drift since its start."""
    drift_warnings: Count = 0
    """Updates after which the drift was drift.warn or more."""


class RankRow(StateRow, frozen=True, kw_only=True):
    """A learner rank."""

    tokens_per_s: float | None = None
    """Tokens that all ranks train a second, prompts included; told by the first."""
    mfu: float | None = None
    """Share of the peak of all ranks' GPUs that the newest step used."""
    rss_bytes: Count | None = None
    gpu_bytes: Count | None = None
    gpu_total_bytes: Count | None = None


class LearningView(Struct, frozen=True, kw_only=True):
    """Whether the policy learns: figures of the newest step."""

    step: Count | None = None
    loss: float | None = None
    """Loss of the policy (nats)."""
    grad_norm: float | None = None
    """Norm of the gradient before the clip."""
    entropy: float | None = None
    """Mean entropy of the policy over trained tokens (nats)."""
    kl: float | None = None
    """Divergence of the policy that sampled from the one being trained (nats)."""
    engine_kl: float | None = None
    """Divergence of the engine from the learner on tokens of equal weights (nats)."""
    lr: float | None = None
    reward: float | None = None
    """Mean reward of everything scored since the step before."""
    reward_std: float | None = None
    truncated: float | None = None
    """Share of the responses scored since the step before that a limit cut."""


class PhaseRow(Struct, frozen=True, kw_only=True):
    """A phase of the learner's step."""

    name: str
    seconds: float
    """Mean of the newest steps."""


class UpdateRow(Struct, frozen=True, kw_only=True):
    """A weight update of a replica."""

    version: int
    replica: str
    transport: str
    stage_s: float | None = None
    pause_s: float | None = None
    load_s: float | None = None
    resume_s: float | None = None
    stall_s: float | None = None
    bytes: float | None = None
    encoded_bytes: float | None = None


class WeightsView(Struct, frozen=True, kw_only=True):
    """Publications and updates."""

    idle_s: float | None = None
    """Time for which the learner stood still for the newest version."""
    gather_s: float | None = None
    """Time of the gathering for the newest publication, on the learner."""
    publish_bytes: float | None = None
    failures: float | None = None
    """Updates that failed since the parameter server started."""
    behind: float | None = None
    """Replicas that do not serve the newest version, as far as they have told."""
    paused: float | None = None
    reprefill_tokens: float | None = None
    """Tokens that an update made an engine compute again; the mean over the updates of the newest step."""
    updates: list[UpdateRow] = []
    """Updates, the newest first."""


class StalenessView(Struct, frozen=True, kw_only=True):
    """Versions between sampling and training."""

    limit: float | None = None
    """The limit that the gate works with."""
    max: Count = 0
    """The value of staleness.max."""
    token_mean: float | None = None
    token_max: float | None = None
    late_groups: float | None = None
    """Groups of the newest step that had late tokens."""
    late_trained: float | None = None
    """Groups since the learner started that had late tokens and were trained with them."""
    late_masked: float | None = None
    """Groups that were trained without their late tokens."""
    edges: list[float] = []
    """Upper edges of the buckets; the last bucket is open."""
    tokens: list[Count] = []
    """Tokens since the learner started, by bucket."""
    groups: list[Count] = []


class RewardView(Struct, frozen=True, kw_only=True):
    """The reward pool."""

    workers: Count = 0
    rate: float | None = None
    """Tasks a second, as everything here counts tasks: completions, or groups of them under a group reward."""
    queued: float | None = None
    running: float | None = None
    p50_s: float | None = None
    """Median of the time in the function; upper edge of the bucket."""
    p99_s: float | None = None
    timeouts: float | None = None
    killed: float | None = None
    """Workers that were killed."""
    failed: float | None = None
    states: dict[str, float] = {}


class LedgerView(Struct, frozen=True, kw_only=True):
    """Prompt groups by what became of them, and those under way against the number that the gate admits."""

    trained: float | None = None
    filtered: float | None = None
    quarantined: float | None = None
    left_out: float | None = None
    """Prompts that a rule of the data left out before a lease, as data.max_prompt_tokens."""
    outstanding: float | None = None
    gate: float | None = None
    """Most that may be outstanding with the present limit, all of them leased at the newest version."""
    buffered: float | None = None
    """Outstanding groups that are in the learner's buffer."""
    groups_per_step: Count = 0


class EpisodeStageRow(Struct, frozen=True, kw_only=True):
    """A stage that episodes are at: start, queue, engine, paused, user, tool NAME, close, score, judge."""

    name: str
    open: float | None = None
    """Episodes that are at it now."""
    share: float | None = None
    """Share of the time of episodes that have ended meanwhile; those of all stages add up to 1."""


class EpisodeHostRow(PlacedRow, frozen=True, kw_only=True):
    """An actor that plays episodes."""

    workers: Count = 0
    """Processes; 0 where each episode is a program of its own."""
    kinds: dict[Kind, float] = {}
    """Shares of the workers' time."""
    open: float | None = None
    waiting: float | None = None
    """Episodes that wait for a worker."""
    played: float | None = None
    failed: float | None = None
    tool_calls: float | None = None
    tool_errors: float | None = None
    """Calls of tools that raised, that there are not, or with wrong arguments."""
    lost_workers: float | None = None
    """Workers that were ended, or ended by themselves."""
    restarts: Count = 0


class EpisodesView(Struct, frozen=True, kw_only=True):
    """Episodes by what they are at, and what came of those before. Counts are since the rollouters started."""

    open: float | None = None
    oldest_s: float | None = None
    """Age of the oldest attempt that is open."""
    stages: list[EpisodeStageRow] = []
    """Stages, those with the most episodes first."""
    turns_mean: float | None = None
    """Mean turns of episodes that have ended meanwhile."""
    turns_p95: float | None = None
    """95th percentile of the turns; upper edge of the bucket."""
    prompt_tokens_mean: float | None = None
    """Mean tokens of the context of a call."""
    cost_factor: float | None = None
    """Tokens prefilled and sampled, over those had each call gone on from the one before."""
    reprefill_tokens: float | None = None
    """Tokens computed again after updates."""
    malformed_calls: float | None = None
    """Calls of tools that could not be read."""
    ended: dict[str, float] = {}
    """Episodes that ended, by outcome."""
    failed: dict[str, float] = {}
    """Attempts that failed, by cause."""
    forks: dict[str, float] = {}
    """Calls that forked, by cause."""
    hosts: list[EpisodeHostRow] = []


class Document(Struct, frozen=True, kw_only=True):
    """Everything that asyncrl-top shows, as numbers."""

    schema: int = SCHEMA
    wall: float
    window_s: float
    """Time over which shares are taken; 0 for the whole life of each resource."""
    run: RunRow
    bottleneck: Verdict
    stages: list[StageRow]
    rollouters: list[RollouterRow]
    ranks: list[RankRow]
    phases: list[PhaseRow]
    learning: LearningView
    weights: WeightsView
    staleness: StalenessView
    reward: RewardView
    ledger: LedgerView
    episodes: EpisodesView | None = None
    """The episodes; null where a prompt has one response."""
    events: list[Event]
    """Events, oldest first."""
    actors: list[ActorView]
    """All actors, as in the snapshot."""


def to_json(document: Document) -> bytes:
    """One line of JSON."""
    return msgspec.json.encode(document)


def json_schema() -> dict[str, Any]:
    """The JSON schema of what ``to_json`` gives."""
    return msgspec.json.schema(Document)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")
