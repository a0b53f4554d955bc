"""A run whose teacher is a server, with the divergence from a reference in its rewards; and one whose server dies."""

import asyncio
import json
import threading

import pytest
from teacher_server import scored, served
from test_parity import configuration
from test_parity import folder as parity_folder  # noqa: F401

from tools.live_run import LiveRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 3


class Beside:
    """A teacher's server on a thread of its own, until the block ends."""

    def __init__(self, *script):
        self._script = script
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    async def _serve(self):
        self._end = asyncio.Event()
        async with served(*self._script) as self.server:
            self._started.set()
            await self._end.wait()

    def __enter__(self):
        self._thread.start()
        assert self._started.wait(30)
        return self.server

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(30)
        self._loop.close()


def run(folder, tree, where):
    where.mkdir()
    live = LiveRun(tree, where, env={"PYTHONPATH": str(folder)})
    try:
        code = live.wait(250)
        assert live.left() == []
        return code, live.output, live.run_dir
    finally:
        live.close()


def distilling(folder, server):
    settings = {"steps": STEPS, "loss": "distill", "teacher": server.url, "teacher_server": {"tries": 2}}
    kl = {"coefficient": 0.01, "place": "reward", "path": str(folder / "model")}
    return configuration(folder, learner=settings | {"kl": kl})


def test_a_server_scores_each_response_that_is_trained(parity_folder, tmp_path):  # noqa: F811
    with Beside(scored) as server:
        code, output, run_dir = run(parity_folder, distilling(parity_folder, server), tmp_path / "run")
    assert code == 0, output
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert all(line["loss/teacher_kl"] > 0 for line in steps)
    # The reference is what the run began with: in the first step it differs by rounding alone.
    assert abs(steps[0]["policy/reference_kl"]) < 1e-4
    assert all("reward/kl_penalty" in line for line in steps)
    # One request of the check before the start, and one for each response of a group with a signal.
    assert len(server.bodies) >= 1 + 3 * 3 * STEPS


def test_a_server_that_refuses_for_good_ends_the_run_and_is_named(parity_folder, tmp_path):  # noqa: F811
    with Beside(scored, scored, 404) as server:
        code, output, _ = run(parity_folder, distilling(parity_folder, server), tmp_path / "run")
    assert code == 1
    assert f"learner/0: learner.teacher: {server.url}/completions answers with status 404" in output
