"""Puts the log lines of one prompt group into words; see history.py. Pure.

Lines that are not of group_log.py show their own text. Calls of an episode are numbered in the order of arrival, turns
in the order of answers, both from 0. Raises KeyError, TypeError or ValueError for an event that
rollouter/serving/group_events.py does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.core.formatting import duration, fixed
from asyncrl.observe import group_log
from asyncrl.observe.explain.lines import LogLine

STAGES_SAID = 4
TAKEN_INTO = {
    "buffered": "taken into the buffer",
    "filtered": "filtered: all of its rewards are equal",
    "quarantined": "quarantined",
    "evaluation": "taken for its round of evaluation",
    "duplicate": "delivered once more; not taken again",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEvent:
    """An event in the history of a group."""

    wall: float
    """Unix time (s)."""
    attempt: int
    """Attempt of the run: the number of its folder of logs."""
    actor: str
    what: str
    """Kind of the event, by which history.py finds the outcome."""
    text: str
    sample: int = -1
    """Number of the sample; -1 for the whole group."""
    facts: dict[str, Any] = field(default_factory=dict)


def words_of(line: LogLine, uid: str) -> Iterator[GroupEvent]:
    """Yields the events of the group ``uid`` in a line."""

    def event(what: str, text: str, wall: float = line.wall, sample: int = -1, **facts: Any) -> GroupEvent:
        at, actor = wall + line.shift, line.actor
        return GroupEvent(wall=at, attempt=line.attempt, actor=actor, what=what, text=text, sample=sample, facts=facts)

    match line.event:
        case group_log.LEASED:
            for one, (number, version, deaths, alone) in zip(line.uids, line.leases, strict=True):
                if one == uid:
                    more = (f", deaths {deaths})" if deaths else ")") + (", alone" if alone else "")
                    text = f"leased to {line.to} (lease {number}, newest version {version}{more}"
                    yield event("leased", text, version=version)
        case group_log.GENERATED:
            for sample, events in enumerate(line.samples):
                for seconds, what, *facts in events:
                    yield event(what, _SAMPLE_TEXTS[what](*facts), line.since + seconds, sample, details=facts)
            if line.left_out:
                yield event("events left out", f"{line.left_out} more events of its samples are not kept")
            if line.end == "running":
                yield event("running", "still running at this last report")
            elif line.end == "given up":
                yield event("given up", "gives it up: it ends or is preempted")
            else:
                yield event("delivered", line.end if ": " in line.end else f"{line.end} to the learner")
        case group_log.ORPHANED:
            yield event("orphaned", f"its holder {line.of} has died" if line.of else "its holder has died")
        case group_log.SETTLED if line.held:
            yield event("settled", "the learner has it: it is not leased again")
        case group_log.SETTLED:
            yield event("to be leased again", "the learner does not have it: it is leased again")
        case group_log.RETURNED:
            yield event("returned", f"returned by {line.by}")
        case group_log.TAKEN:
            yield event(line.into, TAKEN_INTO[line.into])
        case group_log.TRAINED:
            text = f"trained at step {line.step}, on the weights of version {line.version}"
            yield event("trained", text, step=line.step)
        case group_log.NOT_TRAINED:
            yield event(line.outcome, f"{line.outcome}: {line.reason}")
        case group_log.EVALUATED:
            yield event("evaluated", f"evaluated, after step {line.step}")
        case group_log.RESTORED:
            since = "the beginning" if line.version is None else f"the checkpoint of step {line.step}"
            yield event("undone", f"starts from {since}", step=line.step, held=uid in line.uids)
        case _:
            words = (str(each) for each in (line.reason, line.error, line.text) if each)
            yield event("note", ": ".join([line.event, *words]))


def _asked(call: int, version: int, waited: float, cause: str, parent: int | None, tokens: int, new: int) -> str:
    """Text on a call; ``parent`` is the turn before it, None for the first.

    ``cause`` is "root", "extend", or "fork:CAUSE" (rollouter/episode/conversation.py).
    """
    why = "the first" if parent is None else f"continues turn {parent}"
    if cause.startswith("fork:"):
        why = f"forks: {group_log.FORKS.get(cause, cause)}"
    context = f"{tokens} tokens of context, {new} of them new"
    return f"call {call} ({why}): {context}; generation began at version {version} after {duration(waited)}"


def _answered(
    call: int, turn: int, tokens: int, reason: str, spans: list[list[int]], tools: list[str], malformed: int
) -> str:
    text = f"call {call} gave turn {turn}: {_sampled(tokens, reason, spans)}"
    if tools:
        text += f"; it calls {', '.join(tools)}"
    return text + (f"; {malformed} calls of tools cannot be read" if malformed else "")


def _ended(outcome: str, turns: int, reward: float | None, stages: Mapping[str, float]) -> str:
    """Text on the end of an episode, with the stages that took longest; ``stages`` are seconds by stage."""
    reward_text = "" if reward is None else f", reward {fixed(reward, 3)}"
    longest = sorted(stages.items(), key=lambda stage: -stage[1])[:STAGES_SAID]
    where = ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in longest)
    return f"episode ended ({outcome}) with {turns} turns{reward_text}" + (f"; {where}" if where else "")


def _sampled(tokens: int, reason: str, spans: list[list[int]]) -> str:
    """Text on an answer: its number of tokens, its finish reason, and how many tokens each version sampled.

    ``spans`` are [version, start, end].
    """
    by_version = ", ".join(f"{end - start} at version {version}" for version, start, end in spans)
    return f"{tokens} tokens ({reason}): {by_version}"


def _of(call: int | None) -> str:
    """The prefix "call N: " of an event; empty without a call."""
    return "" if call is None else f"call {call}: "


_SAMPLE_TEXTS: dict[str, Callable[..., str]] = {
    "began": lambda version: f"generation began at version {version}",
    "resumed": lambda version, call=None: f"{_of(call)}resumed at version {version}",
    "aborted": lambda tokens, call=None: f"{_of(call)}aborted with {tokens} tokens",
    "engine died": lambda tokens, call=None: f"{_of(call)}the engine died; {tokens} tokens are kept",
    "finished": lambda *sampled: f"finished with {_sampled(*sampled)}",
    "failed": lambda reason: f"failed: {reason}",
    "scored": lambda reward, run_s: f"scored {fixed(reward, 3)}, which took {duration(run_s)}",
    "episode": lambda attempt, host: f"episode began at {host}" + (f", attempt {attempt + 1}" if attempt else ""),
    "asked": _asked,
    "answered": _answered,
    "refused": lambda call, reason: f"call {call} was refused: {reason}",
    "turn reward": lambda turn, value: f"turn {turn} is worth {fixed(value, 3)}",
    "ended": _ended,
}
"""Text of each event of rollouter/serving/group_events.py, made from its facts."""
