"""Which torch optimizers run on the servers, and how a parameter group becomes a rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from paramserve.rules.adam import Adam
from paramserve.rules.base import Hyper, Rule
from paramserve.rules.sgd import SGD
from paramserve.rules.torch_rule import REFUSED, class_of, defaults_of, described, leaves

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


# Both read the options in the order of the rule's fields.
_SGD = Kind(_read_sgd, lambda options: SGD(*options))
_ADAM = Kind(_read_adam, lambda options: Adam(*options))
_KERNELS: dict[type[Optimizer], Kind] = {
    torch.optim.SGD: _SGD,
    torch.optim.Adam: _ADAM._replace(torch="Adam"),
    torch.optim.AdamW: _ADAM._replace(torch="AdamW"),
}
SUPPORTED = f"every class of torch.optim but {' and '.join(REFUSED)}"


def _own_kind(name: str) -> Kind:
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
        found: Rule = rule
        return found

    return Kind(read, build, name)


def _needs_itself(group: ParamGroup) -> bool:
    """Whether the kernel of a class does not have what its options ask for."""
    return bool(group.get("amsgrad"))


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise `TypeError` for what is no torch optimizer."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"worker.optimizer takes a torch optimizer, got {type(optimizer).__name__}; "
            f"supported: {SUPPORTED}"
        )


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
        return _KERNELS[base] if base in _KERNELS else _own_kind(base.__name__)
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    raise TypeError(
        f"the servers cannot run the step of {name}; supported: {SUPPORTED} and subclasses that "
        "do not override step(). Use one of these, push gradients with worker.client, or let the "
        "workers step by themselves with ps.LocalSteps"
    )


def check_options(group: ParamGroup) -> None:
    """Refuse the options of a parameter group that the rules do not have.

    `foreach`, `fused` and `capturable` say how torch would compute the update: they are ignored.

    Raises:
        TypeError: `differentiable` is set.
    """
    if group.get("differentiable"):
        raise TypeError(
            "differentiable=True is not supported on the servers: the update runs outside "
            "autograd; use a plain torch optimizer"
        )


class HyperReader:
    """Reads one parameter group's options anew at each step, and builds a rule when they changed.

    Which state a block has is settled when it is defined, from the options at that time.
    """

    def __init__(self, kind: Kind, group: ParamGroup) -> None:
        self._itself = _needs_itself(group)
        self._kind = kind = _own_kind(kind.torch) if self._itself else kind
        self._options = kind.read(group)
        self.defined = kind.build(self._options)
        """The rule that the block is defined with."""
        self._rule = self.defined
        self._hyper = self._rule.hyper()
        self._states = self._rule.states(self._hyper)

    def rule(self, group: ParamGroup | None) -> Rule:
        """The group's rule with its options as they are now.

        Args:
            group: None: the optimizer no longer has it, and its last options count.
        Raises:
            ValueError: an option is out of its range, or needs state that the block does not
                have. Nothing was sent.
            TypeError: `amsgrad` is not as it was, or as `check_options`. Nothing was sent.
        """
        if group is None:
            return self._rule
        check_options(group)
        if _needs_itself(group) != self._itself:
            raise TypeError(
                f"amsgrad is {group['amsgrad']} now, and the parameters were defined with "
                f"{self._itself}: set it before worker.optimizer"
            )
        options = self._kind.read(group)
        if options != self._options:
            rule = self._kind.build(options)
            hyper = rule.hyper()
            missing = [name for name in rule.states(hyper) if name not in self._states]
            if missing:
                raise ValueError(
                    f"{rule} needs the state {', '.join(missing)}, which its parameters were "
                    "defined without. Give the torch optimizer these options (a momentum above 0) "
                    "before worker.optimizer"
                )
            self._options, self._rule, self._hyper = options, rule, hyper
        return self._rule

    def rule_of_state(self, group: ParamGroup | None) -> Rule:
        """The group's rule as it is now, or `defined` if that has more state; raises as `rule`."""
        rule = self.rule(group)
        return rule if rule.states(rule.hyper()) == self._states else self.defined

    def read(self, group: ParamGroup | None) -> Hyper:
        """The group's hyper-parameters as they are now; raises as `rule`."""
        self.rule(group)
        return self._hyper
