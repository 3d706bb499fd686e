"""Delta streams in a simulated cluster: what a server has told, and what its readers have of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b
from random import Random

import numpy as np
import numpy.typing as npt

from paramserve.client.decoding import Decoder
from paramserve.codecs.base import Codec, Floats
from paramserve.codecs.built_in import Int4, Int8, Sign
from paramserve.codecs.delta import Delta
from paramserve.codecs.sparse import TopK
from paramserve.core.delta_stream import DeltaStream, Position

DELTAS: tuple[Callable[[], Codec], ...] = (
    lambda: Int8(16),
    lambda: Int4(8),
    lambda: Int4(rounding="stochastic"),
    lambda: Sign(32),
    lambda: TopK(0.1) | Int4(8),
)
FORGETS = 0.03
"""Share of answers from a stream that was begun anew, as after a restart."""


def drawn(random: Random) -> Delta:
    """A codec of pulls, which links of one host have, too: so all that is read is a reference."""
    return Delta(random.choice(DELTAS)(), even_local=True)


def digest(values: npt.NDArray[np.float32]) -> bytes:
    return blake2b(values.tobytes(), digest_size=16).digest()


class Told:
    """What one shard has told of one block, by position.

    Attributes:
        wrong: what the shard did wrong.
    """

    def __init__(self) -> None:
        self.by_position: dict[Position, bytes] = {}
        self.wrong: list[str] = []

    def judge(self, has: Position, values: Floats) -> str | None:
        """What is wrong with what a reader has; None: nothing is."""
        known = self.by_position.get(has)
        if known is None:
            return f"it has {has}, and no such number was told"
        return None if known == digest(values) else f"it has other values than those of {has}"


class WatchedStream(DeltaStream):
    """The shipping stream, which remembers all that it has told, and sometimes begins anew."""

    def __init__(
        self, codec: Delta, size: int, streams: Iterator[int], told: Told, random: Random
    ) -> None:
        super().__init__(codec, size, streams)
        self._told = told
        self._random = random
        self._current: tuple[int, bytes] | None = None
        """Revision and digest of the values that were read last."""

    def reference(self, values: Floats, revision: int) -> Floats:
        if self._random.random() < FORGETS:
            self._reference = None
        found = super().reference(values, revision)
        now = digest(values)
        if self._current is not None and self._current[0] == revision and self._current[1] != now:
            self._told.wrong.append(f"values have changed, and are still revision {revision}")
        self._current = revision, now
        known = self._told.by_position.setdefault(self.position, digest(found))
        if known != digest(found):
            self._told.wrong.append(f"two references are both {self.position}")
        return found


def judge_readers(decoder: Decoder, told: dict[tuple[int, int], Told], whose: str) -> list[str]:
    """What is wrong with the copies of one client.

    Args:
        told: by block and shard.
    """
    wrong = []
    for (block, shard), reader in decoder._readers.items():
        if reader._has is not None and (block, shard) in told:
            text = told[block, shard].judge(*reader._has)
            if text is not None:
                wrong.append(f"{whose}, block {block} on shard {shard}: {text}")
    return wrong
