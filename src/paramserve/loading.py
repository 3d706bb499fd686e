"""Loading kernels: one process compiles, the others wait for its cache."""

from __future__ import annotations

import contextlib
import fcntl
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from paramserve.rules import base as lock_file
from paramserve.rules.base import Rule

TELL_AFTER_S = 1.5
"""A load from the cache is quicker than this; what takes longer is a first compile."""

_local = threading.Lock()
_loaded: set[tuple[str, str]] = set()


def load_kernels(dtype: np.dtype[Any], rule: Rule | None = None) -> None:
    """Have the shared kernels, and those of a rule, ready for a dtype. Repeating costs nothing.

    The first time on a machine this compiles for some seconds, and says so on stderr.
    """
    key = (dtype.name, "" if rule is None else rule.name)
    if key in _loaded or dtype.name not in ("float32", "float64"):
        return
    with _local, _one_process(), _announced():
        from paramserve.rules import kernels

        kernels.prepare(dtype)
        if rule is not None:
            rule.prepare(dtype)
    _loaded.add(key)


def loaded(dtype: np.dtype[Any], rule: Rule | None) -> bool:
    """Whether `load_kernels` would return at once."""
    key = (dtype.name, "" if rule is None else rule.name)
    return key in _loaded or dtype.name not in ("float32", "float64")


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    # A lock on a source file that every process has: nothing is created and nothing is left.
    assert lock_file.__file__ is not None
    with open(lock_file.__file__, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _announced() -> Iterator[None]:
    text = "paramserve: compiling kernels, once per installation; this takes some seconds"
    timer = threading.Timer(TELL_AFTER_S, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
