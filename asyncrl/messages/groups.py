"""A prompt group between actors: its lease, as a rollouter requests and returns it, and its delivery to the learner.

The conversation of an episode may fork, where a context does not continue an earlier answer. A **path** leads from its
first message to one of its ends.

**Seals** prove to the learner which rollouter a lease was given to, so it need not ask the dataloader. The dataloader
seals each lease for one incarnation of one rollouter, with a key that it shares with the learner for the whole run.
Invariant: a seal fits only that incarnation, with the uid, number and purpose that were sealed. Either side may
restart, and earlier seals still fit.

``check_group`` checks everything that a plan of a step relies on (learner/algorithm/batch.py). A group that fails is
quarantined with the reason. The functions after it compute lengths, versions and rewards. They consider tokens of role
``sampled`` only, in the order of ``Sequence.logprobs``. They expect sequences that have passed ``check_group``, and
then do not fail.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from asyncrl.core.truncation import Truncation
from asyncrl.messages import DATALOADER, ROLLOUTER, Count, Done, FinishReason, Message, Request, Uid
from asyncrl.messages.reward import LONGEST_JUDGEMENT, Completion
from asyncrl.messages.token_sets import TokenSets, problem_of

TRUNCATED: frozenset[FinishReason] = frozenset({"length", "turns", "time"})
"""Finish reasons of trajectories that a limit ended: of tokens, turns or time."""
ABOVE_ZERO = 1e-3
"""Nats by which rounding may lift a log-prob above 0."""
TokenRole = Literal["sampled", "context", "repeated"]
"""Origin of a token. ``sampled``: by the policy, and trained in this sequence. ``repeated``: by the policy, but trained
in an earlier sequence of the trajectory, or not at all (an auxiliary call). ``context``: by anything else."""


class VersionSpan(Struct, gc=False, frozen=True, array_like=True):
    """Tokens [start, end) of a sequence have one role; if sampled, they were sampled by weights of ``version``.

    ``mixed_kv``: whether their KV cache was partly computed by older weights. ``version`` is -1 for other roles.
    """

    version: int
    start: int
    end: int
    mixed_kv: bool = False
    role: TokenRole = "sampled"


class Turn(Struct, gc=False, frozen=True, array_like=True):
    """One answer of the policy: tokens [start, end) of its sequence, all of them sampled."""

    start: int
    end: int
    past_reward: float = 0.0
    """Sum of the turn rewards of the trajectory that this answer cannot have caused. These are all except its own and
    those of turns that come after it on a path of the conversation."""


class Sequence(Struct, gc=False, kw_only=True):
    """A path through a conversation, as the policy saw it: a prompt, then T tokens, S of them of role ``sampled``."""

    prompt_ids: np.ndarray | None = None
    """int32 [P], P > 0, the tokens before the first one of the policy; None: the prompt of the lease."""
    tokens: np.ndarray
    """int32 [T]; the first is sampled, or repeated."""
    logprobs: np.ndarray
    """float32 [S], nats: log-prob of each sampled token by the weights that sampled it, in order."""
    spans: list[VersionSpan]
    """Contiguous, covering [0, T)."""
    turns: list[Turn] = []
    """The answers of role ``sampled`` in it, ascending; empty if the whole sequence is one answer."""
    sets: TokenSets | None = None
    """The set from which each sampled token was sampled, under the lease's ``truncation``."""
    routes: np.ndarray | None = None
    """Routes of the prompt and the tokens, without the last one (routes.py): [P + T - 1, layers, chosen]; None if the
    engine returns none."""


class Lease(Struct, gc=False, frozen=True, kw_only=True):
    """The lease of one prompt group. It ends by delivery, return, or its holder's death."""

    uid: Uid
    """EPOCH-INDEX of a training prompt; NAME@ROUND-INDEX of an eval prompt. Ledger explains epochs of a mixture."""
    number: Count
    """Number of the lease, counted per rollouter incarnation from 1."""
    purpose: str
    """train, or eval/NAME."""
    epoch: Count
    index: Count
    param_version: int
    """The newest version that was published when the lease was made."""
    attempt: Count = 0
    """Deaths of processes while its prompt was generated, as core/death_counts.py counts them."""
    prompt_ids: np.ndarray
    """int32 [P]."""
    prompt: str
    """The prompt as text."""
    row: dict[str, Any]
    """The dataset row, as the reward function sees it."""
    samples: Annotated[int, Meta(ge=1)]
    temperature: float
    truncation: Truncation | None = None
    """Truncation of the distribution; None samples from the whole one."""
    max_tokens: Annotated[int, Meta(ge=1)]
    source: str = ""
    """Name of the prompt's source in a mixture; empty without one, and for an evaluation."""
    seal: str = ""
    """Proof of the rollouter to which it was leased (``fits``); empty without a key."""


class NewLeases(Message, frozen=True, kw_only=True):
    """New leases; empty if none came in time. ``closed``: whether the run needs no further group.

    After that the learner may still go back to a checkpoint, and then more groups are needed.
    """

    leases: list[Lease] = []
    closed: bool = False


class RequestLeases(Request, frozen=True, kw_only=True):
    """Rollouter to dataloader: request leases of prompt groups. Parked until there is one.

    A rollouter that leaves gets an empty answer at once, as every rollouter does once the run needs no further group.
    Leases above ``seen`` are sent again first, so a lost reply loses nothing.
    """

    reply = NewLeases
    senders = ROLLOUTER
    idle = True
    seen: Count
    """Highest number of a lease that this incarnation of the rollouter has received."""
    free_groups: Annotated[int, Meta(ge=1)]
    """Number of groups that it can take, including leases above ``seen`` that are sent again."""
    served_version: int
    """The version that its engine serves; -1 before the first."""
    holding: list[Uid] = []
    """Uids of all groups that it holds; leases of its earlier incarnations are lost."""
    number: Count = 0
    """Number of the call, from 1 in each incarnation of the rollouter; 0 for an unnumbered call.

    A call gets no new leases if a later call has arrived, or if it got leases before and is repeated.
    """


class ReturnLeases(Request, frozen=True, kw_only=True):
    """Rollouter to dataloader: these groups will not be delivered; lease them to another rollouter."""

    reply = Done
    senders = ROLLOUTER
    uids: list[Uid]
    leaving: bool = False
    """Whether the rollouter leaves, or the run is preempted: it requests no more leases, and holds nothing except
    ``holding``. Its other leases were delivered to the learner, or were never received. Sent when it begins to leave,
    and again at its end.
    """
    holding: list[Uid] = []
    """Uids of the groups that it may still deliver while it leaves."""


class Trajectory(Struct, gc=False, kw_only=True):
    """The result of one episode: one response or one conversation, which gets one reward."""

    sample: Count
    sequences: Annotated[list[Sequence], Meta(min_length=1)]
    """Each token of a trained answer has role ``sampled`` in exactly one. Their order depends on the requests alone."""
    messages: list[dict[str, Any]] = []
    """The main path of the conversation, as in OpenAI's chat completions; empty if the prompt has a single response."""
    branches: list[list[dict[str, Any]]] = []
    """The other paths of the conversation that end in a trained answer, each from its first message."""
    finish_reason: FinishReason
    text: str
    """The response; in a conversation, the last answer."""
    reward: float | None = None
    components: dict[str, float] = {}
    judgement: Annotated[str, Meta(max_length=LONGEST_JUDGEMENT)] = ""
    """Words of a judge about it; only samples/ uses them."""
    resumes: Count = 0
    """Number of times that its generation was interrupted and then continued."""
    attempts: Annotated[int, Meta(ge=1)] = 1
    """Number of attempts at it: the failed ones, and this one."""
    turns: Count = 0
    """Number of the policy's answers, trained or not; 0 if the prompt has a single response."""
    forks: dict[str, Count] = {}
    """Number of calls of the policy whose context did not continue an earlier answer, by cause."""
    stage_s: dict[str, float] = {}
    """Seconds of the episode by stage: start, queue, engine, paused, tool, user, close."""
    generate_s: float = 0.0
    score_s: float = 0.0


class Group(Struct, gc=False, frozen=True, kw_only=True):
    """A finished prompt group: its scored trajectories, or the reason of its failure."""

    lease: Lease
    trajectories: list[Trajectory]
    failure: str | None = None
    """Reason that the group must be quarantined; None if it did not fail."""
    dropped: Count = 0
    """Number of trajectories that failed and were left out (on_failed_trajectory = drop)."""
    failed_attempts: Count = 0
    """Number of failed attempts at its trajectories, also if a later attempt succeeded."""


class Deliver(Request, frozen=True, kw_only=True):
    """Rollouter to learner: a finished group. After the reply the rollouter may release its lease."""

    reply = Done
    senders = ROLLOUTER
    group: Group


class Held(Message, frozen=True, kw_only=True):
    """Those of Holds.uids that the learner holds or has finished; they must not be leased again."""

    uids: list[Uid]


class Holds(Request, frozen=True, kw_only=True):
    """Dataloader to learner: say which of these groups it holds or has finished."""

    reply = Held
    senders = DATALOADER
    uids: list[Uid]


def sealed(key: bytes, lease: Lease, rollouter: str, incarnation: int) -> Lease:
    """Return the lease with the seal for this incarnation of a rollouter."""
    return msgspec.structs.replace(lease, seal=_seal(key, lease, rollouter, incarnation))


def fits(key: bytes, lease: Lease, rollouter: str, incarnation: int) -> bool:
    """Whether the lease carries the seal for this incarnation of a rollouter, and is unchanged in what is sealed."""
    return hmac.compare_digest(_seal(key, lease, rollouter, incarnation).encode(), lease.seal.encode())


def _seal(key: bytes, lease: Lease, rollouter: str, incarnation: int) -> str:
    sealed_fields = [lease.uid, lease.number, lease.purpose, rollouter, incarnation]
    return hmac.new(key, msgspec.msgpack.encode(sealed_fields), hashlib.sha256).hexdigest()


def check_group(group: Group) -> str | None:
    """Check that a group can be trained. Returns None if it can, else the reason, first its own ``failure``."""
    if group.failure is not None:
        return group.failure
    if len(group.trajectories) < 2:
        return f"{len(group.trajectories)} trajectories; an advantage needs at least 2"
    if not len(group.lease.prompt_ids):
        return "the prompt is empty; its first response token has nothing to be predicted from"
    for trajectory in group.trajectories:
        if problem := _check_trajectory(trajectory, truncated=group.lease.truncation is not None):
            return f"sample {trajectory.sample}: {problem}"
    return None


def _check_trajectory(trajectory: Trajectory, *, truncated: bool) -> str | None:
    if not trajectory.sequences:
        return "no sequences"
    for number, sequence in enumerate(trajectory.sequences):
        problem = _check_tokens(sequence) or _check_logprobs(sequence) or _check_turns(sequence)
        problem = problem or _check_sets(sequence, truncated=truncated)
        if problem:
            return f"sequence {number}: {problem}" if len(trajectory.sequences) > 1 else problem
    if trajectory.reward is None or not math.isfinite(trajectory.reward):
        return f"the reward is {trajectory.reward}"
    return None


def _check_tokens(sequence: Sequence) -> str | None:
    count, spans = len(sequence.tokens), sequence.spans
    if not count:
        return "no tokens"
    if sequence.prompt_ids is not None and not len(sequence.prompt_ids):
        return "its prompt is empty; its first token has nothing to be predicted from"
    # The ends of the previous spans: the first span begins at 0, and each other one at the end of the previous one.
    ends = [0, *(span.end for span in spans)]
    if ends[-1] != count or any(s.start != end or s.end <= s.start for s, end in zip(spans, ends, strict=False)):
        return f"version spans do not cover its {count} tokens: {[(s.start, s.end) for s in spans]}"
    for span in spans:
        if (span.role == "sampled") != (span.version >= 0):
            return f"tokens {span.start} to {span.end} are {span.role} and of version {span.version}"
    if spans[0].role == "context":
        return "its first token is context, which belongs to its prompt"
    return None


def _check_logprobs(sequence: Sequence) -> str | None:
    sampled = sum(span.end - span.start for span in sampled_spans(sequence))
    if len(sequence.logprobs) != sampled:
        return f"{sampled} sampled tokens, {len(sequence.logprobs)} log-probs"
    # Written so that NaN fails, too.
    if sampled and not (sequence.logprobs.min() > -np.inf and sequence.logprobs.max() <= ABOVE_ZERO):
        return "a log-prob is not finite or above 0"
    return None


def _check_turns(sequence: Sequence) -> str | None:
    """Check that the turns are the sampled tokens, in order."""
    if not sequence.turns:
        return None
    places = [(turn.start, turn.end) for turn in sequence.turns]
    covered = np.concatenate([np.arange(start, end) for start, end in places])
    if any(end <= start for start, end in places) or not np.array_equal(covered, sampled_positions(sequence)):
        return f"its turns {places} are not its sampled tokens, in order"
    if not all(math.isfinite(turn.past_reward) for turn in sequence.turns):
        return "the past reward of a turn is not finite"
    return None


def _check_sets(sequence: Sequence, *, truncated: bool) -> str | None:
    """Check that each sampled token has a set with it, if the lease truncates the distribution, and none otherwise."""
    if sequence.sets is None:
        missing = truncated and len(sequence.logprobs)
        return "its distributions were truncated, and it has no token sets" if missing else None
    if not truncated:
        return "it has token sets, and its lease truncates nothing"
    return problem_of(sequence.sets, sequence.tokens[sampled_positions(sequence)])


def is_truncated(trajectory: Trajectory) -> bool:
    """Whether a limit ended the trajectory."""
    return trajectory.finish_reason in TRUNCATED


def sampled_tokens(trajectory: Trajectory) -> int:
    """Length of the trajectory: the number of its sampled tokens."""
    return sum(len(sequence.logprobs) for sequence in trajectory.sequences)


def completion_of(trajectory: Trajectory) -> Completion:
    """Return the trajectory as a reward function sees it."""
    return Completion(
        text=trajectory.text,
        finish_reason=trajectory.finish_reason,
        tokens=sampled_tokens(trajectory),
        messages=trajectory.messages,
        branches=trajectory.branches,
    )


def sampled_spans(sequence: Sequence) -> Iterator[VersionSpan]:
    """Yield the spans of role ``sampled``."""
    return (span for span in sequence.spans if span.role == "sampled")


def sampled_positions(sequence: Sequence) -> np.ndarray:
    """Positions of the sampled tokens in ``tokens``: int64 [S]."""
    if len(sequence.logprobs) == len(sequence.tokens):
        return np.arange(len(sequence.tokens))
    # The empty array is for a sequence without sampled spans: numpy cannot concatenate an empty list.
    return np.concatenate([np.arange(0), *(np.arange(span.start, span.end) for span in sampled_spans(sequence))])


def versions_of(trajectory: Trajectory) -> list[int]:
    """The version of each sampled span, in order."""
    return [span.version for sequence in trajectory.sequences for span in sampled_spans(sequence)]


def past_rewards(sequence: Sequence) -> tuple[np.ndarray, np.ndarray]:
    """Return ``Turn.past_reward`` and the length of each answer of a sequence: float64 [answers], int64 [answers].

    The lengths sum to S. A sequence without turns is one answer with past reward 0.
    """
    if not sequence.turns:
        sampled = len(sequence.logprobs)
        answers = 1 if sampled else 0
        return np.zeros(answers), np.full(answers, sampled, np.int64)
    return (
        np.array([turn.past_reward for turn in sequence.turns], np.float64),
        np.array([turn.end - turn.start for turn in sequence.turns], np.int64),
    )


def turns_past(trajectory: Trajectory) -> np.ndarray:
    """Reward that each turn of a trajectory cannot have caused (``Turn.past_reward``): float64 [turns], over all its
    sequences."""
    return np.concatenate([past_rewards(sequence)[0] for sequence in trajectory.sequences])


def rewards_of(group: Group) -> np.ndarray:
    """Rewards of the scored trajectories, in order: float64 [n]."""
    return np.array([trajectory.reward for trajectory in group.trajectories], dtype=np.float64)
