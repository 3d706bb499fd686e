"""Lines on standard error that tell of a run."""

from __future__ import annotations

import contextlib
import sys


def say(words: str) -> None:
    """Write a line, in one piece: a line of progress may be there."""
    with contextlib.suppress(OSError):  # the terminal is lost, the run is not
        print(f"paramserve: {words}\n", end="", file=sys.stderr, flush=True)
