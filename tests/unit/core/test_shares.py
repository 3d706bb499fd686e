"""Work shared by speed: the sizes of batches keep to their bounds and to their sum."""

from __future__ import annotations

import random

from tests.suites import each_case

from paramserve.core.shares import batch_sizes, shares


@each_case(
    ("total", "speeds", "low", "high", "expected"),
    [
        (40, [0, 0], 1, 100, [20, 20]),
        (40, [30, 10], 1, 100, [30, 10]),
        (40, [30, 10, 0], 1, 100, [20, 7, 13]),
        (40, [30, 10], 15, 100, [25, 15]),
        (40, [30, 10], 1, 25, [25, 15]),
        (60, [100, 1, 1], 5, 30, [30, 15, 15]),
        (10, [1, 1], 8, 9, [8, 8]),
        (100, [1, 2], 8, 9, [9, 9]),
        (32, [5, 5, 5], 1, 32, [11, 10, 11]),
    ],
)
def test_batch_sizes_follow_speed_within_bounds(
    total: int, speeds: list[float], low: int, high: int, expected: list[int]
) -> None:
    assert batch_sizes(total, speeds, low, high) == expected


def test_batch_sizes_sum_to_the_joined_batch_where_they_can() -> None:
    dice = random.Random(5)
    for _ in range(2000):
        workers = dice.randint(1, 9)
        low = dice.randint(1, 20)
        high = low + dice.randint(0, 60)
        total = dice.randint(1, 90) * workers
        speeds = [dice.choice((0.0, 10 ** dice.uniform(-3, 3))) for _ in range(workers)]
        sizes = batch_sizes(total, speeds, low, high)
        assert sum(sizes) == min(max(total, low * workers), high * workers)
        assert all(low <= size <= high for size in sizes)
        part = shares(speeds)
        for i, a in enumerate(sizes):
            for k, b in enumerate(sizes):
                inside = low < a < high and low < b < high
                if inside:  # two that hit no bound share by speed, up to rounding
                    assert abs(a * part[k] - b * part[i]) <= part[i] + part[k]
