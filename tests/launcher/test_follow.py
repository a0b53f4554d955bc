"""The follower of a run's agents: what it tells the head where another host's agent fails."""

import asyncio

import pytest

from asyncrl.launcher.follow import Follower
from asyncrl.launcher.run_folder.folders import RunFolder
from asyncrl.launcher.terms.spec import STOP, EndedEvent


class Member:
    """An agent that ends as said, once ``after`` have; what it is sent is kept."""

    lost, contact = False, None

    def __init__(self, ended, after=()):
        self._ends, self._after = ended, after
        self.ended, self.sent, self.has_ended = None, [], asyncio.Event()
        self.process = self
        self.returncode = ended.exit_code
        self.send = self.sent.append

    @property
    def over(self):
        return self.ended is not None

    async def hear(self, _logs, _progress, on_event):
        for other in self._after:
            await other.has_ended.wait()
        on_event(self._ends)
        self.ended = self._ends
        self.has_ended.set()


@pytest.mark.parametrize(
    ("phase", "interrupted", "told"),
    [
        ("starting", False, [STOP]),
        ("running", False, [STOP]),
        # The head has heard the user's wish, though it has not said so yet.
        ("running", True, []),
        ("preempting", False, []),
        ("draining", False, []),
    ],
)
async def test_agents_that_fail_end_the_run_in_good_order_and_never_hurry_it(tmp_path, phase, interrupted, told):
    """To the head's agent a second word is the user's wish for the end at once, without the checkpoint."""
    first = Member(EndedEvent(result="failed", actor="agent/1", reason="died", exit_code=0))
    second = Member(EndedEvent(result="failed", actor="agent/2", reason="died", exit_code=0), [first])
    head = Member(EndedEvent(result="stopped", reason="stopped by the launcher", exit_code=0), [first, second])
    shown = type("Shown", (), {"show": lambda *_: None})()
    follower = Follower(None, RunFolder(path=tmp_path, run_id="r"), [head, first, second], shown, phase=phase)
    follower.interrupts.signal = 15 if interrupted else 0
    async with asyncio.timeout(20):
        ended = await follower.main()
    assert head.sent == told
    assert (ended.result, ended.actor, ended.exit_code) == ("failed", "agent/1", 1)
