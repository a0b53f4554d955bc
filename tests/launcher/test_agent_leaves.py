"""What the agent of a host that does not share the run folder leaves there."""

import asyncio

import pytest

from asyncrl.config import validate_config
from asyncrl.launcher.agent import Agent
from asyncrl.launcher.folders import PART
from asyncrl.launcher.spec import ARRIVED, AgentSpec

CONFIG = validate_config({"data": {"source": "synthetic"}, "rollout": {"engine": "sim"}, "learner": {"backend": "sim"}})


@pytest.mark.parametrize(("others", "left"), [(["private-1"], []), (["private-3"], ["config.json", "logs", PART])])
def test_the_part_of_a_host_that_has_joined_again_meanwhile_stays(tmp_path, others, left):
    run_dir = tmp_path / "run"
    for name in ("private-2", "logs", *others):
        (run_dir / name).mkdir(parents=True)
    for name in (PART, "config.json"):
        (run_dir / name).write_text("")
    spec = AgentSpec(run_dir=str(run_dir), log_dir=str(run_dir / "logs"), attempts=1, actors=[], index=2)

    async def main():
        commands = asyncio.StreamReader()
        commands.feed_data(ARRIVED)
        commands.feed_eof()
        await Agent(spec, CONFIG, None).leave(commands)

    asyncio.run(main())
    assert sorted(path.name for path in run_dir.iterdir()) == sorted(["private-2", *others, *left])
