"""How Ray is imported, this process's connection to it, and bounded calls of its control service.

The connection is made when it is needed first, and ended when the last user leaves. The control
service may hang with its node, and a process may leave the cluster at any time: neither is an error
here, and shows elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from paramserve.errors import ParamServeError

DIAL_S = 3.0


class Connection:
    """This process's connection to Ray: its users, and whether this package is to end it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._ours = False

    def enter(
        self,
        ray: ModuleType,
        address: str | None,
        init: Mapping[str, Any],
        *,
        start: bool = True,
    ) -> Callable[[], None]:
        """Connect, unless this process is connected.

        Args:
            start: whether a new Ray may be started where no running one is meant; else it is
                the one that runs on this machine.
        Returns:
            What ends this use of the connection; repeating is safe.
        Raises:
            ParamServeError: no connection to this address.
        """
        with self._lock:
            if ray.is_initialized():
                _check_same(ray, address)
                self._ours = self._ours and self._users > 0
            else:
                _connect(ray, address, init, start)
                self._ours = True
            self._users += 1
        departed = threading.Event()

        def leave() -> None:
            with self._lock:
                if departed.is_set():
                    return
                departed.set()
                self._users -= 1
                if self._users == 0 and self._ours:
                    self._ours = False
                    ray.shutdown()

        return leave


CONNECTION = Connection()


def _connect(ray: ModuleType, address: str | None, init: Mapping[str, Any], start: bool) -> None:
    named = named_cluster(address)
    target = named if named is not None else "local" if start else "auto"
    options: dict[str, Any] = {"logging_level": logging.WARNING}
    if target == "local":
        options["include_dashboard"] = False
    try:
        check_address(target)
        _dial(target)
        ray.init(address=target, **{**options, **init})
    except Exception as error:
        raise ParamServeError(
            f"Ray could not be {'started' if target == 'local' else f'reached at {target!r}'}: "
            f"{error}",
            fix="give the address that `ray start --head` showed, with the same versions of Ray "
            "and Python here and there"
            + (", or address=None for a new Ray on this machine" if start else ""),
        ) from error


def named_cluster(address: str | None) -> str | None:
    """The running cluster that is meant; None: a new one on this machine."""
    cluster = address if address is not None else os.environ.get("RAY_ADDRESS")
    return cluster if cluster and cluster != "local" else None


def _check_same(ray: ModuleType, address: str | None) -> None:
    """Raise unless the connection that there is goes to the cluster that is meant."""
    if address is None or ":" not in address:
        return
    connected = ray.get_runtime_context().gcs_address
    if _resolved(address) != _resolved(connected):
        raise ParamServeError(
            f"this process is connected to Ray at {connected}, not at {address}",
            fix="leave address out to use that one, or call ray.shutdown() first",
        )


def _resolved(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    bare = host.strip("[]")
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)[0][4][0]), port
    return bare, port


def check_address(address: str) -> None:
    """Raise `TypeError` or `ValueError` unless this names a cluster."""
    if not isinstance(address, str):
        raise TypeError(f"address must be a str or None, not {address!r}")
    if address.startswith("ray://"):
        raise ValueError(
            f"{address!r} is the address of a Ray Client, from which the processes of a cluster "
            "cannot be reached; to fix: start the driver on a node of the cluster, with "
            "`ray job submit`, and use address='auto'"
        )
    _, colon, port = address.rpartition(":")
    if address not in ("auto", "local") and not (colon and port.isdecimal()):
        raise ValueError(f"address must be 'auto' or 'host:port', not {address!r}")


def _dial(address: str) -> None:
    """Raise at once where no process listens; Ray itself tries for long and then ends the
    process."""
    host, _, port = address.rpartition(":")
    if host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=DIAL_S).close()


RAY_OLDEST = (2, 49)
"""The first whose placement groups have label selectors for bundles."""
CONTROL_S = 1.0
"""How long a call to Ray's own control service may hold up its caller."""
LOOK_S = 0.25
"""How often a wait looks up: for Ctrl-C, and for ends that another thread has seen."""
RETRY_S = 0.1
"""Seconds between calls to a process that Ray cannot reach and does not count as dead."""


def import_ray() -> ModuleType:
    """The module ray.

    Where it is imported here first, it shows the lines of all workers: by default it merges those
    of several that differ in digits only, and holds them back for 5 s. It reads that setting when
    it is imported, so a program that has imported it before has set it, or not.

    Raises:
        ParamServeError: it is not installed, or too old.
    """
    if "ray" not in sys.modules:
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    try:
        import ray
    except ImportError as error:
        raise ParamServeError(
            f"ps.OnRay needs Ray, which cannot be imported ({error})",
            fix="pip install 'paramserve[ray]'",
        ) from error
    if tuple(int(part) for part in ray.__version__.split(".")[:2]) < RAY_OLDEST:
        oldest = ".".join(map(str, RAY_OLDEST))
        raise ParamServeError(
            f"ps.OnRay needs Ray {oldest} or newer, and this is {ray.__version__}",
            fix="pip install --upgrade 'paramserve[ray]', here and on every node",
        )
    return ray


def bounded(call: Callable[[], object]) -> None:
    """Make a call to Ray's control service, which may hang with its node, and wait a while."""

    def run() -> None:
        with contextlib.suppress(Exception):  # it is gone: that is seen elsewhere
            call()

    thread = threading.Thread(target=run, name="paramserve-ray", daemon=True)
    thread.start()
    thread.join(CONTROL_S)


def kill_actor(actor: Any) -> None:
    """End an actor at once, unless this process has left the cluster: then it is gone."""
    import ray

    if ray.is_initialized():
        bounded(lambda: ray.kill(actor, no_restart=True))
