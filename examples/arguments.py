"""Kinds of numbers for the examples' command lines."""

from __future__ import annotations

from argparse import ArgumentTypeError


def count(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def counts(text: str) -> list[int]:
    """Several of them, as in "1,2,4"."""
    return [count(part) for part in text.split(",")]
