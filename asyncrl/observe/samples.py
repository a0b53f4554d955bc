"""The files in RUN/samples: their names, and the newest groups in them.

Each line is the text of one prompt group, as the learner writes it (learner/metrics/record_files.py). Groups are of
three kinds: trained, filtered, or of an evaluation. ``step`` of a trained group is the step that trained it. For the
other kinds it is the last step that was trained before.

Invariant: a reader opens only the files that it needs, one at a time, the newest first. A line that is torn, damaged or
too long is skipped. Raises OSError if the folder or a file cannot be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import msgspec

SampleKind = Literal["trained", "filtered", "evaluation"]
KINDS: tuple[SampleKind, ...] = get_args(SampleKind)
TRAINED: SampleKind = "trained"
FOLDER = "samples"
MOST_LINE_BYTES = 64 << 20
_NAME = re.compile(r"(?:(step|filtered)|eval_([A-Za-z0-9_-]+))_(\d{6,})\.jsonl")
"""Name of a file. Its captures: "step" or "filtered", else the name of the evaluation; then the step."""


class SampleTrajectory(msgspec.Struct, frozen=True):
    """A response, or the conversation of an episode, with its score."""

    sample: int = 0
    text: str = ""
    messages: list[Any] = []
    """The conversation, as in OpenAI's chat completions; empty where a prompt has one response."""
    finish_reason: str = ""
    reward: float | None = None
    components: dict[str, float | None] = {}
    judgement: str = ""
    """Words of a judge about the response."""
    length: int | None = None
    """Number of sampled tokens."""
    turns: int = 0


class SampleGroup(msgspec.Struct, frozen=True):
    """A prompt group, as in a line of samples/."""

    trajectories: list[SampleTrajectory]
    kind: str = TRAINED
    """A SampleKind; or "generated" for a group that a dry run has made, without a step."""
    name: str = ""
    """Name of the evaluation."""
    reason: str = ""
    """Reason why the group was filtered."""
    step: int | None = None
    version: int | None = msgspec.field(name="weights/version", default=None)
    uid: str = ""
    source: str = ""
    """Name of the prompt's source in a mixture."""
    prompt: str = ""
    start: int = 0
    """Number of the learner's start (process) that wrote the group; a restarted learner has a higher one."""


class SampleSequence(msgspec.Struct, frozen=True):
    """The tokens of a sequence, as in a line of samples/."""

    tokens: list[int] = []
    logprobs: list[float | None] = []
    """Log-probs (nats) of the sampled tokens by the engine, in order; null for a number that JSON lacks."""
    trainer_logprobs: list[float | None] = []
    """Log-probs by the learner before the update that trained them, as ``logprobs``; empty where none are recorded."""
    entropies: list[float | None] = []
    """Entropies by the learner, nats, as ``trainer_logprobs``."""
    spans: list[tuple[int, int, int, str]] = []
    """(version, start, end, role) of tokens [start, end); the version is -1 unless the role is sampled."""


class TokenTrajectory(SampleTrajectory, frozen=True):
    """A trajectory with its tokens."""

    sequences: list[SampleSequence] = []
    resumes: int = 0


class TokenGroup(SampleGroup, frozen=True, kw_only=True):
    """A prompt group with the tokens of its trajectories. Reading it takes longer."""

    trajectories: list[TokenTrajectory]  # type: ignore[assignment]


AnyGroup = TypeVar("AnyGroup", bound=SampleGroup)


@dataclass(frozen=True, slots=True)
class SampleChoice:
    """The groups to read: of kind ``kind``, of step ``step``, of steps up to ``until``. None selects all."""

    kind: SampleKind | None = None
    step: int | None = None
    until: int | None = None

    def with_next_kind(self) -> SampleChoice:
        """The same choice with the next kind; after the last kind, with all kinds."""
        kinds = (None, *KINDS)
        return replace(self, kind=kinds[(kinds.index(self.kind) + 1) % len(kinds)])


def sample_file(kind: SampleKind, step: int, name: str = "") -> str:
    """Name of the file that holds groups of this kind; ``name`` is that of the evaluation."""
    stem = {"trained": "step", "filtered": "filtered", "evaluation": f"eval_{name}"}[kind]
    return f"{stem}_{step:06d}.jsonl"


def newest_samples(run_dir: Path, choice: SampleChoice, count: int) -> list[SampleGroup]:
    """Returns at most ``count`` groups, the newest first; an empty list if the run has no samples. Raises OSError."""
    newest: list[SampleGroup] = []
    for path in sample_files(run_dir, choice):
        newest += groups_in(path, SampleGroup)
        if len(newest) >= count:
            break
    return newest[:count]


def step_in(path: Path) -> int:
    """The step in the name of a file that ``sample_files`` lists."""
    return int(path.stem.rpartition("_")[2])


def sample_files(run_dir: Path, choice: SampleChoice) -> list[Path]:
    """List the files of a choice, the newest first. Groups filtered or evaluated after a step are newer than it.

    An empty list if the run has no samples. Raises OSError.
    """
    chosen: list[tuple[int, int, Path]] = []
    try:
        entries = list((run_dir / FOLDER).iterdir())
    except FileNotFoundError:
        return []
    for path in entries:
        if (match := _NAME.fullmatch(path.name)) is None:
            continue
        kind: SampleKind = "evaluation" if match[2] else "trained" if match[1] == "step" else "filtered"
        step = int(match[3])
        if (
            choice.kind in (None, kind)
            and choice.step in (None, step)
            and (choice.until is None or step <= choice.until)
        ):
            chosen.append((step, KINDS.index(kind), path))
    # KINDS has the kinds in order of their time: trained first.
    return [path for _, _, path in sorted(chosen, reverse=True)]


def groups_in(path: Path, kind: type[AnyGroup]) -> list[AnyGroup]:
    """Read the groups of a file, the newest first; for a repeated uid, only its last group. Raises OSError.

    If a restarted learner trained the step again, only the groups of its newest start stay.
    """
    groups: dict[str, AnyGroup] = {}
    for group in _lines(path, kind):
        if group.kind == TRAINED and any(other.start < group.start for other in groups.values()):
            groups.clear()
        groups.pop(group.uid, None)
        groups[group.uid] = group
    found = list(groups.values())
    # All groups of a step or an evaluation are equally new; filtered groups were appended one by one.
    return found[::-1] if found and found[0].kind == "filtered" else found


def _lines(path: Path, kind: type[AnyGroup]) -> Iterator[AnyGroup]:
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        while line := file.readline(MOST_LINE_BYTES):
            try:
                yield decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                continue
