"""One process's part of a checkpoint: its files and ranges of files, hashed as they are written.

Nothing counts before `finish` has returned, and the manifest names what it gave back. A failure
leaves files that no manifest names; the writer is of no more use then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from msgspec import structs

from paramserve.checkpoint.manifest import (
    PART_BYTES,
    Chunk,
    Part,
    Written,
    digest,
    is_written,
    table_path,
    worker_path,
)
from paramserve.checkpoint.plain import TENSORS, Plain, pack
from paramserve.checkpoint.rows import KEY, KEYS, Section, places, tensor_name
from paramserve.checkpoint.storage import Buffer, File, Storage, telling, write_fully
from paramserve.checkpoint.tensors import Layout, Tensor, dense, in_order, layout
from paramserve.messages import BlockSpec

Array = npt.NDArray[Any]

SYNC_BYTES = 256 << 20
"""Bytes of a file written between two syncs: so the last one takes seconds, not minutes, on a slow
disk, and the system keeps no more of it in memory."""


class _Output:
    """A file that is being written."""

    def __init__(self, file: File, path: str, size: int, storage: Storage, what: str) -> None:
        self.path = path
        self._file = file
        self._size = size
        self._storage = storage
        self._what = what
        """What was not done, for errors."""
        self._parts: list[Part] = []
        self._written = self._synced = 0

    def share(self, ranges: Iterable[tuple[int, int]]) -> None:
        """See, before the first write to a shared file, that the bytes of others stay.

        Args:
            ranges: of bytes that are written here, none of which others write.
        Raises:
            CheckpointError: the storage failed, or has no locks.
        """
        with telling(self._storage, self._what):
            for start, stop in ranges:
                self._file.keep_apart(start, stop)

    @property
    def nbytes(self) -> int:
        """Written so far, and passed on where that is another step."""
        return self._written + self._file.sent

    def put(self, offset: int, content: Buffer) -> None:
        """Write bytes to their place, in parts.

        Raises:
            CheckpointError: the storage failed.
        """
        data = memoryview(content).cast("B")
        with telling(self._storage, self._what):
            while data:
                part = data[:PART_BYTES]
                self._parts.append(Part(offset, len(part), digest(part)))
                write_fully(self._file, offset, part)
                self._written += len(part)
                if self._written - self._synced >= SYNC_BYTES:
                    self._file.sync()
                    self._synced = self._written
                offset, data = offset + len(part), data[len(part) :]

    def put_elements(self, offset: int, elements: Array, tensor: Tensor) -> None:
        """Write elements of a tensor to their place.

        Raises:
            ValueError: they have another dtype. CheckpointError: the storage failed.
        """
        if elements.dtype != tensor.carrier:
            raise ValueError(f"{self.path}: {tensor.name} is {tensor.dtype}, not {elements.dtype}")
        if elements.size:
            self.put(offset, np.ascontiguousarray(elements).reshape(-1).view(np.uint8).data)

    def finish(self, path: str) -> Written:
        """Sync the file; what was written, for the manifest.

        Raises:
            CheckpointError: the storage failed.
        """
        with telling(self._storage, self._what):
            self._file.finish(self._size)
        parts = tuple(sorted(self._parts, key=lambda part: part.offset))
        return Written(path, self._size, parts)

    def close(self) -> None:
        self._file.close()


class DenseFile:
    """A shard's ranges of the blocks of a group, in the group's file; see `Writer.dense`."""

    def __init__(
        self, output: _Output, blocks: Sequence[BlockSpec], shard: int, whole: Layout
    ) -> None:
        self._output = output
        self._gaps: dict[int, tuple[int, int, Tensor]] = {}
        """Place of the next elements, end of the range and first tensor, by block."""
        for block in in_order(blocks):
            low, high = block.cuts[shard], block.cuts[shard + 1]
            first = whole.tensors[block.pieces[0].name]
            itemsize = first.carrier.itemsize
            start, stop = first.offset + low * itemsize, first.offset + high * itemsize
            self._gaps[block.block] = start, stop, first
        if any(len(block.cuts) > 2 for block in blocks):
            header = [(0, len(whole.header))] if shard == 0 else []
            output.share([*header, *((start, stop) for start, stop, _ in self._gaps.values())])
        if shard == 0:
            output.put(0, whole.header)

    def write(self, block: int, elements: Array) -> None:
        """Write the next elements of the block's range.

        Raises:
            ValueError: they have another dtype, or are too many. CheckpointError: the storage
                failed.
        """
        start, stop, first = self._gaps[block]
        if start + elements.nbytes > stop:
            raise self._wrong(block, start + elements.nbytes)
        self._output.put_elements(start, elements, first)
        self._gaps[block] = start + elements.nbytes, stop, first

    def _wrong(self, block: int, end: int) -> ValueError:
        return ValueError(
            f"{self._output.path}: block {block} ends at byte {self._gaps[block][1]} on this "
            f"shard, and the arrays end at byte {end}"
        )

    def finish(self, path: str) -> Written:
        """Finish the file; see `_Output.finish`. Raises `ValueError`: a block is not whole."""
        for block, (start, stop, _) in self._gaps.items():
            if start != stop:
                raise self._wrong(block, start)
        return self._output.finish(path)

    def close(self) -> None:
        self._output.close()


class TableFile:
    """A shard's rows of a table, or those that have changed; see `Writer.rows`."""

    def __init__(
        self,
        output: _Output,
        table: str,
        sections: Mapping[str, Section],
        whole: Layout,
        full: bool,
    ) -> None:
        self._output = output
        self._table = table
        self._full = full
        self._sections = sections
        self._tensors = whole.tensors
        self._chunks = {section: list[Chunk]() for section in sections}
        self._done = dict.fromkeys(sections, 0)
        self._last = dict.fromkeys(sections, 0)
        """Place of the last row of each section."""

    def write(self, section: str, batch: Mapping[str, Array]) -> None:
        """Write the next rows of a section with their keys, in the order of `rows.in_order`.

        A batch of about `PART_BYTES` is what a reader reads at once.

        Raises:
            ValueError: they have other columns, are out of order, or too many. CheckpointError: the
                storage failed.
        """
        keys, section_spec, path = batch[KEY], self._sections[section], self._output.path
        if not keys.size:
            return
        at, done = places(keys), self._done[section]
        ordered = int(at[0]) >= self._last[section] and not (at[1:] < at[:-1]).any()
        if batch.keys() != {KEY, *section_spec.columns} or not ordered:
            raise ValueError(f"{path}: {section} of columns {list(batch)} are not in order")
        if done + keys.size > section_spec.rows:
            raise ValueError(f"{path}: {section} has {section_spec.rows} rows, and more came")
        self._chunks[section].append(Chunk(done, int(at[0])))
        for name, values in batch.items():
            tensor = self._tensors[tensor_name(section, name)]
            if values.shape != (keys.size, *tensor.shape[1:]):
                raise ValueError(f"{path}: {section}: {name} has the shape {values.shape}")
            row = tensor.nbytes // section_spec.rows
            self._output.put_elements(tensor.offset + done * row, values, tensor)
        self._done[section], self._last[section] = done + keys.size, int(at[-1])

    def finish(self, path: str) -> Written:
        """Finish the file; see `_Output.finish`. Raises `ValueError`: rows are missing."""
        for section, section_spec in self._sections.items():
            done = self._done[section]
            if done != section_spec.rows:
                raise ValueError(f"{path}: {section} has {section_spec.rows} rows, and {done} came")
        chunks = {section: tuple(each) for section, each in self._chunks.items()}
        written = self._output.finish(path)
        return structs.replace(written, chunks=chunks, table=self._table, full=self._full)

    def close(self) -> None:
        self._output.close()


class Writer:
    """Writes one process's part of a checkpoint.

    A server gives its ranges of the dense values, its rows and its control state; the coordinator
    its control state and what the workers saved. Used from one thread at a time, which may be any.

    Example:
        with Writer(storage, "step-4000") as writer:
            file = writer.dense("values/model.safetensors", blocks, shard)
            file.write(0, values)
            writer.write_message("shard-0.msgpack", state)
            report = writer.finish()

    Args:
        storage: of the run's checkpoints.
        name: of the checkpoint, as `Folder.begin` gave it.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self._name = name
        self._files: dict[str, _Output | DenseFile | TableFile] = {}
        self._outputs: list[_Output] = []
        self._folders = {"": True}
        """Folders that have names of ours, in the order they were made."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        """Written so far; to be asked for in any thread."""
        return sum(each.nbytes for each in tuple(self._outputs))

    def close(self) -> None:
        """Close the files. Without `finish` before it, nothing of them counts."""
        for each in self._files.values():
            each.close()
        self._files.clear()

    def dense(self, path: str, blocks: Sequence[BlockSpec], shard: int) -> DenseFile:
        """Begin a shard's range of each block of a group in the group's file.

        Args:
            path: `values_path` or `state_path`.
            blocks: of the group that are in this file, the same in all processes. What is written
                of each are the elements [cuts[shard], cuts[shard + 1]).
        Raises:
            CheckpointError: the storage failed.
        """
        whole = dense(blocks)
        output = self._open(path, whole, header=False)
        file = self._files[path] = DenseFile(output, blocks, shard, whole)
        return file

    def rows(
        self, table: str, shard: int, sections: Mapping[str, Section], *, full: bool
    ) -> TableFile:
        """Begin a shard's rows of a table, or those that have changed.

        Args:
            sections: by their names (`rows.SECTIONS`).
            full: whether these are all rows. Every shard has to give the same.
        Raises:
            CheckpointError: the storage failed.
        """
        path = table_path(table, shard)
        whole = layout(
            Tensor(tensor_name(section, name), column.dtype, (section_spec.rows, *column.shape))
            for section, section_spec in sections.items()
            for name, column in {KEY: KEYS, **section_spec.columns}.items()
        )
        output = self._open(path, whole, header=True)
        file = self._files[path] = TableFile(output, table, sections, whole, full)
        return file

    def write_message(self, path: str, data: bytes) -> None:
        """Write control state.

        Raises:
            CheckpointError: the storage failed.
        """
        self._open(path, Layout(b"", {}, len(data)), header=False).put(0, data)

    def write_saved(self, rank: int, state: Plain) -> None:
        """Write what a worker saved.

        Raises:
            CheckpointError: the storage failed.
        """
        text, arrays = pack(state)
        path = worker_path(rank)
        self.write_message(path, text)
        if arrays:
            self.write_tensors(path.removesuffix(".msgpack") + TENSORS, arrays)

    def write_tensors(self, path: str, arrays: Mapping[str, tuple[str, Array]]) -> None:
        """Write whole tensors: by name, dtype (a key of `tensors.KINDS`) and elements.

        Raises:
            CheckpointError: the storage failed.
        """
        whole = layout(Tensor(name, dtype, each.shape) for name, (dtype, each) in arrays.items())
        output = self._open(path, whole, header=True)
        for name, (_, each) in arrays.items():
            output.put_elements(whole.tensors[name].offset, each, whole.tensors[name])

    def finish(self) -> tuple[Written, ...]:
        """Sync all files, and the folders that name them; what was written, for the manifest.

        Raises:
            ValueError: a file is not whole. CheckpointError: the storage failed.
        """
        written = [each.finish(f"{self._name}/{path}") for path, each in self._files.items()]
        for folder in reversed(self._folders):
            with telling(self._storage, self._what(folder)):
                self._storage.sync_folder(folder)
        return tuple(written)

    def _open(self, path: str, whole: Layout, *, header: bool) -> _Output:
        if path in self._files:
            raise ValueError(f"{path} is written already")
        if not is_written(path):
            raise ValueError(f"{path} would stay behind when its checkpoint is pruned")
        whole_path = f"{self._name}/{path}"
        with telling(self._storage, self._what(path)):
            names = whole_path.split("/")
            for depth in range(1, len(names)):
                folder = "/".join(names[:depth])
                if folder not in self._folders:
                    self._storage.make_folder(folder)
                    self._folders[folder] = True
            opened = self._storage.open(whole_path, write=True)
        output = _Output(opened, path, whole.size, self._storage, self._what(path))
        self._files[path] = output
        self._outputs.append(output)
        if header:
            output.put(0, whole.header)
        return output

    def _what(self, path: str) -> str:
        return f"checkpoint {self._name} was not written: {path or 'the folder'}"
