"""asyncrl-top: shows a run, live or afterwards, and changes nothing in it.

Importing this module, ``--help`` and wrong usage load nothing beyond the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.cli.command_line import Parser, complain, flushed
from asyncrl.cli.which_run import PROGRAM, live_run_place, may_live, must_be_reachable, run_folder
from asyncrl.core.formatting import json_in_ascii, say

if TYPE_CHECKING:
    from asyncrl.messages.monitor import Snapshot
    from asyncrl.top.client import Away
    from asyncrl.top.replay import SnapshotSource
    from asyncrl.top.view import History

TRACE_S = 30.0
"""Seconds that the controller gets to write a trace; it waits less than half of them for the actors' parts."""
DESCRIPTION = "See what a run does, and which stage the others wait for. It does not change the run."
EPILOG = """\
RUN is a run folder (or its name under runs/) on the controller's host, or HOST:PORT of the controller with --keys. The
default is the newest live run under runs/, or with --replay, --report, --explain and --samples the newest run.

In the terminal ? shows the keys and q quits. It waits for a run that is starting and follows a run that is resumed.
Without a terminal it prints what --once prints. --json prints the newest snapshot. If no recording is readable, --once
watches for 5 s first, for rates. After the end of a run --replay shows the recording; with --once or --json its end.

--samples prints the newest groups in RUN/samples, live or after the end. A group has its prompt, responses or
conversations with tool calls, rewards with components, and why each response ended. --step, --kind and --count select
groups.

Exit codes: 0 done; 1 the run does not answer or something cannot be read or written; 2 wrong usage or no such run;
130 Ctrl-C; 141 the reader of the output has closed it.
"""
SNAPSHOT_S = 20.0
"""Seconds to wait for a snapshot to print."""
SHORTEST_S = 5.0
"""Seconds that the snapshots must cover, so that rates can be printed."""
EXCLUDED = {
    "once": ("json",),
    "replay": ("keys",),
    "report": ("once", "json", "keys"),
    "explain": ("once", "json", "keys"),
    "samples": ("once", "json", "keys"),
}
"""By flag, the other flags that it excludes."""
SAMPLES = 3
"""Default of --count."""
MOST_SAMPLES = 100
PAGE_COLUMNS = 120
"""Width of the printed page if standard output is no terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        return flushed(PROGRAM, lambda: _main(list(sys.argv[1:] if argv is None else argv)))
    except KeyboardInterrupt:
        return 130


def _main(argv: list[str]) -> int:
    """Check the arguments, then do the one that is chosen: --explain, --samples, --report, --replay, or watch."""
    parser = _parser()
    given = parser.parse_args(argv)
    for one, others in EXCLUDED.items():
        for other in others:
            if all(getattr(given, each) not in (None, False) for each in (one, other)):
                parser.error(f"--{one} and --{other} exclude each other")
    for flag in ("step", "kind", "count"):
        if getattr(given, flag) is not None and not given.samples:
            parser.error(f"--{flag} belongs to --samples")
    if given.count is not None and not 1 <= given.count <= MOST_SAMPLES:
        parser.error(f"--count is 1 to {MOST_SAMPLES}, got {given.count}")

    from asyncrl.core.errors import AsyncRLError, UsageError

    try:
        if given.explain is not None:
            from asyncrl.observe.explain.history import explain

            say(explain(run_folder(given.run, "--explain"), given.explain), sys.stdout)
            return 0
        if given.samples:
            return _print_samples(run_folder(given.run, "--samples"), given)
        if given.report is not None:
            from asyncrl.observe.report.report import write_report

            run_dir = run_folder(given.run, "--report")
            try:
                write_report(run_dir, Path(given.report), lives=may_live(run_dir))
            except OSError as error:
                return complain(PROGRAM, _describe(error), 1)
            say(given.report, sys.stdout)
            return 0
        if given.replay:
            return _replay(run_folder(given.run, "--replay"), given)
        return _watch(given)
    except UsageError as error:
        return complain(PROGRAM, str(error), 2)
    except AsyncRLError as error:
        return complain(PROGRAM, str(error), 1)
    except BrokenPipeError:
        raise
    except PermissionError as error:
        return complain(
            PROGRAM, f"{error.filename}: permission denied; only the user who started a run may watch it", 1
        )
    except OSError as error:
        return complain(PROGRAM, _describe(error), 1)


def _describe(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(PROGRAM, DESCRIPTION, EPILOG)
    parser.add_argument("run", nargs="?", metavar="RUN", help="folder or name of a run, or HOST:PORT")
    parser.add_argument("--keys", metavar="DIR", help="folder with a viewer's keys: a copy of RUN/private")
    parser.add_argument("--once", action="store_true", help="print everything once, as text")
    parser.add_argument("--json", action="store_true", help="print the newest snapshot, as a JSON object")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--replay", action="store_true", help="show the recording")
    what.add_argument("--report", metavar="FILE", help="write a report of the run as one HTML file")
    what.add_argument("--explain", metavar="UID", help="show the history of a prompt group")
    what.add_argument("--samples", action="store_true", help="print the newest groups: prompts, responses, rewards")
    parser.add_argument("--step", metavar="N", type=int, help="with --samples: the groups of this step")
    parser.add_argument("--kind", choices=("trained", "filtered", "evaluation"), help="with --samples: of this kind")
    parser.add_argument(
        "--count", metavar="N", type=int, help=f"with --samples: number of groups, {SAMPLES} by default"
    )
    return parser


def _print_samples(run_dir: Path, given: argparse.Namespace) -> int:
    from asyncrl.observe.sample_text import sample_page
    from asyncrl.observe.samples import FOLDER, SampleChoice, newest_samples

    choice = SampleChoice(kind=given.kind, step=given.step)
    groups = newest_samples(run_dir, choice, given.count or SAMPLES)
    if not groups:
        kind, step = f"{given.kind} " if given.kind else "", f" of step {given.step}" if given.step is not None else ""
        why = "the run has not written any yet, or run.samples_per_step is 0"
        return complain(PROGRAM, f"{run_dir / FOLDER} holds no {kind}group{step}: {why}", 1)
    for line in sample_page(groups):
        say(line, sys.stdout)
    return 0


# --- showing ---


def _watch(given: argparse.Namespace) -> int:
    """Follow a live run in the terminal, or print its newest snapshot.

    The history begins with the recording, if the run folder is here. Text waits until it covers SHORTEST_S, but at most
    SNAPSHOT_S.
    """
    import asyncio

    from asyncrl.launcher.run_folder.private import is_live
    from asyncrl.top.client import NotStarted, find_target, follow, follow_folder
    from asyncrl.top.replay import SnapshotSource, recent_history
    from asyncrl.top.view import History

    run, keys = live_run_place(given.run), Path(given.keys) if given.keys else None
    run_dir = Path(run) if Path(run).is_dir() else None

    find_controller = partial(find_target, run, keys, is_live)
    # A wrong RUN or address fails here, before anything is shown.
    with contextlib.suppress(NotStarted):
        target = find_controller()
        if run_dir is None:
            must_be_reachable(target.address)
    history = recent_history(run_dir) if run_dir is not None else History()

    def feed() -> AsyncIterator[Snapshot | Away]:
        return follow(find_controller()) if run_dir is None else follow_folder(run_dir, keys, is_live)

    if not _wants_terminal(given):
        asyncio.run(_add_snapshots(feed(), history, run, 0.0 if given.json else SHORTEST_S))
        return _print(history, given)

    from asyncrl.messages.monitor import RequestTrace, TraceWritten

    async def trace() -> str:
        with find_controller().connect() as controller:
            written: TraceWritten = await controller.peer.call(RequestTrace(), timeout=TRACE_S)
        return f"trace: {written.path}" if written.path else f"no trace: {written.error}"

    return _show(SnapshotSource(feed=feed, history=history, run_dir=run_dir, trace=trace))


def _replay(run_dir: Path, given: argparse.Namespace) -> int:
    """Show a recording in the terminal, or print its end."""
    from asyncrl.top.replay import SnapshotSource, open_replay

    replay = open_replay(run_dir, lives=may_live(run_dir))
    if not _wants_terminal(given):
        replay.jump(replay.end)
        return _print(replay.history(), given)

    return _show(SnapshotSource(replay=replay, run_dir=run_dir))


def _show(source: SnapshotSource) -> int:
    """Show the terminal's screens until the user quits. Raises the error that ended them."""
    from asyncrl.rpc.process import tune_memory
    from asyncrl.top.app import Top

    # The history of a large run has very many objects, without cycles.
    tune_memory()
    _turn_colours_off_if_few()
    app = Top(source)
    app.run()
    if app.failure is not None:
        raise app.failure
    return app.return_code or 0


async def _add_snapshots(feed: AsyncIterator[Snapshot | Away], history: History, run: str, seconds: float) -> None:
    """Add snapshots from ``feed`` to ``history`` until they cover ``seconds``, for at most SNAPSHOT_S.

    Also ends when the run ends. ``run`` is its name in errors. Raises ActorFailed if no snapshot arrives.
    """
    import asyncio

    from asyncrl.core.errors import ActorFailed
    from asyncrl.top.client import Away

    reason, has_snapshot = f"{run} does not answer", False
    try:
        async with asyncio.timeout(SNAPSHOT_S):
            async for seen in feed:
                if isinstance(seen, Away):
                    # The feed waits for the next run in the folder, so this one has ended.
                    if has_snapshot and seen.seconds is None:
                        return
                    reason = seen.reason or reason
                    continue
                history.add(seen)
                has_snapshot = True
                if history.steps().seconds >= seconds:
                    return
    except TimeoutError:
        pass
    if not has_snapshot:
        why = "it is frozen or restarting, or these keys are of another run, which gets no answer under CURVE"
        raise ActorFailed("controller/0", f"{run} gives no snapshot for {SNAPSHOT_S:g} s: {why} ({reason})")


def _print(history: History, given: argparse.Namespace) -> int:
    """Print the newest snapshot of ``history``, as JSON or as a page of text."""
    from asyncrl.core.errors import UsageError

    if history.newest is None:
        raise UsageError("this version of asyncrl cannot read the recording")
    if given.json:
        import msgspec

        print(json_in_ascii(msgspec.json.encode(history.newest).decode()))
        return 0
    from asyncrl.top.panes import page
    from asyncrl.top.view import SnapshotView

    columns = shutil.get_terminal_size((PAGE_COLUMNS, 24)).columns
    say(page(SnapshotView(history), max(80, columns), whole=not sys.stdout.isatty()).removesuffix("\n"), sys.stdout)
    return 0


def _turn_colours_off_if_few() -> None:
    """Set NO_COLOR if the terminal has fewer than the 8 basic colours, which the screen uses."""
    import curses

    try:
        curses.setupterm()
        colours = curses.tigetnum("colors")
    except curses.error:
        return
    if colours < 8:
        os.environ["NO_COLOR"] = "1"


def _wants_terminal(given: argparse.Namespace) -> bool:
    """Whether to show the screens in the terminal; otherwise the command prints once."""
    if given.once or given.json:
        return False
    # Textual draws on standard error. Python sets a stream that was closed at the start to None.
    terminal = all(each is not None and each.isatty() for each in (sys.stdin, sys.stdout, sys.stderr))
    return terminal and os.environ.get("TERM", "") not in ("", "dumb")


if __name__ == "__main__":
    sys.exit(main())
