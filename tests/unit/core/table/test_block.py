"""A table's part on a shard: updates that are made sure of, and then kept."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.core.table.rig import keys_of

from paramserve.core.table.block import KeyedBlock
from paramserve.core.table.options import MinCount, TableOptions, Zeros
from paramserve.core.table.parts import RowGradient
from paramserve.messages import BlockSpec, TableSpec
from paramserve.rules import Add
from paramserve.rules.base import PushInfo
from paramserve.rules.registry import spec as rule_spec
from paramserve.rules.rows import prepare_rows

PUSH = PushInfo(worker=-1, clock=0, version=0, staleness=0, weight=1.0, scale=1.0)


def block_of(options: TableOptions) -> KeyedBlock:
    table = TableSpec(2, "float32", 0, options.to_spec())
    spec = BlockSpec(1, 1, "users", "float32", rule_spec(Add()), (), (0, 0), table=table)
    block = KeyedBlock(spec, 1, Add(), 1)
    prepare_rows(Add())
    return block


def gradient(*keys: int) -> RowGradient:
    return RowGradient(keys_of(keys), np.ones((len(keys), 2), np.float32))


@pytest.mark.parametrize("times", [1, 3])
def test_keys_are_counted_when_an_update_is_kept_however_often_it_was_prepared(times: int) -> None:
    block = block_of(TableOptions(Zeros(), admit=MinCount(3)))
    found = []
    for _ in range(4):
        *_, keep = [block.prepare(gradient(5, 7), None, None, PUSH) for _ in range(times)]
        keep()
        found.append((len(block.store), block.unadmitted))
    assert found == [(0, 2), (0, 4), (2, 4), (2, 4)]
    block.prepare(gradient(9), None, None, PUSH)
    assert block.unadmitted == 4
