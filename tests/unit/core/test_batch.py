"""Requests of one frame get their own parts of its payload, or none is executed."""

from __future__ import annotations

import numpy as np
import pytest

from paramserve.core.batch import apart
from paramserve.errors import ProtocolError
from paramserve.messages import Batch, BlockSpec, Define, Step, SuspendMembership

FIRST, SECOND = Step(1, 0, 0, True, (), ()), SuspendMembership(2, 1)
DEFINE = Define(3, BlockSpec(0, 0, "g", "float32", None, (), ()), 1, 0, 0)


def test_each_request_gets_its_part() -> None:
    payload = np.arange(192, dtype=np.uint8)
    (first, one), (second, two) = apart(Batch((FIRST, SECOND), (128, 64)), payload)
    assert (first, second) == (FIRST, SECOND)
    assert one is not None
    assert two is not None
    assert (one.tolist(), two.tolist()) == (list(range(128)), list(range(128, 192)))


def test_frame_without_a_payload_has_no_parts() -> None:
    assert apart(Batch((FIRST, SECOND), (0, 0)), None) == [(FIRST, None), (SECOND, None)]


@pytest.mark.parametrize(
    "message",
    [
        Batch((FIRST, SECOND), (128,)),
        Batch((FIRST, SECOND), (128, 128)),
        Batch((FIRST, SECOND), (256, -64)),
        Batch((FIRST, DEFINE), (128, 64)),
        Batch((), ()),
    ],
    ids=["too few sizes", "too many bytes", "a size below 0", "a definition", "nothing"],
)
def test_frame_that_does_not_fit_is_refused_whole(message: Batch) -> None:
    with pytest.raises(ProtocolError, match="payload has 192"):
        apart(message, np.zeros(192, np.uint8))
