"""Resuming: finds the run folder and the checkpoint, and checks that the configuration still fits them.

``find_resumption`` only reads and compares. ``Resumption.begin`` then changes the folder, while its caller holds the
private folder (private.py). The order of the data and the meaning of a step depend on the seed and on the geometry of
batches. If these differ from the checkpoint's, the resume is refused with RunChanged (exit code 78), unless the user
allows it. The checks before the start compare the prompts; for a mixture, or if these checks take too long, the
dataloader does. Other adapters, and a whole model in place of adapters, are refused with ConfigError: no flag allows
that.

If the newest checkpoint is damaged, the run resumes from the newest one that is whole. A damaged checkpoint that the
user has named is refused with CheckpointError. This module verifies all bytes of a checkpoint that the user has named.
For others it compares the sizes of all files, and the checksums of up to CHECKED_BYTES. The learner's ranks verify the
rest when they load it, and take an older checkpoint in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.checkpoint.contents import CheckpointState, read_state
from asyncrl.checkpoint.folder import COMPLETE, CheckpointFolder, Found, checkpoint_dir
from asyncrl.checkpoint.step_back import Damaged, newest_whole
from asyncrl.config import Config
from asyncrl.config.load import with_values
from asyncrl.config.resuming import Applies, applies, differences
from asyncrl.core.errors import CheckpointError, ConfigError, DamagedCheckpoint, RunChanged, UsageError
from asyncrl.launcher.checks.findings import KnownPrompts
from asyncrl.launcher.run_folder.ended import exported_model
from asyncrl.launcher.run_folder.folders import RunFolder, begin_attempt, next_attempt, runs_of_name
from asyncrl.launcher.run_folder.private import CONFIG, in_use, is_live

AUTO = "auto"
"""Value of --resume for the run of ``run.dir`` and ``run.name``."""
CHECKED_BYTES = 1 << 30
"""Bytes of a checkpoint whose checksums are verified before the start: a few seconds of reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """A run to resume, and the checkpoint that it resumes from."""

    folder: RunFolder
    checkpoint: Found | None
    """Checkpoint to resume from; None for the initial weights, if the run has no checkpoint."""
    is_finished: bool
    """True if nothing is left to do: all steps are trained, and the model is exported unless export_at_end is off."""
    others: list[Path] = field(default_factory=list)
    """Other runs of the name that ``auto`` did not choose."""
    damaged: list[Damaged] = field(default_factory=list)
    """Damaged checkpoints that are newer than ``checkpoint``; ``begin`` renames them."""
    prompts: KnownPrompts | None = None
    """Fingerprint and number of the prompts that the run must have; None if they may differ."""
    state: CheckpointState | None = None
    """State of the run in the checkpoint; None without a checkpoint."""

    def describe(self) -> str:
        """One line for people."""
        names = ", ".join(path.name for path in self.others)
        if self.checkpoint is None:
            others = f"; neither has {names}" if names else ""
            return f"resuming {self.folder.path} from the initial weights: it has no complete checkpoint{others}"
        found = self.checkpoint
        others = f" (its newest checkpoint is newer than any of {names})" if names else ""
        return f"resuming {self.folder.path} from version {found.version}, step {found.step}: {found.path}{others}"

    def describe_changes(self, config: Config) -> list[str]:
        """Lines for people: each key that ``config`` changes since the checkpoint, and what the change applies to.

        Also compares the files of users' code and of the model's tokenizer.
        """
        return self.state.origin.compare(config).describe(self.state.buffered) if self.state is not None else []

    def describe_finished(self, config: Config) -> str:
        """One line for people if ``is_finished``: the steps, and how to train more."""
        assert self.checkpoint is not None
        step, steps = self.checkpoint.step, config.learner.steps
        return f"{self.folder.path} is finished: step {step} of {steps}; raise learner.steps to train more"

    @property
    def warnings(self) -> list[str]:
        """Warnings for the user before the start, a line each."""
        if self.checkpoint is None:
            return [f"{self.folder.path} has no checkpoint: training begins from the initial weights, at step 1"]
        return [one.describe(self.checkpoint.path, self.checkpoint.step) for one in self.damaged]

    def begin(self, config: Config) -> list[Path]:
        """Begin the attempt in the folder, and rename damaged checkpoints and those newer than ``checkpoint``.

        Returns their new paths. The caller holds the private folder. Raises CheckpointError or OSError.
        """
        begin_attempt(self.folder, config)
        if self.checkpoint is None:
            return []
        checkpoints = CheckpointFolder(self.checkpoint.path.parent)
        aside = [checkpoints.set_aside_damaged(one.path) for one in self.damaged]
        return aside + checkpoints.set_aside_above(self.checkpoint)


def find_resumption(config: Config, place: str) -> tuple[Config, Resumption]:
    """Find the run and the checkpoint to resume, and compare the checkpoint with ``config``.

    ``place`` is "auto", a run folder, or a checkpoint. The returned configuration has name and folder of the run that
    was found. Raises UsageError if no run is found or it is live, CheckpointError, ConfigError, RunChanged or OSError.
    """
    # The checkpoint that the user named; None for the newest whole one.
    chosen: Path | None = None
    other_runs: list[Path] = []
    if place == AUTO:
        path, other_runs = _newest_of_name(config)
    else:
        path, chosen = _locate(config, Path(place).absolute())
    if is_live(path):
        raise in_use(path)
    config = with_values(config, {"run.dir": str(path.parent), "run.name": path.name})
    checkpoints = CheckpointFolder(checkpoint_dir(config, path))
    damaged: list[Damaged] = []
    found: Found | None
    if chosen is None:
        found, damaged = newest_whole(checkpoints, lambda each: _verified(checkpoints, each, CHECKED_BYTES))
    else:
        found = _verified_named(checkpoints, chosen, path)
    is_finished, prompts, state = False, None, None
    if found is not None:
        state = read_state(found.path)
        _require_same(config, state)
        if "data" not in config.resume.allow and state.fingerprint:
            prompts = KnownPrompts(fingerprint=state.fingerprint, count=state.prompts)
        exported = not config.checkpoint.export_at_end or exported_model(path) is not None
        is_finished = found.step >= config.learner.steps and exported
    return config, Resumption(
        folder=next_attempt(path),
        checkpoint=found,
        is_finished=is_finished,
        others=other_runs,
        damaged=damaged,
        prompts=prompts,
        state=state,
    )


def _newest_of_name(config: Config) -> tuple[Path, list[Path]]:
    """Return the folder of ``run.name`` with the newest checkpoint, or the last folder if none has one, and the others.

    Raises UsageError if there is no folder, or if a run is live in one of them, because the user may mean that run.
    """
    runs = runs_of_name(config)
    if not runs:
        path = Path(config.run.dir).absolute() / config.run.name
        raise UsageError(
            f"--resume auto: {path} holds no run; name one by run.dir and run.name, or start one without --resume"
        )
    for path in runs:
        if is_live(path):
            raise UsageError(f"{in_use(path)}, or name another run by --resume PATH")
    written = [_written_at(config, path) for path in runs]
    chosen = max(range(len(runs)), key=lambda index: (written[index], index))
    return runs[chosen], runs[:chosen] + runs[chosen + 1 :]


def _written_at(config: Config, path: Path) -> float:
    """Return the time of a run's newest checkpoint (s since the epoch); 0 if it has none."""
    checkpoints = CheckpointFolder(checkpoint_dir(config, path)).candidates()
    if not checkpoints:
        return 0.0
    mark = checkpoints[0] / COMPLETE
    return (mark if mark.exists() else checkpoints[0]).stat().st_mtime


def _verified(checkpoints: CheckpointFolder, path: Path, limit_bytes: int | None) -> Found:
    """Verify the checkpoint at ``path`` as ``CheckpointFolder.verify_all`` does, and return it."""
    found = checkpoints.at(path)
    checkpoints.verify_all(found, limit_bytes)
    return found


def _verified_named(checkpoints: CheckpointFolder, chosen: Path, run: Path) -> Found:
    """Verify every byte of ``chosen``, a checkpoint that the user has named, and return it. Raises CheckpointError."""
    try:
        return _verified(checkpoints, chosen, None)
    except DamagedCheckpoint as problem:
        reason = (
            f"{problem.reason}. --resume names this damaged checkpoint: restore the file, name another one, or resume "
            f"from the newest whole one by --resume {run}"
        )
        raise CheckpointError(problem.path, reason) from problem


def _locate(config: Config, place: Path) -> tuple[Path, Path | None]:
    """Return the run folder of the path ``place``, and the checkpoint if ``place`` is one. Raises UsageError."""
    if (place / CONFIG).is_file():
        return place, None
    if not place.is_dir():
        raise UsageError(f"--resume {place}: there is no such folder; give a run folder or one of its checkpoints")
    # Checkpoints are in the run folder or, with checkpoint.dir, in a folder of the run's name.
    named = place.parent.name if config.checkpoint.dir is not None else config.run.name
    for run in (place.parent.parent, Path(config.run.dir).absolute() / named):
        if (run / CONFIG).is_file() and checkpoint_dir(config, run).absolute() == place.parent:
            return run, place
    raise UsageError(
        f"--resume {place}: neither a run folder nor a checkpoint of a run; if checkpoint.dir is set, set run.dir to "
        "the folder of the run folder"
    )


def _require_same(config: Config, state: CheckpointState) -> None:
    """Raise RunChanged or ConfigError if the checkpoint's seed, batches, adapters or backend differ from ``config``."""
    if state.seed != config.run.seed and "seed" not in config.resume.allow:
        raise RunChanged("seed", "run.seed", was=str(state.seed), now=str(config.run.seed))
    batch, problems = [], []
    for key, before, after in differences(state.origin.settings, config):
        if applies(key) is Applies.BATCH:
            batch.append((key, str(before), str(after)))
        else:
            change = f"was {before} when the run was left, is {after} now, which does not fit the checkpoint"
            problems.append(f"{key}: {change}: put it back, or start another run")
    if problems:
        raise ConfigError(problems, found=True)
    if batch and "batch" not in config.resume.allow:
        keys, was, now = (", ".join(parts) for parts in zip(*batch, strict=True))
        raise RunChanged("batch", keys, was=was, now=now)
