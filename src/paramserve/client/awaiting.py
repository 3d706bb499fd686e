"""`await ticket`: a future of the program's event loop that ends with the shards' answers.

The wait itself, with its limits and its warnings, is the one of `Ticket.result`, in a thread of its
own for each unanswered step that is awaited: a loop that reads links would stand still while one is
made anew. These threads are few, since a shard leaves few calls unanswered, and end with the last
await of their step.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Generator

from paramserve.client.exchange import Exchange, copy_error
from paramserve.client.waits import Waits
from paramserve.core.client_session import Operation
from paramserve.errors import ParamServeError


class AwaitedStep:
    """A step that tasks await, and the thread that waits for it."""

    def __init__(self) -> None:
        self.futures: list[asyncio.Future[None]] = []
        self.thread: threading.Thread | None = None

    def is_wanted(self) -> bool:
        """Whether a task still awaits it."""
        return not all(future.done() for future in self.futures)


class AwaitedSteps:
    """The awaited steps of one client."""

    def __init__(self, waits: Waits, exchange: Exchange) -> None:
        self._waits = waits
        self._exchange = exchange
        self._steps: dict[Operation, AwaitedStep] = {}
        self._lock = threading.Lock()

    def until_answered(
        self, operation: Operation, what: str, group: int
    ) -> Generator[asyncio.Future[None], None, None]:
        """Await all shards' answers, whatever they say; raises as `Waits.until_complete`."""
        if self._exchange.closed:  # In a forked child another thread may have held the lock.
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            step = self._steps.setdefault(operation, AwaitedStep())
            step.futures.append(future)
            # An earlier await may have been interrupted before its thread was there.
            if step.thread is None or not step.thread.is_alive():
                step.thread = threading.Thread(
                    target=self._wait,
                    args=(step, operation, what, group),
                    name=f"paramserve-await-{what}",
                    daemon=True,
                )
                step.thread.start()
        yield from future

    def _wait(self, step: AwaitedStep, operation: Operation, what: str, group: int) -> None:
        """Wait for a step in a thread of its own, until it is answered or no task waits for it any
        more; then wake its tasks, with the error if one was raised."""

        def is_over() -> bool:
            return operation.complete or not step.is_wanted()

        def wait(limit_s: float) -> bool:
            until = self._waits.now() + limit_s
            return self._exchange.read_until(is_over, until, (what, group))

        error: Exception | None = None
        over = False
        while not over:
            try:
                self._waits.until(wait, what, group, None)
            except Exception as failure:  # it is raised in the tasks
                error = failure
            with self._lock:  # A task may have come after the last one before was cancelled.
                over = error is not None or is_over()
                if over:
                    del self._steps[operation]
        for future in step.futures:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                future.get_loop().call_soon_threadsafe(_end, future, error)


def _end(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():  # cancelled
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(copy_error(error) if isinstance(error, ParamServeError) else error)
