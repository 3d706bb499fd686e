"""What workers have left out of their gradients: taken for the checkpoint under way, and given back
from the one that the run goes on from.

A worker sends a piece when the one before is written, so a server holds one piece of each. A worker
of which nothing comes is not waited for longer than `RESIDUAL_LIMIT_S`: the checkpoint does without
its residual, and says so. One that ends in order, or is told to, leaves its residual here, in a
file without a name: the last checkpoint of a run is taken when all workers have ended.
"""

from __future__ import annotations

import errno
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO, TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paramserve.checkpoint.residuals import Found, ResidualFiles, SavedResiduals
from paramserve.core.block import ShardBlock
from paramserve.errors import ParamServeError, ProtocolError
from paramserve.messages import (
    ALIGN,
    ALL_KEPT,
    RESIDUAL_ELEMENTS_MAX,
    AskResidual,
    KeepResidual,
    ResidualFound,
    ResidualKept,
    ResidualRequest,
    decoder,
    encode,
)
from paramserve.transport.connection import as_refusable, refusal

if TYPE_CHECKING:
    from paramserve.checkpoint.shard_writer import Turns
    from paramserve.checkpoint.writer import Writer
    from paramserve.core.cut_parts import ShardCut
    from paramserve.core.shard import Shard
    from paramserve.core.shard_sessions import ShardSession
    from paramserve.messages import BlockSpec
    from paramserve.transport.framing import ByteArray
    from paramserve.transport.listener import Connection
    from paramserve.transport.timing import Handle, Loop, Pending

logger = logging.getLogger("paramserve")

Floats = npt.NDArray[np.float32]

RESIDUAL_LIMIT_S = 60.0
"""A worker that has sent nothing of its residual for this long is not waited for: it may be within
a step that takes longer, and its answers unread."""
LOOK_S = 0.25
"""How often a server that waits looks who is gone."""
FIX = "run the same version on both sides"
NONE: Floats = np.empty(0, np.float32)

_decode = decoder(ResidualRequest).decode


class _Left:
    """The residual that a worker has left on this server when it ended.

    Args:
        last: the number of the last request that it is as of.
        clocks: of the rank then, by group: a step of it that was collected, and not answered, may
            be applied when its session is over.
    """

    def __init__(self, rank: int, last: int, clocks: Mapping[int, int]) -> None:
        self.rank = rank
        self.last = last
        self.clocks = clocks
        self.whole = False
        self.blocks: dict[int, int] = {}
        """Of each block, how many elements are here; -1: nothing was left out."""
        self._files: dict[int, IO[bytes]] = {}

    def write(self, block: int, values: Floats) -> None:
        """Write the next elements of a block. Raises `OSError`."""
        if block not in self._files:
            opened = tempfile.TemporaryFile(prefix="paramserve-", buffering=0)  # noqa: SIM115
            self._files[block] = opened
        data = values.view(np.uint8).data
        while data:
            data = data[self._files[block].write(data) :]

    def read(self, block: int, start: int, count: int) -> Floats:
        """Some elements of a block, counted from the first that is here. Raises `OSError`."""
        found = np.empty(count, np.float32)
        file, data = self._files[block], found.view(np.uint8).data
        file.seek(4 * start)
        while data:
            got = file.readinto(data)  # type: ignore[attr-defined]
            if not got:
                raise OSError(errno.EIO, "it ends too soon")
            data = data[got:]
        return found

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _say_over(conn: Connection, message: KeepResidual) -> None:
    """Answer what has come when its cut is written, or let go. Behind the last piece only the word
    comes that it was the last."""
    conn.send(encode(ResidualKept(message.block == ALL_KEPT)))


def _clock(clocks: Mapping[int, int], rank: int) -> int:
    return clocks.get(rank, 0)


class Residuals:
    """A server's part in the residuals of its shard's clients.

    Args:
        shard: has the cuts and the sessions.
        saved: of the checkpoint that the run goes on from; None: it began anew.
    """

    def __init__(self, shard: Shard, loop: Loop, saved: SavedResiduals | None) -> None:
        self._shard = shard
        self._loop = loop
        self._saved = saved
        self.came: dict[Connection, tuple[KeepResidual, Floats]] = {}
        """Pieces that are not answered; where there are some, `look` is to be called now and then.
        """
        self._asked: set[Connection] = set()
        """Those that a thread reads for."""
        self._left: dict[int, _Left] = {}
        """By client that has ended, or is about to."""
        self._over = 0
        """Cuts up to this number are written."""
        self._wake: Callable[[], None] | None = None
        """Takes the next turn of what is written."""
        self._timer: Handle | None = None
        if saved is not None:
            shard.unclaimed = saved.unclaimed()

    # --- what workers send -----------------------------------------------------------------------

    def opened(self, conn: Connection) -> None:
        """A worker's client connects.

        Raises:
            ProtocolError: the shard does not know it. WorkerFenced: it counts as dead.
        """
        self._session(conn)

    def _session(self, conn: Connection) -> ShardSession:
        hello = conn.hello
        session = self._shard.sessions.by_client.get(hello.client)
        if session is None or session.rank != hello.rank or hello.rank < 0:
            raise ProtocolError(
                f"client {hello.client} of rank {hello.rank} came with its residual, and shard "
                f"{self._shard.number} does not know it",
                applied="no",
                fix="connect as a client first",
            )
        if session.fenced_by is not None:
            raise session.fenced()
        return session

    def frame(self, conn: Connection, header: bytes, payload: ByteArray | None) -> None:
        """Take a message.

        Raises:
            ParamServeError, msgspec's errors: it is not valid. Nothing was written.
        """
        message = _decode(header)
        session = self._session(conn)
        if conn in self.came or conn in self._asked:
            raise ProtocolError(
                f"client {session.client} did not wait for an answer", applied="no", fix=FIX
            )
        if isinstance(message, KeepResidual):
            self._keep(conn, message, payload)
        else:
            self._give(conn, session, message)

    def _keep(self, conn: Connection, message: KeepResidual, payload: ByteArray | None) -> None:
        count = max(message.count, 0)
        nbytes = 0 if payload is None else payload.nbytes
        if not -1 <= message.count <= RESIDUAL_ELEMENTS_MAX or nbytes != -(-4 * count & -ALIGN):
            raise ProtocolError(
                f"client {conn.hello.client} sent {nbytes} bytes for {message.count} elements of "
                "its residual",
                applied="no",
                fix=FIX,
            )
        values = NONE
        if payload is not None:
            values = payload[: 4 * count].view(np.float32)
        if not np.isfinite(values).all():
            raise ProtocolError(
                f"client {conn.hello.client} sent NaN or Inf in its residual", applied="no", fix=FIX
            )
        if message.cut < 0:
            self._leave(conn, message, values)
            return
        if message.cut <= self._over or message.cut not in self._shard.cuts.kept:
            _say_over(conn, message)
            return
        self.came[conn] = message, values
        if self._wake is not None:
            self._wake()

    def _leave(self, conn: Connection, message: KeepResidual, values: Floats) -> None:
        """A worker is about to end."""
        session, block = self._session(conn), self._shard.blocks.get(message.block)
        left = self._left.get(session.client)
        if left is None:
            groups = self._shard.groups.values()
            clocks = {
                g.state.id: _clock(g.state.members.every_clock(), session.rank) for g in groups
            }
            left = self._left[session.client] = _Left(session.rank, -message.cut, clocks)
        if message.block == ALL_KEPT:
            left.whole = True
            conn.send(encode(ResidualKept(True)))
            return
        have = left.blocks.get(message.block, 0)
        known = isinstance(block, ShardBlock) and block.feeds_back
        first = block.low if isinstance(block, ShardBlock) else 0
        size = block.size if isinstance(block, ShardBlock) else 0
        fits = message.start == first + max(have, 0) and have + values.size <= size
        if not known or not fits or have < 0:
            raise ProtocolError(
                f"client {session.client} left elements {message.start} to "
                f"{message.start + message.count} of its residual of block {message.block}, of "
                f"which {have} were here",
                applied="no",
                fix=FIX,
            )
        left.blocks[message.block] = -1 if message.count < 0 else have + values.size
        self._asked.add(conn)
        write = partial(left.write, message.block, values)
        self._loop.run_in_executor(None, write).add_done_callback(
            partial(self._kept, conn, session.client)
        )

    def _kept(self, conn: Connection, client: int, done: Pending[None]) -> None:
        error = done.exception()
        if error is not None:  # no checkpoint has it then
            self._forget(client)
            logger.warning("paramserve: the residual of client %d was not kept: %s", client, error)
        if conn in self._asked:
            self._asked.discard(conn)
            conn.send(encode(ResidualKept(error is None)))

    def _forget(self, client: int) -> None:
        left = self._left.pop(client, None)
        if left is not None:
            left.close()

    def _give(self, conn: Connection, session: ShardSession, message: AskResidual) -> None:
        block = self._shard.blocks.get(message.block)
        if not isinstance(block, ShardBlock):  # it is new, and defined later
            conn.send(encode(ResidualFound(0)))
            return
        low, high = block.low, block.low + block.size
        start, stop = message.start, message.start + message.count
        if not (low <= start < stop <= high and stop - start <= RESIDUAL_ELEMENTS_MAX):
            raise ProtocolError(
                f"client {session.client} asked for elements {start} to {stop} of the residual of "
                f"block {message.block}, of which shard {self._shard.number} has {low} to {high}",
                applied="no",
                fix=FIX,
            )
        saved = self._saved
        if saved is None or (block.spec.group, session.rank) not in self._shard.unclaimed:
            lost = saved.lost(message.block) if saved is not None else ()
            conn.send(encode(ResidualFound(0, lost)))
            return
        session.feeds_back = True
        self._asked.add(conn)
        read = partial(saved.read, message.block, session.rank, start, message.count)
        self._loop.run_in_executor(None, read).add_done_callback(partial(self._given, conn))

    def _given(self, conn: Connection, done: Pending[Found]) -> None:
        if conn not in self._asked:
            return
        self._asked.discard(conn)
        error = done.exception()
        if error is not None:
            known = isinstance(error, ParamServeError)
            told = (
                error if known else ParamServeError(repr(error), fix="look at the server's output")
            )
            assert isinstance(told, ParamServeError)
            self._refuse(conn, told)
            return
        found = done.result()
        if found.values is None:
            conn.send(encode(ResidualFound(0, found.lost)))
        else:
            data = found.values.view(np.uint8)
            conn.send(encode(ResidualFound(found.values.size, found.lost)), [data])

    def _refuse(self, conn: Connection, error: ParamServeError) -> None:
        conn.send(refusal(as_refusable(error)))
        conn.close()

    def closed(self, conn: Connection) -> None:
        self.came.pop(conn, None)
        self._asked.discard(conn)

    def look(self) -> None:
        """Answer those whose cut was let go."""
        for conn, (message, _) in list(self.came.items()):
            if message.cut not in self._shard.cuts.kept:
                del self.came[conn]
                _say_over(conn, message)

    # --- what is written -------------------------------------------------------------------------

    def turns(self, part: ShardCut, writer: Writer, blocks: Sequence[BlockSpec]) -> Turns:
        """Write what clients have left out of the gradients of these blocks, until all is there or
        is given up; in turns, as `write_shard`.

        Raises:
            CheckpointError: the storage failed.
        """
        left = self._left_at(part)
        ranks = part.residuals | {client: each.rank for client, each in left.items()}
        known = set(ranks.values())
        lost = {e.rank: client for client, e in sorted(self._left.items()) if e.rank not in known}
        ranks |= {client: rank for rank, client in lost.items()}
        # Ranks that have not come as far as to ask for what the checkpoint before has of them.
        waiting = {rank for _, rank in part.unclaimed}.difference(ranks.values())
        ranks |= {-1 - rank: rank for rank in waiting}
        files = ResidualFiles(writer, part.shard, ranks.items(), blocks)
        for rank in waiting:
            yield from self._write_rest(files, part, -1 - rank, rank)
        for client, each in left.items():
            yield from self._write_left(files, part, client, each)
        yield partial(files.lose, lost.values())
        heard = dict.fromkeys(files.clients, self._loop.time())
        while files.clients:
            conn = next(
                (c for c, (message, _) in self.came.items() if message.cut == part.number), None
            )
            if conn is None:
                gone = [each for each in files.clients if not self._comes(each, heard[each])]
                yield partial(files.lose, gone) if gone else None
                continue
            message, values = self.came[conn]
            client = conn.hello.client
            heard[client] = self._loop.time()
            try:
                if message.block == ALL_KEPT:
                    yield from self._write_rest(files, part, client, conn.hello.rank)
                elif files.check(client, message):
                    yield partial(files.write, client, message, values)
            except ProtocolError as error:
                self.came.pop(conn, None)
                self._refuse(conn, error)
                continue
            if self.came.pop(conn, None) is not None:
                wanted = (client, message.block) not in files.lost
                conn.send(encode(ResidualKept(wanted)))
        self._over = part.number

    def _write_left(self, files: ResidualFiles, part: ShardCut, client: int, left: _Left) -> Turns:
        """Write what a worker has left when it ended, if it is whole."""
        for spec in files.rest(client) if left.whole else ():
            low, have = spec.cuts[part.shard], left.blocks.get(spec.block, -1)
            for start in range(low, low + have, RESIDUAL_ELEMENTS_MAX) or (low,) * (have == 0):
                count = min(RESIDUAL_ELEMENTS_MAX, low + have - start)
                message = KeepResidual(part.number, spec.block, start, count)
                values = NONE
                if count:
                    values = yield partial(left.read, spec.block, start - low, count)
                yield partial(files.write, client, message, values)
        if left.whole:
            yield from self._write_rest(files, part, client, left.rank)
        yield partial(files.lose, [client])

    def _write_rest(self, files: ResidualFiles, part: ShardCut, client: int, rank: int) -> Turns:
        """Write of blocks that a client has not come to know what the checkpoint before has; of
        others nothing was left out."""
        for spec in files.rest(client):
            low, high = spec.cuts[part.shard], spec.cuts[part.shard + 1]
            saved = self._saved if (spec.group, rank) in part.unclaimed else None
            if saved is not None and not saved.has(spec.block, rank):
                saved = None
            if saved is None:
                none = KeepResidual(part.number, spec.block, low, -1)
                yield partial(files.write, client, none, NONE)
                continue
            for start in range(low, high, RESIDUAL_ELEMENTS_MAX) or (low,):
                count = min(RESIDUAL_ELEMENTS_MAX, high - start)
                values = NONE
                if count:
                    found: Found = yield partial(saved.read, spec.block, rank, start, count)
                    assert found.values is not None, "it has some"
                    values = found.values
                message = KeepResidual(part.number, spec.block, start, count)
                yield partial(files.write, client, message, values)

    def _left_at(self, part: ShardCut) -> dict[int, _Left]:
        """What workers have left as of what a cut has of them, of each rank what it left last; what
        a rank has left that has come again, and goes on without it, is forgotten."""
        going = {rank: client for client, rank in part.residuals.items()}
        for client, each in list(self._left.items()):
            if going.get(each.rank, client) != client:
                self._forget(client)
        clocks = {each.id: dict(each.clocks) for each in part.groups}
        found = {
            client: each
            for client, each in sorted(self._left.items())
            if part.clients.get(client, each.last) == each.last
            and all(
                _clock(clocks.get(group, {}), each.rank) == clock
                for group, clock in each.clocks.items()
            )
        }
        last = {each.rank: client for client, each in found.items()}
        for client, each in list(self._left.items()):
            if client < last.get(each.rank, client):
                self._forget(client)
        return {client: found[client] for client in last.values()}

    def _comes(self, client: int, heard_at: float) -> bool:
        session = self._shard.sessions.by_client.get(client)
        lives = session is not None and session.fenced_by is None
        return lives and self._loop.time() - heard_at < RESIDUAL_LIMIT_S

    def wait(self, woken: Callable[[], None]) -> None:
        """Take the next turn when something has come, or someone may be gone."""
        self._wake = partial(self._woken, woken)
        self._timer = self._loop.call_later(LOOK_S, self._wake)

    def _woken(self, woken: Callable[[], None]) -> None:
        self.stop()
        woken()

    def stop(self) -> None:
        """Take no more turns."""
        self._wake = None
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def close(self) -> None:
        self.stop()
        for client in list(self._left):
            self._forget(client)
        if self._saved is not None:
            self._saved.close()
