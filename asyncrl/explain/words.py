"""The lines of the logs that speak of one prompt group, in words; see story.py.

One function for each line that story_log.py writes says what befell the group by it; any other line with the uid is
told by what it says of itself. Fails with KeyError, TypeError, ValueError or IndexError for a line that has the name of
one of ours and is none. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from asyncrl.explain.episodes import EPISODE_SAYS, sampled
from asyncrl.explain.lines import LogLine
from asyncrl.telemetry.group_log import (
    EVALUATED,
    GENERATED,
    GRANTED,
    NOT_TRAINED,
    ORPHANED,
    RESTORED,
    RETURNED,
    SETTLED,
    TAKEN,
    TRAINED,
)
from asyncrl.text.numbers import fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """Something that befell the group."""

    wall: float
    """Unix time (s)."""
    attempt: int
    """Attempt of the run: the number of its folder of logs."""
    actor: str
    what: str
    text: str
    sample: int = -1
    """Number of the sample; -1 for the whole group."""
    facts: dict[str, Any] = field(default_factory=dict)


def words_of(line: LogLine, uid: str) -> Iterator[Happening]:
    """Happenings of the group ``uid`` by what a line says."""
    return _SAYS.get(line.event, _other)(line, uid)


def _happening(line: LogLine, what: str, text: str, wall: float | None = None, **facts: Any) -> Happening:
    at = (line.wall if wall is None else wall) + line.shift
    sample = facts.pop("sample", -1)
    return Happening(wall=at, attempt=line.attempt, actor=line.actor, what=what, text=text, sample=sample, facts=facts)


def _granted(line: LogLine, uid: str) -> Iterator[Happening]:
    for one, (number, version, attempt, alone) in zip(line.facts["uids"], line.facts["grants"], strict=True):
        if one == uid:
            more = f", deaths {attempt}" if attempt else ""
            text = f"granted to {line.facts['to']} (grant {number}, newest version {version}{more})"
            yield _happening(line, "granted", text + (", alone" if alone else ""), version=version)


def _generated(line: LogLine, uid: str) -> Iterator[Happening]:
    since = line.facts["since"]
    for sample, events in enumerate(line.facts["samples"]):
        for seconds, what, *facts in events:
            yield _happening(line, what, _SAMPLE_SAYS[what](*facts), since + seconds, sample=sample, told=facts)
    if left_out := line.facts.get("left_out"):
        yield _happening(line, "left out", f"{left_out} more events of its samples are not kept")
    end = line.facts["end"]
    if end == "running":
        yield _happening(line, "running", "it goes on; this is the last word on it")
        return
    text = "gives it up: it ends or makes way" if end == "given up" else f"{end} to the learner"
    if ": " in end:
        text = end
    yield _happening(line, "given up" if end == "given up" else "delivered", text)


def _began(version: int) -> str:
    return f"generation began at version {version}"


def _resumed(version: int, call: int | None = None) -> str:
    return f"{_call(call)}resumed at version {version}"


def _aborted(tokens: int, call: int | None = None) -> str:
    return f"{_call(call)}aborted with {tokens} tokens"


def _died(tokens: int, call: int | None = None) -> str:
    return f"{_call(call)}the engine died; {tokens} tokens are kept"


def _call(number: int | None) -> str:
    """Number of an episode's call of the policy, in words."""
    return "" if number is None else f"call {number}: "


def _finished(tokens: int, reason: str, spans: list[list[int]]) -> str:
    return f"finished with {sampled(tokens, reason, spans)}"


def _failed(reason: str) -> str:
    return f"failed: {reason}"


def _scored(reward: float, run_s: float) -> str:
    return f"scored {fixed(reward, 3)}, which took {1000 * run_s:.3g} ms"


_SAMPLE_SAYS: dict[str, Callable[..., str]] = {
    "began": _began,
    "resumed": _resumed,
    "aborted": _aborted,
    "engine died": _died,
    "finished": _finished,
    "failed": _failed,
    "scored": _scored,
    **EPISODE_SAYS,
}


def _orphaned(line: LogLine, uid: str) -> Iterator[Happening]:
    holder = line.facts["of"]
    yield _happening(line, "orphaned", f"its holder {holder} has died" if holder else "its holder has died")


def _settled(line: LogLine, uid: str) -> Iterator[Happening]:
    if line.facts["held"]:
        yield _happening(line, "settled", "the learner has it: it is not granted again")
    else:
        yield _happening(line, "to be granted again", "the learner does not have it: it is granted again")


def _returned(line: LogLine, uid: str) -> Iterator[Happening]:
    yield _happening(line, "returned", f"returned by {line.facts['by']}")


def _taken(line: LogLine, uid: str) -> Iterator[Happening]:
    into = line.facts["into"]
    texts = {
        "buffered": "taken into the buffer",
        "filtered": "filtered: all of its rewards are equal",
        "quarantined": "quarantined",
        "evaluation": "taken for its round of evaluation",
        "duplicate": "delivered once more; not taken again",
    }
    yield _happening(line, into, texts[into])


def _trained(line: LogLine, uid: str) -> Iterator[Happening]:
    step, version = line.facts["step"], line.facts["version"]
    yield _happening(line, "trained", f"trained at step {step}, on the weights of version {version}", step=step)


def _not_trained(line: LogLine, uid: str) -> Iterator[Happening]:
    outcome = line.facts.get("outcome", "quarantined")
    yield _happening(line, outcome, f"{outcome}: {line.facts['reason']}")


def _evaluated(line: LogLine, uid: str) -> Iterator[Happening]:
    yield _happening(line, "evaluated", f"evaluated, after step {line.facts['step']}", step=line.facts["step"])


def _restored(line: LogLine, uid: str) -> Iterator[Happening]:
    step = line.facts["step"]
    text = f"starts from the checkpoint of step {step}" if "version" in line.facts else "starts from the beginning"
    yield _happening(line, "undone", text, step=step, held=uid in line.facts["uids"])


def _other(line: LogLine, uid: str) -> Iterator[Happening]:
    """A line of the log that is not written for stories."""
    words = [str(line.facts[key]) for key in ("reason", "error", "text") if line.facts.get(key)]
    yield _happening(line, "note", ": ".join([line.event, *words]))


_SAYS: dict[str, Callable[[LogLine, str], Iterator[Happening]]] = {
    GRANTED: _granted,
    GENERATED: _generated,
    ORPHANED: _orphaned,
    SETTLED: _settled,
    RETURNED: _returned,
    TAKEN: _taken,
    TRAINED: _trained,
    NOT_TRAINED: _not_trained,
    EVALUATED: _evaluated,
    RESTORED: _restored,
}
