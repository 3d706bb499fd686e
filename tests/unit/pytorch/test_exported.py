"""An optimizer's state dict from what a checkpoint has is the one that torch gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from tests.unit.pytorch.fakes import FakeBlock, FakeCluster
from tests.unit.pytorch.test_optimizer_state import KINDS, partly_train
from tests.unit.pytorch.test_optimizer_step import small_model

from paramserve.errors import CheckpointError
from paramserve.messages import BlockSpec
from paramserve.pytorch.exported import SavedBlock, optimizer_state
from paramserve.pytorch.optimizer import adopt
from paramserve.pytorch.schedules import Note
from paramserve.rules import Adam, Add
from paramserve.rules.registry import spec


def saved(block: FakeBlock, rule: Any = None) -> SavedBlock:
    described = BlockSpec(
        block.id,
        0,
        block.group_name,
        block.dtype.name,
        spec(rule if rule is not None else block.rule),
        block.pieces,
        (0, block.size),
    )
    return SavedBlock(described, lambda field: (block.state[field - 1].copy(), tuple(block.counts)))


def equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for index, entry in wanted["state"].items():
        assert list(found["state"][index]) == list(entry)
        for name, value in entry.items():
            torch.testing.assert_close(found["state"][index][name], value)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_exported_state_equals_torch(kind: Any, options: dict[str, Any]) -> None:
    model, expected, cluster = small_model(), small_model(), FakeCluster()
    plain = kind(expected.parameters(), lr=0.05, **options)
    optimizer = adopt(cluster.worker(), model, kind(model.parameters(), lr=0.05, **options))
    partly_train(model, optimizer)
    partly_train(expected, plain)
    found = optimizer_state("model", [saved(cluster.block("model"))], b"")
    equal(found, plain.state_dict())
    again = kind(expected.parameters(), lr=0.5)
    again.load_state_dict(found)
    partly_train(expected, again)


def groups_of(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    params = list(model.parameters())
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.01, "betas": (0.8, 0.99)}]
    return torch.optim.AdamW(groups, **options)


def test_hyper_parameters_are_those_that_a_step_told_last() -> None:
    model, expected, cluster = small_model(), small_model(), FakeCluster()
    plain, optimizer = groups_of(expected), adopt(cluster.worker(), model, groups_of(model))
    partly_train(model, optimizer)
    partly_train(expected, plain)
    plain.param_groups[0]["lr"], plain.param_groups[1]["betas"] = 0.5, (0.7, 0.9)
    for each in plain.param_groups:
        each["initial_lr"] = 0.001
    numbers = tuple(
        {name: group[name] for name in ("lr", "betas", "weight_decay", "initial_lr")}
        for group in plain.param_groups
    )
    blocks = [saved(each) for each in cluster.blocks if each.group_name == "model"]
    assert len(blocks) == 2
    equal(optimizer_state("model", blocks, Note((), numbers).packed()), plain.state_dict())
    with pytest.raises(CheckpointError, match="it has 2 parameter groups, and 1 of them on the"):
        optimizer_state("model", blocks[:1], Note((), numbers).packed())


def test_what_torch_has_not_is_refused() -> None:
    model, cluster = small_model(), FakeCluster()
    adopt(cluster.worker(), model, torch.optim.Adam(model.parameters()))
    block = cluster.block("model")
    other = FakeBlock(9, "model", np.dtype("float64"), Adam(), block.pieces, block.values)
    in_16_bits = saved(block)
    in_16_bits = in_16_bits._replace(spec=structs.replace(in_16_bits.spec, half="bfloat16"))
    for blocks, told in (
        ([saved(block, Add())], "'model' cannot be exported to torch: Add is a rule that"),
        ([saved(block), saved(other)], "parameters of two dtypes"),
        ([saved(block), in_16_bits], "parameters of two dtypes"),
    ):
        with pytest.raises(CheckpointError, match=told):
            optimizer_state("model", blocks, b"")
    unknown = saved(block)
    bare = unknown.spec.rule
    assert bare is not None
    for rule, told in ((None, "nothing updates it"), (type(bare)("mine"), "no rule is called")):
        changed = unknown._replace(spec=structs.replace(unknown.spec, rule=rule))
        with pytest.raises(CheckpointError, match=told):
            optimizer_state("model", [changed], b"")
