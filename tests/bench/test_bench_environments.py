"""Environments of the other frameworks: built once, and rebuilt when they do not match. And the batch for TRL."""

import json
import shutil
import subprocess
import zipfile

import numpy as np
import pytest

from tools.bench import learner_batch, processes

WHEEL = "peer-1.0-py3-none-any.whl"


@pytest.fixture
def requirements(tmp_path):
    """A package of one module, from a file: no package index is asked."""
    wheel = tmp_path / WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("peer.py", "ANSWER = 42\n")
        archive.writestr("peer-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: peer\nVersion: 1.0\n")
        archive.writestr("peer-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("peer-1.0.dist-info/RECORD", "")
    return ["--no-index", str(wheel)]


@pytest.mark.slow
def test_an_environment_is_built_once_and_rebuilt_when_it_is_incomplete(requirements, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(processes, "FOLDER", tmp_path / "made")
    python = processes.environment("peer", requirements)
    reported = subprocess.run([python, "-I", "-c", "import peer; print(peer.ANSWER)"], capture_output=True, check=True)
    assert reported.stdout.strip() == b"42"
    witness = python.parent.parent / "witness"
    witness.touch()
    assert processes.environment("peer", requirements) == python and witness.exists()
    # Building one takes ten seconds: from here on it is a copy of the first.
    shutil.copytree(python.parent.parent, tmp_path / "kept", symlinks=True, ignore=lambda *_: ["witness", ".complete"])
    monkeypatch.setattr(
        processes.venv, "create", lambda at, with_pip: shutil.copytree(tmp_path / "kept", at, symlinks=True)
    )
    (python.parent.parent / ".complete").unlink()
    processes.environment("peer", requirements)
    assert not witness.exists() and python.exists()
    with pytest.raises(subprocess.CalledProcessError):
        processes.environment("peer", ["--no-index", str(tmp_path / "absent.whl")])
    assert not (python.parent.parent / ".complete").exists()
    assert "made/peer" in capfd.readouterr().err


def test_trl_trains_the_same_batch_as_the_others(tmp_path):
    arguments = learner_batch.write_padded(0.9, tmp_path, tmp_path / "model", lora=False)
    assert arguments[1:3] == [str(tmp_path / "model"), str(tmp_path)]
    assert json.loads(arguments[4])["threads"] == learner_batch.THREADS
    groups = learner_batch.make_groups(0.9)
    with np.load(tmp_path / "0.9.npz") as batch:
        rows = [(group, trajectory) for group in groups for trajectory in group.trajectories]
        assert batch["num_items_in_batch"] == learner_batch.lengths(0.9).sum()
        for at, (group, trajectory) in enumerate(rows):
            (sequence,) = trajectory.sequences
            held = batch["completion_mask"][at].astype(bool)
            np.testing.assert_array_equal(batch["completion_ids"][at][held], sequence.tokens)
            np.testing.assert_array_equal(batch["old_per_token_logps"][at][held], sequence.logprobs)
            np.testing.assert_array_equal(batch["prompt_ids"][at], group.lease.prompt_ids)
        best = max(range(len(rows)), key=lambda at: batch["advantages"][at])
        assert rows[best][1].reward == max(each.reward for each in rows[best][0].trajectories), (
            "an advantage that is not its trajectory's"
        )
