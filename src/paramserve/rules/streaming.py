"""Write rows past the caches, in kernels. Imports Numba: import this lazily.

A write that the caches keep fetches its line first, and pushes others out. What is more than they
hold until another process reads it is better written past them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from paramserve.rules.kernels import inlined
from paramserve.rules.prefetch import LINE

STREAMED_BYTES = 4 << 20
"""Rows that are as many are streamed. Measured with a reader behind, on one machine with 1 MB of
second-level cache, at 256 bytes a row: to write and read 1 MB took 1.4 times as long so, 8 MB 0.8
times."""
WORD_BYTES = 4


def _copy_line(typing_context: Any, source: Any, to: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.FloatType(), LINE // WORD_BYTES)
        origin, target = (builder.inttoptr(each, line.as_pointer()) for each in arguments)
        write = builder.store(builder.load(origin, align=WORD_BYTES), target, align=LINE)
        write.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp), generate


def _fence(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")  # less is no instruction on x86, where nothing else orders these
        return context.get_dummy_value()

    return types.void(), generate


_copy_line_to: Any = intrinsic(_copy_line)
fence: Any = intrinsic(_fence)
"""Called in a kernel after `stream_row`: the rows are there for whoever hears of them then."""


@inlined
def streaming_pays(memory: int, row_bytes: int, rows: int) -> bool:
    """Whether so many rows, from this address on, are to be streamed: only whole lines can be."""
    whole = memory % LINE == 0 and row_bytes % LINE == 0
    return whole and rows * row_bytes >= STREAMED_BYTES


@inlined
def stream_row(source: int, to: int, row_bytes: int) -> None:
    """Copy a row from one address to another: to the begin of a line, and whole lines."""
    for at in range(0, row_bytes, LINE):
        _copy_line_to(np.uint64(source + at), np.uint64(to + at))
