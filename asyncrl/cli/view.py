"""asyncrl-view: serves a page in which the rollouts of a run are read, live or afterwards.

It changes nothing in the run's records.

Importing this module, ``--help`` and wrong usage load nothing beyond the standard library. Torch is never loaded.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.cli.command_line import Parser, complain, flushed
from asyncrl.cli.which_run import may_live, run_folder
from asyncrl.core.formatting import say

if TYPE_CHECKING:
    from asyncrl.text.tokenizer import Tokenizer
    from asyncrl.view.answers import Answers, Decode

PROGRAM = "asyncrl-view"
DESCRIPTION = (
    "Read the rollouts of a run in a browser: steps, groups, conversations, tokens. It changes none of a run's records."
)
EPILOG = """\
RUN is a run folder, or a name under runs/; the default is the newest run under runs/. OTHER is a second run to compare
with. Both may be live, or copies of a run folder. The page is served on loopback until Ctrl-C, and every user of this
host can read it. From another machine: ssh -L PORT:127.0.0.1:PORT HOST.

Exit codes: 0 done; 1 something cannot be read, written or served; 2 wrong usage or no such run; 130 Ctrl-C.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        return flushed(PROGRAM, lambda: _main(argv))
    except KeyboardInterrupt:
        return 130


def _main(argv: Sequence[str] | None) -> int:
    parser = _parser()
    given = parser.parse_args(argv)
    if given.step is not None and given.export is None:
        parser.error("--step belongs to --export")
    if given.step is not None and given.step < 0:
        parser.error(f"--step is 0 or more, got {given.step}")
    if given.export is not None and (given.other is not None or given.port is not None):
        parser.error("--export takes one RUN, and excludes --port")
    if given.port is not None and not 0 <= given.port <= 65535:
        parser.error(f"--port is 0 to 65535, got {given.port}")

    from asyncrl.core.errors import UsageError

    try:
        runs = [_with_records(run_folder(run, PROGRAM)) for run in (given.run, *filter(None, (given.other,)))]
        if given.export is None:
            return _serve(runs, given.port or 0)
        return _export(runs[0], Path(given.export), given.step)
    except UsageError as error:
        return complain(PROGRAM, str(error), 2)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(PROGRAM, DESCRIPTION, EPILOG)
    parser.add_argument("run", nargs="?", metavar="RUN", help="folder or name of a run, live or not")
    parser.add_argument("other", nargs="?", metavar="OTHER", help="another run, to compare")
    parser.add_argument("--port", metavar="N", type=int, help="port of loopback (0: a free one)")
    parser.add_argument(
        "--export", metavar="FILE", help="write one step as an HTML file, to be sent, and serve nothing"
    )
    parser.add_argument("--step", metavar="N", type=int, help="with --export: this step (the newest with groups)")
    return parser


def _with_records(run_dir: Path) -> Path:
    """Require that the folder is that of a run, or a copy of its records. Raises UsageError."""
    from asyncrl.core.errors import UsageError

    if not any((run_dir / name).exists() for name in ("config.json", "metrics.jsonl", "samples")):
        raise UsageError(f"{run_dir}: this is not the folder of a run (no config.json, metrics.jsonl or samples)")
    return run_dir


def _serve(runs: Sequence[Path], port: int) -> int:
    """Serve the page until the process is interrupted."""
    import asyncio

    if importlib.util.find_spec("aiohttp") is None:
        return complain(PROGRAM, "aiohttp is not installed; run: pip install 'asyncrl[episodes]'", 1)
    from asyncrl.observe.report.report import report_page
    from asyncrl.view.server import ViewServer

    def report(run: int) -> str:
        return report_page(runs[run], lives=may_live(runs[run]), viewer=f"./#run={run}")

    async def serve() -> None:
        server = ViewServer(_answers(runs), report)
        try:
            say(await server.start(port), sys.stdout)
            sys.stdout.flush()
            await asyncio.Event().wait()
        finally:
            await server.close()

    asyncio.run(serve())
    return 0


def _export(run_dir: Path, out: Path, step: int | None) -> int:
    """Write the page of a step; None is the newest one with groups. Raises UsageError or OSError."""
    from asyncrl.observe.report.report import check_writable, write_user_file
    from asyncrl.view.answers import NotFound
    from asyncrl.view.page import step_page

    check_writable(out)
    answers = _answers([run_dir])
    try:
        write_user_file(out, step_page(answers, answers.newest_step() if step is None else step))
    except NotFound as error:
        return complain(PROGRAM, str(error), 1)
    say(str(out), sys.stdout)
    return 0


def _answers(runs: Sequence[Path]) -> Answers:
    from asyncrl.view.answers import Answers

    return Answers(runs, [_decoder(run) for run in runs])


def _decoder(run_dir: Path) -> Decode | None:
    """Return a function from a token to its text, by the tokenizer of the run's model; None if that is not here."""
    from asyncrl.config.hub import parse_pinned
    from asyncrl.core.files import read_json_object

    try:
        settings = read_json_object(run_dir / "config.json")
        path = settings["model"]["path"]
        if "model.path" in settings.get("hub", {}).get("pinned", {}):
            path = str(parse_pinned("model.path", settings["hub"]["pinned"]["model.path"]).folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError):
        return None
    # Another tokenizer would need transformers.
    if path is not None and not (isinstance(path, str) and (Path(path) / "tokenizer.json").is_file()):
        return None

    @cache
    def tokenizer() -> Tokenizer:
        from asyncrl.text.tokenizer import load_tokenizer

        return load_tokenizer(path)

    return lambda token: tokenizer().decode([token], keep_special=True)


if __name__ == "__main__":
    sys.exit(main())
