"""Values that are pulled as what has changed (`ps.Delta`): a server's end, and a reader's.

A server keeps of a block the *reference*, float32: what it has told its readers. For a read of
newer values it encodes values - reference, the *delta*, decodes it as a reader does, and adds that
to the reference. A reader adds the same deltas in the same order to its own copy. Both add float32
numbers one by one, so the copies are equal bit by bit.

A *stream* begins with a reference that equals the values, which is number 0; each delta makes the
next number. Its id is of no other stream of any server. A reader says with each request which
number of which stream it has, and only that counts: so a request may be repeated, lost or overtaken
by another one. It gets the deltas from there on, or the reference whole: where it has nothing, or
another stream's, or is behind the deltas that are kept, or where the reference takes fewer bytes.

What one delta leaves out is in values - reference, and so in the next delta.

In an answer a reader's part begins with a head of `HEAD_BYTES`. Then come the reference, float32
[count]; or the deltas, each after its length, and padded to 8 bytes.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paramserve.codecs.base import Bytes, Codec, Floats
from paramserve.codecs.delta import Delta
from paramserve.core.request_memory import aligned
from paramserve.rules.compiled import compiled

DELTAS_MAX = 64
"""Deltas that are kept of one block; and no more than fit in the bytes of its reference, since a
reader that lacks more gets that."""
NOTHING = 0
"""Number of the stream of a reader that has none."""
WHOLE = -1
"""Number to go on from of an answer that carries the whole reference."""

HEAD_BYTES = 24
"""Three int64: the stream; the number that the reader has before, or `WHOLE`; the one that it has
then."""
LENGTH_BYTES = 8
"""An int64."""


class Position(NamedTuple):
    """What a reader has: a number of a stream."""

    stream: int = NOTHING
    number: int = 0


def encoded_bytes(codec: Codec, count: int) -> int:
    """What so many values take at most as a codec of pulls encodes them."""
    return HEAD_BYTES + 4 * count if isinstance(codec, Delta) and count else codec.size(count)


def _padded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def _words(data: Bytes, count: int) -> npt.NDArray[np.int64]:
    """The int64 with which bytes begin, which are 8-byte aligned."""
    return data[: 8 * count].view(np.int64)


class DeltaStream:
    """What one shard has told of one block.

    Args:
        codec: of the deltas.
        size: elements.
        streams: gives ids, above 0.
    """

    def __init__(self, codec: Delta, size: int, streams: Iterator[int]) -> None:
        self._codec = codec
        self._size = size
        self._streams = streams
        self._reference: Floats | None = None
        """None: there was no read yet."""
        self._change = np.empty(0, np.float32)
        """Memory for the next delta, as it is and as it is decoded."""
        self._revision = 0
        """Revision of the values when the reference was last made equal to them."""
        self._stream = NOTHING
        self._number = 0
        self._deltas = deque[Bytes]()
        """The last ones, encoded."""
        self._kept_bytes = 0
        """Bytes of the kept deltas, as they lie in an answer."""

    @property
    def position(self) -> Position:
        """Stream and number of the reference."""
        return Position(self._stream, self._number)

    def reference(self, values: Floats, revision: int) -> Floats:
        """What a reader has that reads now, [size]; not to be changed.

        Args:
            values: [size].
            revision: another one where they are others.
        """
        reference = self._reference
        if reference is None:
            reference = self._begin(values, revision)
        elif revision != self._revision:
            reference = self._advance(reference, values, revision)
        return reference

    def answer(self, values: Floats, revision: int, has: Position) -> Bytes:
        """The part of an answer for a reader that has this; else as `reference`."""
        reference = self.reference(values, revision)
        lacks = self._number - has.number if has.stream == self._stream else -1
        if 0 <= lacks <= len(self._deltas):
            deltas = list(self._deltas)[len(self._deltas) - lacks :]
            size = sum(LENGTH_BYTES + _padded(each.size) for each in deltas)
            if size <= reference.nbytes:
                out = aligned(HEAD_BYTES + size)
                _words(out, 3)[...] = self._stream, has.number, self._number
                _lay(deltas, out[HEAD_BYTES:])
                return out
        out = aligned(HEAD_BYTES + reference.nbytes)
        _words(out, 3)[...] = self._stream, WHOLE, self._number
        out[HEAD_BYTES:].view(np.float32)[...] = reference
        return out

    def why_not(self, has: Position) -> str | None:
        """Why no reader can have this; None: one can."""
        if has.stream < 0 or has.number < 0:
            return f"there is no number {has.number} of a stream {has.stream}"
        if has.stream == self._stream and has.number > self._number:
            return f"the stream is at number {self._number}, and not yet at {has.number}"
        return None

    def _begin(self, values: Floats, revision: int) -> Floats:
        """Begin a stream, with the values as they are."""
        if self._reference is None:
            self._reference, change = np.empty_like(values), np.empty_like(values)
            self._change = change
        np.copyto(self._reference, values)
        self._stream, self._number, self._revision = next(self._streams), 0, revision
        self._deltas.clear()
        self._kept_bytes = 0
        return self._reference

    def _advance(self, reference: Floats, values: Floats, revision: int) -> Floats:
        """Add a delta, which makes the reference equal to the values; or begin a stream, where a
        value or its change is not finite."""
        codec, change = self._codec, self._change
        largest: Callable[[Floats], float] = compiled().largest
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(values, reference, out=change)
        if change.size and not largest(change) < math.inf:
            return self._begin(values, revision)
        out = aligned(codec.size(self._size))
        seed = zlib.crc32(b"%d %d" % (self._stream, self._number))
        encoded = out[: codec.encode(change, out, seed)]
        if encoded.size < out.size:
            encoded = encoded.copy()  # what is kept has no more bytes than it needs
        try:
            codec.decode(encoded, change)
        except ValueError:  # a scale has overflowed
            return self._begin(values, revision)
        with np.errstate(over="ignore"):
            np.add(reference, change, out=reference)
        self._number += 1
        self._revision = revision
        self._deltas.append(encoded)
        self._kept_bytes += LENGTH_BYTES + _padded(encoded.size)
        while len(self._deltas) > DELTAS_MAX or self._kept_bytes > reference.nbytes:
            self._kept_bytes -= LENGTH_BYTES + _padded(self._deltas.popleft().size)
        return reference


def _lay(deltas: list[Bytes], out: Bytes) -> None:
    """Write deltas one after the other, each after its length."""
    at = 0
    for each in deltas:
        _words(out[at:], 1)[...] = each.size
        at += LENGTH_BYTES
        end = at + _padded(each.size)
        out[at : at + each.size] = each
        out[at + each.size : end] = 0
        at = end


class CopyUpdate(NamedTuple):
    """What a part of an answer makes of a reader's copy.

    Attributes:
        values: the copy then, [size].
        nbytes: of the part.
    """

    position: Position
    values: Floats
    nbytes: int


class DeltaReader:
    """One client's copy of what one shard has told of one block.

    A part of an answer is first read, which changes nothing, and then kept. So an answer whose
    reading is interrupted may come again.

    Args:
        codec: of the deltas.
        size: elements.
    """

    def __init__(self, codec: Delta, size: int) -> None:
        self._codec = codec
        self._size = size
        self._has: tuple[Position, Floats] | None = None
        self._spare: Floats | None = None
        """Memory for the next copy."""

    @property
    def position(self) -> Position:
        """What it has."""
        return Position() if self._has is None else self._has[0]

    def read(self, data: Bytes) -> CopyUpdate:
        """What the part of an answer with which these bytes begin makes of the copy.

        Args:
            data: 8-byte aligned; comes from a peer.
        Raises:
            ValueError: it is no part that goes on from what this reader has. The copy is as it was.
        """
        if data.size < HEAD_BYTES:
            raise ValueError(f"{data.size} bytes came where the head of deltas has {HEAD_BYTES}")
        stream, first, last = _words(data, 3).tolist()
        if stream <= NOTHING or last < 0:
            raise ValueError(f"there is no number {last} of a stream {stream}")
        rest = data[HEAD_BYTES:]
        if first == WHOLE:
            return self._read_whole(Position(stream, last), rest)
        return self._read_deltas(Position(stream, last), first, rest)

    def keep(self, update: CopyUpdate) -> None:
        """Make that the copy."""
        before = self._has
        if before is not None and before[1] is update.values:
            return
        self._has = update.position, update.values  # at once: an interrupt comes before or after
        self._spare = None if before is None else before[1]

    def _memory(self) -> Floats:
        spare = self._spare
        return spare if spare is not None else np.empty(self._size, np.float32)

    def _read_whole(self, position: Position, data: Bytes) -> CopyUpdate:
        nbytes = 4 * self._size
        if data.size < nbytes:
            raise ValueError(f"{data.size} bytes came where values of {nbytes} lie")
        if self._has is not None:
            has, copy = self._has
            if has.stream == position.stream and has.number >= position.number:
                return CopyUpdate(has, copy, HEAD_BYTES + nbytes)
        values = self._memory()
        values[...] = data[:nbytes].view(np.float32)
        return CopyUpdate(position, values, HEAD_BYTES + nbytes)

    def _read_deltas(self, position: Position, first: int, data: Bytes) -> CopyUpdate:
        if self._has is None:
            raise ValueError("deltas came, and nothing was there before")
        (stream, number), copy = self._has
        if stream != position.stream or not 0 <= first <= min(number, position.number):
            raise ValueError(
                f"deltas of stream {position.stream} came from number {first} to "
                f"{position.number}, and number {number} of stream {stream} is there"
            )
        if position.number - first > DELTAS_MAX:
            raise ValueError(f"{position.number - first} deltas came, allowed are {DELTAS_MAX}")
        deltas, nbytes = self._split(data, position.number - first)
        newer = deltas[number - first :]
        if not newer:  # an answer that was sent later has come before
            return CopyUpdate(self._has[0], copy, HEAD_BYTES + nbytes)
        values = self._memory()
        self._codec.decode(newer[0], values)
        scratch = np.empty(self._size, np.float32) if newer[1:] else values
        with np.errstate(over="ignore"):
            np.add(copy, values, out=values)
            for each in newer[1:]:
                self._codec.decode(each, scratch)
                np.add(values, scratch, out=values)
        return CopyUpdate(position, values, HEAD_BYTES + nbytes)

    def _split(self, data: Bytes, count: int) -> tuple[list[Bytes], int]:
        """Deltas, and the bytes of all."""
        most, at = self._codec.size(self._size), 0
        deltas: list[Bytes] = []
        for _ in range(count):
            if data.size - at < LENGTH_BYTES:
                raise ValueError(f"{count} deltas were told, and {len(deltas)} came")
            (length,) = _words(data[at:], 1).tolist()
            at += LENGTH_BYTES
            if not 0 <= length <= min(most, data.size - at):
                raise ValueError(f"a delta of {length} bytes, of which {data.size - at} came")
            deltas.append(data[at : at + length])
            at += _padded(length)
        if at > data.size:
            raise ValueError(f"the last delta ends behind the {data.size} bytes that came")
        return deltas, at
