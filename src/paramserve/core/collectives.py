"""Barriers, and values that are reduced over all ranks: one collective call after the other.

The n-th collective of each rank is one, as in `torch.distributed`: they are matched by their order.
A rank waits until its collective ends, so that one is open at a time. It ends when it has a value
of every rank that it waits for:

- of a rank that lives, and of one that has not joined yet;
- not of one that has left, died, or is asked to end; what it had sent before counts;
- not of one that is being restarted. But as long as no rank has made a step it is waited for: its
  function begins at the beginning, and the others may wait for what it does there;
- of a restarted rank in each collective that opens after it has joined;
- of a rank that was added, or that had ended for good and comes again, in each one after the first
  that it sends a value to. Until then the others step without it.

A rank that is restarted, added or comes again begins its function at the beginning, while the
others are in the middle: it makes calls whose collective has ended. It gets the results, in order,
as far as they are kept. Which one a call is, its place says: the steps that its program has gone
through, with those that its loaders have left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import numpy as np

from paramserve.core.membership import EXPECTED, LIVE, RESTARTING, RETIRING, Membership
from paramserve.errors import Overloaded, ParamServeError
from paramserve.messages import AllReduce, AllReduced, Member

KEPT_MAX = 10_000
"""Collectives whose results are kept for ranks that are restarted or added."""
KEPT_BYTES_MAX = 16 << 20
"""Of these results and of who took part; the last one is kept, whatever its size."""
CLIENT_BYTES = 128
"""Of a set of clients, for each of them, at most."""
BARRIER = "barrier"
COMBINE = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}
OPS = (BARRIER, *COMBINE)
DTYPES = ("float64", "float32", "int64")
"""Of values as they travel; a mean is of floats."""
DIMENSIONS_MAX = 64
"""As numpy has it."""


@dataclass
class _Open:
    """The collective that ranks wait in."""

    first: AllReduce
    """Of the rank that came first: the others' calls have to be like it."""
    rank: int
    """Which rank that was."""
    joined: int
    """The newest client that had joined when it opened."""
    place: int
    """The furthest of the ranks that came."""
    sent: dict[int, tuple[int, AllReduce]] = field(default_factory=dict)
    """By rank: its client, and its call."""


class _Ended(NamedTuple):
    """A collective that has ended."""

    number: int
    place: int
    clients: frozenset[int]
    """Those whose values are in it; one object where the one before had the same."""
    result: bytes


class Collectives:
    """All collectives of a cluster, numbered from 1.

    Args:
        bytes_max: of one value.
    """

    def __init__(self, membership: Membership, bytes_max: int) -> None:
        self._membership = membership
        self._bytes_max = bytes_max
        self._open: _Open | None = None
        self._ended: dict[int, _Ended] = {}
        """By number, without a gap; the oldest is the first."""
        self._kept_bytes = 0
        self.number = 0
        """Of the last one that has ended."""
        self._forgotten_place = -1
        """The furthest place of a collective whose result is kept no longer; -1: all are kept."""
        self._counted: set[int] = set()
        """Clients that have sent a value to a collective."""

    def call(self, message: AllReduce, member: Member) -> AllReduced | None:
        """Answer a rank that calls a collective, or waits in one: asking again changes nothing.

        Returns:
            None: it has to wait; ask again after any change.
        Raises:
            ParamServeError: its call is not like the others', or a value is too large. It is not
                part of the collective.
        """
        opened = self._open
        waiting = opened.sent.get(member.rank) if opened is not None else None
        retired = member.state == RETIRING
        if waiting is not None and not retired:
            client, sent = waiting
            if sent is message and client == member.client:  # nothing has ended since
                return None
        self._check(message)
        if retired:
            return AllReduced(message.call, message.seen, message.value, ended=True)
        found = self._find(message, member)
        if found is not None:
            return AllReduced(message.call, found.number, found.result, ended=True)
        alone = opened is not None and opened.sent.keys() == {member.rank}
        if opened is not None and alone and _in_words(opened.first) != _in_words(message):
            opened = None  # of a call that was interrupted
        if opened is None:
            newest = max(each.client for each in self._membership.members.values())
            opened = self._open = _Open(message, member.rank, newest, message.place)
        _check_alike(opened, message, member.rank)
        opened.sent[member.rank] = member.client, message
        opened.place = max(opened.place, message.place)
        self._counted.add(member.client)
        self.changed()
        return self.call(message, member) if self._open is None else None

    def changed(self) -> None:
        """The membership has changed, or a value has come: end the collective if it has all."""
        opened = self._open
        if opened is None or self.missing():
            return
        self._open = None
        self.number += 1
        values = [call.value for _, (_, call) in sorted(opened.sent.items())]
        clients = frozenset(client for client, _ in opened.sent.values())
        self._keep(opened.place, clients, reduced(opened.first, values))

    def _keep(self, place: int, clients: frozenset[int], result: bytes) -> None:
        """Keep the newest result, and forget the oldest ones where there are too many."""
        before = self._ended.get(self.number - 1)
        if before is not None and before.clients == clients:
            clients = before.clients
        else:
            self._kept_bytes += len(clients) * CLIENT_BYTES
        self._kept_bytes += len(result)
        self._ended[self.number] = _Ended(self.number, place, clients, result)
        first = self.number - len(self._ended) + 1
        while len(self._ended) > KEPT_MAX or self._kept_bytes > KEPT_BYTES_MAX:
            if len(self._ended) == 1:
                break
            oldest = self._ended.pop(first)
            first += 1
            self._kept_bytes -= len(oldest.result)
            if self._ended[first].clients is not oldest.clients:
                self._kept_bytes -= len(oldest.clients) * CLIENT_BYTES
            self._forgotten_place = max(self._forgotten_place, oldest.place)

    def missing(self) -> tuple[Member, ...]:
        """The ranks whose values the open collective waits for."""
        opened = self._open
        if opened is None:
            return ()
        return tuple(
            each
            for rank, each in sorted(self._membership.members.items())
            if rank not in opened.sent and self._awaits(opened, each)
        )

    def withdraw(self, rank: int) -> None:
        """A rank no longer waits: its value does not count."""
        opened = self._open
        if opened is not None and opened.sent.pop(rank, None) is not None and not opened.sent:
            self._open = None

    def _awaits(self, opened: _Open, member: Member) -> bool:
        if member.state == RESTARTING:
            return opened.place == 0
        if member.state != LIVE:
            return member.state == EXPECTED
        if member.client in self._membership.came_later:
            return member.client in self._counted
        return member.client <= opened.joined or opened.place == 0

    def _find(self, message: AllReduce, member: Member) -> _Ended | None:
        """The collective of a call, if it has ended."""
        if not self._ended:
            return None
        first = self.number - len(self._ended) + 1
        if message.seen + 1 < first and message.place <= self._forgotten_place:
            raise ParamServeError(
                f"rank {member.rank} (incarnation {member.incarnation}) calls a collective at step "
                f"{message.place} of its program, which the others made before: the results of "
                f"all before number {first} are kept no longer",
                fix="let the function of a restarted worker begin where the run is, as "
                "worker.loader does, and call worker.all_reduce less often than at each step",
            )
        for number in range(max(message.seen + 1, first), self.number + 1):
            each = self._ended[number]
            if member.client in each.clients or each.place >= message.place:
                return each
        return None

    def _check(self, message: AllReduce) -> None:
        """Refuse what no client of ours sends, and what is too large."""
        known = message.op in OPS and message.dtype in DTYPES
        known = known and (message.op, message.dtype) != ("mean", "int64")
        shape = len(message.shape) <= DIMENSIONS_MAX and min(message.shape, default=0) >= 0
        if not (known and shape) or message.place < 0 or message.seen < 0:
            raise ParamServeError(
                f"a collective with op {message.op[:20]!r} and dtype {message.dtype[:20]!r}, at "
                f"step {message.place} after number {message.seen}",
                fix="run the same version on all ranks",
            )
        size = prod(message.shape) * np.dtype(message.dtype).itemsize
        if message.op != BARRIER and size != len(message.value):
            raise ParamServeError(
                f"a value of {len(message.value)} bytes came as one of {size}",
                fix="run the same version on all ranks",
            )
        if len(message.value) > self._bytes_max:
            raise Overloaded(
                f"worker.all_reduce got a value of {len(message.value)} bytes, "
                f"reduce_bytes_max is {self._bytes_max}",
                fix="reduce less, or raise it with limits=ps.Limits(reduce_bytes_max=...); "
                "gradients are reduced by worker.optimizer",
            )


def _check_alike(opened: _Open, message: AllReduce, rank: int) -> None:
    ours, theirs = _in_words(message), _in_words(opened.first)
    if ours != theirs:
        raise ParamServeError(
            f"rank {rank} called {ours}, and rank {opened.rank} {theirs}",
            fix="make the same calls in the same order on all ranks",
        )


def _in_words(message: AllReduce) -> str:
    if message.op == BARRIER:
        return "worker.barrier()"
    what = f"{message.dtype} {list(message.shape)}" if message.shape else f"one {message.dtype}"
    return f"worker.all_reduce(op={message.op!r}) with {what}"


def reduced(call: AllReduce, values: list[bytes]) -> bytes:
    """The values of the ranks as one, taken in the order of the ranks."""
    if call.op == BARRIER:
        return b""
    combine = COMBINE[call.op]
    arrays = [np.frombuffer(each, call.dtype) for each in values]
    total = arrays[0].copy()
    with np.errstate(all="ignore"):  # Inf and NaN are values like others
        for each in arrays[1:]:
            combine(total, each, out=total)
        if call.op == "mean":
            total /= np.array(len(arrays), call.dtype)
    return total.tobytes()
