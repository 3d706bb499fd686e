"""Servers of several machines write ranges of one file, on file systems that write whole pages."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.suites import each_case
from tests.unit.checkpoint import sample

from paramserve.checkpoint import storage
from paramserve.checkpoint.folder import Folder, answer_probe
from paramserve.checkpoint.manifest import values_path
from paramserve.checkpoint.storage import LocalFile, LocalFolder
from paramserve.checkpoint.tensors import dense
from paramserve.errors import CheckpointError

LOCKS = """
import fcntl, sys
for line in sys.stdin:
    path, start, length = line.split()
    with open(path, "r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, int(length), int(start))
            print("free", flush=True)
        except BlockingIOError:
            print("held", flush=True)
"""

IsHeld = Callable[[Path, int, int], bool]


@pytest.fixture
def is_held() -> Iterator[IsHeld]:
    """Ask another process whether one holds some bytes of a file."""
    with subprocess.Popen(
        [sys.executable, "-c", LOCKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:

        def ask(path: Path, start: int, length: int) -> bool:
            assert other.stdin is not None
            assert other.stdout is not None
            print(path, start, length, file=other.stdin, flush=True)
            return other.stdout.readline() == "held\n"

        yield ask


@pytest.mark.parametrize("shard", [0, 1])
def test_a_server_holds_its_bytes_from_the_first_write_to_the_last_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_held: IsHeld, shard: int
) -> None:
    folder = LocalFolder(tmp_path)
    folder.make_folder("step-1")
    path = tmp_path / "step-1" / values_path("model")
    specs = sample.blocks(sample.SERVERS)[:2]
    whole = dense(specs)
    mine, others = list[tuple[int, int]](), list[tuple[int, int]]()
    for spec in specs:
        first = whole.tensors[spec.pieces[0].name]
        for k, ranges in ((shard, mine), (1 - shard, others)):
            low, high = (
                first.offset + cut * first.carrier.itemsize for cut in spec.cuts[k : k + 2]
            )
            ranges.append((low, high - low))
    (mine if shard == 0 else others).append((0, len(whole.header)))
    seen = list[str]()

    def look(file: LocalFile, what: str) -> None:
        if path.exists() and os.path.samestat(os.fstat(file._fd), path.stat()):
            assert all(is_held(path, *each) for each in mine)
            assert not any(is_held(path, *each) for each in others)
            seen.append(what)

    write, sync = LocalFile.write, LocalFile.sync

    def looking_write(self: LocalFile, offset: int, data: memoryview) -> int:
        look(self, "write")
        return write(self, offset, data)

    def looking_sync(self: LocalFile) -> None:
        sync(self)
        look(self, "sync")

    monkeypatch.setattr(LocalFile, "write", looking_write)
    monkeypatch.setattr(LocalFile, "sync", looking_sync)
    sample.write_server(folder, "step-1", 1, shard, full=True)
    assert set(seen[:-1]) == {"write"}
    assert seen[-1] == "sync"
    assert not is_held(path, 0, whole.size)


@each_case("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    folder = LocalFolder(tmp_path)
    with Folder(folder).claimed("run") as mine:
        mine.begin(1)
        mine.begin_probe("7f3a")

    def refuses(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(storage.fcntl, "lockf", refuses)
    why = "its file system has no locks of files.*mount it with locks, on every machine"
    with pytest.raises(CheckpointError, match=f"values/model.*{why}"):
        sample.write_server(folder, "step-1", 1, 0, full=True)
    with pytest.raises(CheckpointError, match=f"server 1 .* cannot write checkpoints.*{why}"):
        answer_probe(folder, "7f3a", 1)
    monkeypatch.setattr(storage.fcntl, "flock", refuses)
    with pytest.raises(CheckpointError, match=why), Folder(folder).claimed("run"):
        pass


def test_one_server_needs_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.fcntl, "lockf", None)
    folder = LocalFolder(tmp_path)
    folder.make_folder("step-1")
    monkeypatch.setattr(sample, "SERVERS", 1)
    sample.write_server(folder, "step-1", 1, 0, full=True)
    assert fcntl.lockf is None
