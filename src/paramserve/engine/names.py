"""Names on one machine: what a process publishes for others of the same user.

A name is a file in a folder that only this user can enter. The publisher holds a lock on it, which
the kernel releases when the process ends, however it does: a file without the lock is left over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from paramserve.errors import NameTaken, ParamServeError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_name(name: str) -> str:
    """The name, if it is one. Raises `ValueError`."""
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise ValueError(
            f"a cluster's name has 1 to 100 letters, digits and . _ - and begins with a letter or "
            f"digit, not {name!r}"
        )
    return name


def publish(name: str, data: bytes) -> Callable[[], None]:
    """Publish under a name while this process lives; see `Engine.publish`."""
    path = _folder() / check_name(name)
    fd = _locked(path)
    if fd is None:
        raise NameTaken(
            f"a living cluster of this user is named {name!r}",
            fix=f"choose another name, or join that one with ps.attach({name!r})",
        )
    os.ftruncate(fd, 0)
    os.pwrite(fd, data, 0)
    owner = os.getpid()
    withdrawn = False

    def withdraw() -> None:
        nonlocal withdrawn
        if not withdrawn and os.getpid() == owner:
            withdrawn = True
            os.ftruncate(fd, 0)  # A process that opened it before the next line finds it empty.
            if _is_at(path, fd):  # else it was tidied away, and the name may be another's by now
                path.unlink(missing_ok=True)
            os.close(fd)

    return withdraw


def _locked(path: Path) -> int | None:
    """The file, open and locked; None: another process has the lock."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, fd):
                return fd
        except BlockingIOError:
            if _is_owned(fd):
                os.close(fd)
                return None
        os.close(fd)  # Its publisher removed it between the two calls, or a reader has locked it.


def _is_at(path: Path, fd: int) -> bool:
    """Whether this open file is the one at the path."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_ino == os.fstat(fd).st_ino
    return False


def _is_owned(fd: int) -> bool:
    """Whether a publisher has its lock; readers share one for a moment."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def find(name: str) -> bytes | None:
    """What a living process has published; see `Engine.find`."""
    try:
        fd = os.open(_folder() / check_name(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        if not _is_owned(fd):
            return None
        data = file.read()
        return data if data else None


def _folder() -> Path:
    """The folder of this user's names, made if need be.

    Raises:
        ParamServeError: it belongs to another user, or others may enter it.
    """
    folder = Path(tempfile.gettempdir()) / f"paramserve-names-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ParamServeError(
            f"{folder} is not a folder of this user alone", fix="look who made it, and remove it"
        )
    return folder
