"""The signals that a launcher handles, and those that end its wait at once."""

import asyncio
import os
import signal
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR2
from types import SimpleNamespace

import pytest
from launcher.launched import config_tree
from virtual import run_virtual

from asyncrl.config.load import validate_config
from asyncrl.launcher import launch as launch_module
from asyncrl.launcher.common.placement import PlacementHost
from asyncrl.launcher.common.signals import STOPPING, cause_of, heeded
from asyncrl.launcher.hosts.contact import Contact
from asyncrl.launcher.hosts.hostfile import HostLine
from asyncrl.launcher.terminal.interrupts import Interrupts, undone_by_signals


@pytest.fixture(autouse=True)
def keep_signal_handlers():
    before = {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("numbers", "named", "hurries"),
    [
        ([SIGINT, SIGINT], SIGINT, True),
        ([SIGUSR2, SIGTERM], SIGUSR2, True),
        # A terminal that closes says so more than once: its shell, and the kernel.
        ([SIGHUP, SIGHUP], SIGHUP, False),
        ([SIGINT, SIGHUP, SIGHUP], SIGINT, False),
        # As systemd ends the processes of a user who has left.
        ([SIGHUP, SIGTERM], SIGTERM, False),
        ([SIGTERM, SIGHUP], SIGTERM, False),
        ([SIGHUP, SIGTERM, SIGTERM], SIGTERM, True),
    ],
)
def test_a_second_signal_hurries_unless_a_terminal_closes(numbers, named, hurries):
    async def main():
        interrupts = Interrupts()
        interrupts.note(numbers[0])
        await interrupts.first()
        waiting = asyncio.create_task(interrupts.next(60.0))
        await asyncio.sleep(0)
        for number in numbers[1:]:
            interrupts.note(number)
        await waiting
        return interrupts.signal, asyncio.get_running_loop().time() < 60.0

    assert run_virtual(main()) == (named, hurries)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([SIGINT, SIGINT], "stopped at once at your second Ctrl-C"),
        ([SIGUSR2, SIGTERM], "stopped at once at the second signal, SIGTERM"),
        ([SIGINT, SIGTERM, SIGINT], "stopped at once at the second signal, SIGTERM"),
        ([SIGHUP, SIGTERM], "stopped at once, as it did not end in time after SIGTERM"),
        ([SIGINT], "stopped at once, as it did not end in time after Ctrl-C"),
    ],
)
def test_the_reason_of_an_immediate_end_names_the_users_signals(numbers, words):
    interrupts = Interrupts()
    for number in numbers:
        interrupts.note(number)
    assert interrupts.describe_end_at_once() == words


def test_ignored_signals_stay_ignored_and_each_signal_has_a_readable_name():
    # A shell without job control has what it starts in the background ignore Ctrl-C.
    for number in (SIGHUP, SIGINT):
        signal.signal(number, signal.SIG_IGN)
    assert heeded() == (SIGINT, SIGTERM, SIGUSR2)
    signal.signal(SIGHUP, signal.SIG_DFL)
    assert heeded() == STOPPING
    assert [cause_of(number) for number in STOPPING] == ["Ctrl-C", "a closed terminal", "SIGTERM", "SIGUSR2"]


def test_a_signal_while_the_guard_is_started_is_not_lost(monkeypatch, tmp_path):
    signal.signal(SIGINT, signal.SIG_IGN)
    config = validate_config(config_tree(tmp_path))
    launch = launch_module.Launch(config, [HostLine("here")], head="here", head_is_here=True)
    launch.hosts = [PlacementHost(name="here", cpus=1)]

    class LocalGuard(Contact):
        def __init__(self, name):
            super().__init__(name, None)
            self.process = SimpleNamespace(stdin=SimpleNamespace(is_closing=lambda: True))

        async def begin(self, *_):
            os.kill(os.getpid(), SIGINT)

    class Follower:
        def __init__(self, config, folder, members, progress, interrupts):
            self.interrupts = interrupts

        async def main(self):
            async with asyncio.timeout(20):
                await self.interrupts.first()
            return self.interrupts.signal

    monkeypatch.setattr(launch_module, "LocalGuard", LocalGuard)
    monkeypatch.setattr(launch_module, "Follower", Follower)
    monkeypatch.setattr(launch_module, "show_end", lambda _config, _folder, ended, _progress: ended)
    assert asyncio.run(undone_by_signals(launch.run(), launch.progress)) == SIGINT
