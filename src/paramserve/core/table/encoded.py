"""How rows of a table with codecs lie in a frame: keys rise, and gradients and values are encoded.

Gradients: the number of rows and the bytes of their keys, uint32 each; the values, padded to 8
bytes; the keys. Each key stands there once. Keys of a read: their bytes, int64; the keys, which may
repeat. The rows are written in the keys' order.

Both ends measure by these functions. What is not encoded lies as `core.table.parts` has it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.codecs.keys import ONCE, REPEATED, keys_bytes, read_keys, write_keys
from paramserve.codecs.registry import build
from paramserve.codecs.rows import RowCodec
from paramserve.core.request_memory import Bytes, aligned
from paramserve.core.table.parts import RowGradient
from paramserve.messages import BlockSpec

Array = npt.NDArray[Any]

HEAD_BYTES = 8


class RowCodecs:
    """How the rows of one table are encoded.

    Attributes:
        push: of gradients.
        pull: of values that are read.

    Raises:
        UnknownCodec, ValueError: the table's codecs are none for rows.
    """

    def __init__(self, spec: BlockSpec) -> None:
        assert spec.table is not None
        self.dim = spec.table.dim
        push = None if spec.push is None else build(spec.push)
        pull = None if spec.pull is None else build(spec.pull)
        self.push = RowCodec(push, self.dim, random=True)
        self.pull = RowCodec(pull, self.dim, random=False)

    @property
    def push_even_local(self) -> bool:
        """Whether gradients are encoded for servers on the same host, too."""
        return self.push.codec is not None and self.push.codec.even_local

    @property
    def pull_even_local(self) -> bool:
        """Whether clients on the same host round what they read, too."""
        return self.pull.codec is not None and self.pull.codec.even_local

    # --- gradients -------------------------------------------------------------------------------

    def _values_end(self, rows: int) -> int:
        return HEAD_BYTES + -(-self.push.size(rows) // 8) * 8

    def gradient_bytes(self, keys: Array) -> int:
        """Bytes of the gradients of these rows, whose keys rise."""
        return self._values_end(keys.size) + keys_bytes(keys, ONCE)

    def write_gradient(self, keys: Array, values: Array, out: Bytes, seed: int) -> None:
        """Encode gradients.

        Args:
            keys: int64 [n], rising.
            values: float32 [n, dim], finite.
            out: [gradient_bytes(keys)], 8-byte aligned.
            seed: of what is drawn.
        """
        end, values_end = self._values_end(keys.size), HEAD_BYTES + self.push.size(keys.size)
        out[:HEAD_BYTES].view(np.uint32)[...] = keys.size, out.size - end
        self.push.encode(values.reshape(-1), out[HEAD_BYTES:values_end], seed)
        out[values_end:end] = 0  # what the memory held before goes to no server
        write_keys(keys, out[end:], ONCE)

    def read_gradient(self, data: Bytes) -> RowGradient:
        """Decode gradients.

        Args:
            data: 8-byte aligned; may come from a peer.
        Raises:
            ValueError: they are none.
        """
        if data.size < HEAD_BYTES:
            raise ValueError(f"{data.size} bytes came, and no rows have fewer than {HEAD_BYTES}")
        rows, nbytes = data[:HEAD_BYTES].view(np.uint32).tolist()
        end = self._values_end(rows)
        if data.size != end + nbytes:
            raise ValueError(
                f"{data.size} bytes came for {rows} rows with {nbytes} bytes of keys, which take "
                f"{end + nbytes}"
            )
        keys = read_keys(data[end:], rows, ONCE)
        values = np.empty(rows * self.dim, np.float32)
        self.push.decode(data[HEAD_BYTES : HEAD_BYTES + self.push.size(rows)], values)
        return RowGradient(keys, values.reshape(rows, self.dim))

    # --- reads -----------------------------------------------------------------------------------

    def request_bytes(self, keys: Array) -> int:
        """Bytes that the keys of a read take, which rise, int64 [n]."""
        return HEAD_BYTES + keys_bytes(keys, REPEATED)

    def write_request(self, keys: Array, out: Bytes) -> None:
        """Write the keys of a read to [request_bytes(keys)], 8-byte aligned."""
        out[:HEAD_BYTES].view(np.int64)[...] = out.size - HEAD_BYTES
        write_keys(keys, out[HEAD_BYTES:], REPEATED)

    def read_request(self, data: Bytes, rows: int) -> Array:
        """The keys of a read, int64 [rows].

        Args:
            data: begins with them, 8-byte aligned; may come from a peer.
        Raises:
            ValueError: it does not.
        """
        if data.size < HEAD_BYTES:
            raise ValueError(f"{data.size} bytes came, and no keys have fewer than {HEAD_BYTES}")
        nbytes = int(data[:HEAD_BYTES].view(np.int64)[0])
        if not 0 <= nbytes <= data.size - HEAD_BYTES:
            raise ValueError(f"{nbytes} bytes of keys do not lie there")
        return read_keys(data[HEAD_BYTES : HEAD_BYTES + nbytes], rows, REPEATED)

    def answer(self, rows: Array) -> Bytes:
        """Rows as they come, float32 [n * dim]."""
        out = aligned(self.pull.size(rows.size // self.dim))
        self.pull.encode(rows, out, 0)
        return out

    def read_answer(self, data: Bytes, out: Array) -> None:
        """Decode rows into float32 [n * dim]; raises as `RowCodec.decode`."""
        self.pull.decode(data, out)

    def round(self, rows: Array) -> None:
        """Make rows that came as they are, float32 [n, dim], what others decode of them."""
        flat = rows.reshape(-1)
        self.pull.decode(self.answer(flat), flat)


def row_codecs(spec: BlockSpec) -> RowCodecs | None:
    """Codecs of a table; None: it has none, or is no table. Raises as `RowCodecs`."""
    has = spec.table is not None and (spec.push is not None or spec.pull is not None)
    return RowCodecs(spec) if has else None
