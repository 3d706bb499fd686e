"""Entries that the engine suite runs in other processes; imports little, as roles should.

An engine may run them in a thread: no signal handlers here.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from paramserve import Worker
    from paramserve.engine.child import Bootstrap

RANKS, INCARNATIONS = 4, 3
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


def echo(boot: Bootstrap) -> None:
    boot.report("name", boot.name.encode())
    boot.report("payload", boot.payload)
    boot.report("secret", boot.secret)


def environment(boot: Bootstrap) -> None:
    boot.report("value", os.environ.get(boot.payload.decode(), "unset").encode())


def hashes(boot: Bootstrap) -> None:
    """What Python's own hash makes of a string, here and in a process that this one starts."""
    code = "print(hash('anna'))"
    started = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, check=True)
    boot.report("hashes", b"%d %s" % (hash("anna"), started.stdout.strip()))


def draw(boot: Bootstrap) -> None:
    """What it draws at random."""
    import random

    import numpy as np

    boot.report("drawn", repr((random.random(), np.random.random())).encode())


def streams(boot: Bootstrap) -> None:
    """Write to both, and tell where it is."""
    print("to stdout")
    print("to stderr", file=sys.stderr)
    boot.report("here", os.getcwd().encode())


def exit_with(boot: Bootstrap) -> NoReturn:
    sys.exit(int(boot.payload))


def fail(boot: Bootstrap) -> NoReturn:
    raise LookupError(f"no {boot.payload.decode()} here")


def pause(boot: Bootstrap) -> None:
    """Wait; tell when an orderly end comes."""
    never = threading.Event()
    try:
        boot.report("up", str(os.getpid()).encode())
        while True:
            never.wait(0.01)
    finally:
        boot.report("cleaned", b"")


def serve(boot: Bootstrap) -> None:
    """Serve until a callback says to end, as roles do."""
    stopped = threading.Event()
    boot.on_stop(stopped.set)
    boot.report("up", str(os.getpid()).encode())
    stopped.wait()
    boot.report("cleaned", b"")


def where(boot: Bootstrap) -> None:
    """Report the address of this node, for others."""
    boot.report("host", boot.host.encode())


def code(boot: Bootstrap) -> None:
    """Call what the owner registered."""
    loaded = boot.load()
    boot.report("answer", repr(loaded if loaded is None else loaded()).encode())


def spin(boot: Bootstrap) -> NoReturn:
    """Keep the entry's thread busy, deaf to everything."""
    boot.on_stop(lambda: None)
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
        threading.Event().wait()
    other.returncode = 0  # the engine ends it: no warning here that it still runs


def descriptors(boot: Bootstrap) -> None:
    """Report what this process has inherited that a program started by it would inherit too."""
    found = [int(name) for name in os.listdir("/dev/fd")]
    kept = [fd for fd in found if fd > 2 and _inheritable(fd)]
    boot.report("kept", repr(kept).encode())


def inherited(boot: Bootstrap) -> None:
    """Report what a process has before its entry has done anything, as JSON."""
    held = [
        f"{module}.{name}"
        for module, names in [*sys.modules.items()]
        for name, value in [*getattr(names, "__dict__", {}).items()]
        if _held(value)
    ]
    told = {
        "files": [each for each in map(_file_of, os.listdir("/proc/self/fd")) if each],
        "tasks": len(os.listdir("/proc/self/task")),
        "threads": [each.name for each in threading.enumerate()],
        "held": held,
        "collector": gc.isenabled(),
        "torch": "torch" in sys.modules,
    }
    boot.report("inherited", json.dumps(told).encode())


def _file_of(fd: str) -> str:
    """What a descriptor is, without the number that the system gives it."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}").partition(":[")[0]
    except OSError:  # the listing's own
        return ""


def _held(value: object) -> bool:
    """Whether it is a lock, or something around one, that a thread has taken."""
    inner = getattr(value, "__dict__", {}) if type(value) is not type else {}
    locks = [value, *(inner.get(name) for name in ("_lock", "_block", "lock"))]
    return any(isinstance(lock, _LOCKS) and repr(lock).startswith("<locked") for lock in locks)


def _inheritable(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:  # the listing's own
        return False


def adds(worker: Worker) -> list[int]:
    """A training function: add ones in this incarnation's own place, until the driver says that it
    is enough or that this worker is to end. Returns the incarnation and how often it has added."""
    import numpy as np

    import paramserve as ps

    client, steps = worker.client, 0
    one = np.zeros((RANKS, INCARNATIONS))
    client.define("w", one, rule=ps.Add())
    client.define("enough", np.zeros(1), rule=ps.Add(), group="control")
    one[worker.rank, worker.incarnation] = 1.0
    while not (client.steps.retiring or client.pull("enough")[0]):
        client.push_pull({"w": one}, tick=True)
        steps += 1
    return [worker.incarnation, steps]
