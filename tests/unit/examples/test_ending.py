"""examples/ending.py: what a program exits with."""

from __future__ import annotations

import pytest

from ending import exit_code
from paramserve.errors import ParamServeError


def ends(error: BaseException | None) -> int:
    """The exit code of a program that ends so."""

    @exit_code
    def main(argv: list[str] | None = None) -> None:
        assert argv == ["--workers", "2"]
        if error is not None:
            raise error

    return main(["--workers", "2"])


def test_exit_code_of_a_whole_run_is_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(None) == 0
    assert capsys.readouterr().out == ""


def test_exit_code_of_a_run_that_failed_is_one_and_the_error_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ends(ParamServeError("a list [int] was refused", fix="none")) == 1
    assert "a list [int] was refused" in capsys.readouterr().out


def test_exit_code_after_an_interrupt_is_130() -> None:
    assert ends(KeyboardInterrupt()) == 130


def test_exit_code_other_errors_pass_through() -> None:
    with pytest.raises(ValueError, match="ours"):
        ends(ValueError("ours"))
