"""Which folders have compiled kernels: these are read where no other user could write them, and
kept in the first such folder that this process can write to.

What lies there is unpickled and executed. So a folder or file is refused that belongs to another
user than this one, root and the owner of this package, or that others may write to.

Does not import Numba: the driver and `paramserve doctor` ask as well.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

VARIABLE = "NUMBA_CACHE_DIR"
"""Names a folder that is tried before all others."""
PACKAGE = Path(__file__).parent


class Choice(NamedTuple):
    """Where kernels are kept.

    Attributes:
        folder: what is compiled is kept here; None: nowhere, so each process compiles for itself.
        refused: why folders that come before it are not written to.
        trusted: what was compiled is looked for in these, in order: `folder` is one of them, and
            the others may be those of an image, which only its builder could write to.
    """

    folder: Path | None
    refused: tuple[str, ...]
    trusted: tuple[Path, ...] = ()


@cache
def choose() -> Choice:
    """The folders for this package's kernels. The one to write to is made, and those before it."""
    writable: Path | None = None
    refused, trusted = list[str](), list[Path]()
    for folder in _candidates():
        why = _make(folder) if writable is None else ""
        why = why or _why_untrusted(folder)
        if not why:
            trusted.append(folder)
            why = "" if os.access(folder, os.W_OK | os.X_OK) else "cannot be written to"
        if writable is None:
            if why:
                refused.append(f"{folder}: {why}")
            else:
                writable = folder
    return Choice(writable, tuple(refused), tuple(trusted))


def _candidates() -> Iterator[Path]:
    # One for each user: two who share a base do not trust each other.
    digest = sha256(os.fsencode(PACKAGE)).hexdigest()[:16]
    name = f"{PACKAGE.name}-{digest}-{os.geteuid()}"
    if base := os.environ.get(VARIABLE):
        yield Path(base).absolute() / name
    yield PACKAGE / "__pycache__"
    home = os.path.expanduser("~")
    user_wide = os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    if os.path.isabs(user_wide):
        yield Path(user_wide) / "numba" / name


def _make(folder: Path) -> str:
    """Make a folder unless it is there; why that failed, or nothing."""
    try:
        os.makedirs(folder.parent, exist_ok=True)
        if not folder.is_dir():
            folder.mkdir(mode=0o755, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _why_untrusted(folder: Path) -> str:
    """Why nothing may be read from a folder, or nothing."""
    try:
        status = folder.lstat()
    except OSError as error:
        return error.strerror or str(error)
    return distrust(status) if stat.S_ISDIR(status.st_mode) else "is no folder"


def distrust(status: os.stat_result) -> str:
    """Why a file or folder must not be believed, or nothing."""
    package = os.stat(PACKAGE)
    if status.st_uid not in (os.geteuid(), 0, package.st_uid):
        return f"belongs to user {status.st_uid}"
    if status.st_mode & stat.S_IWOTH:
        return "others may write to it"
    # A group that may write to the package may change the code itself.
    same_group = status.st_gid == package.st_gid and package.st_mode & stat.S_IWGRP
    if status.st_mode & stat.S_IWGRP and not same_group:
        return f"group {status.st_gid} may write to it"
    return ""


def read(file: Path) -> bytes | None:
    """What a file of such a folder has; None: it is not there, or must not be believed."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(fd, "rb") as opened:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or distrust(status):
            return None
        try:
            return opened.read()
        except OSError:
            return None
