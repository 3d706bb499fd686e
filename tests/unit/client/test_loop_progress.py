"""How much of a loop over batches is done."""

from __future__ import annotations

import pytest

from paramserve.client.loop_progress import LoopProgress


def test_batches_by_themselves() -> None:
    loop = LoopProgress()
    assert loop.done == 0.0
    loop.take_batch(3, 4)
    assert loop.done == 0.75
    loop.take_batch(9, 4)
    assert loop.done == 1.0, "of a number that was an estimate"


def test_batches_within_epochs() -> None:
    loop = LoopProgress()
    loop.begin_epoch(1, 4)
    assert loop.done == 0.25
    loop.take_batch(1, 2)
    assert loop.done == pytest.approx(0.375)
    loop.end_epochs()
    assert loop.done == 1.0
    loop.take_batch(1, 2)
    assert loop.done == 0.5, "another loop, by itself"
