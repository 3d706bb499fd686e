"""Ranks of a run as threads of the test's process: each trains with a `Worker`, may die at a chosen
step, and is then started again, as `ps.Restart` does with processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.contract.role_cluster import RoleCluster, wait_until

from paramserve.worker import Worker

WAIT_S = 30.0
Train = Callable[[Worker], Any]


class Killed(BaseException):
    """Ends a rank as the end of its process would."""


class Ranks:
    """Runs a training function on ranks of a cluster.

    Args:
        again: whether a rank that dies is started again.
    Attributes:
        returned: by rank, what its last incarnation returned.
        restarts: the ranks that were started again, in this order.
    """

    def __init__(
        self, cluster: RoleCluster, train: Train, seed: int = 3, *, again: bool = True
    ) -> None:
        self._cluster = cluster
        self._train = train
        self._seed = seed
        self._again = again
        self.returned: dict[int, Any] = {}
        self.restarts: list[int] = []
        self._errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def start(self, *ranks: int) -> Ranks:
        for rank in ranks:
            thread = threading.Thread(target=self._run, args=(rank,), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def until(self, true: Callable[[], object]) -> None:
        """Wait for something while the ranks train."""
        wait_until(lambda: bool(self._errors) or bool(true()))
        if self._errors:
            raise self._errors[0]

    def end(self) -> dict[int, Any]:
        """Wait for all; what each rank returned."""
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive() or self._errors, "a rank does not end"
            if self._errors:
                raise self._errors[0]
        return self.returned

    def _run(self, rank: int) -> None:
        try:
            while True:
                worker = Worker(self._cluster.client(rank), self._seed)
                try:
                    self.returned[rank] = self._train(worker)
                    worker.finish()
                    return
                except Killed:
                    worker.client.connection.control.close()
                    if not self._again:
                        return
                    self.restarts.append(rank)
        except BaseException as error:  # raised again in the test's thread
            self._errors.append(error)
