"""--stop, --join and --leave: which runs are found, and what is asked of them."""

import asyncio
import io
import json
import signal
from types import SimpleNamespace

import pytest
from run_settings import simulated_run
from virtual import run_virtual

from asyncrl.cli import launch
from asyncrl.core.errors import AsyncRLError, DeadlineExceeded, HostFailed, Refused, RemoteError, UsageError
from asyncrl.launcher.common.agent_messages import HostOffer, Routes
from asyncrl.launcher.hosts import addresses
from asyncrl.launcher.hosts.hostfile import HostLine
from asyncrl.launcher.live import joined_hosts as joining
from asyncrl.launcher.live import live_run
from asyncrl.launcher.live.live_run import LiveRun, find_live_run, members_of
from asyncrl.launcher.run_folder.folders import create_run_folder, private_folder
from asyncrl.launcher.run_folder.private import CONFIG
from asyncrl.launcher.terminal.progress import TerminalProgress
from asyncrl.messages.actors import BringBack
from asyncrl.messages.hosts import Join, Leave, MemberHost, WatchMembers
from asyncrl.rpc import controller_client
from asyncrl.rpc.calls.server import CROWDED


@pytest.fixture(autouse=True)
def keep_signal_handlers(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)


@pytest.fixture
def hosts(tmp_path):
    path = tmp_path / "more"
    path.write_text("c\n")
    return str(path)


@pytest.fixture
def made(tmp_path):
    return simulated_run(run={"name": "trial", "dir": str(tmp_path / "runs")})


@pytest.fixture
def lived(made):
    """The folder of a run whose private folder is held, and its controller's address to be written."""
    folder = create_run_folder(made)
    with private_folder(folder, made):
        yield folder


def speak(folder, address="tcp://127.0.0.1:7000"):
    (folder.private / "controller.json").write_text(json.dumps({"address": address}))


def test_idempotent_calls_are_repeated_and_refusals_show_the_controllers_text(lived, monkeypatch):
    monkeypatch.setattr(controller_client, "AWAY_S", 0.01)
    speak(lived)
    crowded = Refused("controller/0", CROWDED, ours="one more", theirs="at most 64 at once")
    newer = Refused("controller/0", "protocol", ours="4", theirs="5")
    ends = [RemoteError("controller/0", "cancelled", "the call was cancelled", retryable=True), None]
    ends += [RemoteError("controller/0", "invalid", "c cannot leave"), crowded, crowded, newer]

    class Scripted:
        def __init__(self, *_):
            """Its calls end as listed."""

        async def call(self, request, timeout):
            if error := ends.pop(0):
                raise error
            return timeout

        def close(self):
            pass

    async def main():
        found = find_live_run(str(lived.path))
        assert (found.folder, found.address, found.lives) == (lived, "tcp://127.0.0.1:7000", True)
        assert found.credentials.run_id == lived.run_id
        with found.connect() as controller:
            assert 1.0 < await controller.ask(WatchMembers(), timeout=5.0) < 5.0
            for said in ("^c cannot leave$", "accepts at most 64 at once as launcher/0; .*wait until one has ended$"):
                with pytest.raises(UsageError, match=said):
                    await controller.ask(WatchMembers())
            with pytest.raises(UsageError, match="wait until one has ended$"):
                await anext(members_of(found, controller))
            with pytest.raises(
                UsageError, match="speaks version 5 of the protocol, and this one 4; use the asyncrl of"
            ):
                await controller.ask(WatchMembers())

    monkeypatch.setattr(controller_client, "Peer", Scripted)
    asyncio.run(main())


class SlowPeer:
    """The controller that answers nothing: each call ends with the next of these errors, or else at its deadline."""

    def __init__(self, *refusals):
        self.refusals, self.timeouts = list(refusals), []

    async def call(self, request, timeout):
        self.timeouts.append(timeout)
        assert timeout > 0.0
        if self.refusals:
            wait_s, error = self.refusals.pop(0)
            await asyncio.sleep(wait_s)
            raise error
        await asyncio.sleep(timeout)
        raise DeadlineExceeded("launcher/0", "controller/0", type(request).__name__, timeout, "it is away")

    def close(self):
        pass


def ask_slowly(lived, monkeypatch, peer, request, timeout):
    """The error and the duration (s) of a request to this peer."""
    speak(lived)
    monkeypatch.setattr(controller_client, "Peer", lambda *_: peer)

    async def main():
        loop = asyncio.get_running_loop()
        found = find_live_run(str(lived.path))
        with found.connect() as controller, pytest.raises(AsyncRLError) as caught:
            await controller.ask(request, timeout=timeout)
        return caught.value, loop.time()

    return run_virtual(main())


@pytest.mark.parametrize("answered_s", [0.0, 0.2, 0.6])
def test_a_refusal_at_the_deadline_is_raised_with_its_reason(answered_s, lived, monkeypatch):
    """``answered_s``: after how many seconds each answer comes."""
    refusal = RemoteError("controller/0", "invalid", "no host can join so far: the run starts", retryable=True)
    peer = SlowPeer(*[(answered_s, refusal)] * 20)
    error, took_s = ask_slowly(lived, monkeypatch, peer, WatchMembers(), 3.2)
    assert isinstance(error, UsageError) and str(error) == "no host can join so far: the run starts"
    assert took_s <= 3.2 and len(peer.timeouts) > 1


def test_only_a_request_that_may_be_repeated_is_sent_again_and_the_deadline_names_the_whole_time(lived, monkeypatch):
    """A repeated BringBack would be refused, because no replica rests any more."""
    for request, timeouts in ((BringBack(name="rollouter/1"), [25.2]), (WatchMembers(), [10.0, 10.0, 5.2])):
        error, took_s = ask_slowly(lived, monkeypatch, peer := SlowPeer(), request, 25.2)
        what = type(request).__name__
        assert isinstance(error, DeadlineExceeded) and (error.what, took_s) == (what, pytest.approx(25.2))
        assert str(error) == f"launcher/0 waited 25.2 s on controller/0 for {what}: it is away"
        assert peer.timeouts == pytest.approx(timeouts)


def test_i6_a_command_that_cannot_reach_the_run_prints_the_reason(tmp_path, made, hosts, monkeypatch, capsys):
    """I6: only who reads the private folder may speak to a run."""
    folder = create_run_folder(made)
    place = str(folder.path)
    commands = (["--join", place, "--hosts", hosts], ["--leave", "a", place], ["--stop", place])

    def refused(argv):
        assert launch.main(argv) == 2
        return capsys.readouterr().err

    assert "holds no run: name a run folder" in refused(["--join", str(tmp_path), "--hosts", hosts])
    for argv in commands:
        assert "the run in it has ended, or its head is another machine" in refused(argv)
    with private_folder(folder, made):
        for argv in commands:
            assert "only just starting" in refused(argv)
        speak(folder)
        assert "listens on 127.0.0.1 alone, where no other host reaches it" in refused(commands[0])

        def closed(path, *_: object):
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(live_run, "load_credentials", closed)
        said = f"only who can read {folder.private} may stop this run, or change who serves it"
        assert said in refused(commands[0])


def test_a_run_has_ended_if_its_private_folder_disappears(made, monkeypatch):
    folder = create_run_folder(made)
    monkeypatch.setattr(live_run, "is_live", lambda path: True)
    with pytest.raises(UsageError, match="the run in it has just ended$"):
        find_live_run(str(folder.path))


def test_the_configuration_of_another_version_is_reported_only_for_a_run_that_lives(made):
    folder = create_run_folder(made)
    (folder.path / CONFIG).write_text('{"of": "another version"}')
    with pytest.raises(UsageError, match="the run in it has ended, or its head is another machine"):
        find_live_run(str(folder.path))
    with private_folder(folder, made):
        speak(folder)
        with pytest.raises(UsageError, match="is not that of this version of asyncrl"):
            find_live_run(str(folder.path))


class AnsweringController:
    """A controller with this answer to Join. With the answer None the call is never answered."""

    def __init__(self, answer):
        self.answer, self.asked, self.was_asked = answer, [], asyncio.Event()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    async def ask(self, request, timeout=None):
        self.asked.append(request)
        if isinstance(request, Leave):
            raise UsageError(f"no host {request.host} takes part in this run")
        if self.answer is None:
            self.was_asked.set()
            await asyncio.Event().wait()
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


class Near:
    """The hosts, all of them reached."""

    def __init__(self):
        self.contacts = {}

    async def reach(self, names):
        for name in names:
            facts = HostOffer(version="", hostname=name, cpus=8, gpus=[], interfaces={"eth0": "10.0.0.3"})
            self.contacts[name] = SimpleNamespace(facts=facts)

    async def ask(self, questions, *_):
        return dict.fromkeys(questions, Routes(named=[], via={"10.0.0.1": "10.0.0.3"}))

    async def close(self):
        pass


ASK = "a" * 16
ADMITTED = MemberHost(host="c", agent="agent/1", actors=["rollouter/1"], stage="joining", also=[ASK])
AWAY = DeadlineExceeded("launcher/0", "controller/0", "Join", 300.0)


@pytest.fixture
def join_host_c(lived, monkeypatch):
    """Joins host c by a controller with these answers; returns the coroutine."""
    speak(lived, "tcp://10.0.0.1:7000")
    monkeypatch.setattr(joining.secrets, "token_hex", lambda _: ASK)

    def join(controller):
        monkeypatch.setattr(LiveRun, "connect", lambda run: controller)
        progress = TerminalProgress(io.StringIO(), 1, io.StringIO())
        run = find_live_run(str(lived.path))
        return joining.JoinedHosts(run, [HostLine("c")], Near(), progress).main(dry_run=False)

    return join


@pytest.mark.parametrize("ends", [HostFailed("c", "no room"), asyncio.CancelledError()])
def test_a_host_that_cannot_be_started_is_withdrawn(join_host_c, ends, monkeypatch):
    """Else the run would wait for it. ``ask`` repeats a Join that the controller refuses only for now."""
    monkeypatch.setattr(joining, "host_spec", lambda *_: (_ for _ in ()).throw(ends))
    controller = AnsweringController(ADMITTED)
    with pytest.raises(type(ends)):
        run_virtual(join_host_c(controller))
    join, leave = controller.asked
    assert (type(join), leave.host, leave.within_s) == (Join, ASK, 0.0)


@pytest.mark.parametrize(
    "ends", [UsageError("let go before it could begin"), AWAY, None], ids=["refused", "away", "cut"]
)
def test_a_join_that_fails_in_any_way_is_withdrawn(join_host_c, ends):
    """It may have been carried out, also if it is interrupted (None) before its reply. Another host named c stays."""
    controller = AnsweringController(ends)

    async def main():
        work = asyncio.create_task(join_host_c(controller))
        if ends is None:
            await controller.was_asked.wait()
            work.cancel()
        with pytest.raises(type(ends) if ends else asyncio.CancelledError):
            await work

    run_virtual(main())
    join, leave = controller.asked
    assert (join.ask, leave.host, leave.within_s) == (ASK, ASK, 0.0)


def test_a_new_host_has_the_address_of_its_route_to_the_head():
    there = Routes(named=[], via={"10.0.0.1": "10.0.0.3"})
    assert addresses.towards("10.0.0.1", {"c": there}) == {"c": "10.0.0.3"}
    for none in (Routes(named=[], via={}), Routes(named=[], via={"10.0.0.1": "10.0.0.1"})):
        with pytest.raises(UsageError, match="d: there is no way to 10.0.0.1"):
            addresses.towards("10.0.0.1", {"c": there, "d": none})
