"""asyncrl-export: write a run's checkpoint as a model that transformers and vLLM load.

Importing this module, ``--help`` and wrong usage load nothing beyond the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.cli.command_line import Parser, complain, flushed
from asyncrl.cli.which_run import run_folder
from asyncrl.core.formatting import say

if TYPE_CHECKING:
    from asyncrl.checkpoint.folder import CheckpointFolder, Found
    from asyncrl.config import Config

PROGRAM = "asyncrl-export"
DESCRIPTION = "Write a run's checkpoint as a Hugging Face model, with LoRA adapters merged. RUN may be live."
EPILOG = """\
RUN is a run folder, or a name under runs/. OUT must be missing or empty. It appears once the whole model is written.

--push-to-hub ORG/NAME uploads the folder to a repository of the Hugging Face hub, and makes it if necessary. A
README.md is added: a model card with data, configuration, metrics and version. HF_TOKEN must have a token that may
write there. Without OUT, the temporary folder is removed.

Exit codes: 0 done; 1 the checkpoint is damaged, OUT cannot be written, or the upload failed; 2 wrong usage, no such run
or no such checkpoint; 78 the model of the configuration is missing or is not that of the run; 130 Ctrl-C.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return flushed(PROGRAM, lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    from asyncrl.core.errors import AsyncRLError, ConfigError, UsageError

    parser = _parser()
    given = parser.parse_args(argv)
    _check_flags(parser, given)
    try:
        version, where = _export_and_push(given)
    except KeyboardInterrupt:
        return complain(PROGRAM, "ended by SIGINT", 130)
    except (ConfigError, UsageError) as error:
        return complain(PROGRAM, str(error), error.exit_code)
    except (AsyncRLError, OSError) as error:
        return complain(PROGRAM, str(error), 1)
    say(f"version {version}: {where}", sys.stdout)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(PROGRAM, DESCRIPTION, EPILOG)
    parser.add_argument("run", metavar="RUN", help="folder or name of a run, live or not")
    parser.add_argument("out", metavar="OUT", type=Path, nargs="?", help="folder to write")
    parser.add_argument("--version", metavar="N", type=int, help="of this version of the weights (the newest there is)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="of the weights (learner.dtype; auto: float32)"
    )
    parser.add_argument(
        "--adapter", action="store_true", help="of a run with lora.rank: the adapter alone, as PEFT has it"
    )
    parser.add_argument("--model", metavar="PATH", help="the model that the run began with, if model.path has moved")
    parser.add_argument("--push-to-hub", metavar="ORG/NAME", help="upload the model, with a model card")
    parser.add_argument("--private", action="store_true", help="make the repository of --push-to-hub private")
    return parser


def _check_flags(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    if given.out is None and given.push_to_hub is None:
        parser.error("name the folder OUT, or a repository by --push-to-hub ORG/NAME")
    if given.private and given.push_to_hub is None:
        parser.error("--private belongs to --push-to-hub")
    if given.push_to_hub is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", given.push_to_hub):
        parser.error(f"--push-to-hub {given.push_to_hub}: is not ORG/NAME")


def _export_and_push(given: argparse.Namespace) -> tuple[int, str]:
    """Write the model, and push it if the flag is given. Returns its version, and where it is.

    Raises AsyncRLError or OSError.
    """
    with contextlib.ExitStack() as stack:
        if given.out is None:
            # The disk of the run has room for a model.
            folder = tempfile.TemporaryDirectory(prefix=".push-", dir=run_folder(given.run, PROGRAM))
            given.out = Path(stack.enter_context(folder)) / "model"
        config, found = _export(given)
        if given.push_to_hub is None:
            return found.version, str(given.out)
        from asyncrl.launcher.checks.hub import push

        (given.out / "README.md").write_text(_card(given, config, found))
        address = push(given.out, given.push_to_hub, is_private=given.private, message=f"Version {found.version}")
    return found.version, address


def _card(given: argparse.Namespace, config: Config, found: Found) -> str:
    from asyncrl.cli.model_card import model_card
    from asyncrl.observe.metrics_line import read_metrics

    base = Path(given.model or config.model.path or "") / "README.md"
    return model_card(
        config,
        read_metrics(run_folder(given.run, PROGRAM) / "metrics.jsonl", ("train", "eval")),
        step=found.step,
        version=found.version,
        base=base.read_text(errors="replace") if base.exists() else "",
        is_adapter=given.adapter,
    )


def _export(given: argparse.Namespace) -> tuple[Config, Found]:
    """Check the arguments, and write the model. Returns the run's configuration and the checkpoint.

    Raises AsyncRLError or OSError.
    """
    from asyncrl.core.errors import UsageError

    # Resolved, because the last part of a path may be ``..``.
    out = given.out.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{given.out}: it is there already; name a folder that is not")
    if out.exists() and (out.samefile(os.curdir) or out.is_mount()):
        # The model is written to a temporary folder next to OUT, which then replaces it.
        raise UsageError(f"{given.out}: a working folder or a mount point cannot be replaced; name a folder in it")
    config, checkpoints, found = find_checkpoint(given.run, given.version)
    if given.adapter and not config.lora.is_on:
        raise UsageError(f"--adapter: {given.run} trains the whole model; it has lora.rank = 0")

    from asyncrl.launcher.checks.hub import local_config
    from asyncrl.learner.checkpoint.export_checkpoint import export_checkpoint

    if given.model is None:
        config = local_config(config, ["model.path"])
    model = config.model if given.model is None else config.model.model_copy(update={"path": given.model})
    chosen = given.dtype or ("bfloat16" if config.learner.dtype == "bfloat16" else "float32")
    export_checkpoint(checkpoints, found, model, config, out, chosen, adapter_alone=given.adapter)
    return config, found


def find_checkpoint(
    run: str, version: int | None = None, step: int | None = None
) -> tuple[Config, CheckpointFolder, Found]:
    """Return the run's configuration, its folder of checkpoints, and the checkpoint of ``version`` or ``step``.

    Without both it is the newest. Raises UsageError, ConfigError or CheckpointError.
    """
    from asyncrl.checkpoint.folder import COMPLETE, CheckpointFolder, checkpoint_dir
    from asyncrl.config.load import config_from_json
    from asyncrl.core.errors import UsageError

    run_dir = run_folder(run, PROGRAM)
    try:
        config = config_from_json((run_dir / "config.json").read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"{run_dir / 'config.json'}: cannot be read: {error}") from error
    if config.learner.backend == "sim":
        raise UsageError(f"{run_dir}: its learner is simulated; there are no weights")
    checkpoints = CheckpointFolder(checkpoint_dir(config, run_dir))
    found = checkpoints.newest() if version is None else checkpoints.of_version(version)
    if step is not None:
        complete = (checkpoints.at(path) for path in checkpoints.candidates() if (path / COMPLETE).exists())
        found = next((each for each in complete if each.step == step), None)
    if found is None:
        of = f" of version {version}" if version is not None else f" of step {step}" if step is not None else ""
        raise UsageError(f"{checkpoints.folder}: holds no complete checkpoint{of}")
    return config, checkpoints, found


if __name__ == "__main__":
    sys.exit(main())
