"""How fast numbers grow of which the present state is told."""

from __future__ import annotations

from paramserve.observe.rates import Rates


def test_share_is_that_of_the_last_seconds() -> None:
    rates = Rates()
    assert rates.share("waits", 10.0, 9.0) is None
    assert rates.share("waits", 11.0, 9.25) == 0.25
    for second in range(12, 20):
        found = rates.share("waits", float(second), 9.25)
    assert found == 0.0, "a report without more waiting counts, too"


def test_share_of_a_report_that_is_told_twice_stays() -> None:
    rates = Rates()
    rates.share("waits", 10.0, 0.0)
    assert [rates.share("waits", 12.0, 1.0) for _ in range(3)] == [0.5] * 3


def test_share_is_at_most_all() -> None:
    rates = Rates()
    rates.share("waits", 1.0, 0.0)
    assert rates.share("waits", 2.0, 4.0) == 1.0, "several threads wait"


def test_share_of_a_new_incarnation_begins_anew() -> None:
    rates = Rates()
    rates.share("waits", 100.0, 50.0)
    rates.share("waits", 101.0, 51.0)
    assert rates.share("waits", 1.0, 0.5) is None
    assert rates.share("waits", 2.0, 0.75) == 0.25


def test_rate_of_a_counter_that_stands_still_falls() -> None:
    rates = Rates()
    rates.of("steps", 1.0, 10)
    rates.of("steps", 2.0, 30)
    assert rates.of("steps", 3.9, 30) == 20.0, "the next report is on its way"
    assert rates.of("steps", 5.0, 30) == 5.0
    assert rates.of("steps", 41.0, 30) == 0.5
    assert rates.of("steps", 41.0, 30, whole=True) == 20.0


def test_rate_of_a_counter_that_goes_on_is_that_of_the_last_reports() -> None:
    rates = Rates()
    for second in range(20):
        found = rates.of("steps", float(second), 10 * min(second, 5) + 2 * max(second - 5, 0))
    assert found == 2.0
