"""An endpoint for Prometheus: /metrics over HTTP, the newest figures of the run.

A client costs the others nothing: each has a thread of its own, CONNECTIONS at most at once, and is cut off after
CONNECTION_S whatever it does. Anybody who reaches the port may read; nothing can be written. Fails with OSError when
the address cannot be bound.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

from asyncrl.files import replace_file
from asyncrl.sinks.exposition import Labels, families_of
from asyncrl.sinks.records import Line, PrometheusSetup, Setup
from asyncrl.snapshot import Snapshot
from asyncrl.telemetry.metrics_line import is_voided

ADDRESS_FILE = "monitor/prometheus.json"
"""``{"address": "http://HOST:PORT/metrics"}``, while the endpoint is there."""
CONNECTIONS = 16
CONNECTION_S = 10.0
LOOK_S = 0.5


class PrometheusSink:
    """The endpoint as a sink; the module tells its rules."""

    name: ClassVar[str] = "prometheus"

    def __init__(self, setup: Setup, prometheus: PrometheusSetup) -> None:
        self._bind = prometheus
        self._address_file = Path(setup.run_dir) / ADDRESS_FILE
        self._lines: dict[tuple[str, ...], dict[str, Any]] = {}
        """The newest line of each kind, evaluation and replica."""
        self._snapshot: Snapshot | None = None
        self._server: _Server | None = None
        self.address = ""

    def open(self) -> None:
        """Bind, and tell the address."""
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server = _Server(self._bind.host, self._bind.port, registry)
        except OSError as error:
            where = f"sinks.prometheus.host {self._bind.host}, sinks.prometheus.port {self._bind.port}"
            raise OSError(error.errno, f"{where}: {error.strerror}") from error
        threading.Thread(target=self._server.serve_forever, args=(LOOK_S,), daemon=True).start()
        host = f"[{self._bind.host}]" if ":" in self._bind.host else self._bind.host
        self.address = f"http://{host}:{self._server.server_address[1]}/metrics"
        # A full disk is no reason not to serve; the address is in the controller's log too.
        with contextlib.suppress(OSError):
            self._address_file.parent.mkdir(exist_ok=True)
            replace_file(self._address_file, json.dumps({"address": self.address}) + "\n")

    def write(self, record: Line | Snapshot) -> None:
        """Take a record: the newest counts."""
        if isinstance(record, Snapshot):
            self._snapshot = record
            return
        line = record.line
        names = {key.split("/")[1] for key in line if key.startswith("eval/")}
        key = (str(line.get("kind")), str(line.get("replica", "")), *sorted(names))
        # Another dictionary: those who collect go through the present one.
        self._lines = {key: other for key, other in self._lines.items() if not is_voided(other, line)} | {key: line}

    def close(self) -> None:
        """Take the endpoint away."""
        if self._server is not None:
            server, self._server, self.address = self._server, None, ""
            server.shutdown()
            server.cut_off(older_than_s=0.0)
            server.server_close()
            with contextlib.suppress(OSError):
                self._address_file.unlink(missing_ok=True)

    def collect(self) -> Iterator[Any]:
        """Metrics for prometheus_client, from the thread of a client."""
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
    held = dict(key)
    return [held.get(label, "") for label in labels]


def _buckets(edges: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulative buckets: Prometheus counts all up to an edge."""
    names = [*(repr(float(edge)) for edge in edges), "+Inf"]
    return [(name, float(count)) for name, count in zip(names, accumulate(counts), strict=True)]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = CONNECTIONS

    def __init__(self, host: str, port: int, registry: Any) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.registry = registry
        self._lock = threading.Lock()
        self._since: dict[socket.socket, float] = {}
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without the look-up of our own name, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        socket.socket.bind(self.socket, self.server_address)
        self.server_address = self.socket.getsockname()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for the connection."""
        with self._lock:
            if len(self._since) >= CONNECTIONS:
                return False
            self._since[request] = time.monotonic()
            return True

    def shutdown_request(self, request: Any) -> None:
        """Forget the connection."""
        with self._lock:
            self._since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut off slow connections, every LOOK_S."""
        self.cut_off(CONNECTION_S)

    def cut_off(self, older_than_s: float) -> None:
        """End the connections that take too long; their threads then end by themselves."""
        now = time.monotonic()
        with self._lock:
            for request, since in self._since.items():
                if now - since >= older_than_s:
                    with contextlib.suppress(OSError):
                        request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away or was cut off is nobody's concern."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = CONNECTION_S

    def do_GET(self) -> None:
        """The figures, in the format that is asked for."""
        from prometheus_client.exposition import choose_encoder

        if self.path.partition("?")[0] not in ("/metrics", "/"):
            self.send_error(404)
            return
        encode, kind = choose_encoder(self.headers.get("Accept", ""))
        body = encode(self.server.registry)
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep messages of the server out of the log of the run."""
