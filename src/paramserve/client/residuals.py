"""A worker's residuals in checkpoints: sent to the servers as of a cut, and fetched when a run goes
on from one.

A thread sends them, on connections of its own, so that no step waits for it; it lives only as long
as there is something to send. What does not arrive in time the checkpoint does without.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paramserve.client.encoding import Captured
from paramserve.config import NO_RANK
from paramserve.core.partition import Block
from paramserve.errors import ParamServeError, ServerGone, Timeout, UnknownCodec, rebuild
from paramserve.messages import (
    ALL_KEPT,
    RESIDUAL_ELEMENTS_MAX,
    AskResidual,
    KeepResidual,
    Refused,
    ResidualFound,
    ResidualKept,
    ResidualReply,
    decoder,
    encode,
)
from paramserve.transport.link import Link

if TYPE_CHECKING:
    from paramserve.client.connection import Connection
    from paramserve.client.steps import Steps

logger = logging.getLogger("paramserve")

Floats = npt.NDArray[np.float32]
Reach = Callable[[int, float], Link]
"""Connects to a shard's server for residuals, in so many seconds."""
Piece = tuple[KeepResidual, Floats | None]
"""A message, and the elements that go with it."""

SEND_LIMIT_S = 600.0
"""For an answer to what is sent for a checkpoint: a server first writes the rest of its part, and
answers also if it lets go of that."""
LEAVE_LIMIT_S = 30.0
"""The same where a client that ends waits for it."""
CONNECT_LIMIT_S = 30.0
STOP_S = 1.0
"""For answers that are on their way when a client is told to end."""
LOOK_S = 0.25
"""How often a thread that waits looks whether it is still wanted."""
TRIES = 3
"""Connections to one server for one checkpoint."""

_decode = decoder(ResidualReply | Refused).decode


def pieces(captured: Captured, blocks: Sequence[Block], shard: int) -> Iterator[Piece]:
    """What one server is to have: the ranges that it holds, in order and in messages.

    Args:
        blocks: all whose residuals this client keeps, also those of which it has none.
    """
    left = {block.id: residual for block, residual in captured.left}
    for block in blocks:
        low, high = block.range(shard)
        if low == high and shard:
            continue
        residual = left.get(block.id)
        if residual is None:
            yield KeepResidual(captured.cut, block.id, low, -1), None
            continue
        for start in range(low, high, RESIDUAL_ELEMENTS_MAX) or (low,):
            part = residual[start : min(start + RESIDUAL_ELEMENTS_MAX, high)]
            message = KeepResidual(captured.cut, block.id, start, part.size)
            yield message, part if part.size else None
    yield KeepResidual(captured.cut, ALL_KEPT, 0, -1), None


class _Sending:
    """What is sent to one server."""

    def __init__(self, shard: int, left: Iterator[Piece]) -> None:
        self.shard = shard
        self.link: Link | None = None
        self.tries = 0
        self._left = left
        self.next: Piece | None = next(left, None)

    def kept(self) -> None:
        """The last piece is written."""
        self.next = next(self._left, None)


class ResidualSender:
    """Sends the residuals of one client as of the newest cut.

    Args:
        shards: how many servers there are.
        reach: connects to one.
        blocks: gives all blocks whose residuals the client keeps.
    """

    def __init__(self, shards: int, reach: Reach, blocks: Callable[[], Sequence[Block]]) -> None:
        self._shards = shards
        self._reach = reach
        self._blocks = blocks
        self._lock = threading.Lock()
        self._newest: Captured | None = None
        """That is not being sent yet."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def send(self, captured: Captured) -> None:
        """Begin to send; what is sent for an older cut ends."""
        with self._lock:
            if self._closed:
                return
            self._newest = captured
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="paramserve-residuals", daemon=True
                )
                self._thread.start()

    def send_last(self, last: int, left: Sequence[tuple[Block, Floats]]) -> None:
        """Leave the residuals with the servers, for checkpoints that are taken when this client has
        ended; returns when they are there, or cannot be.

        Args:
            last: the number of the last request that was answered.
        """
        try:
            self._send(Captured(-last, tuple(left)), LEAVE_LIMIT_S)
        except Exception as error:
            logger.warning("paramserve: a residual was not kept for later checkpoints: %s", error)

    def close(self, wait_s: float) -> None:
        """Send no more; what is under way may end within so many seconds."""
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(wait_s)
        with self._lock:
            self._closed = True

    def _run(self) -> None:
        while True:
            with self._lock:
                captured, self._newest = self._newest, None
                if captured is None or self._closed:
                    self._thread = None
                    return
            try:
                self._send(captured, SEND_LIMIT_S)
            except Exception as error:  # the checkpoint does without it
                logger.debug("a residual was not sent for cut %d: %s", captured.cut, error)

    def _send(self, captured: Captured, limit_s: float) -> None:
        """Send each server its pieces, the next one when the one before is answered.

        Args:
            limit_s: in which one of them has to answer something.
        Raises:
            ConnectionError, ParamServeError: a server was not reached, or refused a piece.
        """
        blocks = self._blocks()
        every = [_Sending(k, pieces(captured, blocks, k)) for k in range(self._shards)]
        try:
            for each in every:
                self._attempt(each, self._put)
            until = time.monotonic() + limit_s
            while (left := [each for each in every if each.next is not None]) and (
                time.monotonic() < until
            ):
                for each in left:
                    wanted = self._attempt(each, self._answered)
                    if wanted is None:
                        continue
                    if not wanted:
                        return
                    until = time.monotonic() + limit_s
                    each.kept()
                    if each.next is not None:
                        self._attempt(each, self._put)
                if captured.cut > 0 and (self._newest is not None or self._closed):
                    return
                _wait([each.link for each in left if each.link is not None])
        finally:
            for each in every:
                if each.link is not None:
                    each.link.close()

    def _attempt(
        self, sending: _Sending, what: Callable[[_Sending, Link], bool | None]
    ) -> bool | None:
        """Do something on a connection, and on a new one where it breaks."""
        while True:
            try:
                if sending.link is None:
                    sending.tries += 1
                    sending.link = self._reach(sending.shard, CONNECT_LIMIT_S)
                    if what == self._answered:
                        self._put(sending, sending.link)
                return what(sending, sending.link)
            except ConnectionError:
                if sending.link is not None:
                    sending.link.close()
                sending.link = None
                if sending.tries >= TRIES or self._closed:
                    raise

    def _put(self, sending: _Sending, link: Link) -> None:
        assert sending.next is not None
        message, part = sending.next
        link.send(encode(message), [part.view(np.uint8)] if part is not None else ())

    def _answered(self, sending: _Sending, link: Link) -> bool | None:
        """Whether the rest is wanted, too; None: there is no answer yet."""
        header = link.receive(0.0)
        if header is None:
            return None
        reply = _reply(header)
        return isinstance(reply, ResidualKept) and reply.wanted


def _wait(links: Sequence[Link]) -> None:
    """Wait until a server has answered, for a moment at most."""
    poll = select.poll()
    for link in links:
        if link.fileno() >= 0:
            poll.register(link, select.POLLIN)
    poll.poll(LOOK_S * 1000)


def fetch(
    block: Block, shards: int, reach: Reach, limit_s: float
) -> tuple[Floats | None, set[int]]:
    """What a checkpoint has of this rank's residual of a block, for a run that goes on from it.

    Returns:
        [block.size], None: nothing; and the ranks of which it has none.
    Raises:
        CheckpointDamaged: a file of it is. Timeout, ConnectTimeout: a server did not answer.
            ConnectionError: it ended meanwhile. The client has nothing of it.
    """
    found: Floats | None = None
    lost = set[int]()
    until = time.monotonic() + limit_s
    for shard in range(shards):
        low, high = block.range(shard)
        if low == high:
            continue
        link = reach(shard, max(until - time.monotonic(), 0.0))
        try:
            for start in range(low, high, RESIDUAL_ELEMENTS_MAX):
                count = min(RESIDUAL_ELEMENTS_MAX, high - start)
                link.send(encode(AskResidual(block.id, start, count)))
                reply = _answer(link, until - time.monotonic())
                assert isinstance(reply, ResidualFound), f"{reply!r} answers {AskResidual}"
                lost |= set(reply.lost)
                if reply.count:
                    if found is None:
                        found = np.zeros(block.size, np.float32)
                    part = found[start : start + count]
                    link.read_payload([part.view(np.uint8)])
        finally:
            with suppress(ConnectionError):
                link.close()
    return found, lost


def _answer(link: Link, limit_s: float) -> Any:
    """What a server answers.

    Raises:
        Timeout: nothing in time. ParamServeError: what it refuses.
    """
    until = time.monotonic() + limit_s
    header = None
    while header is None:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise Timeout(
                f"the server at {link.address} did not answer about a residual in {limit_s:.1f} s",
                fix="look at the server",
            )
        header = link.receive(left_s)
    return _reply(header)


def _reply(header: bytes) -> Any:
    reply = _decode(header)
    if isinstance(reply, Refused):
        raise rebuild(reply.kind, reply.failed, reply.applied, reply.fix)
    return reply


class Residuals:
    """A client's residuals in the checkpoints of its cluster: none, where no block's codec leaves
    anything out, or where no checkpoints are written.

    """

    def __init__(self, connection: Connection, steps: Steps) -> None:
        self._lost: dict[str, set[int]] = {}
        """By group: ranks whose residuals the checkpoint does not have that the run goes on
        from."""
        self._begun: set[str] = set()
        """Groups where this client has begun with one."""
        self._connection = connection
        self._steps = steps
        self._blocks: list[Block] = []
        exchange = connection.exchange
        self._sender = ResidualSender(len(exchange.shards), exchange.reach, self._blocks.copy)

    def defined(self, block: Block, limit_s: float) -> None:
        """This client has come to know of a block, and has pushed nothing to it: begin with what
        the checkpoint has of its residual.

        Raises:
            CheckpointDamaged, Timeout, ServerGone: it was not to be had. The client has nothing of
                it.
        """
        if self._connection.rank == NO_RANK or block.table is not None:
            return
        with suppress(UnknownCodec):  # a client that pushes to it is told
            if block.push_codec is None or not block.push_codec.feedback:
                return
            encoder, shards = self._steps.encoder, self._connection.exchange
            assert encoder is not None, "it has a codec"
            self._blocks.append(block)
            if self._connection.keeps and encoder.captured is None:
                encoder.captured = self._sender.send
                self._connection.hear_of_cuts(encoder.cut_at)
            if self._connection.before:
                try:
                    left, lost = fetch(block, len(shards.shards), shards.reach, limit_s)
                except ConnectionError as error:
                    raise ServerGone(
                        f"rank {self._connection.rank} asked for its residual of group "
                        f"{block.group_name!r}: {error}",
                        fix="look at the servers; a new worker of this rank may join",
                    ) from error
                self._lost.setdefault(block.group_name, set()).update(lost)
                if left is not None:
                    encoder.begin(block, left)
                    self._begun.add(block.group_name)

    def lost_of(self, group: str) -> set[int]:
        """Ranks that go on in a group without what they had left out of their gradients: as far as
        this client knows, which knows of itself what others do not."""
        own = set() if group in self._begun else {self._connection.rank}
        return own | self._lost.get(group, set())

    def leave(self, wait_s: float) -> None:
        """This client ends, and sends no more: leave its residuals with the servers, as of what was
        answered.

        Args:
            wait_s: for answers, and for what is under way of a checkpoint.
        Raises:
            ClientClosed: an answer was being taken when the client was interrupted: what it has is
                as of no request. ServerGone: a server is. Nothing was left.
        """
        encoder, exchange = self._steps.encoder, self._connection.exchange
        if encoder is None or encoder.captured is None:
            return
        exchange.settle(wait_s)
        self._sender.close(wait_s)
        with self._connection.lock:
            exchange.check_answers()
            last = min(shard.session.oldest for shard in exchange.shards) - 1
            left = encoder.left()
        if left:
            self._sender.send_last(last, left)

    def stopped(self) -> None:
        """This client is told to end: as `leave`, as far as that can be done."""
        with suppress(ParamServeError):
            self.leave(STOP_S)

    def close(self) -> None:
        """Send no more."""
        self._sender.close(0.0)
