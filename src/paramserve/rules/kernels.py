"""The loops over elements, compiled by Numba, which takes 0.2 s to import: import this lazily.

Every kernel takes contiguous, aligned, writable arrays of shape [n], all of one dtype (float32 or
float64), and does not check their sizes: the shard does. No kernel holds the GIL. There is no
fastmath, so a result depends neither on the machine nor on how a block is cut into calls.

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
from paramserve.rules.intrinsics import inlined, reinterpreted

if TYPE_CHECKING:
    from paramserve.rules.built_in import BuiltIn

F = TypeVar("F", bound=Callable[..., Any])

TILE = 2048
"""Elements. 16384 made SGD over 100 MB with `out` 15% slower. Looking for NaN and Inf costs 5% with
these, and 17% with 1024."""
LANES = 256
"""Sums that `squared_norm` keeps side by side: as fast as memory, whatever the vector width."""
INT, FLOAT = numba.types.intp, numba.types.float64
DTYPES = (np.dtype(np.float32), np.dtype(np.float64))


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
        TypeError: the dtype is neither float32 nor float64.
    """
    if dtype not in DTYPES:
        raise TypeError(f"values are float32 or float64 in this machine's byte order, not {dtype}")
    return numba.types.Array(numba.from_dtype(dtype), 1, "C")


def typed(dtype: np.dtype[Any], *kernels: Callable[..., Any]) -> Kernels:
    """What kernels are compiled for, for one dtype; raises as `array_of`.

    The annotations of a kernel say what it takes: Array of the dtype, int or float.
    """
    types = {"Array": array_of(dtype), "int": INT, "float": FLOAT}
    found = {}
    for each in kernels:
        annotations = cast(Any, each).py_func.__annotations__
        found[each] = tuple(types[k] for name, k in annotations.items() if name != "return")
    return found


@inlined
def publish(out: Array, value: Array) -> None:
    """out[:] = value, of one tile; an empty `out` is left alone."""
    for i in range(out.size):
        out[i] = value[i]


@inlined
def greatest(x: Array, most: Any) -> Any:
    """The greater of `most` and the largest size in a tile, both as integers: the bits of numbers
    without a sign have their order, with Inf and then NaN above all, and the greatest of integers
    is found with vectors without fastmath."""
    for i in range(x.size):
        most = max(most, reinterpreted(abs(x[i])))
    return most


@inlined
def largest_of(most: Any) -> float:
    """The size that these bits are; inf of NaN as well."""
    size = np.float64(reinterpreted(most))
    return size if size < np.inf else np.inf


@kernel
def largest(a: Array) -> float:
    """The largest size of an element; inf if one is NaN or Inf, and then not all were looked at."""
    most = reinterpreted(a.dtype.type(0.0))
    bad = reinterpreted(a.dtype.type(np.inf))
    for at in range(0, a.size, TILE):
        most = greatest(a[at : at + TILE], most)
        if most >= bad:
            break
    return largest_of(most)


@kernel
def copy_largest(dst: Array, src: Array) -> float:
    """Copy `src` to `dst` and give `largest` of it, in one pass.

    After inf, `dst` holds the elements up to somewhere behind the first bad one.
    """
    most = reinterpreted(src.dtype.type(0.0))
    bad = reinterpreted(src.dtype.type(np.inf))
    for at in range(0, src.size, TILE):
        x = src[at : at + TILE]
        most = greatest(x, most)
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
def add_scaled_into(acc: Array, weight: float, gradient: Array) -> None:
    """acc += weight * gradient"""
    w = acc.dtype.type(weight)
    for i in range(acc.size):
        acc[i] += w * gradient[i]


@kernel
def compensate(gradient: Array, value: Array, read: Array, lam: float) -> None:
    """gradient += lam * gradient * gradient * (value - read), element by element."""
    factor = gradient.dtype.type(lam)
    for i in range(gradient.size):
        g = gradient[i]
        gradient[i] = g + factor * g * g * (value[i] - read[i])


@kernel
def squared_norm(a: Array) -> float:
    """Sum of squares in float64, in an order of addition that is the same on every machine."""
    sums = np.zeros(LANES)
    for at in range(0, a.size, LANES):
        x = a[at : at + LANES]
        for lane in range(x.size):
            sums[lane] += np.float64(x[lane]) * np.float64(x[lane])
    width = LANES // 2
    while width > 0:
        for lane in range(width):
            sums[lane] += sums[lane + width]
        width //= 2
    return float(sums[0])


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
        numbers = coefficients(hyper, scale, count)
        none = reinterpreted(value.dtype.type(0.0))
        bad = reinterpreted(value.dtype.type(np.inf))
        for at in range(start, stop, TILE):
            end = min(at + TILE, stop)
            tile, pushed = value[at:end], gradient[at:end]
            if greatest(pushed, none) >= bad:
                return at
            update(tile, pushed, cut(state, at, end), numbers)
            publish(out[at:end], tile)
        return stop

    return of_rule(rule, states, block)


def of_rule(rule: type[BuiltIn], states: int, function: F) -> F:
    """Compile a kernel that was made for a rule, with a name of its own, which its compiled code
    and its file in the cache have."""
    owner = rule.update.__qualname__.rpartition(".")[0]
    function.__name__ = function.__qualname__ = f"{function.__name__}_{owner}_{states}"
    return kernel(function, rule.update.__module__, rule.coefficients.__module__)


def block_types(dtype: np.dtype[Any], states: int, hyper: int) -> tuple[Any, ...]:
    """What a `block_kernel` is compiled for; raises as `array_of`."""
    array = array_of(dtype)
    state, numbers = tuple_of(array, states), tuple_of(FLOAT, hyper)
    return (array, array, state, array, INT, INT, FLOAT, numbers, INT)


def tuple_of(kind: Any, size: int) -> Any:
    """Numba's type of a tuple of so many."""
    make: Any = numba.types.Tuple
    return make([kind] * size)


def shared(dtype: np.dtype[Any]) -> Kernels:
    """The kernels that belong to no rule."""
    return typed(dtype, largest, copy_largest, add_into, add_scaled_into, squared_norm, compensate)


def prepare(dtype: np.dtype[Any]) -> None:
    """Compile or load the kernels that belong to no rule.

    Raises:
        TypeError: the dtype is neither float32 nor float64.
    """
    kernel_cache.load(shared(dtype))
