"""Stuck actors: whose stacks are taken, and when they are killed."""

import asyncio
from dataclasses import dataclass, field

from asyncrl.launcher.common.agent_messages import WarningEvent
from asyncrl.launcher.node import stuck_actors as stuck_module
from asyncrl.launcher.node.stuck_actors import StuckActors
from asyncrl.messages.actors import Stuck


@dataclass
class Process:
    """A child with its names, which notes when it is killed."""

    name: str
    incarnation: int
    pid: int = 1
    ends: list[str] = field(default_factory=list)

    def kill(self):
        self.ends.append(self.name)


async def test_actors_with_equal_incarnations_each_get_a_stack_dump(monkeypatch):
    """The first lives of all actors of a run have the same number."""
    first, second = children = [Process(f"rollouter/{i}", 7) for i in range(2)]
    answers = {child.name: asyncio.get_running_loop().create_future() for child in children}
    monkeypatch.setattr(stuck_module, "take_stacks", lambda child, patience_s: answers[child.name])
    shown = []
    actors = StuckActors("agent/0", "agent-0.log", 5.0, shown.append, asyncio.ensure_future)
    actors.take_stacks_of(
        [Stuck(child.name, 7, "no token for 300 s", 1) for child in children], {c.name: c for c in children}
    )
    for child in children:
        actors.kill(child, "condemned")
    answers[second.name].set_result("process 1: S (sleeping)\nin reward\nin a task")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (first.ends, second.ends) == ([], [second.name])
    answers[first.name].set_result("in wait")
    await actors.wait(5.0)
    await asyncio.sleep(0)
    assert first.ends == [first.name]
    assert shown == [
        *[WarningEvent(text="watchdog: no token for 300 s")] * 2,
        WarningEvent(text="stacks of rollouter/1: process 1: S (sleeping) (2 more lines in agent-0.log)"),
        WarningEvent(text="stacks of rollouter/0: in wait (log: agent-0.log)"),
    ]
