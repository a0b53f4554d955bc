"""asyncrl-eval: evaluate a model or a checkpoint as a run does, without training.

An evaluation is an ordinary run of version 0 and no step (config/evaluating.py). Importing this module, ``--help`` and
wrong usage load nothing beyond the standard library.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.cli.command_line import Parser, complain_of, interruptible, split_flags
from asyncrl.cli.which_run import run_folder
from asyncrl.core.formatting import say

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.observe.evaluations import Evaluation

PROGRAM = "asyncrl-eval"
DESCRIPTION = (
    "Evaluate a model or a checkpoint by the evaluation sets [eval.NAME] of a configuration, without training."
)
EPILOG = """\
CONFIG files and flags with dotted keys are those of asyncrl-launch. Engines, rewards and checks are those of a run.
Each set is evaluated once. The training prompts are not read, and learner keys such as the loss have no effect:

  asyncrl-eval mine.toml                               # model.path
  asyncrl-eval mine.toml --checkpoint mine             # the newest checkpoint of the run mine
  asyncrl-eval mine.toml --checkpoint mine@40 --compare mine-eval --eval.heldout.n 8

The run folder is that of a run named NAME-eval. It has the rewards of each prompt (evaluations.jsonl), the result
(evaluation.json) and samples. The table has the mean reward and pass@k with the threshold eval.NAME.pass_at, and
intervals of 95 %: the percentile bootstrap over prompts, 10,000 resamples. Prompts without a reward are in no mean.

--compare RUN adds the differences to another evaluation: this one less RUN, over the prompts that both have. Prompts
are resampled in pairs. RUN is the folder or the name of an evaluation, or of a run, whose newest evaluations count.

Exit codes: 0 done; 1 failed; 2 wrong usage; 78 wrong configuration; 130 Ctrl-C, 129 a closed terminal, 143 SIGTERM, 140
SIGUSR2. An evaluation that was stopped has no result.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return interruptible(PROGRAM, lambda: _main(list(sys.argv[1:] if argv is None else argv)))


def _main(argv: list[str]) -> int:
    parser = _parser()
    overrides, rest = split_flags(parser, argv)
    given = parser.parse_args(rest)

    from asyncrl.config.evaluating import for_evaluation
    from asyncrl.config.load import load_config
    from asyncrl.core.errors import AsyncRLError

    try:
        config = load_config(given.configs, overrides)
        other = _other_run(given.compare, config.eval) if given.compare is not None else None
        # Progress is no part of the JSON.
        output = contextlib.redirect_stdout(sys.stderr) if given.json else contextlib.nullcontext()
        with output, chosen_model(config, given.model, given.checkpoint) as (model, name):
            code, result = run_evaluation(for_evaluation(config, model), name, other)
    except ExportFailed as failed:
        return failed.code
    except AsyncRLError as error:
        return complain_of(PROGRAM, error)
    if result is not None:
        say(result.to_json().rstrip() if given.json else f"\n{result}", sys.stdout)
    return code


def _parser() -> Parser:
    usage = f"{PROGRAM} CONFIG... [--checkpoint RUN[@STEP] | --model PATH] [--compare RUN] [--json] [--KEY VALUE]"
    parser = Parser(PROGRAM, DESCRIPTION, EPILOG, usage)
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="TOML files, merged left to right")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--checkpoint",
        metavar="RUN[@STEP]",
        help="a run's checkpoint of this step (the newest), in place of model.path",
    )
    which.add_argument("--model", metavar="PATH", help="a model's folder or name on the hub, in place of model.path")
    parser.add_argument("--compare", metavar="RUN", help="add differences to the evaluation in this run folder")
    parser.add_argument("--json", action="store_true", help="print the result as JSON; progress goes to standard error")
    return parser


class ExportFailed(Exception):
    """asyncrl-export has failed, and printed why."""

    def __init__(self, code: int) -> None:
        self.code = code


@contextlib.contextmanager
def chosen_model(config: Config, model: str | None, checkpoint: str | None) -> Iterator[tuple[str | None, str]]:
    """Yield the path of the model to evaluate (None: model.path) and its name.

    ``checkpoint``, as RUN or RUN@STEP, is exported to a temporary folder in run.dir.

    Raises AsyncRLError, OSError or ExportFailed.
    """
    if checkpoint is None:
        yield model, model or config.model.path or "simulated"
        return
    from asyncrl.cli.export import find_checkpoint

    run, step = _split_step(checkpoint)
    _, _, found = find_checkpoint(run, step=step)
    # The disk of the runs has room for a model.
    parent = Path(config.run.dir).absolute()
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".eval-", dir=parent) as folder:
        exported = str(Path(folder) / "model")
        # In a process of its own, because torch would stay in the memory of this one.
        argv = [sys.executable, "-m", "asyncrl.cli.export", run, exported, "--version", str(found.version)]
        if code := subprocess.run(argv, stdout=sys.stderr, check=False).returncode:
            raise ExportFailed(code)
        yield exported, f"{run_folder(run, PROGRAM).absolute()}@{found.step}"


def _split_step(text: str) -> tuple[str, int | None]:
    """Return (RUN, STEP) of RUN@STEP, or (RUN, None) of a text that does not end in @ and a number."""
    run, _, step = text.rpartition("@")
    return (run, int(step)) if run and step.isdecimal() else (text, None)


def _other_run(run: str, sets: Collection[str]) -> Path:
    """Return the folder of a run to compare with. Raises UsageError if none of these sets was evaluated there."""
    from asyncrl.core.errors import UsageError
    from asyncrl.observe.evaluations import FILE, read_rewards

    folder = run_folder(run, "--compare").absolute()
    if not (folder / FILE).is_file():
        raise UsageError(f"--compare {run}: {folder} has no {FILE}, so no evaluation has ended there")
    evaluated = read_rewards(folder)
    if not evaluated.keys() & set(sets):
        raise UsageError(f"--compare {run}: it evaluated {', '.join(sorted(evaluated))}, and none of {', '.join(sets)}")
    return folder


def run_evaluation(
    config: Config,
    name: str,
    other: Path | None = None,
    *,
    on_folder: Callable[[Path], None] = lambda folder: None,
    reserved: Path | None = None,
) -> tuple[int, Evaluation | None]:
    """Launch the evaluation ``config`` (config/evaluating.py) on this host, and follow it to its end.

    ``name`` names the model in the result, and ``other`` is the folder of a run to compare with. ``on_folder`` and
    ``reserved`` are those of ``Launch``. Returns the exit code and, if that is 0, the result, which is also in the
    run folder. Raises AsyncRLError or OSError.
    """
    from asyncrl.core.files import replace_file
    from asyncrl.launcher.launch import Launch
    from asyncrl.observe.evaluations import RESULT, read_evaluation

    folders: list[Path] = []

    def note(folder: Path) -> None:
        folders.append(folder)
        on_folder(folder)

    code = Launch(config, on_folder=note, reserved=reserved).launch()
    if code:
        return code, None
    limits = {name: each.pass_at for name, each in config.eval.items()}
    result = read_evaluation(folders[0], name, limits, other)
    replace_file(folders[0] / RESULT, result.to_json())
    return code, result


if __name__ == "__main__":
    sys.exit(main())
