"""The base of rules that users write: one method, everything else follows from the fields."""

from __future__ import annotations

import dis
import inspect
from abc import ABC, abstractmethod
from collections.abc import MutableMapping, Sequence
from dataclasses import Field, fields, is_dataclass, replace
from functools import cache, lru_cache
from math import prod
from typing import Any, ClassVar

import numpy as np

from paramserve.rules.base import NO_ROWS, Array, Hyper, PushInfo, Run
from paramserve.rules.built_in import FINITE, FLAG, Allowed, check_hyper

INSTANCES_KEPT = 256
"""Copies of a rule with the hyper-parameters of a push: a schedule makes one for each step."""


class HyperNames:
    """Names of the fields that travel with each push: those of type float and bool, in order."""

    def __get__(self, instance: object, owner: type[Any]) -> tuple[str, ...]:
        return tuple(field.name for field in hyper_fields(owner))


class State(dict[str, Array]):
    """State arrays by name. Writing to a name writes into its array, so that `state["m"] += x` and
    `state["m"] = x` both do what they say."""

    def __setitem__(self, name: str, value: Any) -> None:
        array = self[name]
        if value is not array:
            array[...] = value


class CustomRule(ABC):
    """Your own update rule: a frozen dataclass with one method, `update`.

    Fields of type float and bool are hyper-parameters: they travel with each push. Fields of type
    str and tuples of numbers, bools or texts are fixed when a parameter is defined.

    Example:
        >>> @dataclass(frozen=True)
        ... class Clipped(ps.CustomRule):
        ...     lr: float = 0.1
        ...     def update(self, value, gradient, state, push):
        ...         value -= self.lr * np.clip(gradient, -1, 1)
        >>> ps.run(train, workers=2, rules=[Clipped])
        >>> worker.client.define("w", np.zeros(10), rule=Clipped(lr=0.5))

    Attributes:
        name: how servers know the rule; the class's name unless it says otherwise.
        state_names: of the arrays that the servers keep beside each value; they start at zero.
        whole_tensors: `update` sees each tensor whole and in its own shape, and no tensor is cut
            over two servers. Without, it sees runs [n] of elements, of one or several tensors or
            of a part of one: right for all that works on each element alone.
        whole_rows: for tables only. `update` sees rows [n, dim], and each state [n, width] with
            the widths of `row_states`. Without, a table's rows are runs of elements as well.
    """

    name: ClassVar[str] = "CustomRule"
    state_names: ClassVar[tuple[str, ...]] = ()
    whole_tensors: ClassVar[bool] = False
    whole_rows: ClassVar[bool] = False
    hyper_names: ClassVar[tuple[str, ...]] = HyperNames()  # type: ignore[assignment]  # computed

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    @abstractmethod
    def update(
        self, value: Array, gradient: Array, state: MutableMapping[str, Array], push: PushInfo
    ) -> None:
        """Change `value` and the arrays in `state` in place. To be overridden.

        What it raises refuses the push (`RuleFailed`), as do NaN or Inf made of finite numbers, and
        a resized array: whole on this server; in Async, and in Sync with `clip_norm`, another one
        may have applied its part ("Applied: unknown"). It must keep no reference to the arrays.

        Args:
            value: [n], or the tensor's shape with `whole_tensors`.
            gradient: as value, read-only.
            state: by name, arrays like value; `state["m"] = ...` writes into the array.
            push: worker (rank), clock, version, staleness and weight. In Sync the gradient is the
                reduced one of all workers, and worker is -1.
        """

    def init(self, name: str, size: int, dtype: np.dtype[Any]) -> Array:
        """The first values [size] of a state array. To be overridden where they are not zeros."""
        return np.zeros(size, dtype)

    # --- what the servers call; see `rules.base.Rule` ------------------------------------------

    def hyper(self) -> Hyper:
        """The float and bool fields, in order."""
        return tuple(float(getattr(self, name)) for name in self.hyper_names)

    def check(self, hyper: Hyper) -> None:
        """Refuse what is not finite, and what the class's own `__post_init__` refuses."""
        allowed: dict[str, Allowed] = {
            field.name: FLAG if _is_bool(field) else FINITE for field in hyper_fields(type(self))
        }
        check_hyper(self.name, allowed, hyper)
        with_hyper(self, hyper)

    def states(self, hyper: Hyper) -> tuple[str, ...]:
        """All of `state_names`, whatever the hyper-parameters."""
        return tuple(self.state_names)

    def init_state(self, size: int, dtype: np.dtype[Any]) -> tuple[Array, ...]:
        """One array for each state name."""
        if self.whole_rows:
            raise ValueError(NO_ROWS.format(self.name))
        return tuple(self._first(name, size, dtype) for name in self.state_names)

    def _first(self, name: str, size: int, dtype: np.dtype[Any]) -> Array:
        array = np.array(self.init(name, size, dtype), dtype)
        if array.shape != (size,):
            raise ValueError(
                f"init({name!r}, {size}) of {self.name} gave shape {list(array.shape)}, "
                f"it has to be [{size}]"
            )
        return array

    def prepare(self, dtype: np.dtype[Any]) -> None:  # noqa: B027 - a hook, rightly empty
        """Nothing is compiled."""

    def apply(
        self,
        value: Array,
        gradient: Array,
        state: tuple[Array, ...],
        hyper: Hyper,
        runs: Sequence[Run],
        push: PushInfo,
        out: Array | None = None,
    ) -> None:
        """Call `update` for each run.

        Raises:
            ValueError: a state array is missing, or `update` resized an array.
            TypeError: `update` returned something. Only in both cases, and where `update` itself
                raises, part of the runs may be updated: the shard calls this on copies.
        """
        if len(state) != len(self.state_names):
            raise ValueError(
                f"{self.name} needs the state {', '.join(self.state_names)}, "
                f"{len(state)} arrays are there"
            )
        rule = with_hyper(self, hyper)
        if self.whole_rows:
            raise ValueError(NO_ROWS.format(self.name))
        for run in runs:
            at = slice(run.start, run.stop)
            size = run.stop - run.start
            shape = run.shape if self.whole_tensors and run.shape is not None else (size,)
            assert prod(shape) == size, "the shard cuts between tensors"
            parts = tuple(each[at].reshape(shape) for each in state)
            rule._update(value[at].reshape(shape), gradient[at].reshape(shape), parts, push)
            if out is not None:
                out[at] = value[at]

    def row_states(self, dim: int) -> tuple[int, ...]:
        """Widths of the states of a row of `dim` values. To be overridden, with `whole_rows`, where
        they are not as wide as the row."""
        return (dim,) * len(self.state_names)

    def initial_row(self, dim: int) -> Array:
        """The states of a fresh row, one after the other."""
        kind = np.dtype(np.float32)
        states = [
            self._first(name, width, kind)
            for name, width in zip(self.state_names, self.row_states(dim), strict=True)
        ]
        return np.concatenate([np.zeros(0, kind), *states])

    def apply_whole_rows(
        self,
        values: Array,
        gradients: Array,
        states: tuple[Array, ...],
        hyper: Hyper,
        push: PushInfo,
    ) -> None:
        """Call `update` with rows, where `whole_rows` is set: values [n, dim], states [n, width].

        Raises:
            ValueError, TypeError: as `apply`.
        """
        with_hyper(self, hyper)._update(values, gradients[:], states, push)

    def _update(
        self, value: Array, gradient: Array, state: tuple[Array, ...], push: PushInfo
    ) -> None:
        """Call `update` once, and look at what it left. `gradient` is a view."""
        if push.scale != 1.0:
            gradient = np.asarray(gradient * value.dtype.type(push.scale))  # of () a scalar
        gradient.flags.writeable = False
        arrays = dict(zip(self.state_names, state, strict=True))
        shapes = {name: array.shape for name, array in arrays.items()}
        update: Any = self.update  # what users write need not be typed
        shape = value.shape
        before = value.copy() if _only_rebinds(type(self).update) else None
        returned = update(value, gradient, State(arrays), push._replace(scale=1.0))
        if returned is not None:
            raise TypeError(
                f"update() of {self.name} returned {type(returned).__name__}: it has to change "
                "value in place (value -= ..., value[...] = ...) and return None"
            )
        check_unchanged(self.name, "value", value, shape, gradient.dtype)
        for name, array in arrays.items():
            check_unchanged(self.name, name, array, shapes[name], gradient.dtype)
        # Without a rate, as at the start of a schedule, a correct one changes nothing either.
        if before is not None and bool(gradient.any()) and getattr(self, "lr", None) != 0.0:
            _check_changed(self.name, before, value)


def _check_changed(rule: str, before: Array, value: Array) -> None:
    if np.array_equal(before, value, equal_nan=True):
        raise ValueError(
            f"update() of {rule} has not changed the value: `value = ...` in it makes a new array, "
            "which is lost. Assign in place: value -= ... (or value[:] = ...)"
        )


@cache
def _only_rebinds(update: Any) -> bool:
    """Whether a function assigns to the name of its second argument, as `value = value - gradient`
    does, and writes nowhere into the array that it was called with, as `value -= ...` or
    `value[...] = ...`."""
    code = getattr(inspect.unwrap(update), "__code__", None)
    if code is None or code.co_argcount < 2:
        return False
    name, rebinds, updates, operator = code.co_varnames[1], False, True, ""
    stack: list[bool] = []
    after_jump: dict[int, list[bool]] = {}
    for each in dis.get_instructions(code):
        stack = after_jump.pop(each.offset, stack)
        depth = _WRITES.get(each.opname, 2 if _is_in_place(each) else 0)
        if depth and any(stack[-depth:][:1]):
            return False
        if name in _stored(each):
            rebinds = True
            # Else the new one may be a view, as of value[:] and value.reshape(-1).
            updates = updates and operator in ("", "[]")
        operator = each.argrepr if each.opname == "BINARY_OP" else ""
        if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
            after_jump[each.argval] = _stack_after(stack, each, name if updates else "", jump=True)
        stack = _stack_after(stack, each, name if updates else "", jump=False)
    return rebinds


_WRITES = {"STORE_ATTR": 1, "STORE_SUBSCR": 2, "STORE_SLICE": 3}
"""How deep in the stack lies what an instruction writes into."""


def _is_in_place(each: dis.Instruction) -> bool:
    return each.opname == "BINARY_OP" and each.argrepr.endswith("=")


def _names(each: dis.Instruction) -> tuple[str, ...]:
    """Names of local variables in an instruction; some of newer versions have two."""
    return each.argval if isinstance(each.argval, tuple) else (each.argval,)


def _stored(each: dis.Instruction) -> tuple[str, ...]:
    """The local variables that an instruction assigns to."""
    if not each.opname.startswith(("STORE_FAST", "STORE_DEREF")):
        return ()
    return _names(each)[:1] if each.opname == "STORE_FAST_LOAD_FAST" else _names(each)


def _stack_after(stack: list[bool], each: dis.Instruction, name: str, *, jump: bool) -> list[bool]:
    """The interpreter's stack after an instruction: of each entry, whether it is what a name was
    given, or was made of it."""
    if each.opname == "COPY":
        return stack + stack[-(each.arg or 0) :][:1]
    if each.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
        return stack + [loaded == name for loaded in _names(each)]
    effect = dis.stack_effect(each.opcode, each.arg, jump=jump)
    if effect > 0:
        return stack + [False] * effect
    if each.opname.startswith(("STORE_", "POP_", "DELETE_", "RETURN_")):  # leaves no result
        return stack[: len(stack) + effect]
    depth = max(len(stack) + effect - 1, 0)
    return [*stack[:depth], any(stack[depth:])]


def check_unchanged(
    rule: str, name: str, array: Array, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> None:
    """Require that an array which a rule was given still has its shape and dtype.

    Raises:
        ValueError: it has not.
    """
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(
            f"{rule} turned {name} of {dtype}{list(shape)} into {array.dtype}{list(array.shape)}: "
            "an update keeps shape and dtype"
        )


def _is_bool(field: Field[Any]) -> bool:
    return field.type in (bool, "bool")


def hyper_fields(kind: type[Any]) -> list[Field[Any]]:
    """The fields of type float and bool; none of a class that is no dataclass (yet)."""
    if not is_dataclass(kind):
        return []
    return [field for field in fields(kind) if field.type in (float, bool, "float", "bool")]


@lru_cache(maxsize=INSTANCES_KEPT)
def with_hyper(rule: CustomRule, hyper: Hyper) -> CustomRule:
    """The rule with the hyper-parameters of one push."""
    named = zip(hyper_fields(type(rule)), hyper, strict=True)
    values: dict[str, Any] = {f.name: bool(v) if _is_bool(f) else v for f, v in named}
    changed: Any = replace(rule, **values)  # type: ignore[type-var]  # checked at registration
    assert isinstance(changed, CustomRule)
    return changed
