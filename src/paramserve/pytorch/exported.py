"""An optimizer's state dict, as torch gives it, from what a checkpoint has of its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from paramserve.errors import CheckpointError, UnknownRule
from paramserve.messages import BlockSpec
from paramserve.pytorch import state as torch_state
from paramserve.pytorch.block import Layout
from paramserve.pytorch.schedules import Note
from paramserve.rules.registry import build
from paramserve.rules.torch_kinds import ParamGroup, torch_of
from paramserve.rules.torch_rule import class_of

DTYPES = {"float32": torch.float32, "float64": torch.float64}
"""Torch dtypes that the rules update, by name."""


class SavedBlock(NamedTuple):
    """Parameters that were defined together: those of one parameter group."""

    spec: BlockSpec
    fetch: torch_state.Fetch


def optimizer_state(group: str, blocks: Sequence[SavedBlock], note: bytes) -> dict[str, Any]:
    """What `state_dict()` of the optimizer gave when the checkpoint was taken.

    Its parameters are numbered in the order in which they were given to it, without frozen ones and
    rows of tables.

    Args:
        group: its name, for errors.
        blocks: in the order in which they were defined.
        note: the last one that told its hyper-parameters; empty: they are as at first.
    Raises:
        CheckpointError: the servers did not make its steps, or by a rule that torch has not; or its
            parameter groups are not known.
    """
    numbers = msgspec.msgpack.decode(note, type=Note).numbers if note else ()
    if len({(each.spec.dtype, each.spec.half) for each in blocks}) > 1:
        raise _unknown(group, "it has parameters of two dtypes, and their order is not known")
    if numbers and len(numbers) != len(blocks):
        why = f"it has {len(numbers)} parameter groups, and {len(blocks)} of them on the servers"
        raise _unknown(group, why)
    kinds, groups, state = set[str](), list[ParamGroup](), torch_state.State()
    for index, (spec, fetch) in enumerate(blocks):
        kind, options, layout, part = _of_block(group, index, spec, fetch)
        changed = numbers[index] if numbers else {}
        lists = {name: tuple(each) for name, each in changed.items() if isinstance(each, list)}
        kinds.add(kind)
        groups.append({**options, **changed, **lists, "params": list(layout.params)})
        state |= part
    kind_class: Any = class_of(kinds.pop())
    optimizer: torch.optim.Optimizer = kind_class(groups)
    optimizer.state.update(state)
    return optimizer.state_dict()


def _of_block(
    group: str, index: int, spec: BlockSpec, fetch: torch_state.Fetch
) -> tuple[str, ParamGroup, Layout, torch_state.State]:
    try:
        if spec.rule is None:
            raise TypeError("nothing updates it")
        rule = build(spec.rule)
        kind, options = torch_of(rule)
    except (TypeError, UnknownRule) as error:
        why = error.failed if isinstance(error, UnknownRule) else str(error)
        raise _unknown(group, why) from None
    dtype = DTYPES[spec.dtype]
    params = tuple(torch.empty(each.shape, dtype=dtype, device="cpu") for each in spec.pieces)
    names = tuple(piece.name for piece in spec.pieces)
    layout = Layout(index, DTYPES[spec.dtype], names, params)
    with torch.no_grad():
        return kind, options, layout, torch_state.fetch(fetch, layout, rule)


def _unknown(group: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"the optimizer {group!r} cannot be exported to torch: {why}",
        fix="export the values alone, and save optimizer.state_dict() on rank 0 in the training "
        "function",
    )
