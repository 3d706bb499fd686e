"""The client's one thread: tells the coordinator that it lives, and what it has logged."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from paramserve.config import Limits
from paramserve.messages import (
    Record,
    SentGradients,
    WorkerBeat,
    WorkerUsage,
    encode,
)
from paramserve.transport.control import ControlLink

logger = logging.getLogger("paramserve")

RECORDS_PER_BEAT_MAX = 1000
BEAT_BYTES_MAX = 1 << 20
"""Most bytes of the records in one beat; a quarter of `header_bytes_max` if that is less."""
BEATS_AT_ONCE_MAX = 16
"""More than one beat are sent together while records wait."""


class Heartbeat:
    """Sends a heartbeat every `every_s` until stopped, on a daemon thread.

    Records wait here for the next one, at most `log_records_max` with `log_bytes_max` bytes; past
    that the oldest are dropped. Each beat says how many records were logged before its first one,
    so that the coordinator can count what was dropped.
    """

    def __init__(self, control: ControlLink, rank: int, every_s: float, limits: Limits) -> None:
        self._control = control
        self._rank = rank
        self._every_s = every_s
        self._records_max = limits.log_records_max
        self._bytes_max = limits.log_bytes_max
        self._beat_bytes_max = min(BEAT_BYTES_MAX, limits.header_bytes_max // 4)
        self._records: deque[tuple[int, int, Record]] = deque()
        """Each with its number and its size."""
        self._bytes = 0
        self._logged = 0
        self._incoming: deque[tuple[int, Record]] = deque()
        """What was logged and has no number yet, each with its size."""
        self._lock = threading.RLock()
        """Reentrant for the thread: a signal handler may log within a call that holds it."""
        self._at_work = False
        """Whether the records are being changed, by the thread that has the lock."""
        self.sent_gradients: Callable[[], tuple[SentGradients, ...]] = tuple
        """What was sent encoded so far."""
        self.usage: Callable[[], WorkerUsage | None] = lambda: None
        """What the client has done with its time so far."""
        self.beaten: Callable[[], None] = lambda: None
        """Is told of each heartbeat."""
        self._acknowledged: tuple[SentGradients, ...] = ()
        """Sent gradients that the coordinator has acknowledged."""
        self._clock = 0
        self._stop = threading.Event()
        self._ended: Callable[[], bool] = self._stop.is_set
        """Whether a broken connection is left as it is."""
        self._thread = threading.Thread(target=self._run, name="paramserve-heartbeat", daemon=True)
        self._thread.start()

    def log(self, clock: int, values: dict[str, float]) -> None:
        """Keep a record for the next heartbeat. One that fits into no beat is dropped."""
        record = Record(time.time(), self._rank, clock, values)
        size = len(encode(record))
        self._incoming.append((size, record))
        with self._lock:
            if not self._at_work:  # else the interrupted call numbers it, or the next one does
                self._at_work = True
                try:
                    self._number()
                finally:
                    self._at_work = False

    def _number(self) -> None:
        """Number what was logged, in order."""
        while self._incoming:
            size, record = self._incoming.popleft()
            self._clock = record.clock
            number, self._logged = self._logged, self._logged + 1
            if size <= self._beat_bytes_max:
                self._records.append((number, size, record))
                self._bytes += size
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        while len(self._records) > self._records_max or self._bytes > self._bytes_max:
            self._bytes -= self._records.popleft()[1]

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self._beats()
                self.beaten()
            except Exception:  # without heartbeats this process would be ended
                logger.exception("a heartbeat of rank %d failed", self._rank)

    def _beats(self) -> None:
        """Send a heartbeat, and more while records wait."""
        for _ in range(BEATS_AT_ONCE_MAX):
            if not (self.beat() and self._records):
                return

    def beat(self) -> bool:
        """Send one heartbeat now, also while a call waits for its answer.

        Returns:
            Whether it was sent; else its records wait for the next one.
        """
        with self._lock:
            self._at_work = True
            try:
                self._number()
                clock, first = self._clock, self._logged
                batch = self._take()
            finally:
                self._at_work = False
            if batch:
                first = batch[0][0]
        # Of records that follow each other: what is dropped in between belongs to the next beat.
        current = self.sent_gradients()
        news = current if current != self._acknowledged else ()
        records = tuple(each[2] for each in batch)
        beat = WorkerBeat(clock, records, first, news, self.usage())
        delivered = self._control.notify(beat)
        if not delivered and self._control.restore(ended=self._ended):
            delivered = self._control.notify(beat)
        if delivered:
            self._acknowledged = current
        else:
            with self._lock:
                self._at_work = True
                try:
                    self._records.extendleft(reversed(batch))
                    self._bytes += sum(size for _, size, _ in batch)
                    self._drop_oldest()
                finally:
                    self._at_work = False
        return delivered

    def _take(self) -> list[tuple[int, int, Record]]:
        """The oldest records that go into one beat."""
        batch: list[tuple[int, int, Record]] = []
        room = self._beat_bytes_max
        while self._records and len(batch) < RECORDS_PER_BEAT_MAX:
            number, size, _ = self._records[0]
            if size > room or (batch and number != batch[-1][0] + 1):
                break
            room -= size
            self._bytes -= size
            batch.append(self._records.popleft())
        return batch

    def stop(self) -> None:
        """Send what is left, and end the thread."""
        self._stop.set()
        self._thread.join()
        self._ended = lambda: False
        self.send_all()

    def send_all(self) -> None:
        """Send what is left, as far as it can be sent."""
        last = self.sent_gradients() != self._acknowledged
        while self._records or self._incoming or last:
            last = False
            if not self.beat():
                break
