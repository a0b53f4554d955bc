"""The samples of a run on a screen: one prompt group at a time, as a conversation with its scores.

A thread reads the groups, so that it does not hold up the terminal. The screen looks for newer groups every LOOK_S;
the group on the screen stays. While it has no groups, it names a folder that cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from rich.console import Group
from rich.padding import Padding
from textual import work
from textual.binding import Binding, BindingType

from asyncrl.observe.sample_text import SampleStyle, sample_lines
from asyncrl.observe.samples import FOLDER, SampleChoice, SampleGroup, newest_samples
from asyncrl.top.detail import PageScreen
from asyncrl.top.draw import Style, text

LOOK_S = 2.0
MOST_HELD = 200
"""Most groups that the screen of a live run keeps."""
DEEPEST = 15
"""Most blanks before a line."""
READ_AT_ONCE = 8
"""Groups that are read at first, and again each time that the user reaches the last one."""
STYLES: dict[SampleStyle, Style] = {"group": "bold", "heading": "level", "role": "good", "text": "", "note": "dim"}
ELSEWHERE = "samples lie in the run's folder on its head: on that host, asyncrl-top RUN shows them"


class SamplesScreen(PageScreen):
    """The groups of a run, from the newest on."""

    keys = "esc back   n older   p newer   f kind   ↑ ↓ scroll"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "app.pop_screen", show=False),
        Binding("f", "kind", show=False),
    ]

    def __init__(self, run_dir: Path | None, *, until: Callable[[], int | None]) -> None:
        """``until`` returns the last step whose groups are shown; None for all."""
        super().__init__()
        self._run_dir, self._until = run_dir, until
        self._choice, self._count = SampleChoice(), READ_AT_ONCE
        self._groups: list[SampleGroup] = []
        """Groups that were read, the newest first."""
        self._at = 0
        """Index of the group on the screen."""

    def on_mount(self) -> None:
        self._read()
        self.set_interval(LOOK_S, self._read)

    @work(thread=True, exclusive=True, group="read")
    def _read(self) -> None:
        """Read the newest groups of the chosen kind in a thread, and show them."""
        choice, count, run_dir = replace(self._choice, until=self._until()), self._count, self._run_dir
        found: list[SampleGroup] = []
        problem = "" if run_dir is not None else ELSEWHERE
        try:
            if run_dir is not None:
                found = newest_samples(run_dir, choice, count)
        except OSError as error:
            problem = f"{error.filename}: {error.strerror}"
        self.app.call_from_thread(self._take, choice, found, problem)

    def _take(self, choice: SampleChoice, found: list[SampleGroup], problem: str) -> None:
        """Show the groups that were read, unless the user has chosen another kind meanwhile.

        The group on the screen stays if it is still among the groups; else the newest one is shown.
        """
        if choice.kind != self._choice.kind:
            return
        shown = self._groups[self._at] if self._groups else None
        if found and choice.until is None:
            # Keep the groups of earlier reads, so that the group on the screen stays when newer ones come.
            names = set(map(_name, found))
            found = [*found, *(old for old in self._groups if _name(old) not in names)][:MOST_HELD]
        self._groups = found
        self._at = next((at for at, each in enumerate(found) if shown is not None and _name(each) == _name(shown)), 0)
        if not found:
            folder = self._run_dir / FOLDER if self._run_dir is not None else ""
            kind = f"{choice.kind} " if choice.kind else ""
            self.show_title(f"samples {kind.strip() or 'all kinds'}")
            words = problem or f"no {kind}group in {folder} so far"
            self.show_page(text(words, "dim", wraps=True))
        else:
            self._draw()

    def _draw(self) -> None:
        more = "+" if len(self._groups) >= self._count else ""
        self.show_title(f"samples {self._at + 1} of {len(self._groups)}{more}, {self._choice.kind or 'all kinds'}")
        self.show_page(laid_out(self._groups[self._at]))

    def action_other(self, by: int) -> None:
        """Go to an older group, or to a newer one."""
        at = max(0, min(len(self._groups) - 1, self._at + by))
        if at == len(self._groups) - 1 and len(self._groups) >= self._count:
            self._count += READ_AT_ONCE
            self._read()
        if self._groups and at != self._at:
            self._at = at
            self._page.scroll_home(animate=False)
            self._draw()

    def action_kind(self) -> None:
        """Show the groups of the next kind."""
        self._choice, self._groups, self._at = self._choice.with_next_kind(), [], 0
        self._count = READ_AT_ONCE
        self._page.scroll_home(animate=False)
        self._read()


def _name(group: SampleGroup) -> tuple[object, ...]:
    """Key by which the same group is found in a later read."""
    return group.kind, group.step, group.uid, group.start


def laid_out(group: SampleGroup) -> Group:
    """A group, whose text wraps."""
    return Group(
        *(
            Padding(text(words, STYLES[style], wraps=True), (0, 0, 0, min(indent, DEEPEST)))
            for words, style, indent in sample_lines(group)
        )
    )
