"""Every message between actors, and the values they carry.

A message is a frozen msgspec struct. Its class name is the ``type`` in the envelope's header; its body is the
struct as a MessagePack map, validated against these annotations when decoded. Arrays (numpy) travel as buffers
beside the body. Fields are only ever added, with a default. None of it is ever part of a cycle, so the garbage
collector need not follow the thousands of groups that are held (``gc=False``).

A request names its reply (``reply``) and whether it may simply be repeated (``idempotent``): doing it twice then
has the effect of doing it once. A request without a reply is a cast.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta, Struct

from asyncrl.snapshot import Gpu, Histogram

Uid = Annotated[str, Meta(min_length=1, max_length=200)]
Count = Annotated[int, Meta(ge=0)]
FinishReason = Literal["stop", "length"]


class Message(Struct, gc=False, frozen=True, kw_only=True):
    """Base of everything that may be an envelope's body."""


class Request(Message, frozen=True, kw_only=True):
    """Base of every message that is answered."""

    reply: ClassVar[type[Message]]
    idempotent: ClassVar[bool] = True
    idle: ClassVar[bool] = False
    """Whether to wait for the answer is normal idleness; it is then parked until there is news."""
    for_viewers: ClassVar[bool] = False
    """Whether it is served to who only watches the run; every other request of theirs is refused."""


class Done(Message, frozen=True):
    """The reply that says no more than that it was done."""


# --- values -----------------------------------------------------------------------------------------------


class VersionSpan(Struct, gc=False, frozen=True, array_like=True):
    """Response tokens [start, end) were sampled under ``version``; ``mixed_kv`` over an older KV cache."""

    version: int
    start: int
    end: int
    mixed_kv: bool = False


class Ticket(Struct, gc=False, frozen=True, kw_only=True):
    """The lease of one prompt group. It ends by delivery, return, or its holder's death."""

    uid: Uid
    """EPOCH-INDEX of a training prompt; NAME@ROUND-INDEX of an eval prompt."""
    grant: Count
    """Number of the grant, counted per rollouter incarnation from 1."""
    purpose: str
    """train, or eval/NAME."""
    epoch: Count
    index: Count
    param_version: int
    """The newest version published at the grant."""
    attempt: Count = 0
    """Deaths of engines and rollouters that its earlier holders took part in."""
    alone: bool = False
    """It has been in too many deaths to share an engine: nothing else is generated beside it."""
    prompt_ids: np.ndarray
    """int32 [P]."""
    prompt: str
    """The prompt as text."""
    row: dict[str, Any]
    """The dataset row, as the reward function sees it."""
    samples: Annotated[int, Meta(ge=1)]
    temperature: float
    max_tokens: Annotated[int, Meta(ge=1)]


class Trajectory(Struct, gc=False, kw_only=True):
    """One response. All arrays have length T, the number of response tokens."""

    sample: Count
    tokens: np.ndarray
    """int32 [T]: sampled tokens and, in between, tokens of an environment."""
    logprobs: np.ndarray
    """float32 [T], nats, of the policy that sampled each token; 0 where loss_mask is 0."""
    loss_mask: np.ndarray
    """uint8 [T]: 1 for sampled tokens (end-of-sequence included), 0 for an environment's."""
    spans: list[VersionSpan]
    """Contiguous, covering [0, T)."""
    finish_reason: FinishReason
    text: str
    reward: float | None = None
    components: dict[str, float] = {}
    resumes: Count = 0
    """How often its generation was aborted and taken up again."""
    attempts: Annotated[int, Meta(ge=1)] = 1
    generate_s: float = 0.0
    score_s: float = 0.0


class EpochIntervals(Struct, gc=False, frozen=True, kw_only=True):
    """Prompts of an epoch that have the same outcome."""

    kind: Literal["trained", "filtered", "quarantined"]
    epoch: Count
    bounds: list[Count]
    """start, end, start, end, ... of disjoint ascending intervals of indices; an end is outside."""


class LedgerState(Struct, gc=False, frozen=True, kw_only=True):
    """The learner's word on what became of every prompt; see ledger.py."""

    outcomes: list[EpochIntervals] = []
    attempts: dict[Uid, Count] = {}
    """As Ticket.attempt, of prompts without an outcome; absent where it is 0."""
    first_epoch: Count = 0
    """The prompts of earlier epochs were others: nothing is granted from them any more."""


class Group(Struct, gc=False, frozen=True, kw_only=True):
    """A finished prompt group: scored trajectories, or the reason why there are none."""

    ticket: Ticket
    trajectories: list[Trajectory]
    failure: str | None = None
    """Set when the group is to be quarantined."""
    dropped: Count = 0
    """Trajectories left out under on_failed_trajectory = drop."""


# --- every actor --------------------------------------------------------------------------------------------


class ActorRecord(Struct, gc=False, frozen=True, kw_only=True):
    """What the registry knows of an actor."""

    name: str
    """ROLE/INDEX, for example rollouter/3."""
    incarnation: Count
    """Spawn time in ns; the larger one is the living one."""
    address: str
    """Where its ROUTER is bound; empty until it is ready for calls."""
    host: str = ""
    pid: Count = 0
    facts: dict[str, Any] = {}
    """Whatever its peers need to know beyond the address. A node agent tells its host's ``actors``."""
    attempt: Count = 0
    """How often it has been started again."""


class Register(Request, frozen=True, kw_only=True):
    """Actor to controller: I am here, or my record has changed."""

    reply = Done
    record: ActorRecord


class AwaitRecord(Struct, gc=False, frozen=True, array_like=True):
    """An open wait of an actor; see runtime/awaits.py."""

    whom: str
    """An actor, a role for whichever actor of it, or something inside the actor itself."""
    what: str
    seconds: float
    """How long it has lasted; where there are several for the same, the longest."""
    idle: bool = False
    """Normal idleness: no sign of trouble by itself."""


class ResourceRecord(Struct, gc=False, frozen=True, array_like=True):
    """A serial resource of an actor, as its state-time ledger has it; see monitor/states.py."""

    name: str
    state: str
    awaiting: str
    """Whom or what the state waits for."""
    state_s: float
    """Seconds in the present state."""
    seconds: dict[str, float]
    """By state, the present one up to now; they add up to the age of the resource."""


class EventRecord(Struct, gc=False, frozen=True, array_like=True):
    """A line of an actor's log of level warning or above."""

    number: Count
    """Ascending from 1 in each incarnation; one that was heard before is the same event."""
    wall: float
    """Unix time (s)."""
    level: str
    text: str


class Heartbeat(Message, frozen=True, kw_only=True):
    """Actor to controller, cast from a thread of its own.

    ``progress`` counts useful events and ``beat`` heartbeats: a beat without progress is a stall, not a death.
    Figures are cumulative since the start of the incarnation, and a beat carries those that have changed since they
    were last sent, and from time to time all (runtime/telling.py): what is not named is as it was.
    """

    beat: Count
    progress: Count
    state: str
    """starting, ready, or what the actor says of itself."""
    loop_lag_s: float = 0.0
    awaiting: str = ""
    """Whom or what the state waits for."""
    state_s: float = 0.0
    """Seconds in the present state."""
    oldest_await: str = ""
    """What it has awaited longest without being idle, as PEER TYPE SECONDS; empty if nothing."""
    awaits: Annotated[list[AwaitRecord], Meta(max_length=8)] = []
    """What it waits for, the oldest first."""
    counters: dict[str, float] = {}
    """Counters and gauges; names, kinds and units are in monitor/catalogue.py."""
    histograms: dict[str, Histogram] = {}
    """Counts by the buckets of the catalogue."""
    resources: list[ResourceRecord] = []
    """Its serial resources, where there are more than a beat carries in turn."""
    loop_busy: float = 0.0
    """Share of the last interval in which its event loop's thread used a processor."""
    cpu: float = 0.0
    """Processors used by the process and its children over the last interval; 1 is one core."""
    rss_bytes: Count = 0
    """Of the process and its children."""
    gpus: list[Gpu] = []
    """The GPUs that it may use, where they can be asked."""
    events: list[EventRecord] = []
    """Of the last few beats, the oldest first."""


class Resolve(Request, frozen=True, kw_only=True):
    """Anyone to controller: where is this actor? Parked until it is there with a larger incarnation than ``above``."""

    reply: ClassVar[type[Message]]
    idle = True
    name: str
    above: Count = 0
    unready: bool = False
    """Answer as soon as it has registered facts, even if it cannot be called yet."""


class Resolved(Message, frozen=True, kw_only=True):
    """``record`` is None when the wait ran out."""

    record: ActorRecord | None


Resolve.reply = Resolved

RunPhase = Literal["starting", "running", "preempting", "draining", "done", "failed"]
"""While ``preempting`` nothing new is generated, and the learner writes a checkpoint at its next version boundary."""


class MetricsLine(Message, frozen=True, kw_only=True):
    """Learner to controller, cast: a line that was just written to metrics.jsonl."""

    line: dict[str, Any]


class WatchRun(Request, frozen=True, kw_only=True):
    """Anyone to controller, parked until the run's state is newer than ``seen``."""

    reply: ClassVar[type[Message]]
    idle = True
    seen: int = -1
    seen_line: int = -1
    """With 0 or more, also answered when there are metrics lines past this number."""
    members: int = -1
    """Number of the Members that the caller has taken in; -1 where it takes in none."""


class WatchSnapshot(Request, frozen=True, kw_only=True):
    """Viewer to controller, parked until there is another snapshot of the run than ``seen``."""

    reply: ClassVar[type[Message]]
    idle = True
    for_viewers = True
    seen: int = -1


class SnapshotTaken(Message, frozen=True, kw_only=True):
    """``snapshot`` is a Snapshot (snapshot.py) in MessagePack; empty when there is no other than the one seen."""

    number: int
    snapshot: bytes = b""


WatchSnapshot.reply = SnapshotTaken


class RequestTrace(Request, frozen=True, kw_only=True):
    """Viewer to controller: write down what the actors have done of late. Parked until it is written."""

    reply: ClassVar[type[Message]]
    for_viewers = True


class TraceWritten(Message, frozen=True, kw_only=True):
    """``path`` is on the controller's host; empty, with the reason in ``error``, when there is none."""

    path: str
    error: str = ""
    actors: list[str] = []
    """Whose spans are in it."""
    missing: list[str] = []
    """Who did not hand theirs in in time."""


RequestTrace.reply = TraceWritten


class TraceSpan(Struct, gc=False, frozen=True, array_like=True):
    """Something that an actor did; see monitor/trace.py."""

    track: Annotated[str, Meta(min_length=1, max_length=100)]
    order: Annotated[int, Meta(ge=0, lt=100_000)]
    """Place of the track among those of its actor, and no other's."""
    name: Annotated[str, Meta(min_length=1, max_length=200)]
    began: float
    """Unix time (s)."""
    seconds: float
    """Negative while it goes on."""
    facts: dict[str, str | int | float | bool] = {}


class TracePart(Request, frozen=True, kw_only=True):
    """Actor to controller: a part of its spans, oldest first, because RunState.trace asks for them or it ends."""

    reply = Done
    idempotent = False
    number: Count
    """RunState.trace; 0 at the end of an actor."""
    spans: Annotated[list[TraceSpan], Meta(max_length=2000)]
    last: bool = False


class Condemned(Struct, gc=False, frozen=True, array_like=True):
    """An actor whose process is to be killed: exactly this incarnation, for this reason."""

    name: str
    incarnation: int
    reason: str


class Dead(Struct, gc=False, frozen=True, array_like=True):
    """An actor that is dead up to this incarnation, and has no successor so far."""

    name: str
    incarnation: int


class Stuck(Struct, gc=False, frozen=True, array_like=True):
    """An actor whose stacks are to be taken, and the watchdog's report on it."""

    name: str
    incarnation: int
    report: str
    number: int = 0
    """Of the report. Each is followed by the stacks once."""


class Leaving(Struct, gc=False, frozen=True, array_like=True):
    """A node agent or an actor that is to leave the run while that goes on."""

    name: str
    within_s: float
    """Time to finish what is begun, from when this is heard of."""


class RunState(Message, frozen=True, kw_only=True):
    """The state of the run."""

    number: int
    phase: RunPhase
    draining: list[str] = []
    """Roles that are to end now; what they deliver to, drains later (order: controller/run_state.py)."""
    reason: str = ""
    failed_actor: str = ""
    log: str = ""
    """Path of the failed actor's log, where known."""
    exit_code: int = 0
    last_line: int = 0
    lines: list[dict[str, Any]] = []
    waiting_for: list[str] = []
    """While starting: the actors that are not ready yet."""
    condemned: list[Condemned] = []
    """The actors that are to be killed so that they are started again."""
    stuck: list[Stuck] = []
    """Newest report of the watchdog, while it holds."""
    checkpoint: int = -1
    """Version of the newest complete checkpoint; -1 for none."""
    dead: list[Dead] = []
    """Of each actor without a living process the newest incarnation, if that has ended or is on a lost host."""
    lost_hosts: dict[str, list[str]] = {}
    """The hosts from which nothing has been heard for supervision.host_lost_s, as NAME (agent/N), and their actors."""
    members: int = 0
    """Number of the present Members; 0 while they are those of the start."""
    leaving: list[Leaving] = []
    """The hosts that are to leave the run, by their agents and actors."""
    trace: Count = 0
    """While a trace is wanted, its number; every actor hands in its spans once for each."""


WatchRun.reply = RunState


class StopRun(Request, frozen=True, kw_only=True):
    """Agent to controller: end the run in good order; with ``preempt``, after a checkpoint."""

    reply = Done
    reason: str
    preempt: bool = False


class RunFinished(Request, frozen=True, kw_only=True):
    """Learner to controller: the last step is trained and everything is written.

    With ``preempted`` the run is to be resumed instead: a checkpoint of everything trained is complete.
    """

    reply = Done
    preempted: bool = False


class CheckpointWritten(Request, frozen=True, kw_only=True):
    """Learner to controller: the checkpoint of ``version`` is complete."""

    reply = Done
    version: Count
    step: Count
    path: str


class ActorStarted(Request, frozen=True, kw_only=True):
    """Agent to controller: a process of this actor lives. Told again to a controller that was started again."""

    reply = Done
    name: str
    incarnation: Count


class ActorEnded(Request, frozen=True, kw_only=True):
    """Agent to controller: a process has ended.

    ``fatal`` when the restart policy gives up; ``exit_code`` is negative for a signal.
    """

    reply: ClassVar[type[Message]]
    name: str
    incarnation: Count
    exit_code: int
    fatal: bool
    reason: str
    log: str = ""
    died: Count = 0
    """When it ended (ns, on the clock of incarnations); 0 if it had been condemned or told to."""


class EndNoted(Message, frozen=True, kw_only=True):
    """``asked`` if the controller had told that actor to end."""

    asked: bool = False


ActorEnded.reply = EndNoted


class ReportFailure(Request, frozen=True, kw_only=True):
    """Actor to controller: the run cannot go on. ``exit_code`` is the run's."""

    reply = Done
    reason: str
    exit_code: int = 1


# --- hosts that come and go ---------------------------------------------------------------------------------

PublicKey = Annotated[str, Meta(min_length=40, max_length=40)]


class NewHost(Struct, gc=False, frozen=True, kw_only=True):
    """A host with rollouters that is to join a living run. Without CURVE there are no keys."""

    host: Annotated[str, Meta(min_length=1, max_length=200)]
    """Its name in the hostfile."""
    address: str = ""
    """What its actors bind."""
    replicas: Annotated[int, Meta(ge=1, le=1024)]
    agent_keys: list[PublicKey] = []
    """Of its node agent, one for each attempt."""
    keys: list[list[PublicKey]] = []
    """Of each of its rollouters, one for each attempt."""


class Join(Request, frozen=True, kw_only=True):
    """Launcher to controller: let these hosts take part. Parked until every living actor knows their keys."""

    reply: ClassVar[type[Message]]
    ask: Annotated[str, Meta(min_length=16, max_length=64)]
    """Chosen at random: by it a repeat is known."""
    hosts: Annotated[list[NewHost], Meta(min_length=1, max_length=1024)]


class JoinedHost(Struct, gc=False, frozen=True, kw_only=True):
    """What a new host is called from now on."""

    host: str
    agent: str
    rollouters: list[str]


class Joined(Message, frozen=True, kw_only=True):
    """The hosts in the order of the request. They may be started once ``waiting_for`` is empty."""

    hosts: list[JoinedHost]
    peers: dict[str, list[str]] = {}
    """Public keys of the whole run by actor name."""
    waiting_for: list[str] = []
    """Actors that have not taken in the new keys so far: ask again."""


Join.reply = Joined


class Leave(Request, frozen=True, kw_only=True):
    """Launcher to controller: drain a host and let it go; asked again, the same.

    Parked while no other rollouter serves, but one is expected to.
    """

    reply: ClassVar[type[Message]]
    host: str
    """Its name, in the hostfile or as it calls itself, or that of its agent."""
    within_s: Annotated[float, Meta(ge=0)]
    """Time to finish the groups that are begun; what is left then goes back to the dataloader."""
    reason: str = ""
    ask: str = ""
    """Only if it was this request to join that brought the host."""


class LeaveBegun(Message, frozen=True, kw_only=True):
    """The host by its agent, what it is called, and its actors."""

    agent: str
    host: str
    actors: list[str]


Leave.reply = LeaveBegun


class HostLeft(Request, frozen=True, kw_only=True):
    """Agent to controller, its last words: everything on this host has ended."""

    reply = Done


class MemberHost(Struct, gc=False, frozen=True, kw_only=True):
    """A host that has joined, is leaving, or has left."""

    agent: str
    host: str
    actors: list[str]
    stage: Literal["joining", "serving", "leaving", "left"]
    reason: str = ""
    """Why it leaves or has left."""


class WatchMembers(Request, frozen=True, kw_only=True):
    """Anyone to controller, parked until the members are others than ``seen``."""

    reply: ClassVar[type[Message]]
    idle = True
    seen: int = -1


class Members(Message, frozen=True, kw_only=True):
    """Who has come to those that the run began with, and who has left."""

    number: Count
    keys: dict[str, list[PublicKey]] = {}
    """Of each agent and actor that has joined its public keys, one for each attempt; none without CURVE."""
    serving: list[str] = []
    """The actors among them that have been ready once: from then on they are like any other."""
    gone: list[Dead] = []
    """Agents and actors that have left for good; their keys open nothing any more."""
    hosts: list[MemberHost] = []


WatchMembers.reply = Members


# --- dataloader ---------------------------------------------------------------------------------------------


class Lease(Request, frozen=True, kw_only=True):
    """Rollouter to dataloader: grant me prompt groups. Parked until there is one.

    Grants above ``seen`` are granted again first, so a lost reply loses nothing.
    """

    reply: ClassVar[type[Message]]
    idle = True
    seen: Count
    """The highest grant received by this incarnation of the rollouter."""
    free_groups: Annotated[int, Meta(ge=1)]
    """How many more groups it can hold, those above ``seen`` included."""
    served_version: int
    """The oldest version that its engines serve; -1 before the first."""
    holding: list[Uid] = []
    """Uids it holds. Of its earlier incarnations nothing is left."""


class Leased(Message, frozen=True, kw_only=True):
    """An empty list when nothing could be granted in time; ``closed`` when nothing will ever be again."""

    tickets: list[Ticket] = []
    closed: bool = False


Lease.reply = Leased


class ReturnTickets(Request, frozen=True, kw_only=True):
    """Rollouter to dataloader: these groups were not generated; somebody else is to do it."""

    reply = Done
    uids: list[Uid]
    leaving: bool = False
    """It asks for nothing any more and holds nothing but ``holding``; what else it was granted is with the learner, or
    was never received. Said when it begins to leave, and again when it ends.
    """
    holding: list[Uid] = []
    """While it leaves: what it may still deliver."""


class Outcome(Struct, gc=False, frozen=True, array_like=True):
    """What became of a group. Only ``trained`` counts towards the gate's T."""

    uid: Uid
    kind: Literal["trained", "filtered", "quarantined", "evaluated"]


class Outcomes(Request, frozen=True, kw_only=True):
    """Learner to dataloader: numbered, acknowledged, repeated until acknowledged."""

    reply: ClassVar[type[Message]]
    number: Annotated[int, Meta(ge=1)]
    """Counts from 1 without gaps; a number already seen is acknowledged and ignored."""
    version: int
    """The newest published version."""
    trained_at_version: Count
    """T(version): groups trained when it was published."""
    outcomes: list[Outcome] = []
    buffered_groups: Count = 0
    """Groups in the learner's buffer when its last step began, beyond that step's own."""
    waited: bool = False
    """Whether the learner has waited for groups since the last report."""
    step_began: bool = False
    """Whether buffered_groups and waited speak of a step that has begun since the last report."""
    finished: bool = False
    """The last step is trained: nothing more is to be leased for training."""


class OutcomesSeen(Message, frozen=True, kw_only=True):
    """The highest number seen without a gap, and the limit now in force."""

    number: Count
    limit: float
    """Working limit eta_t, in versions."""


Outcomes.reply = OutcomesSeen


class WatchSupply(Request, frozen=True, kw_only=True):
    """Learner to dataloader, parked until the supply's state is newer than ``seen``."""

    reply: ClassVar[type[Message]]
    idle = True
    seen: int = -1


class Rejected(Struct, gc=False, frozen=True, array_like=True):
    """A prompt that the dataloader will not grant (again)."""

    uid: Uid
    reason: str


class Supply(Message, frozen=True, kw_only=True):
    """What there is still to come."""

    number: int
    exhausted: bool
    """Nothing is left to grant for training."""
    outstanding: Count
    """Groups granted for training and not yet reported or returned."""
    rejected: list[Rejected] = []
    """Prompts to be quarantined: over max_prompt_tokens, or in too many deaths. Until the learner reports them."""
    attempts: dict[Uid, Count] = {}
    """As LedgerState.attempts, as the dataloader knows it."""
    evals: dict[str, int] = {}
    """eval/NAME@ROUND: number of its prompts, for every round opened so far and not yet closed."""


WatchSupply.reply = Supply


class EvalRound(Struct, gc=False, frozen=True, kw_only=True):
    """An open round of evaluation, as the learner knows it."""

    name: str
    """NAME@ROUND."""
    held: list[Uid] = []
    """Its groups that the learner has."""


class Restored(Request, frozen=True, kw_only=True):
    """Learner to dataloader: this is where the run stands; whatever else you believed is void.

    Sent at the start of a learner, and to a dataloader that has started again (which asks for it with the error
    ``restore_needed``). The gate is shut until it is answered: the rollouters have then said which tickets they hold.
    Error ``changed`` when the prompts, or the seed of their order, are not those of the ledger and the user has not
    allowed that.
    """

    reply: ClassVar[type[Message]]
    version: Count
    """Newest published version, of the weights as they are now. Nothing is granted to an engine that serves less."""
    trained_at_version: Count
    """T(version)."""
    groups_left: Count
    """Groups to be trained until the end of the run, claims included."""
    outcomes_number: Count
    """The next report of outcomes has the number after this one; what came before is in the ledger."""
    ledger: LedgerState
    claims: list[Uid] = []
    """Groups in training and in the buffer."""
    fingerprint: str = ""
    """Of the prompts that the ledger speaks of; empty at the start of a run."""
    seed: int = -1
    """Of their order; -1 at the start of a run."""
    rounds_closed: list[str] = []
    """Rounds of evaluation that are over, as NAME@ROUND."""
    rounds_open: list[EvalRound] = []
    finished: bool = False
    """The last step is trained."""


class Resumed(Message, frozen=True, kw_only=True):
    """The gate is open."""

    fingerprint: str
    seed: int
    limit: float
    """Working limit eta_t, in versions."""
    first_epoch: Count = 0
    """As LedgerState.first_epoch, from here on: the ledger takes it over."""


Restored.reply = Resumed


# --- reward pool --------------------------------------------------------------------------------------------


class Completion(Struct, gc=False, frozen=True, kw_only=True):
    """What a reward function sees of a trajectory."""

    text: str
    finish_reason: FinishReason
    tokens: Count


class Score(Request, frozen=True, kw_only=True):
    """Rollouter to reward pool: score one completion, or a whole group for a group reward."""

    reply: ClassVar[type[Message]]
    uid: Uid
    prompt: str
    row: dict[str, Any]
    completions: Annotated[list[Completion], Meta(min_length=1)]


class Scores(Message, frozen=True, kw_only=True):
    """One reward a completion, in order. ``components`` may be empty."""

    rewards: list[float]
    components: list[dict[str, float]]
    run_s: float
    """Time spent in the function."""


Score.reply = Scores


# --- learner ------------------------------------------------------------------------------------------------


class Deliver(Request, frozen=True, kw_only=True):
    """Rollouter to learner: a finished group."""

    reply: ClassVar[type[Message]]
    group: Group


class Delivered(Message, frozen=True, kw_only=True):
    """The learner holds the group in memory, or held it before: its ticket may be released."""

    duplicate: bool = False


Deliver.reply = Delivered


class Holds(Request, frozen=True, kw_only=True):
    """Dataloader to learner: which of these groups do you hold or have you finished?"""

    reply: ClassVar[type[Message]]
    uids: list[Uid]


class Held(Message, frozen=True, kw_only=True):
    """The subset that must not be granted again."""

    uids: list[Uid]


Holds.reply = Held


class UpdateTimes(Struct, gc=False, frozen=True, kw_only=True):
    """What one weight update cost one replica: seconds and bytes."""

    version: int
    transport: str = ""
    """nccl, gloo, shm or stream."""
    stage_s: float = 0.0
    """Until the bytes were there and verified; under a rolling transport while the engine generated."""
    pause_s: float = 0.0
    """From the pause until the engine was idle."""
    load_s: float = 0.0
    """Under a collective with the transfer."""
    resume_s: float = 0.0
    stall_s: float = 0.0
    """Generation time lost: from the pause until the first request runs again."""
    bytes: int = 0
    """Size of the weights."""
    encoded_bytes: int = 0
    """What was read or received for them; less than ``bytes`` when deltas paid."""
    probe_kl: float | None = None
    """Estimated divergence of the engine from the learner over the probe's tokens (nats); see rollouter/drift.py. None
    where it was not measured."""
    checksum: str = ""
    """Of the engine's own copy of the weights, under weights.verify = full; equal in all engines of one kind."""


class RolloutStats(Message, frozen=True, kw_only=True):
    """Rollouter to learner, cast: what generation did since the last one."""

    sampled_tokens: Count
    """Tokens sampled since the start of this incarnation, eval included."""
    sampling: list[tuple[float, float]]
    """Intervals (wall clock, s) in which at least one token was being sampled, since the last cast."""
    updates: list[UpdateTimes] = []
    in_flight: Count = 0
    served_version: int = -1


# --- rollouter ---------------------------------------------------------------------------------------------


class HeldTicket(Struct, gc=False, frozen=True, array_like=True):
    """A ticket that a rollouter holds."""

    uid: Uid
    grant: Count
    attempt: Count


class OpenTickets(Request, frozen=True, kw_only=True):
    """Dataloader to rollouter: which tickets do you hold?

    Before it answers, the rollouter takes ``learner`` for the living incarnation of learner/0: an acknowledgement of
    an older one releases nothing any more, and what was delivered to an older one is delivered again.
    """

    reply: ClassVar[type[Message]]
    learner: Count


class TicketsHeld(Message, frozen=True, kw_only=True):
    """All that are not acknowledged by that learner, finished and spooled ones included."""

    seen: Count
    """The highest grant received."""
    served_version: int
    tickets: list[HeldTicket]
    leaving: bool = False
    """It takes no grant above ``seen``."""


OpenTickets.reply = TicketsHeld


# --- parameter server ---------------------------------------------------------------------------------------


class TensorSpec(Struct, gc=False, frozen=True, array_like=True):
    """A parameter in a bucket, under its Hugging Face checkpoint name."""

    name: str
    dtype: str
    """torch's name without the prefix: float32, bfloat16, ..."""
    shape: tuple[int, ...]
    offset: Count
    """Byte offset in the bucket; aligned to 64."""


class Delta(Struct, gc=False, frozen=True, kw_only=True):
    """A bucket encoded against the same bucket of version ``base``; see weights/delta.py."""

    base: Count
    path: str
    """As Bucket.path."""
    size: Count


class Bucket(Struct, gc=False, frozen=True, kw_only=True):
    """A run of parameters."""

    path: str
    """/proc/PID/fd/N of a sealed memfd, readable by processes of the same user on the same host; empty where the bytes
    are to be fetched."""
    size: Count
    checksum: int
    """xxh3_64 over the whole bucket."""
    tensors: list[TensorSpec]
    delta: Delta | None = None
    """The same bytes in fewer, for whoever holds the base."""


class Probe(Struct, gc=False, frozen=True, kw_only=True):
    """What the learner's weights of a version make of a few fixed sequences; an engine that serves them agrees."""

    tokens: np.ndarray
    """int32 [sequences, length]."""
    logprobs: np.ndarray
    """float32 [sequences, length - 1]: of each token but the first, given those before it, at temperature 1 (nats)."""


class Manifest(Struct, gc=False, frozen=True, kw_only=True):
    """A complete set of weights: every parameter of the model exactly once."""

    version: Count
    buckets: list[Bucket]
    probe: Probe | None = None


class BucketLayout(Struct, gc=False, frozen=True, kw_only=True):
    """A bucket before it is filled; the same in every version."""

    size: Count
    tensors: list[TensorSpec]


CollectiveBackend = Literal["nccl", "gloo"]
Transport = Literal["nccl", "gloo", "shm", "stream"]


class CollectiveGroup(Struct, gc=False, frozen=True, kw_only=True):
    """Who takes part in a broadcast. Rank 0 is the learner; a replica has ``workers`` consecutive ranks."""

    backend: CollectiveBackend
    epoch: Count
    """Number of the membership. A group is used for as long as nobody joins, leaves or fails."""
    world_size: Annotated[int, Meta(ge=2)]
    host: str
    """Where the learner waits for the members."""
    port: Annotated[int, Meta(ge=1, le=65535)]
    token: str = ""
    """Whoever calls there shows it."""


class Collective(Struct, gc=False, frozen=True, kw_only=True):
    """A replica's part in a broadcast."""

    group: CollectiveGroup
    first_rank: Annotated[int, Meta(ge=1)]
    """Of the replica's first worker."""
    buckets: list[BucketLayout]
    probe: Probe | None = None


class Offer(Struct, gc=False, frozen=True, kw_only=True):
    """A version for one replica, and the way to it: ``manifest`` under shm and stream, else ``collective``."""

    version: Count
    transport: Transport
    manifest: Manifest | None = None
    collective: Collective | None = None
    probe: bool = False
    """Whether this replica is to be measured against the probe, if there is one."""


class Publish(Request, frozen=True, kw_only=True):
    """Learner to parameter server: version ``manifest.version`` is there. Answered once it is held for good.

    A version that is there already is acknowledged again. Error ``version_reused`` for an older one.
    """

    reply = Done
    manifest: Manifest
    gather_s: float = 0.0


class KeepPublished(Request, frozen=True, kw_only=True):
    """Learner to parameter server, parked while version ``version`` is held there."""

    reply: ClassVar[type[Message]]
    idle = True
    version: Count


class Published(Message, frozen=True, kw_only=True):
    """``held`` False: the parameter server is another one and does not know the version; publish it again."""

    held: bool
    corrupt: bool = False
    """What is held is no longer what was sealed: its weights are to be published anew, under another number."""


KeepPublished.reply = Published


class Announce(Request, frozen=True, kw_only=True):
    """Learner to parameter server: ``version`` is being gathered and could be broadcast.

    Parked until every member of the group is paused for it, or it is clear that there will be no broadcast.
    """

    reply: ClassVar[type[Message]]
    version: Count
    backend: CollectiveBackend
    host: str
    port: int
    """Where the learner waits for the members."""
    buckets: list[BucketLayout]
    probe: Probe | None = None
    token: str = ""
    """As CollectiveGroup.token."""


class Announced(Message, frozen=True, kw_only=True):
    """``decided`` False: not in time, ask again. Else broadcast to ``group``; to nobody if it is None."""

    decided: bool
    group: CollectiveGroup | None = None


Announce.reply = Announced


class BroadcastEnded(Request, frozen=True, kw_only=True):
    """Learner to parameter server: the broadcast of ``version`` is over; an ``error`` breaks the group."""

    reply = Done
    version: Count
    epoch: Count
    error: str = ""


class NextUpdate(Request, frozen=True, kw_only=True):
    """Rollouter to parameter server, parked until there is a version above ``serving`` to be had.

    Whoever asks this has nothing staged and nothing paused any more, but for an engine that failed to load.
    """

    reply: ClassVar[type[Message]]
    idle = True
    serving: int
    host: str
    """See weights/place.py: replicas of the same value as the parameter server's can open its segments."""
    workers: Annotated[int, Meta(ge=1)] = 1
    """Processes of the engine that take part in a broadcast."""
    on_gpu: bool = False
    base: int = -1
    """Version whose bytes are kept here, to apply deltas to; -1 for none."""


class Update(Message, frozen=True, kw_only=True):
    """``offer`` is None when nothing newer came in time."""

    offer: Offer | None = None


NextUpdate.reply = Update


class FetchChunk(Request, frozen=True, kw_only=True):
    """Rollouter to parameter server: bytes [offset, offset + size) of a bucket, or of its delta against ``base``.

    Error ``version_gone`` when the version is no longer held.
    """

    reply: ClassVar[type[Message]]
    version: Count
    bucket: Count
    offset: Count
    size: Annotated[int, Meta(ge=1)]
    base: int = -1


class Chunk(Message, frozen=True, kw_only=True):
    """The bytes asked for."""

    data: np.ndarray
    """uint8 [size]."""
    checksum: int
    """xxh3_64 of ``data``."""


FetchChunk.reply = Chunk


class RequestPause(Request, frozen=True, kw_only=True):
    """Rollouter to parameter server, parked until this replica may pause to load ``version``."""

    reply: ClassVar[type[Message]]
    version: Count


class PauseGranted(Message, frozen=True, kw_only=True):
    """``granted`` False: not in time, ask again."""

    granted: bool


RequestPause.reply = PauseGranted


class JoinBroadcast(Request, frozen=True, kw_only=True):
    """Rollouter to parameter server: this replica is paused for the broadcast of ``version``.

    Parked until all members are, or it is called off.
    """

    reply: ClassVar[type[Message]]
    version: Count
    epoch: Count


class BroadcastBegins(Message, frozen=True, kw_only=True):
    """``decided`` False: not in time, ask again. ``begins`` False: called off; ask for the next update."""

    decided: bool
    begins: bool = False


JoinBroadcast.reply = BroadcastBegins


class ReportUpdate(Request, frozen=True, kw_only=True):
    """Rollouter to parameter server: the update to ``version`` ended here."""

    reply = Done
    version: Count
    committed: bool
    times: UpdateTimes
    error: str = ""
    corrupt: bool = False
    """The bytes were not what the manifest says, before anything was loaded."""
