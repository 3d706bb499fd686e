"""Every `torch.optim` class as a rule: it runs as itself on the servers, with torch.

The only module outside `paramserve.pytorch` that imports torch: import this lazily. What an
optimizer's options are, which state it keeps and of what shape is found by running it once.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.optim import Optimizer

from paramserve.errors import did_you_mean
from paramserve.rules.base import Array, Hyper, PushInfo, Run
from paramserve.rules.registry import arguments

ELEMENTWISE = frozenset(
    [
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
        *("RMSprop", "Rprop", "SGD"),
    ]
)
"""Classes that update each element by itself, so that a tensor may be cut. All others are given
whole tensors."""
REFUSED: Mapping[str, str] = {
    "LBFGS": "it calls the closure several times within one step, and the servers have no model; "
    "use it in one process, or another class here",
    "SparseAdam": "it takes sparse gradients, and the servers take dense ones; use Adam, with "
    "sparse=False in the embedding",
}
COMPUTED_BY = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how torch computes an update, and not which one."""
STEP = "step"
"""Torch's word for the count of a tensor's updates, which the block keeps for all its state."""
PROBED_KEPT = 4096
"""Shapes whose state is remembered."""
SHAPES = ((3,), (2, 3), (2, 3, 2), (), (2, 3, 2, 2))
"""A class is tried with these to find what it may keep; one that refuses some is not asked again
about them (Muon takes matrices only)."""


class StateTensor(NamedTuple):
    """One state of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None: the tensor's."""


@cache
def class_of(kind: str) -> type[Optimizer]:
    """The class of this name in `torch.optim`.

    Raises:
        TypeError: there is none, or the servers cannot run it.
    """
    kind_class = None if kind.startswith("_") else getattr(torch.optim, kind, None)
    if kind in REFUSED:
        raise TypeError(f"the servers cannot run torch.optim.{kind}: {REFUSED[kind]}")
    if (
        not isinstance(kind_class, type)
        or not issubclass(kind_class, Optimizer)
        or kind_class is Optimizer
    ):
        raise TypeError(f"torch.optim of torch {torch.__version__} has no optimizer {kind!r}")
    return kind_class


@cache
def defaults_of(kind: str) -> Mapping[str, Any]:
    """What a class is set to without arguments, but for how it computes."""
    kind_class: Any = class_of(kind)
    optimizer = kind_class([torch.ones(2, 2, device="cpu")])
    return {name: value for name, value in optimizer.defaults.items() if name not in COMPUTED_BY}


@cache
def _arguments_of(kind: str) -> frozenset[str]:
    return frozenset(inspect.signature(class_of(kind)).parameters)


def leaves(kind: str, group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The options of a parameter group one by one, elements of tuples as "betas.0", "betas.1"."""
    for name, default in defaults_of(kind).items():
        value = group.get(name, default)
        if isinstance(value, tuple | list):
            for i, each in enumerate(value):
                yield f"{name}.{i}", each
        else:
            yield name, value


def described(kind: str, group: Mapping[str, Any]) -> TorchRule:
    """The rule that does what a class does with the options of a parameter group.

    Raises:
        TypeError: the servers cannot run the class.
        ValueError: an option is out of its range.
    """
    numbers: dict[str, float] = {}
    fixed = []
    for name, value in leaves(kind, group):
        if value is None or isinstance(value, str):
            fixed.append(f"{name}={json.dumps(value)}")
        else:
            numbers[f"{name}:{_word(kind, name)}"] = float(value)
    return TorchRule(kind, tuple(numbers), tuple(numbers.values()), tuple(fixed))


@cache
def _word(kind: str, option: str) -> str:
    """The type of a number among a class's options. A default of 0 may stand for a float."""
    name = option.partition(".")[0]
    if isinstance(defaults_of(kind)[name], bool):
        return "bool"
    parameter = inspect.signature(class_of(kind)).parameters.get(name)
    whole = parameter is not None and parameter.annotation in (int, "int")
    return "int" if whole else "float"


@dataclass(frozen=True)
class TorchRule:
    """value, state = one step of a `torch.optim` class

    Numbers among its options travel with each push; texts and None are fixed when a parameter is
    defined. `TorchRule.of` makes one.

    Example:
        >>> client.define("w", np.zeros(3), rule=TorchRule.of("Adagrad", lr=0.1))

    Args:
        kind: name of the class in `torch.optim`.
        options: "<name>:<type>" of each number, in order.
        numbers: their values.
        fixed: "<name>=<JSON>" of the other options.
    Raises:
        TypeError: the servers cannot run the class.
        ValueError: an option is out of its range.
    """

    kind: str
    options: tuple[str, ...]
    numbers: tuple[float, ...]
    fixed: tuple[str, ...] = ()

    name: ClassVar[str] = "torch"

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", tuple(float(each) for each in self.numbers))
        self._check(self.numbers)

    @classmethod
    def of(cls, kind: str, **options: Any) -> TorchRule:
        """The rule of a class with these options, and torch's defaults for the others."""
        unknown = set(options) - set(defaults_of(kind))
        if unknown:
            names = sorted(unknown)
            suggestion = did_you_mean(names[0], [*defaults_of(kind)])
            raise TypeError(f"torch.optim.{kind} has no option {', '.join(names)}{suggestion}")
        return described(kind, options)

    @property
    def hyper_names(self) -> tuple[str, ...]:
        return tuple(option.partition(":")[0] for option in self.options)

    @property
    def state_names(self) -> tuple[str, ...]:
        return self.states(self.numbers)

    @property
    def whole_tensors(self) -> bool:
        """Whether a tensor must not be cut."""
        return self.kind not in ELEMENTWISE

    @property
    def separate_tensors(self) -> bool:
        """Whether each tensor has numbers of its own besides its elements."""
        states = self.state_of((3,)) if not self.whole_tensors else {}
        return any(each.shape == () and name != STEP for name, each in states.items())

    def hyper(self) -> Hyper:
        return self.numbers

    def check(self, hyper: Hyper) -> None:
        """Check as `Rule.check`; also refuse to change which state the class keeps."""
        self._check(hyper)
        new = set(self._names(hyper)) - set(self._names(self.numbers))
        if new:
            numbers = dict(zip(self.hyper_names, hyper, strict=True))
            raise ValueError(
                f"torch.optim.{self.kind} with {numbers} needs the state {', '.join(sorted(new))}, "
                "which its parameters were defined without. Define them with these options"
            )

    def _check(self, hyper: Hyper) -> None:
        if len(hyper) != len(self.options) or not all(np.isfinite(hyper)):
            raise ValueError(
                f"torch.optim.{self.kind} takes the finite numbers "
                f"{', '.join(self.hyper_names)}, not {hyper}"
            )
        self.optimizer([torch.ones(2, 2, device="cpu")], hyper)

    def states(self, hyper: Hyper) -> tuple[str, ...]:
        return self._names(hyper)

    def _names(self, hyper: Hyper) -> tuple[str, ...]:
        names: dict[str, None] = {}
        for shape in SHAPES if self.whole_tensors else SHAPES[:1]:
            states = _cached_state(self, hyper, shape)
            names |= dict.fromkeys(states if states is not None else ())
        return tuple(name for name in names if name != STEP)

    def state_of(self, shape: tuple[int, ...]) -> Mapping[str, StateTensor]:
        """The state of a tensor of this shape by name, in torch's order, the step's count too.

        Raises:
            ValueError: the class does not take tensors of this shape.
        """
        probed = tuple(shape) if self.whole_tensors else SHAPES[0]
        states = _cached_state(self, self.numbers, probed)
        if states is None:
            raise ValueError(f"torch.optim.{self.kind} takes no tensor of shape {list(shape)}")
        if self.whole_tensors:
            return states
        return {
            name: each._replace(shape=tuple(shape)) if each.shape == probed else each
            for name, each in states.items()
        }

    def first(self, tensor: torch.Tensor) -> dict[str, Any]:
        """The state of a tensor that has had no update: none but for Adagrad."""
        optimizer = self.optimizer([tensor.detach()], self.numbers)
        return next((dict(entry) for entry in optimizer.state.values()), {})

    def init_state(self, size: int, dtype: np.dtype[Any]) -> tuple[Array, ...]:
        return tuple(np.zeros(size, dtype) for _ in self.state_names)

    def prepare(self, dtype: np.dtype[Any]) -> None:
        """Run the class once: torch imports half of itself at the first step."""
        self._names(self.numbers)

    def options_with(self, hyper: Hyper) -> dict[str, Any]:
        """The options with these numbers, as the class takes them."""
        values: dict[str, Any] = {}
        for option, number in zip(self.options, hyper, strict=True):
            name, _, form = option.partition(":")
            values[name] = _number(form, number)
        for each in self.fixed:
            name, _, text = each.partition("=")
            values[name] = json.loads(text)
        return arguments(values)

    def optimizer(self, tensors: Sequence[torch.Tensor], hyper: Hyper) -> Optimizer:
        """The class itself over these tensors."""
        options = self.options_with(hyper)
        if not set(options) <= set(defaults_of(self.kind)):
            raise ValueError(f"torch.optim.{self.kind} does not take {', '.join(options)}")
        allowed = _arguments_of(self.kind)
        accepted = {name: value for name, value in options.items() if name in allowed}
        if "foreach" in allowed:
            accepted["foreach"] = False
        kind: Any = class_of(self.kind)
        optimizer: Optimizer = kind(tensors, **accepted)
        for group in optimizer.param_groups:
            group.update(options)  # AdamW's decoupled_weight_decay is no argument
        return optimizer

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
        """Apply a gradient with torch's optimizer; see `Rule.apply`.

        Raises:
            ValueError: a state array is missing. Nothing was applied.
        """
        names = self.state_names
        if len(state) != len(names):
            raise ValueError(
                f"torch.optim.{self.kind} needs the state {', '.join(names)}, "
                f"{len(state)} arrays are there"
            )
        scale = value.dtype.type(push.scale)
        by_name = dict(zip(names, state, strict=True))
        tensors = []
        runs = [run for run in runs if run.stop > run.start]
        for start, stop, _, shape in runs:
            shape = shape if self.whole_tensors and shape is not None else (stop - start,)
            tensor = torch.from_numpy(value[start:stop]).view(shape)
            tensor.grad = torch.from_numpy(gradient[start:stop] * scale).view(shape)
            tensors.append(tensor)
        if not tensors:
            return
        optimizer = self.optimizer(tensors, hyper)
        views = [
            self._put(optimizer, tensor, run, by_name)
            for tensor, run in zip(tensors, runs, strict=True)
        ]
        optimizer.step()
        for tensor, run, places in zip(tensors, runs, views, strict=True):
            for name, place in places.items():
                _take(optimizer.state[tensor].get(name), place)
            if out is not None:
                out[run.start : run.stop] = value[run.start : run.stop]

    def _put(
        self, optimizer: Optimizer, tensor: torch.Tensor, run: Run, arrays: Mapping[str, Array]
    ) -> dict[str, torch.Tensor]:
        """Give a tensor the state that it had; the places where each state belongs, by name."""
        places: dict[str, torch.Tensor] = {}
        entry: dict[str, Any] = {}
        for name, each in self.state_of(tuple(tensor.shape)).items():
            if name == STEP:
                entry[name] = torch.tensor(float(run.count), dtype=each.dtype, device="cpu")
                continue
            place = torch.from_numpy(arrays[name][run.start : run.stop])
            if each.shape != ():
                place = place[: prod(each.shape)].view(each.shape)
                entry[name] = place
            else:
                # Every element has it, so that each part of a tensor that is cut knows it.
                dtype = each.dtype if each.dtype is not None else tensor.dtype
                entry[name] = place[0].to(dtype).clone()
            places[name] = place
        if run.count:
            optimizer.state[tensor] = entry
        return places


def _take(new: Any, place: torch.Tensor) -> None:
    """Copy a state to its place, unless the step has changed it there."""
    if isinstance(new, torch.Tensor) and new.shape == place.shape:
        if new.data_ptr() != place.data_ptr():
            place.copy_(new)
    elif new is not None:
        place.fill_(float(new))


def _number(word: str, value: float) -> float | int | bool:
    return bool(value) if word == "bool" else int(value) if word == "int" else value


_states: dict[tuple[Any, ...], Mapping[str, StateTensor] | None] = {}
"""What classes keep, by class, zeros among its numbers, fixed options and shape."""


def _cached_state(
    rule: TorchRule, hyper: Hyper, shape: tuple[int, ...]
) -> Mapping[str, StateTensor] | None:
    """What a class keeps for a tensor of this shape; None: it takes no such tensor."""
    zeros = tuple(number == 0.0 for number in hyper)
    key = (rule.kind, rule.options, zeros, rule.fixed, shape)
    if key not in _states:
        if len(_states) >= PROBED_KEPT:
            _states.clear()
        _states[key] = _probe(rule, hyper, shape)
    return _states[key]


def _probe(
    rule: TorchRule, hyper: Hyper, shape: tuple[int, ...]
) -> Mapping[str, StateTensor] | None:
    # In float64, in which torch keeps no number that does not follow the tensor's dtype.
    tensor = torch.ones(shape, dtype=torch.float64, device="cpu")
    tensor.grad = torch.full_like(tensor, 0.5)
    try:
        optimizer = rule.optimizer([tensor], hyper)
        with torch.device("cpu"):  # where torch would make its numbers on the default device
            optimizer.step()
    except (ValueError, RuntimeError):
        return None
    states: dict[str, StateTensor] = {}
    for name, value in optimizer.state[tensor].items():
        if isinstance(value, torch.Tensor):
            if value.numel() > max(1, tensor.numel()):
                raise TypeError(
                    f"torch.optim.{rule.kind} keeps {value.numel()} numbers as {name} of a tensor "
                    f"of {tensor.numel()}: the servers keep at most as many as the tensor has"
                )
            follows = name != STEP and value.dtype == tensor.dtype
            states[name] = StateTensor(tuple(value.shape), None if follows else value.dtype)
        elif isinstance(value, int | float):
            states[name] = StateTensor((), None)
    return states
