"""Compiles kernels, in several processes where there are many kernels and cores.

The numbers of the kernels to compile lie in a pipe, from which each process takes the next one
until it is empty; what it has compiled, the others find in the cache.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING

import msgspec

from paramserve import kernel_folder
from paramserve.engine.prepared import search_path
from paramserve.kernel_sets import KernelSet
from paramserve.logs import write_line
from paramserve.machine import cores

if TYPE_CHECKING:
    from paramserve.kernel_cache import Kernel, Signature

PROCESSES_MAX = 8
KERNELS_EACH_MIN = 6
"""Kernels for each process: it needs as long as for some of them to import what it needs."""
PROGRESS_S = 2.0
"""Seconds between two lines that say how far it is."""
LAST_S = 30.0
"""Seconds to wait for what other processes compile at last; then it is compiled here."""
_NUMBER_BYTES = 2
_PROGRAM = """\
import os, sys
sys.path[:] = os.fsdecode({path!r}).split("\\0")
from paramserve.compilers import take_part
take_part({described!r}, {parent})
"""
"""Sets this process's `sys.path` first: nothing is imported from elsewhere, as a working folder."""


def compile_missing(sets: Sequence[KernelSet]) -> int:
    """Compile what the cache does not have yet of these kernels, and say so on stderr; how many
    these were. Those that this process has compiled are loaded.

    Where another process fails, or is ended, this one compiles what is left.
    """
    from paramserve import kernel_cache

    pairs = _pairs(sets)
    missing = _missing(pairs)
    if not missing:
        return 0
    folder = kernel_folder.choose().folder
    processes = 1
    if folder is not None:
        processes = max(1, min(cores(), PROCESSES_MAX, len(missing) // KERNELS_EACH_MIN))
    progress = _Progress(sets, missing, processes)

    def compile_one(number: int) -> None:
        kernel_cache.load(dict([pairs[number]]))
        progress.tell(lambda at: kernel_cache.compiled(dict([pairs[at]])))

    # The kernels of rules, which stand last, take longest.
    with _queue(missing[::-1]) as queue, _others(sets, processes - 1, queue):
        for number in _numbers(queue):
            compile_one(number)
    for number in missing:  # those that another process has failed to compile
        if not kernel_cache.compiled(dict([pairs[number]])):
            compile_one(number)
    return len(missing)


def take_part(described: bytes, parent: int) -> None:
    """Compile as one of the other processes, while the one that started it lives.

    The pipe is stdin.

    Args:
        described: the sets, as JSON.
        parent: the pid of that process.
    """
    from paramserve import kernel_cache

    pairs = _pairs(msgspec.json.decode(described, type=list[KernelSet]))
    with open(0, "rb", buffering=0, closefd=False) as queue:
        for number in _numbers(queue):
            if os.getppid() != parent:
                return
            kernel_cache.load(dict([pairs[number]]))


def missing(sets: Sequence[KernelSet]) -> int:
    """How many of these kernels no folder has."""
    return len(_missing(_pairs(sets)))


def _missing(pairs: Sequence[tuple[Kernel, Signature]]) -> list[int]:
    from paramserve import kernel_cache

    return [at for at, pair in enumerate(pairs) if not kernel_cache.compiled(dict([pair]))]


def _pairs(sets: Sequence[KernelSet]) -> list[tuple[Kernel, Signature]]:
    """Each kernel with each of its signatures, in the same order in every process."""
    return list(dict.fromkeys(pair for each in sets for pair in each.kernels().items()))


@contextlib.contextmanager
def _queue(numbers: Sequence[int]) -> Iterator[IO[bytes]]:
    """A pipe with these numbers, which ends behind them."""
    reader, writer = os.pipe()
    # A fork of this process by another thread may keep the writer: an empty pipe is the end, too.
    os.set_blocking(reader, False)
    with open(reader, "rb", buffering=0) as queue:
        with open(writer, "wb", buffering=0) as end:
            end.write(b"".join(each.to_bytes(_NUMBER_BYTES, "big") for each in numbers))
        yield queue


def _numbers(queue: IO[bytes]) -> Iterator[int]:
    while number := queue.read(_NUMBER_BYTES):
        yield int.from_bytes(number, "big")


@contextlib.contextmanager
def _others(sets: Sequence[KernelSet], count: int, queue: IO[bytes]) -> Iterator[None]:
    """Run other processes that compile meanwhile. They are ended where the block is left early,
    and where they take too long for their last kernels."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count if sys.executable else 0):
            program = _PROGRAM.format(
                path=search_path(), described=msgspec.json.encode(list(sets)), parent=os.getpid()
            )
            with contextlib.suppress(OSError):  # no process more can be had: there is this one
                started.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-c", program],
                        stdin=queue,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                    )
                )
        yield
        until = time.monotonic() + LAST_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in started:
                process.wait(max(0.0, until - time.monotonic()))
    finally:
        for process in started:
            process.kill()
            process.wait()


class _Progress:
    """What is written while kernels are compiled."""

    def __init__(self, sets: Sequence[KernelSet], missing: Sequence[int], processes: int) -> None:
        self._missing = list(missing)
        self._count = len(missing)
        self._begin: tuple[float, int] | None = None
        """When this process had compiled its first kernel, which takes longer as what compiles is
        imported for it, and how many there were then."""
        self._written_at = time.monotonic()
        folder = kernel_folder.choose().folder
        where = f"in {folder}" if folder is not None else "nowhere: see `paramserve doctor`"
        what = str(sets[0]) if len(sets) == 1 else f"{len(sets)} uses"
        several = f" in up to {processes} processes" if processes > 1 else ""
        write_line(f"compiling {in_words(self._count)} for {what}{several}; kept {where}")

    def tell(self, compiled: Callable[[int], bool]) -> None:
        """Write how far it is, and how long it may take yet, if that was not written just now.

        Args:
            compiled: whether the kernel of this place is.
        """
        now = time.monotonic()
        if self._begin is not None and now < self._written_at + PROGRESS_S:
            return
        self._missing = [each for each in self._missing if not compiled(each)]
        done, remaining = self._count - len(self._missing), len(self._missing)
        if self._begin is None:
            self._begin = now, done
            return
        self._written_at = now
        began, before = self._begin
        if done > before and remaining:
            wait_s = (now - began) / (done - before) * remaining
            write_line(f"{done} of {self._count} kernels are compiled, about {wait_s:.0f} s left")


def in_words(count: int) -> str:
    """Count of kernels in words."""
    return f"{count} kernel{'s' if count != 1 else ''}"
