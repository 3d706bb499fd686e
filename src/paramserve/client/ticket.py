"""What a push or a step gives back: the promise of its outcome."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import numpy.typing as npt
from msgspec import Struct

from paramserve.client.awaiting import AwaitedSteps
from paramserve.client.exchange import Slot, copy_error
from paramserve.client.waits import Waits
from paramserve.core.client_session import Operation
from paramserve.core.partition import Block
from paramserve.errors import ClientClosed, ParamServeError, Timeout

Array = npt.NDArray[Any]


class Sender(Protocol):
    """What has sent a step, and reads its answers; `paramserve.client.steps.Steps` is one."""

    waits: Waits
    awaited: AwaitedSteps
    now: Callable[[], float]

    def poll(self, operation: Operation) -> bool: ...
    def forget(self, ticket: Ticket) -> None: ...
    def give_back(self, slots: Sequence[Slot]) -> None: ...
    def error_was_read(self, ticket: Ticket) -> None: ...
    def read_versions(self, group: int, operation: Operation) -> None: ...


class Values(dict[int, Array]):
    """Views into a client's memory, which is given to no other call while these are referred to."""

    places: Sequence[tuple[Block, Slot]] = ()


class Outcome(Struct):
    """What a step did. Of several groups in one call `skipped` is said of all of them, the rest of
    the last one.

    Attributes:
        version: updates that the group has had after it, on the shard that has had the fewest.
        staleness: updates between the version that the gradient came from and this one, at most.
        skipped: a gradient was not applied, as the policy of its group says.
        values: by block id, flat [block.size] views into the client's memory, until `release()`.
    """

    version: int
    staleness: int = 0
    skipped: bool = False
    values: dict[int, Array] = {}


class Ticket(Struct, eq=False, weakref=True):
    """The outcome of a push or a step, when it is there.

    `await ticket` waits as `result()` does, and takes no thread of the event loop's executor.

    An error that is not read from its ticket, as where an await was cancelled, is raised by the
    client's next call.
    """

    _client: Sender
    what: str
    """"push", "pull", "tick", ...: for messages."""
    group: int
    places: Sequence[tuple[Block, Slot]] = ()
    """Blocks that are read, with where their values go."""
    operation: Operation | None = None
    """None while the push waits for the tick that ends its synchronous step."""
    others: tuple[Ticket, ...] = ()
    """Tickets of other groups, sent before it in the same message; they resolve first."""
    released: bool = False
    """Whether the values' memory is not this ticket's any more."""
    _outcome: Outcome | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of a {self.what}>"

    def done(self) -> bool:
        """Whether the outcome is there (an error too). Does not wait."""
        return self.operation is not None and (
            self.operation.complete or self._client.poll(self.operation)
        )

    def result(self, timeout_s: float | None = None) -> Outcome:
        """Wait for the outcome.

        Raises:
            PushTimeout, PullTimeout: not there in `timeout_s`. Applied: unknown; call again to
                wait on: what was pushed keeps its number and is applied at most once.
            ServerGone: a server ended. Applied: unknown.
            ParamServeError: the servers refused it; see the text.
        """
        if self._outcome is None:
            finish(self, timeout_s)
            outcome = self._read()
            for other in self.others:
                assert other._outcome is not None
                outcome.skipped = outcome.skipped or other._outcome.skipped
            self._outcome = outcome
        return self._outcome

    def _read(self) -> Outcome:
        """Put the shards' answers together: the oldest version, the largest staleness, skipped if
        one shard has skipped."""
        assert self.operation is not None
        values = Values()
        values.places = self.places
        for block, slot in self.places:
            if block.table is None:
                values[block.id] = slot.array(block)
        only, *more = self.operation.replies.values()
        if not more:
            return Outcome(only.version, only.staleness, only.skipped, values)
        replies = [only, *more]
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
        if self.released:
            return
        if self.operation is not None and not self.operation.complete:
            self._client.waits.until_complete(self.operation, self.what, self.group, None)
        self.released = True
        slots: list[Slot] = []
        for _, slot in self.places:
            slots += [slot]
        if slots:
            self._client.give_back(slots)

    @property
    def error(self) -> ParamServeError | None:
        """The error, if the outcome is there and is one."""
        return None if self.operation is None else self.operation.error

    def __await__(self) -> Generator[Any, None, Outcome]:
        yield from self._until_answered()
        return self.result()  # of a task that was cancelled before, the error stays unread

    def _until_answered(self) -> Generator[Any, None, None]:
        for other in self.others:
            yield from other._until_answered()
        if self.operation is not None and not self.done():
            yield from self._client.awaited.until_answered(self.operation, self.what, self.group)


def finish(ticket: Ticket, timeout_s: float | None) -> None:
    """Wait until a ticket's outcome is there; raises as `Ticket.result`."""
    if ticket.others:
        timeout_s = _finish_others(ticket, timeout_s)
    operation, client = ticket.operation, ticket._client
    if operation is None:
        raise ClientClosed(
            f"this {ticket.what} is part of a synchronous step that was not ended",
            fix="call client.tick() first",
        )
    if not operation.complete:
        client.waits.until_complete(operation, ticket.what, ticket.group, timeout_s)
    if operation.error is not None:
        client.error_was_read(ticket)
        ticket.release()
        raise copy_error(operation.error)
    if ticket.places:
        client.read_versions(ticket.group, operation)


def _finish_others(ticket: Ticket, timeout_s: float | None) -> float | None:
    """Wait for the outcomes of what was sent before a ticket; what is left of the time."""
    client = ticket._client
    until = None if timeout_s is None else client.now() + timeout_s
    try:
        for other in ticket.others:
            other.result(timeout_s)
            timeout_s = None if until is None else max(until - client.now(), 0.0)
    except ParamServeError as error:
        if ticket.places and not isinstance(error, Timeout):  # after one it may be waited for
            client.forget(ticket)
        raise
    return timeout_s
