"""A disk in memory, which fails at a chosen call, and tells every state that a crash could leave.

Of a crash it is known only what was synced: the bytes of a file up to its last sync, the names in a
folder up to the folder's. Of what came after, any part may have reached the disk, in any order, and
a write may be torn at each multiple of 512 bytes. A rename is in its folder as a whole or not.
Source: Pillai et al., All File Systems Are Not Created Equal, OSDI 2014, section 2.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

from paramserve.checkpoint.storage import Entry, File, Storage

SECTOR_BYTES = 512
"""What a disk writes whole."""
ROOT = 0
"""The number of the folder itself."""


@dataclass(frozen=True)
class Operation:
    """A change, or a sync, of one file or folder, by its number."""

    target: int
    kind: str
    """write, resize, name (of `name`, to `child` or none), rename (`old` to `name`), or sync."""
    offset: int = 0
    data: bytes = b""
    name: str = ""
    old: str = ""
    child: int | None = None


@dataclass
class Image:
    """What is on a disk: folders and files by number."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[int, bytearray] = field(default_factory=dict)

    def copy(self) -> Image:
        return Image(
            {number: dict(names) for number, names in self.folders.items()},
            {number: bytearray(data) for number, data in self.files.items()},
        )

    def apply(self, one: Operation, limit: int | None = None) -> None:
        """Carry out one operation; of a write, only the first `limit` bytes."""
        if one.kind == "name":
            names = self.folders.setdefault(one.target, {})
            if one.child is None:
                names.pop(one.name, None)
            else:
                names[one.name] = one.child
        elif one.kind == "rename":
            names = self.folders.setdefault(one.target, {})
            names.pop(one.old, None)
            assert one.child is not None
            names[one.name] = one.child
        elif one.kind == "write":
            data = self.files.setdefault(one.target, bytearray())
            part = one.data if limit is None else one.data[:limit]
            data.extend(bytes(max(0, one.offset + len(part) - len(data))))
            data[one.offset : one.offset + len(part)] = part
        elif one.kind == "resize":
            data = self.files.setdefault(one.target, bytearray())
            data.extend(bytes(max(0, one.offset - len(data))))
            del data[one.offset :]


Fail = Callable[[int, str], OSError | None]
"""Asked at each call, with its number and the method's name: the error that it raises; or None. An
`OSError` without a number: a read or write takes half of its bytes, other calls work."""


class Disk(Storage):
    """A folder in memory.

    Args:
        image: what is there at first, safely; nothing if None.
        fail: which calls fail.

    Attributes:
        now: what its user sees.
        log: all changes and syncs, in order.
        calls: made so far.
        locked: numbers of files that are held.
    """

    where = "a disk in memory"

    def __init__(
        self, image: Image | None = None, fail: Fail = lambda number, method: None
    ) -> None:
        self._first = image.copy() if image is not None else Image()
        self.now = self._first.copy()
        used = max([ROOT, *self.now.folders, *self.now.files])
        self._numbers = count(used + 1)
        self.locked = set[int]()
        self.log: list[Operation] = []
        self.fail = fail
        self.calls = 0

    def do(self, one: Operation) -> None:
        """Carry out an operation and note it."""
        self.log.append(one)
        self.now.apply(one)

    def asked(self, method: str, length: int = 0) -> int:
        """Count a call, and fail it if it is to fail; how many bytes it may take."""
        self.calls += 1
        failed = self.fail(self.calls, method)
        if failed is None:
            return length
        if failed.errno is None:
            return -(-length // 2)
        raise failed

    # --- Storage ---------------------------------------------------------------------------------

    def _folder(self, path: str) -> int:
        number = ROOT
        for name in path.split("/") if path else ():
            number = self.now.folders[number].get(name, -1)
            if number not in self.now.folders:
                raise _error(errno.ENOENT)
        return number

    def _at(self, path: str) -> tuple[int, str, int | None]:
        above, _, name = path.rpartition("/")
        folder = self._folder(above)
        return folder, name, self.now.folders[folder].get(name)

    def make(self) -> None:
        """It is there."""

    def make_folder(self, path: str) -> bool:
        self.asked("make_folder")
        folder, name, there = self._at(path)
        if there is not None:
            return False
        made = next(self._numbers)
        self.now.folders[made], self._first.folders[made] = {}, {}
        self.do(Operation(folder, "name", name=name, child=made))
        return True

    def entries(self, path: str) -> list[Entry]:
        self.asked("entries")
        names = self.now.folders[self._folder(path)]
        return sorted(Entry(name, number in self.now.folders) for name, number in names.items())

    def open(self, path: str, write: bool = False) -> File:
        self.asked("open")
        folder, name, number = self._at(path)
        if number is None:
            if not write:
                raise _error(errno.ENOENT)
            number = next(self._numbers)
            self.now.files[number] = bytearray()
            self._first.files[number] = bytearray()
            self.do(Operation(folder, "name", name=name, child=number))
        return _DiskFile(self, number)

    def rename(self, old: str, new: str) -> None:
        self.asked("rename")
        folder, name, child = self._at(old)
        if child is None:
            raise _error(errno.ENOENT)
        self.do(Operation(folder, "rename", name=new.rpartition("/")[2], old=name, child=child))

    def remove(self, path: str) -> None:
        self.asked("remove")
        folder, name, there = self._at(path)
        if there is None:
            raise _error(errno.ENOENT)
        self.do(Operation(folder, "name", name=name))

    def remove_folder(self, path: str) -> None:
        self.asked("remove_folder")
        folder, name, there = self._at(path)
        if there is None or self.now.folders[there]:
            raise _error(errno.ENOTEMPTY)
        self.do(Operation(folder, "name", name=name))

    def sync_folder(self, path: str) -> None:
        self.asked("sync_folder")
        self.do(Operation(self._folder(path), "sync"))

    # --- crashes ---------------------------------------------------------------------------------

    def crashed(self, done: int, kept: Mapping[int, int | None]) -> Image:
        """What a crash leaves after the first `done` operations.

        Args:
            kept: which of those that were not synced had reached the disk (`unsynced`); of a write,
                how many of its bytes, None: all.
        """
        image, open_ones = self._first.copy(), set(self.unsynced(done))
        for i, one in enumerate(self.log[:done]):
            if i not in open_ones:
                image.apply(one)
            elif i in kept:
                image.apply(one, kept[i])
        return image

    def unsynced(self, done: int) -> list[int]:
        """Changes of the first `done` operations that a crash may lose."""
        synced = dict[int, int]()
        for i, one in enumerate(self.log[:done]):
            if one.kind == "sync":
                synced[one.target] = i
        return [
            i
            for i, one in enumerate(self.log[:done])
            if one.kind != "sync" and synced.get(one.target, -1) < i
        ]

    def crashes(self, since: int = 0, each: int = 8, seed: int = 0) -> Iterator[tuple[int, Image]]:
        """States that a crash could leave, and how many operations were done before it.

        For every prefix of the operations from `since` on: with all that was not synced, with
        nothing of it, with its last change torn, and with `each` random choices of it, torn too.
        """
        chosen = random.Random(seed)
        for done in range(since, len(self.log) + 1):
            loose = self.unsynced(done)
            yield done, self.crashed(done, {})
            if not loose:
                continue
            yield done, self.crashed(done, dict.fromkeys(loose))
            last = self.log[loose[-1]]
            for cut in range(SECTOR_BYTES, len(last.data), SECTOR_BYTES):
                yield done, self.crashed(done, {**dict.fromkeys(loose), loose[-1]: cut})
            for _ in range(each):
                part = [i for i in loose if chosen.random() < 0.5]
                yield done, self.crashed(done, {i: self._torn(i, chosen) for i in part})

    def _torn(self, i: int, chosen: random.Random) -> int | None:
        sectors = len(self.log[i].data) // SECTOR_BYTES
        return chosen.randrange(sectors + 1) * SECTOR_BYTES if chosen.random() < 0.5 else None


class _DiskFile(File):
    def __init__(self, disk: Disk, number: int) -> None:
        self._disk = disk
        self._number = number
        self._holds = False

    @property
    def _data(self) -> bytearray:
        return self._disk.now.files[self._number]

    def read(self, offset: int, into: memoryview) -> int:
        length = self._disk.asked("read", min(len(into), max(0, len(self._data) - offset)))
        into[:length] = self._data[offset : offset + length]
        return length

    def write(self, offset: int, data: memoryview) -> int:
        length = self._disk.asked("write", len(data))
        self._disk.do(Operation(self._number, "write", offset, bytes(data[:length])))
        return length

    def resize(self, size: int) -> None:
        self._disk.asked("resize")
        self._disk.do(Operation(self._number, "resize", size))

    def size(self) -> int:
        self._disk.asked("size")
        return len(self._data)

    def sync(self) -> None:
        self._disk.asked("sync")
        self._disk.do(Operation(self._number, "sync"))

    def lock(self) -> bool:
        self._disk.asked("lock")
        self._holds = self._number not in self._disk.locked
        self._disk.locked.add(self._number)
        return self._holds

    def keep_apart(self, start: int, stop: int) -> None:
        """A write changes no other bytes here."""

    def identity(self) -> tuple[int, int]:
        return 0, self._number

    def close(self) -> None:
        if self._holds:
            self._disk.locked.discard(self._number)


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
