"""Ports, connections and what NCCL is told."""

import socket
import threading

import pytest
from side_by_side import held_and_free

from asyncrl.doctor.network import Listeners, connect, judge_nccl
from asyncrl.doctor.protocol import Connect, Listen, ReachableHost

HERE = "127.0.0.1"
INTERFACES = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "eth1": "10.1.0.1"}


@pytest.fixture
def listeners():
    made = Listeners()
    yield made
    made.close()


@pytest.fixture
def pair():
    with held_and_free(HERE) as port:
        yield port


def test_who_listens_is_reached_by_who_knows_the_token(listeners, pair):
    ports = f"{pair}-{pair + 1}"
    found = listeners.listen(Listen(address=HERE, ports=[ports, "0"], token="secret"))
    assert found.ports[ports] == pair + 1
    peer = ReachableHost(host="b", address=HERE, ports=found.ports)
    order = Connect(peers=[peer], token="secret", timeout_s=10)
    assert connect(order).problems == {"b": {ports: "", "0": ""}}
    stranger = connect(Connect(peers=[peer], token="another", timeout_s=10)).problems["b"]
    assert all("answered by somebody else" in problem for problem in stranger.values())
    listeners.close()
    assert all("refused" in problem for problem in connect(order).problems["b"].values())


def test_one_that_accepts_and_says_nothing_is_not_reached_and_one_that_asks_nothing_keeps_nobody_out(listeners):
    port = listeners.listen(Listen(address=HERE, ports=["0"], token="x")).ports["0"]
    with socket.create_server((HERE, 0)) as silent, socket.create_connection((HERE, port)):
        for there, timeout_s, said in (
            (silent.getsockname()[1], 0.3, "nothing comes back within 0.3 s"),
            (port, 30, ""),
        ):
            peer = ReachableHost(host="b", address=HERE, ports={"0": there})
            problem = connect(Connect(peers=[peer], token="x", timeout_s=timeout_s)).problems["b"]["0"]
            assert said in problem and bool(problem) == bool(said)


def test_where_no_port_is_free_nobody_listens(listeners, pair):
    ports = f"{pair}-{pair}"
    assert listeners.listen(Listen(address=HERE, ports=[ports], token="x")).ports == {}
    assert listeners.listen(Listen(address="203.0.113.9", ports=["0"], token="x")).ports == {}


@pytest.mark.parametrize(
    ("env", "infiniband", "several", "result"),
    [
        ({}, [], True, "ok"),
        ({"NCCL_SOCKET_IFNAME": "eth0"}, [], True, "ok"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, [], True, "ok"),
        ({"NCCL_SOCKET_IFNAME": "^lo,eth1"}, [], True, "ok"),
        ({"NCCL_SOCKET_IFNAME": "=eth0"}, [], True, "ok"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, [], True, "fail"),
        ({"NCCL_SOCKET_IFNAME": "ib0"}, [], True, "fail"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, [], True, "fail"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, [], False, "ok"),
        ({"NCCL_SOCKET_IFNAME": "eth1"}, [], True, "warn"),
        ({"NCCL_IB_DISABLE": "1"}, ["mlx5_0"], True, "warn"),
        ({"NCCL_IB_DISABLE": "1"}, [], True, "ok"),
        ({"NCCL_IB_DISABLE": "0"}, ["mlx5_0"], True, "ok"),
        ({"NCCL_P2P_DISABLE": "1"}, [], False, "warn"),
    ],
)
def test_what_nccl_is_told(env, infiniband, several, result):
    found = judge_nccl(env, INTERFACES, infiniband, used="eth0" if several else "", several=several)
    assert found.result == result, found
    assert all(key in found.detail for key in env) or result == "ok"


def test_nothing_of_a_listener_stays(listeners):
    before = threading.active_count()
    listeners.listen(Listen(address=HERE, ports=["0"], token="x"))
    listeners.close()
    for thread in threading.enumerate():
        if thread.daemon and thread.name.endswith("(_serve)"):
            thread.join(10)
            assert not thread.is_alive()
    assert threading.active_count() <= before
