"""The client's end of a session with one shard: numbering, retry, and who owns a slot when.

A request keeps its number and its slots from the moment it is submitted until its reply has been
read, through any number of connections. A timeout frees nothing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar
from weakref import ref

from msgspec import Struct, structs

from paramserve.errors import ParamServeError, rebuild
from paramserve.messages import ALIGN, Done, NotRead, Read, Refused, ShardRequest, Step, Values

SLOT_ALIGN = ALIGN


class Operation(Struct, eq=False):
    """One call of a client: requests to one or more shards, complete when each has answered.

    The first refusal counts. The shards check alike, so a refused request is refused by all, unless
    it met them in different states, as when its worker is declared dead meanwhile. Where one has
    applied its part and another has not, the error says "unknown".
    """

    waiting: int
    """Shards that have not answered."""
    numbered: bool = False
    """Whether its requests have numbers: from then on it is answered, or fails by itself."""
    complete: bool = False
    replies: dict[int, Done] = {}
    error: ParamServeError | None = None
    on_complete: Callable[[], object] | None = None
    """Called when it is complete, in the thread that reads the last answer."""
    refused: dict[int, Refused] = {}
    """The refusals, by shard."""

    def answered(self, shard: int, reply: Done | Refused) -> None:
        """One shard's answer has been read."""
        match reply:
            case Done():
                self.replies[shard] = reply
            case Refused():
                self._refused(shard, reply)
        self.waiting -= 1
        if self.waiting:
            return
        if self.error is not None:
            self._judge()
        self.complete = True
        if self.on_complete is not None:
            self.on_complete()
            self.on_complete = None  # it refers to this, and to slots

    def failed(self, error: ParamServeError) -> None:
        """One shard will never answer."""
        if self.error is None:
            self.error = error
        self.waiting -= 1
        if self.waiting:
            return
        self._judge()
        self.complete = True
        if self.on_complete is not None:
            self.on_complete()
            self.on_complete = None  # it refers to this, and to slots

    def _refused(self, shard: int, reply: Refused) -> None:
        self.refused[shard] = reply
        if self.error is None:
            self.error = rebuild(reply.kind, reply.failed, reply.applied, reply.fix)

    def _judge(self) -> None:
        """Say in the error whether something was applied, now that all shards have answered."""
        error = self.error
        assert error is not None
        effects = {error.applied, *(each.applied for each in self.refused.values())}
        failed, fix = error.failed, error.fix
        having = sorted(shard for shard, reply in self.replies.items() if not reply.skipped)
        if having:
            effects.add("yes")
            lacking = sorted(k for k, each in self.refused.items() if each.applied == "no")
            failed += f"; shards {having} have applied their parts"
            failed += f", shards {lacking} have not" if lacking else ""
            fix += "; the values are of two versions now: assign them, or go back to a checkpoint"
        if len(effects) > 1:
            self.error = rebuild(type(error).__name__, failed, "unknown", fix)


class PendingRequest(Struct, eq=False):
    """A request that is not answered yet."""

    message: ShardRequest
    operation: Operation
    call: int
    """Number of the call that this request was part of."""
    place: int = 0
    """Number of that call among all that the client has sent, to any shard."""


class ClientSession:
    """Numbered requests to one shard, and reads.

    `window` calls may be unanswered, which have `requests` numbers together, and as many calls that
    read; one that would send more waits for a reply first.
    """

    def __init__(self, shard: int, window: int, requests: int | None = None) -> None:
        self.shard = shard
        self.window = window
        self.requests = requests if requests is not None else window
        self.calls = 0
        """How many calls have sent something."""
        self.unanswered: deque[PendingRequest] = deque()
        """Numbered, oldest first: what is sent again on a new connection."""
        self.last = 0
        """The highest number given out."""
        self.reads: deque[PendingRequest] = deque()
        """Unanswered, oldest first: these are sent again as well."""
        self.last_read = 0
        """How many reads were sent."""
        self.reading_calls = 0
        """How many calls have sent some."""

    def has_room(self, requests: int = 1) -> bool:
        """Whether a call of that many requests may be sent before another reply.

        Both are counted from the oldest unanswered one, not by how many are unanswered: a shard
        keeps outcomes for that many numbers, and a reply behind a lost one may arrive.
        """
        if not self.unanswered:
            return requests <= self.requests
        oldest = self.unanswered[0]
        few = self.last - oldest.message.seq + requests < self.requests
        return few and self.calls - oldest.call + 1 < self.window

    def has_room_to_read(self, reads: int = 1) -> bool:
        """Whether a call of so many reads may be sent before another is answered."""
        if not self.reads:
            return reads <= self.requests
        few = len(self.reads) + reads <= self.requests
        return few and self.reading_calls - self.reads[0].call + 1 < self.window

    @property
    def full(self) -> bool:
        """Whether the next request must wait for a reply."""
        return not self.has_room()

    @property
    def outstanding(self) -> bool:
        """Whether anything is unanswered."""
        return bool(self.unanswered or self.reads)

    @property
    def oldest(self) -> int | None:
        """The place of the call that is unanswered longest, if one is."""
        places = [each[0].place for each in (self.unanswered, self.reads) if each]
        return min(places, default=None)

    def submit(
        self, message: ShardRequest, operation: Operation, *, first: bool = True, place: int = 0
    ) -> ShardRequest:
        """Number a request and remember it; returns what to send. The session must have room.

        A step or read is numbered in place: it is made for one shard and one call.

        Args:
            first: of its call; the others come right after it.
            place: of the call among all that the client sends.
        """
        if type(message) is Read:
            self.reading_calls += first
            self.last_read += 1
            message.seq, message.behind = self.last_read, self.last
            self.reads.append(PendingRequest(message, operation, self.reading_calls, place))
            return message
        unanswered = self.unanswered
        if first:
            assert not unanswered or self.has_room(), "the caller waits for a reply first"
            self.calls += 1
        self.last = last = self.last + 1
        if type(message) is Step:
            numbered: ShardRequest = message
            message.seq = last
        else:
            numbered = structs.replace(message, seq=last)
        unanswered.append(PendingRequest(numbered, operation, self.calls, place))
        return numbered

    def take_back(self, messages: Sequence[ShardRequest]) -> None:
        """Take back the numbers of the last call, of these requests, which is not sent after
        all."""
        for message in messages:
            if type(message) is Read:
                self.reads.pop()
                self.last_read -= 1
            else:
                self.unanswered.pop()
                self.last -= 1
        if messages and type(messages[0]) is Read:
            self.reading_calls -= 1
        elif messages:
            self.calls -= 1

    def pending_for(self, reply: Done | Refused) -> PendingRequest | None:
        """The unanswered request that a reply answers; None if it was answered before."""
        for each in self.reads if isinstance(reply, Values | NotRead) else self.unanswered:
            if each.message.seq == reply.seq:
                return each
        return None

    def on_reply(self, reply: Done | Refused) -> PendingRequest | None:
        """Take a reply; None if that number was answered before (a repeated answer)."""
        read = type(reply) is Values or type(reply) is NotRead
        unanswered = self.reads if read else self.unanswered
        if unanswered and unanswered[0].message.seq == reply.seq:
            answered = unanswered.popleft()
        else:
            late = self.pending_for(reply)
            if late is None:
                return None
            answered = late
            unanswered.remove(answered)
        answered.operation.answered(self.shard, reply)
        return answered

    def to_resend(self) -> list[ShardRequest]:
        """Unanswered requests for a new connection, in order, each with its old number.

        Gradients may have been written to since: a step does not say any more that they were
        looked at.
        """
        reads = [each.message for each in self.reads]
        numbered = [_not_looked_at(each.message) for each in self.unanswered]
        return sorted([*numbered, *reads], key=_order)

    def abandon(self, error: ParamServeError) -> None:
        """Fail everything unanswered: the shard is gone for good."""
        for queue in (self.unanswered, self.reads):
            while queue:
                queue.popleft().operation.failed(error)


def _order(message: ShardRequest) -> tuple[int, int]:
    """Order in which requests were sent: a read behind the numbered one that came before it."""
    return (message.behind, message.seq) if type(message) is Read else (message.seq, 0)


def _not_looked_at(message: ShardRequest) -> ShardRequest:
    if type(message) is Step and message.largest >= 0.0:
        return structs.replace(message, largest=-1.0)
    return message


class Pooled(Protocol):
    """What a pool gives out."""

    own: ref[Any]
    """Reference to itself; the pool sets it."""


S = TypeVar("S", bound=Pooled)


class SlotPool(Generic[S]):
    """Which parts of a client's arenas are free.

    A slot is taken in the step that gives it out, and never moves: two requests never share bytes.
    One that is given back is used again as it is for its own size, since steps repeat their sizes.
    When nothing fits, what is free is joined with its free neighbours and cut anew.

    The pool refers to no slot that is taken. One that nothing else refers to either has been lost:
    an interrupt came when its owner changed. `reclaim` makes it free.

    Args:
        make: the owner's own object for a slot, from (arena, offset, size in bytes).
    Attributes:
        in_use_by: slots in use, with their sizes.
        lost_slots: slots that nothing refers to; of those that were free, some.
        in_use: bytes of the slots that are taken.
        peak: the most that it was; the owner may set it back.
    """

    def __init__(self, make: Callable[[int, int, int], S]) -> None:
        self.in_use_by: dict[ref[S], int] = {}
        self.lost_slots = deque[ref[S]]()
        self.in_use = 0
        self.peak = 0
        self._make = make
        self._free = defaultdict[int, list[S]](list)
        """Free slots by size."""
        self._gaps: dict[int, list[tuple[int, int]]] = {}
        """Begin and end of what is free and no slot, by arena, in order."""
        self._whole: dict[int, tuple[int, int]] = {}
        self._lost_at: dict[ref[S], int] = {}
        """Number of the last call when `reclaim` saw each lost slot."""
        self._at: dict[ref[S], tuple[int, int, int]] = {}
        """Arena, begin and size of each slot, free or taken."""

    def add_arena(self, number: int, start: int, nbytes: int) -> None:
        """An arena whose bytes from `start` (aligned) can be given out."""
        self._whole[number] = (start, nbytes)
        self._gaps[number] = [(start, nbytes)]

    def take(self, nbytes: int) -> S | None:
        """A free slot of at least `nbytes`. None: a new arena is needed."""
        size = (nbytes + SLOT_ALIGN - 1) // SLOT_ALIGN * SLOT_ALIGN or SLOT_ALIGN
        free = self._free[size]
        slot = free.pop() if free else self._cut(size)
        if slot is None:
            self._join()
            slot = self._cut(size)
        if slot is not None:
            self.in_use_by[slot.own] = size
            self.in_use += size
            if self.in_use > self.peak:
                self.peak = self.in_use
        return slot

    def _cut(self, size: int) -> S | None:
        """A slot in the smallest arena that has room, in the smallest gap there that it fits into:
        large gaps stay for large slots, and large arenas become empty."""
        for number in sorted(self._whole, key=self._room):
            gaps = self._gaps[number]
            fitting = [
                (end - start, index)
                for index, (start, end) in enumerate(gaps)
                if start + size <= end
            ]
            if fitting:
                _, index = min(fitting)
                start, end = gaps[index]
                gaps[index : index + 1] = [(start + size, end)] if start + size < end else []
                slot = self._make(number, start, size)
                slot.own = ref(slot, self.lost_slots.append)
                self._at[slot.own] = (number, start, size)
                return slot
        return None

    def _room(self, number: int) -> int:
        """Bytes of an arena that can be given out."""
        start, end = self._whole[number]
        return end - start

    def _join(self) -> None:
        """Make all that is not taken free to be cut anew. What an interrupt has left neither free
        nor taken is among it."""
        at = {slot: self._at[slot] for slot in self.in_use_by}
        gaps: dict[int, list[tuple[int, int]]] = {}
        for number, (begin, end) in self._whole.items():
            gaps[number] = []
            for start, size in sorted(place[1:] for place in at.values() if place[0] == number):
                if begin < start:
                    gaps[number].append((begin, start))
                begin = start + size
            if begin < end:
                gaps[number].append((begin, end))
        in_use = sum(size for _, _, size in at.values())
        free = defaultdict[int, list[S]](list)
        # At once: there is no call in between that an interrupt could come with.
        self._free, self._gaps, self._at, self.in_use = free, gaps, at, in_use

    def unused(self) -> list[int]:
        """The arenas that no slot is taken in."""
        self._join()
        used = {number for number, _, _ in self._at.values()}
        return [number for number in self._whole if number not in used]

    def drop_arena(self, number: int) -> None:
        """Give nothing of an arena out any more; `unused` has named it just now."""
        del self._gaps[number], self._whole[number]

    def give_back(self, slots: Sequence[S]) -> None:
        """Release slots of their last owner. A caller that takes as many in the same order gets the
        same ones: what was said of a slot is then said again."""
        for slot in reversed(slots):
            size = self.in_use_by[slot.own]
            del self.in_use_by[slot.own]
            self.in_use -= size
            self._free[size] += [slot]

    def reclaim(self, *, oldest: int, last: int) -> None:
        """Make slots free that were lost, as soon as all calls are answered that were sent before
        they were seen here: no later one speaks of them.

        Args:
            oldest: the place of the call that is unanswered longest.
            last: that of the last call.
        """
        for _ in range(len(self.lost_slots)):
            own = self.lost_slots[0]
            if own in self.in_use_by:
                if oldest <= self._lost_at.setdefault(own, last):
                    self.lost_slots.rotate(-1)
                    continue
                self.in_use -= self.in_use_by[own]
                del self.in_use_by[own]
            self._lost_at.pop(own, None)
            self.lost_slots.popleft()
