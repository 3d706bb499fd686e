"""Parameters of 16 bits in a simulated cluster: their masters are exact, and are rounded once.

Beside the counting blocks there are two of 16 bits, bfloat16 and float16. Of their gradients each
is exact in 16 bits, and all sums are in float32. So a server's masters have to be the very sum of
the gradients that it has applied, whatever their order, and what a client reads that sum rounded to
the nearest value of 16 bits, which numpy does here in its own way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec import structs
from tests.sim.workloads.beside import Beside

from paramserve.compiling import load_kernels
from paramserve.core.partition import HALVES, Block
from paramserve.messages import Piece, PlaceBlock
from paramserve_testing.counting import SPLIT_BYTES, Counting
from paramserve_testing.history import Part, Row
from paramserve_testing.workload import Pushed, Setting, Workload

if TYPE_CHECKING:
    from paramserve_testing.client import SimulatedClient
    from paramserve_testing.simulated import SimulatedCluster

Array = npt.NDArray[Any]
Exact = npt.NDArray[np.float64]

LARGEST = 127
"""Largest of the whole numbers in gradients: a bfloat16's mantissa holds each."""
SMALLEST_EXPONENT = -9
"""They are multiplied by powers of two from this to 0. Sums of 2**8 have up to 24 bits, which
float32 holds, and most have more than 16 bits can."""


def nearest(values: Exact, half: str) -> Array:
    """The bits of the nearest values of 16 bits, ties to even, uint16 [n]."""
    if half == "float16":
        bits: Array = values.astype(np.float16).view(np.uint16)
        return bits
    exact = np.ascontiguousarray(values, np.float32)
    assert (exact == values).all(), "a sum is too large for float32"
    bits = exact.view(np.uint32).astype(np.uint64)
    below = bits >> np.uint64(16)
    rest, tie = bits & np.uint64(0xFFFF), np.uint64(0x8000)
    up = (rest > tie) | ((rest == tie) & (below % np.uint64(2) == 1))
    return np.asarray(below + up, np.uint16)


class Halves(Beside):
    """Tensors of bfloat16 and float16.

    Its policies may not multiply gradients by anything: `Sync(reduce="sum")`, `Async()` and
    `BoundedStaleness`.
    """

    def __init__(self) -> None:
        elements = SPLIT_BYTES // 4
        blocks = {
            "bfloat16": (Piece("bfloat16.a", (5, 7)), Piece("bfloat16.b", (elements,))),
            "float16": (Piece("float16", (elements,)),),
        }
        super().__init__(blocks, dict.fromkeys(blocks, "wide"))
        self._drawn: dict[tuple[int, int, int], Exact] = {}

    def prepare(self) -> None:
        for half in HALVES:
            load_kernels(self.dtype, self.rule, half)

    def placing(self, client: SimulatedClient, name: str, placing: PlaceBlock) -> PlaceBlock:
        return structs.replace(placing, half=name)

    def drawn(self, block: Block, writer: int, number: int) -> Exact:
        """The gradient of one push, [size], before it lies in 16 bits; some are 0."""
        key = (block.id, writer, number)
        found = self._drawn.get(key)
        if found is None:
            draw = np.random.default_rng(key)
            whole = draw.integers(-LARGEST, LARGEST, block.size, endpoint=True)
            exponents = draw.integers(SMALLEST_EXPONENT, 0, block.size, endpoint=True)
            found = self._drawn[key] = np.ldexp(whole.astype(np.float64), exponents)
        return found

    def fill(self, slot: Array, block: Block, push: Pushed) -> None:
        assert block.spec.half is not None
        exact = self.drawn(block, push.writer, push.number)
        slot[:] = nearest(exact, block.spec.half).view(block.dtype)

    def masters(self, block: Block, shard: int, row: Row) -> Exact:
        """What a server's part is where a counting block has these pushes."""
        low, high = block.range(shard)
        total = np.zeros(high - low, np.float64)
        for writer, number in row.each():
            total += self.drawn(block, writer, number)[low:high]
        return total

    def was_read(self, block: Block, shard: int, values: Array, row: Row) -> list[str]:
        assert block.spec.half is not None
        masters = self.masters(block, shard, row)
        # 0.0 and -0.0 are equal.
        found, wanted = values.view(np.uint16), nearest(masters, block.spec.half)
        off = np.flatnonzero((found != wanted) & ((found | wanted) != 0x8000))
        if not off.size:
            return []
        at = int(off[0])
        return [
            f"{block.spec.half} on shard {shard}: {off.size} elements were read wrongly, element "
            f"{at} as {found[at]:#06x}, where {masters[at]} is {wanted[at]:#06x}"
        ]

    def judge(self, cluster: SimulatedCluster) -> Mapping[str, Sequence[str]]:
        """What a shard holds is the very sum of the gradients of 16 bits that it has applied, and
        what a client reads is what the shard had then, rounded once to the nearest of 16 bits."""
        return {
            "masters_are_exact": self._masters_are_exact(cluster),
            "values_are_rounded_once": self.wrong,
        }

    def _masters_are_exact(self, cluster: SimulatedCluster) -> list[str]:
        wrong = []
        for name, block, widest, shard, values in self.held(cluster):
            row = cluster.history.final[Part(widest.id, shard)]
            wanted = self.masters(block, shard, row)
            off = np.flatnonzero(values != wanted)
            if off.size:
                at = int(off[0])
                wrong.append(
                    f"{name} on shard {shard}: {off.size} masters are wrong, element {at} is "
                    f"{values[at]} and not {wanted[at]}"
                )
        return wrong


def halves(setting: Setting) -> Workload:
    """Tensors that count, and tensors of 16 bits beside them."""
    return Workload(Counting(setting.writers), Halves())
