"""Exit statuses of the commands."""

from __future__ import annotations

FAILED = 1
WRONG_ARGUMENT = 2
"""An option or argument was wrong: starting the same command again does not help."""
TIMED_OUT = 124
"""`serve --timeout` is over; as of timeout(1)."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells count it."""


def status_of(error: BaseException) -> int:
    """Exit status of a command that ends with this error: the package raises ValueError and
    TypeError for wrong arguments only."""
    return WRONG_ARGUMENT if isinstance(error, ValueError | TypeError) else FAILED
