"""What travels to workers, and what is said of things that cannot."""

from __future__ import annotations

import sys
import threading
from typing import Any

import cloudpickle
import pytest

from paramserve.job import packing
from paramserve.job.packing import WithArguments, pack


def unpack(packed: bytes) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    found: tuple[Any, tuple[Any, ...], dict[str, Any]] = cloudpickle.loads(packed)
    return found


def test_pack_brings_function_and_arguments() -> None:
    offset = 5

    def train(worker: int, a: int, *, b: int) -> int:
        return worker + offset + a + b

    function, args, kwargs = unpack(pack(train, [1], {"b": 2}))
    assert function(10, *args, **kwargs) == 18


def test_pack_names_a_captured_variable_that_cannot_be_pickled() -> None:
    guard = threading.Lock()

    def train(worker: object) -> bool:
        return guard.locked()

    with pytest.raises(TypeError, match=r"train cannot be sent.*captured 'guard' \(lock"):
        pack(train, (), {})


def test_pack_names_an_argument_that_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match=r"argument 1 \(lock.*argument 'key' \(lock"):
        pack(print, (0, threading.Lock()), {"key": threading.Lock()})


def test_pack_names_a_default_value_that_cannot_be_pickled() -> None:
    def train(worker: object, guard: Any = threading.Lock()) -> None: ...  # noqa: B008

    with pytest.raises(TypeError, match="a default value"):
        pack(train, (), {})


def test_pack_names_a_methods_object() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.guard = threading.Lock()

        def train(self, worker: object) -> None: ...

    with pytest.raises(TypeError, match="the object that the method belongs to"):
        pack(Trainer().train, (), {})


def test_pack_refuses_what_is_not_callable() -> None:
    with pytest.raises(TypeError, match="must be callable"):
        pack("train", (), {})  # type: ignore[arg-type] # the mistake under test


def test_pack_large_closure_warns_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LARGE_BYTES", 1000)
    images = bytes(5000)

    def train(worker: object) -> int:
        return len(images)

    with pytest.warns(UserWarning, match=r"train takes .* captured 'images'"):
        pack(train, (), {})


def test_with_arguments_sets_argv_where_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pytest"])

    def train(worker: object) -> list[str]:
        return list(sys.argv)

    function, _, _ = unpack(pack(WithArguments(train, ["script.py", "--fast"]), (), {}))
    assert sys.argv == ["pytest"]
    assert function(None) == ["script.py", "--fast"]
