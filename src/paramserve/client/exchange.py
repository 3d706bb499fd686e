"""One client's exchange with all shards: it sends requests, waits for answers, and sends again.

It is synchronous: whoever waits polls the sockets in its own thread. Of several waiting threads one
polls and the others wait for what it reads. It knows nothing of names, rules or groups' meaning.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence

from msgspec import structs

from paramserve.client.links import (
    QUICK_TCP_S,
    SPIN_TCP_S,
    WINDOW,
    Connect,
    Links,
    ReachedShard,
    Slot,
)
from paramserve.config import Credentials, Deadlines, Limits
from paramserve.core.session import Operation, SlotPool
from paramserve.errors import ClientClosed, ParamServeError, PushTimeout, rebuild
from paramserve.messages import (
    AskReport,
    Bye,
    Done,
    Inquire,
    Joined,
    ServerBeat,
    ShardReply,
    ShardRequest,
    Waiting,
    decoder,
    encode,
)
from paramserve.transport import forks
from paramserve.transport.link import Link

__all__ = ["WINDOW", "Connect", "Exchange", "Slot", "again", "done"]

logger = logging.getLogger("paramserve")

FIRST_ARENA_BYTES = 1 << 20
RECONNECT_PAUSE_S = 0.01
"""Before a broken link is made anew: no tight loop around a server that refuses."""

_decode = decoder(ShardReply).decode


class Exchange(Links):
    """Requests to shards and their answers.

    Args:
        joined: identity and addresses, from the coordinator.
        rank: of the worker, or -1.
        connect: how a shard is reached at its addresses.
    """

    def __init__(
        self,
        joined: Joined,
        rank: int,
        credentials: Credentials,
        limits: Limits,
        deadlines: Deadlines,
        connect: Connect = Link.connect,
    ) -> None:
        super().__init__(joined, rank, credentials, limits, deadlines, connect)
        self._condition = threading.Condition(self._lock)
        """Of the lock; notified when a thread has read something."""
        self._waiters = 0
        self._polling = False
        self.waited_s = 0.0
        """Seconds that calls have waited for answers; where several threads wait, each counts."""
        self._reason: ParamServeError | None = None
        """Why it was closed, if not because somebody wanted it."""
        self._pid = os.getpid()
        self._add_arena(FIRST_ARENA_BYTES)
        try:
            for shard in self.shards:
                self._connect(shard, deadlines.start_s)
            self._hello = structs.replace(self._hello, again=True)
        except BaseException:
            self.close()
            raise
        forks.watch(self)

    def _connect(self, shard: ReachedShard, timeout_s: float) -> Link:
        link = super()._connect(shard, timeout_s)
        if not link.shared:
            self._quick_s, self._spin_s = QUICK_TCP_S, SPIN_TCP_S
        return link

    def _reconnect(self, shard: ReachedShard, why: Exception) -> None:
        """Make a broken link anew and send again what is unanswered; or give the shard up."""
        self._disconnect(shard)
        if self._closed:
            return
        if self._gone is not None:  # With one shard the cluster is lost: the others end as well.
            self._give_up(shard, self._gone)
            return
        time.sleep(RECONNECT_PAUSE_S)
        try:
            self._connect(shard, self._deadlines.reconnect_s)
            for message in shard.session.to_resend():
                self._transmit(shard, message)
        except ConnectionError:
            self._disconnect(shard)  # It broke again.
        except (ParamServeError, OSError) as error:
            logger.debug("shard %d is given up: %s; before: %s", shard.number, error, why)
            self._give_up(shard, error)

    # --- sending -----------------------------------------------------------------------------

    def make_room(self, timeout_s: float, requests: int = 1) -> None:
        """Wait until every session's window has room: then a call goes to all shards or to none.

        Args:
            requests: of the call, to each shard.
        Raises:
            ServerGone, WorkerFenced: a shard is gone. ClientClosed: the client was closed.
            PushTimeout: a shard left too much unanswered for `timeout_s`. In all cases nothing
                was sent, and what the caller has captured is still to be sent.
        """
        for shard in self.shards:
            if shard.gone is not None or not shard.session.has_room(requests):
                self._wait_for_room(timeout_s, requests)
                return

    def _wait_for_room(self, timeout_s: float, requests: int) -> None:
        began = time.monotonic()
        deadline = began + timeout_s
        with self._lock:
            while True:
                self._check_gone()
                full = next((s for s in self.shards if not s.session.has_room(requests)), None)
                if full is None:
                    self.waited_s += time.monotonic() - began
                    return
                if not self._progress(deadline):
                    raise PushTimeout(
                        f"shard {full.number} left {full.session.window} calls unanswered for "
                        f"{timeout_s:.1f} s",
                        fix="look at that server, or raise timeout_s",
                    )

    def _check_gone(self) -> None:
        """Raise what a shard was lost by, for a call that has sent nothing."""
        if self._gone is not None:
            raise rebuild(type(self._gone).__name__, self._gone.failed, "no", self._gone.fix)

    def submit(self, requests: Sequence[ShardRequest], operation: Operation) -> None:
        """Send one request to each shard, in shard order; returns before they are answered.

        `make_room` comes first, by the same thread.

        Args:
            operation: what is to happen when it is complete must be agreed already, since another
                thread may read the answers at once.
        Raises:
            ClientClosed: nothing was sent.
        """
        with self._lock:
            if self._closed:
                raise self._ended()
            for shard, message in zip(self.shards, requests, strict=True):
                if self._gone is not None:
                    operation.failed(self._gone)
                    continue
                numbered = shard.session.submit(message, operation)
                # A broken link is made anew by whoever reads next, and this is sent again.
                try:
                    self._transmit(shard, numbered)
                except ConnectionError:
                    self._disconnect(shard)

    def submit_together(self, calls: Sequence[tuple[Sequence[ShardRequest], Operation]]) -> None:
        """Send several requests to each shard in one frame; for the rest as `submit`.

        Args:
            calls: one request for each shard, in shard order, and the operation that they are.
        """
        with self._lock:
            if self._closed:
                raise self._ended()
            for shard in self.shards:
                if self._gone is not None:
                    for _, operation in calls:
                        operation.failed(self._gone)
                    continue
                numbered = [
                    shard.session.submit(requests[shard.number], operation, first=not index)
                    for index, (requests, operation) in enumerate(calls)
                ]
                try:
                    self._transmit_together(shard, numbered)
                except ConnectionError:
                    self._disconnect(shard)

    # --- waiting -----------------------------------------------------------------------------

    def wait(self, operation: Operation, timeout_s: float) -> bool:
        """Wait until every shard has answered; False after `timeout_s`.

        Raises:
            ClientClosed: the client was closed meanwhile.
        """
        began = time.monotonic()
        deadline = began + timeout_s
        with self._lock:
            while not operation.complete and self._progress(deadline):
                pass
            self.waited_s += time.monotonic() - began
            return operation.complete

    def poll(self, operation: Operation) -> bool:
        """Read what has come, without waiting; whether the operation is complete."""
        with self._lock:
            if not operation.complete and not self._polling and not self._closed:
                self._read(self._ready(0.0))
                if self._waiters:
                    self._condition.notify_all()
            return operation.complete

    def _progress(self, deadline: float) -> bool:
        """Read at least one answer, or let another thread do so; False past the deadline."""
        if self._closed:
            raise self._ended()
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        if self._polling:
            self._waiters += 1
            try:
                self._condition.wait(left)
            finally:
                self._waiters -= 1
            return True
        self._polling = True
        try:
            self._lock.release()
            try:
                ready = self._ready(left)
            finally:
                self._lock.acquire()
                self._polling = False
            self._read(ready)
        finally:  # Whatever happened here, one of those who wait polls next.
            if self._waiters:
                self._condition.notify_all()
        return True

    def _read(self, ready: list[ReachedShard]) -> None:
        for shard in ready:
            try:
                if shard.link is None:
                    raise ConnectionError("not connected")
                header = shard.link.receive(0.0)
                while header is not None:
                    self._take(shard, header)
                    header = shard.link.buffered()
            except ConnectionError as error:
                self._reconnect(shard, error)
            except ParamServeError as error:
                if isinstance(error, ClientClosed):
                    raise
                self._give_up(shard, error)

    def _take(self, shard: ReachedShard, header: bytes) -> None:
        assert shard.link is not None
        reply = _decode(header)
        if type(reply) is not Done:
            if isinstance(reply, Waiting | ServerBeat):
                shard.told = reply
                return
            if reply.seq == 0:  # the server is about to cut this connection, and says why
                raise rebuild(reply.kind, reply.failed, reply.applied, reply.fix)
        if shard.link.payload_bytes:
            sent = shard.session.sent(reply.seq)
            if sent is None:
                shard.link.skip_payload()
            else:
                self.payloads.read(shard.number, shard.link, sent)
        shard.session.on_reply(reply)

    def inquire(self, group: int, timeout_s: float) -> list[Waiting]:
        """Ask the shards that owe an answer what they wait for; what came within `timeout_s`."""
        with self._lock:
            asked = [shard for shard in self.shards if shard.session.unanswered]
            answers = self._ask(asked, Inquire(group), timeout_s)
            return [answer for answer in answers if isinstance(answer, Waiting)]

    def reports(self, timeout_s: float) -> list[ServerBeat]:
        """Ask all shards what they have done so far; what came within `timeout_s`.

        Raises:
            ServerGone: a shard is gone.
        """
        with self._lock:
            answers = self._ask(self.shards, AskReport(), timeout_s)
            self._check_gone()
            return [answer for answer in answers if isinstance(answer, ServerBeat)]

    def _ask(
        self, shards: Sequence[ReachedShard], question: Inquire | AskReport, timeout_s: float
    ) -> list[Waiting | ServerBeat]:
        for shard in shards:
            shard.told = None
        asked: dict[int, Link] = {}
        deadline = time.monotonic() + timeout_s
        while True:
            waiting = [each for each in shards if each.told is None and self._gone is None]
            for shard in waiting:  # Not numbered: a question is lost with its link.
                if shard.link is not None and shard.link is not asked.get(shard.number):
                    asked[shard.number] = shard.link
                    self._question(shard, shard.link, question)
            if not waiting or not self._progress(deadline):
                return [shard.told for shard in shards if shard.told is not None]

    def _question(self, shard: ReachedShard, link: Link, question: Inquire | AskReport) -> None:
        try:
            link.send(encode(question))
        except ConnectionError:
            self._disconnect(shard)

    def settle(self, timeout_s: float) -> bool:
        """Wait until every request has been answered; False after `timeout_s`."""
        began = time.monotonic()
        deadline = began + timeout_s
        settled = True
        with self._lock:
            while settled and any(shard.session.unanswered for shard in self.shards):
                settled = self._progress(deadline)
            self.waited_s += time.monotonic() - began
            return settled

    def close(self, reason: ParamServeError | None = None, *, bye: bool = True) -> None:
        """Say goodbye, close the links, let go of the arenas. Repeating is safe.

        Args:
            reason: what calls under way raise; None: that the client was closed.
            bye: whether the servers are told that this is its own wish.
        """
        with self._lock:
            if self._closed:
                return
            self._reason = reason
            for shard in self.shards:
                if shard.link is not None and bye:
                    with contextlib.suppress(ConnectionError, ParamServeError):
                        shard.link.send(encode(Bye()))
                self._disconnect(shard)
            self._closed = True
            for shard in self.shards:
                shard.session.abandon(self._ended())
            for arena in self._arenas.values():
                arena.close()
            # The pool's slots hold on to the memory, and it to this object.
            self._pool = SlotPool(self._slot)
            self._returned.clear()
            self._condition.notify_all()

    def abandon(self) -> None:
        """This process is a fork of the client's: whoever waits on its copy is told so."""
        self._closed = True
        self._lock = threading.RLock()  # Another thread of the parent may have held the old one.
        self._condition = threading.Condition(self._lock)

    def _ended(self) -> ParamServeError:
        if os.getpid() != self._pid:
            return forks.forked(f"shard {self.shards[0].addresses[0]}", self._pid)
        if self._reason is not None:
            return again(self._reason)
        return ClientClosed("the client was closed", fix="make a new one with cluster.client()")


def again(error: ParamServeError) -> ParamServeError:
    """A fresh copy of an error that is raised more than once: each has its own traceback."""
    return rebuild(type(error).__name__, error.failed, error.applied, error.fix)


def done(operation: Operation) -> list[Done]:
    """The shards' answers, in shard order; the operation is complete and has no error."""
    replies = operation.replies
    return list(replies.values()) if len(replies) == 1 else [replies[k] for k in sorted(replies)]
