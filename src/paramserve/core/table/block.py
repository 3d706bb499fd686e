"""A table on one shard: the rows of the keys that hash to it, changed by the table's rule.

To its group it is a block like those of tensors. Its gradients are `RowGradient`s: keys, each once,
with their gradients; a read names keys, and the places where their rows go.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol, cast, final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from paramserve.core.request_memory import Bytes, Memory, aligned
from paramserve.core.shard_storage import Keep, ShardStorage
from paramserve.core.table import hashing, parts, routing, wide
from paramserve.core.table.admission import Waiting
from paramserve.core.table.changes import Changed, RowChanges
from paramserve.core.table.cut import CutRows
from paramserve.core.table.encoded import HEAD_BYTES, row_codecs
from paramserve.core.table.hashing import stream_of
from paramserve.core.table.options import TableOptions
from paramserve.core.table.parts import Records, RowGradient
from paramserve.core.table.store import Purpose, RowStore
from paramserve.core.user_rules import guarded
from paramserve.errors import Overloaded, ParamServeError, ShapeMismatch
from paramserve.messages import (
    ALIGN,
    BlockSpec,
    Contains,
    Delete,
    Gradient,
    Keys,
    Put,
    ReadTarget,
    Run,
    Scan,
    TableReport,
)
from paramserve.rules.base import Hyper, PushInfo, RowRule, Rule
from paramserve.rules.compiled import compiled
from paramserve.rules.layout import WIDE, RowLayout
from paramserve.rules.registry import is_built_in
from paramserve.rules.rows import (
    RowDraft,
    apply_rows,
    check_rows,
    draft_rows,
    for_kernels,
    initial_state,
    row_layout,
    scaled,
)

Array = npt.NDArray[Any]

PLACES_MAX = 1 << 31
"""Places of rows are int32."""
SCATTERED_MAX = 1 << 16
"""Rows that one read may have sent each by itself: where a reader that shared its memory when it
chose their places no longer does. Each takes 24 bytes of a header."""
EMPTY = np.empty(0, np.uint8)


class RowStates(Struct, frozen=True):
    """What each row of a table has for its rule besides values."""

    names: tuple[str, ...]
    widths: tuple[int, ...]
    """Elements of each."""
    counted: bool
    """Whether it has the count of its updates."""


class RowUpdate:
    """An update by a rule that is not ours: computed on copies, and written once it is decided.

    Args:
        keys: those of the gradient that have a row, or get one.
        draft: of their rows; None: there are none.
    """

    def __init__(
        self, block: KeyedBlock, gradient: RowGradient, keys: Array, draft: RowDraft | None
    ) -> None:
        self._block, self._gradient = block, gradient
        self._keys, self._draft = keys, draft

    def leave_out(self, keys: Array) -> None:
        """These rows were overwritten or removed, and stay so."""
        own, values = self._gradient
        stay = np.isin(own, keys, invert=True)
        self._gradient = RowGradient(own[stay], values[stay])

    def __call__(self, out: Array | None = None) -> None:
        assert out is None, "rows are read by `read`"
        block = self._block
        # Rows may lie elsewhere by now; one that was evicted in between is made again.
        rows, keys, _, dropped = block.admitted(self._gradient, Purpose.PUSH)
        block.unadmitted += dropped.size
        if self._draft is None:
            return
        if keys.size < self._keys.size:
            self._draft.choose(np.isin(self._keys, keys))
        self._draft.write(block.store.view(rows, keys))


class SavedTable(Protocol):
    """A table of a cut on one shard; of its fields, `core.table.cut` tells."""

    @property
    def spec(self) -> BlockSpec: ...

    @property
    def attempt(self) -> int: ...

    @property
    def states(self) -> RowStates: ...

    @property
    def used_at(self) -> int: ...

    @property
    def unadmitted(self) -> int: ...

    @property
    def clock(self) -> int: ...

    @property
    def created(self) -> int: ...

    @property
    def evicted(self) -> int: ...

    @property
    def deleted(self) -> int: ...

    @property
    def candidates(self) -> Waiting | None: ...

    def batches(self, layout: RowLayout) -> Iterator[CutRows]:
        """All rows, some at a time."""

    def uses(self) -> tuple[hashing.Keys, hashing.Keys] | None:
        """All keys with the clocks of their last use, the one first whose use is longest ago; None:
        the table lets no rows go. Asked for behind `batches`."""


@final
class KeyedBlock(ShardStorage):
    """The part of a table that one shard holds.

    Attributes:
        clock: of its group, the slowest worker's; what rows are said to be used at. The shard
            keeps it.

    Raises:
        ValueError, TypeError: the rule cannot work on rows.
    """

    may_fail = True
    """A server may have no room for its new rows."""

    def __init__(self, spec: BlockSpec, shards: int, rule: Rule, attempt: int) -> None:
        assert spec.table is not None
        super().__init__(spec, rule, attempt)
        self.table = spec.table
        self.dim = spec.table.dim
        self._of = f" rows of table {self.names}"
        self._row_align = math.gcd(ALIGN, 4 * self.dim)
        """In bytes, of each row where the first one is aligned to `ALIGN`."""
        self.codecs = row_codecs(spec)
        """Codecs of rows that travel in frames."""
        self.clock = 0
        self.unadmitted = 0
        """Gradients of keys that had no row yet."""
        self.hyper = rule.hyper()
        self._wide = WIDE.get(spec.table.dtype)
        """What its numbers are, if they are of 64 bits."""
        self._drafts = not is_built_in(rule)
        """Whether updates are computed on copies."""
        built_in = is_built_in(rule) and self._wide is None
        self._ours = cast(RowRule, rule) if built_in else None
        """Rule, if it is one with kernels, which needs no guard."""
        with guarded(self._about("cannot start"), rule, (ValueError, TypeError)):
            self.layout = row_layout(rule, self.table.dim, self.table.dtype)
            state = initial_state(rule, self.layout)
            names = tuple(rule.states(self.hyper))
        self.states = RowStates(names, self.layout.widths, self.layout.counted)
        stream = stream_of(self.table.seed, spec.group_name)
        options = TableOptions.from_spec(self.table.options).of_shard(shards)
        self.store = RowStore(self.layout, state, options, stream, f"table {self.names}")
        self.changes: RowChanges | None = None
        """Changes since the last checkpoint; None: there was none, nor an attempt."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays that the block holds."""
        return self.store.memory_bytes

    def restore(self, saved: SavedTable) -> None:
        """Have the rows and counters of a table of a cut; this one is empty. Raises what
        `saved.batches` does."""
        store = self.store
        for rows in saved.batches(self.layout):
            store.write_raw(store.put_new(rows.keys), rows.raw)
        uses = saved.uses()
        if uses is not None:
            store.set_uses(*uses)
        store.restore(saved.clock, saved.created, saved.evicted, saved.deleted, saved.candidates)
        self.clock, self.unadmitted = saved.used_at, saved.unadmitted

    def begin_checkpoint(self, checkpoint: int) -> Changed:
        """What has changed since the checkpoint before, as this one is to have it."""
        if self.changes is None:
            self.changes = RowChanges()
            self.store.watchers.append(self.changes)
        return self.changes.cut(checkpoint)

    def report(self) -> TableReport:
        store = self.store
        return TableReport(
            len(store),
            store.memory_bytes,
            self.layout.state_words,
            store.created,
            store.evicted,
            self.unadmitted,
            store.deleted,
        )

    def _check_hyper(self, rule: Rule, hyper: Hyper) -> None:
        """Check hyper-parameters as `ShardStorage.check` does; rows may also lack the count of
        updates that hyper-parameters need."""
        about = self._about("failed to check its hyper-parameters")
        with guarded(about, rule, (ValueError, ParamServeError)):
            rule.check(hyper)
            check_rows(rule, self.layout, hyper)
        super()._check_hyper(rule, hyper)

    def _check_active(self, active: Sequence[int]) -> None:
        raise ShapeMismatch(
            f"the pieces {list(active)} were named for table {self.names}, which has rows",
            fix="name the rows by their keys",
        )

    # --- gradients -------------------------------------------------------------------------------

    def gradient(self, memory: Memory, header: Gradient) -> RowGradient:
        """A gradient that lies in a request's memory.

        Each key is to stand there once, as our clients send it. Unchecked: for one that stands
        there twice the rule runs twice, or of the two the later one holds. No other row is touched.

        Raises:
            ShapeMismatch: it does not lie there. Nothing was applied.
        """
        offset, rows, dim = header.offset, header.rows, self.dim
        if header.encoded_bytes:
            whole = self._encoded(memory.get(header.arena), offset, header.encoded_bytes)
            try:
                if self.codecs is None:
                    raise ValueError("it was defined without codecs")
                return self.codecs.read_gradient(whole)
            except ValueError as error:
                raise self._not_encoded("gradients", error) from error
        nbytes = parts.gradient_bytes(rows, dim) if rows >= 0 else -1
        whole = parts.within(
            memory.get(header.arena), offset, nbytes, "gradients of ", rows, self._of
        )
        return parts.gradient_at(whole, offset, rows, dim)

    def _encoded(self, memory: Bytes | None, offset: int, nbytes: int) -> Bytes:
        """Encoded bytes that lie in a request's memory, 8-byte aligned.

        Raises:
            ShapeMismatch: they do not lie there. Nothing was applied.
        """
        whole = parts.within(memory, offset, nbytes, "", nbytes, f" bytes of{self._of}")
        data = whole[offset : offset + nbytes]
        if data.ctypes.data % 8:
            data, unaligned = aligned(nbytes), data
            data[...] = unaligned
        return data

    def _not_encoded(self, what: str, why: ValueError) -> ShapeMismatch:
        return ShapeMismatch(
            f"what came as {what} of{self._of} is none: {why}",
            fix="send what the table's codecs have made of rows, whose keys rise",
        )

    def largest(self, gradient: RowGradient, active: Sequence[int] | None) -> float:
        """The largest size of an element; inf if one is NaN or Inf."""
        if self._wide is not None:
            return wide.largest(gradient.values.view(self._wide))
        return float(compiled().largest(gradient.values.reshape(-1)))

    def squared_norm(self, gradient: RowGradient) -> float:
        """Sum of the squares of all elements."""
        if self._wide is not None:
            return wide.squared_norm(gradient.values.view(self._wide))
        return float(compiled().squared_norm(gradient.values.reshape(-1)))

    def reserve(self) -> None:
        """Sums of rows have memory of their own, as large as they are."""

    def find_room(self, gradient: RowGradient) -> None:
        """See that there is room for the rows of a gradient's keys.

        Raises:
            TableFull: there is none; nothing was changed.
        """
        self.admitted(gradient, Purpose.DRAFT)

    def hold(self, removed: int = 0) -> None:
        """Keep the room for the rows of the update that was looked at last, until `release`; and
        for rows that were removed since."""
        self.store.reserved_rows = (
            self.store.reserved_rows + removed if removed else self.store.drafted
        )

    def release(self) -> None:
        """Release the memory of an update that was applied or is not to come."""
        self.store.reserved_rows = 0

    def total(self, weighted: Sequence[tuple[float, Gradient, RowGradient]]) -> RowGradient:
        """Weighted sum of several gradients, key by key, in the order given."""
        if len(weighted) == 1 and weighted[0][0] == 1.0:
            return weighted[0][2]
        keys = np.concatenate([gradient.keys for _, _, gradient in weighted])
        if self._wide is not None:
            rows = [scaled(each.values.view(self._wide), weight) for weight, _, each in weighted]
            return wide.summed(keys, np.concatenate(rows))
        values = np.concatenate(
            [
                gradient.values if weight == 1.0 else gradient.values * np.float32(weight)
                for weight, _, gradient in weighted
            ]
        )
        return routing.summed(keys, values)

    def apply(
        self,
        gradient: RowGradient,
        active: Sequence[int] | None,
        hyper: Hyper | None,
        push: PushInfo,
        out: Array | None = None,
    ) -> None:
        """Apply the rule to the rows of these keys; keys that have none get one, where the table
        admits them.

        Raises:
            TableFull: there is no room for the new ones. RuleFailed: the rule is not one of ours,
                and failed. In both cases nothing was changed.
        """
        assert out is None, "rows are read by `read`"
        if self._drafts:
            self.prepare(gradient, active, hyper, push)()
            return
        rows, keys, values, dropped = self.admitted(gradient, Purpose.PUSH)
        self.unadmitted += dropped.size
        numbers = hyper if hyper is not None else self.hyper
        if keys.size and self._ours is not None:
            self._ours.apply_rows(self.store.view(rows, keys), for_kernels(values), numbers, push)
        elif keys.size:
            assert self.rule is not None, "a table has one"
            apply_rows(self.rule, self.store.view(rows, keys), values, numbers, push)

    def admitted(
        self, gradient: RowGradient, purpose: Purpose
    ) -> tuple[Array, Array, Array, Array]:
        """Rows for the keys of a gradient, [m], their keys, and their gradients [m, dim]: without
        those that the table does not admit yet, whose keys come last."""
        keys, values = gradient
        if not keys.size and purpose is Purpose.PUSH:
            return keys, keys, values, keys
        result = self.store.take(keys, self.clock, purpose)
        if not result.dropped:
            return result.rows, keys, values, keys[:0]
        there = np.flatnonzero(result.rows != -1)
        return result.rows[there], keys[there], values[there], keys[result.rows == -1]

    def prepare(
        self,
        gradient: RowGradient,
        active: Sequence[int] | None,
        hyper: Hyper | None,
        push: PushInfo,
    ) -> Keep:
        """Make sure of an update without a change: there is room for its rows, and a rule that is
        not ours has been run on copies. Where rows are overwritten or removed before the update is
        kept, one by a rule of ours comes behind that; one of another rule has to leave them out.

        Raises:
            As `apply`.
        """
        assert self.rule is not None, "a table has one"
        rows, keys, values, _ = self.admitted(gradient, Purpose.DRAFT)
        if not self._drafts:
            return partial(self.apply, gradient, active, hyper, push)
        draft: RowDraft | None = None
        if keys.size:
            numbers = hyper if hyper is not None else self.hyper
            with guarded(self._about("failed"), self.rule):
                view = self.store.drafts(rows, keys)
                draft = draft_rows(self.rule, view, values, numbers, push)
        return RowUpdate(self, gradient, keys, draft)

    # --- reads -----------------------------------------------------------------------------------

    def check_place(self, memory: Memory, place: ReadTarget) -> None:
        """Refuse a read whose keys or places do not lie in its memory; nothing is written.

        Raises:
            ShapeMismatch, Overloaded: nothing was read.
        """
        _, places = self._keys(memory, place)
        assert place.keys is not None
        total = place.keys.total
        nbytes, whole = self._read_bytes(place), memory.get(place.arena)
        parts.within(whole, place.offset, nbytes, "", total, self._of, self._row_align)
        if places is None:
            return
        if memory.mirrored and SCATTERED_MAX < places.size < total:
            raise Overloaded(
                f"{places.size} rows of table {self.names} were to be sent one by one, which is "
                f"for at most {SCATTERED_MAX}",
                fix="read again: rows are asked for together where a server maps no memory",
            )
        # Of a place below 0, the same bits are a number past all that there may be.
        if places.size and int(np.maximum.reduce(places.view(np.uint32))) >= min(total, PLACES_MAX):
            raise ShapeMismatch(
                f"rows of table {self.names} were to go to places {int(places.min())} to "
                f"{int(places.max())} of {total}",
                fix="name places within the array",
            )

    def _read_bytes(self, place: ReadTarget) -> int:
        """What a read writes."""
        keys = place.keys
        assert keys is not None
        if place.room:
            return place.room
        return 4 * self.dim * keys.total if keys.total > 0 else 0

    def _keys(self, memory: Memory, place: ReadTarget) -> tuple[Array, Array | None]:
        """The keys of a read, and where their rows go; None: encoded, in order."""
        request = place.keys
        if request is None or request.rows < 0:
            raise ShapeMismatch(
                f"a read of table {self.names} names no keys", fix="name the keys of the rows"
            )
        whole = memory.get(request.arena)
        if place.room:
            return self._encoded_keys(whole, request, place.room), None
        nbytes = parts.keys_bytes(request.rows)
        whole = parts.within(whole, request.offset, nbytes, "keys of ", request.rows, self._of)
        return parts.keys_at(whole, request.offset, request.rows)

    def _encoded_keys(self, whole: Bytes | None, request: Keys, room: int) -> Array:
        """The keys of a read whose rows are written encoded; as `_keys`."""
        needed = None if self.codecs is None else self.codecs.pull.size(request.rows)
        if self.codecs is None or room != needed:
            raise ShapeMismatch(
                f"{request.rows} encoded rows of table {self.names} were to be written to {room} "
                f"bytes, they take {needed}",
                fix="read with the table's codec of pulls",
            )
        self._encoded(whole, request.offset, HEAD_BYTES)
        assert whole is not None
        try:
            return self.codecs.read_request(whole[request.offset :], request.rows)
        except ValueError as error:
            raise self._not_encoded("keys", error) from error

    def read(self, memory: Memory, place: ReadTarget) -> Sequence[Run]:
        """Write the rows of the keys asked for to their places, or encoded in order; the runs of
        memory that were written. A key without a row has its initial values; a read creates no row,
        and is no use of one."""
        keys, places = self._keys(memory, place)
        assert place.keys is not None
        if not keys.size:  # there may be no memory for the rows of none
            return ()
        whole, nbytes = memory.get(place.arena), self._read_bytes(place)
        assert whole is not None, "check_place() comes first"
        if places is None:
            out = np.empty(self.dim * keys.size, np.float32)
        else:
            out = np.frombuffer(whole, np.float32, place.keys.total * self.dim, place.offset)
        result = self.store.take(keys, self.clock, Purpose.READ)
        self.store.read(result.rows, keys, out.reshape(-1, self.dim), places)
        if places is None:
            assert self.codecs is not None
            whole[place.offset : place.offset + nbytes] = self.codecs.answer(out)
        elif memory.mirrored and keys.size < place.keys.total:  # other shards write between them
            starts = place.offset + 4 * self.dim * places.astype(np.int64)
            return [(place.arena, start, 4 * self.dim) for start in starts.tolist()]
        return ((place.arena, place.offset, nbytes),)

    # --- whole rows ------------------------------------------------------------------------------

    def _width(self, message: Scan | Put) -> int | None:
        if message.width in (-1, self.layout.state_words) and message.rows >= 0:
            return None if message.width < 0 else message.width
        raise ShapeMismatch(
            f"rows with {message.width} elements of state were named for table {self.names}, "
            f"whose rule {self.spec.rule} keeps {self.layout.state_words}",
            fix="use the same rule, or leave the state out",
        )

    def records_bytes(self, message: Scan | Put) -> int:
        """Bytes of as many whole rows as a request names."""
        return parts.records_bytes(message.rows, self.dim, self._width(message), message.idle)

    def records(self, memory: Array | None, message: Scan | Put, offset: int) -> Records:
        """The whole rows that lie in a request's memory.

        Raises:
            ShapeMismatch: they do not lie there. Nothing was applied.
        """
        nbytes, width = self.records_bytes(message), self._width(message)
        of = f" whole rows of table {self.names}"
        whole = parts.within(memory, offset, nbytes, "", message.rows, of)
        return parts.records_at(whole, offset, message.rows, self.dim, width, message.idle)

    def scan(self, message: Scan, into: Records) -> tuple[int, int]:
        """Leave rows from the cursor on in `into`; how many, and where to go on or -1."""
        if not message.rows:  # a reader of another shard's
            return 0, -1
        keys, rows, after = self.store.scan(max(message.cursor, 0), message.rows)
        count = keys.size
        into.keys[:count] = keys
        self.store.read(rows, keys, into.values[:count], None)
        if into.state is not None and into.counts is not None:
            state, counts = self.store.read_state(rows)
            into.state[:count] = state
            into.counts[:count] = 0 if counts is None else counts
        if into.idle is not None:
            into.idle[:count] = self.store.idle(rows, self.clock)
        return count, after

    def put(self, records: Records) -> Array:
        """Overwrite rows, or create them; but not those that were last used before what the TTL
        allows. The keys of the others.

        Raises:
            NonFinite: they hold what the table's rows cannot hold. TableFull: there is no room for
                the new ones. In both cases nothing was changed.
        """
        if not records.keys.size:
            return records.keys
        parts.check_records(records, self.spec)
        if records.idle is not None and self.store.is_past(records.idle).any():
            records = records.at(~self.store.is_past(records.idle))
        result = self.store.take(records.keys, self.clock, Purpose.PUT)
        self.store.write(result.rows, records.values, records.state, records.counts)
        if records.idle is not None:
            self.store.set_idle(result.rows, records.idle)
        return records.keys

    # --- which rows are there --------------------------------------------------------------------

    def named(self, memory: Array | None, message: Delete | Contains) -> tuple[Array, Array]:
        """The keys that a request names, and what lies behind them: the place of an answer to
        `Contains`.

        Raises:
            ShapeMismatch: they do not lie there. Nothing was applied.
        """
        rows, offset = message.rows, message.offset
        if rows < 0:
            raise ShapeMismatch(
                f"{rows} keys of table {self.names} were named", fix="name the keys of rows"
            )
        end = parts.padded(8 * rows)
        answers = isinstance(message, Contains)
        nbytes = end + parts.padded(rows) if answers else end
        whole = parts.within(memory, offset, nbytes, "keys of ", rows, self._of)
        keys = parts.view_at(whole, np.int64, rows, offset)
        behind = parts.view_at(whole, np.uint8, rows, offset + end) if answers else EMPTY
        return keys, behind

    def delete(self, keys: Array) -> int:
        """Remove rows, and what is counted of keys that have none; how many there were.

        Raises:
            MemoryError: nothing was changed.
        """
        return self.store.delete(keys, self.clock) if keys.size else 0

    def contains(self, keys: Array) -> Array:
        """Which of some keys have a row, uint8 [n]; no row is used by that."""
        if not keys.size:
            return EMPTY
        rows = self.store.take(keys, self.clock, Purpose.READ).rows
        return (rows >= 0).view(np.uint8)
