"""What Numba has no words for, in kernels: inlining, the bits of a number, prefetches, writes past
the caches, uncounted arrays.

Imports Numba: import this lazily.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])

LINE = 64
"""Bytes of a cache line on x86-64 and most of arm64; on others it is a hint too few or too many."""
READ, WRITE = 0, 1
KEEP = 3
"""LLVM's word for data that is wanted in all caches."""
DATA = 1
STREAMED_BYTES = 4 << 20
"""Rows that are as many are streamed. Measured with a reader behind, on one machine with 1 MB of
second-level cache, at 256 bytes a row: to write and read 1 MB took 1.4 times as long so, 8 MB 0.8
times."""
WORD_BYTES = 4


def inlined(function: F) -> F:
    """Compile into whatever kernel calls it; a kernel may be given as well.

    A call writes its arguments to the stack. Such writes queue behind those to memory that was
    asked for ahead and has not arrived, and undo what asking ahead has won: Adagrad took 330 ns a
    row with calls, and 115 ns without.
    """
    plain = getattr(function, "py_func", function)
    return cast(F, numba.njit(nogil=True, error_model="numpy", forceinline=True)(plain))


# --- the bits of a number -----------------------------------------------------------------------

_OTHERS: Any = {
    types.float32: types.int32,
    types.float64: types.int64,
    types.int32: types.float32,
    types.int64: types.float64,
}


def _reinterpreted(typing_context: Any, number: Any) -> Any:
    if number not in _OTHERS:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(_OTHERS[number]))

    return _OTHERS[number](number), generate


reinterpreted: Any = intrinsic(_reinterpreted)
"""Called in a kernel with a float: the integer of the same bits; and the other way round."""


# --- memory ahead of its use ---------------------------------------------------------------------


def _hint(intention: int) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        pointer = builder.inttoptr(arguments[0], byte)
        builder.call(function, [pointer, word(intention), word(KEEP), word(DATA)])
        return context.get_dummy_value()

    return generate


def _prefetch(typing_context: Any, address: Any) -> Any:
    return types.void(types.uintp), _hint(READ)


def _prefetch_to_write(typing_context: Any, address: Any) -> Any:
    return types.void(types.uintp), _hint(WRITE)


prefetch: Any = intrinsic(_prefetch)
"""Called in a kernel with an address, an unsigned integer: fetch its line, which will be read."""
prefetch_to_write: Any = intrinsic(_prefetch_to_write)
"""Prefetch a cache line that will be written."""


# --- writes past the caches ----------------------------------------------------------------------
#
# A write that the caches keep fetches its line first, and pushes others out. What is more than they
# hold until another process reads it is better written past them.


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
"""Called in a kernel after `stream_row`: the rows are visible to a reader that is told of them
then."""


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


# --- arrays without counts of references ---------------------------------------------------------


def _borrowed(typing_context: Any, array: Any) -> Any:
    if not isinstance(array, types.Array):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        parts: Any = cgutils
        bare = parts.create_struct_proxy(array)(context, builder, value=arguments[0])
        for name in ("meminfo", "parent"):
            setattr(bare, name, parts.get_null_value(getattr(bare, name).type))
        return bare._getvalue()

    return array(array), generate


borrowed: Any = intrinsic(_borrowed)
"""Called in a kernel with an array: the same, without a reference. The kernel's caller holds it.

Numba counts references for each slice of an array with locked instructions, which wait until all
earlier writes have reached the cache. That undoes what rows far apart were asked for ahead.
"""
