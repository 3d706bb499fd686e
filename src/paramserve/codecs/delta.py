"""The codec of what has changed: values that a reader follows, as a stream of deltas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from paramserve.codecs.base import Bytes, Codec, Feedback, Floats
from paramserve.codecs.custom import CustomCodec
from paramserve.codecs.sparse import Chain, RandomK


@dataclass(frozen=True)
class Delta(Codec):
    """What has changed of the values since a reader's last pull, encoded; for pulls only.

    Each server keeps, for each of its blocks, the *reference*: what it has told its readers. For a
    pull of newer values it encodes their difference to the reference, the *delta*, and adds to the
    reference what a reader decodes. So all readers have the same values, bit by bit, and what one
    delta leaves out is in the next one: no residual is kept besides. A reader that has nothing, or
    is so far behind that the deltas would take more bytes, gets the reference whole, in float32.

    Every pull at newer values adds a delta, which all readers need. Where workers pull the same
    values (`Sync`, `LocalSteps`), each gets one delta for each pull; where each pulls at its own
    time (`Async`), as many as there are workers.

    Source: as compression of the broadcast, of the difference to what the workers have: Tang et
        al., DoubleSqueeze, 2019; Gruntkowska, Tyurin and Richtarik, EF21-P and Friends, 2023.

    Attributes:
        codec: encodes the deltas: a built-in one but `PowerSGD`, or a chain. One that leaves values
            out, as `TopK`, is good here, too. Its `feedback` says nothing.
    """

    codec: Codec
    feedback: bool | Feedback = field(default=False, kw_only=True)

    pulls_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        codec: Any = self.codec
        if isinstance(codec, type) and issubclass(codec, Codec):
            raise TypeError(f"ps.Delta takes an object: write ps.Delta(ps.{codec.__name__}())")
        if not isinstance(codec, Codec):
            raise TypeError(f"ps.Delta takes the codec of its deltas, not {codec!r}")
        parts = (codec.first, codec.second) if isinstance(codec, Chain) else (codec,)
        for each in parts:
            if isinstance(each, CustomCodec | Delta) or each.whole_tensors:
                raise TypeError(
                    "what ps.Delta decodes has to be equal bit by bit on servers and workers: it "
                    "encodes with a built-in codec other than ps.PowerSGD, or a chain of two, as "
                    f"in ps.Delta(ps.Int4()), not with {codec!r}"
                )
        if isinstance(parts[0], RandomK) and not parts[0].feedback:
            raise ValueError(
                "ps.RandomK(feedback=False) multiplies what it keeps, which a sum of deltas does "
                "not bear: leave feedback out"
            )
        object.__setattr__(self, "fixed", codec.fixed)
        if codec.even_local:
            object.__setattr__(self, "even_local", True)

    @property
    def called(self) -> str:
        return f"ps.Delta({self.codec.called})"

    def size(self, count: int) -> int:
        """Bytes of one delta of so many values; at most, where it is not `fixed`."""
        return self.codec.size(count)

    def encode(self, values: Floats, out: Bytes, seed: int) -> int:
        """Encode a delta."""
        return self.codec.encode(values, out, seed)

    def decode(self, data: Bytes, out: Floats) -> None:
        """Decode a delta."""
        self.codec.decode(data, out)
