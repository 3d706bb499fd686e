"""What is made of files that are replaced while a process runs: certificates, keys, tokens."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from paramserve.errors import ParamServeError
from paramserve.logs import event

logger = logging.getLogger("paramserve")

T = TypeVar("T")
LOOK_S: Final = 1.0
"""Seconds between two looks whether the files are others."""
Stamp = tuple[tuple[int, ...] | None, ...]


class Renewed(Generic[T]):
    """A value made of files, made anew when they have changed. Files that cannot be used are told
    once, and the value stays as it was. Nothing of what they hold is told.

    Args:
        what: they are, for the log.
        paths: of the files; one that is a symbolic link may be changed to point elsewhere.
        make: reads them.
        first: what was made of them before; None: it is made now.
        now: a clock, in seconds.
    Raises:
        ParamServeError: as `make`, if there is no first value.
    """

    def __init__(
        self,
        what: str,
        paths: Sequence[str],
        make: Callable[[], T],
        *,
        first: T | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._paths, self._make, self._now = what, tuple(paths), make, now
        self._stamp: Stamp | None = None
        """Stamp of the files that were tried last, whether or not they could be used."""
        self._looked_at = -LOOK_S
        if first is not None:
            self._value = first
            return
        self._looked_at, self._stamp = now(), _stamp(self._paths)
        self._value = make()

    def get(self) -> T:
        """The value; the files are looked at, at most once in `LOOK_S`."""
        now = self._now()
        if now - self._looked_at < LOOK_S:
            return self._value
        self._looked_at = now
        # Taken before they are read: files that change meanwhile are read again.
        stamp = _stamp(self._paths)
        if stamp == self._stamp:
            return self._value
        self._stamp = stamp
        places = ", ".join(self._paths)
        try:
            value = self._make()
        except ParamServeError as error:
            extra = event("credentials-refused", files=list(self._paths))
            text = "%s cannot be renewed, and what was read before stays in use: %s. To fix: %s"
            logger.warning(text, self._what, error.failed, error.fix, extra=extra)
            return self._value
        if value != self._value:
            extra = event("credentials-renewed", files=list(self._paths))
            logger.info("%s was renewed: %s", self._what, places, extra=extra)
        self._value = value
        return value


def _stamp(paths: Sequence[str]) -> Stamp:
    """What tells that files were replaced or written; None for one that is not there."""
    stamps: list[tuple[int, ...] | None] = []
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            stamps.append(None)
        else:
            stamps.append((status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns))
    return tuple(stamps)
