"""Reading a checkpoint: every byte is compared with the manifest's hash of its part before it is
used, and any share of it can be read, on any number of servers.

What is read goes to the caller's array directly where a whole part belongs there, so after an error
the array holds bytes that were refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from paramserve.checkpoint import tensors
from paramserve.checkpoint.manifest import Manifest, Part, Written, digest, worker_path
from paramserve.checkpoint.plain import TENSORS, Plain, unpack
from paramserve.checkpoint.rows import (
    ADMISSION,
    KEY,
    REMOVED,
    ROWS,
    SECTIONS,
    USED,
    Columns,
    bounds,
    merged,
    places,
    tensor_name,
)
from paramserve.checkpoint.storage import (
    File,
    Storage,
    StoreFailed,
    not_reached,
    read_fully,
)
from paramserve.checkpoint.tensors import LENGTH_BYTES, Tensor
from paramserve.errors import CheckpointDamaged, CheckpointError
from paramserve.messages import BlockSpec

Array = npt.NDArray[Any]

THREADS = 2
"""Threads that read and hash at once: one waits for the disk while the other hashes."""
APART_BYTES = 4 << 20
"""Less than this is read by the caller's thread alone."""
SLICE_BYTES = 64 << 20
"""Bytes of a table's rows that are in memory at once, about."""
NAMED = 3
"""Tensors of a damaged part that an error names."""
FIX = "use the checkpoint before, or a copy of this one"


class _Span(NamedTuple):
    """Bytes of a file that are wanted, and where they go."""

    offset: int
    into: memoryview


class _Run(NamedTuple):
    """Bytes [first, last) of a block that lie together in a file, `shift` bytes further on."""

    shift: int
    first: int
    last: int


class Checkpoint:
    """A checkpoint that can be read.

    Example:
        with Checkpoint(storage, manifest) as saved:
            saved.dense(values_path("model"), block, shard, values)
            for rows in saved.rows("users", shard, shards):
                ...

    Args:
        storage: of the run's checkpoints.
        manifest: of this one.
    Raises:
        CheckpointDamaged: (all methods) a file is missing, has another size, or a part of it
            another hash than the manifest says. CheckpointError: the store cannot be reached.
    """

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self.manifest = manifest
        self._storage = storage
        self._tensors: dict[str, dict[str, Tensor]] = {}
        self._pool = ThreadPoolExecutor(THREADS, "paramserve-checkpoint")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._pool.shutdown()

    # --- what there is ---------------------------------------------------------------------------

    def tensors(self, path: str) -> dict[str, Tensor]:
        """The tensors of one of its files, by name.

        Args:
            path: within the checkpoint's folder.
        """
        return self._header(self.manifest.own(path))

    def _header(self, file: Written) -> dict[str, Tensor]:
        header = self._tensors.get(file.path)
        if header is None:
            head = self._bytes(file, 0, LENGTH_BYTES)
            try:
                length = tensors.header_bytes(head)
                header = tensors.parse(self._bytes(file, 0, length), file.size)
            except ValueError as error:
                raise self._damaged(file, str(error)) from None
            self._tensors[file.path] = header
        return header

    # --- dense -----------------------------------------------------------------------------------

    def dense(self, path: str, block: BlockSpec, shard: int, into: Array) -> None:
        """Read a shard's range of a block, whatever shards wrote it.

        Args:
            path: `values_path` or `state_path`.
            block: as it is defined now; its tensors are found by name.
            into: contiguous, the elements [cuts[shard], cuts[shard + 1]).
        Raises:
            CheckpointError: a tensor is not there, or has another shape or dtype; all are named.
        """
        file, low, high = self.manifest.own(path), block.cuts[shard], block.cuts[shard + 1]
        there, itemsize = self._header(file), np.dtype(block.dtype).itemsize
        whole, runs, start, wrong = _writable(into), list[_Run](), 0, list[str]()
        for piece in block.pieces:
            expected = Tensor(piece.name, block.dtype, tuple(piece.shape))
            tensor = there.get(piece.name)
            end = start + expected.nbytes // itemsize
            if tensor is None or tensor[1:3] != expected[1:3]:
                wrong.append(_difference(expected, tensor))
            elif low < end and start < high:
                first, last = max(low, start) * itemsize, min(high, end) * itemsize
                shift = tensor.offset - start * itemsize
                if runs and runs[-1].shift == shift:
                    first = runs.pop().first
                runs.append(_Run(shift, first, last))
            start = end
        if wrong:
            raise CheckpointError(
                f"{file.path} in {self._storage.where} is of another model: {'; '.join(wrong)}",
                fix="train the model that was saved, or start without this checkpoint",
            )
        begin = low * itemsize
        self._read(
            file,
            [
                _Span(run.first + run.shift, whole[run.first - begin : run.last - begin])
                for run in runs
            ],
        )

    def tensor(self, path: str, name: str) -> Array:
        """A whole tensor; of bfloat16, its bits."""
        file = self.manifest.own(path)
        return self._array(file, self._header(file)[name])

    def _array(self, file: Written, tensor: Tensor) -> Array:
        into = np.empty(tensor.shape, tensor.carrier)
        self._read(file, [_Span(tensor.offset, _writable(into))])
        return into

    # --- rows ------------------------------------------------------------------------------------

    def rows(self, table: str, shard: int, shards: int) -> Iterator[Columns]:
        """All rows of a shard, each key once, some at a time, in the order of
        `checkpoint.rows.in_order`.

        Args:
            shard, shards: its number and their count, also another count than it was written by;
                (0, 1) is the whole table.
        Raises:
            CheckpointError: there is no such table.
        """
        layers = [[self.manifest.file(path) for path in layer] for layer in self._layers(table)]
        nbytes = sum(file.size for layer in layers for file in layer)
        slices = -(-nbytes // (SLICE_BYTES * shards)) or 1
        for each in range(slices):
            low, high = bounds(shard * slices + each, shards * slices)
            rows = merged(
                [self._layer(layer, (ROWS, REMOVED, USED), low, high) for layer in layers]
            )
            if rows[KEY].size:
                yield rows

    def no_rows(self, table: str) -> Columns:
        """The columns of a table's rows, without any.

        Raises:
            CheckpointError: there is no such table.
        """
        first = [self.manifest.file(path) for path in self._layers(table)[0]]
        return self._layer(first, (ROWS,), 0, 0)[ROWS]

    def admission(self, table: str, shard: int, shards: int) -> Columns:
        """Keys of a shard that are counted and have no row, with their columns; maybe none."""
        last = [self.manifest.file(path) for path in self._layers(table)[-1]]
        return self._layer(last, (ADMISSION,), *bounds(shard, shards))[ADMISSION]

    def _layers(self, table: str) -> tuple[tuple[str, ...], ...]:
        if table not in self.manifest.layers:
            has = ", ".join(map(repr, self.manifest.layers)) or "none"
            raise CheckpointError(
                f"checkpoint {self.manifest.name} has no table {table!r}; its tables: {has}",
                fix="name one of them",
            )
        return self.manifest.layers[table]

    def _layer(
        self, files: Sequence[Written], sections: Sequence[str], low: int, high: int
    ) -> dict[str, Columns]:
        """What files that were written together have of the places [low, high)."""
        by_section = dict[str, Columns]()
        for section in sections:
            parts = [self._section(file, section, low, high) for file in files]
            by_section[section] = {
                name: np.concatenate([part[name] for part in parts if part])
                for name in next((part for part in parts if part), {})
            } or {KEY: np.empty(0, np.int64)}
        return by_section

    def _section(self, file: Written, section: str, low: int, high: int) -> Columns:
        """Rows of one file; empty if it has no such section."""
        columns = _columns(self._header(file), section)
        if KEY not in columns:
            return {}
        first, last = _row_range(file, section, columns[KEY].shape[0], low, high)
        spans, batch = list[_Span](), Columns()
        for name, tensor in columns.items():
            batch[name] = into = np.empty((last - first, *tensor.shape[1:]), tensor.carrier)
            row = into.itemsize * int(np.prod(tensor.shape[1:], dtype=np.int64))
            if into.size:
                spans.append(_Span(tensor.offset + first * row, _writable(into)))
        self._read(file, spans)
        at = places(batch[KEY])
        inside = slice(*np.searchsorted(at, np.array([low, high], np.uint64)))
        return {name: each[inside] for name, each in batch.items()}

    # --- control state ---------------------------------------------------------------------------

    def message(self, path: str) -> bytes:
        """Control state, as it was written."""
        file = self.manifest.own(path)
        return self._bytes(file, 0, file.size)

    def saved(self, rank: int) -> Plain:
        """What a worker saved.

        Raises:
            CheckpointError: there is nothing of this rank.
        """
        path = worker_path(rank)
        beside = path.removesuffix(".msgpack") + TENSORS

        def array(name: str) -> tuple[str, Array]:
            file = self.manifest.own(beside)
            tensor = self._header(file).get(name)
            if tensor is None:
                raise ValueError(f"{beside} has no tensor {name!r}")
            return tensor.dtype, self._array(file, tensor)

        try:
            return unpack(self.message(path), array)
        except ValueError as error:
            raise self._damaged(self.manifest.own(path), str(error)) from None

    # --- whole -----------------------------------------------------------------------------------

    def check(self) -> None:
        """See that all files are there with their sizes; reads none."""
        for file in self.manifest.files:
            with closing(self._opened(file)):
                pass

    def verify(self, progress: Callable[[int], None] = lambda nbytes: None) -> None:
        """Read everything and compare all hashes.

        Args:
            progress: how many bytes more were read, now and then.
        """
        for file in self.manifest.files:
            if file.path.endswith(TENSORS):
                self._header(file)
            self._read(file, (), every=True, progress=progress)

    # --- bytes -----------------------------------------------------------------------------------

    def _bytes(self, file: Written, offset: int, length: int) -> bytes:
        into = bytearray(length)
        if offset + length > file.size:
            raise self._damaged(file, f"it has {file.size} bytes, too few for a header of {length}")
        if length:
            self._read(file, [_Span(offset, memoryview(into))])
        return bytes(into)

    def _read(
        self,
        file: Written,
        spans: Sequence[_Span],
        *,
        every: bool = False,
        progress: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Read the parts of a file that some bytes are in, or every part, and compare hashes."""
        work = [
            (part, inside)
            for part, inside in _by_part(file.parts, sorted(spans, key=lambda span: span.offset))
            if inside or every
        ]
        if not work and not every:
            return
        with closing(self._opened(file)) as opened:

            def take(one: tuple[Part, list[_Span]]) -> int:
                part, inside = one
                direct = _within(part, inside)
                into = direct if direct is not None else memoryview(bytearray(part.length))
                self._compare(file, part, into[: read_fully(opened, part.offset, into)])
                if direct is None:
                    _copy(part, into, inside)
                return part.length

            try:
                apart = sum(part.length for part, _ in work) >= APART_BYTES
                done: Iterable[int] = self._pool.map(take, work) if apart else map(take, work)
                for length in done:
                    progress(length)
            except OSError as error:
                raise self._refused(file, "read", error) from error

    def _opened(self, file: Written) -> File:
        try:
            opened = self._storage.open(file.path)
        except FileNotFoundError:
            raise self._damaged(file, "it is missing") from None
        except OSError as error:
            raise self._refused(file, "opened", error) from error
        try:
            size = opened.size()
        except OSError as error:
            opened.close()
            raise self._refused(file, "read", error) from error
        if size != file.size:
            opened.close()
            raise self._damaged(file, f"it has {size} bytes, and the manifest says {file.size}")
        return opened

    def _compare(self, file: Written, part: Part, data: memoryview) -> None:
        actual = digest(data)
        if len(data) == part.length and actual == part.digest:
            return
        names = self._names(file, part)
        raise self._damaged(
            file,
            f"bytes {part.offset} to {part.offset + part.length}{names} have the hash {actual}, "
            f"and the manifest says {part.digest}",
        )

    def _names(self, file: Written, part: Part) -> str:
        """The tensors of a part, for an error, once the header was read."""
        end = part.offset + part.length
        inside = [
            repr(each.name)
            for each in self._tensors.get(file.path, {}).values()
            if each.offset < end and part.offset < each.offset + each.nbytes
        ]
        more = f" and {len(inside) - NAMED} more" if len(inside) > NAMED else ""
        return f" ({', '.join(inside[:NAMED])}{more})" if inside else ""

    def _refused(self, file: Written, what: str, error: OSError) -> CheckpointError:
        if isinstance(error, StoreFailed):
            return not_reached(self._storage, error)
        return self._damaged(file, f"it cannot be {what}: {error.strerror}")

    def _damaged(self, file: Written, why: str) -> CheckpointDamaged:
        name, where = self.manifest.name, self._storage.where
        return CheckpointDamaged(
            f"checkpoint {name} in {where} is damaged: the file {file.path}: {why}", fix=FIX
        )


def _writable(array: Array) -> memoryview:
    """The bytes of a contiguous array."""
    if not array.flags.c_contiguous:
        raise ValueError("the array is not contiguous")
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def _difference(expected: Tensor, actual: Tensor | None) -> str:
    was = "is not in it" if actual is None else f"was {actual.dtype}{list(actual.shape)}"
    return f"{expected.name!r} {was} and is {expected.dtype}{list(expected.shape)} now"


def _columns(there: dict[str, Tensor], section: str) -> dict[str, Tensor]:
    """The columns of a section of a table's file."""
    if section == ROWS:
        others = tuple(f"{each}." for each in SECTIONS)
        return {name: each for name, each in there.items() if not name.startswith(others)}
    lead = tensor_name(section, "")
    return {n.removeprefix(lead): each for n, each in there.items() if n.startswith(lead)}


def _row_range(file: Written, section: str, rows: int, low: int, high: int) -> tuple[int, int]:
    """The rows [first, last) whose chunks may have places in [low, high)."""
    chunks = file.chunks.get(section, ())
    first, last = rows, rows
    lows = [(each.first, each.low) for each in chunks] + [(rows, 1 << 32)]
    for (start, begin), (_, end) in pairwise(lows):
        if first == rows and end >= low and begin < high:
            first = start
        if begin >= high:
            last = start
            break
    return first, max(first, last)


def _by_part(parts: Sequence[Part], spans: Sequence[_Span]) -> Iterator[tuple[Part, list[_Span]]]:
    """Each part with the spans that have bytes in it."""
    first = 0
    for part in parts:
        end = part.offset + part.length
        while first < len(spans) and spans[first].offset + len(spans[first].into) <= part.offset:
            first += 1
        last = first
        while last < len(spans) and spans[last].offset < end:
            last += 1
        yield part, [each for each in spans[first:last] if each.into]


def _within(part: Part, inside: Sequence[_Span]) -> memoryview | None:
    """The memory that a whole part goes to; None: it does not go to one place."""
    for each in inside:
        at = part.offset - each.offset
        if at >= 0 and at + part.length <= len(each.into):
            return each.into[at : at + part.length] if len(inside) == 1 else None
    return None


def _copy(part: Part, data: memoryview, inside: Iterable[_Span]) -> None:
    for each in inside:
        start = max(part.offset, each.offset)
        stop = min(part.offset + part.length, each.offset + len(each.into))
        each.into[start - each.offset : stop - each.offset] = data[
            start - part.offset : stop - part.offset
        ]
