"""The folder and the checkpoint that a run is resumed from, and whether it is still the same run.

Looks and compares; nothing is changed before ``begin``, which is called with the run's private folder held. The order
of the data and the meaning of a step depend on the seed and on the geometry of batches, so a run is refused with
RunChanged (exit code 78) when they are not those of its checkpoint, unless the user allows it; the prompts are
compared by the checks before the start, or, where these do not come to their end, by the dataloader. Adapters of
another form, and a whole model in place of adapters, are refused with ConfigError: no flag makes them fit.

A damaged checkpoint is stepped back from, and refused with CheckpointError where the user has named it. All sizes are
looked at here, and checksums as far as CHECKED_BYTES go: the ranks of the learner read each its share of the rest when
they load it, and step back likewise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncrl.checkpoint.contents import read_state
from asyncrl.checkpoint.folder import CheckpointFolder, checkpoint_dir
from asyncrl.checkpoint.retention import Found
from asyncrl.checkpoint.state import Adapters, CheckpointState, Geometry
from asyncrl.checkpoint.step_back import StepBack, newest_whole
from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.errors import CheckpointError, ConfigError, DamagedCheckpoint, RunChanged, UsageError
from asyncrl.launcher.run_folder.begun import CONFIG
from asyncrl.launcher.run_folder.choice import ResumedRun, choose, find_candidates
from asyncrl.launcher.run_folder.ended import exported_model
from asyncrl.launcher.run_folder.folders import RunFolder, begin_attempt, next_attempt
from asyncrl.launcher.run_folder.private import in_use, is_living
from asyncrl.preflight.inputs import KnownPrompts

AUTO = "auto"
CHECKED_BYTES = 1 << 30
"""Bytes of the trainer's files that are held against their checksums before anything starts: seconds of reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """A run that is to go on, and from where."""

    folder: RunFolder
    checkpoint: Found | None
    """Checkpoint to go on from; None for the initial weights, as there is no checkpoint."""
    is_finished: bool
    """Whether nothing is left to be done."""
    choice: ResumedRun | None = None
    """Choice of this run among those of its name, where the user has named none."""
    search: StepBack | None = None
    """Search that has found the checkpoint, where the user has named none."""
    prompts: KnownPrompts | None = None
    """Prompts that the run is to have, where they must not be others."""
    state: CheckpointState | None = None
    """State of the run in the checkpoint."""

    def describe(self) -> str:
        """One line for people."""
        why = f" ({self.choice.why})" if self.choice is not None and self.choice.why else ""
        if self.checkpoint is None:
            begins = "there is no complete checkpoint, so it begins from the initial weights"
            return f"resuming {self.folder.path}{why}: {begins}"
        found = self.checkpoint
        return f"resuming {self.folder.path} from version {found.version}, step {found.step}: {found.path}{why}"

    def describe_changes(self, config: Config) -> list[str]:
        """Lines for people: each key that ``config``, the resolved configuration, changes, and what it applies to.

        Reads the files of users' code and of the model's tokenizer.
        """
        return self.state.origin.compare(config).describe(self.state.buffered) if self.state is not None else []

    def describe_finished(self, config: Config) -> str:
        """One line for people, of a run that ``is_finished``."""
        assert self.checkpoint is not None
        step, steps = self.checkpoint.step, config.learner.steps
        return f"{self.folder.path} is finished: step {step} of {steps}; raise learner.steps to go on"

    @property
    def warnings(self) -> list[str]:
        """Warnings for the user before it goes on, a line each."""
        lines = list(self.choice.warnings) if self.choice is not None else []
        if self.checkpoint is None:
            lines.append(f"{self.folder.path} has no checkpoint: training begins from the initial weights, at step 1")
        elif self.search is not None:
            found = self.checkpoint
            lines += [damaged.describe(found.path, found.step) for damaged in self.search.damaged]
        return lines

    def begin(self, config: Config) -> list[Path]:
        """Make this the run's attempt, and its checkpoint the newest; the new paths of damaged and newer ones.

        To be called with the private folder held. Raises CheckpointError or OSError.
        """
        begin_attempt(self.folder, config)
        if self.checkpoint is None:
            return []
        aside = self.search.set_aside() if self.search is not None else []
        return aside + CheckpointFolder(self.checkpoint.path.parent).set_aside_above(self.checkpoint)


def find_resumption(config: Config, place: str) -> tuple[Config, Resumption]:
    """The resumption of the run of ``config``; ``place`` is "auto", a run folder, or a checkpoint.

    The configuration comes back with the name and folder of the run that was found. Raises UsageError,
    CheckpointError, ConfigError or RunChanged.
    """
    chosen: Path | None = None
    choice: ResumedRun | None = None
    if place == AUTO:
        choice = _choose(config)
        path = choice.path
    else:
        path, chosen = _locate(config, Path(place).absolute())
    if is_living(path):
        raise in_use(path)
    tree = config.model_dump(mode="json")
    tree["run"] |= {"dir": str(path.parent), "name": path.name}
    config = validate_config(tree)
    checkpoints = CheckpointFolder(checkpoint_dir(config, path))
    search: StepBack | None = None
    found: Found | None
    if chosen is None:
        found, search = newest_whole(checkpoints, CHECKED_BYTES)
    else:
        found = _named(checkpoints, chosen, path)
    done, prompts, state = False, None, None
    if found is not None:
        state = read_state(found.path)
        _compare(config, state)
        if "data" not in config.resume.allow and state.fingerprint:
            prompts = KnownPrompts(fingerprint=state.fingerprint, count=state.prompts)
        exported = not config.checkpoint.export_at_end or exported_model(path) is not None
        done = found.step >= config.learner.steps and exported
    return config, Resumption(
        folder=next_attempt(path),
        checkpoint=found,
        is_finished=done,
        choice=choice,
        search=search,
        prompts=prompts,
        state=state,
    )


def _choose(config: Config) -> ResumedRun:
    candidates = find_candidates(config)
    if not candidates:
        path = Path(config.run.dir).absolute() / config.run.name
        raise UsageError(
            f"--resume auto: {path} holds no run; name one by run.dir and run.name, or begin one without --resume"
        )
    return choose(candidates)


def _named(checkpoints: CheckpointFolder, chosen: Path, run: Path) -> Found:
    """The checkpoint that the user has named, whole in every byte. Raises CheckpointError."""
    try:
        found = checkpoints.at(chosen)
        checkpoints.verify_all(found, None)
    except DamagedCheckpoint as problem:
        reason = (
            f"{problem.reason}. --resume names this damaged checkpoint: restore the file, name another one, or go on "
            f"from the newest whole one by --resume {run}"
        )
        raise CheckpointError(problem.path, reason) from problem
    return found


def _locate(config: Config, place: Path) -> tuple[Path, Path | None]:
    """The run folder, and the checkpoint if ``place`` is one."""
    if (place / CONFIG).is_file():
        return place, None
    if not place.is_dir():
        raise UsageError(f"--resume {place}: there is no such folder; give a run folder or one of its checkpoints")
    # By default checkpoints lie in the run folder; elsewhere, in a folder with the name of theirs.
    named = place.parent.name if config.checkpoint.dir is not None else config.run.name
    for run in (place.parent.parent, Path(config.run.dir).absolute() / named):
        if (run / CONFIG).is_file() and checkpoint_dir(config, run).absolute() == place.parent:
            return run, place
    raise UsageError(
        f"--resume {place}: neither a run folder nor one of the checkpoints of a run; with checkpoint.dir set, run.dir "
        "says where the run folder is"
    )


def _compare(config: Config, state: CheckpointState) -> None:
    if state.seed != config.run.seed and "seed" not in config.resume.allow:
        raise RunChanged("seed", "run.seed", was=str(state.seed), now=str(config.run.seed))
    problems = [*_adapter_problems(state.adapters, Adapters.of(config)), *_backend_problems(config, state)]
    if problems:
        raise ConfigError(problems, found=True)
    changed = [] if "batch" in config.resume.allow else list(_differences(state.geometry, Geometry.of(config)))
    if changed:
        keys, was, now = (", ".join(parts) for parts in zip(*changed, strict=True))
        raise RunChanged("batch", keys, was=was, now=now)


def _adapter_problems(was: Adapters, now: Adapters) -> Iterator[str]:
    for key in ("rank", "alpha", "targets") if was.rank and now.rank else ("rank",):
        before, after = getattr(was, key), getattr(now, key)
        if before != after:
            told = f"was {before} when the run was left, is {after} now; its checkpoint fits no other"
            yield f"lora.{key}: {told}: put it back, or begin another run"


def _backend_problems(config: Config, state: CheckpointState) -> Iterator[str]:
    now = config.learner.backend
    was = state.origin.settings.get("learner", {}).get("backend", now)
    if was != now:
        yield f"learner.backend: was {was} when the run was left, is {now} now: put it back, or begin another run"


def _differences(was: Geometry, now: Geometry) -> Iterator[tuple[str, str, str]]:
    for key, field in (
        ("learner.groups_per_step", "groups_per_step"),
        ("learner.steps_per_version", "steps_per_version"),
        ("rollout.samples_per_prompt", "samples_per_prompt"),
    ):
        before, after = getattr(was, field), getattr(now, field)
        if before != after:
            yield key, str(before), str(after)
