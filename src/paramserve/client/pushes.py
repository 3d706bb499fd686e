"""One block's gradient as a step takes it, and what is refused of it before anything is sent."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy.typing as npt

from paramserve.config import RuleSpec
from paramserve.core.partition import Block
from paramserve.errors import ParamServeError
from paramserve.rules.base import Hyper
from paramserve.rules.registry import BUILT_IN
from paramserve.rules.registry import build as build_rule
from paramserve.rules.rows import check_rows, row_layout

Array = npt.NDArray[Any]


class BlockPush(NamedTuple):
    """One block's gradient for `Client.step`.

    `gradient` is what `gradient_slot` gave; `active` lists the pieces that have a gradient (None:
    all); `hyper` are the rule's hyper-parameters for this push (None: as defined).
    """

    block: Block
    gradient: Array
    active: tuple[int, ...] | None = None
    hyper: Hyper | None = None


def check_rule(block: Block) -> RuleSpec:
    """The block's rule. Raises `ParamServeError` if it has none: it cannot be pushed to."""
    if block.rule is None:
        raise ParamServeError(
            f"{block.pieces[0].name!r} has no rule: it cannot be pushed to",
            fix="define it with a rule, or use assign",
        )
    return block.rule


def check_push(push: BlockPush) -> None:
    """Refuse what the shards would refuse, before anything is sent to any of them.

    Raises:
        ParamServeError, ValueError: the block has no rule, a hyper-parameter is out of range, or
            the rule's state does not suffice for them. Of a rule that is not built in, which need
            not be known here, only the first is checked.
    """
    block, hyper = push.block, push.hyper
    described = check_rule(block)
    if hyper is not None and described.name in BUILT_IN:  # the shards check what others are
        rule = build_rule(described)
        rule.check(hyper)
        needed = rule.states(hyper)
        if len(needed) > len(rule.states(rule.hyper())):
            raise ParamServeError(
                f"{rule.name} with {hyper} needs the state {', '.join(needed)}, but the block of "
                f"{block.pieces[0].name!r} was defined without it",
                fix="define the parameters with these hyper-parameters (momentum > 0) at the start",
            )


def check_row_hyper(block: Block, hyper: Hyper) -> None:
    """Refuse hyper-parameters that the shards would refuse for a table's rows, before anything is
    sent: a synchronous clock that only some count cannot be ended any more.

    Raises:
        ValueError: one is out of range, or needs more than the rows hold. Of a rule that is not
            built in, which need not be known here, nothing is checked.
    """
    described = check_rule(block)
    if described.name in BUILT_IN:
        assert block.table is not None
        rule = build_rule(described)
        rule.check(hyper)
        check_rows(rule, row_layout(rule, block.table.dim, block.table.dtype), hyper)
