"""The launcher of a run that a Python program has started: ``python -m asyncrl.api.process FD``.

The program writes an order (``_order`` in runs.py), a line of JSON, to standard input and keeps that open. When the
program ends, even by SIGKILL, this process preempts the run. To FD this process writes JSON lines: the run folder once
the checks have passed, or the error.

Rows and functions of the program are written to ``inputs/`` of the run folder, under names with their digests. So they
are there for actors that start again and for a resume, and a resume with others does not change them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.cli.command_line import describe_error, interruptible

if TYPE_CHECKING:
    from asyncrl.config import Config

PROGRAM = "asyncrl"
INPUTS = "inputs"
PLACEHOLDER = "{}.rows.jsonl"
"""Path of rows that are not written yet, with their key."""


def main() -> int:
    """Run the command and return its exit code."""
    return interruptible(PROGRAM, _main)


def _main() -> int:
    from asyncrl.core.errors import AsyncRLError

    order = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_program, daemon=True).start()
    with open(int(sys.argv[1]), "w", buffering=1) as reports:

        def report(**message: Any) -> None:
            # The program may have ended.
            with contextlib.suppress(BrokenPipeError):
                reports.write(json.dumps(message) + "\n")

        try:
            return _run(order, lambda folder: report(run=str(folder)))
        except AsyncRLError as error:
            report(error="\n".join(describe_error(error)))
            return error.exit_code
        except OSError as error:
            report(error=f"{error.filename or 'the operating system'}: {error.strerror or error}")
            return 1


def _end_with_program() -> None:
    """Thread: wait until standard input ends, as it does with the program, then preempt the run by SIGTERM."""
    # Not by ``sys.stdin``, whose lock would block the end of this process.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _run(order: dict[str, Any], on_folder: Any) -> int:
    """Launch the run or the evaluation of an order, and follow it to its end. Raises AsyncRLError or OSError."""
    from asyncrl.cli.eval import ExportFailed, chosen_model, run_evaluation
    from asyncrl.config.evaluating import for_evaluation
    from asyncrl.config.load import load_config
    from asyncrl.core.errors import AsyncRLError
    from asyncrl.launcher.launch import Launch

    placeholders = [nested(f"{key}.path", PLACEHOLDER.format(key)) for key in order["rows"]]
    config = load_config([*order["layers"], *placeholders], order["overrides"])
    if order["set"]:
        config = config.model_copy(update={"eval": {order["set"]: config.eval[order["set"]]}})
    if not order["evaluates"]:
        with _inputs(config, order) as (config, reserved):
            return Launch(config, on_folder=on_folder, reserved=reserved).launch(order["resume"])
    try:
        with contextlib.ExitStack() as stack:
            model, name = stack.enter_context(chosen_model(config, None, order["checkpoint"]))
            config, reserved = stack.enter_context(_inputs(for_evaluation(config, model), order))
            return run_evaluation(config, name, on_folder=on_folder, reserved=reserved)[0]
    except ExportFailed as failed:
        raise AsyncRLError(f"{order['checkpoint']}: cannot be exported; the reason is above") from failed


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return {"a": {"b": value}} for the key a.b."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


@contextlib.contextmanager
def _inputs(config: Config, order: dict[str, Any]) -> Iterator[tuple[Config, Path | None]]:
    """Write functions and rows to the run folder, and let this process and its children find the functions.

    Yields the configuration with the paths of the rows, and the folder of a new run, which is removed if no run begins
    in it. Raises UsageError if the run is live.
    """
    from asyncrl.config.load import with_values
    from asyncrl.launcher.run_folder.folders import reserve_run_folder
    from asyncrl.launcher.run_folder.private import CONFIG, in_use, is_live

    resumed = Path(order["resume"]).absolute() if order["resume"] else None
    if resumed is not None and is_live(resumed):
        raise in_use(resumed)
    folder = resumed or reserve_run_folder(config)
    try:
        if text := order["functions"]:
            from asyncrl.api.functions import MODULE

            module = _write(folder, f"{_digest(text)}/{MODULE}.py", text)
            sys.path.insert(0, str(module.parent))
            path = os.environ.get("PYTHONPATH")
            os.environ["PYTHONPATH"] = os.pathsep.join([str(module.parent), *([path] if path else [])])
        sets = {"data": config.data} | {f"eval.{name}.data": each.data for name, each in config.eval.items()}
        # In an evaluation, the rows of a set stand for the training prompts too.
        rows = {PLACEHOLDER.format(key): text for key, text in order["rows"].items()}
        found = {f"{key}.path": rows[each.path] for key, each in sets.items() if each.path in rows}
        paths = {key: str(_write(folder, f"{_digest(text)}.jsonl", text)) for key, text in found.items()}
        yield with_values(config, paths), None if resumed else folder
    finally:
        if resumed is None and not (folder / CONFIG).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / INPUTS / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text(text)
    return path


if __name__ == "__main__":
    sys.exit(main())
