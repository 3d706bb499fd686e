"""Several processes compile kernels at a time, none is left behind, and what one fails at another
does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paramserve import compilers, kernel_cache, kernel_folder
from paramserve.codecs.compiled import codec_kernels
from paramserve.compilers import compile_missing
from paramserve.core.table.compiled import kernels as store_kernels
from paramserve.kernel_sets import INDEX, KernelSet, every
from paramserve.rules.compiled import compiled_rows

SET = KernelSet("codecs", ("BFloat16", "TopK"))
KERNELS = ["to_bfloat16", "from_bfloat16", "choose_largest", "to_gaps", "from_gaps"]
TAKES_ONE = "import os, sys, time; os.read(0, 2); {}  # {{path}} {{described}} {{parent}}"


class Here:
    """Stands for the cache: what this process was asked to compile."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.fails = False

    def load(self, kernels: kernel_cache.Kernels) -> None:
        if self.fails:
            raise KeyboardInterrupt
        self.compiled += [each.__name__ for each in kernels]

    def has(self, kernels: kernel_cache.Kernels) -> bool:
        return all(each.__name__ in self.compiled for each in kernels)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    made = Here()
    monkeypatch.setattr(kernel_cache, "load", made.load)
    monkeypatch.setattr(kernel_cache, "compiled", made.has)
    return made


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The other processes that were started: two for five kernels."""
    started: list[subprocess.Popen[bytes]] = []

    class Started(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(compilers, "cores", lambda: 3)
    monkeypatch.setattr(compilers, "KERNELS_EACH_MIN", 1)
    yield started
    assert all(each.returncode is not None for each in started), "a process was left"


@pytest.mark.parametrize("program", ["sys.exit(3)", "time.sleep(60)"])
def test_what_others_took_and_did_not_compile_is_compiled_here(
    program: str,
    here: Here,
    others: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compilers, "_PROGRAM", TAKES_ONE.format(program))
    monkeypatch.setattr(compilers, "LAST_S", 0.3)
    assert compile_missing([SET]) == 5
    assert sorted(here.compiled) == sorted(KERNELS)
    assert len(others) == 2


def test_interrupt_ends_the_other_processes(
    here: Here, others: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "_PROGRAM", TAKES_ONE.format("time.sleep(60)"))
    here.fails = True
    with pytest.raises(KeyboardInterrupt):
        compile_missing([SET])
    assert len(others) == 2


def test_machine_that_gives_no_process_compiles_here(
    here: Here, others: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert compile_missing([SET]) == 5
    assert sorted(here.compiled) == sorted(KERNELS)


@pytest.mark.parametrize("why", ["few", "nowhere", "there"])
def test_other_processes_are_for_many_kernels_that_can_be_kept(
    why: str, here: Here, others: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "few":
        monkeypatch.setattr(compilers, "KERNELS_EACH_MIN", 6)
    elif why == "nowhere":
        monkeypatch.setattr(kernel_folder, "choose", lambda: kernel_folder.Choice(None, ()))
    else:
        here.compiled = list(KERNELS)
    assert compile_missing([SET]) == (0 if why == "there" else 5)
    assert others == []


def test_lines_tell_what_is_compiled_and_how_long_it_may_take_yet(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("paramserve.compilers.time.monotonic", lambda: now[0])
    load: Callable[[kernel_cache.Kernels], None] = here.load

    def takes_its_time(kernels: kernel_cache.Kernels) -> None:
        load(kernels)
        now[0] += 1.5

    monkeypatch.setattr(kernel_cache, "load", takes_its_time)
    monkeypatch.setattr(compilers, "KERNELS_EACH_MIN", 6)
    compile_missing([SET])
    first, *lines = capsys.readouterr().err.splitlines()
    assert first.startswith("paramserve: compiling 5 kernels for codecs BFloat16 TopK; kept in /")
    assert lines == [
        "paramserve: 2 of 5 kernels are compiled, about 4 s left",
        "paramserve: 4 of 5 kernels are compiled, about 2 s left",
    ]


def test_lines_need_no_reader(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind `| head -1`, or with the stream closed."""

    class Gone:
        def write(self, text: str) -> None:
            raise BrokenPipeError

    for stream in (Gone(), None):
        here.compiled = []
        monkeypatch.setattr(sys, "stderr", stream)
        assert compile_missing([SET]) == 5


def test_path_of_modules_may_have_entries_that_are_no_strings(
    here: Here, others: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("src"), "a:b"])
    monkeypatch.setattr(compilers, "LAST_S", 0.0)
    assert compile_missing([SET]) == 5
    assert len(others) == 2


def test_kernels_of_every_module_are_in_a_set() -> None:
    """Else `paramserve warm` would leave them out; tables with rules of one's own need copies."""
    known = {pair for each in every() for pair in each.kernels().items()}
    assert {*compiled_rows().copies().items()} < known
    assert {*store_kernels().items(), *codec_kernels().KERNELS.items()} < known


def test_kernels_of_several_sets_are_compiled_once(here: Here) -> None:
    assert compile_missing([SET, SET, KernelSet("codecs", ("BFloat16",))]) == 5
    assert compile_missing([SET, INDEX]) == len(INDEX.kernels())


def test_every_set_has_the_same_kernels_where_it_was_sent_to() -> None:
    """The numbers in the queue are places among them."""
    sets = every()
    assert len(sets) > 50
    for each in sets:
        arrived = msgspec.json.decode(msgspec.json.encode(each), type=KernelSet)
        assert arrived.key == each.key
        assert list(arrived.kernels().items()) == list(each.kernels().items())
        assert each.kernels()
