"""Packages that an installation may do without: the tests that need one are skipped, and say so."""

from __future__ import annotations

import socket
from typing import Any

import pytest

EXTRAS = {
    "expecttest": "dev",
    "hatchling": "dev",
    "nbmake": "dev",
    "pandas": "train",
    "pyarrow": "arrow",
    "pyarrow.parquet": "arrow",
    "ray": "ray",
    "ray.train": "train",
    "safetensors": "dev",
    "tests.whole_objects": "fsspec",
    "torch": "torch",
    "trustme": "dev",
}


def needs(module: str) -> Any:
    """The module; without it the test is skipped, with what to install."""
    extra = EXTRAS[module]
    return pytest.importorskip(module, reason=f"needs {module}: pip install 'paramserve[{extra}]'")


def needs_ipv6() -> None:
    """Skip the test, and say so, where this machine has no loopback of IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"needs IPv6: this machine cannot listen at ::1: {error}")
