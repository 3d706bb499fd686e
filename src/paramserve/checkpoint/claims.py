"""Ownership of a folder of checkpoints: the run that writes there holds `owner.json`.

Where files can be locked, the lock ends with the process that has it. A store without locks has
beats in their place: the process that holds the file counts in it again and again, and who finds it
counting no more may take it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from paramserve.checkpoint.storage import File, Storage, telling, write_fully
from paramserve.errors import CheckpointFolderTaken

logger = logging.getLogger("paramserve")

OWNER = "owner.json"
CLAIM_S = 3.0
"""How long an owner that may be ending is waited for: children of a killed driver end with it."""
CLAIM_POLL_S = 0.05
BEAT_S = 3.0
"""Seconds between two beats of an owner that has no lock."""
SILENT_S = 4 * BEAT_S
"""An owner without a beat for this long is dead."""
BEAT_POLL_S = 0.5
SETTLE_S = 1.0
"""Seconds after a claim until it is read whose it is: two runs may claim a folder at once, and the
last one has it. As long as a small object takes to be put, many times over."""
END_S = 10.0
"""Seconds that a beat under way may take at the end."""
UNUSABLE = "the folder of checkpoints cannot be used"

Check = Callable[[], None]
"""Raises `CheckpointFolderTaken` if the folder is not the run's any more: another run has taken it,
or it was removed; `OSError` if the storage failed."""


class Owner(Struct, frozen=True, omit_defaults=True):
    """The run that writes to a folder."""

    run: str
    host: str
    pid: int
    beat: int = 0
    """Counts while it lives, where there are no locks."""
    ended: bool = False
    """True: the owner ended in order; only where there are no locks."""


def owner_of(storage: Storage) -> Owner | None:
    """The run that writes there, or did last; None: none has."""
    try:
        return _read(storage)
    except OSError:
        return None


def hold(storage: Storage, run: str, *, passing: bool = False) -> AbstractContextManager[Check]:
    """Let no other run write to a folder, until the block is left or this process ends.

    Args:
        run: another process of the same run may take it over.
        passing: whose the folder was it still is afterwards.
    Raises:
        CheckpointFolderTaken: a living run holds it. CheckpointError: the storage failed.
    """
    owner = Owner(run, socket.gethostname(), os.getpid())
    method = _by_lock if storage.locks else _by_beats
    return method(storage, owner, passing)


def _read(storage: Storage) -> Owner | None:
    try:
        return msgspec.json.decode(storage.get(OWNER), type=Owner)
    except (FileNotFoundError, msgspec.MsgspecError):  # none yet, or it crashed at its first write
        return None


def _text(owner: Owner) -> bytes:
    return msgspec.json.encode(owner) + b"\n"


def _taken_error(storage: Storage, run: str, owner: Owner | None) -> CheckpointFolderTaken:
    who = f"run {owner.run!r}" if owner else "a run"
    where = f", process {owner.pid} on {owner.host}" if owner else ""
    return CheckpointFolderTaken(
        f"run {run!r} cannot write its checkpoints to {storage.where}: {who} writes there{where}",
        fix="name another folder, or end that run first",
    )


# --- locks ---------------------------------------------------------------------------------------


@contextmanager
def _by_lock(storage: Storage, owner: Owner, passing: bool) -> Iterator[Check]:
    with telling(storage, UNUSABLE):
        file = storage.open(OWNER, write=True)
    with closing(file):
        with telling(storage, UNUSABLE):
            _lock(storage, file, owner.run)
            if not passing:
                file.resize(0)
                write_fully(file, 0, _text(owner))
                file.sync()
                storage.sync_folder("")
        yield lambda: _check_locked(storage, file, owner.run)


def _check_locked(storage: Storage, file: File, run: str) -> None:
    """See that the locked file is the one in the folder: who removes the folder removes no lock,
    and another run may have made both anew."""
    try:
        with closing(storage.open(OWNER)) as now:
            if now.identity() == file.identity():
                return
    except FileNotFoundError:
        raise CheckpointFolderTaken(
            f"run {run!r} writes no more checkpoints to {storage.where}: its {OWNER} was removed, "
            "so the folder may be another run's",
            fix="start the run again, with another folder or with resume=",
        ) from None
    raise _taken_error(storage, run, owner_of(storage))


def _lock(storage: Storage, file: File, run: str) -> None:
    until = time.monotonic() + CLAIM_S
    while not file.lock():
        if time.monotonic() >= until:
            raise _taken_error(storage, run, owner_of(storage))
        time.sleep(CLAIM_POLL_S)


# --- beats ---------------------------------------------------------------------------------------


@contextmanager
def _by_beats(storage: Storage, owner: Owner, passing: bool) -> Iterator[Check]:
    with telling(storage, UNUSABLE):
        before = _silent(storage, owner.run)
        storage.put(OWNER, _text(owner))
        if before is None or before.run != owner.run:
            time.sleep(SETTLE_S)
            now = _read(storage)
            if now is None or now.run != owner.run:
                raise _taken_error(storage, owner.run, now)
    beats = _Beats(storage, owner)
    try:
        yield beats.check
    finally:
        beats.end(before if passing else None)


def _silent(storage: Storage, run: str) -> Owner | None:
    """The owner that there was, once it is over; None: there was none."""
    first = _read(storage)
    if first is None or first.ended or first.run == run:
        return first
    logger.warning(
        "paramserve: run %r has not ended in order: seeing for %.0f s whether it still writes to "
        "%s",
        first.run,
        SILENT_S,
        storage.where,
    )
    until = time.monotonic() + SILENT_S
    while time.monotonic() < until:
        time.sleep(BEAT_POLL_S)
        now = _read(storage)
        if now is None or now.ended or now.run == run:
            return now
        if now != first:
            raise _taken_error(storage, run, now)
    return first


class _Beats:
    """Counts in `owner.json`, in a thread of its own."""

    def __init__(self, storage: Storage, owner: Owner) -> None:
        self._storage = storage
        self._owner = owner
        self._other_owner: Owner | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="paramserve-owner")
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(BEAT_S):
            with suppress(OSError):  # who waits for a beat cannot reach the store either
                now = _read(self._storage)
                if now is not None and now.run != self._owner.run:
                    self._other_owner = now
                    return
                self._owner = replace(self._owner, beat=self._owner.beat + 1)
                self._storage.put(OWNER, _text(self._owner))

    def check(self) -> None:
        if self._other_owner is not None:
            raise _taken_error(self._storage, self._owner.run, self._other_owner)

    def end(self, before: Owner | None) -> None:
        """Say that it has ended, so that the next run need not wait; or that the one before has."""
        self._over.set()
        self._thread.join(END_S)
        if self._other_owner is None and not self._thread.is_alive():
            with suppress(OSError):
                self._storage.put(OWNER, _text(replace(before or self._owner, ended=True)))
