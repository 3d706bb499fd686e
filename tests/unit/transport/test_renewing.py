"""Files that are replaced while a process runs, on a clock of the test's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paramserve.config import Credentials
from paramserve.errors import ParamServeError
from paramserve.transport import auth
from paramserve.transport.renewing import LOOK_S, Renewed

OLD, NEW, NEWER = (letter * 32 for letter in "abc")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def write(path: Path, text: str) -> None:
    """Replace a file in one step, as a secret's volume does."""
    new = path.with_suffix(".new")
    new.touch(0o600)
    new.write_text(text)
    os.replace(new, path)


@pytest.fixture
def token(tmp_path: Path, clock: Clock) -> Callable[[float], tuple[bytes, ...]]:
    path = tmp_path / "token"
    write(path, OLD)
    return auth.TokenFile(str(path), OLD.encode(), clock).tokens


def test_token_that_was_replaced_holds_for_the_grace_period(
    tmp_path: Path, clock: Clock, token: Callable[[float], tuple[bytes, ...]]
) -> None:
    assert token(60.0) == (OLD.encode(),)
    write(tmp_path / "token", NEW)
    assert token(60.0) == (OLD.encode(),), "looked at a moment ago"
    clock.now += LOOK_S
    assert token(60.0) == (NEW.encode(), OLD.encode())
    clock.now += 30.0
    write(tmp_path / "token", NEWER)
    assert token(60.0) == (NEWER.encode(), NEW.encode(), OLD.encode())
    assert token(0.0) == (NEWER.encode(),), "no grace"
    clock.now += 30.0
    assert token(60.0) == (NEWER.encode(), NEW.encode())
    clock.now += 30.0
    assert token(60.0) == (NEWER.encode(),)


def test_grace_period_begins_at_the_renewal_though_no_client_connects(
    tmp_path: Path, clock: Clock
) -> None:
    write(tmp_path / "token", OLD)
    file = auth.TokenFile(str(tmp_path / "token"), OLD.encode(), clock, lambda path: 100.0)
    assert file.tokens(60.0) == (OLD.encode(),)
    write(tmp_path / "token", NEW)
    clock.now += 10_000.0
    assert file.tokens(60.0) == (NEW.encode(),)
    assert file.tokens(120.0) == (NEW.encode(), OLD.encode())


def test_token_that_comes_back_is_the_newest_again(
    tmp_path: Path, clock: Clock, token: Callable[[float], tuple[bytes, ...]]
) -> None:
    for text in (NEW, OLD):
        write(tmp_path / "token", text)
        clock.now += LOOK_S
        found = token(60.0)
    assert found == (OLD.encode(), NEW.encode())


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda path: path.unlink(), "cannot be read"),
        (lambda path: write(path, "short"), "has 5 characters"),
        (lambda path: path.chmod(0o644), "every user of this machine may use"),
    ],
    ids=["missing", "short", "open"],
)
def test_wrong_token_file_is_told_once_and_the_old_token_stays(
    tmp_path: Path,
    clock: Clock,
    token: Callable[[float], tuple[bytes, ...]],
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path], None],
    told: str,
) -> None:
    caplog.set_level("INFO", "paramserve")
    path = tmp_path / "token"
    for _ in range(3):
        assert token(60.0) == (OLD.encode(),)
        clock.now += LOOK_S
    spoil(path)
    for _ in range(3):
        clock.now += LOOK_S
        assert token(60.0) == (OLD.encode(),)
    (message,) = caplog.messages
    assert told in message
    assert "stays in use" in message
    write(path, NEW)
    clock.now += LOOK_S
    assert token(60.0) == (NEW.encode(), OLD.encode())
    assert caplog.messages[1:] == [f"the token was renewed: {path}"]
    assert not {OLD, NEW} & set(caplog.text.split())


def test_link_that_points_to_another_file_is_noticed(tmp_path: Path, clock: Clock) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    link = tmp_path / "link"
    link.symlink_to("one")
    read = Renewed("it", (str(link),), link.read_text, now=clock)
    assert read.get() == "one"
    link.unlink()
    link.symlink_to("two")
    clock.now += LOOK_S
    assert read.get() == "two"


def test_first_files_that_are_wrong_are_an_error() -> None:
    def wrong() -> str:
        raise ParamServeError("no", fix="none")

    with pytest.raises(ParamServeError):
        Renewed("it", (), wrong)


def test_credentials_that_came_from_no_file_stay() -> None:
    assert auth.tokens(Credentials(b"z" * 32), 60.0) == (b"z" * 32,)
