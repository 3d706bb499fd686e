"""Which rule stands for a torch optimizer: a compiled one, or the class itself on the servers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from paramserve.rules.adadelta import Adadelta
from paramserve.rules.adagrad import Adagrad
from paramserve.rules.adam import Adam
from paramserve.rules.adamax import Adamax
from paramserve.rules.base import Rule
from paramserve.rules.built_in import BuiltIn
from paramserve.rules.nadam import NAdam
from paramserve.rules.rmsprop import RMSprop
from paramserve.rules.sgd import SGD
from paramserve.rules.torch_rule import (
    REFUSED,
    TorchRule,
    class_of,
    defaults_of,
    described,
    leaves,
)

Options = tuple[Any, ...]
ParamGroup = dict[str, Any]


class Kind(NamedTuple):
    """A torch optimizer that a rule stands for."""

    read: Callable[[ParamGroup], Options]
    """The options of a parameter group as plain numbers: called at every step, so it is cheap."""
    build: Callable[[Options], Rule]
    """The rule with these options."""
    torch: str = ""
    """Name of the class in `torch.optim`, which is its own rule where no other can stand for it."""


def _read_sgd(group: ParamGroup) -> Options:
    return (
        float(group["lr"]),
        float(group["momentum"]),
        float(group["dampening"]),
        float(group["weight_decay"]),
        bool(group["nesterov"]),
        bool(group["maximize"]),
    )


def _read_adam(group: ParamGroup) -> Options:
    beta1, beta2 = group["betas"]
    return (
        float(group["lr"]),
        (float(beta1), float(beta2)),
        float(group["eps"]),
        float(group["weight_decay"]),
        bool(group["decoupled_weight_decay"]),
        bool(group["maximize"]),
    )


def _numbers(pair: Iterable[Any]) -> tuple[float, ...]:
    return tuple(map(float, pair))


def _kind(rule: type[BuiltIn], **torchs: str) -> Kind:
    """A rule whose fields are the options of a class.

    Args:
        torchs: torch's name of a field that the rule calls otherwise.
    """
    rule_class: Any = rule
    forms: dict[str, Callable[[Any], Any]] = {"tuple[float, float]": _numbers, "bool": bool}
    options = [
        (torchs.get(field.name, field.name), forms.get(str(field.type), float))
        for field in fields(rule_class)
    ]

    def read(group: ParamGroup) -> Options:
        return tuple([form(group[name]) for name, form in options])

    return Kind(read, lambda numbers: rule_class(*numbers))


# All read the options in the order of the rule's fields.
_SGD = Kind(_read_sgd, lambda options: SGD(*options))
_ADAM = Kind(_read_adam, lambda options: Adam(*options))
_ADAGRAD = _kind(Adagrad)
"""Kind for rows and pushes by name: torch shows its state before the first step already."""
DECOUPLED = "decoupled_weight_decay"
_KERNELS: dict[type[Optimizer], Kind] = {
    torch.optim.SGD: _SGD,
    torch.optim.Adam: _ADAM._replace(torch="Adam"),
    torch.optim.AdamW: _ADAM._replace(torch="AdamW"),
    torch.optim.RMSprop: _kind(RMSprop),
    torch.optim.Adadelta: _kind(Adadelta),
    torch.optim.Adamax: _kind(Adamax),
    torch.optim.NAdam: _kind(NAdam, decoupled=DECOUPLED),
}
_TORCH_HAS = (SGD, Adam, Adagrad, RMSprop, Adadelta, Adamax, NAdam)
SUPPORTED = f"every class of torch.optim but {' and '.join(REFUSED)}"


def own_kind(name: str) -> Kind:
    """A class that runs on the servers as itself."""
    options = tuple(defaults_of(name))

    def read(group: ParamGroup) -> Options:
        return tuple(
            (leaf, float(value) if isinstance(value, torch.Tensor) else value)
            for leaf, value in leaves(name, group)
        )

    def build(values: Options) -> Rule:
        group: ParamGroup = {}
        for leaf, value in values:
            option, dot, _ = leaf.partition(".")
            group[option] = (*group.get(option, ()), value) if dot else value
        assert set(group) == set(options), "read gives them all"
        rule: Any = described(name, group)
        rule_built: Rule = rule
        return rule_built

    return Kind(read, build, name)


def needs_itself(kind: Kind, group: ParamGroup) -> bool:
    """Whether the kernel of a class does not have what its options ask for."""
    return bool(kind.torch and group.get("amsgrad"))


def kind_of(optimizer: Optimizer) -> Kind:
    """The rule's kind for an optimizer of a supported class, or of a subclass with the same step.

    Raises:
        TypeError: another class, or a subclass with a `step` of its own: the servers would not
            do what that step does.
    """
    own = inspect.unwrap(type(optimizer).step)
    for base in type(optimizer).__mro__:
        if getattr(torch.optim, base.__name__, None) is not base or base is Optimizer:
            continue
        class_of(base.__name__)
        if own is not inspect.unwrap(base.step):
            break
        return _KERNELS[base] if base in _KERNELS else own_kind(base.__name__)
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    raise TypeError(
        f"the servers cannot run the step of {name}; supported: {SUPPORTED} and subclasses that "
        "do not override step(). Use one of these, derive a rule from ps.CustomRule, or let the "
        "workers step by themselves with ps.LocalSteps"
    )


def torch_of(rule: Rule) -> tuple[str, ParamGroup]:
    """The name of the class in `torch.optim` that a rule stands for, and its options.

    Raises:
        TypeError: it stands for none.
    """
    if isinstance(rule, TorchRule):
        return rule.kind, rule.options_with(rule.hyper())
    if type(rule) in _TORCH_HAS:
        rule_object: Any = rule
        options = {field.name: getattr(rule, field.name) for field in fields(rule_object)}
        if "decoupled" in options:
            options[DECOUPLED] = options.pop("decoupled")
        if isinstance(rule, Adam):
            return "AdamW" if rule.decoupled else "Adam", options
        return rule.name, options
    raise TypeError(f"{rule.name} is a rule that torch.optim does not have")


def rule_of(argument: Callable[..., Any]) -> Rule:
    """The rule that does what a torch optimizer does, on rows or on parameters.

    Args:
        argument: a class of torch.optim, or what makes an optimizer from parameters, as
            `functools.partial(torch.optim.Adam, lr=0.01)`.
    Raises:
        TypeError: it makes no optimizer, or one that the servers cannot run.
        ValueError: an option is out of its range.
    """
    optimizer: object = None
    kind = argument.func if isinstance(argument, partial) else argument
    if not isinstance(kind, type) or issubclass(kind, Optimizer):
        optimizer = argument([torch.ones(2, 2, device="cpu")])
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "rule= takes a rule, as in rule=ps.Adagrad(lr=0.05), a class of torch.optim, or "
            f"functools.partial(torch.optim.Adam, lr=0.01), not {argument!r}"
        )
    kind_found, group = kind_of(optimizer), optimizer.param_groups[0]
    if type(optimizer) is torch.optim.Adagrad:
        kind_found = _ADAGRAD
    elif needs_itself(kind_found, group):
        kind_found = own_kind(kind_found.torch)
    return kind_found.build(kind_found.read(group))
