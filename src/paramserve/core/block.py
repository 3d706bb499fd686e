"""One block on one shard: values, rule state and update counts, changed in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, pairwise
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt

from paramserve.codecs.base import Codec
from paramserve.codecs.delta import Delta
from paramserve.codecs.registry import NONE
from paramserve.core.delta_stream import DeltaStream, Position, encoded_bytes
from paramserve.core.partition import DTYPES, HALVES, PLAIN_DTYPES, borders, bound, size_of
from paramserve.core.pieces import Pieces, Range
from paramserve.core.request_memory import Bytes, Memory, aligned
from paramserve.core.shard_storage import ShardStorage
from paramserve.core.user_codecs import codec_of, why_not_pulled, why_not_pushed
from paramserve.core.user_rules import Copies, guarded
from paramserve.errors import Applied, DtypeMismatch, NonFinite, ParamServeError, ShapeMismatch
from paramserve.messages import ALIGN, VALUE, BlockSpec, Gradient, ReadTarget
from paramserve.rules.base import Hyper, PushInfo, Rule, Run
from paramserve.rules.compiled import compiled
from paramserve.rules.registry import is_built_in

Array = npt.NDArray[Any]


def check_spec(spec: BlockSpec, shards: int) -> None:
    """Refuse a definition that no shard could hold; the coordinator has checked the same before.

    Raises:
        ShapeMismatch: the cuts do not fit the pieces or the shards.
        DtypeMismatch: values of this dtype cannot be held. In both cases nothing was applied.
    """
    whole = all(length >= 0 for piece in spec.pieces for length in piece.shape)
    rising = all(low <= high for low, high in pairwise(spec.cuts))
    ends = (spec.cuts[0], spec.cuts[-1]) if spec.cuts else ()
    fits = len(spec.cuts) == shards + 1 and ends == (0, size_of(spec.pieces))
    if not (spec.pieces and whole and rising and fits):
        raise ShapeMismatch(
            f"block {spec.block} is cut at {spec.cuts} for {shards} shards, its pieces are "
            f"{[piece.shape for piece in spec.pieces[:5]]}",
            fix="define with the cuts that the coordinator gave",
        )
    allowed: Sequence[str] = DTYPES if spec.rule is not None else PLAIN_DTYPES
    if spec.push is not None or spec.pull is not None or spec.half is not None:
        allowed = DTYPES[:1]
    if spec.half is not None and spec.half not in HALVES:
        raise DtypeMismatch(
            f"gradients of block {spec.block} are {spec.half!r}, allowed are {', '.join(HALVES)}",
            fix="convert them first",
        )
    if spec.dtype not in allowed:
        raise DtypeMismatch(
            f"block {spec.block} has dtype {spec.dtype!r}, allowed are {', '.join(allowed)}",
            fix="convert the values first",
        )


def check_whole(spec: BlockSpec) -> None:
    """Refuse cuts within a tensor, for a rule or a codec that needs each one whole.

    Raises:
        ShapeMismatch: nothing was applied.
    """
    if not set(spec.cuts) <= set(borders(spec.pieces)):
        raise ShapeMismatch(
            f"{', '.join(repr(piece.name) for piece in spec.pieces[:3])} in group "
            f"{spec.group_name!r} lies with parts of a tensor on several servers, and its rule "
            "or codec needs whole tensors",
            fix="give a rule or codec that was registered on the servers the same whole_tensors "
            "here",
        )


def _codecs(
    spec: BlockSpec, registered: Mapping[str, type[Codec]]
) -> tuple[Codec | None, Codec | None]:
    """How gradients of a block come, and how values go.

    Raises:
        UnknownCodec, ParamServeError: there is no such codec here, or not with these options, or
            not for values. Nothing was applied.
    """
    try:
        push, pull = codec_of(spec.push, registered), codec_of(spec.pull, registered)
    except ValueError as wrong:
        raise ParamServeError(
            f"block {spec.block} in group {spec.group_name!r}: {wrong}", fix="correct the codec"
        ) from None
    for codec, why_not in ((push, why_not_pushed), (pull, why_not_pulled)):
        why = why_not(codec) if codec is not None else None
        if why is not None:
            raise ParamServeError(
                f"block {spec.block} in group {spec.group_name!r}: {why}",
                fix="give push= and pull= codecs that are for them, or none",
            )
    return push, pull


class InSixteenBits:
    """A shard's part of a 16-bit block as it lies in clients' memory, and travels.

    Attributes:
        dtype: of the bits, as in `HALVES`.
        nbytes: of the part.
    """

    def __init__(self, block: ShardBlock, half: str) -> None:
        self._block = block
        self.dtype = HALVES[half]
        self.nbytes = block.size * self.dtype.itemsize
        self.mark = object()

    def view_at(self, whole: Bytes | None, arena: int, offset: int) -> Array:
        """View of this shard's 16-bit elements, [elements on this shard]; see `Placed.view_at`."""
        return self._block.part(self.dtype, whole, arena, offset)


class BlockUpdate:
    """An update by a rule that is not ours: computed on copies, and written once it is decided."""

    def __init__(
        self, block: ShardBlock, copies: Copies, runs: Sequence[Run], active: Sequence[int] | None
    ) -> None:
        self._block, self._copies = block, copies
        self._runs, self._active = runs, active
        self._counts = True

    def leave_out(self, field: int, active: Sequence[int] | None, *, counts: bool) -> None:
        """A field of some pieces, or all, was overwritten, maybe the counts, too: it stays so."""
        for start, stop in self._block.ranges(active):
            self._copies.leave_out(field, start, stop)
        self._counts = self._counts and not counts

    def __call__(self, out: Array | None = None) -> None:
        block = self._block
        if block.unsaved:
            block.save()
        block.revision += 1
        self._copies.keep(self._runs)
        if out is not None:
            block.leave(out)
        if self._counts:
            block.count(self._active)


class SavedBlock(Protocol):
    """A dense block of a cut."""

    @property
    def spec(self) -> BlockSpec: ...

    @property
    def attempt(self) -> int: ...

    @property
    def counts(self) -> list[int]:
        """Updates that each piece has had."""

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the rule's state arrays, in order."""

    def read(self, number: int, into: Array) -> None:
        """Values (0) or a state array (1, 2, ...), [elements on this shard]."""


@final
class ShardBlock(ShardStorage):
    """The part of a block that one shard holds.

    Args:
        codecs: classes by name that the owner registered, besides the built-in ones.
        streams: gives ids of delta streams, above 0, that no other shard has given; None: 1, 2, ...
    """

    def __init__(
        self,
        spec: BlockSpec,
        shard: int,
        rule: Rule | None,
        attempt: int,
        codecs: Mapping[str, type[Codec]] = NONE,
        streams: Iterator[int] | None = None,
    ) -> None:
        super().__init__(spec, rule, attempt)
        self.low, self.high = spec.cuts[shard], spec.cuts[shard + 1]
        self.size = self.high - self.low
        self.mark = object()
        self.nbytes = self.size * self.dtype.itemsize
        self.value: Array = np.zeros(self.size, self.dtype)
        self.revision = 0
        """Counts the changes of the values; assigned ones count, too."""
        self.state: tuple[Array, ...] = ()
        self.states: tuple[str, ...] = ()
        self.may_fail = rule is not None and not is_built_in(rule)
        """Whether the rule runs on copies, because it may fail in the middle."""
        self._whole = bool(getattr(rule, "whole_tensors", False))
        separate = self._whole or bool(getattr(rule, "separate_tensors", False))
        self._pieces = Pieces(
            spec.pieces, self.low, self.high, separate=separate, shaped=self._whole
        )
        self.push_codec, self.pull_codec = _codecs(spec, codecs)
        whole = self._whole or (self.push_codec is not None and self.push_codec.whole_tensors)
        self._aligned = not whole
        """Whether its part of a client's memory is aligned to `ALIGN`, not to its dtype's size."""
        self.half = None if spec.half is None else InSixteenBits(self, spec.half)
        self.sent: ShardBlock | InSixteenBits = self.half if self.half is not None else self
        """What of it lies in clients' memory as a gradient, or as values that a step reads."""
        even_local = self.pull_codec is not None and self.pull_codec.even_local
        self.rounds = even_local or self.half is not None
        """Whether clients on this host get other values than it has."""
        self.stream: DeltaStream | None = None
        """What its readers on other hosts follow, if the codec of pulls is `Delta`."""
        if isinstance(self.pull_codec, Delta) and self.size:
            streams = streams if streams is not None else count(1)
            self.stream = DeltaStream(self.pull_codec, self.size, streams)
        self._encoded: tuple[int, Bytes] | None = None
        """The values as the codec of pulls has encoded them last, and their revision."""
        self._copies: Copies | None = None
        self._scratch: Array | None = None
        if whole:
            check_whole(spec)
        if self.push_codec is not None:
            self.push_codec = bound(self.push_codec, spec.pieces, self.low, self.high)
        if rule is not None:
            with guarded(self._about("cannot start"), rule):
                if self.may_fail:  # for ours, the server has done it
                    rule.prepare(self.dtype)
                self.hyper = rule.hyper()
                self.state = rule.init_state(self.size, self.dtype)
                self.states = rule.states(self.hyper)
                self._check_state()

    def _check_state(self) -> None:
        names = self.states
        good = len(names) == len(self.state) and all(
            isinstance(each, np.ndarray)
            and each.shape == (self.size,)
            and each.dtype == self.dtype
            and each.flags.c_contiguous
            and each.flags.writeable
            for each in self.state
        )
        if not good:
            raise ValueError(
                f"init_state gave no array {self.dtype}[{self.size}] for each of {names}"
            )

    @property
    def counts(self) -> list[int]:
        """Updates that each piece has had."""
        return self._pieces.counts

    def restore(self, saved: SavedBlock) -> None:
        """Have the values, states and counts of a block of a cut; nothing was done with this one.
        Raises what `saved.read` does."""
        for number in range(1 + len(self.state)):
            saved.read(number, self.field(number))
        self._pieces.set_counts(saved.counts)

    def bounds(self, piece: int) -> tuple[int, int]:
        """Elements [start, stop) of a piece within this shard's arrays."""
        return self._pieces.bounds(piece)

    def ranges(self, active: Sequence[int] | None) -> list[Range]:
        """Elements [start, stop) of some pieces, or all, within this shard's arrays."""
        return [(0, self.size)] if active is None else self._pieces.ranges(active)

    @property
    def scratch(self) -> Array:
        """Memory for one sum or corrected gradient, until the next one, [elements on this shard].

        What a worker has sent is never written to: its step may be executed again from there.
        """
        if self._scratch is None:
            self._scratch = np.empty(self.size, self.dtype)
        return self._scratch

    def reserve(self) -> None:
        """Have the memory of `scratch`, before it is decided that it is used.

        Raises:
            MemoryError: there is none.
        """
        _ = self.scratch

    def view_at(self, whole: Bytes | None, arena: int, offset: int) -> Array:
        """View of its part of an arena, [elements on this shard]; see `Placed.view_at`."""
        return self.part(self.dtype, whole, arena, offset)

    def part(self, dtype: np.dtype[Any], whole: Bytes | None, arena: int, offset: int) -> Array:
        """View of a part with this dtype; see `view_at`."""
        if self.size == 0:
            return np.empty(0, dtype)
        nbytes = self.size * dtype.itemsize
        wrong = offset < 0 or offset % (ALIGN if self._aligned else dtype.itemsize)
        if whole is None or wrong or offset + nbytes > whole.size:
            raise ShapeMismatch(
                f"{nbytes} bytes at offset {offset} of arena {arena} for block "
                f"{self.spec.block}, but there are {0 if whole is None else whole.size} bytes",
                fix="send exactly the elements that this shard holds, at aligned offsets",
            )
        return np.frombuffer(whole, dtype, self.size, offset)

    def decoded(self, memory: Memory, header: Gradient) -> Array:
        """A gradient that was encoded, [elements on this shard].

        Raises:
            ShapeMismatch: it does not lie there, or stands for none. CodecFailed: the codec is not
                one of ours, and failed. In both cases nothing was applied.
        """
        whole, start, nbytes = memory.get(header.arena), header.offset, header.encoded_bytes
        codec, array = self.push_codec, np.empty(self.size, self.dtype)
        wrong = "it was defined without a codec of pushes"
        if codec is not None:
            inside = whole is not None and start >= 0 and start % 8 == 0
            wrong = f"{nbytes} bytes at offset {start} of arena {header.arena} do not lie there"
            if inside and whole is not None and start + nbytes <= whole.size:
                data = whole[start : start + nbytes]
                if data.ctypes.data % 8:
                    data, unaligned = aligned(nbytes), data
                    data[...] = unaligned
                try:
                    codec.decode(data, array)
                except ValueError as error:
                    wrong = str(error)
                else:
                    return array
        raise ShapeMismatch(
            f"an encoded gradient came for block {self.spec.block} in group "
            f"{self.spec.group_name!r}: {wrong}",
            fix="send what the block's codec has made of the elements that this shard holds",
        )

    def _encoded_values(self) -> Bytes:
        """The values as the codec of pulls encodes them, once for all who read them; not to be
        changed.

        Raises:
            CodecFailed: the codec is not one of ours, and failed.
        """
        assert self.pull_codec is not None
        if self._encoded is None or self._encoded[0] != self.revision:
            self._encoded = None  # its memory goes before more is taken
            out = aligned(self.pull_codec.size(self.size))
            self.pull_codec.encode(self.value, out, 0)
            self._encoded = self.revision, out
        return self._encoded[1]

    def check_room(self, memory: Memory, place: ReadTarget) -> None:
        """Refuse a read of encoded values that have no room in its memory, or go on from what no
        reader can have.

        Raises:
            ShapeMismatch: nothing was read.
        """
        whole, start, room = memory.get(place.arena), place.offset, place.room
        wrong: str | None = "it was defined without a codec of pulls"
        if self.pull_codec is not None:
            needed = encoded_bytes(self.pull_codec, self.size)
            why = None if self.stream is None else self.stream.why_not(Position(*place.has))
            wrong = None if why is None else f"it goes on from what its client cannot have: {why}"
            have = 0 if whole is None else whole.size
            if room < needed or start < 0 or start + room > have:
                wrong = f"{needed} bytes are not in {room} at offset {start} of arena {place.arena}"
        if wrong is not None:
            raise ShapeMismatch(
                f"encoded values of {self.names} in group {self.spec.group_name!r} were asked for: "
                f"{wrong}",
                fix="read with the block's codec, and say what the last answer has left",
            )

    def write_encoded(self, memory: Memory, place: ReadTarget) -> int:
        """Write the values as the codec of pulls encodes them to where `check_room` has found room;
        how many bytes. Raises as `_encoded_values`."""
        whole = memory.get(place.arena)
        assert whole is not None, "check_room() comes first"
        if self.stream is not None:
            data = self.stream.answer(self.value, self.revision, Position(*place.has))
        else:
            data = self._encoded_values()
        whole[place.offset : place.offset + data.size] = data
        return data.size

    def write_rounded(self, out: Array) -> None:
        """The values as clients get them, where these are others than it has: in 16 bits, or as one
        on another host decodes them; raises as `_encoded_values`."""
        codec = self.pull_codec
        if codec is None or not codec.even_local:
            self._round(self.value, out)
            return
        decoded = out if self.half is None else np.empty(self.size, self.dtype)
        if self.stream is not None:
            np.copyto(decoded, self.stream.reference(self.value, self.revision))
        else:
            codec.decode(self._encoded_values(), decoded)
        if self.half is not None:
            self._round(decoded, out)

    def _round(self, values: Array, out: Array) -> None:
        compiled().round_into(out, values)

    def widened(self, gradient: Array) -> Array:
        """A gradient of 16 bits in `scratch`; any other one as it is."""
        if gradient.dtype == self.dtype:
            return gradient
        compiled().scaled_into(self.scratch, 1.0, gradient)
        return self.scratch

    def largest(self, gradient: Array, active: Sequence[int] | None) -> float:
        """The largest size of an active element; inf if one is NaN or Inf."""
        largest: Callable[[Array], float] = compiled().largest
        if active is None:
            return largest(gradient)
        parts = self._pieces.ranges(active)
        return max([largest(gradient[start:stop]) for start, stop in parts], default=0.0)

    def squared_norm(self, gradient: Array) -> float:
        """Sum of the squares of all elements."""
        return float(compiled().squared_norm(gradient)) if self.size else 0.0

    def field(self, number: int) -> Array:
        """Values (0) or a state array (1, 2, ...).

        Raises:
            ParamServeError: the rule has no such state. Nothing was applied.
        """
        if number == VALUE:
            return self.value
        if not 0 < number <= len(self.state):
            raise ParamServeError(
                f"block {self.spec.block} of group {self.spec.group_name!r} has "
                f"{len(self.state)} state arrays, number {number} was asked for",
                fix="ask only for the state that the rule keeps with its hyper-parameters",
            )
        return self.state[number - 1]

    def _check_active(self, active: Sequence[int]) -> None:
        if not self._pieces.are(active):
            raise ShapeMismatch(
                f"the pieces {list(active)} were named for {self.names}, "
                f"which has pieces 0 to {len(self._pieces) - 1}",
                fix="name each tensor of the block at most once",
            )

    def apply(
        self,
        gradient: Array,
        active: Sequence[int] | None,
        hyper: Hyper | None,
        push: PushInfo,
        out: Array | None = None,
    ) -> None:
        """Apply the rule to the active pieces; with `out`, leave all values there as well.

        Raises:
            RuleFailed: the rule is not one of ours, and failed. Nothing was applied.
            NonFinite: the gradient is not what was looked at before. Of a rule of ours, it was
                applied in part ("Applied: unknown"), else not. It leaves the values finite.
        """
        assert self.rule is not None, "check() comes first"
        if self.may_fail:
            self.prepare(gradient, active, hyper, push)(out)
            return
        if self.unsaved:
            self.save()
        if self.size:
            runs = self._pieces.runs(active)
            fused = out if active is None else None
            if self.half is not None and gradient.dtype != self.half.dtype:
                fused = None  # a kernel has one dtype for what is sent
            numbers = hyper if hyper is not None else self.hyper
            self.revision += 1
            try:
                self.rule.apply(self.value, gradient, self.state, numbers, runs, push, fused)
            except NonFinite as error:
                partly = "what lies before them was applied, the rest was not"
                raise self._changed_since(push.worker, partly, "unknown") from error
            if out is not None and fused is None:
                self.leave(out)
        self._pieces.count(active)

    def leave(self, out: Array) -> None:
        """Leave the values where a client reads them."""
        if self.half is None:
            np.copyto(out, self.value)
        else:
            self._round(self.value, out)

    def _changed_since(self, rank: int, what: str, applied: Applied = "no") -> NonFinite:
        whose = f"the gradient of rank {rank}" if rank >= 0 else "a gradient"
        return NonFinite(
            f"{whose} for {self.names} of group {self.spec.group_name!r} holds NaN or Inf, "
            f"although its client found none: {what}",
            applied=applied,
            fix="do not write to a gradient after it was pushed",
        )

    def prepare(
        self,
        gradient: Array,
        active: Sequence[int] | None,
        hyper: Hyper | None,
        push: PushInfo,
    ) -> BlockUpdate:
        """Compute an update with a rule that is not ours, beside the values.

        Good until the next `prepare`; it has to leave out what is overwritten before it is kept.

        Raises:
            RuleFailed: the rule raised, or left what no update may leave. Nothing was applied.
            NonFinite: the gradient is not what was looked at before. Nothing was applied.
        """
        assert self.rule is not None, "check() comes first"
        numbers = hyper if hyper is not None else self.hyper
        runs = self._pieces.runs(active) if self.size else []
        with guarded(self._about("failed"), self.rule):
            if self._copies is None:
                self._copies = Copies(self.value, self.state)
            copies = self._copies
            if self.half is not None:
                gradient = self.widened(gradient)
            finite = copies.compute(self.rule, gradient, numbers, runs, push)
        if not finite:
            raise self._changed_since(push.worker, "the rule's update was left out")
        return BlockUpdate(self, copies, runs, active)

    def count(self, active: Sequence[int] | None) -> None:
        """Count an update of some pieces, or all."""
        self._pieces.count(active)

    def assign(
        self,
        number: int,
        source: Array,
        active: Sequence[int] | None,
        counts: Sequence[int] | None,
    ) -> None:
        """Overwrite a field, whole or only some pieces, and the update counts if given.

        Raises:
            ShapeMismatch: the counts or the pieces are wrong. Nothing was applied.
        """
        target = self.field(number)
        if counts is not None and len(counts) != len(self._pieces):
            raise ShapeMismatch(
                f"{self.names} has {len(self._pieces)} pieces, {len(counts)} counts came",
                fix="send one count for each piece",
            )
        if active is not None:
            self._check_active(active)
        if self.unsaved:
            self.save()
        self.revision += 1
        if active is None:
            np.copyto(target, source)
        else:
            for start, stop in self._pieces.ranges(active):
                target[start:stop] = source[start:stop]
        if counts is not None:
            self._pieces.set_counts(counts)
