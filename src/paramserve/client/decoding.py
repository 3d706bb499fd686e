"""Values that servers on other hosts write encoded: where they lie in a slot, and what they are.

They are decoded when an answer comes, in the order of the answers.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from paramserve.codecs.base import Codec, Floats
from paramserve.codecs.delta import Delta
from paramserve.core.delta_stream import DeltaReader, encoded_bytes
from paramserve.core.partition import Block
from paramserve.core.table.parts import padded
from paramserve.errors import ProtocolError
from paramserve.messages import Read as ReadRequest
from paramserve.messages import ReadTarget, ShardRequest, Step
from paramserve.rules.compiled import compiled

Bytes = npt.NDArray[np.uint8]


class Decoder:
    """Decodes what one client has read of its tensors.

    Args:
        blocks: by id.
        memory: by arena.
    Attributes:
        used: whether something that comes encoded was asked for.
        read_bytes: of each group whose values came encoded, their bytes as they came and as they
            are.
    """

    def __init__(self, blocks: Mapping[int, Block], memory: Mapping[int, Bytes]) -> None:
        self.used = False
        self.read_bytes: dict[str, tuple[int, int]] = {}
        self._blocks = blocks
        self._memory = memory
        self._readers: dict[tuple[int, int], DeltaReader] = {}
        """Readers of values that are sent as what has changed, by block and shard."""

    def layout(self, block: Block) -> list[tuple[int, int]]:
        """Where in a slot each shard's part of a block with a codec of pulls lies encoded, behind
        the values of all, and bytes there at most; and last the slot's end."""
        assert block.pull_codec is not None
        places: list[tuple[int, int]] = []
        start = padded(block.nbytes)
        for shard in range(len(block.spec.cuts) - 1):
            low, high = block.range(shard)
            room = encoded_bytes(block.pull_codec, high - low) if high > low else 0
            places.append((start, room))
            start += padded(room)
        return [*places, (start, 0)]

    def read_target(self, block: Block, shard: int, arena: int, offset: int) -> ReadTarget | None:
        """Where a shard on another host is to write its part of a block's values encoded, for a
        `Step` or `Read`; sets `used`. None: the shard has nothing of the block.

        Args:
            arena, offset: of the slot.
        """
        start, room = self.layout(block)[shard]
        if not room:
            return None
        self.used = True
        reader = self._readers.get((block.id, shard))
        has: tuple[int, int] = (0, 0) if reader is None else reader.position
        return ReadTarget(block.id, arena, offset + start, room=room, has=has)

    def decode(self, shard: int, message: ShardRequest) -> None:
        """Decode what a shard has written for a request, to where its values are wanted.

        Raises:
            ProtocolError: it is none that a server writes.
        """
        if not isinstance(message, Step | ReadRequest):
            return
        for place in message.pull:
            if place.room and place.keys is None:
                block = self._blocks[place.block]
                codec = block.pull_codec
                assert codec is not None
                memory = self._memory[place.arena]
                low, high = block.range(shard)
                slot = place.offset - self.layout(block)[shard][0]
                part = np.frombuffer(
                    memory, block.dtype, high - low, slot + low * block.dtype.itemsize
                )
                data = memory[place.offset : place.offset + place.room]
                try:
                    self._decode(block, shard, codec, data, part)
                except ValueError as wrong:
                    raise _not_decoded(shard, codec, wrong) from None

    def _decode(
        self, block: Block, shard: int, codec: Codec, data: Bytes, part: npt.NDArray[np.generic]
    ) -> None:
        nbytes = data.size
        values: Floats
        if isinstance(codec, Delta):
            reader = self._readers.get((block.id, shard))
            if reader is None:
                reader = self._readers[block.id, shard] = DeltaReader(codec, part.size)
            update = reader.read(data)
            reader.keep(update)
            values, nbytes = update.values, update.nbytes
        else:
            values = np.empty(part.size, np.float32)
            codec.decode(data, values)
        if block.spec.half is None:
            part[...] = values
        else:
            compiled().round_into(part, values)
        self.count(block, nbytes, part.nbytes)

    def count(self, block: Block, nbytes: int, plain: int) -> None:
        """Count the bytes in which values of a group came encoded."""
        before = self.read_bytes.get(block.group_name, (0, 0))
        self.read_bytes[block.group_name] = before[0] + nbytes, before[1] + plain


def _not_decoded(shard: int, codec: Codec, wrong: ValueError) -> ProtocolError:
    return ProtocolError(
        f"shard {shard} sent values that {codec.called} cannot decode: {wrong}",
        fix="run the same version of paramserve everywhere",
    )
