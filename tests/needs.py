"""Packages that an installation may do without: the tests that need one are skipped, and say so."""

from __future__ import annotations

from typing import Any

import pytest

EXTRAS = {
    "expecttest": "dev",
    "hatchling": "dev",
    "pandas": "train",
    "pyarrow": "arrow",
    "pyarrow.parquet": "arrow",
    "ray": "ray",
    "ray.train": "train",
    "safetensors": "dev",
    "tests.whole_objects": "fsspec",
    "torch": "torch",
    "trustme": "tls",
}


def needs(module: str) -> Any:
    """The module; without it the test is skipped, with what to install."""
    extra = EXTRAS[module]
    return pytest.importorskip(module, reason=f"needs {module}: pip install 'paramserve[{extra}]'")
