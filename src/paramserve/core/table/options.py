"""What a user chooses for a table: how rows begin, who gets one, and which go.

Objects that are checked when they are built, and compose. What they mean is in `admission` and
`store`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

from paramserve.config import RuleSpec
from paramserve.rules.layout import WIDE

FLOAT32_MAX = 3.4028234663852886e38
BEYOND: Mapping[str, float] = {
    "float32": math.inf,
    "float64": math.inf,
    "int64": math.inf,
    "bfloat16": float(2**128 - 2**119),
    "float16": 65520.0,
}
"""Numbers by dtype of rows from which on the nearest of their values would be Inf."""


def _number(owner: object, name: str, low: float = -FLOAT32_MAX) -> float:
    value = getattr(owner, name)
    where = f"{type(owner).__name__}({name}=...)"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{where} has to be a number, not {value!r}")
    number = float(value)
    if not (math.isfinite(number) and low <= number <= FLOAT32_MAX):
        raise ValueError(f"{where} has to be from {low:g} to {FLOAT32_MAX:g}, not {value!r}")
    object.__setattr__(owner, name, number)
    return number


def _count(owner: object, name: str, low: int, high: int) -> None:
    value = getattr(owner, name)
    where = f"{type(owner).__name__}({name}=...)"
    whole = isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole:
        raise TypeError(f"{where} has to be a whole number, not {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{where} has to be from {low} to {high}, not {value!r}")
    object.__setattr__(owner, name, int(value))


@dataclass(frozen=True)
class Uniform:
    """Initial values drawn evenly from `low` to `high`, by (seed, table, key) only.

    Raises:
        ValueError: a bound is no float32, or `low` is above `high`.
    """

    low: float = -0.05
    high: float = 0.05

    def __post_init__(self) -> None:
        low, high = _number(self, "low"), _number(self, "high")
        if low > high or high - low > FLOAT32_MAX:
            raise ValueError(f"Uniform(low, high) needs low <= high, not {low:g} and {high:g}")


@dataclass(frozen=True)
class Normal:
    """Initial values drawn from a normal distribution, by (seed, table, key) only.

    Raises:
        ValueError: `mean` is no float32, or `std` is below 0 or so large that a value is none.
    """

    mean: float = 0.0
    std: float = 0.01

    def __post_init__(self) -> None:
        mean, std = _number(self, "mean"), _number(self, "std", 0.0)
        if abs(mean) + SIGMAS_MAX * std > FLOAT32_MAX:
            raise ValueError(f"Normal(mean={mean:g}, std={std:g}) gives values beyond float32")


SIGMAS_MAX = 7.0
"""No value lies further from the mean: what 32 bits of a uniform number give is 6.8."""


@dataclass(frozen=True)
class Constant:
    """One initial value for every element.

    Raises:
        ValueError: `value` is no float32.
    """

    value: float

    def __post_init__(self) -> None:
        _number(self, "value")


@dataclass(frozen=True)
class Zeros:
    """Initial values of 0."""


@dataclass(frozen=True)
class MinCount:
    """A key gets a row at its `count`-th push. Each push of it counts once, and those that are
    applied together count once together: all workers' of a clock under Sync, a buffer's under
    Buffered.

    Before that it reads as its initial value, and gradients for it are dropped and counted.
    Counting is bounded (`admission.CANDIDATES_MAX`): a key whose pushes lie further apart than
    twice as many other new keys begins again.

    Raises:
        ValueError: `count` is below 1.
    """

    count: int

    def __post_init__(self) -> None:
        _count(self, "count", 1, (1 << 32) - 1)


@dataclass(frozen=True)
class TTL:
    """Evict a row, with its rule state, that was not used in the last `clocks` clocks.

    A push to a row, or a `put`, is a use of it; a pull is none. `TTL(...) | LRU(...)` does both.

    Raises:
        ValueError: `clocks` is below 1.
    """

    clocks: int

    def __post_init__(self) -> None:
        _count(self, "clocks", 1, 1 << 62)

    def __or__(self, other: LRU) -> Evict:
        return Evict(self, other)


@dataclass(frozen=True)
class LRU:
    """Evict the least recently used row, with its rule state, when there are more than `rows`.

    A push to a row, or a `put`, is a use of it; a pull is none.

    Args:
        rows: of the whole table, of which each server keeps its part; None: only `max_bytes` limits
            the rows. The rows that one request creates and uses stay together: where they are more,
            they are there until the next request that creates some.
    Raises:
        ValueError: `rows` is below 1.
    """

    rows: int | None = None

    def __post_init__(self) -> None:
        if self.rows is not None:
            _count(self, "rows", 1, 1 << 62)

    def __or__(self, other: TTL) -> Evict:
        return Evict(other, self)


@dataclass(frozen=True)
class Evict:
    """Rows go when they are not used for long, and when there are too many: `TTL(...) | LRU(...)`.

    Raises:
        TypeError: these are no TTL and LRU.
    """

    ttl: TTL
    lru: LRU

    def __post_init__(self) -> None:
        if not (isinstance(self.ttl, TTL) and isinstance(self.lru, LRU)):
            raise TypeError(f"eviction composes a TTL with an LRU, not {self.ttl!r}, {self.lru!r}")


Init = Uniform | Normal | Constant | Zeros
_INIT = (Uniform, Normal, Constant, Zeros)
_EVICT = (TTL, LRU, Evict)
_KINDS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in (*_INIT, MinCount, TTL, LRU)}


@dataclass(frozen=True)
class TableOptions:
    """What a table is made with besides its rule.

    Args:
        init: what a row begins with.
        admit: which keys get a row; None: every key that is pushed to.
        evict: which rows go; None: none.
        max_bytes: memory of the table on one server; 0: no limit. Past it the least recently used
            row goes if `evict` has an LRU, else what would create a row is refused (`TableFull`).
    Raises:
        TypeError: an option is something else.
        ValueError: `max_bytes` is below 0, or an LRU without rows has no `max_bytes`.
    """

    init: Init
    admit: MinCount | None = None
    evict: TTL | LRU | Evict | None = None
    max_bytes: int = 0

    def __post_init__(self) -> None:
        slots: tuple[tuple[str, Any, tuple[type[Any], ...]], ...] = (
            ("init", self.init, _INIT),
            ("admit", self.admit, (MinCount, type(None))),
            ("evict", self.evict, (*_EVICT, type(None))),
        )
        for name, value, kinds in slots:
            if not isinstance(value, kinds):
                kinds_text = ", ".join(
                    "None" if k is type(None) else f"ps.{k.__name__}" for k in kinds
                )
                raise TypeError(f"{name} has to be an object of {kinds_text}, not {value!r}")
        _count(self, "max_bytes", 0, 1 << 62)
        if self.lru is not None and self.lru.rows is None and not self.max_bytes:
            raise ValueError("evict=LRU() needs a limit: LRU(rows=...), or max_bytes=")

    @property
    def ttl(self) -> TTL | None:
        return self.evict.ttl if isinstance(self.evict, Evict) else _if(self.evict, TTL)

    @property
    def lru(self) -> LRU | None:
        return self.evict.lru if isinstance(self.evict, Evict) else _if(self.evict, LRU)

    def check_dtype(self, dtype: str) -> None:
        """Raise `ValueError` if rows of this dtype cannot hold what they would begin with."""
        if dtype in WIDE and not isinstance(self.init, Zeros):
            raise ValueError(
                f"rows of {dtype} begin with zeros: give the table init=ps.Zeros(), not "
                f"{self.init!r}"
            )
        init, largest = self.init, 0.0
        if isinstance(init, Uniform):
            largest = max(abs(init.low), abs(init.high))
        elif isinstance(init, Normal):
            largest = abs(init.mean) + SIGMAS_MAX * init.std
        elif isinstance(init, Constant):
            largest = abs(init.value)
        if largest >= BEYOND[dtype]:
            raise ValueError(f"{dtype} rows cannot hold what {init!r} gives: change dtype or init")

    def of_shard(self, shards: int) -> TableOptions:
        """The options of one of so many shards, which has its part of `LRU.rows`."""
        lru = self.lru
        if lru is None or lru.rows is None:
            return self
        part = LRU(-(-lru.rows // shards))
        return replace(self, evict=part if self.ttl is None else self.ttl | part)

    def to_spec(self) -> RuleSpec:
        """All options as data, for a message: "init" is "Normal", "init.std" is 0.01, and so on."""
        options: dict[str, float | str | bool] = {"max_bytes": float(self.max_bytes)}
        for slot in _SLOTS:
            option = getattr(self, slot)
            if option is not None:
                options[slot] = type(option).__name__
                for each in fields(option):
                    value = getattr(option, each.name)
                    if value is not None:
                        options[f"{slot}.{each.name}"] = float(value)
        return RuleSpec(type(self).__name__, options)

    @classmethod
    def from_spec(cls, spec: RuleSpec) -> TableOptions:
        """What `to_spec` described.

        Args:
            spec: may come from a peer.
        Raises:
            ValueError, TypeError: an option is unknown, or is not what it has to be.
        """
        options = dict(spec.options)
        max_bytes: Any = options.pop("max_bytes", 0)
        parts: dict[str, Any] = {}
        for slot in _SLOTS:
            name = options.pop(slot, None)
            if name is not None:
                inner = [path for path in options if path.startswith(f"{slot}.")]
                parts[slot] = _construct(
                    name, {path[len(slot) + 1 :]: options.pop(path) for path in inner}
                )
        if options or "init" not in parts:
            raise ValueError(
                f"a table has init, which is needed, and {', '.join(_SLOTS[1:])}, max_bytes; not "
                f"{spec.options}"
            )
        return cls(
            parts["init"], parts.get("admit"), _both(parts.get("ttl"), parts.get("lru")), max_bytes
        )


_SLOTS = ("init", "admit", "ttl", "lru")
"""Options in their order on the wire."""


def _construct(name: Any, options: dict[str, Any]) -> Any:
    kind = _KINDS.get(name)
    if kind is None:
        raise ValueError(f"{name!r} is no option of a table; known: {', '.join(_KINDS)}")
    try:
        return kind(**options)
    except TypeError as wrong:
        raise TypeError(f"{name} does not take {options}: {wrong}") from wrong


def _both(ttl: Any, lru: Any) -> Any:
    if ttl is None or lru is None:
        return ttl if lru is None else lru
    return Evict(ttl, lru)


def _if(value: Any, kind: type[Any]) -> Any:
    return value if isinstance(value, kind) else None
