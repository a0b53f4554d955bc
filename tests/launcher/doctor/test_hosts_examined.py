"""Hosts one by one, differences between them, and the connections from one to another."""

import contextlib
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from side_by_side import held_and_free

from asyncrl.config.engines import ENGINES
from asyncrl.config.load import validate_config
from asyncrl.launcher.checks.needs import Need
from asyncrl.launcher.checks.network import judge_nccl
from asyncrl.launcher.checks.resources import judge_memory, judge_shm, memory_bytes, shm_bytes
from asyncrl.launcher.common.agent_messages import Card, HostOffer
from asyncrl.launcher.common.placement import PlacementHost, place
from asyncrl.launcher.doctor.host import connect, find_cards, gather_facts, listen, parse_cards
from asyncrl.launcher.doctor.orders import Connect, Listen, Listener
from asyncrl.launcher.hosts.between_hosts import (
    Link,
    Offset,
    best_offset,
    compare_clocks,
    compare_identities,
    compare_models,
    compare_versions,
    judge_gpus,
    judge_links,
    needed_packages,
)
from asyncrl.launcher.hosts.remote import find_facts

GIB = 1 << 30

# --- one host ---


def test_shm_and_memory():
    shm = [(None, "fail"), ((64 << 20, 1 << 20), "fail"), ((64 << 20,) * 2, "warn"), ((GIB,) * 2, "ok")]
    assert [judge_shm(there).result for there, _ in shm] == [result for _, result in shm]
    for total, available, result in ((8, 4, "fail"), (16, 4, "warn"), (16, 10, "ok")):
        found = judge_memory(total * GIB, available * GIB, Need(least=10 * GIB, wanted=10 * GIB))
        assert found.result == result and f"{available}.0 GiB of {total}.0 GiB" in found.detail


def test_facts_of_this_host():
    facts = gather_facts(find_facts())
    assert facts.versions["asyncrl"] == facts.version
    assert facts.versions.keys() >= {"aiohttp", *(name for traits in ENGINES.values() for name in traits.packages)}
    assert facts.versions["pyzmq"] and facts.interfaces["lo"] == "127.0.0.1"
    assert facts.identity and facts.identity == find_facts().identity
    total, available = memory_bytes()
    assert 0 < available <= total
    assert shm_bytes() is not None


def test_gpus_are_read_from_the_tool(tmp_path, monkeypatch):
    table = "0, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 512\n1, NVIDIA H100 80GB HBM3, 550.54.15, [N/A], [N/A]\n"
    cards = parse_cards(table)
    assert cards["0"].total_bytes == 81559 << 20 and cards["0"].used_bytes == 512 << 20
    assert cards["1"].driver == "550.54.15" and cards["1"].total_bytes == 0
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho NVIDIA-SMI has failed because it cannot talk to the driver\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    there, problem = find_cards()
    assert there == {} and problem.startswith("nvidia-smi ends with 9: NVIDIA-SMI has failed")


@pytest.mark.parametrize(
    ("visible", "offered"), [("1,0", ["1", "0"]), ("", []), ("-1", []), ("0,-1,2", ["0"]), ("GPU-5a", ["GPU-5a"])]
)
def test_the_gpus_of_a_host_are_those_of_cuda(monkeypatch, visible, offered):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert find_facts().gpus == offered


# --- several ---

VERSIONS = {"python": "3.11.7", "asyncrl": "0.1.0", "torch": "2.13.0", "vllm": "", "pyzmq": "27", "msgspec": "1"}


def facts(name, gpus=(), cards=(), problem="", **versions):
    return HostOffer(
        version="0.1.0",
        hostname=name,
        cpus=8,
        gpus=list(gpus),
        interfaces={"eth0": "10.0.0.1"},
        versions=VERSIONS | versions,
        cards=dict(cards),
        gpu_problem=problem,
    )


def results(found):
    return {finding.host: finding.result for finding in found}


@pytest.mark.parametrize(
    ("ahead", "error", "result"),
    [
        (0.49, 0.0, "ok"),
        (0.6, 0.01, "warn"),
        (-0.6, 0.01, "warn"),
        (0.8, 0.4, "ok"),
    ],
)
def test_a_clock_that_certainly_differs_is_named(ahead, error, result):
    found = compare_clocks({"a": Offset(5.0, 0.0), "b": Offset(5.0 + ahead, error)}, "a")
    assert results(found) == {"b": result}
    if result == "warn":
        assert ("ahead of a" if ahead > 0 else "behind a") in found[0].detail and "chrony" in found[0].fix


@given(
    st.floats(-100, 100),
    st.lists(st.tuples(st.floats(0, 1000), st.floats(0.001, 5), st.floats(0, 1)), min_size=1, max_size=8),
)
def test_a_clock_offset_is_within_its_stated_error(ahead, rounds):
    offset = best_offset([(asked, asked + way * share + ahead, asked + way) for asked, way, share in rounds])
    assert abs(offset.ahead_s - ahead) <= offset.error_s + 1e-9
    assert offset.error_s == pytest.approx(min(way for _, way, _ in rounds) / 2, abs=1e-9)


def test_two_names_of_one_machine_are_an_error():
    found = compare_identities({"a": "x/1", "b": "y/1", "c": "x/1"})
    assert results(found) == {"c": "fail"} and "a" in found[0].detail


@pytest.mark.parametrize(
    ("there", "needed", "result", "said"),
    [
        ({}, [], "ok", "torch 2.13.0"),
        ({"torch": "2.13.0+cpu"}, ["torch"], "ok", ""),
        ({"asyncrl": "9.9.9"}, [], "fail", "asyncrl 9.9.9 (0.1.0 on a)"),
        ({"torch": ""}, [], "fail", "torch missing (2.13.0 on a)"),
        ({}, ["torch", "vllm"], "fail", "not installed: vllm"),
        ({"pyzmq": "26"}, [], "warn", "pyzmq 26 (27 on a)"),
        ({"python": "3.12.1", "vllm": "0.30"}, [], "fail", "vllm 0.30 (missing on a), python 3.12.1"),
    ],
)
def test_every_host_has_the_versions_of_the_head(there, needed, result, said):
    found = compare_versions({"a": facts("a"), "b": facts("b", **there)}, "a", {"b": needed})
    assert results(found) == {"a": "ok", "b": result}
    assert said in found[1].detail
    assert ("pip install 'asyncrl[vllm]' on that host" in found[1].fix) == ("vllm" in needed)
    found = compare_versions({"a": facts("a", gpus=["0"], torch="2.13.0+cpu")}, "a", {})
    assert results(found) == {"a": "fail"} and "CUDA" in found[0].fix, "which is no use to GPUs"


@pytest.mark.parametrize(("episode", "more"), [({}, []), ({"env": "pkg:Game"}, ["aiohttp"])])
def test_a_host_needs_only_the_packages_of_its_actors(episode, more):
    tree = {"model": {"path": "m"}, "data": {"source": "synthetic"}, "rollout": {"gpus_per_replica": 1}}
    config = validate_config(tree | {"episode": episode})
    placed = place(config, [PlacementHost(name=name, cpus=8, gpus=("0",)) for name in "ab"])
    assert needed_packages(config, placed) == {"a": ["torch", "transformers"], "b": ["torch", "vllm", *more]}


H100 = Card(name="H100", driver="550", total_bytes=80 << 30, used_bytes=1 << 20)
OLD = Card(name="H100", driver="535", total_bytes=80 << 30, used_bytes=1 << 20)
BUSY = Card(name="H100", driver="550", total_bytes=80 << 30, used_bytes=60 << 30)


@pytest.mark.parametrize(
    ("b", "result", "said"),
    [
        (facts("b", ["0", "1"], {"0": H100, "1": H100}), "ok", "2 GPUs (H100, driver 550)"),
        (facts("b", ["0"], {"0": OLD}), "warn", "a has H100, driver 550"),
        (facts("b", ["0", "1"], {"0": H100, "1": BUSY}), "warn", "GPU 1 60.0 GiB of 80.0 GiB"),
        (facts("b", ["0"], {"0": H100, "1": BUSY}), "ok", "1 GPUs"),
        (facts("b", problem="nvidia-smi ends with 9: no driver"), "fail", "no driver"),
        (facts("b"), "ok", "no GPU"),
    ],
)
def test_gpus(b, result, said):
    found = judge_gpus({"a": facts("a", ["0"], {"0": H100}), "b": b}, "a", [])
    assert results(found) == {"a": "ok", "b": result}
    assert said in found[1].detail


@pytest.mark.parametrize(
    ("digests", "bad"), [({"a": "1", "b": "1"}, {}), ({"a": "1", "b": ""}, {}), ({"a": "1", "b": "2"}, {"b": "fail"})]
)
def test_every_host_has_the_models_of_the_head(digests, bad):
    assert results(compare_models(digests, "a")) == bad


def test_a_closed_link_is_named_with_its_direction_and_probable_firewall():
    hosts = ["a", "b", "c"]
    shut = {("a", "c"): "nothing comes back", ("b", "c"): "nothing comes back"}
    links = [Link(one, other, shut.get((one, other), "")) for one in hosts for other in hosts if one != other]
    found = {finding.host: finding for finding in judge_links(links, "5000-5100")}
    assert results(found.values()) == {"a": "fail", "b": "fail", "c": "ok"}
    assert found["a"].detail == "a to c is closed: nothing comes back; c to a is open"
    assert "the firewall of c" in found["a"].fix and "TCP ports 5000-5100 of c for a" in found["a"].fix
    assert found["c"].detail == "reaches a, b"

    found = judge_links([Link("a", "b", "x"), Link("b", "a", "y", needed=False), Link("a", "c", "")], "0")
    assert [(one.host, one.result) for one in found] == [("a", "fail"), ("b", "warn")]
    assert "b to a is closed, too" in found[0].detail and "every TCP port" in found[0].fix
    # With a range, no other one would open the ports that torch.distributed chooses.
    found = judge_links([Link("a", "b", "x")], "0", is_configured=False)
    assert "every TCP port" in found[0].fix and "network.ports" not in found[0].fix


# --- links ---

HERE = "127.0.0.1"
INTERFACES = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "eth1": "10.1.0.1"}


@pytest.fixture
def left():
    with contextlib.ExitStack() as left:
        yield left


@pytest.fixture
def pair():
    with held_and_free(HERE) as port:
        yield port


def test_a_listener_answers_only_with_the_token(left, pair):
    ports = f"{pair}-{pair + 1}"
    found = listen(Listen(address=HERE, ports=[ports, "0"], token="secret"), left)
    assert found.ports[ports] == pair + 1
    peer = Listener(host="b", address=HERE, ports=found.ports)
    order = Connect(peers=[peer], token="secret", timeout_s=10)
    assert connect(order).problems == {"b": {ports: "", "0": ""}}
    stranger = connect(Connect(peers=[peer], token="another", timeout_s=10)).problems["b"]
    assert all("answered by another program" in problem for problem in stranger.values())
    left.close()
    assert all("refused" in problem for problem in connect(order).problems["b"].values())


def test_a_silent_listener_is_unreachable_and_a_silent_client_blocks_no_other(left):
    port = listen(Listen(address=HERE, ports=["0"], token="x"), left).ports["0"]
    with socket.create_server((HERE, 0)) as silent, socket.create_connection((HERE, port)):
        for there, timeout_s, said in (
            (silent.getsockname()[1], 0.3, "no answer within 0.3 s"),
            (port, 30, ""),
        ):
            peer = Listener(host="b", address=HERE, ports={"0": there})
            problem = connect(Connect(peers=[peer], token="x", timeout_s=timeout_s)).problems["b"]["0"]
            assert said in problem and bool(problem) == bool(said)


def test_a_range_without_a_free_port_has_no_listener(left, pair):
    ports = f"{pair}-{pair}"
    assert listen(Listen(address=HERE, ports=[ports], token="x"), left).ports == {}
    assert listen(Listen(address="203.0.113.9", ports=["0"], token="x"), left).ports == {}


@pytest.mark.parametrize(
    ("env", "infiniband", "several", "result"),
    [
        ({"NCCL_SOCKET_IFNAME": "eth"}, [], True, "ok"),
        ({"NCCL_SOCKET_IFNAME": "^lo,eth1"}, [], True, "ok"),
        ({"NCCL_SOCKET_IFNAME": "=eth0"}, [], True, "ok"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, [], True, "fail"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, [], True, "fail"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, [], False, "ok"),
        ({"NCCL_SOCKET_IFNAME": "eth1"}, [], True, "warn"),
        ({"NCCL_IB_DISABLE": "1"}, ["mlx5_0"], True, "warn"),
        ({"NCCL_IB_DISABLE": "1"}, [], True, "ok"),
        ({"NCCL_P2P_DISABLE": "1"}, [], False, "warn"),
    ],
)
def test_variables_of_nccl_and_gloo(env, infiniband, several, result):
    found = judge_nccl(env, INTERFACES, infiniband, used="eth0" if several else "", several=several)
    assert found.result == result, found
    assert all(key in found.detail for key in env) or result == "ok"


def test_a_closed_listener_leaves_no_thread(left):
    before = threading.active_count()
    listen(Listen(address=HERE, ports=["0"], token="x"), left)
    left.close()
    for thread in threading.enumerate():
        if thread.daemon and thread.name.endswith("(_serve)"):
            thread.join(10)
            assert not thread.is_alive()
    assert threading.active_count() <= before
