"""A suite that runs as one test tells each of its tests that failed."""

from __future__ import annotations

import pytest
from tests.suites import passes


class Suite:
    """Two of four tests fail."""

    subject = "good"

    def test_a_wrong(self) -> None:
        assert self.subject == "wrong"

    def test_b_good(self) -> None:
        assert self.subject == "good"
        self.subject = "changed"

    def test_c_raises_nothing(self) -> None:
        with pytest.raises(ValueError, match="none"):
            pass

    def test_d_good(self) -> None:
        assert self.subject == "good"


class Ends:
    def test_ends(self) -> None:
        pytest.fail("Timeout (>120.0s) from pytest-timeout.")

    def test_later(self) -> None:
        raise AssertionError


def test_suite_tells_each_test_that_failed() -> None:
    with pytest.raises(BaseExceptionGroup, match="2 tests of Suite failed") as failed:
        passes(Suite())
    notes = [each.__notes__ for each in failed.value.exceptions]
    assert notes == [["in test_a_wrong of Suite"], ["in test_c_raises_nothing of Suite"]]


def test_suite_ends_with_the_limit_of_its_time() -> None:
    with pytest.raises(pytest.fail.Exception, match="Timeout") as ended:
        passes(Ends())
    assert ended.value.__notes__ == ["in test_ends of Ends"]
