"""What a checkpoint has, in the forms that other tools take: state dicts and tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from paramserve.checkpoint.manifest import state_path, values_path
from paramserve.checkpoint.reader import SLICE_BYTES, Checkpoint
from paramserve.checkpoint.rows import KEY, Columns
from paramserve.checkpoint.shard_records import LAST_USE, BlockRecord, shard_records
from paramserve.checkpoint.tensors import Tensor, dtype_of, layout
from paramserve.client.arrow import batch_of, part_rows, replacing, schema_of, write_parquet
from paramserve.client.labels import DIM, decoded
from paramserve.config import LABELS, is_trained
from paramserve.consistency.built_in import OWN_STEPS
from paramserve.core.decisions import LEAD
from paramserve.core.group_state import GroupRecord
from paramserve.core.partition import Block
from paramserve.core.table.parts import Records
from paramserve.errors import CheckpointError, UnknownName
from paramserve.launch.reading import State, as_model_has, of_model, state_of, table_file
from paramserve.messages import VALUE as VALUES
from paramserve.messages import BlockSpec
from paramserve.rules.layout import WIDE

MODEL = "model"
"""The group that is meant where none is named and there are several."""
VALUE, STATE, COUNT = "value", "state", "count"
"""The columns of a table's rows that Parquet files have."""

Progress = Callable[[int], None]
"""Told how many bytes more were read."""


def _silent(nbytes: int) -> None: ...


def model_of(saved: Checkpoint, group: str | None = None, progress: Progress = _silent) -> State:
    """The values of a group as a state dict: with buffers, and tied tensors under all names.

    Args:
        group: None: "model", or the only one.
    Raises:
        UnknownName: there is no such group, or none is meant. CheckpointDamaged: a file is.
    """
    name, groups = _select_group(saved, group)

    def read(blocks: Iterable[Block]) -> State:
        state = State()
        for block in blocks:
            path = values_path(block.group_name)
            for piece in block.pieces:
                values = saved.tensor(path, piece.name)
                progress(values.nbytes)
                state[piece.name] = as_model_has(values, block.spec.dtypes.get(piece.name))
        return state

    return of_model(state_of(name, groups, read))


def _select_group(saved: Checkpoint, group: str | None) -> tuple[str, dict[str, list[Block]]]:
    """The name of the group that is meant, and the blocks of all, by group."""
    groups = dict[str, list[Block]]()
    for spec in saved.manifest.cut.blocks:
        if spec.table is None:
            groups.setdefault(spec.group_name, []).append(Block(spec))
    trained = [name for name in groups if is_trained(name)]
    if group is None and (MODEL in trained or len(trained) != 1):
        group = MODEL
    name = trained[0] if group is None else group
    if name not in trained:
        has = ", ".join(map(repr, trained)) or "none"
        raise UnknownName(
            f"checkpoint {saved.manifest.name} has no group {name!r}; its groups: {has}",
            fix="name one of them with --group",
        )
    return name, groups


def optimizer_of(
    saved: Checkpoint, group: str | None = None, progress: Progress = _silent
) -> dict[str, Any]:
    """The state dict of a group's optimizer, in torch's layout. It imports torch.

    Args:
        group: as for `model_of`.
    Raises:
        UnknownName: as `model_of`. CheckpointError: torch has no such optimizer, or the servers do
            not make its steps.
        CheckpointDamaged: a file is.
    """
    from paramserve.pytorch.exported import SavedBlock, optimizer_state

    name, groups = _select_group(saved, group)
    records = shard_records(saved)
    saved_blocks = {each.spec.block: each for each in records[0].blocks}

    def fetch(record: BlockRecord, number: int) -> tuple[npt.NDArray[Any], tuple[int, ...]]:
        size = record.spec.cuts[-1]
        whole = structs.replace(record.spec, cuts=(0, size))
        array = np.empty(size, record.spec.dtype)
        path = state_path(record.states[number - VALUES - 1], name)
        saved.dense(path, whole, 0, array)
        progress(array.nbytes)
        return array, record.counts

    specs = [block.spec for block in groups[name]]
    record = next(each for each in records[LEAD].groups if each.id == specs[0].group)
    _check_servers_step(record)
    blocks = [SavedBlock(spec, partial(fetch, saved_blocks[spec.block])) for spec in specs]
    notes = [(rank, *both[-1]) for rank, both in record.notes.items()]
    return optimizer_state(name, blocks, min(notes)[2] if notes else b"")


def _check_servers_step(group: GroupRecord) -> None:
    policy = group.changes.policies[-1][1].name
    if policy in [kind.__name__ for kind in OWN_STEPS]:
        raise CheckpointError(
            f"the optimizer {group.name!r} cannot be exported: under {policy} each worker makes "
            "its own steps, and has the state of its optimizer",
            fix="export the values alone, or keep the state by worker.save(...)",
        )


def write_safetensors(path: str | os.PathLike[str], state: State) -> None:
    """Write a state dict to one file.

    Raises:
        OSError: it cannot be written. What was there before still is.
    """
    whole = layout(Tensor(name, dtype_of(each), each.shape) for name, each in state.items())
    with replacing(path) as file:
        file.write(whole.header)
        for each in state.values():
            file.write(np.ascontiguousarray(each).data)


def write_tables(
    saved: Checkpoint, folder: str, progress: Progress = _silent
) -> dict[str, tuple[str, int]]:
    """Write every table with its rule's state to a Parquet file, as `Table.from_parquet` reads it.

    Returns:
        By table: the file, and its rows.
    Raises:
        CheckpointError: there is none. OSError: a file cannot be written.
        ParamServeError: pyarrow is not installed.
    """
    specs = [
        spec
        for spec in saved.manifest.cut.blocks
        if spec.table is not None and not spec.group_name.endswith(LABELS)
    ]
    if not specs:
        raise CheckpointError(
            f"checkpoint {saved.manifest.name} has no tables", fix="export it to torch"
        )
    os.makedirs(folder, exist_ok=True)
    files = dict[str, tuple[str, int]]()
    for spec in specs:
        path = os.path.join(folder, table_file(spec.group_name))
        files[spec.group_name] = path, _write_table(saved, spec, path, progress)
    return files


def _write_table(saved: Checkpoint, spec: BlockSpec, path: str, progress: Progress) -> int:
    table, name = spec.table, spec.group_name
    assert table is not None
    columns = saved.no_rows(name)
    width = columns[STATE].shape[1] if STATE in columns else 0
    clock = _clock_of(saved, spec) if LAST_USE in columns else None
    schema = schema_of(spec, width, idle=clock is not None, labels=table.labels > 0)
    rows = part_rows(table.dim, width)
    names = saved.manifest.layers.get(name + LABELS, ()) if table.labels else ()
    nbytes = sum(saved.manifest.file(file).size for layer in names for file in layer)
    shares = -(-nbytes // SLICE_BYTES) or 1

    def batches() -> Iterator[Any]:
        for share in range(shares):
            label_rows = saved.rows(name + LABELS, share, shares) if names else ()
            labels = _Labels(label_rows, progress) if table.labels else None
            for batch in saved.rows(name, share, shares):
                for start in range(0, batch[KEY].size, rows):
                    part = {column: each[start : start + rows] for column, each in batch.items()}
                    texts = None if labels is None else labels.of(part[KEY])
                    yield batch_of(schema, _records(part, table.dtype, clock), width, texts)
                progress(_nbytes(batch))

    return write_parquet(path, schema, batches)


class _Labels:
    """The strings of the keys of a share of a table."""

    def __init__(self, batches: Iterable[Columns], progress: Progress) -> None:
        keys, values = [np.empty(0, np.int64)], [np.empty((0, DIM), np.float32)]
        for batch in batches:
            keys.append(batch[KEY])
            values.append(batch[VALUE])
            progress(_nbytes(batch))
        whole = np.concatenate(keys)
        self._order = np.argsort(whole)
        self._keys = whole[self._order]
        self._values = np.concatenate(values)

    def of(self, keys: npt.NDArray[np.int64]) -> list[str]:
        """Label of each key; empty where none is known."""
        at = np.searchsorted(self._keys, keys)
        hits = np.flatnonzero(at < self._keys.size)
        hits = hits[self._keys[at[hits]] == keys[hits]]
        texts = [""] * keys.size
        for place, text in zip(hits, decoded(self._values[self._order[at[hits]]]), strict=True):
            texts[place] = text
        return texts


def _nbytes(columns: Columns) -> int:
    return sum(each.nbytes for each in columns.values())


def _clock_of(saved: Checkpoint, spec: BlockSpec) -> int:
    """The clock of a table, from which its TTL counts."""
    records = shard_records(saved)
    used = [each.clock for one in records for each in one.tables if each.spec == spec]
    groups = [each for one in records for each in one.groups if each.id == spec.group]
    return max(*used, *(each.members.slowest for each in groups))


def _records(part: Columns, dtype: str, clock: int | None) -> Records:
    keys, values = part[KEY], part[VALUE]
    if dtype not in WIDE:
        values = _as_float32(values, dtype)
    counts = part.get(COUNT, np.zeros(keys.size, np.uint32))
    idle = None if clock is None else np.maximum(clock - part[LAST_USE], 0)
    return Records(keys, values, part.get(STATE), counts, idle)


def _as_float32(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32, copy=False)
