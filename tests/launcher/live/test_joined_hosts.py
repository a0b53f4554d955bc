"""Hosts that have joined end with the run, or by Ctrl-C at their launcher."""

import asyncio
import io
import signal
from types import SimpleNamespace

import pytest
from run_settings import simulated_run
from virtual import run_virtual

from asyncrl.core.errors import DeadlineExceeded, UsageError
from asyncrl.launcher.agent_handle import AgentHandle
from asyncrl.launcher.common.agent_messages import KILL, STOP, EndedEvent
from asyncrl.launcher.live import joined_hosts
from asyncrl.launcher.live.joined_hosts import JoinedHosts
from asyncrl.launcher.terminal.progress import TerminalProgress
from asyncrl.messages.hosts import MemberHost, Members

RUN = SimpleNamespace(config=simulated_run(supervision={"drain_s": 5.0}), folder=SimpleNamespace(logs=None))


@pytest.fixture(autouse=True)
def members_by_the_controller(monkeypatch):
    monkeypatch.setattr(joined_hosts, "members_of", lambda run, controller: controller.members())


class Member:
    """An agent that heeds no command, and is lost once its connection is cut."""

    host, ended, lost, loss_words = "c", None, True, "lost"

    def __init__(self, index):
        self.index, self.over, self.sent = index, False, []
        self.send, self.gone = self.sent.append, asyncio.Event()
        self.look = lambda *_: None

    def cut(self):
        self.sent.append("killed")
        self.gone.set()

    async def hear(self, *_):
        await self.gone.wait()
        self.over = True


def joined(members, controller):
    hosts = JoinedHosts(RUN, [], None, TerminalProgress(io.StringIO(), 1, io.StringIO()), members)
    hosts.controller = controller
    return hosts


class Asked:
    """A controller that never says who the members are. ``asked`` is set by the first request, which ends as given."""

    def __init__(self, answer="never"):
        self.asked, self.answer = asyncio.Event(), answer

    async def members(self):
        await asyncio.Event().wait()
        yield

    async def ask(self, request, timeout=None):
        self.asked.set()
        if self.answer == "never":
            await asyncio.Event().wait()
        if self.answer:
            raise self.answer


AWAY = DeadlineExceeded("launcher/0", "controller/0", "Leave", 10.0)
LAST = UsageError("c cannot leave: no other host has a rollouter that serves")


@pytest.mark.parametrize(
    ("answer", "second"),
    [("never", True), (LAST, True), (AWAY, False), (None, False)],
    ids=["mute", "last", "away", "ok"],
)
def test_a_host_that_may_not_leave_runs_until_the_second_signal_and_others_end_in_time(answer, second):
    """I5: the first signal asks the controller, be it away or not; a host may be the last that the run has."""
    members = [Member(2), Member(3)]

    async def work():
        followed = joined(members, Asked(answer))
        ending = asyncio.create_task(followed.follow())
        followed.interrupts.note(signal.SIGINT)
        if second:
            # The controller that does not answer is waited for no longer than the second one takes.
            await asyncio.wait({ending}, timeout=600.0 if answer is LAST else 0.01)
            assert not ending.done() and [one.sent for one in members] == [[], []]
            followed.interrupts.note(signal.SIGINT)
        await ending

    run_virtual(work())
    assert [one.sent for one in members] == [[KILL, "killed"], [KILL, "killed"]]


def test_hosts_that_end_before_the_controller_has_answered_leave_no_call_behind():
    async def work():
        member, controller = Member(2), Asked()
        followed = joined([member], controller)
        ending = asyncio.create_task(followed.follow())
        followed.interrupts.note(signal.SIGINT)
        await controller.asked.wait()
        member.gone.set()
        await ending
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(work())


def test_an_error_during_a_call_of_the_controller_is_raised():
    async def work():
        followed = joined([Member(2)], Asked(OSError(5, "no room")))
        followed.interrupts.note(signal.SIGINT)
        with pytest.raises(ExceptionGroup) as caught:
            await followed.follow()
        assert caught.group_contains(OSError, match="no room")

    run_virtual(work())


def test_i5_hosts_that_missed_the_end_of_the_run_are_ended():
    """I5: as when everything on its head was killed."""
    deaf = Member(2)

    class Controller:
        async def members(self):
            for number in (1, 2):
                yield Members(number=number)

    run_virtual(joined([deaf], Controller()).follow())
    assert deaf.sent == [STOP, KILL, "killed"]


@pytest.mark.parametrize("reason", ["", "no answer for 12 s"])
def test_a_host_that_leaves_before_it_has_served_has_joined_in_vain(reason):
    left = Member(2)
    left.ended, left.lost = EndedEvent(result="left", reason=reason), False
    left.gone.set()
    followed = joined([left], Asked())
    followed.progress = TerminalProgress(io.StringIO(), 1, reported := io.StringIO())
    assert run_virtual(followed.follow()) == 1
    assert reported.getvalue() == f"c has left the run without having served{': ' * bool(reason)}{reason}\n"


def test_a_host_that_leaves_after_one_of_its_rollouters_has_served_has_left():
    left = Member(2)
    actors = ["rollouter/2", "rollouter/3"]

    class Controller:
        async def members(self):
            for number in (1, 2):
                there = MemberHost(agent="agent/2", host="c", actors=actors, stage="serving", served=True)
                yield Members(number=number, hosts=[there])
            left.ended, left.lost = EndedEvent(result="left"), False
            left.gone.set()
            await asyncio.Event().wait()

    followed = joined([left], Controller())
    followed.progress = TerminalProgress(reported := io.StringIO(), 1, io.StringIO())
    assert run_virtual(followed.follow()) == 0
    assert reported.getvalue().splitlines() == [
        "c serves from now on (it has rollouter/2, rollouter/3)",
        "c has left the run",
    ]


def test_an_error_of_the_watch_of_a_run_is_raised():
    class Controller:
        async def members(self):
            raise OSError(5, "the run's folder cannot be read")
            yield

    async def never():
        await asyncio.Event().wait()

    contact = SimpleNamespace(name="c", process=SimpleNamespace(stdout=SimpleNamespace(readline=never)))
    with pytest.raises(OSError, match="cannot be read"):
        run_virtual(joined([AgentHandle(2, contact)], Controller()).follow())
