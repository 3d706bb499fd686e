"""What a row begins with, for kernels: an option in numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paramserve.core.table.compiled import row_kernels
from paramserve.core.table.options import Constant, Init, Normal, Uniform


class Drawing(NamedTuple):
    """What the kernels draw initial values from, besides the key: their first arguments."""

    stream: np.uint64
    kind: int
    a: float
    b: float
    work: npt.NDArray[np.float64]
    """Overwritten by each call, as is `line`."""
    line: npt.NDArray[np.float32]


def drawing(init: Init, stream: int, dim: int) -> Drawing:
    """The numbers of an option, for a table whose stream (`hashing.stream_of`) is given."""
    kernels = row_kernels()
    kind, a, b = kernels.CONSTANT, 0.0, 0.0
    if isinstance(init, Uniform):
        kind, a, b = kernels.UNIFORM, init.low, init.high
    elif isinstance(init, Normal):
        kind, a, b = kernels.NORMAL, init.mean, init.std
    elif isinstance(init, Constant):
        a = init.value
    work, line = np.empty((3, kernels.TILE)), np.empty(dim, np.float32)
    return Drawing(np.uint64(stream), kind, a, b, work, line)
