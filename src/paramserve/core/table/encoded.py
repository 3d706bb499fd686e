"""How rows of a table with codecs lie in a frame: keys rise, and gradients and values are encoded.

Gradients: the number of rows and the bytes of their keys, uint32 each; the values, padded to 8
bytes; the keys. Each key stands there once. Keys of a read: their bytes, and 1 if the rows are to
come exact, else 0, uint32 each; the keys, which may repeat. The rows come back in the keys' order.

Both ends measure by these functions. In memory that a server maps, keys and rows lie as
`core.table.parts` has them.
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

    def encode_request(self, keys: Array, *, exact: bool) -> Bytes:
        """The keys of a read, which rise, int64 [n]."""
        out = aligned(HEAD_BYTES + keys_bytes(keys, REPEATED))
        out[:HEAD_BYTES].view(np.uint32)[...] = out.size - HEAD_BYTES, exact
        write_keys(keys, out[HEAD_BYTES:], REPEATED)
        return out

    def read_request(self, data: Bytes, rows: int) -> tuple[Array, bool]:
        """The keys of a read, int64 [rows], and whether the rows are to come exact.

        Args:
            data: begins with them, 4-byte aligned; may come from a peer.
        Raises:
            ValueError: it does not.
        """
        if data.size < HEAD_BYTES:
            raise ValueError(f"{data.size} bytes came, and no keys have fewer than {HEAD_BYTES}")
        nbytes, exact = data[:HEAD_BYTES].view(np.uint32).tolist()
        if nbytes > data.size - HEAD_BYTES or exact > 1:
            raise ValueError(f"{nbytes} bytes of keys with the flag {exact} do not lie there")
        return read_keys(data[HEAD_BYTES : HEAD_BYTES + nbytes], rows, REPEATED), bool(exact)

    def answer_bytes(self, rows: int, *, exact: bool) -> int:
        """Bytes of rows that are read, in an answer."""
        return 4 * self.dim * rows if exact else self.pull.size(rows)

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
