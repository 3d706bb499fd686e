"""Ask the processor for memory ahead of its use, in kernels. Imports Numba: import this lazily."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LINE = 64
"""Bytes of a cache line on x86-64 and most of arm64; on others it is a hint too few or too many."""
READ, WRITE = 0, 1
KEEP = 3
"""LLVM's word for data that is wanted in all caches."""
DATA = 1


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
"""The same for a line that will be written."""
