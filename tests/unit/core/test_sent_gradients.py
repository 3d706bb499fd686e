"""What workers tell of the gradients that they sent encoded, added up by rank and group."""

from __future__ import annotations

import math
from typing import Any

from tests.suites import each_case

from paramserve.core.sent_gradients import SentByRank
from paramserve.messages import SentGradients


def test_incarnations_of_a_rank_are_added_up_and_the_residual_is_the_last_ones() -> None:
    sent = SentByRank()
    sent.on_report(1, 5, [SentGradients("a", 10, 40, 0.5)])
    sent.on_report(1, 5, [SentGradients("a", 20, 80, 0.25), SentGradients("b", 1, 4, 0.0)])
    sent.on_report(0, 6, [SentGradients("a", 3, 12, 2.0)])
    assert sent.report() == (
        (0, SentGradients("a", 3, 12, 2.0)),
        (1, SentGradients("a", 20, 80, 0.25)),
        (1, SentGradients("b", 1, 4, 0.0)),
    )
    sent.on_report(1, 7, [SentGradients("a", 2, 8, 0.125, 3, 6)])
    sent.on_report(1, 8, [SentGradients("a", 5, 20, 0.0625, 4, 16)])
    sent.on_report(1, 5, [SentGradients("a", 30, 120, 9.0)])  # on its way since before it ended
    assert sent.report()[1] == (1, SentGradients("a", 27, 108, 0.0625, 7, 22))


@each_case(
    "wrong",
    [
        (-1, 0, 0.0),
        (0, -1, 0.0),
        (0, 0, -1.0),
        (0, 0, math.nan),
        (0, 0, math.inf),
        (1 << 63, 0, 0.0),
        (0, 0, 0.0, -1, 0),
        (0, 0, 0.0, 0, 1 << 63),
    ],
)
def test_what_cannot_be_is_left_out(wrong: tuple[Any, ...]) -> None:
    sent = SentByRank()
    sent.on_report(0, 1, [SentGradients("a", *wrong)])
    assert sent.report() == ()


def test_sums_stay_within_what_a_message_holds() -> None:
    sent, largest = SentByRank(), (1 << 63) - 1
    for client in range(4):
        sent.on_report(0, client, [SentGradients("a", largest, largest, 0.0)])
    assert sent.report() == ((0, SentGradients("a", largest, largest, 0.0)),)
