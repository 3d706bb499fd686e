"""An exception in the driver, of any kind and at any moment, leaves no process of a run behind."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import psutil
import pytest
from tests.faults import victims
from tests.faults.leftovers import nothing_left

import paramserve as ps
from paramserve.errors import UnknownName


class Alarm(Exception):
    """What a handler of signals raises, as a test's time limit does."""


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    with nothing_left():
        yield
    assert set(psutil.Process().children(recursive=True)) == before


@contextlib.contextmanager
def raised_at(pipe: str, error: type[BaseException], *, elsewhere: bool = False) -> Iterator[None]:
    """Raise this error in the main thread when a worker writes to the pipe.

    Args:
        elsewhere: another thread receives the signal, so that no call of the main thread is
            interrupted, as when it comes just before a call that blocks.
    """

    def strike(number: int, frame: FrameType | None) -> None:
        raise error

    def listen() -> None:
        Path(pipe).read_text()
        if elsewhere:
            signal.pthread_kill(threading.get_ident(), signal.SIGALRM)
        else:
            os.kill(os.getpid(), signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, strike)
    listener = threading.Thread(target=listen)
    listener.start()
    try:
        yield
    finally:
        listener.join()
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("error", [Alarm, SystemExit])
def test_run_that_an_exception_leaves_has_ended(pipe: str, error: type[BaseException]) -> None:
    with pytest.raises(error), raised_at(pipe, error):
        ps.run(victims.sleep_forever, args=(pipe,), workers=2)


def test_exception_of_a_signal_that_another_thread_received_ends_the_run(pipe: str) -> None:
    with pytest.raises(Alarm), raised_at(pipe, Alarm, elsewhere=True):
        ps.run(victims.sleep_forever, args=(pipe,))


def test_run_interrupted_gives_its_values_with_the_interrupt(
    pipe: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt) as caught, raised_at(pipe, KeyboardInterrupt):
        ps.run(victims.regress, args=(pipe, 10), workers=2)
    assert type(caught.value) is KeyboardInterrupt  # by which the interpreter knows how to exit
    result = caught.value.result  # type: ignore[attr-defined]  # ours
    assert result.stopped
    assert "is in this exception's attribute `result` (interactively: sys.last" in str(caught.value)
    assert np.abs(result.values["default"]["w"]).sum() > 0
    assert "paramserve: interrupted, last heard after" in capfd.readouterr().err


def test_run_interrupted_before_it_waits_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(job: ps.Job) -> ps.Job:
        raise KeyboardInterrupt

    monkeypatch.setattr(ps.Job, "__enter__", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        ps.run(victims.sleep_forever)
    assert caught.value.result.values == {}  # type: ignore[attr-defined]  # ours
    assert "attribute `result`" in str(caught.value), "it may have metrics and files of tables"


def test_with_block_that_raises_ends_the_job_and_keeps_its_values(pipe: str) -> None:
    job = ps.start(victims.regress, args=(pipe, 10), workers=2)

    def plot() -> None:
        with job:
            Path(pipe).read_text()
            raise LookupError("plot")

    with pytest.raises(LookupError, match="plot"):
        plot()
    status = job.status()
    assert status.state == "stopped"
    assert set(status.workers.values()) == {"stopped"}
    assert np.abs(np.asarray(job.state_dict("default")["w"])).sum() > 0


def test_with_block_that_ends_ends_the_job() -> None:
    with ps.start(victims.sleep_forever) as job:
        pass
    assert job.wait().stopped


def test_with_block_of_a_job_that_has_ended_changes_nothing() -> None:
    with ps.start(victims.count, workers=2) as job:
        result = job.wait()
    assert not result.stopped
    assert job.status().state == "finished"


def test_interrupted_wait_leaves_the_job_alone(
    pipe: str, capfd: pytest.CaptureFixture[str]
) -> None:
    job = ps.start(victims.regress, args=(pipe, 10), workers=2)
    with pytest.raises(KeyboardInterrupt), raised_at(pipe, KeyboardInterrupt):
        job.wait()
    assert job.status().workers == {0: "running", 1: "running"}
    assert np.abs(np.asarray(job.state_dict("default")["w"])).sum() > 0
    told = capfd.readouterr().err
    assert told.startswith("paramserve: interrupted, last heard after")
    assert told.endswith("; the run goes on until job.stop() or the end of this process\n")
    job.stop()
    assert job.wait().stopped
    assert job.status().workers == {0: "stopped", 1: "stopped"}
    with pytest.raises(UnknownName):
        job.state_dict("model")


def test_stop_that_is_interrupted_ends_everything_at_once(pipe: str) -> None:
    engine = ps.Local(deadlines=ps.Deadlines(stop_s=30.0))
    job = ps.start(victims.ignore_the_end, args=(pipe,), engine=engine)
    Path(pipe).read_text()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        job.stop()
    timer.join()
    assert job._supervisor.ended.is_set()
