"""A folder in a store of whole objects (S3, GCS, Azure and others), by way of fsspec.

Such a store has no ranges of a file that several processes write, no rename, no sync and no lock.
In their place:

- A file is collected on this machine's disk, and sent as one object when it is finished. Of a file
  that several processes write, each sends an object for every range that it has, named as the file
  with ".at-" and the range's first byte. Laid end to end in the order of their names they are the
  file, and this module shows them as one.
- An object is there as a whole or not at all, and stays: so the manifest is put under its name
  at once, after all the others have been.
- The process that holds the folder says so again and again (`claims`).

A listing has to show what was put before it, as those of the three stores above do.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, NamedTuple

from paramserve.checkpoint.storage import (
    FULL,
    Entry,
    File,
    Storage,
    StoreFailed,
    check_small,
)
from paramserve.errors import shown

logger = logging.getLogger("paramserve")

SENT_BYTES = 8 << 20
"""Handed to the store's own buffers at once."""
PIECE = re.compile(r"(.+)\.at-(\d{15})")
"""An object with a range of a file."""


class _Object(NamedTuple):
    """An object with a range of a file, or all of it."""

    name: str
    offset: int
    nbytes: int


class ObjectStore(Storage):
    """A folder in a store of whole objects.

    Args:
        url: of the folder, with its protocol.
        filesystem: of fsspec, that reaches it.
        root: the folder's path in it.
    """

    locks: ClassVar[bool] = False
    shared: ClassVar[str] = (
        "name a bucket that is there, and give every server the settings and the rights to read "
        "and write it"
    )

    def __init__(self, url: str, filesystem: Any, root: str) -> None:
        self.where = shown(url)
        self.filesystem = filesystem
        self._root = root.rstrip("/")
        self._listed = dict[str, dict[str, list[_Object]]]()
        """Objects of each file, by folder, as they were seen last."""
        self._folders = set[str]()

    def full(self, path: str) -> str:
        """A path as the file system takes it."""
        return f"{self._root}/{path}".rstrip("/")

    # --- folders ---------------------------------------------------------------------------------

    def make(self) -> None:
        """Make the folder where the file system has any; never the first of its names, a bucket."""
        names = self._root.split("/")
        for depth in range(2 + (not names[0]), len(names) + 1):
            self._mkdir("/".join(names[:depth]))

    def _mkdir(self, full: str) -> bool:
        """Make a folder where the file system has any; False: it is there already.

        Why it cannot be made each file system says in its own way, and some do where there is
        nothing to make: what is put there tells.
        """
        try:
            self.filesystem.mkdir(full, create_parents=False)
        except FileExistsError:
            return False
        except Exception as error:
            logger.debug("no folder %s was made: %s", shown(full), shown(str(error)))
        return True

    def make_folder(self, path: str) -> bool:
        new = path not in self._folders and not self.entries(path)
        self._folders.add(path)
        return self._mkdir(self.full(path)) and new

    def entries(self, path: str) -> list[Entry]:
        folders, files = self._list(path)
        entries = [Entry(name, True) for name in folders]
        return sorted([*entries, *(Entry(name, False) for name in files)])

    def remove_folder(self, path: str) -> None:
        with suppress(Exception):  # most stores have no folders, and each says so in its own way
            self.filesystem.rmdir(self.full(path))

    def sync_folder(self, path: str) -> None:
        """An object lasts once it is there."""

    def _list(self, path: str) -> tuple[list[str], dict[str, list[_Object]]]:
        """The folders in a folder, and its files, each with its objects in order."""
        folders, files, full = list[str](), dict[str, list[_Object]](), self.full(path)
        with asking():
            self.filesystem.invalidate_cache()
            try:
                listing = self.filesystem.ls(full, detail=True)
            except FileNotFoundError:  # nothing is in it
                listing = []
        for each in listing:
            whole = each["name"].rstrip("/")
            name = whole.rpartition("/")[2]
            if whole.strip("/") == full.strip("/") or not name:
                continue  # the folder's own name, as an object
            if each["type"] == "directory":
                folders.append(name)
            else:
                piece = PIECE.fullmatch(name)
                file, offset = (piece[1], int(piece[2])) if piece else (name, 0)
                inner = f"{path}/{name}".lstrip("/")
                files.setdefault(file, []).append(_Object(inner, offset, each["size"]))
        for objects in files.values():
            objects.sort(key=lambda each: (each.offset, each.name))
        self._listed[path] = files
        return folders, files

    def _objects(self, path: str) -> list[_Object]:
        """The objects of a file. Raises `FileNotFoundError`: it has none."""
        folder, _, name = path.rpartition("/")
        objects = self._listed.get(folder, {}).get(name) or self._list(folder)[1].get(name)
        if not objects:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return objects

    def changed(self, path: str) -> None:
        """An object was put or removed: what is known of its folder holds no more."""
        self._listed.pop(path.rpartition("/")[0], None)

    # --- files -----------------------------------------------------------------------------------

    def open(self, path: str, write: bool = False) -> File:
        return _Staged(self, path) if write else _Stored(self, self._objects(path))

    def get(self, path: str) -> bytes:
        with asking():
            data: bytes = self.filesystem.cat_file(self.full(path))
        check_small(len(data))
        return data

    def put(self, path: str, data: bytes) -> None:
        with asking():
            self.filesystem.pipe_file(self.full(path), data)
        self.changed(path)

    def replace(self, path: str, data: bytes) -> None:
        self.put(path, data)

    def rename(self, old: str, new: str) -> None:
        raise _cannot()

    def remove(self, path: str) -> None:
        objects = self._objects(path)
        self.changed(path)
        for each in objects:
            with asking():
                try:
                    self.filesystem.rm_file(self.full(each.name))
                except NotImplementedError:  # some only have the call that takes patterns
                    self.filesystem.rm(self.full(each.name))


class _ObjectFile(File):
    """What files of a store have in common: what they cannot do."""

    def read(self, offset: int, into: memoryview) -> int:
        raise _cannot()

    def write(self, offset: int, data: memoryview) -> int:
        raise _cannot()

    def resize(self, size: int) -> None:
        raise _cannot()

    def size(self) -> int:
        raise _cannot()

    def sync(self) -> None:
        raise _cannot()

    def lock(self) -> bool:
        raise _cannot()

    def keep_apart(self, start: int, stop: int) -> None:
        """What this process writes becomes objects of its own."""

    def identity(self) -> tuple[int, int]:
        raise _cannot()

    def close(self) -> None:
        """There is nothing to close."""


class _Stored(_ObjectFile):
    """A file that is read."""

    def __init__(self, store: ObjectStore, objects: list[_Object]) -> None:
        self._store = store
        self._objects = objects

    def size(self) -> int:
        return sum(each.nbytes for each in self._objects)

    def read(self, offset: int, into: memoryview) -> int:
        for each in self._objects:
            start = offset - each.offset
            length = min(len(into), each.nbytes - start)
            if start >= 0 and length > 0:
                with asking():
                    full = self._store.full(each.name)
                    content = self._store.filesystem.cat_file(full, start=start, end=start + length)
                into[: len(content)] = content
                return len(content)
        return 0


class _Staged(_ObjectFile):
    """A file that is written: on this machine's disk, until it is finished."""

    def __init__(self, store: ObjectStore, path: str) -> None:
        self._store = store
        self._path = path
        with _staging():
            self._file = tempfile.TemporaryFile(prefix="paramserve-checkpoint-")  # noqa: SIM115
        self._written: list[tuple[int, int]] = []
        """Ranges written, each from where to where."""

    def write(self, offset: int, data: memoryview) -> int:
        with _staging():
            count = os.pwrite(self._file.fileno(), data, offset)
        self._written.append((offset, offset + count))
        return count

    def sync(self) -> None:
        """Nothing of it counts before it is finished."""

    def finish(self, size: int) -> None:
        """Send it, or the ranges of it that were written here."""
        if not size:
            self._store.put(self._path, b"")
        for start, end in _together(self._written):
            whole = (start, end) == (0, size)
            self._send(self._path if whole else f"{self._path}.at-{start:015d}", start, end)
        self._store.changed(self._path)

    def _send(self, name: str, start: int, end: int) -> None:
        with asking(), self._store.filesystem.open(self._store.full(name), "wb") as out:
            while start < end:
                with _staging():
                    data = os.pread(self._file.fileno(), min(SENT_BYTES, end - start), start)
                out.write(data)
                start += len(data)
                self.sent += len(data)

    def close(self) -> None:
        self._file.close()


def _together(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges without those that follow one another at once."""
    merged = list[tuple[int, int]]()
    for start, end in sorted(ranges):
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, end))
    return merged


def _cannot() -> OSError:
    return OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


@contextmanager
def asking() -> Iterator[None]:
    """Turn what file systems raise, each in its own way, into errors with a number and a text.

    Raises:
        FileNotFoundError, PermissionError, StoreFailed: as the name says. OSError: it is full, or
            cannot be written to.
    """
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from None
    except PermissionError as error:
        raise PermissionError(errno.EACCES, _one_line(error)) from None
    except NotImplementedError:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS)) from None
    except Exception as error:  # those of the store's own library, too
        if isinstance(error, OSError) and error.errno in FULL:
            raise OSError(error.errno, os.strerror(error.errno)) from None
        raise StoreFailed(errno.EIO, _one_line(error)) from None


def _one_line(error: Exception) -> str:
    """The error in one line, without passwords: they may be in its URL."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    line = " ".join(shown(text).split())
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


@contextmanager
def _staging() -> Iterator[None]:
    """Say which disk an error is of."""
    try:
        yield
    except OSError as error:
        why = f"{error.strerror} in {tempfile.gettempdir()}, where files wait to be sent"
        raise StoreFailed(errno.EIO, why) from error
