"""The endpoint for Prometheus, with real clients: good ones, and those that hold on to it."""

import errno
import json
import socket
import socketserver
import time
import urllib.request
from urllib.parse import urlsplit

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse
from sinks_cases import ends, evaluation, snapshot, train, update

from asyncrl.observe.sinks import prometheus
from asyncrl.observe.sinks.prometheus import CONNECTIONS, PrometheusSink
from tools.waiting import wait_until

EDGES = ("16.0", "32.0", "64.0", "262144.0", "+Inf")


@pytest.fixture
def sink(tmp_path):
    made = PrometheusSink(tmp_path, "127.0.0.1", 0)
    made.open()
    yield made
    made.close()
    wait_until(lambda: not (tmp_path / "monitor" / "prometheus.json").exists())


def scrape(address, **headers):
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=30) as reply:
        return reply.read().decode()


def served(address):
    try:
        return scrape(address) is not None
    except OSError:
        return False


def figures(text, read=parse):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in read(text)
        for sample in family.samples
    }


def where(sink):
    parts = urlsplit(sink.address)
    return parts.hostname, parts.port


def test_metrics_are_scraped_over_http(sink, tmp_path):
    components = {'reward/component/a"\n\\b': 0.5}
    for record in (train(1), evaluation(2), evaluation(2, "math"), update(2), train(3) | components, snapshot(step=3)):
        sink.write(record)
    address = json.loads((tmp_path / "monitor" / "prometheus.json").read_text())["address"]
    found = figures(scrape(address))
    assert found["asyncrl_step",] == 3
    assert found["asyncrl_reward_mean",] == 0.03
    assert found["asyncrl_eval_mean", ("eval", "gsm")] == found["asyncrl_eval_mean", ("eval", "math")] == 0.5
    assert found["asyncrl_reward_component", ("component", 'a"\n\\b')] == 0.5
    assert found["asyncrl_update_stall_s", ("replica", "rollouter/0")] == 0.25
    assert found["asyncrl_run_phase", ("phase", "running")] == 1
    who = (("actor", "rollouter/0"), ("host", "node1"))
    assert found["asyncrl_actor_up", *who] == 1
    assert found["asyncrl_actor_rollout_in_flight", *who] == 3
    assert found["asyncrl_actor_restarts_total", *who] == 2
    assert found["asyncrl_actor_rollout_sampled_tokens_total", *who] == 900
    upto = {edge: found["asyncrl_actor_rollout_response_tokens_bucket", *who, ("le", edge)] for edge in EDGES}
    assert list(upto.values()) == [0, 3, 4, 4, 6]
    states = ("resource", "engine"), ("state", "generating")
    assert found["asyncrl_resource_seconds_total", *who, *states] == 90
    spoken = scrape(address, Accept="application/openmetrics-text; version=1.0.0")
    assert figures(spoken, parse_open)["asyncrl_step",] == 3
    # Voided steps are not shown.
    sink.write(train(1, start=2))
    assert "asyncrl_eval_mean" not in scrape(address)


def test_a_client_that_never_reads_does_not_block_others(sink):
    many = {f"reward/component/{number}": 0.5 for number in range(5_000)}
    sink.write({"kind": "train", "step": 1} | many)
    with socket.socket() as blocked:
        blocked.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        blocked.connect(where(sink))
        blocked.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        sink.write({"kind": "train", "step": 2} | many)
        assert "asyncrl_step 2.0" in scrape(sink.address)


def test_slow_clients_are_disconnected_and_free_their_places(sink, monkeypatch):
    monkeypatch.setattr(prometheus, "CONNECTION_S", 3.0)
    silent = [socket.create_connection(where(sink), timeout=30) for _ in range(CONNECTIONS)]
    try:
        with pytest.raises(OSError):  # noqa: PT011
            scrape(sink.address)
        # Each byte that a slow client sends would be in time: it is the whole that counts.
        silent[0].sendall(b"G")
        assert silent[0].recv(1) == b""
        for client in silent:
            client.close()
        # The server sees their ends one after the other, so there may be no room for a moment.
        wait_until(lambda: served(sink.address))
    finally:
        for client in silent:
            client.close()


def test_connections_without_a_descriptor_wait_without_using_the_cpu(sink, monkeypatch):
    asked = []

    def refuses(_server):
        asked.append(time.monotonic())
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as full:
        full.setattr(socketserver.TCPServer, "get_request", refuses)
        with socket.create_connection(where(sink), timeout=30) as client:
            wait_until(lambda: len(asked) >= 3)
            assert asked[2] - asked[0] >= 2 * prometheus.ACCEPT_PAUSE_S
            full.undo()
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert b"200 OK" in client.recv(1 << 16)


def test_the_endpoint_ends_without_waiting_for_clients(sink, monkeypatch):
    # Only the endpoint cuts the client off.
    monkeypatch.setattr(prometheus, "CONNECTION_S", 3600.0)
    with socket.create_connection(where(sink), timeout=30) as client:
        assert scrape(sink.address) is not None
        ends(sink.close)
        # It has said nothing, and not hung up.
        assert client.recv(1) == b""
