"""The event loop of one simulated process: what its driver uses in place of asyncio's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from paramserve.virtual import VirtualClock

T = TypeVar("T")
Callback = Callable[[], object]

TURN_S = 100e-6
"""One turn of the loop takes this long: time goes on also where a process polls."""
LOOK_S = 1e-2
"""A descriptor with a writer is writable after this, if no file says when."""


class File(Protocol):
    """What is behind a descriptor, and says when it can be used."""

    @property
    def readable(self) -> bool: ...

    @property
    def writable(self) -> bool: ...


class VirtualHandle:
    """A planned call."""

    __slots__ = ("do",)

    def __init__(self, do: Callback) -> None:
        self.do: Callback | None = do

    def cancel(self) -> None:
        self.do = None


class VirtualPending(Generic[T]):
    """The result of a function that takes virtual time in a thread of its own."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[Any], object]] = []
        self._result: list[T] = []
        self._error: Exception | None = None

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        self._callbacks.append(callback)

    def run(self, function: Callable[[], T]) -> None:
        """The function ends now."""
        try:
            self._result.append(function())
        except Exception as error:
            self._error = error
        for callback in self._callbacks:
            callback(self)

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result[0]


class VirtualLoop:
    """A `transport.loop.Loop` in virtual time.

    Args:
        thread_s: says how long the next function takes in a thread.
    """

    def __init__(self, clock: VirtualClock, thread_s: Callable[[], float] = lambda: 0.0) -> None:
        self.clock = clock
        self._thread_s = thread_s
        self._frozen_until = 0.0
        self._readers: dict[int, Callback] = {}
        self._readable: set[int] = set()
        self._writers: dict[int, Callback] = {}
        self._writing: set[int] = set()
        self.files: dict[int, File] = {}
        """Files by descriptor."""

    # --- what a driver uses -------------------------------------------------------------

    def time(self) -> float:
        return self.clock.now

    def call_soon(self, callback: Callback, /) -> VirtualHandle:
        return self.call_later(TURN_S, callback)

    def call_later(self, delay_s: float, callback: Callback, /) -> VirtualHandle:
        handle = VirtualHandle(callback)
        self.clock.at(self.clock.now + delay_s, self._run, handle)
        return handle

    def _run(self, handle: VirtualHandle) -> None:
        if self.clock.now < self._frozen_until:
            self.clock.at(self._frozen_until, self._run, handle)
        elif handle.do is not None:
            handle.do()

    def run_in_executor(self, executor: None, function: Callable[[], T], /) -> VirtualPending[T]:
        pending: VirtualPending[T] = VirtualPending()
        self.call_later(self._thread_s(), partial(pending.run, function))
        return pending

    def add_reader(self, fd: int, callback: Callback, /) -> None:
        self._readers[fd] = callback
        self._read_on(fd)

    def remove_reader(self, fd: int, /) -> None:
        self._readers.pop(fd, None)

    def add_writer(self, fd: int, callback: Callback, /) -> None:
        self._writers[fd] = callback
        self._write_on(fd)

    def remove_writer(self, fd: int, /) -> None:
        self._writers.pop(fd, None)

    def _write(self, fd: int) -> None:
        self._writing.discard(fd)
        if fd in self._writers:
            self._writers[fd]()
        self._write_on(fd)

    def _write_on(self, fd: int) -> None:
        """Call a writer, and again until it is removed, while its descriptor is writable."""
        file = self.files.get(fd)
        if fd in self._writers and fd not in self._writing and (file is None or file.writable):
            self._writing.add(fd)
            self.call_later(LOOK_S if file is None else TURN_S, partial(self._write, fd))

    # --- what the simulator uses --------------------------------------------------------

    def readable(self, fd: int) -> None:
        """Something has come at a descriptor: its reader is called in the next turn."""
        if fd not in self._readable:
            self._readable.add(fd)
            self.call_soon(partial(self._read, fd))

    def _read(self, fd: int) -> None:
        self._readable.discard(fd)
        if fd in self._readers:
            self._readers[fd]()
        self._read_on(fd)

    def _read_on(self, fd: int) -> None:
        """Call a reader again while its file is readable."""
        if fd in self.files and fd in self._readers and self.files[fd].readable:
            self.readable(fd)

    def changed(self, fd: int) -> None:
        """A file may be readable or writable now."""
        self._read_on(fd)
        self._write_on(fd)

    def freeze(self, seconds: float) -> None:
        """Let the process stand still: what happens to it meanwhile, it finds when it goes on."""
        self._frozen_until = max(self._frozen_until, self.clock.now + seconds)

    def freeze_while(self, blocked: Callable[[], bool]) -> None:
        """Let the process stand still as long as this holds, as a call that waits for its end."""
        if blocked():
            self.freeze(LOOK_S)
            self.clock.after(LOOK_S, self.freeze_while, blocked)

    def awake(self, action: Callable[..., None], *args: Any) -> bool:
        """Whether the process runs; if it stands still, `action` comes when it goes on."""
        if self.clock.now < self._frozen_until:
            self.clock.at(self._frozen_until, action, *args)
            return False
        return True
