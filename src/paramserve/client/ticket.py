"""What a push or a step gives back: the promise of its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from paramserve.client.exchange import Slot, again, done
from paramserve.core.client_session import Operation
from paramserve.core.partition import Block
from paramserve.errors import ClientClosed, ParamServeError, Timeout

if TYPE_CHECKING:
    from paramserve.client.steps import Steps

Array = npt.NDArray[Any]


@dataclass
class Outcome:
    """What a step did.

    Attributes:
        version: updates that the group has had after it, on the shard that has had the fewest.
        staleness: updates between the version that the gradient came from and this one, at most.
        skipped: the gradient was not applied, as the policy says.
        values: by block id, flat [block.size] views into the client's memory, until `release()`.
    """

    version: int
    staleness: int = 0
    skipped: bool = False
    values: dict[int, Array] = field(default_factory=dict)


class Ticket:
    """The outcome of a push or a step, when it is there.

    An error that is not read from its ticket is raised by the client's next call.
    """

    def __init__(
        self, client: Steps, what: str, group: int, places: Sequence[tuple[Block, Slot]] = ()
    ) -> None:
        self.what = what
        """"push", "pull", "tick", ...: for messages."""
        self.group = group
        self.operation: Operation | None = None
        """None while the push waits for the tick that ends its synchronous step."""
        self.others: tuple[Ticket, ...] = ()
        """Of other groups, sent before it in the same message: its result is there after theirs."""
        self._client = client
        self._places = tuple(places)
        self._outcome: Outcome | None = None
        self._released = False

    def done(self) -> bool:
        """Whether the outcome is there (an error too). Does not wait."""
        return self.operation is not None and (
            self.operation.complete or self._client.poll(self.operation)
        )

    def result(self, timeout_s: float | None = None) -> Outcome:
        """Wait for the outcome.

        Raises:
            PushTimeout, PullTimeout: not there in `timeout_s`. Applied: unknown; call again to
                wait on: the request keeps its number and is applied at most once.
            ServerGone: a server ended. Applied: unknown.
            ParamServeError: the servers refused it; see the text.
        """
        if self._outcome is not None:
            return self._outcome
        until = None if timeout_s is None else self._client.now() + timeout_s
        try:
            for other in self.others:
                other.result(timeout_s)
                timeout_s = None if until is None else max(until - self._client.now(), 0.0)
        except ParamServeError as error:
            if self._places and not isinstance(error, Timeout):  # after one it may be waited for
                self._client.forget(self)
            raise
        operation = self.operation
        if operation is None:
            raise ClientClosed(
                f"this {self.what} is part of a synchronous step that was not ended",
                fix="call client.tick() first",
            )
        if not operation.complete:
            self._client.wait(self, timeout_s)
        if operation.error is not None:
            self._client.error_was_read(self)
            self.release()
            raise again(operation.error)
        self._outcome = self._read(operation)
        return self._outcome

    def _read(self, operation: Operation) -> Outcome:
        replies = done(operation)
        if self._places:
            self._client.read_versions(self.group, operation)
        values = {b.id: slot.array(b) for b, slot in self._places if b.table is None}
        if len(replies) == 1:
            only = replies[0]
            return Outcome(only.version, only.staleness, only.skipped, values)
        return Outcome(
            min([reply.version for reply in replies]),
            max([reply.staleness for reply in replies]),
            any(reply.skipped for reply in replies),
            values,
        )

    def release(self) -> None:
        """Give the values' memory back; `Outcome.values` must not be used any more.

        Before the outcome is there, this waits for it: the servers still write to that memory.
        """
        if self._released:
            return
        if self.operation is not None and not self.operation.complete:
            self._client.wait(self, None)
        self._released = True
        if self._places:
            self._client.give_back([slot for _, slot in self._places])

    @property
    def error(self) -> ParamServeError | None:
        """The error, if the outcome is there and is one."""
        return None if self.operation is None else self.operation.error

    def __await__(self) -> Generator[Any, None, Outcome]:
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(None, self.result).__await__()
