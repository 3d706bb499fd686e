"""A run's metrics for Prometheus to fetch."""

from __future__ import annotations

import contextlib
import errno
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from paramserve.errors import ParamServeError
from paramserve.observe.metrics import Family, Sample
from paramserve.reporters.base import Report, Reporter, RunInfo
from paramserve.reporters.feeding import missing
from paramserve.transport.tcp import family_of, join_place

PORT = 9464
"""The first that is tried: the one of OpenTelemetry's exporter for Prometheus."""
PORTS_TRIED = 32


CONNECTIONS_MAX = 16
REQUEST_S = 5.0
"""How long a connection may take, from its first byte to the last of its answer."""
POLL_S = 0.25
"""Seconds between two looks for connections that take longer."""


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: any client that reaches the port would fill the log."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Answers each request in a thread of its own, with bounds on what peers can hold of this
    process: it may be that of the first server, whose descriptors and threads are needed."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, app: Any) -> None:
        self.address_family = family_of(host)
        self._opened = dict[socket.socket, float]()
        """Connections with the time when they came, the oldest first."""
        self._lock = threading.Lock()
        super().__init__((host, port), _Silent)
        self.set_app(app)

    def get_request(self) -> Any:
        """Accept a connection. Where that fails, as without a free descriptor, it still waits:
        `serve_forever` would come back at once, for as long as that lasts."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(POLL_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            crowded = [*self._opened][: len(self._opened) + 1 - CONNECTIONS_MAX]
            self._end(crowded)
            self._opened[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self.shutdown_request(request)
            raise

    def service_actions(self) -> None:
        """End connections that take too long."""
        late = time.monotonic() - REQUEST_S
        with self._lock:
            self._end([each for each, since in self._opened.items() if since < late])

    def _end(self, connections: list[socket.socket]) -> None:
        """End connections; their threads, which read or write there, see it and close them."""
        for each in connections:
            del self._opened[each]
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._opened.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a peer that goes while it is answered is no error."""


class Prometheus(Reporter):
    """Serve a run's metrics over HTTP, at http://<host>:<port>/metrics.

    A scrape reads what was last reported, up to a second ago: it asks no server and no worker.
    There are at most 16 connections at a time, of 5 s each; the next one ends the oldest.
    Any client that reaches the port can read the metrics: they hold names of groups and of what
    workers log, and no secret.

    Example:
        ps.run(train, report_to=[ps.Prometheus(port=9464)])

    Args:
        port: None: the first free one from 9464 on, which a line on standard error tells. 0: any.
        host: what to listen on; "0.0.0.0" lets other hosts in.
    Attributes:
        address: "<host>:<port>" that it listens on, IPv6 in brackets; empty before the run.
    Raises:
        ParamServeError: of `ps.run`, before anything is started: the port is in use, or
            prometheus_client is missing.
    """

    def __init__(self, port: int | None = None, *, host: str = "127.0.0.1") -> None:
        if port is not None and not 0 <= port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, not {port}")
        self.port = port
        self.host = host.strip("[]")
        self.address = ""
        self._samples: Sequence[Sample] = ()
        self._server: MetricsServer | None = None
        self._thread: threading.Thread | None = None
        self._core: Any = None

    def open(self, run: RunInfo) -> None:
        try:
            client = import_module("prometheus_client")
            self._core = import_module("prometheus_client.core")
        except ImportError as error:
            raise missing("prometheus_client", "Prometheus", error) from None
        registry = client.CollectorRegistry()
        registry.register(self)
        ports = [self.port] if self.port is not None else range(PORT, PORT + PORTS_TRIED)
        for port in ports:
            try:
                self._server = MetricsServer(self.host, port, client.make_wsgi_app(registry))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise _cannot_listen(self.host, port, error.strerror) from error
                continue
            host, bound = self._server.server_address[:2]
            self.address = join_place(str(host), bound)
            self._thread = threading.Thread(
                target=self._server.serve_forever,
                args=(POLL_S,),
                name="paramserve-metrics",
                daemon=True,
            )
            self._thread.start()
            return
        tried = str(self.port) if self.port is not None else f"{ports[0]} to {ports[-1]}"
        raise _cannot_listen(self.host, tried, f"in use{_owner(self.port)}")

    def collect(self) -> Iterator[Any]:
        """What prometheus_client asks for at each scrape."""
        families: dict[Family, Any] = {}
        kinds = {
            "counter": self._core.CounterMetricFamily,
            "gauge": self._core.GaugeMetricFamily,
        }
        for family, labels, value in self._samples:
            if family not in families:
                names = [name for name, _ in labels]
                families[family] = kinds[family.kind](family.name, family.help, labels=names)
            families[family].add_metric([each for _, each in labels], value)
        yield from families.values()

    def report(self, report: Report) -> None:
        self._samples = report.samples

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._thread is not None:
            self._thread.join()


def _cannot_listen(host: str, port: object, why: str | None) -> ParamServeError:
    return ParamServeError(
        f"ps.Prometheus cannot listen on {host}, port {port}: {why}",
        fix="name another port, or none for the first free one",
    )


def _owner(port: int | None) -> str:
    """Which process listens there, where that can be known."""
    try:
        output = subprocess.run(
            ["ss", "-Hltnp", f"sport = :{port}"], capture_output=True, text=True, timeout=2.0
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    match = re.search(r'"([^"]*)",pid=(\d+)', output)
    return f" by process {match[2]} ({match[1]})" if match else ""
