"""Arenas: sealed when made, checked before they are mapped."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from weakref import ref

import numpy as np
import pytest
from tests.suites import each_case

from paramserve.config import Limits
from paramserve.errors import Overloaded, ProtocolError
from paramserve.transport.arena import RESERVED_BYTES, Arena, map_arena, new_mirror
from paramserve.transport.framing import ByteArray

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd here")

SIZE = 1 << 16
F_GET_SEALS, SEAL_SEAL, SEAL_SHRINK, SEAL_GROW = 1034, 1, 2, 4


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def passed(arena: Arena) -> int:
    """The descriptor as a server would receive it."""
    assert arena.fd is not None
    return os.dup(arena.fd)


def test_arena_is_sealed_and_allocated() -> None:
    arena = Arena.create(SIZE, 3)
    assert arena.fd is not None
    assert (arena.number, arena.nbytes, arena.memory.nbytes) == (3, SIZE, SIZE)
    assert fcntl.fcntl(arena.fd, F_GET_SEALS) == SEAL_SEAL | SEAL_SHRINK | SEAL_GROW
    assert os.fstat(arena.fd).st_blocks * 512 >= SIZE
    assert not os.get_inheritable(arena.fd)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 0)
    arena.close()


def test_mapped_arena_is_the_same_memory() -> None:
    arena = Arena.create(SIZE, 1)
    memory = map_arena(passed(arena), SIZE, SIZE)
    arena.memory[100] = 7
    assert memory[100] == 7
    memory[200] = 8
    assert arena.memory[200] == 8
    arena.close()


def test_mapping_outlives_the_client_and_leaves_no_descriptor() -> None:
    before = open_fds()
    arena = Arena.create(SIZE, 1)
    memory = map_arena(passed(arena), SIZE, SIZE)
    arena.memory[0] = 9
    arena.close()
    arena.close()
    part = memory[:10]
    del memory
    assert part[0] == 9
    del part
    assert open_fds() == before


@each_case("nbytes", [SIZE + 1, 0, -1])
def test_arena_smaller_than_said_is_refused(nbytes: int) -> None:
    arena = Arena.create(SIZE, 1)
    before = open_fds()
    with pytest.raises(ProtocolError, match="is said to have"):
        map_arena(passed(arena), nbytes, 1 << 40)
    assert open_fds() == before
    arena.close()


def test_arena_over_the_limit_is_refused_before_it_is_looked_at() -> None:
    arena = Arena.create(SIZE, 1)
    before = open_fds()
    with pytest.raises(Overloaded, match=f"{SIZE - 1} bytes are left"):
        map_arena(passed(arena), SIZE, SIZE - 1)
    assert open_fds() == before
    arena.close()


def test_unsealed_memory_is_refused() -> None:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    with pytest.raises(ProtocolError, match="not sealed against shrinking"):
        map_arena(fd, SIZE, SIZE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_pipe_in_place_of_memory_is_refused() -> None:
    reading, writing = os.pipe()
    with pytest.raises(ProtocolError, match="no memfd"):
        map_arena(reading, SIZE, SIZE)
    os.close(writing)


def test_without_memfd_the_memory_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    arena = Arena.create(SIZE, 1)
    assert arena.fd is None
    arena.memory[:] = 5
    assert int(arena.memory.sum()) == 5 * SIZE
    arena.close()


def test_no_memory_left_is_overloaded_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = open_fds()
    with pytest.raises(Overloaded, match="arena of 65536 bytes"):
        Arena.create(SIZE, 1)
    assert open_fds() == before


@each_case(("nbytes", "number"), [(0, 1), (RESERVED_BYTES - 1, 1), (SIZE, 0)])
def test_impossible_arena_is_a_value_error(nbytes: int, number: int) -> None:
    with pytest.raises(ValueError, match="an arena needs"):
        Arena.create(nbytes, number)


def test_arena_starts_at_a_page() -> None:
    arena = Arena.create(SIZE, 1)
    assert arena.memory.ctypes.data % mmap.PAGESIZE == 0
    assert arena.memory.dtype == np.uint8
    arena.close()


def test_mirror_keeps_what_stays_and_leaves_the_one_before_as_it_is() -> None:
    replaced: list[ref[ByteArray]] = []
    first = new_mirror({}, replaced, [(1, SIZE), (2, SIZE)], Limits())
    first[1][:], first[2][:] = 1, 2
    second = new_mirror(first, replaced, [(2, SIZE), (3, 64)], Limits())
    assert second.keys() == {2, 3}
    assert (int(second[2][0]), int(second[3].sum()), int(first[1][0])) == (2, 0, 1)


def test_replaced_mirrors_count_while_they_are_in_use() -> None:
    limits, replaced, mirror = Limits(arena_bytes_max=2 * SIZE), list[ref[ByteArray]](), {}
    for nbytes in (SIZE, 2 * SIZE, SIZE, 2 * SIZE):  # each before it is gone by then
        mirror = new_mirror(mirror, replaced, [(1, nbytes)], limits)
    in_use = mirror[1][:64]
    mirror = new_mirror(mirror, replaced, [(1, SIZE)], limits)
    for arenas in ([(1, SIZE)], [(1, SIZE), (2, 1)]):
        with pytest.raises(Overloaded, match="arena_bytes_max"):
            new_mirror(mirror, replaced, arenas, limits)
    del in_use
    assert new_mirror(mirror, replaced, [(1, 2 * SIZE)], limits).keys() == {1}
