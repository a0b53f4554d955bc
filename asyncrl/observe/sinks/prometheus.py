"""The Prometheus endpoint: /metrics over HTTP with the newest metrics, on the server of prometheus_client.

At most CONNECTIONS clients are served at once, each in its own thread, for at most CONNECTION_S. Each client that
reaches the port may read. Raises OSError if the address cannot be bound.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from asyncrl.core.files import replace_file
from asyncrl.messages.snapshot import Snapshot
from asyncrl.observe.metrics_line import is_voided
from asyncrl.observe.sinks.entries import Line
from asyncrl.observe.sinks.exposition import Labels, families_of

ADDRESS_FILE = "monitor/prometheus.json"
"""``{"address": "http://HOST:PORT/metrics"}``, while the endpoint is open."""
CONNECTIONS = 16
CONNECTION_S = 10.0
ACCEPT_PAUSE_S = 0.1
"""Pause after a connection that could not be accepted."""


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
        """Bind, and write the address file."""
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
        # The endpoint serves also if the disk is full; the log has the address too.
        with contextlib.suppress(OSError):
            self._address_file.parent.mkdir(exist_ok=True)
            replace_file(self._address_file, json.dumps({"address": self.address}) + "\n")

    def write(self, record: Line | Snapshot) -> None:
        """Keep the newest record of its kind."""
        if isinstance(record, Snapshot):
            self._snapshot = record
            return
        line = record
        names = {key.split("/")[1] for key in line if key.startswith("eval/")}
        key = (str(line.get("kind")), str(line.get("replica", "")), *sorted(names))
        # A new dictionary: other threads iterate over the present one.
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


def _make_server(host: str, port: int, registry: Any) -> WSGIServer:
    """The package's own server, bound, with bounds on its clients."""
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
                # Without a free descriptor the connection stays pending, and accept would spin.
                time.sleep(ACCEPT_PAUSE_S)
                raise

        def verify_request(self, request: Any, client_address: Any) -> bool:
            """Whether there is room for the connection; it is closed after CONNECTION_S."""
            if len(self.clients) >= CONNECTIONS:
                return False
            timer = self.clients[request] = threading.Timer(CONNECTION_S, _cut_off, (request,))
            timer.daemon = True
            timer.start()
            return True

        def shutdown_request(self, request: Any) -> None:
            """Forget the connection."""
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
