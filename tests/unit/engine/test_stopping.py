"""A process that is asked to end ends, whatever it is just executing."""

from __future__ import annotations

import subprocess
import sys

from paramserve.engine.child import EXIT_TERMINATED

PROGRAM = """
import os, signal, time
from paramserve.engine.child import Stopping, stop_on_sigterm

class Late:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):  # the signal is handled in here
            pass
        print("finalized", flush=True)

stop_on_sigterm(Stopping())
{call}
time.sleep(20)
print("goes on")
"""


def ended(call: str) -> tuple[int, str, str]:
    code = [sys.executable, "-c", PROGRAM.format(call=call)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_signal_ends_a_process_in_order() -> None:
    assert ended("os.kill(os.getpid(), signal.SIGTERM)") == (EXIT_TERMINATED, "", "")


def test_signal_that_comes_in_a_finalizer_is_not_lost() -> None:
    assert ended("Late()") == (EXIT_TERMINATED, "finalized\n", "")


ENDS = """
import atexit, io, msgspec, os, signal
from paramserve.engine import child

def call(number, handler, plain=signal.signal):
    if handler is signal.SIG_IGN and number == signal.SIGTERM:
        os.kill(os.getpid(), number)  # it comes when the entry has returned
    return plain(number, handler)

signal.signal = call
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
package = child.Package("worker", "builtins:id", b"", b"", b"", "")
_, reports = os.pipe()
child.main(io.BytesIO(msgspec.msgpack.encode(package)), reports, os.getppid())
print("ends")
"""


def test_signals_behind_the_end_of_the_entry_change_nothing() -> None:
    ends = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60)
    assert (ends.returncode, ends.stdout, ends.stderr) == (0, "ends\n", "")
