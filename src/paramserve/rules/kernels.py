"""The loops over elements, compiled by Numba, which takes 0.2 s to import: import this lazily.

Every kernel takes contiguous, aligned, writable arrays of shape [n], all of one dtype (float32 or
float64), and does not check their sizes: the shard does. No kernel holds the GIL. There is no
fastmath, so a result depends neither on the machine nor on how a block is cut into calls.

A kernel compiles only in `kernel_cache.load`. After that, a call with types that were not loaded
raises `TypeError`; it does not compile for a second in the middle of a push.

A rule's kernel updates elements [start, stop) and then writes them to `out`, or nowhere if `out` is
empty. It goes by tiles that stay in the first-level cache, so both are one pass over memory, and no
inner loop sees so many arrays that LLVM gives up proving that they do not overlap (past eight
comparisons, which five arrays need) and stops vectorising. The maths is the rule's own `update`
(`rules.built_in`), which `rules.row_kernels` compiles for rows.
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

if TYPE_CHECKING:
    from paramserve.rules.built_in import BuiltIn

F = TypeVar("F", bound=Callable[..., Any])

TILE = 1024
"""Elements. 512 to 2048 measured alike; 16384 made SGD over 100 MB with `out` 15% slower."""
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


def inlined(function: F) -> F:
    """Compile into whatever kernel calls it; a kernel may be given as well.

    A call writes its arguments to the stack. Such writes queue behind those to memory that was
    asked for ahead and has not arrived, and undo what asking ahead has won: Adagrad took 330 ns a
    row with calls, and 115 ns without.
    """
    plain = getattr(function, "py_func", function)
    return cast(F, numba.njit(nogil=True, error_model="numpy", forceinline=True)(plain))


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


@kernel
def finite(a: Array) -> bool:
    """Whether no element is NaN or Inf."""
    for at in range(0, a.size, TILE):
        x = a[at : at + TILE]
        good = True
        for i in range(x.size):
            good &= abs(x[i]) < np.inf
        if not good:
            return False
    return True


@kernel
def below(a: Array, limit: float) -> bool:
    """Whether no element is NaN, and none's size is `limit` or more."""
    most = a.dtype.type(limit)
    for at in range(0, a.size, TILE):
        x = a[at : at + TILE]
        good = True
        for i in range(x.size):
            good &= abs(x[i]) < most
        if not good:
            return False
    return True


@kernel
def copy_finite(dst: Array, src: Array) -> bool:
    """Copy `src` to `dst` and say whether no element is NaN or Inf, in one pass.

    After False, `dst` holds the elements up to somewhere behind the first bad one.
    """
    for at in range(0, src.size, TILE):
        x = src[at : at + TILE]
        y = dst[at : at + TILE]
        good = True
        for i in range(x.size):
            good &= abs(x[i]) < np.inf
            y[i] = x[i]
        if not good:
            return False
    return True


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


@kernel
def publish(out: Array, value: Array) -> None:
    """out[:] = value, of one tile; an empty `out` is left alone."""
    for i in range(out.size):
        out[i] = value[i]


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
    """The kernel of a rule for blocks with so many state arrays."""
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
    ) -> None:
        numbers = coefficients(hyper, scale, count)
        for at in range(start, stop, TILE):
            end = min(at + TILE, stop)
            tile = value[at:end]
            update(tile, gradient[at:end], cut(state, at, end), numbers)
            publish(out[at:end], tile)

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
    return typed(
        dtype, finite, below, copy_finite, add_into, add_scaled_into, squared_norm, compensate
    )


def prepare(dtype: np.dtype[Any]) -> None:
    """Compile or load the kernels that belong to no rule.

    Raises:
        TypeError: the dtype is neither float32 nor float64.
    """
    kernel_cache.load(shared(dtype))
