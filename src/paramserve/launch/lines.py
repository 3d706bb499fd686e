"""Lines on standard error that tell of a run."""

from __future__ import annotations

import sys


def say(words: str) -> None:
    """Write a line, in one piece: a line of progress may be there."""
    print(f"paramserve: {words}\n", end="", file=sys.stderr, flush=True)
