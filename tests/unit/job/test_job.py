"""`start` and `Cluster` check everything before they start anything."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest

import paramserve as ps
from paramserve.engine.base import Fleet
from paramserve.errors import NotAuthenticated
from paramserve.job.result import Handle


class NeverOpens:
    """An engine that must not be used."""

    def open(self) -> Fleet:
        raise AssertionError("something was started")


def train(worker: ps.Worker) -> None: ...


@pytest.mark.parametrize("option", ["workers", "servers", "threads_per_worker"])
@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)]
)
def test_start_counts_must_be_positive_ints(
    option: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=option):
        ps.start(train, engine=NeverOpens(), **{option: value})


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"consistency": "async"}, TypeError, "consistency must be"),
        ({"consistency": ps.Async}, TypeError, "consistency must be"),
        ({"on_worker_death": "ignore"}, ValueError, "on_worker_death must be"),
        ({"timeout_s": 0}, ValueError, "timeout_s must be"),
        ({"timeout_s": float("nan")}, ValueError, "timeout_s must be"),
        ({"seed": -1}, ValueError, "seed must be"),
        ({"seed": 1.5}, ValueError, "seed must be"),
        ({"engine": "local"}, TypeError, "engine must be"),
        ({"engine": ps.Local}, TypeError, "engine must be"),
        ({"worker": 2}, TypeError, "unexpected keyword argument 'worker'"),
        ({"args": (threading.Lock(),)}, TypeError, "argument 0"),
        ({"kwargs": {"guard": threading.Lock()}}, TypeError, "argument 'guard'"),
    ],
)
def test_start_wrong_argument_is_named(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        ps.start(train, **{"engine": NeverOpens(), **options})


def test_run_takes_what_start_takes() -> None:
    with pytest.raises(ValueError, match="workers"):
        ps.run(train, workers=0, engine=NeverOpens())


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"servers": 0}, ValueError, "servers"),
        ({"workers": -1}, ValueError, "workers"),
        ({"consistency": "sync"}, TypeError, "consistency"),
        ({"engine": ps.Local}, TypeError, "engine"),
    ],
)
def test_cluster_wrong_argument_is_named(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        ps.Cluster(**{"engine": NeverOpens(), **options})


def test_handle_leaves_the_token_behind() -> None:
    def connect() -> Any:
        raise AssertionError("not in this process")

    copy = pickle.loads(pickle.dumps(Handle("unix:/c.sock", connect)))
    assert copy.address == "unix:/c.sock"
    with pytest.raises(NotAuthenticated, match="came from another process"):
        copy.connect()
