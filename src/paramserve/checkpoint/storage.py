"""The storage under checkpoints: one folder, and the few calls that are made on it.

Calls are as small as the operating system's: a write may take fewer bytes than it was given, what
was not synced may be lost in a crash, and so may the name of a file whose folder was not synced.
What follows from that is the caller's business, so that a test's storage can play all of it.
Paths are relative to the folder, with "/" between names.
"""

from __future__ import annotations

import errno
import fcntl
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import ClassVar, NamedTuple

from paramserve.errors import CheckpointError

Buffer = bytes | bytearray | memoryview

READ_MAX = 256 << 20
"""Most bytes of a file that is read whole: manifests and control state."""
FULL = (errno.ENOSPC, errno.EDQUOT)
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


class Entry(NamedTuple):
    """A name in a folder."""

    name: str
    is_folder: bool
    """A link to one is none."""


class StoreFailed(OSError):
    """A remote store did not do what it was asked; it says nothing of what is stored there."""


class File(ABC):
    """An open file."""

    sent = 0
    """Bytes that `finish` has passed on so far; to be asked for in any thread."""

    @abstractmethod
    def read(self, offset: int, into: memoryview) -> int:
        """Read at an offset; how many bytes came, 0 at the end."""

    @abstractmethod
    def write(self, offset: int, data: memoryview) -> int:
        """Write at an offset; how many bytes were taken."""

    @abstractmethod
    def resize(self, size: int) -> None:
        """Cut the file off, or let it end in zeros."""

    @abstractmethod
    def size(self) -> int:
        """Bytes."""

    @abstractmethod
    def sync(self) -> None:
        """Make what was written last through a crash. After an error nothing is known of it."""

    def finish(self, size: int) -> None:
        """Sync a new file after its last write.

        Args:
            size: of the file, once all its writers are done.
        """
        self.sync()

    @abstractmethod
    def lock(self) -> bool:
        """Hold the file until it is closed or the process ends; False: another one holds it."""

    @abstractmethod
    def keep_apart(self, start: int, stop: int) -> None:
        """See that writes to these bytes leave those beside them alone, which other machines may
        write to at the same time; until the file is closed. Raises `OSError`: it cannot be."""

    @abstractmethod
    def identity(self) -> tuple[int, int]:
        """What tells it from a file that has taken its place, as long as it is open."""

    @abstractmethod
    def close(self) -> None: ...


class Storage(ABC):
    """A folder. Every call may raise `OSError`."""

    where: str
    """Path or URL, for errors."""
    locks: ClassVar[bool] = True
    """Whether a file can be locked."""
    shared: ClassVar[str] = "name a folder that driver and servers all see under this path"
    """What to do where a process does not find the folder."""

    @abstractmethod
    def make(self) -> None:
        """Make the folder itself, and those above it, so that they last through a crash."""

    @abstractmethod
    def make_folder(self, path: str) -> bool:
        """Make a folder in one that is there; False: it is there already."""

    @abstractmethod
    def entries(self, path: str) -> list[Entry]:
        """What is in a folder, by name."""

    @abstractmethod
    def open(self, path: str, write: bool = False) -> File:
        """Open a file; to write, it is made if it is missing, and otherwise left as it is. A link
        to a file is read, and never written to."""

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Give a file another name in its folder, at once; what had that name is gone."""

    @abstractmethod
    def remove(self, path: str) -> None: ...

    @abstractmethod
    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""

    @abstractmethod
    def sync_folder(self, path: str) -> None:
        """Make the names in a folder last through a crash."""

    def get(self, path: str) -> bytes:
        """All of a small file, of at most `READ_MAX` bytes."""
        with closing(self.open(path)) as file:
            size = file.size()
            check_small(size)
            data = bytearray(size)
            return bytes(data[: read_fully(file, 0, memoryview(data))])

    def put(self, path: str, data: bytes) -> None:
        """Write a small file and sync it; its folder is the caller's business."""
        with closing(self.open(path, write=True)) as file:
            write_fully(file, 0, data)
            file.resize(len(data))
            file.sync()

    def replace(self, path: str, data: bytes) -> None:
        """Let a small file in the folder itself have these bytes, so that it lasts: after a crash
        it is as before, or is this one."""
        beside = f".{path}.part"
        self.put(beside, data)
        self.rename(beside, path)
        self.sync_folder("")


class LocalFile(File):
    """A file of this machine, or of a network file system that it has mounted."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, offset: int, into: memoryview) -> int:
        # All of it at once: several threads read this file, and the kernel's own reading ahead
        # follows one reader. macOS has no such call.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, len(into), os.POSIX_FADV_WILLNEED)
        return os.preadv(self._fd, [into], offset)

    def write(self, offset: int, data: memoryview) -> int:
        return os.pwrite(self._fd, data, offset)

    def resize(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def sync(self) -> None:
        os.fsync(self._fd)

    def lock(self) -> bool:
        try:
            with _locking():
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def keep_apart(self, start: int, stop: int) -> None:
        """Lock these bytes, and no others.

        The client of a network file system writes whole pages: where two machines write to one
        page, the second overwrites what the first wrote with what it had read before. Where a
        process has a lock of some bytes, the client of NFS sends those that were written and no
        more (Linux, nfs_can_extend_write), and so MPI-IO does it there. File systems that keep the
        pages of all machines alike lose nothing.

        A process loses all its locks of a file when it closes it, however often it has it open: a
        process has one server, which opens each file once until it is synced. Nothing waits, since
        no byte is of two servers.
        """
        if start < stop:
            with _locking():
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, stop - start, start)

    def identity(self) -> tuple[int, int]:
        status = os.fstat(self._fd)
        return status.st_dev, status.st_ino

    def close(self) -> None:
        os.close(self._fd)


@contextmanager
def _locking() -> Iterator[None]:
    """Give one number to what file systems say that have no locks."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise OSError(errno.ENOLCK, "its file system has no locks of files") from error


class LocalFolder(Storage):
    """A folder of this machine, or of a network file system that it has mounted."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(root).absolute()
        self.where = str(self._root)

    def make(self) -> None:
        missing = [each for each in (self._root, *self._root.parents) if not each.exists()]
        self._root.mkdir(parents=True, exist_ok=True)
        for each in reversed(missing):
            _sync_folder(each.parent)

    def make_folder(self, path: str) -> bool:
        try:
            os.mkdir(self._root / path)
        except FileExistsError:
            return False
        return True

    def entries(self, path: str) -> list[Entry]:
        with os.scandir(self._root / path) as entries:
            return sorted(Entry(each.name, each.is_dir(follow_symlinks=False)) for each in entries)

    def open(self, path: str, write: bool = False) -> File:
        # A pipe in a file's place is read as an empty file, and not waited for.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW if write else os.O_RDONLY | os.O_NONBLOCK
        return LocalFile(os.open(self._root / path, flags, 0o666))

    def rename(self, old: str, new: str) -> None:
        os.rename(self._root / old, self._root / new)

    def remove(self, path: str) -> None:
        os.unlink(self._root / path)

    def remove_folder(self, path: str) -> None:
        os.rmdir(self._root / path)

    def sync_folder(self, path: str) -> None:
        _sync_folder(self._root / path)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_fully(file: File, offset: int, data: Buffer) -> None:
    """Write all of it, in as many calls as that takes."""
    rest = memoryview(data).cast("B")
    while rest:
        count = file.write(offset, rest)
        if count <= 0:
            raise OSError(errno.EIO, "a write took no byte")
        offset, rest = offset + count, rest[count:]


def read_fully(file: File, offset: int, into: memoryview) -> int:
    """Read until the buffer is full or the file ends; how many bytes came."""
    done = 0
    while done < len(into):
        count = file.read(offset + done, into[done:])
        if count == 0:
            break
        done += count
    return done


def check_small(size: int) -> None:
    """Raise `OSError` if a file is too large to be read whole."""
    if size > READ_MAX:
        raise OSError(errno.EFBIG, f"{size} bytes, of at most {READ_MAX}")


@contextmanager
def telling(storage: Storage, what: str) -> Iterator[None]:
    """Turn an `OSError` into a `CheckpointError` that says what was not done, where and why."""
    try:
        yield
    except OSError as error:
        fix = f"look at the storage of {storage.where}"
        if error.errno in FULL:
            fix = f"make room where {storage.where} is, or keep fewer checkpoints"
        elif error.errno in NOT_ALLOWED:
            fix = f"let this user write to {storage.where}, or name another folder"
        elif error.errno == errno.ENOLCK:
            fix = (
                "mount it with locks, on every machine, or name a folder whose file system has them"
            )
        elif error.errno == errno.ELOOP:
            fix = "put a file in place of the link, or name another folder"
        elif error.errno == errno.ENOENT:
            fix = storage.shared
        reason = error.strerror or str(error)
        raise CheckpointError(f"{what}, in {storage.where}: {reason}", fix=fix) from error


def not_reached(storage: Storage, error: StoreFailed) -> CheckpointError:
    """The error of who reads there: it is no damage, and the checkpoint before is no better."""
    return CheckpointError(
        f"checkpoints in {storage.where} cannot be read: {error.strerror}",
        fix="try again when the store can be reached",
    )
