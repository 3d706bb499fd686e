"""Which bytes of a client's memory a request carries to a server that has a mirror of it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from paramserve.core.partition import Block
from paramserve.core.table.encoded import HEAD_BYTES
from paramserve.core.table.parts import gradient_bytes, keys_bytes, records_bytes
from paramserve.messages import (
    Assign,
    Contains,
    Define,
    Delete,
    Put,
    Read,
    ReadTarget,
    Run,
    ShardRequest,
    Step,
)

Bytes = npt.NDArray[np.uint8]


def runs_of(
    shard: int, message: ShardRequest, blocks: Mapping[int, Block], memory: Mapping[int, Bytes]
) -> list[Run]:
    """The runs of memory that a shard reads for a request.

    Args:
        blocks: by id.
        memory: by arena.
    """
    runs: list[Run] = []
    if type(message) is Step or type(message) is Read:
        # Loops and `+=`, as in `Steps._prepare`: a small step has few calls.
        for header in message.push if type(message) is Step else ():
            block, nbytes = blocks[header.block], header.encoded_bytes
            if not nbytes and block.table is not None:
                nbytes = gradient_bytes(header.rows, block.table.dim)
            elif not nbytes:
                cuts = block.spec.cuts
                nbytes = (cuts[shard + 1] - cuts[shard]) * block.dtype.itemsize
            runs += [(header.arena, header.offset, nbytes)]
        for place in message.pull:
            if place.keys is not None:
                runs += [_keys(place, memory)]
    elif isinstance(message, Define | Assign):
        number = message.spec.block if isinstance(message, Define) else message.block
        low, high = (0, 0) if blocks[number].table is not None else blocks[number].range(shard)
        nbytes = (high - low) * blocks[number].kept.itemsize
        runs.append((message.arena, message.offset, nbytes))
    elif isinstance(message, Put):
        table = blocks[message.block].table
        assert table is not None
        width = message.width if message.width >= 0 else None
        nbytes = records_bytes(message.rows, table.dim, width, message.idle)
        runs.append((message.arena, message.offset, nbytes))
    elif isinstance(message, Delete | Contains):
        runs.append((message.arena, message.offset, 8 * message.rows))
    return runs


def _keys(place: ReadTarget, memory: Mapping[int, Bytes]) -> Run:
    """The keys of a read, and the places of their rows."""
    keys = place.keys
    assert keys is not None
    nbytes = keys_bytes(keys.rows)
    if place.room:
        head = memory[keys.arena][keys.offset : keys.offset + HEAD_BYTES]
        nbytes = HEAD_BYTES + int(head.view(np.int64)[0])
    return keys.arena, keys.offset, nbytes
