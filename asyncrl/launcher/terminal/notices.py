"""The notices of actors that the terminal shows: each at once, then its count at a decent pace. Pure.

Invariant: the first notice of an actor and key is shown when it comes; a later one of another text, or with twice the
count shown last, is shown unless that would be within PACE_S of the one before; where only the
count is new, it comes without the sentences on what to do. All stand in the summary as they were
last, without what holds only while the run goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from asyncrl.launcher.terms.spec import NoticeEvent

PACE_S = 10.0
MOST = 256
"""Notices kept; those of further keys are in the logs alone."""


@dataclass(frozen=True, slots=True)
class _Shown:
    event: NoticeEvent
    """The newest."""
    told: NoticeEvent
    """The one that was shown last."""
    at: float
    """Time at which that was (s, monotonic)."""


class ShownNotices:
    """The notices as they were shown; the module tells the rules."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], _Shown] = {}

    def take(self, event: NoticeEvent, now: float) -> str:
        """The line to show at ``now`` (s, monotonic); empty for none."""
        key = event.actor, event.key
        before, is_new_text = self._kept.get(key), True
        if before is not None:
            told = before.told
            is_new_text = (event.text, event.meanwhile) != (told.text, told.meanwhile)
            is_news = is_new_text or event.count >= 2 * told.count
            if not is_news or now - before.at < PACE_S:
                self._kept[key] = replace(before, event=event)
                return ""
        elif len(self._kept) >= MOST:
            return ""
        self._kept[key] = _Shown(event, event, now)
        return _words(event) + (f". {event.meanwhile}" if event.meanwhile and is_new_text else "")

    def summary(self) -> list[str]:
        """A line for each notice, in the order of their first appearance."""
        return [_words(shown.event) for shown in self._kept.values()]


def _words(event: NoticeEvent) -> str:
    counted = f" ({event.count} {f'of {event.of}' if event.of else 'times'})" if event.count > 1 else ""
    return f"{event.actor}: {event.text}{counted}"
