"""How hosts that have joined end: with the run, or by Ctrl-C at their launcher."""

import asyncio
import io
import signal
from types import SimpleNamespace

import pytest

from asyncrl.errors import DeadlineExceeded, UsageError
from asyncrl.launcher import agent_handle as member_module
from asyncrl.launcher.agent_handle import AgentHandle
from asyncrl.launcher.live import joined_hosts as guests_module
from asyncrl.launcher.live.joined_hosts import Guests
from asyncrl.launcher.terminal.progress import Progress
from asyncrl.launcher.terms.spec import KILL, STOP
from asyncrl.messages.hosts import Members

SOON_S = 0.05
RUN = SimpleNamespace(
    config=SimpleNamespace(supervision=SimpleNamespace(drain_s=SOON_S)), folder=SimpleNamespace(logs=None)
)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    for module in (guests_module, member_module):
        monkeypatch.setattr(module, "SLACK_S", SOON_S)


def interrupt(answer, scenario):
    """``scenario`` gets what follows after one Ctrl-C, with what each host was sent."""
    members = [SimpleNamespace(index=at, over=False, contact=None, sent=[]) for at in (2, 3)]
    for member in members:
        member.send = member.sent.append

    class Controller:
        async def ask(self, request, timeout=None):
            await answer()

    async def main():
        async with asyncio.timeout(20):
            followed = Guests(RUN, members, Controller(), Progress(io.StringIO(), 1, io.StringIO()))
            ending = asyncio.create_task(followed._end_when_asked())
            followed.interrupts.note(signal.SIGINT)
            await scenario(followed, ending, members)
            await ending
        assert [member.sent for member in members] == [[KILL], [KILL]]

    asyncio.run(main())


def test_hosts_that_have_not_heard_of_the_end_of_the_run_are_ended():
    """I5: as when everything on its head was killed."""
    member = SimpleNamespace(index=2, over=False, contact=SimpleNamespace(), sent=[])
    member.send = member.sent.append
    member.contact.kill = lambda: member.sent.append("killed")

    class Controller:
        async def members(self):
            for number in (1, 2):
                yield Members(number=number)

    async def main():
        async with asyncio.timeout(20):
            await Guests(RUN, [member], Controller(), Progress(io.StringIO(), 1, io.StringIO()))._watch_members()

    asyncio.run(main())
    assert member.sent == [STOP, KILL, "killed"]


def test_what_fails_while_the_run_is_watched_is_not_passed_over():
    class Controller:
        async def members(self):
            raise OSError(5, "the run's folder cannot be read")
            yield

    async def never():
        await asyncio.Event().wait()

    process = SimpleNamespace(stdout=SimpleNamespace(readline=never))
    member = AgentHandle(2, "c", process, SimpleNamespace())

    async def main():
        async with asyncio.timeout(20):
            await Guests(RUN, [member], Controller(), Progress(io.StringIO(), 1, io.StringIO())).main()

    with pytest.raises(OSError, match="cannot be read"):
        asyncio.run(main())


def test_a_second_one_ends_them_at_once_though_the_controller_does_not_answer():
    async def never():
        await asyncio.Event().wait()

    async def scenario(followed, ending, members):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        followed.interrupts.note(signal.SIGINT)

    interrupt(never, scenario)


def test_a_host_that_cannot_leave_goes_on_until_the_second_one():
    """It may be the last that the run has."""

    async def refuse():
        raise UsageError("c cannot leave: no other host has a rollouter that serves")

    async def scenario(followed, ending, members):
        await asyncio.sleep(10 * SOON_S)
        assert [member.sent for member in members] == [[], []]
        assert not ending.done()
        followed.interrupts.note(signal.SIGINT)

    interrupt(refuse, scenario)


@pytest.mark.parametrize("away", [True, False])
def test_who_does_not_end_in_time_is_ended(away):
    """I5: be the controller away or not."""

    async def answer():
        if away:
            raise DeadlineExceeded("launcher/0", "controller/0", "Leave", 10.0)

    async def scenario(followed, ending, members):
        pass

    interrupt(answer, scenario)
