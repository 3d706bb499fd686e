"""The loops over elements, compiled by Numba, which takes 0.2 s to import: import this lazily.

Every kernel takes contiguous, aligned, writable arrays of shape [n], all of one dtype (float32 or
float64; gradients and `out` beside float32 also of 16 bits, see `rules.conversions`), and does not
check their sizes: the shard does. No kernel holds the GIL. There is no fastmath, so a result
depends neither on the machine nor on how a block is cut into calls.

A kernel compiles only in `kernel_cache.load`. After that, a call with types that were not loaded
raises `TypeError`; it does not compile for a second in the middle of a push.

A rule's kernel looks whether the gradient is finite, updates elements [start, stop) and writes them
to `out`, or nowhere if `out` is empty. It goes by tiles that stay in the first-level cache, so all
three are one pass over memory, and no inner loop sees so many arrays that LLVM gives up proving
that they do not overlap (past eight comparisons, which five arrays need) and stops vectorising. The
maths is the rule's own `update` (`rules.built_in`), which `rules.row_kernels` compiles for rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numba
import numpy as np

from paramserve import kernel_cache
from paramserve.kernel_cache import Kernels
from paramserve.rules.base import Array
from paramserve.rules.conversions import (
    TILE,
    floats_of,
    greatest,
    publish,
    spoiled,
    tile_memory,
)
from paramserve.rules.intrinsics import inlined, reinterpreted

if TYPE_CHECKING:
    from paramserve.rules.built_in import BuiltIn

F = TypeVar("F", bound=Callable[..., Any])
Floats = Array
"""Arrays of float32 where others are of 16 bits; else of the same dtype as those."""

LANES = 256
"""Sums that `squared_norm` keeps side by side: as fast as memory, whatever the vector width."""
INT, FLOAT = numba.types.intp, numba.types.float64
DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
HALVES = (np.dtype(np.uint16), np.dtype(np.int16))
"""Dtypes of 16 bits, as kernels are given them: bfloat16 and float16."""


def kernel(function: F, *modules: str) -> F:
    """Compile with the settings that all kernels share.

    Args:
        modules: names of modules that it is made of and that its own does not import.
    """
    compiler = numba.njit(nogil=True, error_model="numpy")
    return cast(F, kernel_cache.cached(compiler(function), function.__module__, *modules))


def array_of(dtype: np.dtype[Any]) -> Any:
    """Numba's type of an array of a block.

    Raises:
        TypeError: the dtype is neither float32 nor float64, nor one of `HALVES`.
    """
    if dtype not in (*DTYPES, *HALVES):
        raise TypeError(f"values are float32 or float64 in this machine's byte order, not {dtype}")
    return numba.types.Array(numba.from_dtype(dtype), 1, "C")


def typed(dtype: np.dtype[Any], *kernels: Callable[..., Any]) -> Kernels:
    """What kernels are compiled for, for one dtype; raises as `array_of`.

    The annotations of a kernel say what it takes: Array of the dtype, Floats, int or float.
    """
    floats = array_of(np.dtype(np.float32) if dtype in HALVES else dtype)
    types = {"Array": array_of(dtype), "Floats": floats, "int": INT, "float": FLOAT}
    types_of = {}
    for each in kernels:
        annotations = cast(Any, each).py_func.__annotations__
        types_of[each] = tuple(types[k] for name, k in annotations.items() if name != "return")
    return types_of


@inlined
def largest_of(most: Any) -> float:
    """The size that these bits are; inf of NaN as well."""
    size = np.float64(reinterpreted(most))
    return size if size < np.inf else np.inf


@kernel
def largest(a: Array) -> float:
    """The largest size of an element; inf if one is NaN or Inf, and then not all were looked at."""
    memory = tile_memory(a)
    most = reinterpreted(memory.dtype.type(0.0))
    bad = reinterpreted(memory.dtype.type(np.inf))
    for at in range(0, a.size, TILE):
        most = greatest(floats_of(a[at : at + TILE], memory), most)
        if most >= bad:
            break
    return largest_of(most)


@kernel
def copy_largest(dst: Array, src: Array) -> float:
    """Copy `src` to `dst` and give `largest` of it, in one pass.

    After inf, `dst` holds the elements up to somewhere behind the first bad one.
    """
    memory = tile_memory(src)
    most = reinterpreted(memory.dtype.type(0.0))
    bad = reinterpreted(memory.dtype.type(np.inf))
    for at in range(0, src.size, TILE):
        x = src[at : at + TILE]
        most = greatest(floats_of(x, memory), most)
        publish(dst[at : at + TILE], x)
        if most >= bad:
            break
    return largest_of(most)


@kernel
def add_into(acc: Array, gradient: Array) -> None:
    """acc += gradient"""
    for i in range(acc.size):
        acc[i] += gradient[i]


@kernel
def add_scaled_into(acc: Floats, weight: float, gradient: Array) -> None:
    """acc += weight * gradient"""
    w, memory = acc.dtype.type(weight), tile_memory(gradient)
    for at in range(0, acc.size, TILE):
        total, x = acc[at : at + TILE], floats_of(gradient[at : at + TILE], memory)
        for i in range(total.size):
            total[i] += w * x[i]


@kernel
def scaled_into(out: Floats, weight: float, gradient: Array) -> None:
    """out = weight * gradient, of 16 bits; with weight 1, the same numbers."""
    w, memory = out.dtype.type(weight), tile_memory(gradient)
    for at in range(0, out.size, TILE):
        part, x = out[at : at + TILE], floats_of(gradient[at : at + TILE], memory)
        for i in range(part.size):
            part[i] = w * x[i]


@kernel
def round_into(out: Array, value: Floats) -> None:
    """out = value, of 16 bits, rounded to the nearest."""
    publish(out, value)


@kernel
def multiply(a: Array, factor: float) -> None:
    """a *= factor, of 16 bits, rounded to the nearest."""
    memory = tile_memory(a)
    w = memory.dtype.type(factor)
    for at in range(0, a.size, TILE):
        tile = a[at : at + TILE]
        x = floats_of(tile, memory)
        for i in range(x.size):
            x[i] *= w
        publish(tile, x)


@kernel
def compensate(gradient: Array, value: Array, read: Array, lam: float) -> None:
    """gradient += lam * gradient * gradient * (value - read), element by element."""
    factor = gradient.dtype.type(lam)
    for i in range(gradient.size):
        g = gradient[i]
        gradient[i] = g + factor * g * g * (value[i] - read[i])


@inlined
def add_squares(sums: Any, x: Any) -> None:
    """Add the squares of a tile to sums [LANES], in float64."""
    for at in range(0, x.size, LANES):
        part = x[at : at + LANES]
        for lane in range(part.size):
            sums[lane] += np.float64(part[lane]) * np.float64(part[lane])


@inlined
def folded(sums: Any) -> Any:
    """The sum of [LANES], which it overwrites."""
    width = LANES // 2
    while width > 0:
        for lane in range(width):
            sums[lane] += sums[lane + width]
        width //= 2
    return sums[0]


@kernel
def squared_norm(a: Array) -> float:
    """Sum of squares in float64, in an order of addition that is the same on every machine."""
    sums, memory = np.zeros(LANES), tile_memory(a)
    for at in range(0, a.size, TILE):
        add_squares(sums, floats_of(a[at : at + TILE], memory))
    return float(folded(sums))


# --- the kernel of a rule ----------------------------------------------------------------------


def parts(states: int) -> Any:
    """What cuts elements [start, stop) from a tuple of arrays. Compiled code knows their number."""
    if not states:

        def cut(state: Any, start: int, stop: int) -> Any:
            return ()

    else:
        fewer, last = parts(states - 1), states - 1

        def cut(state: Any, start: int, stop: int) -> Any:
            return (*fewer(state, start, stop), state[last][start:stop])

    return inlined(cut)


@cache
def block_kernel(rule: type[BuiltIn], states: int) -> Any:
    """The kernel of a rule for blocks with so many state arrays. It gives `stop`, or where the tile
    begins at whose NaN or Inf it has stopped: no update leaves either in the values."""
    if rule.whole_tensors:
        return layerwise(rule, states)
    update, coefficients, cut = inlined(rule.update), inlined(rule.coefficients), parts(states)

    def block(
        value: Array,
        gradient: Array,
        state: Any,
        out: Array,
        start: int,
        stop: int,
        scale: float,
        hyper: Any,
        count: int,
    ) -> int:
        numbers, memory = coefficients(hyper, scale, count), tile_memory(gradient)
        for at in range(start, stop, TILE):
            end = min(at + TILE, stop)
            tile, pushed = value[at:end], gradient[at:end]
            if spoiled(pushed):
                return at
            update(tile, floats_of(pushed, memory), cut(state, at, end), numbers)
            publish(out[at:end], tile)
        return stop

    return of_rule(rule, states, block)


def layerwise(rule: type[BuiltIn], states: int) -> Any:
    """The kernel of a rule with `whole_tensors`, for one tensor. One pass over memory changes the
    states and sums the squares of the values and of the direction; a second one, which computes the
    direction once more instead of keeping it, changes the values. After NaN or Inf it has changed
    states and no value."""
    update, coefficients, cut = inlined(rule.update), inlined(rule.coefficients), parts(states)
    direction = inlined(rule.direction)

    def tensor(
        value: Array,
        gradient: Array,
        state: Any,
        out: Array,
        start: int,
        stop: int,
        scale: float,
        hyper: Any,
        count: int,
    ) -> int:
        numbers, memory = coefficients(hyper, scale, count), tile_memory(gradient)
        scratch = np.empty(TILE, value.dtype)
        norms = np.zeros((2, LANES))
        for at in range(start, stop, TILE):
            end = min(at + TILE, stop)
            tile, pushed, part = value[at:end], gradient[at:end], cut(state, at, end)
            if spoiled(pushed):
                return at
            way = scratch[: end - at]
            update(tile, floats_of(pushed, memory), part, numbers)
            direction(tile, part, numbers, way)
            add_squares(norms[0], tile)
            add_squares(norms[1], way)
        size, length = np.sqrt(folded(norms[0])), np.sqrt(folded(norms[1]))
        ratio = size / length if size > 0.0 and length > 0.0 else 1.0
        rate = value.dtype.type(numbers[len(numbers) - 1] * ratio)
        for at in range(start, stop, TILE):
            end = min(at + TILE, stop)
            tile, way = value[at:end], scratch[: end - at]
            direction(tile, cut(state, at, end), numbers, way)
            for i in range(tile.size):
                tile[i] -= rate * way[i]
            publish(out[at:end], tile)
        return stop

    return of_rule(rule, states, tensor)


def of_rule(rule: type[BuiltIn], states: int, function: F) -> F:
    """Compile a kernel that was made for a rule, with a name of its own, which its compiled code
    and its file in the cache have."""
    owner = rule.update.__qualname__.rpartition(".")[0]
    function.__name__ = function.__qualname__ = f"{function.__name__}_{owner}_{states}"
    return kernel(function, rule.update.__module__, rule.coefficients.__module__)


def block_types(
    dtype: np.dtype[Any], states: int, hyper: int, pushed: np.dtype[Any] | None = None
) -> tuple[Any, ...]:
    """What a `block_kernel` is compiled for; raises as `array_of`.

    Args:
        pushed: of gradients and `out`; None: `dtype`.
    """
    array = array_of(dtype)
    pushed_type = array if pushed is None else array_of(pushed)
    state, numbers = tuple_of(array, states), tuple_of(FLOAT, hyper)
    return (array, pushed_type, state, pushed_type, INT, INT, FLOAT, numbers, INT)


def tuple_of(kind: Any, size: int) -> Any:
    """Numba's type of a tuple of so many."""
    make: Any = numba.types.Tuple
    return make([kind] * size)


def shared(dtype: np.dtype[Any]) -> Kernels:
    """The kernels that belong to no rule."""
    if dtype in HALVES:
        sums = (add_scaled_into, scaled_into, squared_norm)
        return typed(dtype, largest, copy_largest, *sums, round_into, multiply)
    return typed(dtype, largest, copy_largest, add_into, add_scaled_into, squared_norm, compensate)


def prepare(dtype: np.dtype[Any]) -> None:
    """Compile or load the kernels that belong to no rule.

    Raises:
        TypeError: as `array_of`.
    """
    kernel_cache.load(shared(dtype))
