"""The shard's end of a session: each numbered request of a client takes effect exactly once.

A shard accepts exactly the number after the last one. A lower number is answered from the kept
outcomes, or is still waiting here and will be answered when its turn comes. A higher one means
that something between was lost: the connection is dropped and the client sends again in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paramserve.messages import Done, Refused, ShardReply, ShardRequest

Array = npt.NDArray[Any]
Memory = Mapping[int, npt.NDArray[np.uint8]]


class Request(NamedTuple):
    """A numbered request and the memory that it speaks of, by arena number; 0 is the payload."""

    message: ShardRequest
    memory: Memory


class Answer(NamedTuple):
    """A reply and the bytes that follow it (none where the values lie in the client's arena)."""

    message: ShardReply
    payload: Array | None = None


class Verdict(Enum):
    NEW = "new"
    REPEATED = "repeated"
    PENDING = "pending"
    FORGOTTEN = "forgotten"
    GAP = "gap"


class ShardSession:
    """One client as one shard knows it; it outlives the client's connections.

    `window` is the client's own bound on unanswered calls, `requests` on their numbers: outcomes
    of that many last numbers are kept, since the client can ask again for no others, and fewer
    where it says so.
    """

    def __init__(
        self, client: int, incarnation: int, rank: int, window: int, requests: int | None = None
    ) -> None:
        self.client = client
        self.incarnation = incarnation
        self.rank = rank
        self.window = window
        self.requests = requests if requests is not None else window
        self.last = 0
        """The highest number accepted."""
        self.queue: deque[Request] = deque()
        """Accepted, not executed: behind one that is held."""
        self.held: Request | None = None
        """Executed as far as possible, not answered."""
        self.done: Done | None = None
        """What the held request has done already; None: nothing yet."""
        self.fenced = False
        self.told: dict[int, int] = {}
        """By group: the number of the newest change of its policy that the client knows of."""
        self.asked: Request | None = None
        """What is held, as it came, if it did not say its clock."""
        self.asks_clock: set[int] = set()
        """Groups where the client does not know its clock: the next answer says it."""
        self.gone_at: float | None = None
        """When its connection ended; None while it has one."""
        self._outcomes: dict[int, Answer] = {}
        self._oldest = 1
        """All outcomes before it are forgotten."""

    def admit(self, seq: int) -> Verdict:
        """What to do with this number; a new one counts as accepted from now on."""
        if seq == self.last + 1:
            if len(self.queue) >= self.requests:
                return Verdict.GAP
            self.last = seq
            return Verdict.NEW
        if seq > self.last:
            return Verdict.GAP
        if seq in self._outcomes:
            return Verdict.REPEATED
        if self.held is not None and seq >= self.held.message.seq:
            return Verdict.PENDING
        return Verdict.FORGOTTEN

    def outcome(self, seq: int) -> Answer:
        """The answer that was given to a number; `admit` said REPEATED."""
        return self._outcomes[seq]

    def record(self, answer: Answer) -> None:
        """Keep an outcome, and forget the one that the client can no longer ask for."""
        assert isinstance(answer.message, Done | Refused), "all else answers no number"
        seq = answer.message.seq
        self._outcomes[seq] = answer
        self.forget(seq - self.requests + 1)

    def forget(self, oldest: int) -> None:
        """The client will not ask for outcomes of lower numbers again: their payloads are freed."""
        while self._oldest < oldest:
            self._outcomes.pop(self._oldest, None)
            self._oldest += 1
