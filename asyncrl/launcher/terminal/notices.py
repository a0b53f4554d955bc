"""The notices of actors that the terminal shows: each at once, then its count at a decent pace. Pure.

Invariant: the first notice of an actor and key is shown when it comes. A later one of another text, or with twice the
count shown last, is shown unless that would be within PACE_S of the one before; if only the count is new, it comes
without the sentences on what to do. An actor that is started again counts from 1: its counts are not compared with
those of its predecessor. The summary has all notices in their newest form, without the sentences that hold only while
the run lives, and marks those of an incarnation that died.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from asyncrl.launcher.common.agent_messages import NoticeEvent

PACE_S = 10.0
BEFORE_RESTART = " (before it was started again)"
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
    """The notices that were shown."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], _Shown] = {}
        self._ended: dict[str, int] = {}
        """The newest incarnation of each actor that died."""

    def ended(self, actor: str, incarnation: int) -> None:
        """This incarnation of an actor died, and another one starts."""
        self._ended[actor] = max(incarnation, self._ended.get(actor, 0))

    def take(self, event: NoticeEvent, now: float) -> str:
        """The line to show at ``now`` (s, monotonic); empty for none."""
        key = event.actor, event.key
        before, is_new_text = self._kept.get(key), True
        if before is not None:
            told = before.told
            if event.incarnation < before.event.incarnation:
                return ""
            is_new_text = (event.text, event.meanwhile) != (told.text, told.meanwhile)
            if event.incarnation > told.incarnation and not is_new_text:
                self._kept[key] = _Shown(event, event, before.at)
                return ""
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
        return [
            _words(shown.event, BEFORE_RESTART if self._is_over(shown.event) else "") for shown in self._kept.values()
        ]

    def _is_over(self, event: NoticeEvent) -> bool:
        return event.incarnation <= self._ended.get(event.actor, -1)


def _words(event: NoticeEvent, when: str = "") -> str:
    counted = f" ({event.count} {f'of {event.of}' if event.of else 'times'})" if event.count > 1 else ""
    return f"{event.actor}{when}: {event.text}{counted}"
