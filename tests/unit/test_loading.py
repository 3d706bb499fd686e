"""Which kernels count as loaded."""

from __future__ import annotations

import fcntl
from pathlib import Path

import numpy as np
import pytest

from paramserve import loading
from paramserve.loading import load_kernels, loaded
from paramserve.rules import SGD, Adam, Add

F4, F8, I8 = np.dtype("float32"), np.dtype("float64"), np.dtype("int64")


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Nothing is loaded yet; tells what is prepared."""
    calls: list[str] = []
    monkeypatch.setattr(loading, "_mark", lambda *_: tmp_path / "compiled")
    monkeypatch.setattr(loading, "_loaded", set())
    for rule in (SGD, Adam, Add):
        monkeypatch.setattr(
            rule, "prepare", lambda self, dtype: calls.append(f"{self.name} {dtype.name}")
        )
    return calls


def test_each_rule_is_loaded_once_for_each_dtype(prepared: list[str]) -> None:
    for _ in range(2):
        for rule in (Add(), SGD(0.1), SGD(0.2)):
            load_kernels(F4, rule)
        load_kernels(F8, Add())
    assert prepared == ["Add float32", "SGD float32", "Add float64"]


def test_momentum_needs_kernels_of_its_own(prepared: list[str]) -> None:
    """Else the first push with momentum would compile."""
    load_kernels(F4, SGD(0.1))
    assert loaded(F4, SGD(0.2))
    assert not loaded(F4, SGD(0.1, momentum=0.9))
    load_kernels(F4, SGD(0.1, momentum=0.9))
    assert len(prepared) == 2


def test_dtypes_without_kernels_need_none(prepared: list[str]) -> None:
    assert loaded(I8, None)
    load_kernels(I8, None)
    assert prepared == []


def test_load_that_fails_does_not_count(
    prepared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object, dtype: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(Adam, "prepare", fail)
    with pytest.raises(RuntimeError):
        load_kernels(F8, Adam())
    assert not loaded(F8, Adam())


def test_lock_that_another_user_keeps_delays_loading_and_no_more(
    prepared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "COMPILE_WAIT_S", 0.05)
    with open(loading.__file__, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        load_kernels(F4, Add())
    assert prepared == ["Add float32"]
