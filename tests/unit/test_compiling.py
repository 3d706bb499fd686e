"""Which kernels count as loaded, and that one process compiles while the others wait."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from paramserve import compilers, compiling, kernel_cache
from paramserve.compiling import load_kernels, loaded
from paramserve.kernel_sets import KernelSet
from paramserve.rules import SGD, Adam, Add

F4, F8, I8 = np.dtype("float32"), np.dtype("float64"), np.dtype("int64")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nothing is loaded or compiled yet; tells how many kernels each load has."""
    calls: list[int] = []
    monkeypatch.setattr(compiling, "_loaded", set())
    monkeypatch.setattr(kernel_cache, "compiled", lambda kernels: False)
    monkeypatch.setattr(compilers, "compile_missing", lambda sets: 0)
    monkeypatch.setattr(kernel_cache, "load", lambda kernels: calls.append(len(kernels)))
    return calls


def test_each_rule_is_loaded_once_for_each_dtype(loads: list[int]) -> None:
    for _ in range(2):
        for rule in (Add(), SGD(0.1), SGD(0.2)):
            load_kernels(F4, rule)
        load_kernels(F8, Add())
    assert len(loads) == 3


def test_momentum_needs_kernels_of_its_own(loads: list[int]) -> None:
    """Else the first push with momentum would compile."""
    load_kernels(F4, SGD(0.1))
    assert loaded(F4, SGD(0.2))
    assert not loaded(F4, SGD(0.1, momentum=0.9))
    load_kernels(F4, SGD(0.1, momentum=0.9))
    assert len(loads) == 2


def test_dtypes_without_kernels_need_none(loads: list[int]) -> None:
    assert loaded(I8, None)
    load_kernels(I8, None)
    assert loads == []


def test_load_that_fails_does_not_count(loads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(kernels: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(kernel_cache, "load", fail)
    with pytest.raises(RuntimeError):
        load_kernels(F8, Adam())
    assert not loaded(F8, Adam())


def test_one_process_compiles_while_others_wait(
    loads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []

    def compile_missing(sets: list[KernelSet]) -> int:
        with open(compiling.__file__, "rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append(True)
        return 7

    monkeypatch.setattr(compilers, "compile_missing", compile_missing)
    load_kernels(F4, Add())
    assert held == [True]
    monkeypatch.setattr(kernel_cache, "compiled", lambda kernels: True)
    load_kernels(F8, Add())
    assert held == [True], "what is compiled is loaded only"
    assert len(loads) == 2


def test_lock_that_another_user_keeps_delays_loading_and_no_more(
    loads: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiling, "COMPILE_WAIT_S", 0.3)
    monkeypatch.setattr(compiling, "SAY_S", 0.1)
    with open(compiling.__file__, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        load_kernels(F4, Add())
    assert len(loads) == 1
    told = "paramserve: waiting for another process that compiles, 0 s at most\n"
    assert capsys.readouterr().err == told


def test_wait_ends_when_the_other_process_has_compiled_what_is_needed(
    loads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([False, False, True])
    monkeypatch.setattr(kernel_cache, "compiled", lambda kernels: next(answers))
    with open(compiling.__file__, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        load_kernels(F4, Add())  # within the time limit of this test
    assert len(loads) == 1


def test_client_that_needs_no_codec_does_without_numba() -> None:
    code = """
import sys
from paramserve.compiling import load_codecs
from paramserve.messages import BlockSpec
load_codecs(BlockSpec(0, 0, "g", "float32", None, (), (0, 0)))
assert "numba" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
