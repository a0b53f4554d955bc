"""Account of the samples of a prompt group in a rollouter, for the group's story and for the timeline. Pure.

A sample tells each submission to the engine, how it ended, and its score; where it is an episode, which call of the
policy that was, what its context goes on from, which turn came of it, and how the episode ended. The story is one line
for the whole group, written when it leaves the rollouter; the timeline has each submission on the track of the slot it
was in.

Invariant: a sample keeps at most EVENTS_KEPT events, the first and the newest of them, and counts the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.messages.groups import Lease, VersionSpan
from asyncrl.observe.trace import Track

EVENTS_KEPT = 64
LONGEST_REASON = 300
"""Characters of a reason."""
MOST_TOOLS, LONGEST_TOOL = 8, 64
"""Names of tools that a turn calls, in a story, and characters of each."""


class SampleAccount:
    """One sample. ``elapsed`` gives the seconds since the rollouter took the lease up."""

    def __init__(self, uid: str, sample: int, elapsed: Callable[[], float]) -> None:
        self.uid = uid
        self.sample = sample
        self.events: list[list[Any]] = []
        """Events: [seconds, what, facts ...]; asyncrl/observe/explain/words.py reads them."""
        self.left_out = 0
        self.attempts = 0
        """Episodes that were begun for it."""
        self.host = ""
        """Episode host of the newest of them."""
        self.failed_attempts = 0
        self.elapsed = elapsed

    def call(self, number: int | None = None) -> CallAccount:
        """One more call of the policy; a sample may have several at a time. Calls of an episode have numbers."""
        return CallAccount(self, number)

    def began_episode(self, host: str) -> None:
        self.note("episode", self.attempts, host)
        self.attempts += 1
        self.host = host

    def credited(self, turn: int, value: float) -> None:
        self.note("turn reward", turn, value)

    def ended_episode(self, outcome: str, turns: int, reward: float | None, stage_s: Mapping[str, float]) -> None:
        """The episode is a trajectory; ``reward`` is what its code said, ``stage_s`` are seconds by stage."""
        self.note("ended", outcome, turns, reward, {stage: round(each, 3) for stage, each in stage_s.items()})

    def failed(self, what: str) -> None:
        """Something went wrong; it may be tried again."""
        self.note("failed", what[:LONGEST_REASON])

    def scored(self, reward: float, run_s: float) -> None:
        """The sample has its reward; ``run_s`` are the seconds that the reward function took."""
        self.note("scored", reward, round(run_s, 6))

    def note(self, *facts: Any) -> None:
        """Keep an event: its name, and its facts."""
        if len(self.events) >= EVENTS_KEPT:
            del self.events[EVENTS_KEPT // 2]
            self.left_out += 1
        self.events.append([round(self.elapsed(), 4), *facts])


class CallAccount:
    """One call of the policy for a sample: its slot, and its submissions.

    A call of an episode is two events where nothing comes between: its beginning, and the turn that came of it.
    """

    def __init__(self, sample: SampleAccount, number: int | None = None) -> None:
        self.uid, self.sample = sample.uid, sample.sample
        self._note = sample.note
        self._elapsed = sample.elapsed
        self._number = number
        self._asked = sample.elapsed()
        self._context: tuple[Any, ...] = ()
        self._sampled: tuple[Any, ...] = ()
        self._begun = False
        self._slot: Track | None = None

    def prompted(self, cause: str, parent: int | None, tokens: int, new: int) -> None:
        """Take the context: its cause, the turn that it continues, its tokens, and the ``new`` ones of them."""
        self._context = cause, parent, tokens, new

    def refused(self, reason: str) -> None:
        """The policy cannot be asked, or not any more."""
        self._note("refused", self._number, reason[:LONGEST_REASON])

    def answered(self, turn: int, tools: Sequence[str], malformed: int) -> None:
        """The call became a turn, which calls ``tools``."""
        names = [name[:LONGEST_TOOL] for name in tools[:MOST_TOOLS]]
        self._note("answered", self._number, turn, *self._sampled, names, malformed)

    def took_slot(self, slot: Track) -> None:
        """The call is generated in this slot from now on."""
        self._slot = slot
        slot.enter("wait", uid=self.uid, sample=self.sample)

    def left_slot(self) -> None:
        """The call is generated, or given up."""
        if self._slot is not None:
            self._slot.leave()
            self._slot = None

    def submitted(self, version: int, held: int) -> None:
        """A submission samples the tokens after the ``held`` ones under ``version``."""
        if self._number is None:
            self._note("resumed" if self._begun else "began", version)
        elif self._begun:
            self._note("resumed", version, self._number)
        else:
            waited = round(self._elapsed() - self._asked, 4)
            self._note("asked", self._number, version, waited, *self._context)
        self._begun = True
        if self._slot is not None:
            self._slot.enter(f"generate v{version}", uid=self.uid, sample=self.sample, version=version, held=held)

    def ended(self, tokens: int, spans: list[VersionSpan], reason: str | None, *, died: bool) -> None:
        """The submission is over, with ``tokens`` in all; ``reason`` is given where nothing more is to come."""
        call = () if self._number is None else (self._number,)
        if reason is None:
            self._note("engine died" if died else "aborted", tokens, *call)
        else:
            self._sampled = tokens, reason, [[span.version, span.start, span.end] for span in spans]
            if not call:
                self._note("finished", *self._sampled)
        if self._slot is not None:
            self._slot.leave(tokens=tokens, ended=reason or ("engine died" if died else "aborted"))
            if reason is None:
                self._slot.enter("wait", uid=self.uid, sample=self.sample)


class GroupAccount:
    """All samples of a lease. ``now`` is monotonic, ``wall`` Unix time, in seconds."""

    def __init__(self, lease: Lease, now: Callable[[], float], wall: Callable[[], float]) -> None:
        began = now()
        self._lease = lease
        self._since = wall()
        self.samples = [SampleAccount(lease.uid, sample, lambda: now() - began) for sample in range(lease.samples)]

    @property
    def failed_attempts(self) -> int:
        """Attempts at its trajectories that failed."""
        return sum(sample.failed_attempts for sample in self.samples)

    def facts(self, end: str) -> dict[str, Any]:
        """Facts of its line in the log; ``end`` is its way out of the rollouter, "running" if it has not left."""
        facts: dict[str, Any] = {
            "uid": self._lease.uid,
            "lease": self._lease.number,
            "since": round(self._since, 6),
            "end": end[:LONGEST_REASON],
            "samples": [sample.events for sample in self.samples],
        }
        left_out = sum(sample.left_out for sample in self.samples)
        return facts | ({"left_out": left_out} if left_out else {})
