"""The base of codecs that users write."""

from __future__ import annotations

from dataclasses import dataclass

from paramserve.codecs.base import Codec


@dataclass(frozen=True)
class CustomCodec(Codec):
    """Your own codec: a frozen dataclass with `size`, `encode` and `decode`.

    Its fields are numbers, bools and texts; they travel to servers with its class's name, and the
    servers have to be started with the class: `rules=[Thirds]`. What one of the three methods
    raises refuses the push whole (`CodecFailed`), as do another number of bytes than it said, NaN
    and Inf. `paramserve_testing.codec_suite.CodecSuite` tests it.

    Example:
        >>> @dataclass(frozen=True)
        ... class Thirds(ps.CustomCodec):
        ...     step: float = 0.01
        ...     def size(self, count):
        ...         return count
        ...     def encode(self, values, out, seed):
        ...         inside = np.clip(values, -127 * self.step, 127 * self.step)
        ...         out[:] = np.rint(inside / self.step).astype(np.int8).view(np.uint8)
        ...         return values.size
        ...     def decode(self, data, out):
        ...         out[:] = data.view(np.int8) * np.float32(self.step)
        >>> ps.run(train, workers=2, rules=[Thirds])
        >>> worker.optimizer(model, own, push=Thirds(0.001))

    Attributes:
        fixed: whether `encode` always writes `size` bytes; if not, set it to False: then the codec
            is for pushes only, and ends no chain.
        whole_tensors: whether it looks at whole tensors: then no tensor is cut over two servers,
            and `bound(shapes)` returns the codec of a server's part. Such a codec is for pushes.
        feedback: as of all codecs; `feedback: bool = field(default=False, kw_only=True)` in the
            class is for a codec whose mean is right.
    """

    @property
    def called(self) -> str:
        return self.name
