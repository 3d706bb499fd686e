"""The coordinator's work on the files of a run's checkpoints, as `core.checkpointing` orders it.

It claims the folder, makes each checkpoint's own, writes `cluster.msgpack` and the manifest,
prunes, and removes what was given up. It reads `cluster.msgpack` of the checkpoint that a run goes
on from.
"""

from __future__ import annotations

import logging
import socket
import time
from contextlib import ExitStack

import msgspec

from paramserve.checkpoint.claims import OWNER, owner_of
from paramserve.checkpoint.folder import Folder
from paramserve.checkpoint.manifest import CLUSTER_PATH, Cut, Manifest, Written
from paramserve.checkpoint.reader import Checkpoint
from paramserve.checkpoint.storage import Storage
from paramserve.checkpoint.writer import Writer
from paramserve.config import CheckpointPlan
from paramserve.core.checkpointing import (
    CommitFiles,
    Discard,
    FileEvent,
    FilesCommitted,
    FilesFailed,
    FileWork,
    FolderMade,
    MakeFolder,
    SeeServers,
    ServersSeen,
)
from paramserve.core.cluster_state import ClusterRecord, blocks_for
from paramserve.errors import CheckpointError

logger = logging.getLogger("paramserve")

CLAIM_SEEN_S = 5.0
"""How long a file that the driver has written may take to be seen, as on NFS."""
CLAIM_POLL_S = 0.1


class Committer:
    """The folder of a run's checkpoints, held by the coordinator.

    Args:
        storage: of the folder, which is there.
        servers: how many write.
        nonce: that the servers know too: they answer the file that is left with it.
    Raises:
        CheckpointFolderTaken: another run writes there. CheckpointError: something else is in it,
            or the storage failed.
    """

    def __init__(self, storage: Storage, plan: CheckpointPlan, servers: int, nonce: str) -> None:
        self._plan = plan
        self._servers = servers
        self._nonce = nonce
        self._last: Manifest | None = None
        """Newest manifest that this run has written."""
        self._resources = ExitStack()
        self._folder = self._resources.enter_context(Folder(storage).claimed(plan.run))
        self._resources.callback(self._folder.drop_probe, nonce)  # also of a start that is refused
        self._folder.begin_probe(nonce)

    def close(self) -> None:
        """Another run may write to the folder."""
        self._resources.close()

    def do(self, work: FileWork) -> FileEvent | None:
        """Do some work; None: nothing is to be told of it. Called from one thread at a time."""
        try:
            match work:
                case MakeFolder():
                    return FolderMade(work.checkpoint, self._folder.begin(work.step))
                case CommitFiles():
                    return self._commit(work)
                case Discard():
                    self._folder.discard(work.name)
                    return None
                case SeeServers():
                    self._folder.end_probe(self._nonce, range(self._servers))
                    return ServersSeen()
        except CheckpointError as error:
            checkpoint = 0 if isinstance(work, SeeServers) else work.checkpoint
            return FilesFailed(checkpoint, error.failed, error.fix)

    def _commit(self, work: CommitFiles) -> FilesCommitted:
        folder, name = self._folder, work.name
        reports = [msgspec.msgpack.decode(each, type=tuple[Written, ...]) for each in work.files]
        with Writer(folder.storage, name) as writer:
            writer.write_message(CLUSTER_PATH, work.cluster)
            reports.append(writer.finish())
        record = _decode(work.cluster)
        cut_report = work.cut
        cut = Cut(
            step=work.step,
            shards=self._servers,
            workers=record.membership.workers,
            seed=self._plan.seed,
            clocks=cut_report.clocks,
            updates=cut_report.updates,
            blocks=blocks_for(record, self._servers),
            torn=tuple(f"client {each}" for each in cut_report.torn),
            pause_s=work.pause_s,
            lost_residuals=work.lost_residuals,
        )
        self._last = folder.commit(name, reports, cut, before=self._last)
        try:
            folder.prune(self._plan.keep)
        except CheckpointError as error:
            logger.warning("paramserve: %s", error)
        nbytes = sum(part.length for report in reports for file in report for part in file.parts)
        return FilesCommitted(work.checkpoint, nbytes, f"{folder.storage.where}/{name}")


def see_claim(storage: Storage, run: str) -> None:
    """See that a folder is the one in which the driver has left the run's name.

    Raises:
        CheckpointError: it is another one: the driver would not find the run's checkpoints.
    """
    until = time.monotonic() + CLAIM_SEEN_S
    while (owner := owner_of(storage)) is None or owner.run != run:
        if time.monotonic() >= until:
            state = f"is of run {owner.run!r}" if owner is not None else "is not there"
            raise CheckpointError(
                f"the coordinator on {socket.gethostname()} does not see the folder of "
                f"checkpoints, {storage.where}, as the driver does: {OWNER}, which the driver has "
                f"left there for run {run!r}, {state}",
                fix=storage.shared,
            )
        time.sleep(CLAIM_POLL_S)


def read_cluster(storage: Storage, name: str) -> ClusterRecord:
    """What the coordinator goes on from.

    Raises:
        CheckpointError: there is no checkpoint of this name. CheckpointDamaged: it is damaged.
    """
    with Checkpoint(storage, Folder(storage).named(name)) as saved:
        return _decode(saved.message(CLUSTER_PATH))


def _decode(data: bytes) -> ClusterRecord:
    try:
        return msgspec.msgpack.decode(data, type=ClusterRecord)
    except msgspec.MsgspecError as error:
        raise CheckpointError(
            f"{CLUSTER_PATH} is not as this version of paramserve writes it: {error}",
            fix="use the version of paramserve that wrote the checkpoint",
        ) from None
