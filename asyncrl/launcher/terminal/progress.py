"""Shows the progress of a live run: one line that is rewritten on a terminal, plain lines elsewhere.

All text goes through ``PRINTER``, so an output that blocks never delays the launcher. A notice is an actor's message
to the user, which it may repeat with a higher count.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TextIO

from rich.cells import cell_len, set_cell_size

from asyncrl.core.formatting import duration, name_some, printable
from asyncrl.core.roles import role_of
from asyncrl.core.streams import PRINTER
from asyncrl.launcher.common.agent_messages import (
    Event,
    MetricsEvent,
    NoticeEvent,
    ReadyEvent,
    RestartEvent,
    StateEvent,
    WarningEvent,
)
from asyncrl.launcher.terminal.metrics_words import (
    NAMES_SHOWN,
    WARM_STEP,
    describe_eval,
    describe_step,
    describe_untrained,
    describe_warm_step,
    untrained_counts,
)
from asyncrl.observe.metrics_line import Line
from asyncrl.rpc.lifecycle.roster import CONTROLLER

PACE_STEPS = 20
"""Number of last steps whose mean time gives the estimate of the remaining time."""
NOTICE_S = 10.0
"""Least time in seconds between two lines for notices with the same actor and key."""
BEFORE_RESTART = " (before it was started again)"
MOST_NOTICES = 256
"""Most notices that are kept. Later ones with new keys appear only in the logs."""
CLEAR_LINE = "\r\x1b[2K"
_NEWLINE = "\n"
"""The only control character that is printed; all others are shown as escapes."""


class TerminalProgress:
    """Shows the run's progress on ``out`` and problems on ``err``; ``steps`` is the run's last step."""

    def __init__(
        self, out: TextIO, steps: int, err: TextIO | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._now_s = now
        self._pace = RunPace(steps, now())
        self.notices = ShownNotices()
        self.step = 0
        """The step of the newest training line; 0 before it."""
        self.restarts: dict[str, int] = {}
        """Number of restarts by actor."""
        self._untrained: dict[str, int] = {}
        """Counts of what was not trained, in the last step's line, by metric (``untrained_counts``); empty at first."""
        self._learner_died: tuple[str, float] | None = None
        """The learner rank that died first since the last step, and the time of its death (s, monotonic)."""
        self._learner_start = 0
        """Number of the learner's start, from the last step's line; it grows with each restart. 0 before any line."""
        self._out = out
        self._err = sys.stderr if err is None else err
        self._steps = steps
        self._is_terminal = out.isatty()
        self._state_text = ""
        """The newest text on the run's state, without the waits."""
        self._shown = ""
        """The line as it was written last: the waits and the state."""
        self._waits: list[str] = []
        """Texts on what the run waits for, from the controller's newest state."""
        self._died_at: dict[str, float] = {}
        """Time of death (s, monotonic) of each actor that died and is not ready again."""
        self._controller = 0
        """Incarnation of the controller that sent the newest state; 0 before it."""
        self._lost_hosts: Mapping[str, list[str]] = {}
        """Actors by lost host, in the newest state."""
        self._actors_awaited: int | None = None
        """Number of actors in the last line that showed what the start waits for; None before it."""
        self._stages: dict[str, str] = {}
        """Text, with the stage, of each actor that the start waits for; empty while more than NAMES_SHOWN are left."""
        self._hosts_awaited = 0
        """Number of hosts in the last line that showed which hosts have not answered."""

    def show(self, event: Event) -> None:
        """Show an event if it is news: rewrite the state, or add a line that stays. Also count restarts."""
        if isinstance(event, StateEvent):
            if event.controller != self._controller:
                # Another process of the controller has answered, so a controller that died is ready again.
                self._show_ready(CONTROLLER)
            self._show_hosts(event)
            self._show_waits(event.waits)
        match event:
            case StateEvent(phase="starting", waiting_for=names):
                # Without a terminal, write a line only if half as many actors are left, or one of the last few is in
                # a new stage.
                stages = {name.split()[0]: name for name in names} if len(names) <= NAMES_SHOWN else {}
                moved = any(self._stages.get(actor, stage) != stage for actor, stage in stages.items())
                if (
                    self._is_terminal
                    or self._actors_awaited is None
                    or moved
                    or len(names) <= self._actors_awaited // 2
                ):
                    self._actors_awaited, self._stages = len(names), stages
                    self._set_state(f"starting: waiting for {name_some(names, NAMES_SHOWN)}" if names else "starting")
            case StateEvent(phase="running"):
                # Keep a line of metrics, which says more.
                if not self._state_text.startswith(("step", WARM_STEP)):
                    self._set_state("running")
            case StateEvent(phase="preempting"):
                self._set_state("preempted: writing a checkpoint")
            case StateEvent(phase="draining"):
                self._set_state("draining: ending the actors in order")
            case RestartEvent(name=name, reason=reason, after_s=after_s, incarnation=incarnation):
                self.warn([f"{name} died ({reason}) and is started again"])
                self.restarts[name] = self.restarts.get(name, 0) + 1
                self._died_at[name] = died_at = self._now_s() - after_s
                self.notices.ended(name, incarnation)
                if role_of(name) == "learner" and self._learner_died is None:
                    self._learner_died = name, died_at
            case ReadyEvent(name=name):
                self._show_ready(name)
            case WarningEvent(text=text):
                self.warn([text])
            case NoticeEvent():
                if line := self.notices.take(event, self._now_s()):
                    self.warn([line])
            case MetricsEvent(line=line) if line.get("kind") == "eval":
                self.say(describe_eval(line))
            case MetricsEvent(line=line) if line.get("kind") == "warm":
                self._set_state(describe_warm_step(line))
            case MetricsEvent(line=line):
                self._show_learner_return(line)
                self._show_step(line)
            case _:
                pass

    def _show_ready(self, name: str) -> None:
        """Show that an actor is ready, if it had died."""
        if name in self._died_at:
            self.say(f"{name} is ready again, {duration(self._now_s() - self._died_at.pop(name))} after it died")

    def _show_hosts(self, state: StateEvent) -> None:
        """Show hosts that are newly lost, that are back, or that leave the run while they are lost."""
        # A restarted controller does not know which hosts its predecessor counted as lost.
        lost_before = self._lost_hosts if state.controller == self._controller else {}
        self._controller, self._lost_hosts = state.controller, state.lost_hosts
        for host, actors in state.lost_hosts.items():
            if host not in lost_before:
                self.warn(
                    [f"host {host} is lost: nothing is heard of it; dead with it: {name_some(actors, NAMES_SHOWN)}"]
                )
        # The key of a lost host is NAME (agent/N).
        agents = tuple(f"({name})" for name in state.leaving)
        for host, actors in lost_before.items():
            if host in state.lost_hosts:
                continue
            if host.endswith(agents):
                self.say(f"host {host} leaves the run, which continues without: {name_some(actors, NAMES_SHOWN)}")
            else:
                self.say(f"host {host} is back; fenced, and started again there: {name_some(actors, NAMES_SHOWN)}")

    def _show_step(self, line: Line) -> None:
        """Show a training step's line, with the pace and the increases of what was not trained."""
        now = self._now_s()
        if isinstance(line.get("step"), int):
            self.step = line["step"]
            self._pace.heard(line["step"], now)
        untrained = untrained_counts(line)
        if not self._untrained and self.step > 1:
            # In a resumed run the ledger/ counts include earlier attempts, so the first line shows no increase.
            self._untrained = untrained
        increases = describe_untrained(self._untrained, untrained)
        self._set_state(describe_step(line, self._steps, self._pace.describe(now), increases))
        self._untrained = untrained

    def _show_learner_return(self, line: Line) -> None:
        """If ``line`` is a restarted learner's first step, show its delay and the steps that are trained again."""
        start, previous_start, step = line.get("start", 0), self._learner_start, line.get("step", 0)
        self._learner_start = start
        # Before the first line, it is unknown whether this start is a new one.
        if self._learner_died is not None and start > previous_start > 0:
            name, died_at = self._learner_died
            self._learner_died = None
            text = f"training continues: step {step} {self._now_s() - died_at:.1f} s after {name} died"
            self.say(f"{text}, from {_start_words(step - 1)}; {_retrained_words(step, self.step)}")

    def reaching(self, hosts: list[str]) -> None:
        """Show the hosts that have not answered yet; without a terminal, only when half as many are left."""
        if self._is_terminal or not self._hosts_awaited or len(hosts) <= self._hosts_awaited // 2:
            self._hosts_awaited = len(hosts)
            self._set_state(
                f"reaching hosts: waiting for {name_some(hosts, NAMES_SHOWN)}"
                if hosts
                else "reaching hosts: all are there"
            )

    def say(self, text: str) -> None:
        """Write a line that stays, above the rewritten one."""
        text = printable(text, keep=_NEWLINE)
        self._write(f"{text}\n{self._fitted(self._shown)}" if self._is_terminal else f"{text}\n")

    def warn(self, lines: list[str]) -> None:
        """Write lines that stay to ``err``."""
        if self._is_terminal:
            self._write("")
        PRINTER.print_to(self._err, "".join(f"{printable(line, keep=_NEWLINE)}\n" for line in lines))
        if self._is_terminal:
            self._write(self._fitted(self._shown))

    def end(self) -> None:
        """Clear the rewritten line."""
        self._shown = ""
        self._write("")

    def _show_waits(self, waits: list[str]) -> None:
        if waits == self._waits:
            return
        self._waits = waits
        # Without a terminal, no line is needed for the end of a wait: the next step shows it.
        if self._is_terminal or waits:
            self._set_state(self._state_text)

    def _set_state(self, text: str) -> None:
        """Set the text on the run's state, and write it after the waits if that changes the line."""
        self._state_text = text
        waits = ", ".join(self._waits)
        # The waits come first, because a narrow terminal cuts the end.
        text = printable(f"waiting for {waits}  {text}".rstrip() if waits else text)
        if text != self._shown:
            self._shown = text
            self._write(self._fitted(text) if self._is_terminal else f"{text}\n")

    def _fitted(self, text: str) -> str:
        """Return ``text`` cut to the width of the terminal."""
        width = shutil.get_terminal_size().columns - 1
        return text if cell_len(text) <= width else set_cell_size(text, width)

    def _write(self, text: str) -> None:
        """Write to ``out``; on a terminal, in place of the rewritten line."""
        PRINTER.print_to(self._out, CLEAR_LINE + text if self._is_terminal else text)


def _start_words(step: int) -> str:
    return f"the checkpoint of step {step}" if step > 0 else "the initial weights"


def _retrained_words(first: int, last: int) -> str:
    if first > last:
        return "no step is trained again"
    return f"step {last} is trained again" if first == last else f"steps {first} to {last} are trained again"


class RunPace:
    """Elapsed time, and the time that is left at the mean pace of the last PACE_STEPS steps. Pure.

    ``steps`` is the run's last step, ``began`` the time of its start (s, monotonic). The mean starts again when
    a learner resumes from an earlier step.
    """

    def __init__(self, steps: int, began: float) -> None:
        self._steps, self._began = steps, began
        self._trained: deque[tuple[int, float]] = deque(maxlen=PACE_STEPS + 1)

    def heard(self, step: int, now: float) -> None:
        """Record that ``step`` was trained at ``now`` (s, monotonic)."""
        # A learner that resumes trains earlier steps again.
        if self._trained and step <= self._trained[-1][0]:
            self._trained.clear()
        self._trained.append((step, now))

    def describe(self, now: float) -> str:
        """Return elapsed and remaining time as text; the latter only once two steps are known."""
        words = f"elapsed {clock_words(now - self._began)}"
        if len(self._trained) < 2:
            return words
        (first, first_at), (last, last_at) = self._trained[0], self._trained[-1]
        left = max(0, self._steps - last) * (last_at - first_at) / (last - first)
        return f"{words}  left {clock_words(left)}" if last < self._steps else words


def clock_words(seconds: float) -> str:
    """Return a time as M:SS, H:MM:SS, or from a day on D d HH:MM."""
    whole = max(0, round(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days} d {hours % 24:02}:{minutes % 60:02}"
    if hours:
        return f"{hours}:{minutes % 60:02}:{whole % 60:02}"
    return f"{minutes}:{whole % 60:02}"


@dataclass(frozen=True, slots=True)
class _Shown:
    """The notices with one actor and key."""

    event: NoticeEvent
    """The newest notice."""
    shown: NoticeEvent
    """The notice with which later ones are compared: the last one shown, or the first of a restarted actor."""
    at: float
    """Time (s, monotonic) at which a notice was last shown."""


class ShownNotices:
    """Decides which notices of actors are shown, and when. Pure.

    The first notice with an actor and key is shown at once. A later one is shown if its text is new or its count has
    doubled, at most once in NOTICE_S. The advice on what to do follows only a new text. The summary has the newest
    notice of each actor and key. A restarted actor counts from 1, so its counts are not compared with earlier ones.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], _Shown] = {}
        self._ended: dict[str, int] = {}
        """The newest incarnation of each actor that died."""

    def ended(self, actor: str, incarnation: int) -> None:
        """Record that this incarnation of an actor died, and another one starts."""
        self._ended[actor] = max(incarnation, self._ended.get(actor, 0))

    def take(self, event: NoticeEvent, now: float) -> str:
        """Record a notice, and return the line to show at ``now`` (s, monotonic); empty for none.

        Ignores a notice of an older incarnation, and a new key beyond MOST_NOTICES.
        """
        key = event.actor, event.key
        kept, is_new_text = self._kept.get(key), True
        if kept is not None:
            shown = kept.shown
            if event.incarnation < kept.event.incarnation:
                return ""
            is_new_text = (event.text, event.meanwhile) != (shown.text, shown.meanwhile)
            if event.incarnation > shown.incarnation and not is_new_text:
                # A restarted actor repeats the notice: count from here, and show nothing.
                self._kept[key] = _Shown(event, event, kept.at)
                return ""
            is_news = is_new_text or event.count >= 2 * shown.count
            if not is_news or now - kept.at < NOTICE_S:
                self._kept[key] = replace(kept, event=event)
                return ""
        elif len(self._kept) >= MOST_NOTICES:
            return ""
        self._kept[key] = _Shown(event, event, now)
        return _words(event) + (f". {event.meanwhile}" if event.meanwhile and is_new_text else "")

    def summary(self) -> list[str]:
        """Return a line for the newest notice of each actor and key, in the order in which the first ones came."""
        return [
            _words(shown.event, BEFORE_RESTART if self._is_of_dead(shown.event) else "")
            for shown in self._kept.values()
        ]

    def _is_of_dead(self, event: NoticeEvent) -> bool:
        """Whether the notice is from an incarnation that died."""
        return event.incarnation <= self._ended.get(event.actor, -1)


def _words(event: NoticeEvent, when: str = "") -> str:
    counted = f" ({event.count} {f'of {event.of}' if event.of else 'times'})" if event.count > 1 else ""
    return f"{event.actor}{when}: {event.text}{counted}"
