"""Reaching hosts without any: addresses, the words for failures, what an entry point answers, logs that are sent."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from importlib.metadata import version

import msgspec
import psutil
import pytest
from model_files import write_model, write_weights
from run_settings import simulated_run

from asyncrl.config.load import config_to_json
from asyncrl.core.errors import UsageError
from asyncrl.launcher.checks.findings import CheckOrder
from asyncrl.launcher.common.agent_messages import (
    Checked,
    EndOrder,
    HostOffer,
    HostSpec,
    RouteQuery,
    Routes,
)
from asyncrl.launcher.hosts.addresses import by_interface, by_route, find_addresses, interfaces, is_this_host, route_to
from asyncrl.launcher.hosts.start import SshStart
from asyncrl.launcher.node.launcher_link import CHUNK_BYTES, LauncherLink
from asyncrl.rpc.wire.keys import make_keyring


def facts(client="", **held):
    return HostOffer(version="1", hostname="x", cpus=2, gpus=[], interfaces={"lo": "127.0.0.1"} | held, client=client)


HEAD = facts(eth0="10.0.0.1", ib0="10.1.0.1", docker0="172.17.0.1")
BOTH = {"10.0.0.1": "10.0.0.2", "10.1.0.1": "10.1.0.2"}
ETH = {"10.0.0.1": "10.0.0.2"}


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        # From where the launcher came.
        ({"b": ("10.1.0.1", [], BOTH)}, "10.1.0.1"),
        # The address of the head's name there, if the launcher is elsewhere or behind a jump host.
        ({"b": ("10.9.9.9", ["10.0.0.1"], ETH)}, "10.0.0.1"),
        # The one that all reach.
        ({"b": ("10.1.0.1", [], BOTH), "c": ("10.0.0.1", [], {"10.0.0.1": "10.0.0.3"})}, "10.0.0.1"),
        # The one that most hosts know, though one host knows another twice.
        (
            {"b": ("10.0.0.1", ["10.0.0.1"], BOTH), "c": ("10.1.0.1", [], BOTH), "d": ("10.1.0.1", [], BOTH)},
            "10.1.0.1",
        ),
        # Not a host's own.
        ({"b": ("10.0.0.1", ["172.17.0.1"], {"172.17.0.1": "172.17.0.1"})}, None),
        # Not the name's loopback.
        ({"b": ("", ["127.0.1.1"], ETH)}, None),
    ],
)
def test_the_head_has_an_address_that_every_host_reaches(others, chosen):
    """``others``: where the launcher came from, what the head's name stands for, and the ways to its addresses."""
    hosts = {"a": HEAD} | {name: facts(client) for name, (client, *_) in others.items()}
    ways = {name: Routes(named=named, via=via) for name, (_, named, via) in others.items()}
    if chosen is None:
        with pytest.raises(UsageError, match="network.interface"):
            by_route("a", hosts, ways)
        return
    assert by_route("a", hosts, ways) == {"a": chosen} | {name: way.via[chosen] for name, way in ways.items()}


def test_this_host_recognises_its_names_and_each_host_has_an_address_of_the_interface():
    assert interfaces()["lo"] == route_to("127.0.0.1") == "127.0.0.1"
    assert is_this_host(socket.gethostname()) and is_this_host("127.0.0.1") and not is_this_host("192.0.2.200")
    hosts = {"a": HEAD, "b": facts(ib0="10.1.0.2"), "c": facts(eth0="10.0.0.3")}
    assert by_interface({"a": HEAD, "b": hosts["b"]}, "ib0") == {"a": "10.1.0.1", "b": "10.1.0.2"}
    with pytest.raises(UsageError, match=r"^c: there is no interface ib0 .*; lo \(127.0.0.1\), eth0 \(10.0.0.3\)$"):
        by_interface(hosts, "ib0")
    with pytest.raises(UsageError, match="a: lo is loopback, which other hosts cannot reach"):
        by_interface({"a": HEAD, "b": hosts["b"]}, "lo")


def test_only_the_hosts_that_answer_get_an_address():
    hosts, asked = {"a": HEAD, "b": facts("10.1.0.1"), "c": facts()}, []

    async def ask(queries):
        asked.append(list(queries))
        return {"b": Routes(named=[], via=BOTH)}

    async def ask_in_vain(queries):
        return {}

    assert asyncio.run(find_addresses(hosts, None, ask)) == {"a": "10.1.0.1", "b": "10.1.0.2"}
    assert asyncio.run(find_addresses(hosts, None, ask_in_vain)) == {"a": "10.0.0.1"}
    assert asyncio.run(find_addresses({"a": HEAD, "b": HEAD}, "eth0", ask)) == {"a": "10.0.0.1", "b": "10.0.0.1"}
    assert asked == [["b", "c"]]


REFUSED = "ssh: connect to host b port 22: Connection refused"


def test_ssh_never_prompts_takes_the_users_arguments_first_and_explains_a_failed_start():
    start = SshStart(4.2, ("-o", "ConnectTimeout=1"), python="/x y/python")
    argv = start.argv("b")
    assert argv[:4] == ["ssh", "-T", "-o", "ConnectTimeout=1"] and {"BatchMode=yes", "ConnectTimeout=5"} <= set(argv)
    assert argv[-3:] == ["--", "b", "'/x y/python' -m asyncrl.launcher.hosts.remote"]
    # Only the end of the connection leaves a host unknown.
    assert [start.is_lost(code, "") for code in (255, -9, 0, 1, 137)] == [True, True, False, False, False]
    start = SshStart(5.0, python="/x/python")
    for code, errors, said in (
        (255, f"{REFUSED}\n", REFUSED),
        (255, "", "ssh failed without a word"),
        (255, "u@b: Permission denied (publickey).\n", "`ssh b` has to work without a password"),
        (255, "Host key verification failed.\n", "see that its key is the right one"),
        (127, "bash: line 1: /x/python: No such file or directory\n", "no Python can run there at /x/python"),
        (1, "/x/python: No module named asyncrl\n", "no asyncrl of this version is installed for /x/python (No module"),
        (3, "boom\n", "asyncrl did not start there, exit code 3: boom"),
    ):
        reported = start.explain("b", code, errors)
        assert said in reported and "\n" not in reported


def ask(*orders):
    """Answers of the entry point to these orders, and its exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl.launcher.hosts.remote"],
        input=b"".join(msgspec.json.encode(order) + b"\n" for order in orders),
        capture_output=True,
        timeout=60,
    )
    return [json.loads(line) for line in done.stdout.splitlines()], done.returncode


def spec(folder):
    return HostSpec(
        run_id="r1",
        run_dir=str(folder / "runs" / "trial"),
        log_dir=str(folder / "runs" / "trial" / "logs" / "attempt_1"),
        index=1,
        config="{}",
        credentials=make_keyring("r1", ["agent/1"], attempts=1, curve=True).files_of(["agent/1"]),
        folder="/",
        env={},
    )


def part(folder, actor="rollouter/0", **tables):
    """The order to check a host with this actor."""
    return CheckOrder(
        config=config_to_json(simulated_run(**tables)),
        actors=[actor],
        address="127.0.0.1",
        run="runs/trial",
        is_head=False,
        several=False,
        folder=str(folder),
    )


def test_i7_the_entry_point_reports_the_host_refuses_a_folder_in_use_and_leaves_nothing(tmp_path):
    """I7: nor does a part whose launcher is gone before the agent lives."""
    write_weights(write_model(tmp_path / "m") / "model.safetensors", cut=3)
    there, none = part(tmp_path, model={"path": "m"}), part("/nowhere", model={"path": "/nowhere/m"})
    gone = EndOrder(run_dir=str(tmp_path / "trial"), index=1, patience_s=0.0)
    said, code = ask(RouteQuery(head="localhost", addresses=["127.0.0.1"]), there, none, gone, spec(tmp_path))
    assert said[0]["version"] == version("asyncrl")
    assert said[1] == {"type": "routes", "named": ["127.0.0.1"], "via": {"127.0.0.1": "127.0.0.1"}}
    checked = [msgspec.convert(one, Checked).findings for one in said[2:4]]
    cut, missing = (next(each for each in found if each.check == "model") for found in checked)
    assert cut.result == missing.result == "fail" and cut.key == missing.key == "model.path"
    assert "m: model.safetensors is cut off" in cut.detail
    assert missing.detail == "/nowhere/m is not a folder here"
    assert said[4] == {"type": "gone", "living": False, "killed": False, "ended": None}
    assert (said[5], code) == ({"type": "prepared"}, 1)
    assert not list((tmp_path / "runs").iterdir())
    (tmp_path / "runs" / "trial").mkdir(parents=True)
    said, code = ask(spec(tmp_path))
    assert (said[1]["type"], code) == ("refusal", 2)
    assert "is there already and is not part of this run" in said[1]["reason"]
    assert not list((tmp_path / "runs" / "trial").iterdir())


def test_the_checks_of_a_host_end_when_the_launcher_hangs_up(tmp_path):
    """I7: nothing is answered, and the process with the user's code ends."""
    (tmp_path / "hangs.py").write_text("import os, time\nopen(f'pid-{os.getpid()}', 'w').close()\ntime.sleep(600)\n")
    order = part(tmp_path, "reward/0", reward={"function": "hangs:reward"})
    argv = [sys.executable, "-m", "asyncrl.launcher.hosts.remote"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as host:
        host.stdin.write(msgspec.json.encode(order) + b"\n")
        host.stdin.flush()
        until = time.monotonic() + 40
        while not (found := list(tmp_path.glob("pid-*"))) and time.monotonic() < until:
            time.sleep(0.05)
        host.stdin.close()
        said = host.stdout.read().splitlines()
    assert host.returncode == 1 and [json.loads(line)["type"] for line in said] == ["facts"]
    assert found and not psutil.pid_exists(int(found[0].name.removeprefix("pid-")))


def test_logs_are_sent_in_order_whole_lines_at_a_time(tmp_path):
    room, sent = [100], []

    class Link(LauncherLink):
        """One whose launcher has room for so much, and takes events."""

        def room(self):
            return room[0]

        def emit(self, event):
            sent.append(event)

    link, log = Link(None, tmp_path), tmp_path / "rollouter-0.log"

    def send(text, free=100, *, last=False):
        """The text that is sent of a log with this text."""
        log.write_text(text)
        room[0] = free
        sent.clear()
        more = asyncio.run(link.send_new_lines(last=last))
        assert more == (bool(sent) or not free) and all(event.file == log.name for event in sent)
        return [event.text for event in sent]

    assert send("one\ntw") == ["one\n"] and send("one\ntw") == []
    assert send("one\ntwo\nthree", free=0) == []
    assert send("one\ntwo\nthree") == ["two\n"]
    assert send("one\ntwo\nthree", last=True) == ["three"]
    longer = "one\ntwo\nthree" + "x" * (CHUNK_BYTES + 10)
    assert [len(text) for text in send(longer, free=10 * CHUNK_BYTES)] == [CHUNK_BYTES]
    room[0] = 100
    asyncio.run(link.send_last_logs(20.0))
    assert sent[-1].text == "x" * 10
