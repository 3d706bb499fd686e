"""The client's one thread: tells the coordinator that it lives, and what it has logged."""

from __future__ import annotations

import threading
import time
from collections import deque

from paramserve.control import ControlLink
from paramserve.messages import Record, WorkerBeat

RECORDS_PER_BEAT_MAX = 1000


class Heartbeat:
    """Sends a heartbeat every `every_s` until stopped, on a daemon thread.

    Records wait here for the next one, at most `records_max`; past it the oldest are dropped.
    """

    def __init__(self, control: ControlLink, rank: int, every_s: float, records_max: int) -> None:
        self._control = control
        self._rank = rank
        self._every_s = every_s
        self._records: deque[Record] = deque(maxlen=records_max)
        self._lock = threading.Lock()
        self._clock = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paramserve-heartbeat", daemon=True)
        self._thread.start()

    def log(self, clock: int, values: dict[str, float]) -> None:
        """Keep a record for the next heartbeat."""
        record = Record(time.time(), self._rank, clock, values)
        with self._lock:
            self._clock = clock
            self._records.append(record)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self.beat()

    def beat(self) -> None:
        """Send one heartbeat now, also while a call waits for its answer."""
        with self._lock:
            count = min(len(self._records), RECORDS_PER_BEAT_MAX)
            records = [self._records.popleft() for _ in range(count)]
        if not self._control.notify(WorkerBeat(self._clock, tuple(records))):
            with self._lock:
                self._records.extendleft(reversed(records))

    def stop(self) -> None:
        """Send what is left, and end the thread."""
        self._stop.set()
        self._thread.join()
        while self._records:
            before = len(self._records)
            self.beat()
            if len(self._records) >= before:
                break
