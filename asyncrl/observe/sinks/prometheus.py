"""The Prometheus endpoint: /metrics over HTTP with the newest metrics, on the server of prometheus_client.

``reward/mean`` becomes ``asyncrl_reward_mean``. Labels, such as actor, replica and stage, distinguish the values of a
family. Kinds and descriptions of declared metrics come from the catalogue. Invariant: a family has one kind; if two
names of a run map to one, the last value counts.

At most CONNECTIONS clients are served at once, each in its own thread, for at most CONNECTION_S. Each client that
reaches the port may read. Raises OSError if the address cannot be bound.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from asyncrl.core.files import replace_file
from asyncrl.messages.monitor import ActorView, Histogram, Snapshot
from asyncrl.observe import catalogue
from asyncrl.observe.catalogue import Metric
from asyncrl.observe.metrics_line import is_voided
from asyncrl.observe.sinks.history_sinks import Line, numbers, run_values

Labels = tuple[tuple[str, str], ...]
LABELS = {
    "reward/component/": "component",
    "rollout/episodes_at/": "stage",
    "rollout/episode_s/": "stage",
    "rollout/episode_share/": "stage",
    "rollout/episodes_ended/": "outcome",
    "rollout/episodes_failed/": "cause",
    "rollout/forks/": "cause",
}
"""Label by prefix of a metric's name. The rest of the name becomes the label's value."""
EVAL_LABELS = {"component": "component", "pass_at": "k"}
"""In eval/NAME/NUMBER/MEMBER the label for MEMBER, by NUMBER."""
GAUGES = {
    "version": ("version", "newest version of the weights that it knows"),
    "heard_s": ("heard_s", "age of its last heartbeat"),
    # loop/lag_s is a histogram.
    "loop_lag_s": ("loop_lag_max_s", "largest lag of its event loop since the last heartbeat"),
    "loop_busy": ("loop_busy", "share of time in which its event loop's thread used a processor"),
    "cpu": ("cpu", "processors used by it and its children"),
    "rss_bytes": ("rss_bytes", "memory of it and its children"),
}
"""By field of an ActorView: name and description of its gauge."""


@dataclass(slots=True)
class Family:
    """All values of one Prometheus metric, by their labels. ``edges`` are the bucket edges of a histogram."""

    kind: str
    text: str
    values: dict[Labels, float] = field(default_factory=dict)
    histograms: dict[Labels, Histogram] = field(default_factory=dict)
    edges: tuple[float, ...] = ()


def prometheus_name(name: str) -> str:
    """The name of a metric in Prometheus."""
    return "asyncrl_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def families_of(lines: Iterable[Mapping[str, Any]], snapshot: Snapshot | None) -> dict[str, Family]:
    """Makes the families by name, from the newest lines and the newest snapshot.

    ``lines`` has the newest line of each kind, evaluation and replica (rollouter). The update line of a replica that is
    not in the snapshot is skipped, because the replica has left the run. Without a snapshot none is skipped.
    """
    families = _Families()
    present = {actor.name for actor in snapshot.actors} if snapshot is not None else None
    for line in lines:
        if line.get("kind") != "update" or present is None or line.get("replica") in present:
            _add_line(families, line)
    if snapshot is not None:
        families.add("run/phase", 1.0, "1 for the present phase", phase=snapshot.run.phase)
        for name, value in run_values(snapshot).items():
            families.add(name, value, "of the run as a whole")
        for actor in snapshot.actors:
            _add_actor(families, actor)
    return families.by_name


class _Families:
    """Collects values into families by their Prometheus names."""

    def __init__(self) -> None:
        self.by_name: dict[str, Family] = {}

    def add(self, name: str, value: float, text: str, *, kind: str = "gauge", **labels: str) -> None:
        family = self._family(name, Family(kind, text))
        family.values[tuple(sorted(labels.items()))] = float(value)

    def add_histogram(self, name: str, value: Histogram, metric: Metric, **labels: str) -> None:
        family = self._family(name, Family("histogram", metric.text, edges=metric.edges))
        family.histograms[tuple(sorted(labels.items()))] = value

    def _family(self, name: str, new: Family) -> Family:
        """Return the family of this name, ``new`` at the first call. Both must be of one kind."""
        family = self.by_name.setdefault(prometheus_name(name), new)
        assert family.kind == new.kind, f"{name} is a {new.kind}, and its name that of a {family.kind}"
        return family


def _add_line(families: _Families, line: Mapping[str, Any]) -> None:
    """Add the numbers of a train, eval or update line; other kinds have no family."""
    kind = line.get("kind")
    if kind == "train":
        families.add("step", float(line.get("step", 0)), _text("step"))
    for name, value in numbers(dict(line)):
        if kind == "update":
            families.add(f"update/{name.rpartition('/')[2]}", value, _text(name), replica=str(line.get("replica", "")))
        elif kind == "eval" and name.startswith("eval/"):
            evaluation, _, number = name.removeprefix("eval/").partition("/")
            number, _, member = number.partition("/")
            # eval/NAME/pass_at/K gets the label k; eval/NAME/pass_at_k is another metric.
            labels = {EVAL_LABELS.get(number, "of"): member} if member else {}
            families.add(f"eval/{number}", value, _text(name), eval=evaluation, **labels)
        elif kind == "train":
            family, labels = _labelled(name)
            families.add(family, value, _text(name), **labels)


def _add_actor(families: _Families, actor: ActorView) -> None:
    """Add an actor's gauges, metrics, histograms, resources and GPUs, with its name and host as labels."""
    who = {"actor": actor.name, "host": actor.host}
    families.add("actor/up", actor.condition == "ready", "whether it is ready", **who)
    families.add("actor/restarts", actor.restarts, "of the actor", kind="counter", **who)
    for field_name, (name, text) in GAUGES.items():
        families.add(f"actor/{name}", getattr(actor, field_name), text, **who)
    for name, value in actor.metrics.items():
        metric = catalogue.find(name)
        kind = "counter" if metric is not None and "counter" in metric.kinds else "gauge"
        family, labels = _labelled(name)
        families.add(f"actor/{family}", value, _text(name), kind=kind, **labels, **who)
    for name, histogram in actor.histograms.items():
        metric = catalogue.find(name)
        if metric is not None:
            families.add_histogram(f"actor/{name}", histogram, metric, **who)
    for resource in actor.resources:
        for state, seconds in resource.seconds.items():
            labels = {"resource": resource.name, "state": state, **who}
            families.add("resource/seconds", seconds, "spent in each state", kind="counter", **labels)
    for gpu in actor.gpus:
        if gpu.utilisation is not None:
            families.add("gpu/utilisation", gpu.utilisation, "share of time", gpu=str(gpu.index), **who)
        families.add("gpu/memory_bytes", gpu.memory_bytes, "in use", gpu=str(gpu.index), **who)


def _labelled(name: str) -> tuple[str, dict[str, str]]:
    """The name of a metric's family, and the label of its value in that family; no label if the names are equal."""
    for beginning, label in LABELS.items():
        if name.startswith(beginning):
            return beginning[:-1], {label: name.removeprefix(beginning)}
    return name, {}


def _text(name: str) -> str:
    """The description of a metric; its name if it is not declared."""
    metric = catalogue.find(name)
    return metric.text if metric is not None else name


# --- the endpoint ---

ADDRESS_FILE = "monitor/prometheus.json"
"""File with ``{"address": "http://HOST:PORT/metrics"}``, while the endpoint is open."""
CONNECTIONS = 16
CONNECTION_S = 10.0
ACCEPT_PAUSE_S = 0.1
"""Pause after a connection that could not be accepted (s)."""


class PrometheusSink:
    """The endpoint as a sink; see the module."""

    name: ClassVar[str] = "prometheus"

    def __init__(self, run_dir: Path, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._address_file = run_dir / ADDRESS_FILE
        self._lines: dict[tuple[str, ...], Line] = {}
        """The newest line of each kind, evaluation and replica."""
        self._snapshot: Snapshot | None = None
        self._server: WSGIServer | None = None
        self.address = ""

    def open(self) -> None:
        """Bind, serve in a thread, and write the address file if possible. Raises OSError if it cannot bind."""
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server = _make_server(self._host, self._port, registry)
        except OSError as error:
            where = f"sinks.prometheus.host {self._host}, sinks.prometheus.port {self._port}"
            raise OSError(error.errno, f"{where}: {error.strerror}") from error
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.address = f"http://{host}:{self._server.server_port}/metrics"
        # Without the file, as on a full disk, the endpoint still serves; the log has the address too.
        with contextlib.suppress(OSError):
            self._address_file.parent.mkdir(exist_ok=True)
            replace_file(self._address_file, json.dumps({"address": self.address}) + "\n")

    def write(self, record: Line | Snapshot) -> None:
        """Keep a snapshot, or a line as the newest of its kind, and drop the lines that it voids."""
        if isinstance(record, Snapshot):
            self._snapshot = record
            return
        line = record
        evaluations = {name.split("/")[1] for name in line if name.startswith("eval/")}
        key = (str(line.get("kind")), str(line.get("replica", "")), *sorted(evaluations))
        # A new dictionary, because other threads may iterate over the present one.
        self._lines = {key: other for key, other in self._lines.items() if not is_voided(other, line)} | {key: line}

    def close(self) -> None:
        """Close the endpoint."""
        if self._server is not None:
            server, self._server, self.address = self._server, None, ""
            server.shutdown()
            server.server_close()
            with contextlib.suppress(OSError):
                self._address_file.unlink(missing_ok=True)

    def collect(self) -> Iterator[Any]:
        """Yields the metrics for prometheus_client, which calls it in the thread of a connection."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for name, family in families_of(self._lines.values(), self._snapshot).items():
            labels = sorted({label for key in (*family.values, *family.histograms) for label, _ in key})
            if family.kind == "histogram":
                histograms = HistogramMetricFamily(name, family.text, labels=labels)
                for key, held in family.histograms.items():
                    histograms.add_metric(_in_order(key, labels), _buckets(family.edges, held.counts), held.sum)
                yield histograms
                continue
            made = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            values = made(name, family.text, labels=labels)
            for key, value in family.values.items():
                values.add_metric(_in_order(key, labels), value)
            yield values


def _in_order(key: Labels, labels: Sequence[str]) -> list[str]:
    """The values of ``labels`` in ``key``, in the order of ``labels``; empty for a label that it lacks."""
    by_label = dict(key)
    return [by_label.get(label, "") for label in labels]


def _buckets(edges: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """(edge, count) of cumulative buckets, in which Prometheus counts all values up to an edge."""
    names = [*(repr(float(edge)) for edge in edges), "+Inf"]
    return [(name, float(count)) for name, count in zip(names, accumulate(counts), strict=True)]


def _make_server(host: str, port: int, registry: Any) -> WSGIServer:
    """Bind the server of prometheus_client, with limits on the number and the duration of connections."""
    from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app

    class ScrapeServer(ThreadingWSGIServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        block_on_close = False
        clients: ClassVar[dict[Any, threading.Timer]] = {}

        def get_request(self) -> Any:
            """Accept a connection."""
            try:
                return super().get_request()
            except OSError:
                # Without a free descriptor the connection stays pending, and the accept loop would spin.
                time.sleep(ACCEPT_PAUSE_S)
                raise

        def verify_request(self, request: Any, client_address: Any) -> bool:
            """Whether there is room for the connection; if so, sets a timer that ends it after CONNECTION_S."""
            if len(self.clients) >= CONNECTIONS:
                return False
            timer = self.clients[request] = threading.Timer(CONNECTION_S, _cut_off, (request,))
            timer.daemon = True
            timer.start()
            return True

        def shutdown_request(self, request: Any) -> None:
            """Close the connection, and make room for another one."""
            if (timer := self.clients.pop(request, None)) is not None:
                timer.cancel()
            super().shutdown_request(request)

        def server_close(self) -> None:
            """End all connections."""
            super().server_close()
            for client in list(self.clients):
                _cut_off(client)

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore a client that left or was cut off."""

    class ScrapeHandler(WSGIRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    return make_server(host, port, make_wsgi_app(registry), ScrapeServer, ScrapeHandler)


def _cut_off(client: socket.socket) -> None:
    """End a connection; its thread then ends by itself."""
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)
