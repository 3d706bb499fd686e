"""The folder of a run's checkpoints: whose it is, which checkpoints it has, commit and pruning.

One process of a run, the one that holds `owner.json`, begins, commits and prunes; any process may
read. What a crash leaves behind has no manifest: the next pruning removes it.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from importlib.metadata import version
from typing import NamedTuple, TypeVar

from paramserve.checkpoint.claims import OWNER, UNUSABLE, Check, Owner, hold, owner_of
from paramserve.checkpoint.locations import is_url, storage_at
from paramserve.checkpoint.manifest import (
    LEAD,
    Cut,
    Manifest,
    Written,
    decode,
    encode,
    is_written,
    joined,
    layers,
    manifest_number,
    manifest_path,
)
from paramserve.checkpoint.reader import Checkpoint
from paramserve.checkpoint.storage import Storage, StoreFailed, not_reached, telling
from paramserve.errors import CheckpointDamaged, CheckpointError

T = TypeVar("T")

OTHERS_NAMED = 5
"""Most foreign entries of a checkpoint folder that an error names."""
STEP = re.compile(r"step-\d+(-\d+)?")
"""The names of checkpoints and of their folders."""
PROBE = ".probe-"


class Pruned(NamedTuple):
    """What pruning removed."""

    checkpoints: tuple[str, ...]
    nbytes: int
    """Bytes of the files that no manifest needs any more."""


def split_path(path: str | os.PathLike[str]) -> tuple[str, str | None]:
    """The folder of checkpoints and the name of one of them that a path of a user's means.

    Returns:
        ("runs/a", "step-4000") of "runs/a/step-4000", and ("runs/a", None) of "runs/a"; of URLs
        likewise.
    """
    text = os.fspath(path)
    text = text.rstrip("/") if is_url(text) else os.path.normpath(text)
    above, name = os.path.split(text)
    if STEP.fullmatch(name) and not above.endswith(":") and not _has_owner(text):
        return above or ".", name
    return text, None


def _has_owner(folder: str) -> bool:
    try:
        return any(each.name == OWNER for each in storage_at(folder).entries(""))
    except OSError:  # there is no such folder
        return False


class Folder:
    """The checkpoints of one folder.

    Example:
        with Folder(storage).claimed("run 7f3a") as folder:
            name = folder.begin(4000)
            ...                 # every process writes, with Writer(storage, name)
            folder.commit(name, reports, cut)
            folder.prune(keep=3)

    Args:
        storage: that has it. It need not have any checkpoint yet.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._run = ""
        self._check_held: Check = lambda: None
        self._steps_begun = set[str]()
        """Written to now: no pruning removes them."""

    # --- whose it is -----------------------------------------------------------------------------

    @contextmanager
    def claimed(self, run: str, *, passing: bool = False) -> Iterator[Folder]:
        """Let no other run write here, until the block is left or this process ends.

        A run that ended without leaving its block, in a crash, holds nothing.

        Args:
            passing: whose the folder was it still is afterwards.
        Raises:
            CheckpointFolderTaken: a living run holds it. CheckpointError: there is something else
                in the folder, a later version wrote to it, or the storage failed.
        """
        with telling(self.storage, UNUSABLE):
            self._check_ours()
        with hold(self.storage, run, passing=passing) as check:
            self._run, self._check_held = run, check
            yield self

    def owner(self) -> Owner | None:
        """The run that writes here, or did last; None: none has."""
        return owner_of(self.storage)

    def _check_ours(self) -> None:
        names = [each.name for each in self.storage.entries("")]
        numbers = [number for name in names if (number := manifest_number(name)) is not None]
        if numbers:
            with suppress(CheckpointDamaged):  # reading finds the one before
                self.load(max(numbers))
        elif OWNER not in names and names:
            more = f" and {len(names) - OTHERS_NAMED} more" if len(names) > OTHERS_NAMED else ""
            raise CheckpointError(
                f"{self.storage.where} is no folder of checkpoints: it has "
                f"{', '.join(names[:OTHERS_NAMED])}{more}",
                fix="name a new folder, or an empty one",
            )

    # --- which there are -------------------------------------------------------------------------

    def numbers(self) -> list[int]:
        """Numbers of all checkpoints, damaged ones too, the newest first.

        Raises:
            CheckpointError: there is no such folder.
        """
        with telling(self.storage, "there are no checkpoints"):
            numbers = (manifest_number(each.name) for each in self.storage.entries(""))
            return sorted((each for each in numbers if each is not None), reverse=True)

    def load(self, number: int) -> Manifest:
        """A manifest.

        Raises:
            CheckpointDamaged: it cannot be read. CheckpointError: a later version wrote it, or the
                store cannot be reached.
        """
        path, where = manifest_path(number), self.storage.where
        try:
            data = self.storage.get(path)
        except StoreFailed as error:
            raise not_reached(self.storage, error) from error
        except OSError as error:
            raise CheckpointDamaged(
                f"the manifest {path} in {where} cannot be read: {error.strerror}",
                fix="use the checkpoint before",
            ) from error
        return decode(data, path, where)

    def manifests(self) -> tuple[list[Manifest], dict[int, CheckpointError]]:
        """All that can be read, the newest first; and by number why others cannot."""
        manifests, refused = list[Manifest](), dict[int, CheckpointError]()
        for number in self.numbers():
            try:
                manifests.append(self.load(number))
            except CheckpointError as error:
                refused[number] = error
        return manifests, refused

    def named(self, name: str) -> Manifest:
        """The checkpoint of a name.

        Raises:
            CheckpointError: there is none; those that there are are named.
        """
        manifests, refused = self.manifests()
        for each in manifests:
            if each.name == name:
                return each
        has = ", ".join(each.name for each in manifests) or "none"
        bad = f"; {len(refused)} cannot be read" if refused else ""
        raise CheckpointError(
            f"{self.storage.where} has no checkpoint {name!r}; it has {has}{bad}",
            fix="name one of them, or the folder for the newest",
        )

    def first_valid(
        self, use: Callable[[Checkpoint], T]
    ) -> tuple[T | None, Manifest | None, tuple[CheckpointError, ...]]:
        """Use the newest checkpoint that is not damaged.

        Args:
            use: reads what is needed of one; if it raises `CheckpointDamaged`, the one before is
                next.
        Returns:
            What `use` gave and of which checkpoint (None: there is none), and why later ones were
            refused.
        Raises:
            CheckpointError: a later version wrote one of them. What else `use` raises.
        """
        refused = list[CheckpointError]()
        for number in self.numbers():
            try:
                manifest = self.load(number)
                with Checkpoint(self.storage, manifest) as saved:
                    return use(saved), manifest, tuple(refused)
            except CheckpointDamaged as error:
                refused.append(error)
        return None, None, tuple(refused)

    # --- writing ---------------------------------------------------------------------------------

    def begin(self, step: int) -> str:
        """Make the folder of a new checkpoint; its name.

        Raises:
            CheckpointError: the storage failed. CheckpointFolderTaken: the folder is not this run's
                any more.
        """
        name, more = f"step-{step}", 1
        with telling(self.storage, f"checkpoint {name} was not begun"):
            self._check_held()
            while not self.storage.make_folder(name):
                more += 1
                name = f"step-{step}-{more}"
            self.storage.sync_folder("")
        self._steps_begun.add(name)
        return name

    def commit(
        self,
        name: str,
        reports: Iterable[Sequence[Written]],
        cut: Cut,
        *,
        before: Manifest | None = None,
    ) -> Manifest:
        """Make a checkpoint be there: all of it is written and synced.

        Args:
            name: as `begin` gave it.
            reports: what `Writer.finish` gave, of every process that wrote.
            before: the checkpoint that the tables' increments go on from.
        Raises:
            CheckpointError: a file is not whole, or the storage failed. If the last sync did, the
                checkpoint may be there after a crash, and is complete then.
                CheckpointFolderTaken: the folder is not this run's any more.
        """
        with telling(self.storage, f"checkpoint {name} was not committed"):
            self._check_held()
        files = {each.path: each for each in joined(reports)}
        of_tables = layers(name, list(files.values()), before.layers if before else {})
        for path in (path for table in of_tables.values() for layer in table for path in layer):
            if before is not None and path not in files:
                files[path] = before.file(path)
        number = max(self.numbers(), default=0) + 1
        manifest = Manifest(
            number=number,
            name=name,
            run=self._run,
            writer=version("paramserve"),
            created_s=time.time(),
            cut=cut,
            files=tuple(files.values()),
            layers=of_tables,
        )
        with Checkpoint(self.storage, manifest) as saved:
            saved.check()
        with telling(self.storage, f"checkpoint {name} was not committed"):
            path = manifest_path(number)
            self._check_held()  # the files were looked at meanwhile
            try:
                self.storage.replace(path, encode(manifest))
            except OSError:
                with suppress(OSError):
                    self.storage.remove(path)
                raise
        self._steps_begun.discard(name)
        return manifest

    def discard(self, name: str) -> None:
        """Give up a checkpoint that was begun, and give its room back as far as that goes; what
        is left, the next pruning removes."""
        self._steps_begun.discard(name)
        with suppress(OSError, CheckpointError):
            self._check_held()
            manifests, refused = self.manifests()
            if not refused and all(each.name != name for each in manifests):
                self._sweep(name, frozenset())

    def prune(self, keep: int) -> Pruned:
        """Remove all checkpoints but the newest `keep`, then the files that none needs any more.

        A checkpoint whose manifest cannot be read stays, and with it all before it: it may need
        their files. Then only files of removed checkpoints go.

        Raises:
            CheckpointError: the storage failed, or a later version wrote a checkpoint. Those to be
                kept are there. CheckpointFolderTaken: the folder is not this run's any more.
        """
        with telling(self.storage, "old checkpoints were not removed"):
            self._check_held()
        manifests, refused = self.manifests()
        for error in refused.values():
            if not isinstance(error, CheckpointDamaged):
                raise error
        removed = [each for each in manifests[keep:] if each.number > max(refused, default=0)]
        rest = [each for each in manifests if each not in removed]
        with telling(self.storage, "old checkpoints were not removed"):
            for each in removed:
                self.storage.remove(manifest_path(each.number))
            if removed:
                self.storage.sync_folder("")
            needed = frozenset(file.path for each in rest for file in each.files)
            if not refused:
                nbytes = self._sweep_all(needed)
            else:
                paths = {file.path for each in removed for file in each.files}
                nbytes = sum(self._remove(path) for path in sorted(paths - needed))
        return Pruned(tuple(each.name for each in removed), nbytes)

    def _sweep_all(self, needed: frozenset[str]) -> int:
        nbytes, failed = 0, list[OSError]()
        for each in self.storage.entries(""):
            try:
                if (
                    each.is_folder
                    and STEP.fullmatch(each.name)
                    and each.name not in self._steps_begun
                ):
                    nbytes += self._sweep(each.name, needed)
                elif each.name.startswith((f".{LEAD}", PROBE)):
                    nbytes += self._remove(each.name)
            except OSError as error:
                failed.append(error)
        if failed:  # the others are removed
            raise failed[0]
        return nbytes

    def _sweep(self, name: str, needed: frozenset[str], within: str = "") -> int:
        """Remove files of ours from a checkpoint's folder, and folders that are empty then."""
        folder, nbytes = f"{name}/{within}".rstrip("/"), 0
        for each in self.storage.entries(folder):
            inner = f"{within}/{each.name}".lstrip("/")
            path = f"{name}/{inner}"
            if each.is_folder:
                nbytes += self._sweep(name, needed, inner)
            elif path not in needed and is_written(inner):
                nbytes += self._remove(path)
        if not self.storage.entries(folder):
            self.storage.remove_folder(folder)
        return nbytes

    def _remove(self, path: str) -> int:
        """Remove a file; its bytes."""
        with suppress(FileNotFoundError):
            with closing(self.storage.open(path)) as file:
                nbytes = file.size()
            self.storage.remove(path)
            return nbytes
        return 0

    # --- whether every server sees it ------------------------------------------------------------

    def begin_probe(self, nonce: str) -> None:
        """Leave a file that every server answers (`answer_probe`); those of runs that crashed go.

        Args:
            nonce: that no other run has.
        Raises:
            CheckpointError: the storage failed.
        """
        with telling(self.storage, UNUSABLE):
            for each in self.storage.entries(""):
                if each.name.startswith(PROBE):
                    self._remove(each.name)
            self.storage.put(PROBE + nonce, nonce.encode())

    def end_probe(self, nonce: str, servers: Sequence[int]) -> None:
        """See that all servers have answered, and remove the files.

        Raises:
            CheckpointError: the answer of a server is not here.
        """
        missing = list[int]()
        for each in servers:
            try:
                answer = self.storage.get(f"{PROBE}{nonce}-{each}")
            except OSError:
                answer = b""
            if answer != nonce.encode():
                missing.append(each)
        self.drop_probe(nonce)
        if missing:
            raise _not_shared(f"server {missing[0]}", self.storage, "its answer is not here")

    def drop_probe(self, nonce: str) -> None:
        """Remove the files of a probe, as far as that goes; repeating is safe."""
        with suppress(OSError, CheckpointError):
            self._check_held()
            for each in self.storage.entries(""):
                if each.name.startswith(PROBE + nonce):
                    self._remove(each.name)


def answer_probe(storage: Storage, nonce: str, server: int) -> None:
    """See, on a server, that the folder is the coordinator's and can be written to.

    Raises:
        CheckpointError: it is another folder, or not to be written to.
    """
    who = f"server {server} on {socket.gethostname()}"
    try:
        content = storage.get(PROBE + nonce)
    except OSError as error:
        raise _not_shared(who, storage, error.strerror or str(error)) from error
    if content != nonce.encode():
        raise _not_shared(who, storage, "the file there is another one")
    name = f"{PROBE}{nonce}-{server}"
    with telling(storage, f"{who} cannot write checkpoints"):
        storage.put(name, nonce.encode())
        with closing(storage.open(name, write=True)) as file:
            file.keep_apart(0, len(nonce))


def _not_shared(who: str, storage: Storage, why: str) -> CheckpointError:
    return CheckpointError(
        f"{who} does not see the folder of checkpoints, {storage.where}, as the coordinator does: "
        f"{why}",
        fix=storage.shared,
    )
