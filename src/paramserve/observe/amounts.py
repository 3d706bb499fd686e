"""Amounts as people read them, and what of a run they are said of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from paramserve.config import is_trained

T = TypeVar("T")

UNITS = ("B", "KB", "MB", "GB", "TB")


def trained_only(groups: Mapping[str, T]) -> dict[str, T]:
    """What is of groups that steps train."""
    return {name: each for name, each in groups.items() if is_trained(name)}


def in_bytes(count: int) -> str:
    """Bytes for people, by thousands."""
    size = float(count)
    for unit in UNITS[:-1]:
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} {UNITS[-1]}"
