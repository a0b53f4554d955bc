"""A run whose teacher is a server, with the divergence from a reference in its rewards."""

import asyncio

import pytest
from parity import configuration, run_live
from run_files import metrics
from teacher_server import scored, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 3


async def test_a_server_scores_each_trained_response(parity_folder):
    async with served(scored) as server:
        settings = {"steps": STEPS, "loss": "distill", "teacher": server.url, "teacher_server": {"tries": 2}}
        kl = {"coefficient": 0.01, "place": "reward", "path": str(parity_folder / "model")}
        tree = configuration(parity_folder, learner=settings | {"kl": kl})
        run_dir = await asyncio.to_thread(run_live, parity_folder, tree, "taught")
    steps = metrics(run_dir, "train")
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert all(line["loss/teacher_kl"] > 0 for line in steps)
    # The reference is the initial model: in the first step the two differ only by rounding.
    assert abs(steps[0]["policy/reference_kl"]) < 1e-4
    assert all("reward/kl_penalty" in line for line in steps)
    # One request of the check before the start, and one for each response of a group with a signal.
    assert len(server.bodies) >= 1 + 3 * 3 * STEPS
