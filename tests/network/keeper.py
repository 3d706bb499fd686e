"""A process beside the tests that starts the processes on the hosts, and cleans up after all.

It has loaded the package once, so that a process on a host is a fork of it and starts at once. When
its standard input ends, because the tests are done or because they were killed, it kills what it
has started and removes the network namespaces.

    python -m tests.network.keeper PREFIX

One line of JSON in for each process: namespace (empty: this machine's own), function (of
`tests.network.roles`), file that it tells to, arguments. One line out: its pid.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

NAMESPACES = Path("/run/netns")
_NETWORK = 0x40000000
"""CLONE_NEWNET of setns(2)."""


def enter(namespace: str) -> None:
    """Move this thread, and those that it starts, to a host's network."""
    with (NAMESPACES / namespace).open() as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")


class Teller:
    """Where a process on a host says what happens: one line of JSON each."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def __call__(self, **what: Any) -> None:
        os.write(self._fd, json.dumps(what).encode() + b"\n")


class _TellsLogs(logging.Handler):
    def __init__(self, tell: Teller) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(log=record.getMessage(), level=record.levelname)


def _child(order: dict[str, Any]) -> None:
    from tests.network import roles

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    tell = Teller(order["file"])
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    logger = logging.getLogger("paramserve")
    logger.setLevel(logging.DEBUG)  # connections that are made anew are told at debug
    logger.addHandler(_TellsLogs(tell))
    try:
        if order["namespace"]:
            enter(order["namespace"])
        getattr(roles, order["function"])(tell, **order["arguments"])
    except BaseException as error:
        text = traceback.format_exc()
        tell(error=type(error).__name__, text=str(error), trace=text)
        os._exit(1)
    tell(returned=True)
    os._exit(0)


def main(prefix: str) -> None:
    from tests.network import roles

    roles.load()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children need no waiting for
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which end this one
    started: list[int] = []
    print("loaded", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            _child(order)
        started.append(os.pidfd_open(pid))
        print(pid, flush=True)
    for fd in started:  # a pid could be another process's by now, a descriptor cannot
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for path in NAMESPACES.glob(f"{prefix}-*"):
        subprocess.run(["ip", "netns", "del", path.name], check=False)


if __name__ == "__main__":
    main(sys.argv[1])
