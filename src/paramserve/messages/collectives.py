"""Barriers and values that are reduced over the ranks: between a worker and the coordinator."""

from __future__ import annotations

from msgspec import Struct


class AllReduce(Struct, frozen=True, array_like=True, tag="all-reduce"):
    """A worker's value for the next collective. Waits up to `wait_s` for the other ranks; asking
    again changes nothing.

    `op`: "barrier", or "sum", "mean", "max" or "min" of values of this dtype and shape. `seen`: the
    number of the last collective whose result it has. `place`: the steps that its program has gone
    through, also those that a restart has left out. `last`: if the others are not there after
    `wait_s`, the value does not count.
    """

    call: int
    op: str
    dtype: str
    shape: tuple[int, ...]
    value: bytes
    seen: int
    place: int
    wait_s: float
    last: bool = False


class AllReduced(Struct, frozen=True, array_like=True, tag="all-reduced"):
    """The result of the collective with this number; or that it has not `ended`, and the ranks that
    are `missing`, each with its state as in `Member`."""

    call: int
    number: int = 0
    value: bytes = b""
    ended: bool = False
    missing: tuple[tuple[int, str], ...] = ()
