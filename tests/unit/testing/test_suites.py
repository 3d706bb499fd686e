"""What runs as one test, a suite or the cases of a subject, tells each part that failed."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path

import pytest
from tests.suites import each_case, passes


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


@each_case("number, limit", [(1, 3), (2, 3), pytest.param(7, 3, id="seven")])
@each_case("step", [0, 1], ids=["at rest", "on its way"])
def below(number: int, limit: int, step: int, seen: list[int]) -> None:
    seen.append(number + step)
    if number == 7:
        pytest.fail("seven")
    assert number + step < limit


def test_every_case_runs_and_each_that_fails_is_named() -> None:
    seen: list[int] = []
    with pytest.raises(BaseExceptionGroup, match="2 of 3 cases failed") as failed:
        below(seen=seen)
    assert seen == [1, 2, 2, 3, 7, 8]
    two, seven = failed.value.exceptions
    assert two.__notes__ == ["in case 1: on its way", "in case 1: number=2, limit=3"]
    assert isinstance(seven, BaseExceptionGroup)
    assert seven.__notes__ == ["in case 2: seven"]
    assert [each.__notes__ for each in seven.exceptions] == [
        ["in case 0: at rest"],
        ["in case 1: on its way"],
    ]


def test_fixtures_are_what_no_case_gives() -> None:
    assert list(inspect.signature(below).parameters) == ["seen"]


@each_case("number", range(2))
def test_case_has_patches_a_folder_and_output_of_its_own(
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert not hasattr(Suite, "patched")
    monkeypatch.setattr(Suite, "patched", True, raising=False)
    (tmp_path / "file").touch(exist_ok=False)
    assert (capsys.readouterr().out, caplog.text) == ("", "")
    print(number)
    logging.getLogger(__name__).warning("%d", number)


def test_cases_end_with_the_limit_of_their_time() -> None:
    ran = []

    @each_case("number", range(3))
    def slow(number: int) -> None:
        ran.append(number)
        pytest.fail("Timeout (>120.0s) from pytest-timeout.")

    with pytest.raises(pytest.fail.Exception, match="Timeout"):
        slow()
    assert ran == [0]


@pytest.mark.parametrize("cases", [[], [pytest.param(1, 2, marks=pytest.mark.slow)], [(1, 2, 3)]])
def test_cases_that_would_not_all_run_are_refused(cases: list[object]) -> None:
    with pytest.raises(ValueError):
        each_case("number, other", cases)
