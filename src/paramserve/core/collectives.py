"""Barriers, and values that are reduced over all ranks: one collective call after the other.

The n-th collective of each rank is one, as in `torch.distributed`: they are matched by their order.
A rank waits until its collective ends, so that one is open at a time. It ends when it has a value
of every rank that it waits for:

- of a rank that lives, and of one that has not joined yet;
- not of one that has left, died, or is asked to end; what it had sent before counts. But where
  all others have ended, and one of them in order and by itself, the call of the last one is
  refused: its value alone would pass for that of all;
- not of one that is being restarted. But as long as no rank has made a step it is waited for: its
  function begins at the beginning, and the others may wait for what it does there;
- of a restarted rank in each collective that opens after it has joined, unless its program has
  passed by: it calls one at a later step, has begun to step behind this one, or waits for a step of
  those that wait for it here;
- of a rank that was added, or that had ended for good and comes again, in each one after the first
  that it sends a value to. Until then the others step without it;
- of rank 0 where its value is the result, whatever it does: once it has ended, the call is refused.

A rank that is restarted, added or comes again begins its function at the beginning, while the
others are in the middle: it makes calls whose collective has ended. It gets the results, in order,
as far as they are kept. Which one a call is, its place says: the steps that its program has gone
through, with those that its loaders have left out or that its loop begins behind, the epochs that
it has begun, which tell what follows an epoch from what comes before the next one, and the steps of
all its optimizers, of which the first may rest. What the ranks have agreed on for a loader over
parts of their own is found by the loader's number, wherever the others are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from paramserve.core.membership import (
    DEAD,
    EXPECTED,
    LEFT,
    LIVE,
    RESTARTING,
    RETIRING,
    Membership,
)
from paramserve.errors import CollectiveMismatch, Overloaded, ParamServeError
from paramserve.messages import AllReduce, AllReduced, Member, Missing, PassBy

KEPT_MAX = 10_000
"""Collectives whose results are kept for ranks that are restarted or added."""
KEPT_BYTES_MAX = 16 << 20
"""Most bytes of kept results and who took part; the last one is kept, whatever its size."""
CLIENT_BYTES = 128
"""Most bytes that a set of clients takes, for each of them."""
BARRIER = "barrier"
COMBINE = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}
RANK0 = "rank0"
"""The value of rank 0, which is waited for in every state but its end."""
OPS = (BARRIER, RANK0, *COMBINE)
DTYPES = ("float64", "float32", "int64")
"""Dtypes of values as they travel; a mean is of floats."""
DIMENSIONS_MAX = 64
"""Most dimensions of a value, the same as numpy's."""
RANKS_SHOWN_MAX = 8
"""Most ranks in an error."""


class At(NamedTuple):
    """Position of a program, as `AllReduce` has it: each of these grows with the program, and no
    step leaves all of them as they are."""

    place: int
    epoch: int = 0
    ticks: int = 0


ABSENT = At(-1)
"""Place of a rank that took no part."""


@dataclass
class _Open:
    """The collective that ranks wait in."""

    first: AllReduce
    """Call of the rank that arrived first: the others' calls have to be like it."""
    rank: int
    """Which rank that was."""
    joined: int
    """The newest client that had joined when it opened."""
    expected: frozenset[int]
    """Ranks that had not joined then."""
    at: At
    """The furthest of the ranks that came."""
    sent: dict[int, tuple[int, AllReduce]] = field(default_factory=dict)
    """Client and call by rank."""
    passed: set[int] = field(default_factory=set)
    """Restarted ranks whose program has left this call out."""

    @property
    def exact(self) -> bool:
        """Whether all that came here are at one place where they are even."""
        return all(each.exact for _, each in self.sent.values())

    def is_before(self, message: AllReduce, *, even: bool) -> bool:
        """Whether a call is one of a later place than all that came here.

        Args:
            even: whether steps say which call is meant, and not only epochs.
        """
        exact = even and self.exact and message.exact
        return message.epoch > self.at.epoch or (exact and _at(message) > self.at)


class _Ended(NamedTuple):
    """A collective that has ended."""

    number: int
    at: At
    clients: frozenset[int]
    """Clients whose values are in it; one object where the one before had the same."""
    result: bytes
    dtype: str
    """Dtype of the result."""
    what: str
    """What was called, as `_what` says it."""
    places: Mapping[int, At]
    """Places of ranks that were elsewhere than `at`, or `ABSENT`."""
    without: tuple[Member, ...] = ()
    """Ranks that took no part, since they were being restarted."""
    inner: bool = False
    in_pass: bool = False
    """These as in `AllReduce`."""

    def at_of(self, rank: int) -> At:
        return self.places.get(rank, self.at)


class _Begun(NamedTuple):
    """First step of a restarted rank."""

    client: int
    at: At
    some: bool
    """Whether it has made calls there before."""


NOT_BEGUN = _Begun(0, At(-1, ticks=-1), False)


class EndedRecord(Struct, frozen=True):
    """A collective that has ended, as it is saved. `parts`: of which loader over parts of the
    ranks' own it is what they have agreed on; 0: of none."""

    number: int
    place: int
    result: bytes
    dtype: str
    what: str
    parts: int = 0
    epoch: int = 0
    inner: bool = False
    ticks: int = 0
    in_pass: bool = False
    elsewhere: dict[int, At] = {}
    """Places of ranks that were elsewhere; see `_Ended.places`."""


class CollectivesRecord(Struct, frozen=True):
    """What is saved of all collectives."""

    number: int
    forgotten_place: int
    ended: tuple[EndedRecord, ...]
    agreed: tuple[EndedRecord, ...]
    forgotten_epoch: int = 0
    uneven: bool = False


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
        """Ended collectives by number, without a gap; the oldest is the first."""
        self._kept_bytes = 0
        self._agreed: dict[int, _Ended] = {}
        """Agreed collectives by loader over parts of the ranks' own: the first `KEPT_MAX`."""
        self.number = 0
        """Number of the last collective that has ended."""
        self._forgotten = ABSENT
        """The furthest place of a collective whose result is kept no longer; `ABSENT`: all are."""
        self._uneven = False
        """Whether ranks were at other places in one collective: then the steps of one rank do not
        say which call of another is meant."""
        self._counted: set[int] = set()
        """Clients that have sent a value to a collective."""
        self._begun: dict[int, _Begun] = {}
        """First steps by rank that was restarted and steps."""

    def record(self) -> CollectivesRecord:
        """What has ended, to be saved: who took part in it does not come again."""
        return CollectivesRecord(
            self.number,
            self._forgotten.place,
            tuple(_record(each) for each in self._ended.values()),
            tuple(_record(each, parts) for parts, each in self._agreed.items()),
            self._forgotten.epoch,
            self._uneven,
        )

    def restore(self, record: CollectivesRecord) -> None:
        """All ranks begin their functions anew, and get the results of what had ended."""
        self.number, self._uneven = record.number, record.uneven
        self._forgotten = At(record.forgotten_place, record.forgotten_epoch)
        self._ended = {each.number: _restored(each) for each in record.ended}
        self._agreed = {each.parts: _restored(each) for each in record.agreed}
        self._kept_bytes = sum(
            len(each.result) + len(each.elsewhere) * CLIENT_BYTES for each in record.ended
        )

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
                self._check_company(message, member.rank)
                return None
        self._check(message)
        if retired:
            return _answer(message.call, message.seen, message.value, message.dtype)
        found = self._find(message, member)
        if found is not None:
            without = found.without if member.client in found.clients else ()
            return _answer(message.call, found.number, found.result, found.dtype, without)
        alone = opened is not None and opened.sent.keys() == {member.rank}
        if opened is not None and (
            (alone and _in_words(opened.first) != _in_words(message))
            or self._is_left_out(message, opened)
        ):
            opened = None  # of a call that was interrupted, or that all who wait make again
        before = opened is not None and opened.is_before(message, even=self._is_even())
        if self.pass_by(member, before):
            return self.call(message, member) if self._open is not opened else None
        if opened is None:
            self._check_all_made(message)
            opened = self._open = self._opened(message, member.rank)
        _check_alike(opened, message, member.rank)
        opened.sent[member.rank] = member.client, message
        opened.at = max(opened.at, _at(message))
        self._counted.add(member.client)
        self.changed()
        if self._open is None:
            return self.call(message, member)
        self._check_company(message, member.rank)
        return None

    def _opened(self, message: AllReduce, rank: int) -> _Open:
        """Open a collective, for the rank whose call arrives first."""
        members = self._membership.members
        newest = max(each.client for each in members.values())
        expected = frozenset(each for each in members if members[each].state == EXPECTED)
        return _Open(message, rank, newest, expected, _at(message))

    def _is_even(self) -> bool:
        """Whether steps say which call is meant: all ranks make equal numbers of them."""
        last = self._ended.get(self.number)
        return last is not None and last.at.place > 0 and not self._uneven

    def _is_left_out(self, message: AllReduce, opened: _Open) -> bool:
        """Whether all that wait were restarted behind a call, and make a later one."""
        members = self._membership.members
        if any(members[each].incarnation < 2 for each in opened.sent):
            return False
        calls = [each for _, each in opened.sent.values()]
        exact = opened.exact and message.exact and self._is_even()
        earlier = exact and _at(message) < min(map(_at, calls))
        return earlier or message.epoch < min(each.epoch for each in calls)

    def pass_by(self, member: Member, passes: bool = True) -> bool:
        """Wait no longer for a rank that was restarted in the open collective, if its program
        passes by; whether it does."""
        opened = self._open
        if opened is None or not passes or member.incarnation < 2 or member.rank in opened.sent:
            return False
        opened.passed.add(member.rank)
        self.changed()
        return True

    def begin_steps(self, message: PassBy, member: Member) -> None:
        """Note that a restarted rank makes its first step, and so none of the calls up to there.

        Raises:
            CollectiveMismatch: it has made some of the calls between the step before and this one,
                and not all: the results may be those of others.
        """
        if member.incarnation < 2:
            return
        at = _at(message)
        last, following = (self._ended.get(message.seen + each) for each in (0, 1))
        some = last is not None and last.at == at
        if some and following is not None and following.at == at:
            raise _some_only(member.rank, message.place, following.what)
        opened = self._open
        if some and opened is not None and opened.at == at:
            raise _some_only(member.rank, message.place, _what(opened.first))
        self._begun[member.rank] = _Begun(member.client, at, some)
        self.changed()

    def _check_all_made(self, message: AllReduce) -> None:
        """Refuse a call that a rank which has come back has made another one in place of."""
        for rank in self._begun:
            begun = self._begun_of(self._membership.members[rank])
            if begun is not None and begun.some and begun.at == _at(message):
                raise _some_only(rank, message.place, _what(message))

    def _begun_of(self, member: Member) -> _Begun | None:
        """First step of this incarnation of a rank, if it was restarted."""
        begun = self._begun.get(member.rank)
        return begun if begun is not None and begun.client == member.client else None

    def _has_passed(self, opened: _Open, member: Member) -> bool:
        """Whether the program of a rank that was restarted is behind a collective."""
        begun = self._begun_of(member)
        if begun is not None and opened.at.ticks <= begun.at.ticks and opened.exact:
            return True
        return member.rank in opened.passed

    def changed(self) -> None:
        """End the collective if it has all values: one has come, or the membership has changed."""
        opened = self._open
        if opened is None or self.missing() or self._returned_without(opened):
            return
        if opened.first.op == RANK0 and 0 not in opened.sent:
            return  # it has ended: those that wait are told
        self._open = None
        self.number += 1
        calls = [call for _, (_, call) in sorted(opened.sent.items())]
        clients = frozenset(client for client, _ in opened.sent.values())
        result = reduced(calls)
        at = opened.at
        places = dict.fromkeys(self._membership.members.keys() - opened.sent.keys(), ABSENT)
        for rank, (_, call) in opened.sent.items():
            if _at(call) != at:
                places[rank] = _at(call)
                self._uneven = self._uneven or (opened.exact and call.place != at.place)
        what = _what(opened.first)
        members = [each for _, each in sorted(self._membership.members.items())]
        without = tuple(
            each
            for each in members
            if each.state == RESTARTING
            or self._has_passed(opened, each)
            or self._had_nothing_left(each)
            if places.get(each.rank) == ABSENT
        )
        about = *result, what, places, without, opened.first.inner, opened.first.in_pass
        ended = _Ended(self.number, at, clients, *about)
        self._keep(ended)
        if opened.first.parts and len(self._agreed) < KEPT_MAX:
            agreed = ended._replace(clients=frozenset(), without=())
            self._agreed[opened.first.parts] = agreed

    def _keep(self, newest: _Ended) -> None:
        """Keep the newest result, and forget the oldest ones where there are too many."""
        before = self._ended.get(self.number - 1)
        if before is not None and before.clients == newest.clients:
            newest = newest._replace(clients=before.clients)
        else:
            self._kept_bytes += len(newest.clients) * CLIENT_BYTES
        self._kept_bytes += len(newest.result) + len(newest.places) * CLIENT_BYTES
        self._ended[self.number] = newest
        first = self.number - len(self._ended) + 1
        while len(self._ended) > KEPT_MAX or self._kept_bytes > KEPT_BYTES_MAX:
            if len(self._ended) == 1:
                break
            oldest = self._ended.pop(first)
            first += 1
            self._kept_bytes -= len(oldest.result) + len(oldest.places) * CLIENT_BYTES
            if self._ended[first].clients is not oldest.clients:
                self._kept_bytes -= len(oldest.clients) * CLIENT_BYTES
            self._forgotten = At(*map(max, self._forgotten, oldest.at))

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

    def _returned_without(self, opened: _Open) -> list[int]:
        """The ranks that have returned without a collective in which one rank is left alone; none:
        others take part in it, or may, or had nothing left to do when they were started again."""
        members = self._membership.members
        others = members.keys() - opened.sent.keys()
        if len(opened.sent) > 1 or any(members[r].state not in (LEFT, DEAD) for r in others):
            return []
        ranks = self._membership.left_unasked & others
        return sorted(rank for rank in ranks if not self._had_nothing_left(members[rank]))

    def _had_nothing_left(self, member: Member) -> bool:
        """Whether a rank that was restarted has returned behind the last call of all."""
        again = member.state == LEFT and member.incarnation > 1
        return again and member.client not in self._counted

    def _where_rank_0_is(self, opened: _Open) -> str:
        """Where rank 0 makes this call no more, in words; empty: it has made it, or may."""
        first = self._membership.members.get(0)
        if 0 in opened.sent:
            return ""
        if first is None or first.state in (LEFT, DEAD, RETIRING):
            return "has ended"
        passed = self._has_passed(opened, first)
        return "was started again, and has gone on" if passed else ""

    def _check_company(self, message: AllReduce, rank: int) -> None:
        """Refuse the call of the last rank where others have returned without one."""
        assert self._open is not None
        opened = self._open
        where = self._where_rank_0_is(opened) if opened.first.op == RANK0 else ""
        if where:
            self.withdraw(rank)
            raise ParamServeError(
                f"rank {rank} called {_in_words(message)}, and rank 0 {where} without this call",
                fix="make it in a loop over range(epochs), whose calls a rank makes again that is "
                "started again; where rank 0 returned or died for good, start anew",
            )
        ranks = self._returned_without(opened)
        if ranks:
            self.withdraw(rank)
            shown = ", ".join(f"rank {each}" for each in ranks[:RANKS_SHOWN_MAX])
            more = " and others" * (len(ranks) > RANKS_SHOWN_MAX)
            raise CollectiveMismatch(
                f"rank {rank} called {_in_words(message)} alone: {shown}{more} returned without "
                "this call, and no other rank is left",
                fix="make the same calls in the same order on all ranks before any of them returns",
            )

    def withdraw(self, rank: int) -> None:
        """Take back the value of a rank that waits no longer: it does not count."""
        opened = self._open
        if opened is not None and opened.sent.pop(rank, None) is not None and not opened.sent:
            self._open = None

    def _awaits(self, opened: _Open, member: Member) -> bool:
        """Whether the open collective waits for this rank's value, by its state and by when it has
        joined."""
        if self._has_passed(opened, member):
            return False
        if opened.first.op == RANK0 and member.rank == 0:
            return member.state not in (LEFT, DEAD, RETIRING)
        if member.state == RESTARTING:
            return opened.at[0] == 0
        if member.state != LIVE:
            return member.state == EXPECTED
        if member.client in self._membership.came_later:
            return member.client in self._counted
        if member.rank in opened.expected or opened.at[0] == 0:
            return True
        return member.client <= opened.joined

    def _find(self, message: AllReduce, member: Member) -> _Ended | None:
        """The collective of a call, if it has ended."""
        agreed = self._agreed.get(message.parts)
        if agreed is not None:
            return agreed._replace(number=max(agreed.number, message.seen))
        if not self._ended:
            return None
        first = self.number - len(self._ended) + 1
        if message.seen + 1 < first and self._may_be_forgotten(message):
            raise CollectiveMismatch(
                f"rank {member.rank} (incarnation {member.incarnation}) calls a collective at step "
                f"{message.place} of its program, which the others made before: the results of "
                f"all before number {first} are kept no longer",
                fix="let the function of a restarted worker begin where the run is, as "
                "worker.loader does, and call worker.all_reduce less often than at each step",
            )
        self._check_none_left_out(message, member)
        least = At(0) if self._uneven or _by_epoch(message) else _at(message)
        begun = self._begun_of(member) or NOT_BEGUN
        for number in range(max(message.seen + 1, first), self.number + 1):
            each = self._ended[number]
            if each.at >= least and each.at.ticks > begun.at.ticks:
                if member.client in each.clients:
                    return each
                if self._is_call_of(each, message, member):
                    self._check_again(each, message, member)
                    return each
        return None

    def _may_be_forgotten(self, message: AllReduce) -> bool:
        if _by_epoch(message):
            return message.epoch <= self._forgotten.epoch
        return message.place <= self._forgotten.place

    def _is_call_of(self, ended: _Ended, message: AllReduce, member: Member) -> bool:
        """Whether an ended collective is the call of a rank whose incarnation took no part in it;
        asked in order.

        Raises:
            CollectiveMismatch: the rank took no part, and its steps say nothing of the others'.
        """
        if message.begins and ended.in_pass and not message.in_pass:
            return False  # its pass is left out, with the calls in it
        own, at = ended.at_of(member.rank), _at(message)
        if _by_epoch(message):
            return (own if own != ABSENT else ended.at).epoch >= at.epoch
        if own != ABSENT:
            return own >= at
        if (not self._uneven and message.exact) or not at.place:
            return ended.at >= at  # without a place it makes all calls again
        if ended.at.epoch or at.epoch:
            return ended.at.epoch >= at.epoch
        last, between = self._ended.get(message.seen), range(message.seen + 1, ended.number)
        if last is not None and not between and last.at_of(member.rank) == at:
            return True  # it has made no step since
        if not message.inner and all(self._ended[each].in_pass for each in between):
            return True  # it makes all calls again that are in no pass
        raise CollectiveMismatch(
            f"rank {member.rank} (incarnation {member.incarnation}) called {_in_words(message)} at "
            f"step {at.place} of its program, and the others made collective {ended.number} "
            f"({ended.what}) without it, at step {ended.at.place} of theirs: as the ranks make "
            "unequal numbers of steps, whether this is the same call cannot be told",
            fix="make the calls behind the epochs of a loop over loader.epochs, or over "
            "range(epochs), whose calls are all made again; or let all ranks make as many steps",
        )

    def _check_none_left_out(self, message: AllReduce, member: Member) -> None:
        """Refuse a call behind a step at which the rank has made some of its calls of before, and
        not the next one: the ones that follow would get results of others."""
        last, left_out = self._ended.get(message.seen), self._ended.get(message.seen + 1)
        if last is None or left_out is None or not message.exact:
            return
        at, of_last = left_out.at_of(member.rank), last.at_of(member.rank)
        if member.client in left_out.clients or left_out.inner or at == ABSENT:
            return
        if (at.place, at.ticks) == (of_last.place, of_last.ticks) and at.place < message.place:
            raise CollectiveMismatch(
                f"rank {member.rank} (incarnation {member.incarnation}) called "
                f"{_in_words(message)} at step {message.place} of its program, and has left out "
                f"one of its calls of before at step {at.place}: {left_out.what}",
                fix="make the calls of before in the same order; begin without resume= where "
                "fewer are to be made",
            )

    def _check_again(self, ended: _Ended, message: AllReduce, member: Member) -> None:
        """Refuse the result of another call than a rank makes: its function has changed since."""
        before, at, then = self._ended.get(message.seen), _at(message), ended.at_of(member.rank)
        more = message.exact and before is not None and before.at_of(member.rank).place == at.place
        later = then.place - at.place or then.ticks - at.ticks
        if ended.what == _what(message) and not (more and later > 0):
            return
        where = f"rank {member.rank} (incarnation {member.incarnation}) called {_in_words(message)}"
        was, cause = ended.what, ""
        if ended.what == _what(message):
            was = f"the next one {later} steps later"
            cause = (
                ". As only the steps between the calls differ, a loader may have another "
                "batch_size, dataset or batches_per_step"
            )
        raise CollectiveMismatch(
            f"{where} at step {at.place} of its program, where the call of before was {was}: a "
            f"function that begins again gets the results that its calls had{cause}",
            fix="make the calls of before in the same order; in a loop that begins at worker.clock "
            "ask for it behind the calls of the setup; where a run goes on from a checkpoint make "
            "new ones behind them only, or begin without resume=",
        )

    def _check(self, message: AllReduce) -> None:
        """Refuse what no client of ours sends, and what is too large."""
        known = message.op in OPS and message.dtype in DTYPES
        known = known and (message.op, message.dtype) != ("mean", "int64")
        shape = len(message.shape) <= DIMENSIONS_MAX and min(message.shape, default=0) >= 0
        shape = shape and not (message.number and message.shape)
        shape = shape and (message.parts == 0 or message.number)
        counts = message.place, message.epoch, message.ticks, message.seen, message.parts
        if not (known and shape) or min(counts) < 0:
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
                fix="reduce less, or raise it with limits=ps.Limits(reduce_bytes_max=...) of "
                "the engine or ps.serve; gradients are reduced by worker.optimizer",
            )


def _record(ended: _Ended, parts: int = 0) -> EndedRecord:
    (place, epoch, ticks), about = ended.at, (ended.result, ended.dtype, ended.what)
    return EndedRecord(
        ended.number,
        place,
        *about,
        parts=parts,
        epoch=epoch,
        inner=ended.inner,
        in_pass=ended.in_pass,
        ticks=ticks,
        elsewhere=dict(ended.places),
    )


def _restored(record: EndedRecord) -> _Ended:
    """Ended collective from its record; its clients have no session any more."""
    at = At(record.place, record.epoch, record.ticks)
    about = record.result, record.dtype, record.what, record.elsewhere
    return _Ended(
        record.number, at, frozenset(), *about, inner=record.inner, in_pass=record.in_pass
    )


def _answer(
    call: int, number: int, value: bytes, dtype: str, without: Sequence[Member] = ()
) -> AllReduced:
    missing = tuple(Missing(each.rank, each.state) for each in without)
    return AllReduced(call, number, value, ended=True, missing=missing, dtype=dtype)


def _some_only(rank: int, place: int, more: str) -> CollectiveMismatch:
    return CollectiveMismatch(
        f"rank {rank} was started again and has made some of the collectives at step {place} of "
        f"its program before it steps, and the others one more: {more}. Which of them were its "
        "own, and so which results it should have, cannot be told",
        fix="in a loop over range(worker.clock, n), or within a pass over a loader, make all "
        "collectives before the step, or all behind it; behind an epoch they belong behind the "
        "pass, in a loop over loader.epochs",
    )


def _check_alike(opened: _Open, message: AllReduce, rank: int) -> None:
    ours, theirs = _in_words(message), _in_words(opened.first)
    if ours != theirs:
        raise ParamServeError(
            f"rank {rank} called {ours}, and rank {opened.rank} {theirs}",
            fix="make the same calls in the same order on all ranks, with numbers on all, or with "
            "arrays or tensors of one shape and dtype: float(loss) is a number",
        )


def _by_epoch(message: AllReduce) -> bool:
    """Whether only the epoch says where a program is: the first call of a round is made again, with
    those that follow it."""
    return not message.exact and message.epoch > 0


def _at(message: AllReduce | PassBy) -> At:
    return At(message.place, message.epoch, message.ticks)


def _what(message: AllReduce) -> str:
    """The kind of a call, in few words: all ranks make it alike."""
    if message.op == BARRIER:
        return BARRIER
    value = "a number" if message.number else f"{message.dtype}{list(message.shape)}"
    return f"{message.op} of {value}"


def call_of(op: str) -> str:
    """What makes a collective."""
    return "worker.barrier()" if op == BARRIER else "worker.all_reduce()"


def _in_words(message: AllReduce) -> str:
    if message.op == BARRIER:
        return call_of(message.op)
    if message.parts:
        return f'worker.loader(..., shards="own") for its loader {message.parts} of that kind'
    what = f"an array of {message.dtype} and shape {list(message.shape)}"
    if message.number:
        what = "a number"
    return f"worker.all_reduce(op={message.op!r}) with {what}"


def reduced(calls: list[AllReduce]) -> tuple[bytes, str]:
    """The values of the ranks as one, taken in the order given, and its dtype.

    Numbers of several dtypes become float64.
    """
    op, dtype = calls[0].op, calls[0].dtype
    if op == BARRIER:
        return b"", dtype
    if op == RANK0:  # the first one's
        return calls[0].value, dtype
    if any(each.dtype != dtype for each in calls):
        dtype = "float64"
    combine = COMBINE[op]
    total, *others = (np.frombuffer(each.value, each.dtype).astype(dtype) for each in calls)
    with np.errstate(all="ignore"):  # Inf and NaN are values like others
        for each in others:
            combine(total, each, out=total)
        if op == "mean":
            total /= np.array(len(calls), dtype)
    return total.tobytes(), dtype
