"""Parameters of 16 bits in a simulated cluster: their masters are exact, and are rounded once.

Beside the counting blocks there are two of 16 bits, bfloat16 and float16. Of their gradients each
is exact in 16 bits, and all sums are in float32. So a server's masters have to be the very sum of
the gradients that it has applied, whatever their order, and what a client reads that sum rounded to
the nearest value of 16 bits, which numpy does here in its own way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from paramserve.compiling import load_kernels
from paramserve.core.block import ShardBlock
from paramserve.core.partition import HALVES, SPLIT_BYTES_MIN, Block
from paramserve.messages import Piece, PlaceBlock
from paramserve.rules import Add
from paramserve.testing.beside import BesideClient, BesideCounting
from paramserve.testing.checkers import Violation
from paramserve.testing.history import Part, Row
from paramserve.testing.scripts import SimulatedReader, SimulatedWorker
from paramserve.testing.simulated import SimulatedCluster, rerun
from paramserve.testing.workload import Pushed, Setting, Workload

Array = npt.NDArray[Any]
Exact = npt.NDArray[np.float64]

LARGEST = 127
"""Of the whole numbers that gradients are made of: a bfloat16's mantissa holds each."""
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


class HalfCounting(BesideCounting):
    """Counting blocks, and two of 16 bits."""

    rule = Add()

    def __init__(self, writers: int) -> None:
        super().__init__(writers)
        elements = SPLIT_BYTES_MIN // 4
        blocks = {
            "bfloat16": (Piece("bfloat16.a", (5, 7)), Piece("bfloat16.b", (elements,))),
            "float16": (Piece("float16", (elements,)),),
        }
        self.stand_beside(blocks, dict.fromkeys(blocks, "wide"))
        self._drawn: dict[tuple[int, int, int], Exact] = {}

    def prepare(self) -> None:
        super().prepare()
        for half in HALVES:
            load_kernels(np.dtype(np.float32), self.rule, half)

    def place(self, name: str, placing: PlaceBlock) -> PlaceBlock:
        return structs.replace(placing, dtype="float32", half=name)

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

    def gradient(self, block: Block, push: Pushed) -> Array:
        assert block.spec.half is not None
        exact = self.drawn(block, push.writer, push.number)
        return nearest(exact, block.spec.half).view(block.dtype)

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


class HalfWorker(BesideClient, SimulatedWorker):
    """Steps through its clocks, with parameters of 16 bits."""


class HalfReader(BesideClient, SimulatedReader):
    """Belongs to no rank, and reads and pushes parameters of 16 bits."""


class SimulatedHalves(SimulatedCluster):
    """A simulated cluster whose clients train parameters of 16 bits beside others.

    Its policies may not multiply gradients by anything: `Sync(reduce="sum")`, `Async()` and
    `BoundedStaleness`.
    """

    worker_type = HalfWorker
    reader_type = HalfReader
    replayed_by = "paramserve.testing.halves.replay"

    def _new_workload(self, setting: Setting) -> Workload:
        return Workload(HalfCounting(setting.writers))

    def check(self) -> None:
        super().check()
        wrong = {
            "masters_are_exact": masters_are_exact(self),
            "values_are_rounded_once": values_are_rounded_once(self),
        }
        found = [f"{name}: {text}" for name, texts in wrong.items() for text in texts[:4]]
        if found:
            raise Violation("\n  ".join([self.again, *found]))


def masters_are_exact(cluster: SimulatedHalves) -> list[str]:
    """What a shard holds is the very sum of the gradients of 16 bits that it has applied."""
    wrong = []
    (workload,) = cluster.workload.parameters
    assert isinstance(workload, HalfCounting)
    widest = next(each for each in cluster.blocks.values() if each.pieces[0].name == "wide")
    for block in cluster.blocks.values():
        for server in cluster.servers if block.spec.half is not None else ():
            held = server.shard.blocks.get(block.id)
            if not isinstance(held, ShardBlock) or not held.size:
                continue
            row = cluster.history.final[Part(widest.id, server.number)]
            wanted = workload.masters(block, server.number, row)
            off = np.flatnonzero(held.value != wanted)
            if off.size:
                at = int(off[0])
                wrong.append(
                    f"{block.spec.half} on shard {server.number}: {off.size} masters are wrong, "
                    f"element {at} is {held.value[at]} and not {wanted[at]}"
                )
    return wrong


def values_are_rounded_once(cluster: SimulatedHalves) -> list[str]:
    """What a client reads is what the shard had then, rounded once to the nearest of 16 bits."""
    wrong = []
    for client in cluster.clients:
        assert isinstance(client, BesideClient)
        wrong += [f"writer {client.writer}: {text}" for text in client.wrong]
    return wrong


def replay(seed: int, log: Callable[[str], None] | None = None, **options: Any) -> SimulatedCluster:
    """Run one seed with parameters of 16 bits again; else as `paramserve.testing.replay`."""
    return rerun(SimulatedHalves, seed, log, **options)
