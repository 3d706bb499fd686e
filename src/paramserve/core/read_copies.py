"""What workers have read: copies of a group's values, for policies that ask how these changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.core.block import ShardBlock

Array = npt.NDArray[Any]

READS_MAX = 10
"""Most reads that are kept of one worker. Its next gradient comes from the newest read that was
answered; with `overlap` one more is on its way, as many reads by themselves as steps may be, and
after a lost connection each is read again, at a version of its own. Older reads, and those of a
client that only looks, are not needed."""


class Reads:
    """Per rank, the values of the last reads by their version.

    A worker's next gradient names the version that it was computed from: older copies are released
    then, and their memory is used again.
    """

    def __init__(self) -> None:
        self.by_rank: dict[int, deque[tuple[int, dict[int, Array]]]] = {}
        """Version and copies by block, for each rank, oldest first."""
        self._spare: list[dict[int, Array]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        arrays = [copies for each in self.by_rank.values() for _, copies in each]
        return sum(array.nbytes for copies in (*arrays, *self._spare) for array in copies.values())

    def keep(self, rank: int, version: int, blocks: Iterable[ShardBlock]) -> None:
        """A worker reads these values now, and has those of the other blocks from before."""
        reads = self.by_rank.setdefault(rank, deque())
        now = {block.spec.block: block.value for block in blocks}
        if reads and reads[-1][0] == version:
            copies = reads[-1][1]
        else:
            now = (reads[-1][1] | now) if reads else now
            if len(reads) >= READS_MAX:
                self._spare.append(reads.popleft()[1])
            copies = self._spare.pop() if self._spare else {}
            for number in copies.keys() - now.keys():
                del copies[number]
            reads.append((version, copies))
        for number, value in now.items():
            copy = copies.get(number)
            if copy is None:
                copies[number] = value.copy()
            else:
                np.copyto(copy, value)

    def of(self, rank: int, version: int) -> dict[int, Array]:
        """Copies by block of what a worker read at this version; empty if it did not."""
        reads = self.by_rank.get(rank)
        if not reads:
            return {}
        while len(reads) > 1 and reads[0][0] < version:  # the last one goes into the next
            self._spare.append(reads.popleft()[1])
        return reads[0][1] if reads[0][0] == version else {}

    def only(self, ranks: Iterable[int]) -> None:
        """Forget all other ranks."""
        others = set(self.by_rank).difference(ranks)
        for rank in sorted(others):
            del self.by_rank[rank]
        if others:
            self._spare.clear()

    def forget(self, rank: int) -> None:
        """This worker goes by a policy that needs no copies."""
        if self.by_rank.pop(rank, None) is not None:
            self._spare.clear()
