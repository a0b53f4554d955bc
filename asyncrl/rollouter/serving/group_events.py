"""Records the events of a prompt group's samples in a rollouter, for the group's log line and the timeline. Pure.

The events of a sample are each submission to the engine, its end, and the score. An episode also has each call of the
policy, the turn that the call continues, the turn that it became, and the episode's end. One log line has the events of
a whole group; it is written when the group leaves the rollouter, and now and then before. The timeline shows each
submission on the track of its slot.

Invariant: a sample keeps at most EVENTS_KEPT events, the first and the newest of them, and counts the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.messages.groups import Lease, VersionSpan
from asyncrl.observe.trace import Track

EVENTS_KEPT = 64
LONGEST_REASON = 300
"""Most characters of a reason in an event."""
MOST_TOOLS, LONGEST_TOOL = 8, 64
"""Most names of called tools in the event of a turn, and most characters of each."""


class SampleEvents:
    """The events of one sample. ``elapsed`` gives the seconds since the rollouter received the lease."""

    def __init__(self, uid: str, sample: int, elapsed: Callable[[], float]) -> None:
        self.uid = uid
        self.sample = sample
        self.entries: list[list[Any]] = []
        """Events: [seconds, what, facts ...]; asyncrl/observe/explain/words.py reads them."""
        self.left_out = 0
        """Number of events dropped beyond EVENTS_KEPT."""
        self.attempts = 0
        """Number of episodes that were begun for the sample."""
        self.host = ""
        """Host of the sample's newest episode; "" before the first."""
        self.failed_attempts = 0
        self.elapsed = elapsed

    def call(self, number: int | None = None) -> CallEvents:
        """Begin the events of one more call of the policy. Calls of an episode are numbered, others are not."""
        return CallEvents(self, number)

    def began_episode(self, host: str) -> None:
        self.note("episode", self.attempts, host)
        self.attempts += 1
        self.host = host

    def credited(self, turn: int, value: float) -> None:
        self.note("turn reward", turn, value)

    def ended_episode(self, outcome: str, turns: int, reward: float | None, stage_s: Mapping[str, float]) -> None:
        """Note that the episode became a trajectory, with its code's ``reward`` and its seconds by stage."""
        self.note("ended", outcome, turns, reward, {stage: round(each, 3) for stage, each in stage_s.items()})

    def failed(self, what: str) -> None:
        """Note a failure, after which the sample may be tried again."""
        self.note("failed", what[:LONGEST_REASON])

    def scored(self, reward: float, run_s: float) -> None:
        """Note the sample's reward; ``run_s`` is the time that the reward function took (s)."""
        self.note("scored", reward, round(run_s, 6))

    def note(self, *facts: Any) -> None:
        """Add an event, its name first; beyond EVENTS_KEPT an event of the middle is dropped."""
        if len(self.entries) >= EVENTS_KEPT:
            del self.entries[EVENTS_KEPT // 2]
            self.left_out += 1
        self.entries.append([round(self.elapsed(), 4), *facts])


class CallEvents:
    """The events of one call of the policy for a sample: its slot and its submissions to the engine.

    An undisturbed call of an episode gives two events: "asked" at its first submission, "answered" for its turn.
    """

    def __init__(self, sample: SampleEvents, number: int | None = None) -> None:
        self.uid, self.sample = sample.uid, sample.sample
        self._note = sample.note
        self._elapsed = sample.elapsed
        self._number = number
        """Number of the call in its episode; None outside an episode."""
        self._asked_at = sample.elapsed()
        """Time of the call's arrival, as ``elapsed`` gives it."""
        self._prompt_facts: tuple[Any, ...] = ()
        """Facts of the call's prompt, for its event."""
        self._response_facts: tuple[Any, ...] = ()
        """The number of tokens, finish reason and version spans of the finished response."""
        self._begun = False
        """Whether the call has had a submission."""
        self._slot: Track | None = None
        """Track of the slot that the call has; None without one."""

    def prompted(self, cause: str, parent: int | None, tokens: int, new: int) -> None:
        """Note the call's prompt: its cause, the turn that it continues, its tokens, and how many of them are new."""
        self._prompt_facts = cause, parent, tokens, new

    def refused(self, reason: str) -> None:
        """Note that the call was refused."""
        self._note("refused", self._number, reason[:LONGEST_REASON])

    def answered(self, turn: int, tools: Sequence[str], malformed: int) -> None:
        """Note that the call became the answer ``turn``, which calls ``tools``; ``malformed`` calls were unreadable."""
        names = [name[:LONGEST_TOOL] for name in tools[:MOST_TOOLS]]
        self._note("answered", self._number, turn, *self._response_facts, names, malformed)

    def took_slot(self, slot: Track) -> None:
        """Show the call on the track of its slot from now on."""
        self._slot = slot
        slot.enter("wait", uid=self.uid, sample=self.sample)

    def left_slot(self) -> None:
        """End the call's time on the track of its slot."""
        if self._slot is not None:
            self._slot.leave()
            self._slot = None

    def submitted(self, version: int, held: int) -> None:
        """Note a submission under ``version``, which samples the tokens after the first ``held``."""
        if self._number is None:
            self._note("resumed" if self._begun else "began", version)
        elif self._begun:
            self._note("resumed", version, self._number)
        else:
            waited = round(self._elapsed() - self._asked_at, 4)
            self._note("asked", self._number, version, waited, *self._prompt_facts)
        self._begun = True
        if self._slot is not None:
            self._slot.enter(f"generate v{version}", uid=self.uid, sample=self.sample, version=version, held=held)

    def ended(self, tokens: int, spans: list[VersionSpan], reason: str | None, *, died: bool) -> None:
        """Note the end of a submission. ``tokens`` counts the whole response so far.

        ``reason`` is the finish reason of the response, None if it is not finished. The finished call of an episode is
        noted by ``answered``, not here.
        """
        call = () if self._number is None else (self._number,)
        if reason is None:
            self._note("engine died" if died else "aborted", tokens, *call)
        else:
            self._response_facts = tokens, reason, [[span.version, span.start, span.end] for span in spans]
            if not call:
                self._note("finished", *self._response_facts)
        if self._slot is not None:
            self._slot.leave(tokens=tokens, ended=reason or ("engine died" if died else "aborted"))
            if reason is None:
                self._slot.enter("wait", uid=self.uid, sample=self.sample)


class GroupEvents:
    """The events of all samples of a lease. ``now`` is monotonic, ``wall`` Unix time, in seconds."""

    def __init__(self, lease: Lease, now: Callable[[], float], wall: Callable[[], float]) -> None:
        began = now()
        self._lease = lease
        self._since = wall()
        self.samples = [SampleEvents(lease.uid, sample, lambda: now() - began) for sample in range(lease.samples)]

    @property
    def failed_attempts(self) -> int:
        """Number of failed attempts at its trajectories."""
        return sum(sample.failed_attempts for sample in self.samples)

    def facts(self, end: str) -> dict[str, Any]:
        """The fields of the group's log line; ``end`` says how it left the rollouter, "running" if it has not."""
        facts: dict[str, Any] = {
            "uid": self._lease.uid,
            "lease": self._lease.number,
            "since": round(self._since, 6),
            "end": end[:LONGEST_REASON],
            "samples": [sample.entries for sample in self.samples],
        }
        left_out = sum(sample.left_out for sample in self.samples)
        return facts | ({"left_out": left_out} if left_out else {})
