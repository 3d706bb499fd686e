"""The loops over elements, compiled by Numba, which takes 0.2 s to import: import this lazily.

Every kernel takes contiguous, aligned, writable arrays of shape [n], all of one dtype (float32 or
float64), and does not check their sizes: the shard does. No kernel holds the GIL. There is no
fastmath, so a result depends neither on the machine nor on how a block is cut into calls.

A kernel compiles only in `kernel_cache.load`. After that, a call with types that were not loaded
raises `TypeError`; it does not compile for a second in the middle of a push.

Rule kernels update elements [start, stop) and then write them to `out`, or nowhere if `out` is
empty. They go by tiles that stay in the first-level cache, so both are one pass over memory, and
no inner loop sees so many arrays that LLVM gives up proving that they do not overlap (past eight
comparisons, which five arrays need) and stops vectorising. Numbers come as Python floats and are
rounded to the dtype before the loop, so that float32 is computed in float32, as torch does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

from paramserve import kernel_cache
from paramserve.kernel_cache import Kernels
from paramserve.rules.base import Array

F = TypeVar("F", bound=Callable[..., Any])

TILE = 1024
"""Elements. 512 to 2048 measured alike; 16384 made SGD over 100 MB with `out` 15% slower."""
LANES = 256
"""Sums that `squared_norm` keeps side by side: as fast as memory, whatever the vector width."""
DTYPES = (np.dtype(np.float32), np.dtype(np.float64))


def kernel(function: F) -> F:
    """Compile with the settings that all kernels share."""
    compiler = numba.njit(nogil=True, error_model="numpy")
    return cast(F, kernel_cache.cached(compiler(function), function.__module__))


def inlined(function: F) -> F:
    """Compile into whatever kernel calls it; a kernel may be given as well.

    A call writes its arguments to the stack. Such writes queue behind those to memory that was
    asked for ahead and has not arrived, and undo what asking ahead has won: Adagrad took 330 ns a
    row with calls, and 115 ns without.
    """
    plain = getattr(function, "py_func", function)
    return cast(F, numba.njit(nogil=True, error_model="numpy", forceinline=True)(plain))


def typed(dtype: np.dtype[Any], *kernels: Callable[..., Any]) -> Kernels:
    """What kernels are compiled for, for one dtype.

    The annotations of a kernel say what it takes: Array of the dtype, int or float.

    Raises:
        TypeError: the dtype is neither float32 nor float64.
    """
    if dtype not in DTYPES:
        raise TypeError(f"values are float32 or float64 in this machine's byte order, not {dtype}")
    types = {
        "Array": numba.types.Array(numba.from_dtype(dtype), 1, "C"),
        "int": numba.types.intp,
        "float": numba.types.float64,
    }
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


@kernel
def add(value: Array, gradient: Array, out: Array, start: int, stop: int, scale: float) -> None:
    """value += scale * gradient"""
    c = value.dtype.type(scale)
    for at in range(start, stop, TILE):
        end = min(at + TILE, stop)
        v = value[at:end]
        g = gradient[at:end]
        for i in range(v.size):
            v[i] += c * g[i]
        publish(out[at:end], v)


@kernel
def sgd(
    value: Array,
    gradient: Array,
    out: Array,
    start: int,
    stop: int,
    scale: float,
    decay: float,
    lr: float,
) -> None:
    """value -= lr * (scale * gradient + decay * value)"""
    kind = value.dtype.type
    c, wd, rate = kind(scale), kind(decay), kind(lr)
    for at in range(start, stop, TILE):
        end = min(at + TILE, stop)
        v = value[at:end]
        g = gradient[at:end]
        for i in range(v.size):
            v[i] -= rate * (c * g[i] + wd * v[i])
        publish(out[at:end], v)


@kernel
def sgd_momentum(
    value: Array,
    gradient: Array,
    buffer: Array,
    out: Array,
    start: int,
    stop: int,
    scale: float,
    decay: float,
    keep: float,
    take: float,
    direct: float,
    through: float,
    lr: float,
) -> None:
    """g = scale * gradient + decay * value; buffer = keep * buffer + take * g;
    value -= lr * (direct * g + through * buffer)
    """
    kind = value.dtype.type
    c, wd, rate = kind(scale), kind(decay), kind(lr)
    old, new, near, far = kind(keep), kind(take), kind(direct), kind(through)
    for at in range(start, stop, TILE):
        end = min(at + TILE, stop)
        v = value[at:end]
        g = gradient[at:end]
        b = buffer[at:end]
        for i in range(v.size):
            d = c * g[i] + wd * v[i]
            m = old * b[i] + new * d
            b[i] = m
            v[i] -= rate * (near * d + far * m)
        publish(out[at:end], v)


@kernel
def adam(
    value: Array,
    gradient: Array,
    mean: Array,
    square: Array,
    out: Array,
    start: int,
    stop: int,
    scale: float,
    decay: float,
    shrink: float,
    take1: float,
    beta2: float,
    take2: float,
    root: float,
    eps: float,
    step: float,
) -> None:
    """g = scale * gradient + decay * value; mean += take1 * (g - mean), which for a `take1` of 0.5
    or more is computed from g, as torch's lerp does: mean = g + (take1 - 1) * (g - mean);
    square = beta2 * square + take2 * g * g;
    value = shrink * value - step * mean / (sqrt(square) / root + eps)
    """
    kind = value.dtype.type
    c, wd, left, rate = kind(scale), kind(decay), kind(shrink), kind(step)
    t1, b2, t2, r, e = kind(take1), kind(beta2), kind(take2), kind(root), kind(eps)
    near = t1 >= kind(0.5)
    way = t1 - kind(1.0) if near else t1
    for at in range(start, stop, TILE):
        end = min(at + TILE, stop)
        v = value[at:end]
        g = gradient[at:end]
        m = mean[at:end]
        s = square[at:end]
        for i in range(v.size):
            d = c * g[i] + wd * v[i]
            mi = (d if near else m[i]) + way * (d - m[i])
            si = b2 * s[i] + t2 * d * d
            m[i] = mi
            s[i] = si
            v[i] = left * v[i] - rate * (mi / (np.sqrt(si) / r + e))
        publish(out[at:end], v)


@kernel
def adagrad(
    value: Array,
    gradient: Array,
    total: Array,
    out: Array,
    start: int,
    stop: int,
    scale: float,
    decay: float,
    eps: float,
    step: float,
) -> None:
    """g = scale * gradient + decay * value; total += g * g;
    value -= step * g / (sqrt(total) + eps)
    """
    kind = value.dtype.type
    c, wd, e, rate = kind(scale), kind(decay), kind(eps), kind(step)
    for at in range(start, stop, TILE):
        end = min(at + TILE, stop)
        v = value[at:end]
        g = gradient[at:end]
        t = total[at:end]
        for i in range(v.size):
            d = c * g[i] + wd * v[i]
            ti = t[i] + d * d
            t[i] = ti
            v[i] -= rate * (d / (np.sqrt(ti) + e))
        publish(out[at:end], v)


@kernel
def ftrl(
    value: Array,
    gradient: Array,
    linear: Array,
    square: Array,
    out: Array,
    start: int,
    stop: int,
    scale: float,
    alpha: float,
    beta: float,
    l1: float,
    l2: float,
) -> None:
    """g = scale * gradient; s = square + g * g;
    linear += g - (sqrt(s) - sqrt(square)) / alpha * value; square = s;
    value = (linear cut to [-l1, l1] - linear) / ((beta + sqrt(s)) / alpha + l2)
    """
    kind = value.dtype.type
    c, rate, b = kind(scale), kind(alpha), kind(beta)
    most, ridge, zero = kind(l1), kind(l2), kind(0.0)
    for at in range(start, stop, TILE):
        end = min(at + TILE, stop)
        v = value[at:end]
        g = gradient[at:end]
        z = linear[at:end]
        s = square[at:end]
        for i in range(v.size):
            d = c * g[i]
            si = s[i] + d * d
            root = np.sqrt(si)
            zi = z[i] + (d - (root - np.sqrt(s[i])) / rate * v[i])
            z[i] = zi
            s[i] = si
            over = min(max(zi, -most), most) - zi
            # With beta and l2 of 0, an element whose gradients were all 0 would be 0 / 0.
            v[i] = over / ((b + root) / rate + ridge) if over != zero else zero
        publish(out[at:end], v)


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
