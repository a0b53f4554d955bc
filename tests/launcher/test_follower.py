"""The follower of a run's agents: what it sends the head if another host's agent fails, and which report counts."""

import asyncio
import signal
from types import SimpleNamespace

import msgspec
import pytest
from run_settings import simulated_run

from asyncrl.core.errors import HostFailed
from asyncrl.launcher import follower as following_module
from asyncrl.launcher.common.agent_messages import STOP, EndedEvent, HostEnded
from asyncrl.launcher.follower import Follower
from asyncrl.launcher.run_folder.ended import write_ended
from asyncrl.launcher.run_folder.folders import RunFolder


class Member:
    """An agent that ends as said, once ``after`` have, or whose connection is lost then; what it is sent is kept."""

    lost, is_here, host = False, True, "b"
    look = staticmethod(lambda *_: None)

    def __init__(self, ended, after=()):
        self._ends, self._after = ended, after
        self.ended, self.sent, self.has_ended = None, [], asyncio.Event()
        # On this host.
        self.contact = self.process = self
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


class Following:
    """The follower of these agents, and the lines that it shows: those that it ``said``, and those it ``warned`` of."""

    def __init__(self, tmp_path, *members, phase="running"):
        self.said, self.warned = [], []
        progress = SimpleNamespace(show=lambda *_: None, say=self.said.append, warn=self.warned.extend)
        self.follower = Follower(simulated_run(), RunFolder(path=tmp_path, run_id="r"), members, progress, phase=phase)

    async def end(self):
        """How the run ended."""
        async with asyncio.timeout(20):
            return await self.follower.main()


@pytest.mark.parametrize(
    ("phase", "interrupted", "reported"),
    [
        ("starting", False, [STOP]),
        ("running", False, [STOP]),
        # The head has heard the user's wish, though it has not said so yet.
        ("running", True, []),
        ("preempting", False, []),
        ("draining", False, []),
    ],
)
async def test_failing_agents_end_the_run_in_order_and_never_kill_it(tmp_path, phase, interrupted, reported):
    """To the head's agent a second word is the user's wish for the end at once, without the checkpoint."""
    first = Member(EndedEvent(result="failed", actor="agent/1", reason="died", exit_code=0))
    second = Member(EndedEvent(result="failed", actor="agent/2", reason="died", exit_code=0), [first])
    head = Member(EndedEvent(result="stopped", reason="stopped by the launcher", exit_code=0), [first, second])
    following = Following(tmp_path, head, first, second, phase=phase)
    following.follower.interrupts.signal = 15 if interrupted else 0
    ended = await following.end()
    assert head.sent == reported
    assert (ended.result, ended.actor, ended.exit_code) == ("failed", "agent/1", 1)


class Unread(Member):
    """An agent whose process ends with this code, and whose last event was not read."""

    log, name, over = "agent-0.log", "agent/0", False

    def __init__(self, exit_code):
        super().__init__(EndedEvent(result="done", exit_code=exit_code))
        self.exit_code, self.exit_words = exit_code, f"exit code {exit_code}"

    async def hear(self, _logs, _progress, _on_event):
        self.over = True


FAILED = EndedEvent(result="failed", actor="learner/0", reason="no room", exit_code=1)


@pytest.mark.parametrize(
    ("exit_code", "record", "result", "code"),
    [
        (0, EndedEvent(result="done"), "done", 0),
        (75, EndedEvent(result="preempted", exit_code=75), "preempted", 75),
        (1, FAILED, "failed", 1),
        (143, EndedEvent(result="stopped", reason="stopped", exit_code=143), "stopped", 143),
        # The disk was full, so that there is no record.
        (0, None, "done", 0),
        (75, None, "preempted", 75),
        (137, None, "failed", 1),
    ],
)
async def test_the_exit_code_comes_from_the_record_if_the_last_event_was_not_read(
    tmp_path, exit_code, record, result, code
):
    """The launcher was stopped, or its output was not read, while the run ended."""
    following = Following(tmp_path, Unread(exit_code), Unread(0))
    logs = following.follower.folder.logs
    write_ended(tmp_path, str(logs.with_name("attempt_0")), FAILED)
    if record is not None:
        write_ended(tmp_path, str(logs), record)
    ended = await following.end()
    assert (ended.result, ended.exit_code) == (result, code)
    assert ended.actor == ("" if code != 1 else "agent/0" if record is None else "learner/0")


async def test_a_remote_head_is_asked_for_the_record(tmp_path, monkeypatch):
    """Its connection was lost, or did not bring the last event."""
    monkeypatch.setattr(following_module, "Contact", Recorded)
    unread = Unread(1)
    unread.contact, unread.index = Recorded(), 0
    for head in (Cut(EndedEvent(result="done")), unread):
        assert await Following(tmp_path, head).end() == FAILED


class Connection:
    """One to a host on which nothing is left, whenever it is made."""

    is_here = False
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


class Recorded(Connection):
    """One to the head, which has a record of how the run ended."""

    async def ask(self, order, kind):
        assert order.log_dir.endswith("attempt_1")
        return HostEnded(living=False, killed=False, ended=FAILED)


class Cut(Member):
    """The head, whose end is not heard because its connection is lost."""

    lost, host, index, name, loss_words = True, "a", 0, "agent/0 on a", "a: it is lost"
    over, exit_code = False, None

    def __init__(self, ended, after=()):
        super().__init__(ended, after)
        self.contact = Connection()

    async def hear(self, _logs, _progress, on_event):
        for other in self._after:
            await other.has_ended.wait()
        self.over, self.exit_code = True, 255


async def test_a_host_that_has_left_does_not_report_the_end_of_the_run(tmp_path, monkeypatch):
    """I7: its connection lost, the head alone could, and it is looked at until nothing is left there."""
    monkeypatch.setattr(following_module, "Contact", Connection)
    left = Member(EndedEvent(result="left", reason="no answer for 12 s"))
    head = Cut(EndedEvent(result="done"), [left])
    following = Following(tmp_path, head, left)
    left.contact = SimpleNamespace(is_here=False, is_lost=lambda _: False, hang_up=lambda: None)
    left.exit_code = 0
    ended = await following.end()
    assert following.warned[0] == "b has left the run without having taken part: no answer for 12 s"
    assert (ended.result, ended.actor) == ("failed", "agent/0 on a")
    assert ended.reason.startswith("its connection was lost; its end is recorded in")


class Looked(Connection):
    """One to the lost head. The first fails at its third order, and during the second the run ends."""

    made: list = []

    def __init__(self, *_):
        super().__init__()
        self.orders = []
        self.made.append(self)
        assert len(self.made) < 9

    async def ask(self, order, kind):
        self.orders.append(order)
        if self is self.made[0] and len(self.orders) == 3:
            raise HostFailed("a", "connection lost")
        is_over = self is not self.made[0] and len(self.orders) > 1
        return HostEnded(living=not is_over, killed=False, ended=FAILED if is_over else None)


async def test_a_lost_head_is_checked_over_one_connection_until_it_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(following_module, "Contact", Looked)
    monkeypatch.setattr(following_module, "LOOK_AGAIN_S", 0.01)
    assert await Following(tmp_path, Cut(EndedEvent(result="done"))).end() == FAILED
    # The last one makes sure that nothing is left there.
    assert [len(connection.orders) for connection in Looked.made] == [3, 2, 1]


class Garbled(Connection):
    """One to a host that writes something else than an answer; says which of these connections were killed."""

    killed: list = []

    def __init__(self, *_):
        super().__init__()
        self.kill = lambda: self.killed.append(self)

    async def ask(self, order, kind):
        return msgspec.json.decode(b"1", type=kind)


async def test_an_answer_that_cannot_be_read_is_no_answer_and_the_run_still_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(following_module, "LOOK_AGAIN_S", 0.01)
    Garbled.made = [Garbled, Recorded]
    monkeypatch.setattr(following_module, "Contact", lambda *_: Garbled.made.pop(0)() if Garbled.made else Garbled())
    following = Following(tmp_path, Cut(EndedEvent(result="done")))
    # The second connection brings the record; the third, at the end, is garbled too.
    assert await following.end() == FAILED
    assert len(Garbled.killed) == 2
    assert "a: cannot be asked whether anything is left there (Expected `object`, got `int`)" in following.warned[-1]


class Reached(Connection):
    """One to the lost head, where the run lives until it is asked to preempt, or is killed; orders are kept."""

    orders: list = []
    living = True

    async def ask(self, order, kind):
        self.orders.append(order)
        await asyncio.sleep(0.01)
        Reached.living = self.living and not (order.preempt or order.kill)
        return HostEnded(living=self.living, killed=order.kill and self.living)


async def test_a_lost_head_is_asked_to_preempt_the_run_over_another_connection(tmp_path, monkeypatch):
    monkeypatch.setattr(following_module, "Contact", Reached)
    following = Following(tmp_path, Cut(EndedEvent(result="done")))
    following.follower.has_run = True
    ending = asyncio.create_task(following.end())
    while len(Reached.orders) < 3:
        await asyncio.sleep(0.01)
    assert not any(order.preempt or order.kill for order in Reached.orders)
    following.follower.interrupts.note(signal.SIGINT)
    ended = await ending
    assert "a: is asked to preempt the run" in following.said and ended.reason.startswith("its connection was lost")
    # The run had its time: what is left is looked for once it has ended.
    (reported,) = [at for at, order in enumerate(Reached.orders) if order.preempt]
    assert not any(order.kill for order in Reached.orders[: reported + 1])
    assert following.said[-1] == "a: nothing is left there"
