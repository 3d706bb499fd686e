from __future__ import annotations

from typing import Any

import numpy as np
from tests.unit.core.rig import block_spec

from paramserve.core.block import ShardBlock
from paramserve.core.commit import Contribution
from paramserve.core.sums import total
from paramserve.messages import Gradient, Step
from paramserve.rules import Add


def contribution(
    values: list[float], *, weight: float = 1.0, active: tuple[int, ...] | None = None
) -> Contribution:
    gradient = np.array(values)
    one = Gradient(0, 0, 0, active)
    step = Step(0, 0, 0, True, (one,), (), weight=weight)
    session: Any = None
    return Contribution(step, session, {0: (one, gradient)}, finite=True, weight=weight)


def block(*shapes: tuple[int, ...]) -> ShardBlock:
    return ShardBlock(block_spec(*shapes), 0, Add(), 1)


def test_total_is_summed_in_the_order_given() -> None:
    parts = [contribution([1e16, 1.0]), contribution([1.0, 1.0]), contribution([-1e16, 1.0])]
    found, active = total(parts, block((2,)))
    assert active is None
    assert found.tolist() == [(1e16 + 1.0) - 1e16, 3.0]


def test_total_leaves_the_gradients() -> None:
    parts = [contribution([1.0, 2.0], weight=2.0), contribution([10.0, 10.0], weight=3.0)]
    found, _ = total(parts, block((2,)))
    assert found.tolist() == [32.0, 34.0]
    first, second = (each.gradients[0][1] for each in parts)
    assert first.tolist() == [1.0, 2.0]
    assert second.tolist() == [10.0, 10.0]


def test_total_missing_pieces_count_as_zero() -> None:
    parts = [
        contribution([1.0, 1.0, 99.0], active=(0,)),
        contribution([2.0, 2.0, 2.0], weight=0.5),
        contribution([7.0, 7.0, 4.0], active=(1,)),
    ]
    found, active = total(parts, block((2,), (1,)))
    assert active == (0, 1)
    assert found.tolist() == [2.0, 2.0, 5.0]


def test_total_names_only_the_pieces_that_some_rank_has() -> None:
    parts = [contribution([1.0, 9.0, 9.0], active=(0,)), contribution([1.0, 9.0, 5.0], active=(2,))]
    found, active = total(parts, block((1,), (1,), (1,)))
    assert active == (0, 2)
    assert found.tolist() == [1.0, 0.0, 5.0]
