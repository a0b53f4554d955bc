"""Runs and evaluations from Python: a script or a notebook.

A run is asyncrl-launch in a process of its own (process.py), in a session of its own, so that neither a signal
for a notebook's kernel nor its event loop concerns the run. The process holds a pipe to this one. When this process
ends, even by SIGKILL, the run is preempted. One host; the checks are those of asyncrl-launch.

Fails with RunFailed, whose text is what the terminal prints, if a run cannot start or has failed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from asyncrl.api.functions import Functions
from asyncrl.config import Config
from asyncrl.config.keys import default_words
from asyncrl.core.errors import PREEMPTED_EXIT_CODE, ActorFailed, AsyncRLError, UsageError

if TYPE_CHECKING:
    import pandas

    from asyncrl.observe.evaluations import Evaluation

Settings: TypeAlias = str | Path | Mapping[str, Any] | Config
"""A configuration: a TOML file, its tables as a mapping, or a Config."""
Rows: TypeAlias = str | Path | Iterable[Mapping[str, Any]]
"""Prompts: a path as data.path takes it, or the rows themselves."""
Function: TypeAlias = Callable[..., Any] | str
"""A function, or its name MODULE:FUNCTION."""
Status = Literal["running", "done", "preempted", "stopped", "failed"]

EVALUATION = "data"
"""Name of the evaluation set of the rows that ``evaluate`` is given."""
SHOWN_LINES = 12
"""Newest lines of output that a notebook shows."""
LAST_S = 120.0
"""Longest wait, when this program ends, for the end of a run (s)."""
_alive: set[Run] = set()
"""Runs whose processes have not been waited for."""


class RunFailed(AsyncRLError, RuntimeError):
    """A run could not start, or has failed; the text is what the terminal prints."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code
        """Exit code of asyncrl-launch: 78 for a wrong configuration."""


def train(
    config: Settings,
    *,
    reward: Function | None = None,
    data: Rows | None = None,
    tools: Sequence[Function] = (),
    episode: Function | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: str | Path | None = None,
    progress: bool = True,
) -> Run:
    """Start a run on this host, and return once its checks have passed.

    ``reward`` and the functions or classes of ``tools`` are as in a configuration. ``episode`` is a function, or a
    class with reset and step. They may be defined in this script or notebook, and may be closures. ``data`` has the
    training prompts. ``overrides`` sets keys: ``{"learner.steps": 20}``. ``resume`` is the folder or the name of a run
    to continue; functions and rows are given again. Without ``progress``, nothing is shown.

    The run ends with this program: call ``wait``. Raises RunFailed if the run is refused, and UsageError for unusable
    arguments; then nothing was started.
    """
    functions = Functions()
    tables: dict[str, Any] = {}
    if reward is not None:
        tables["reward"] = {"function": functions.spec(reward)}
    if tools and episode is not None:
        raise UsageError("tools are for the episodes of asyncrl, and episode is one of your own: give one of the two")
    if tools:
        tables["episode"] = {"tools": [functions.spec(tool) for tool in tools]}
    elif episode is not None:
        tables["episode"] = {"env" if isinstance(episode, type) else "function": functions.spec(episode)}
    order = _order(config, tables, functions, {"data": data}, overrides)
    if resume is not None:
        from asyncrl.cli.which_run import run_folder

        order["resume"] = str(run_folder(str(resume), "resume").absolute())
    return Run(order, functions, progress=progress)


def open_run(run: str | Path) -> RunRecords:
    """Open the records of a run by its folder or its name. Raises UsageError if there is no such run."""
    from asyncrl.cli.which_run import run_folder

    return RunRecords(run_folder(str(run), "open_run").absolute())


def evaluate(
    model: str | Path | RunRecords | None = None,
    data: Rows | None = None,
    reward: Function | None = None,
    *,
    config: Settings | None = None,
    n: int = 1,
    overrides: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Evaluation:
    """Evaluate a model without training, and return the result, as ``asyncrl-eval`` does.

    ``model`` is a folder, a name of the hub, or None for model.path. It may also be a run, whose newest checkpoint is
    evaluated. A run that this program has started brings its functions, and without ``config`` its configuration. With
    ``data`` there is one evaluation set, called data, with ``n`` samples of each prompt; else the sets are those of
    the configuration. Raises RunFailed, and UsageError for unusable arguments.
    """
    base = model if isinstance(model, Run) else None
    functions = Functions(base._functions if base is not None else None)
    tables: dict[str, Any] = {}
    if reward is not None:
        tables["reward"] = {"function": functions.spec(reward)}
    if data is not None:
        tables["eval"] = {EVALUATION: {"n": n}}
    if isinstance(model, str | Path):
        tables["model"] = {"path": str(model)}
    order = _order({} if config is None else config, tables, functions, {f"eval.{EVALUATION}.data": data}, overrides)
    order |= {"evaluates": True, "set": EVALUATION if data is not None else None}
    if isinstance(model, RunRecords):
        order["checkpoint"] = str(model.folder)
        if base is not None and config is None:
            order["layers"] = [*base._order["layers"], *order["layers"]]
            order["overrides"] = base._order["overrides"] | order["overrides"]
            order["rows"] = base._order["rows"] | order["rows"]
    # No training prompts are read, but a configuration must have some. Its own keys win.
    order["layers"].insert(0, {"data": {"source": "synthetic"}})
    run = Run(order, functions, progress=progress)
    try:
        status = run.wait()
    except BaseException:
        run.stop()
        raise
    if status != "done":
        raise RunFailed("the evaluation was stopped before its end")
    import msgspec

    from asyncrl.observe import evaluations

    return msgspec.json.decode((run.folder / evaluations.RESULT).read_bytes(), type=evaluations.Evaluation)


def _order(
    config: Settings,
    tables: dict[str, Any],
    functions: Functions,
    data: Mapping[str, Rows | None],
    overrides: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the order for a process (process.py). Raises UsageError or TypeError."""
    from asyncrl.api.process import nested

    layers: list[Any] = [tables]
    rows: dict[str, str] = {}
    for key, given in data.items():
        if given is not None:
            layers.append(nested(f"{key}.source", "auto"))
        if isinstance(given, str | Path):
            layers.append(nested(f"{key}.path", str(given)))
        elif given is not None:
            rows[key] = "".join(json.dumps(dict(row), default=_plain) + "\n" for row in given)
            if not rows[key]:
                raise UsageError(f"{key}: the list of rows is empty")
    if isinstance(config, Config):
        tree = config.model_dump(mode="json")
        # The launcher pins names of the hub itself.
        del tree["hub"]["pinned"]
        config = tree
    layers.insert(0, str(config) if isinstance(config, str | Path) else dict(config))
    text = functions.text()
    evaluation = {"evaluates": False, "checkpoint": None, "set": None}
    keys = {"overrides": _flags(overrides or {}), "resume": None}
    return {"layers": layers, "functions": text, "rows": rows, **keys, **evaluation}


def _plain(value: Any) -> Any:
    """Return a value of NumPy or pandas as plain data. Raises TypeError."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a row holds {value!r} of type {type(value).__name__}, which is not JSON")


def _flags(overrides: Mapping[str, Any]) -> dict[str, str]:
    """Return overrides as the flags of a command line: TOML by key."""
    return {key: default_words(value) for key, value in overrides.items()}


class RunRecords:
    """The records of a run, which may be live or have ended, started by any program."""

    folder: Path
    """The run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def metrics(self) -> pandas.DataFrame:
        """The metrics of the run so far: a row for each step, a column for each metric of training or evaluation.

        Evaluations are in the row of the last step before them; those at the start are in step 0.
        """
        try:
            import pandas
        except ImportError:
            problem = "Run.metrics needs the package pandas: pip install 'asyncrl[notebook]'"
            raise UsageError(problem) from None
        from asyncrl.observe.metrics_line import read_metrics

        rows: dict[int, dict[str, Any]] = {}
        for line in read_metrics(self.folder / "metrics.jsonl", ("train", "eval")):
            row = {key: value for key, value in line.items() if key not in ("kind", "start")}
            # A step's own line says which version was trained.
            rows[line["step"]] = row | rows.get(line["step"], {}) if line["kind"] == "eval" else row
        return pandas.DataFrame.from_records(list(rows.values()), index="step" if rows else None).sort_index()

    def samples(
        self, step: int | None = None, kind: Literal["trained", "filtered", "evaluation"] = "trained"
    ) -> list[dict[str, Any]]:
        """Return the kept prompt groups of a step (None: the newest), as in samples/: prompt, responses, rewards."""
        import msgspec

        from asyncrl.observe.samples import KINDS, SampleChoice, SampleGroup, groups_in, sample_files, step_in

        if kind not in KINDS:
            raise UsageError(f"samples: kind is {kind!r}; it may be {', '.join(KINDS)}")
        files = sample_files(self.folder, SampleChoice(kind=kind, step=step))
        if step is None and files:
            # A step may have several evaluations, each with a file of its own.
            files = [path for path in files if step_in(path) == step_in(files[0])]
        return [msgspec.to_builtins(group) for path in files for group in groups_in(path, SampleGroup)]


class Run(RunRecords):
    """A run that this program has started."""

    def __init__(self, order: dict[str, Any], functions: Functions, *, progress: bool = True) -> None:
        """Start the run of an order (process.py). Raises RunFailed; use ``train``."""
        self._order, self._functions, self._progress = order, functions, progress
        self._start()

    def __repr__(self) -> str:
        return f"<Run {self.folder}: {self.status}>"

    def _start(self) -> None:
        """Start the process, send it the order, and wait for the run folder or the error. Raises RunFailed."""
        order = json.dumps(self._order, default=os.fspath).encode() + b"\n"
        read_end, write_end = os.pipe()
        display = _notebook_display() if self._progress else None
        # A script's terminal, or what its output leads to, is also that of the run.
        output = subprocess.PIPE if display is not None else None if self._progress else subprocess.DEVNULL
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "asyncrl.api.process", str(write_end)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT if display is not None else output,
                pass_fds=(write_end,),
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(_modules_path())},
            )
        finally:
            os.close(write_end)
        self._reports = open(read_end, encoding="utf-8")  # noqa: SIM115
        _alive.add(self)
        self._shower = threading.Thread(target=_show, args=(self._process.stdout, display), daemon=True)
        self._shower.start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(order)
            self._process.stdin.flush()
        try:
            message = self._next_report()
        except BaseException:
            # The caller gets no run, so it could not end this one.
            self._process.terminate()
            self._reap()
            raise
        if "run" not in message:
            self._reap()
            text = message.get("error", "the launcher has ended before the run began")
            raise RunFailed(text, self._process.returncode)
        self.folder = Path(message["run"])

    def _next_report(self) -> dict[str, str]:
        """The next message of the process: ``run`` or ``error``; empty if the process has ended."""
        line = self._reports.readline()
        return dict(json.loads(line)) if line else {}

    def _reap(self, timeout: float | None = None) -> int:
        """Wait for the end of the process and of its output. Raises TimeoutError."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.folder} has not ended after {timeout:g} s") from None
        if self in _alive:
            _alive.remove(self)
            self._shower.join()
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._error = self._next_report().get("error", "")
            self._reports.close()
        return code

    @property
    def status(self) -> Status:
        """How the run stands. A preempted run can be resumed from a checkpoint; a stopped one has none."""
        code = self._process.poll()
        if code is None:
            return "running"
        # A launcher that a signal has stopped exits with 128 + the signal's number.
        ended: dict[int, Status] = {0: "done", PREEMPTED_EXIT_CODE: "preempted"}
        return ended.get(code, "stopped" if code > 128 else "failed")

    def wait(self, timeout: float | None = None) -> Status:
        """Wait for the end of the run, at most ``timeout`` seconds, and return how it ended.

        Raises RunFailed for a run that has failed, and TimeoutError. An interrupt ends the wait and not the run.
        """
        code = self._reap(timeout)
        if self.status == "failed":
            raise RunFailed(self._error or self._reason(), code)
        return self.status

    def _reason(self) -> str:
        """Return why the run has failed, by its record."""
        from asyncrl.launcher.run_folder.ended import read_ended
        from asyncrl.launcher.run_folder.folders import RunFolder, last_attempt

        ended = None
        with contextlib.suppress(OSError):
            ended = read_ended(RunFolder(path=self.folder, run_id="", attempt=last_attempt(self.folder)))
        if ended is None:
            return f"{self.folder}: the launcher has ended with exit code {self._process.returncode}"
        return str(ActorFailed(ended.actor, ended.reason, log=ended.log))

    def stop(self) -> Status:
        """Preempt the run as Ctrl-C does in a terminal, and wait for its end. A call during that ends it at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        self._reap()
        return self.status

    def resume(self, overrides: Mapping[str, Any] | None = None) -> Run:
        """Continue the run from its newest checkpoint, with the functions and rows that it was started with.

        ``overrides`` changes keys. Returns this run. Raises RunFailed, and UsageError while it is running.
        """
        if self.status == "running":
            raise UsageError(f"{self.folder}: the run is live; stop it first")
        self._reap()
        self._order["overrides"] |= _flags(overrides or {})
        self._order["resume"] = str(self.folder)
        self._start()
        return self


def _modules_path() -> list[str]:
    """Return the folders in which this program finds its own modules, for the processes of a run."""
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return [path for path in sys.path if path and not path.startswith(libraries) and not path.endswith(".zip")]


def _notebook_display() -> Any:
    """Return a display of the notebook that can be updated; None elsewhere."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython
    from IPython.display import display

    if getattr(get_ipython(), "kernel", None) is None:
        return None
    return display({"text/plain": "starting"}, raw=True, display_id=True)  # type: ignore[no-untyped-call]


def _show(output: Any, display: Any) -> None:
    """Show the newest lines of ``output`` in a display until it ends."""
    lines: deque[str] = deque(maxlen=SHOWN_LINES)
    for line in output or ():
        lines.append(line.decode(errors="replace"))
        display.update({"text/plain": "".join(lines).rstrip()}, raw=True)
    if output is not None:
        output.close()


@atexit.register
def _end_runs() -> None:
    """Preempt the runs that are live when this program ends, and wait for their ends."""
    for run in _alive:
        with contextlib.suppress(ProcessLookupError):
            run._process.send_signal(signal.SIGINT)
    for run in list(_alive):
        with contextlib.suppress(TimeoutError):
            run._reap(LAST_S)
