"""How a row of a keyed table lies in memory. Numpy alone; what is done with it is elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of a row's values, by the number that the kernels know them by."""
WIDE: Mapping[str, np.dtype[Any]] = {
    "float64": np.dtype(np.float64),
    "int64": np.dtype(np.int64),
}
"""Numbers of two words, for counting. A row of n of them is one of 2 * n float32 words for all that
moves rows; only what computes with them reads them as what they are."""


def words_of(dtype: str) -> int:
    """32-bit words that a number takes in a message, which has those of 16 bits as float32."""
    return 2 if dtype in WIDE else 1


LANES = 16
"""Sums that a rule which looks at whole rows keeps side by side, whatever the vector width."""


@dataclass(frozen=True)
class RowLayout:
    """How one row lies in 32-bit words: its values, then each state, then its update count.

    Values of 16 bits are packed two to a word: element j is the uint16 at byte 2 * j of the row.

    Raises:
        ValueError: a width below 1, or a dtype that is none of `DTYPES` and `WIDE`.
    """

    dim: int
    """Values of a row; of `WIDE` ones the words that they take."""
    dtype: str
    """Dtype of the values: one of `DTYPES` or `WIDE`."""
    widths: tuple[int, ...] = ()
    """float32 elements of each of the rule's states: `dim`, or 1 for one number per row."""
    counted: bool = False
    """Whether each row keeps the count of its updates (uint32)."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES and self.dtype not in WIDE:
            raise ValueError(f"rows hold {', '.join((*DTYPES, *WIDE))}, not {self.dtype}")
        if self.dim % words_of(self.dtype):
            raise ValueError(f"a {self.dtype} has two words, and a row cannot have {self.dim}")
        if min((self.dim, *self.widths)) < 1:
            raise ValueError(f"a row needs widths of at least 1, not {self.dim} and {self.widths}")

    @cached_property
    def half(self) -> int:
        """1: bfloat16, 2: float16; 0: whole words."""
        return DTYPES.index(self.dtype) if self.dtype in DTYPES else 0

    @cached_property
    def numbers(self) -> int:
        """Values of a row."""
        return self.dim // words_of(self.dtype)

    @cached_property
    def value_words(self) -> int:
        return (self.dim + 1) // 2 if self.half else self.dim

    @cached_property
    def state_at(self) -> tuple[int, ...]:
        """Where each state begins, in words."""
        ends = np.cumsum((self.value_words, *self.widths)).tolist()
        return tuple(int(end) for end in ends[:-1])

    @cached_property
    def state_words(self) -> int:
        """Words of all states together; they lie side by side."""
        return sum(self.widths)

    @cached_property
    def count_at(self) -> int:
        """Where the update count lies, in words; -1: there is none."""
        return self.value_words + self.state_words if self.counted else -1

    @cached_property
    def words(self) -> int:
        return self.value_words + self.state_words + int(self.counted)

    def parts(self, raw: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[Any]]:
        """Views of rows as they lie in memory, [n, words]: "value" [n, numbers], which of bfloat16
        are its bits in uint16, "state" [n, state_words] and "count" [n], where there are such."""
        values: npt.NDArray[Any] = raw[:, : self.dim]
        if self.dtype in WIDE:
            values = values.view(WIDE[self.dtype])
        if self.half:
            dtype = np.float16 if self.dtype == "float16" else np.uint16
            values = raw[:, : self.value_words].view(dtype)[:, : self.dim]
        views = {"value": values}
        if self.state_words:
            views["state"] = raw[:, self.value_words : self.value_words + self.state_words]
        if self.counted:
            views["count"] = raw.view(np.uint32)[:, self.count_at]
        return views


class RowView(NamedTuple):
    """Some rows of a table's memory for a rule. All arrays are C-contiguous."""

    floats: npt.NDArray[np.float32]
    """[capacity, words]"""
    words: npt.NDArray[np.uint32]
    """[capacity, words], the same memory."""
    layout: RowLayout
    slots: npt.NDArray[np.int64]
    """[n] row numbers, distinct, none below 0."""
    keys: npt.NDArray[np.int64]
    """[n]"""
    stream: int
    """Hash of (seed, table), below 2**64: what the rounding of 16-bit values is drawn from."""
