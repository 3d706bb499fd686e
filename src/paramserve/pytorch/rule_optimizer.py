"""A rule in the place of a torch optimizer, as `worker.optimizer(model, rule)` takes it.

The rule's hyper-parameters are the options of its parameter groups, so that schedulers and loops
change them as those of torch's classes; the state is the rule's arrays, under its names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from paramserve.rules.base import NO_ROWS, Rule
from paramserve.rules.built_in import BuiltIn
from paramserve.rules.registry import spec
from paramserve.rules.torch_kinds import Kind, Options, ParamGroup


class RuleOptimizer(Optimizer):
    """Parameters with a rule, which has no step of its own: the servers apply it.

    Attributes:
        rule: with the hyper-parameters that new parameter groups begin with.

    Raises:
        TypeError, ValueError: the rule cannot be one for parameters of a model.
    """

    def __init__(self, params: Iterable[Tensor], rule: Rule) -> None:
        spec(rule)
        if getattr(rule, "whole_rows", False):
            raise ValueError(NO_ROWS.format(rule.name))
        self.rule = rule
        super().__init__(params, {name: getattr(rule, name) for name in _options(rule)})

    def kind(self) -> Kind:
        """How a parameter group becomes the rule with its options."""
        names = _options(self.rule)

        def read(group: ParamGroup) -> Options:
            # A list: a generator is a Python call for each element.
            values = [group[name] for name in names]
            return tuple([v.item() if isinstance(v, Tensor) else v for v in values])

        def build(options: Options) -> Rule:
            plain: Any = self.rule
            changed: Rule = replace(plain, **dict(zip(names, options, strict=True)))
            changed.check(changed.hyper())
            return changed

        return Kind(read, build)

    def step(self, closure: Callable[[], Any] | None = None) -> NoReturn:
        """Refused: where the servers step, the class is a subclass of this one."""
        raise RuntimeError(
            f"{self.rule.name} is a rule that runs on the servers: it steps what "
            "worker.optimizer(model, rule) returned"
        )


def _options(rule: Rule) -> tuple[str, ...]:
    """The fields that say a rule's hyper-parameters: of a built-in one all but where its state
    starts, which is settled when parameters are defined."""
    described: Any = rule
    names = [field.name for field in fields(described)]
    if isinstance(rule, BuiltIn):
        return tuple(name for name in names if name != rule.state_start)
    return tuple(name for name in names if name in rule.hyper_names)
