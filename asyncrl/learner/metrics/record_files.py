"""The files that the learner writes: metrics.jsonl, quarantine.jsonl, evaluations.jsonl and samples/.

Each file is append-only and has one JSON object a line, with the learner's start number. A reader keeps the last line
of a step, and skips torn lines of a killed process. ``samples/`` holds the text of a few groups: ``step_N.jsonl`` those
that step N trained, ``filtered_N.jsonl`` filtered ones, ``eval_NAME_N.jsonl`` those of an evaluation.

Lines that cannot be written, for example on a full disk, stay in memory in order and are written later. The oldest
beyond MOST_BYTES are lost and counted. Only the constructor of RecordFiles raises OSError. One thread at a time may use
a RecordFiles.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncrl.core.files import KeptWrites, append_whole
from asyncrl.learner.algorithm.batch import SequenceId
from asyncrl.learner.algorithm.token_scores import TokenScores
from asyncrl.learner.groups.intake import Quarantined
from asyncrl.messages.groups import Group, sampled_tokens
from asyncrl.messages.groups import Sequence as TokenSequence
from asyncrl.observe.catalogue import check_name
from asyncrl.observe.evaluations import FILE as EVALUATIONS
from asyncrl.observe.samples import TRAINED, SampleKind, sample_file

MOST_BYTES = {"metrics": 16 << 20, "quarantine": 4 << 20, "evaluations": 4 << 20, "samples": 32 << 20}
"""Bytes of lines that may wait in memory, by kind of file: samples are large, and must not displace metrics."""


DECIMALS = 5
"""Digits after the point of the learner's scores."""
NO_SCORES: Mapping[SequenceId, TokenScores] = {}


class RecordFiles:
    """The files of one run folder. Lines that the disk refuses wait in memory."""

    def __init__(self, run_dir: Path, start: int) -> None:
        self._metrics = run_dir / "metrics.jsonl"
        self._quarantine = run_dir / "quarantine.jsonl"
        self._evaluations = run_dir / EVALUATIONS
        self._samples = run_dir / "samples"
        self.start = start
        """Number of this start of the learner in the run folder, from 1; every line holds it."""
        self._samples.mkdir(exist_ok=True)
        self._kept = {kind: KeptWrites(most) for kind, most in MOST_BYTES.items()}
        """Writes that wait for room on the disk, by kind of file."""

    @property
    def waiting(self) -> int:
        """Number of lines that wait in memory for room on the disk."""
        return sum(kept.records for kept in self._kept.values())

    @property
    def lost(self) -> int:
        """Number of lines that were dropped."""
        return sum(kept.lost for kept in self._kept.values())

    @property
    def error(self) -> OSError | None:
        """Error of the last attempt to write lines; None if it succeeded."""
        return next((kept.error for kept in self._kept.values() if kept.error is not None), None)

    def retry(self) -> None:
        """Try to write the waiting lines."""
        for kept in self._kept.values():
            kept.retry()

    def give_up(self) -> None:
        """Drop the waiting lines and count them as lost."""
        for kept in self._kept.values():
            kept.give_up()

    def metrics(self, *lines: dict[str, Any]) -> None:
        """Append lines to metrics.jsonl."""
        for line in lines:
            for name in line:
                check_name(name, "line")
        self._append("metrics", self._metrics, [line | {"start": self.start} for line in lines])

    def quarantined(self, step: int, found: Sequence[Quarantined]) -> None:
        """Append a line for each prompt that will not be trained, with the reason, to quarantine.jsonl."""
        leases = [item.group.lease if item.group is not None else None for item in found]
        self._append(
            "quarantine",
            self._quarantine,
            [
                {
                    "uid": item.uid,
                    "reason": item.reason,
                    "step": step,
                    "attempt": lease.attempt if lease is not None else None,
                    "prompt": lease.prompt if lease is not None else None,
                    "start": self.start,
                }
                for item, lease in zip(found, leases, strict=True)
            ],
        )

    def evaluated(self, name: str, step: int, version: int, groups: Sequence[Group]) -> None:
        """Append a line for each prompt of a complete round of the evaluation ``name`` to evaluations.jsonl."""
        self._append(
            "evaluations",
            self._evaluations,
            [
                {
                    "eval": name,
                    "uid": group.lease.uid,
                    "row": hashlib.blake2b(msgspec.json.encode(group.lease.row), digest_size=8).hexdigest(),
                    "rewards": [t.reward for t in group.trajectories] if group.failure is None else [],
                    "failure": group.failure,
                    "step": step,
                    "weights/version": version,
                    "start": self.start,
                }
                for group in groups
            ],
        )

    def samples(
        self,
        step: int,
        version: int,
        groups: Sequence[Group],
        *,
        kind: SampleKind = TRAINED,
        name: str = "",
        scores: Mapping[SequenceId, TokenScores] = NO_SCORES,
    ) -> None:
        """Append the trajectories of these groups to a file in samples/.

        For evaluations and filtered groups ``step`` is the last trained step. ``name`` is the name of the evaluation,
        or the reason why the groups were filtered. ``scores`` are the learner's, for trained groups.
        """
        fields = {"evaluation": {"name": name}, "filtered": {"reason": name}}.get(kind, {})
        self._append(
            "samples",
            self._samples / sample_file(kind, step, name),
            [_sample(step, version, group, kind, scores) | fields | {"start": self.start} for group in groups],
        )

    def _append(self, kind: str, path: Path, lines: list[dict[str, Any]]) -> None:
        """Append the lines. Without lines, no file is made."""
        if not lines:
            return
        # msgspec is fast, which matters for a step's many tokens; it writes nan and inf as null.
        data = b"".join(msgspec.json.encode(line, enc_hook=_number) + b"\n" for line in lines)
        append = _append_sample if kind == "samples" else _append_data
        self._kept[kind].add(partial(append, path, data), len(data), len(lines))


def _append_sample(path: Path, data: bytes) -> None:
    # A user may have deleted the folder to make room.
    path.parent.mkdir(exist_ok=True)
    _append_data(path, data)


def _append_data(path: Path, data: bytes) -> None:
    """Append all of the data, or none and raise OSError.

    If a killed process left the last line torn, the data begin on a new line.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data
        append_whole(descriptor, data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def _sample(
    step: int, version: int, group: Group, kind: SampleKind, scores: Mapping[SequenceId, TokenScores]
) -> dict[str, Any]:
    """A group as JSON: a line of samples/ apart from ``start`` and the fields of its kind."""
    uid = group.lease.uid
    return {
        "kind": kind,
        "step": step,
        "weights/version": version,
        "uid": uid,
        **({"source": group.lease.source} if group.lease.source else {}),
        "prompt": group.lease.prompt,
        "leased_version": group.lease.param_version,
        "trajectories": [
            {
                "sample": t.sample,
                "text": t.text,
                "messages": t.messages,
                "sequences": [
                    _sequence(sequence, scores.get(SequenceId(uid, t.sample, number)))
                    for number, sequence in enumerate(t.sequences)
                ],
                "finish_reason": t.finish_reason,
                "reward": t.reward,
                "components": t.components,
                **({"judgement": t.judgement} if t.judgement else {}),
                "length": sampled_tokens(t),
                "resumes": t.resumes,
                **({"turns": t.turns, "forks": t.forks, "stage_s": t.stage_s} if t.turns else {}),
            }
            for t in group.trajectories
        ],
    }


def _sequence(sequence: TokenSequence, scores: TokenScores | None) -> dict[str, Any]:
    """A sequence as JSON; without ``prompt_ids`` its prompt is that of the group.

    A span is [version, start, end, role], and a turn [start, end, past reward]. Only sampled tokens have log-probs.
    """
    prompt = {} if sequence.prompt_ids is None else {"prompt_ids": sequence.prompt_ids.tolist()}
    learner = {}
    if scores is not None:
        learner = {"trainer_logprobs": _rounded(scores.logprobs), "entropies": _rounded(scores.entropies)}
    return prompt | {
        "tokens": sequence.tokens.tolist(),
        "logprobs": sequence.logprobs.tolist(),
        **learner,
        "spans": [[s.version, s.start, s.end, s.role] for s in sequence.spans],
        "turns": [[turn.start, turn.end, turn.past_reward] for turn in sequence.turns],
    }


def _rounded(values: np.ndarray) -> list[float]:
    """Nats with few digits, since samples are large."""
    return [round(value, DECIMALS) for value in values.tolist()]


def _number(value: Any) -> int | float:
    """Convert a NumPy scalar to a Python number."""
    assert isinstance(value, np.generic), f"{value!r} cannot be written as JSON"
    number: int | float = value.item()
    return number
