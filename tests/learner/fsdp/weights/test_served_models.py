"""Each family from the learner to vLLM: what the learner publishes is served with the log-probs that the model of the
learner gives, prompts and sampled tokens alike, and again after an update.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from learner.learner_cases import make_config
from learner.rank_pool import run_alone
from model_matrix import EXPERTS, HALF, HYBRIDS, VOCABULARY, WINDOW, make_family, plain_logprobs, save_family
from serving import Job, Served

ROOT = Path(__file__).parents[4]
SERVE_S = 600.0
TOLERANCE = 1e-4
SEEDS = (1, 2)
"""Seeds of the weights of two versions."""
MAX_TOKENS = 2 * WINDOW
"""Sampled from each prompt: some begin within the window and end past it."""
SERVED = [("Gemma2", True), *((family, tied) for family, tied in HALF if family not in (*EXPERTS, *HYBRIDS, "Gemma2"))]


def _publish(backend: Any, config: Any, kept: ExitStack) -> str:
    """The manifest as the engine's worker gets it; its memory stays until ``kept`` ends."""
    publication = kept.enter_context(backend.publish(0).result())
    return msgspec.json.encode(publication.manifest).decode()


def make_jobs(folders: Iterable[Path], manifests: Iterable[list[str]], **fields: Any) -> list[Job]:
    """A job for each model, all with the same questions."""
    random = np.random.default_rng(5)

    def sequences(*lengths: int) -> list[list[int]]:
        return [random.integers(0, VOCABULARY, length).tolist() for length in lengths]

    return [
        Job(
            folder=str(folder),
            manifests=versions,
            scored=sequences(2, 3 * WINDOW),
            prompts=sequences(5, 2 * WINDOW),
            max_tokens=MAX_TOKENS,
            **fields,
        )
        for folder, versions in zip(folders, manifests, strict=True)
    ]


def serve(jobs: Sequence[Job], tmp_path: Path) -> list[Served]:
    """Answers of vLLM to each."""
    answers = tmp_path / "answers"
    done = subprocess.run(
        [sys.executable, "tests/serving.py", str(answers)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        input=b"".join(msgspec.json.encode(job) + b"\n" for job in jobs),
        capture_output=True,
        timeout=SERVE_S,
        check=False,
    )
    assert not done.returncode, done.stderr.decode()[-4000:]
    return [msgspec.json.decode(line, type=Served) for line in answers.read_bytes().splitlines()]


def worst(folder: Path, sequences: Sequence[Sequence[int]], found: Sequence[Sequence[float]]) -> float:
    """The largest distance of ``found``, which is of the last tokens of each sequence, from the folder's model."""
    pairs = zip(found, plain_logprobs(folder, sequences), strict=True)
    return max(float(np.abs(np.array(each) - expected[-len(each) :]).max()) for each, expected in pairs)


def differences(models: dict[str, list[Path]], tmp_path: Path) -> dict[str, Any]:
    """By model: (scored, sampled) log-probs of each of its versions in nats, or the reason why there is no pair."""
    with ExitStack() as kept:
        manifests = [
            [run_alone(make_config(version), _publish, kept) for version in versions] for versions in models.values()
        ]
        jobs = make_jobs([versions[0] for versions in models.values()], manifests)
        return compare(models, jobs, serve(jobs, tmp_path))


def compare(models: dict[str, list[Path]], jobs: Sequence[Job], answers: Sequence[Served]) -> dict[str, Any]:
    """As ``differences``; the folders of a model hold what its versions should give."""
    found: dict[str, Any] = {}
    for (name, versions), job, served in zip(models.items(), jobs, answers, strict=True):
        found[name] = served.problem
        if served.versions:
            found[name] = [
                (
                    worst(folder, job.scored, version.scores),
                    worst(folder, [a + b for a, b in zip(job.prompts, version.tokens, strict=True)], version.logprobs),
                )
                for folder, version in zip(versions, served.versions, strict=True)
            ]
    print(found)
    return found


def made(models: Sequence[tuple[str, bool]], tmp_path: Path) -> dict[str, list[Path]]:
    """Folders of two versions of each model."""
    return {
        f"{family} {'tied' if tied else 'untied'}": [
            save_family(tmp_path / f"{family}-{tied}-{seed}", make_family(family, tied=tied, seed=seed))
            for seed in SEEDS
        ]
        for family, tied in models
    }


def wrong(found: dict[str, Any]) -> dict[str, Any]:
    return {
        name: reported
        for name, reported in found.items()
        if isinstance(reported, str) or not all(each < TOLERANCE for version in reported for each in version)
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_vllm_serves_exactly_the_published_weights(tmp_path: Path) -> None:
    assert not wrong(differences(made(SERVED, tmp_path), tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    "ASYNCRL_CHAT_MODEL" not in os.environ,
    reason="ASYNCRL_CHAT_MODEL does not name the folder of SmolLM2-135M-Instruct (make chat-model)",
)
def test_a_real_model_is_served(tmp_path: Path) -> None:
    assert not wrong(differences({"SmolLM2": [Path(os.environ["ASYNCRL_CHAT_MODEL"])]}, tmp_path))
