"""Entries that the engine suite runs in child processes; imports little, as roles should."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from paramserve.engine.child import Bootstrap


def echo(boot: Bootstrap) -> None:
    boot.report("name", boot.name.encode())
    boot.report("payload", boot.payload)
    boot.report("secret", boot.secret)


def environment(boot: Bootstrap) -> None:
    boot.report("value", os.environ.get(boot.payload.decode(), "unset").encode())


def exit_with(boot: Bootstrap) -> NoReturn:
    sys.exit(int(boot.payload))


def fail(boot: Bootstrap) -> NoReturn:
    raise LookupError(f"no {boot.payload.decode()} here")


def pause(boot: Bootstrap) -> None:
    """Wait for a signal; tell when an orderly end comes."""
    boot.report("up", str(os.getpid()).encode())
    try:
        while True:
            signal.pause()
    finally:
        boot.report("cleaned", b"")


def spin(boot: Bootstrap) -> NoReturn:
    """Keep the main thread busy, deaf to everything."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    marker = Path(boot.payload.decode())
    boot.on_orphaned(marker.touch)
    boot.report("up", str(os.getpid()).encode())
    while True:
        pass


def interrupt_self(boot: Bootstrap) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    boot.report("survived", b"")


def start_another(boot: Bootstrap) -> None:
    """Start a process, as a DataLoader does; end at once if the payload says so."""
    waits = "import signal; signal.pause()"
    other = subprocess.Popen([sys.executable, "-S", "-c", waits], stdin=subprocess.DEVNULL)
    boot.report("started", str(other.pid).encode())
    if boot.payload != b"end":
        signal.pause()
    other.returncode = 0  # the engine ends it: no warning here that it still runs


def descriptors(boot: Bootstrap) -> None:
    """Report what this process has inherited that a program started by it would inherit too."""
    found = [int(name) for name in os.listdir("/dev/fd")]
    kept = [fd for fd in found if fd > 2 and _inheritable(fd)]
    boot.report("kept", repr(kept).encode())


def _inheritable(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:  # the listing's own
        return False
