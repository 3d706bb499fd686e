from __future__ import annotations

import math
from typing import Any

import pytest
from tests.suites import each_case

from paramserve.consistency.built_in import DAMPINGS, Exponential, Inverse, Polynomial


@each_case(
    ("damping", "staleness", "expected"),
    [
        (Inverse(0.1), 10, 0.5),
        (Inverse(1.0), 3, 0.25),
        (Inverse(0.0), 1000, 1.0),
        (Exponential(0.5), 2, math.exp(-1.0)),
        (Exponential(), 10, math.exp(-1.0)),
        (Polynomial(), 3, 0.5),
        (Polynomial(2.0), 4, 0.04),
        (Polynomial(0.0), 1000, 1.0),
    ],
)
def test_damping_by_staleness_is_the_formula(damping: Any, staleness: int, expected: float) -> None:
    assert damping(staleness) == pytest.approx(expected, rel=1e-12)


@each_case("kind", DAMPINGS)
def test_damping_fresh_gradient_counts_whole(kind: Any) -> None:
    assert kind()(0) == 1.0


@each_case("kind", DAMPINGS)
def test_damping_is_a_falling_share_for_any_staleness(kind: Any) -> None:
    for strength in (1e-12, 0.5, 1e300):
        shares = [kind(strength)(staleness) for staleness in (0, 1, 2, 50, 10**12)]
        assert shares == sorted(shares, reverse=True)
        assert all(type(each) is float and 0.0 <= each <= 1.0 for each in shares)


@each_case("kind", DAMPINGS)
def test_damping_strength_that_is_none_is_refused(kind: Any) -> None:
    for wrong in (-0.1, math.nan, math.inf, -math.inf):
        with pytest.raises(
            ValueError, match=rf"of {kind.__name__} must be at least 0\.0 and finite"
        ):
            kind(wrong)
    for other in ("1", None, True, [1.0]):
        with pytest.raises(TypeError, match=f"of {kind.__name__} must be a number"):
            kind(other)
