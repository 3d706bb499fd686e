"""How a parameter group becomes a rule, anew at each step, and which ones are refused."""

from __future__ import annotations

from torch.optim import Optimizer

from paramserve.rules.base import Hyper, Rule
from paramserve.rules.torch_kinds import (
    SUPPORTED,
    Kind,
    ParamGroup,
    needs_itself,
    own_kind,
)


def check_optimizer(optimizer: object) -> Optimizer:
    """What was given as an optimizer. Raises `TypeError` for what is none."""
    if isinstance(optimizer, type):
        call = "(model.parameters())" if issubclass(optimizer, Optimizer) else "(...)"
        kind = optimizer.__name__
        raise TypeError(
            f"worker.optimizer takes a torch optimizer or a rule, got the class {kind}: make an "
            f"object of it, as in {kind}{call}"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"worker.optimizer takes a torch optimizer or a rule, got {type(optimizer).__name__}; "
            f"supported: {SUPPORTED}, and rules as ps.SGD(lr=0.1) or a ps.CustomRule of yours"
        )
    return optimizer


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
        self._itself = needs_itself(kind, group)
        self._kind = kind = own_kind(kind.torch) if self._itself else kind
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
        if needs_itself(self._kind, group) != self._itself:
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
                    "defined without. Give the optimizer these options (a momentum above 0) before "
                    "worker.optimizer"
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
