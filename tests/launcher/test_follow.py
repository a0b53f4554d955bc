"""The follower of a run's agents: what it tells the head where another host's agent fails, and whose word counts."""

import asyncio
import signal
from types import SimpleNamespace

import pytest
from run_settings import simulated_run

from asyncrl.launcher import follow
from asyncrl.launcher.follow import Follower
from asyncrl.launcher.run_folder.folders import RunFolder
from asyncrl.launcher.terms.spec import STOP, EndedEvent, HostEnded


class Member:
    """An agent that ends as said, once ``after`` have, or whose connection is lost then; what it is sent is kept."""

    lost, contact, host = False, None, "b"

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


class Connection:
    """One to a host on which nothing is left, whenever it is made."""

    last_error = start = None

    def __init__(self, *_):
        self.hang_up = self.kill = lambda: None

    async def reach(self):
        pass

    close = reach

    def is_lost(self, code):
        return code == 255

    async def ask(self, order, kind):
        return HostEnded(living=False, killed=False)


class Cut(Member):
    """The head, whose end is not heard because its connection is lost."""

    lost, contact, host, index, name, loss_words = True, Connection(), "a", 0, "agent/0 on a", "a: it is lost"
    over, exit_code = False, None

    async def hear(self, _logs, _progress, on_event):
        for other in self._after:
            await other.has_ended.wait()
        self.over, self.exit_code = True, 255


async def test_a_host_that_has_left_does_not_tell_how_the_run_ended(tmp_path, monkeypatch):
    """I7: its connection lost, the head alone could, and it is looked at until nothing is left there."""
    monkeypatch.setattr(follow, "Contact", Connection)
    left = Member(EndedEvent(result="left", reason="no answer for 12 s"))
    head = Cut(EndedEvent(result="done"), [left])
    warned = []
    shown = SimpleNamespace(show=lambda *_: None, say=lambda *_: None, warn=lambda lines: warned.extend(lines))
    follower = Follower(simulated_run(), RunFolder(path=tmp_path, run_id="r"), [head, left], shown, phase="running")
    left.contact = SimpleNamespace(is_lost=lambda _: False, hang_up=lambda: None)
    left.exit_code = 0
    async with asyncio.timeout(20):
        ended = await follower.main()
    assert warned[0] == "b has left the run without having taken part: no answer for 12 s"
    assert (ended.result, ended.actor) == ("failed", "agent/0 on a")
    assert ended.reason.startswith("its connection was lost; how the run ended is told by")


class Reached(Connection):
    """One to the lost head, where the run lives until it is told to make way, or is killed; orders are kept."""

    orders: list = []
    living = True

    async def ask(self, order, kind):
        self.orders.append(order)
        await asyncio.sleep(0.01)
        Reached.living = self.living and not (order.make_way or order.kill)
        return HostEnded(living=self.living, killed=order.kill and self.living)


async def test_a_lost_head_is_told_to_make_way_over_another_connection(tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "Contact", Reached)
    said = []
    shown = SimpleNamespace(show=lambda *_: None, say=said.append, warn=lambda lines: None)
    follower = Follower(
        simulated_run(), RunFolder(path=tmp_path, run_id="r"), [Cut(EndedEvent(result="done"))], shown, phase="running"
    )
    follower.has_run = True
    following = asyncio.create_task(follower.main())
    while len(Reached.orders) < 3:
        await asyncio.sleep(0.01)
    assert not any(order.make_way or order.kill for order in Reached.orders)
    follower.interrupts.note(signal.SIGINT)
    async with asyncio.timeout(20):
        ended = await following
    assert "a: is told to make way" in said and ended.reason.startswith("its connection was lost")
    # The run had its time: what is left is looked for once it has ended.
    (told,) = [at for at, order in enumerate(Reached.orders) if order.make_way]
    assert not any(order.kill for order in Reached.orders[: told + 1])
    assert said[-1] == "a: nothing is left there"
