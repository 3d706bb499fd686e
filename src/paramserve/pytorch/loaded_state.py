"""Marks of the blocks whose optimizer state rank 0 stores behind their define.

A block is defined with its values only. Another rank that has found it could step before the state
is stored, which would overwrite what the step has made of the state: so that rank waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from paramserve.config import BUFFERS

if TYPE_CHECKING:
    from paramserve.client import Client


class StateMarks:
    """Marks of one optimizer's loaded state; a block goes by the name of its first tensor.

    Args:
        rank: 0 stores, the others wait.
        group: the optimizer's.
    """

    def __init__(self, client: Client, rank: int, group: str) -> None:
        self._client = client
        self._rank = rank
        self._group = f"{group}.loaded{BUFFERS}"

    def begin(self, names: Iterable[str]) -> None:
        """Mark on rank 0, before these blocks are defined, that their state follows."""
        if self._rank == 0:
            self._define(map(_follows, names))

    def end(self, names: Iterable[str]) -> None:
        """Mark on rank 0 that their state is stored, or is older than the servers' own."""
        if self._rank == 0:
            self._define(map(_is_stored, names))

    def wait(self, names: Iterable[str]) -> None:
        """Wait, on the other ranks, until these blocks' state is stored.

        Raises:
            DefineTimeout: rank 0 did not store their state in time.
        """
        if self._rank == 0:
            return
        blocks = [each for each in self._client.blocks() if each.group_name == self._group]
        marks = {piece.name for block in blocks for piece in block.pieces}
        for name in names:
            if _follows(name) in marks:
                self._client.directory.await_block(
                    {_is_stored(name): (1,)},
                    dtype=np.dtype(np.int64),
                    rule=None,
                    group=self._group,
                )

    def _define(self, marks: Iterable[str]) -> None:
        for mark in marks:
            self._client.define({mark: np.ones(1, np.int64)}, rule=None, group=self._group)


def _follows(name: str) -> str:
    return f"state of {name} follows"


def _is_stored(name: str) -> str:
    return f"state of {name} is stored"
