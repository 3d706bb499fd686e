"""Calling the coordinator: one connection, one call at a time, from any thread."""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from msgspec import structs

from paramserve.config import Credentials, Deadlines, Limits
from paramserve.errors import (
    ClientClosed,
    ConnectTimeout,
    CoordinatorGone,
    ParamServeError,
    Timeout,
    rebuild,
)
from paramserve.logs import event
from paramserve.messages import (
    CoordinatorNotice,
    CoordinatorReply,
    CoordinatorRequest,
    Failed,
    Hello,
    Reconnect,
    Refused,
    ServerEnds,
    ServerNotice,
    decoder,
    encode,
)
from paramserve.transport.link import EndedByPeer, Link
from paramserve.transport.redial import Redial
from paramserve.transport.tcp import LOST_S

logger = logging.getLogger("paramserve")

R = TypeVar("R")

REPLY_SLACK_S = 5.0
"""How much longer than the coordinator's own deadline a caller waits for its answer."""
LOOK_S = 1.0
"""How often a thread that waits for an answer looks whether another thread has ended the
connection."""
ATTEMPT_S = 2.0
"""Seconds for one attempt to connect again to a coordinator that does not answer; a process that is
told to end ends no later than this."""
HURRY_S = 0.25
"""Seconds of the first attempt, and where no process listens or this side is about to end."""
HURRIED_IO_S = 1.0
"""Seconds that the coordinator may take nothing of a message while this side is ending."""
AGAIN_S = 0.02
"""Seconds between two attempts."""
NOTIFY_S = 1.0
"""How long a heartbeat waits for another thread of this process that sends."""

_decode = decoder(CoordinatorReply | ServerNotice | Refused).decode


class ControlLink:
    """A connection to the coordinator.

    Servers also get `ServerNotice`s on it, unasked: `notices` has those that came in.
    """

    def __init__(self, link: Link, addresses: Sequence[str]) -> None:
        self.address = link.address
        self.addresses = tuple(addresses)
        """All of the coordinator's; `address` is the one that was reached."""
        self.notices: deque[ServerNotice] = deque()
        self._link = link
        self._others: list[Link] = []
        """Further links by which the coordinator may know this side: open until it has taken the
        next one, since it takes the end of the one that it knows for the end of this process."""
        # An interrupt can come right after a lock was taken, before that is noted: so each is
        # released without asking, and raises RuntimeError if this thread does not have it. Nothing
        # else may be called there (as `suppress`): an interrupt would come before the release.
        self._lock = threading.RLock()
        """Held for a whole call: one at a time."""
        self._io = threading.RLock()
        """Held while the link is used, but not while an answer is waited for: a heartbeat can be
        sent meanwhile. Not one for each direction: TLS takes no two threads at once."""
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)
        self._call = 0
        self._posted = 0
        """The call that was posted last; 0: none was."""
        self._answer: CoordinatorReply | None = None
        """Answer to that call."""
        self._dial: Callable[[float], Link] | None = None
        self._identity: Reconnect | None = None
        self._deadlines = Deadlines()
        self._refusal: ParamServeError | None = None
        """Why the coordinator does not let this side go on."""
        self._given_up = False
        """Whether another attempt to connect is of no use."""
        self._hurried = self._closed = False

    @classmethod
    def connect(
        cls,
        addresses: Sequence[str],
        hello: Hello,
        *,
        credentials: Credentials,
        limits: Limits,
        timeout_s: float,
        lost_s: float = LOST_S,
        may_retry: Callable[[], bool] = lambda: True,
    ) -> ControlLink:
        """Connect, trying again while no process listens there yet.

        Args:
            may_retry: asked before each further attempt: whether there is to be one.
        Raises:
            ConnectTimeout: no answer in `timeout_s`.
            NotAuthenticated: the coordinator does not take these credentials.
        """
        dial = partial(
            Link.connect, addresses, hello, credentials=credentials, limits=limits, lost_s=lost_s
        )
        control = cls(dial(timeout_s=timeout_s, may_retry=may_retry), addresses)
        control._dial = lambda limit_s: dial(timeout_s=limit_s)
        return control

    def identify(self, identity: Reconnect, deadlines: Deadlines) -> None:
        """Send this first on each new connection from now on; the calls that follow must be such
        that repeating them is safe."""
        self._identity, self._deadlines = identity, deadlines
        self._link.keep_open()

    def begin_anew(self, timeout_s: float) -> None:
        """Connect again as one whom the coordinator does not know yet; `identify` says who it is.

        Raises:
            As `connect`; and Timeout: another thread's call was under way until then.
        """
        assert self._dial is not None
        if not self._lock.acquire(timeout=timeout_s):
            raise Timeout(
                f"another call to the coordinator at {self.address} took {timeout_s:.1f} s",
                fix="try again",
            )
        try:
            link = self._dial(timeout_s)
            with self._io:
                before, self._link = self._link, link
                self._poll = select.poll()
                self._poll.register(link, select.POLLIN)
                self._identity = self._refusal = None
                self._given_up = False
                before.close()
            self._close_others()
            self.address = link.address
        finally:
            self._lock.release()

    def hurry(self) -> None:
        """This side is about to end: a broken connection is tried once more, for `HURRY_S`, and one
        that takes nothing for `HURRIED_IO_S` is broken, also where another thread waits there."""
        self._hurried = True
        self._link.io_timeout_s = HURRIED_IO_S

    def restore(
        self, timeout_s: float | None = None, *, ended: Callable[[], bool] = lambda: False
    ) -> bool:
        """Make a broken connection anew, and say who this is: where no process listens it is tried
        for `reconnect_s`, where there is no answer for `stall_s`.

        Args:
            timeout_s: how long at most, also for another thread's call; None: such a call sees to
                it by itself.
            ended: whether it is no longer wanted.
        Returns:
            Whether there is a connection.
        """
        if self._identity is None:
            return self._link.fileno() >= 0
        began = time.monotonic()
        limit_s = timeout_s if timeout_s is not None else self._deadlines.stall_s
        deadline = began + min(limit_s, self._deadlines.stall_s)
        redial = Redial(deadline, AGAIN_S, ATTEMPT_S, hurry=HURRY_S)
        try:
            if not self._lock.acquire(timeout=timeout_s if timeout_s is not None else 0.0):
                return False
            now = time.monotonic()
            while self._link.fileno() < 0:
                if now >= deadline or self._closed or self._given_up or ended():
                    return False
                failure = self._reconnect(redial.limit_s(now), deadline, ended)
                now = time.monotonic()
                if failure is None:
                    continue
                if isinstance(failure, ConnectionRefusedError | FileNotFoundError):
                    self._given_up = now - began >= self._deadlines.reconnect_s or self._hurried
                else:
                    self._given_up = self._refusal is not None or self._hurried
                    redial.wait_longer()
                again_at = redial.next_at(now)
                if again_at is None or self._given_up:
                    return False
                time.sleep(again_at - now)  # it may have failed at once
                now = again_at
            return True
        finally:
            try:  # noqa: SIM105  # no call comes before the release
                self._lock.release()
            except RuntimeError:
                pass

    def _reconnect(
        self, limit_s: float, until: float, ended: Callable[[], bool]
    ) -> BaseException | None:
        """One attempt; what it failed with. The caller holds `_lock`."""
        assert self._identity is not None
        assert self._dial is not None
        self._call += 1
        try:
            link = self._dial(limit_s)
            link.keep_open()
            poll = select.poll()
            poll.register(link, select.POLLIN)
            links = [*self._others, self._link, link]
            self._others = [each for each in links if each.broken_off or each.fileno() >= 0]
            # Before any heartbeat: the coordinator must know the sender.
            link.send(encode(structs.replace(self._identity, call=self._call)))
            with self._io:
                self._link, self._poll = link, poll
                if self._hurried:
                    link.io_timeout_s = HURRIED_IO_S
            # What follows on this connection is read behind it, also where no answer comes in time.
            reply = None
            while reply is None and time.monotonic() < until and not (self._closed or ended()):
                if self._hurried:
                    until = min(until, time.monotonic() + limit_s)
                reply = self._await(self._call, min(until, time.monotonic() + LOOK_S))
            if isinstance(reply, Failed):
                raise rebuild(reply.kind, reply.failed, reply.applied, reply.fix)
            if reply is not None:
                self._close_others()
        except ConnectTimeout as error:
            return error.__cause__
        except ConnectionError as error:
            return error
        except ParamServeError as error:
            self._refusal = error
            self._link.close()
            return error
        self.address = link.address
        if self._closed:
            link.close()
        extra = event("reconnected", address=self.address)
        logger.info("connected to the coordinator at %s again", self.address, extra=extra)
        return None

    def _close_others(self) -> None:
        others, self._others = self._others, []
        for each in others:
            if each is not self._link:
                each.close()

    def call(
        self,
        message: CoordinatorRequest,
        kind: type[R],
        *,
        timeout_s: float,
        slack_s: float = REPLY_SLACK_S,
    ) -> R:
        """Call as `_call_once`, but on a new connection where the first one breaks."""
        deadline = time.monotonic() + timeout_s + slack_s
        while True:
            if self._refusal is not None:
                raise self._refused(self._refusal)
            try:
                return self._call_once(message, kind, timeout_s=timeout_s, slack_s=slack_s)
            except CoordinatorGone:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self.restore(left_s):
                    if self._refusal is not None:
                        raise self._refused(self._refusal) from None
                    raise

    def _refused(self, error: ParamServeError) -> ParamServeError:
        return rebuild(type(error).__name__, error.failed, error.applied, error.fix)

    def _call_once(
        self,
        message: CoordinatorRequest,
        kind: type[R],
        *,
        timeout_s: float,
        slack_s: float = REPLY_SLACK_S,
    ) -> R:
        """Send a request and wait for its reply.

        Raises:
            ParamServeError: the coordinator's own refusal.
            CoordinatorGone: the connection broke. Whether the call had an effect is unknown.
            ClientClosed: an earlier call was interrupted within a message, which ended it: the
                coordinator does not know yet who this is.
            Timeout: no reply in `timeout_s` + `slack_s`.
        """
        deadline = time.monotonic() + timeout_s + slack_s
        reply = None
        try:
            if self._lock.acquire(timeout=max(timeout_s + slack_s, 0.0)):
                self._call += 1
                if self._send(structs.replace(message, call=self._call), deadline):
                    reply = self._await(self._call, deadline)
        except ConnectionError as error:
            raise self._lost_error(error) from error
        finally:
            try:  # noqa: SIM105  # no call comes before the release
                self._lock.release()
            except RuntimeError:
                pass
        if reply is None:
            raise Timeout(
                f"the coordinator at {self.address} did not answer "
                f"{type(message).__name__} in {timeout_s + slack_s:.1f} s",
                applied="unknown",
                fix="look whether its process runs",
            )
        if isinstance(reply, Failed):
            raise rebuild(reply.kind, reply.failed, reply.applied, reply.fix)
        assert isinstance(reply, kind), f"{reply!r} answers {message!r}"
        return reply

    def _await(self, number: int, deadline: float) -> CoordinatorReply | None:
        while (remaining_s := deadline - time.monotonic()) > 0:
            header = self._receive(remaining_s)
            if header is None:
                continue
            reply: CoordinatorReply | ServerNotice | Refused = _decode(header)
            if isinstance(reply, Refused):  # And the coordinator has ended the connection.
                raise rebuild(reply.kind, reply.failed, reply.applied, reply.fix)
            if not isinstance(reply, ServerNotice) and reply.call == number:
                return reply
            self._keep(reply)
        return None

    def _keep(self, reply: CoordinatorReply | ServerNotice) -> None:
        """Keep what came and is no answer to the call under way."""
        if isinstance(reply, ServerNotice):
            self.notices.append(reply)
        elif reply.call == self._posted:
            self._answer = reply

    def post(self, message: CoordinatorRequest) -> int:
        """Send a request and never wait; of several, the answer to the last one is kept.

        Returns:
            Its number, for `answer`. 0: another call is under way, or the coordinator is gone, or
            takes nothing. Nothing was sent.
        """
        try:
            if not self._lock.acquire(blocking=False):
                return 0
            self._call += 1
            request = structs.replace(message, call=self._call)
            if not self._send(request, time.monotonic(), waits=False):
                return 0
            self._posted, self._answer = self._call, None
            return self._posted
        except (ConnectionError, ClientClosed):
            return 0
        finally:
            try:  # noqa: SIM105  # no call comes before the release
                self._lock.release()
            except RuntimeError:
                pass

    def answer(self, number: int) -> CoordinatorReply | None:
        """The answer to the request that was posted with this number, a `Failed` too; None: it has
        not come, or another call is under way. Does not wait."""
        with contextlib.suppress(ParamServeError):  # a heartbeat makes the connection anew
            self._read()
        return self._answer if number == self._posted else None

    def _send(
        self,
        message: CoordinatorRequest | CoordinatorNotice | ServerEnds,
        deadline: float,
        *,
        waits: bool = True,
    ) -> bool:
        """False: another thread was sending until the deadline, or the coordinator takes nothing,
        and `waits` is False. Nothing was sent."""
        done = False
        try:
            if self._io.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
                if waits:
                    self._link.send(encode(message))
                    done = True
                else:
                    done = self._link.offer(encode(message))
        finally:
            try:  # noqa: SIM105  # no call comes before the release
                self._io.release()
            except RuntimeError:
                pass
        return done

    def _receive(self, timeout_s: float) -> bytes | None:
        """The next header; None: not in time, or not in `LOOK_S`. The caller holds `_lock`."""
        timeout_s = min(timeout_s, LOOK_S)
        # Frames that came together are held by the link: it is asked before the socket is.
        header = self._take(timeout_s)
        if header is None and timeout_s > 0:
            self._poll.poll(timeout_s * 1000)
            header = self._take(timeout_s)
        return header

    def _take(self, timeout_s: float) -> bytes | None:
        """What is there; the time is for another thread that sends."""
        header = None
        try:
            if self._io.acquire(timeout=timeout_s):
                header = self._link.receive(0.0)
        finally:
            try:  # noqa: SIM105  # no call comes before the release
                self._io.release()
            except RuntimeError:
                pass
        return header

    def notify(self, message: CoordinatorNotice | ServerEnds, *, waits: bool = True) -> bool:
        """Send a heartbeat, also while a call waits for its answer.

        Args:
            waits: until the coordinator takes it; False: an event loop must not wait for that.
        Returns:
            False: the coordinator is gone, or takes nothing. Nothing was sent.
        """
        try:
            return self._send(message, time.monotonic() + NOTIFY_S, waits=waits)
        except EndedByPeer as error:
            self._refusal, self._given_up = error.reason, True
            return False
        except (ConnectionError, ClientClosed):
            return False

    def flush(self) -> bool:
        """Send what the coordinator has not taken of a notification that did not wait, and do not
        wait either.

        Returns:
            Whether nothing is left. False: also where another thread uses the connection, or where
            it broke.
        """
        try:
            return self._io.acquire(blocking=False) and self._link.flush()
        except (ConnectionError, ClientClosed):
            return False
        finally:
            try:  # noqa: SIM105  # no call comes before the release
                self._io.release()
            except RuntimeError:
                pass

    def read_notices(self) -> list[ServerNotice]:
        """What came unasked, without waiting; nothing while a call is under way.

        Raises:
            CoordinatorGone: the connection broke.
        """
        if not self._read():
            return []
        notices = list(self.notices)
        self.notices.clear()
        return notices

    def _read(self) -> bool:
        """Keep what has come; False: a call is under way, which does that. Raises as
        `read_notices`."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            while (header := self._receive(0.0)) is not None:
                reply: CoordinatorReply | ServerNotice | Refused = _decode(header)
                if not isinstance(reply, Refused):
                    self._keep(reply)
        except ConnectionError as error:
            raise self._lost_error(error) from error
        finally:
            self._lock.release()
        return True

    def _lost_error(self, error: Exception) -> ParamServeError:
        if isinstance(error, EndedByPeer):
            return self._refused(error.reason)
        if self._link.broken_off and self._identity is None:
            return ClientClosed(
                f"the connection to the coordinator at {self.address} was closed here: an earlier "
                "call was interrupted within a message",
                applied="unknown",
                fix="connect again, as with cluster.client()",
            )
        return CoordinatorGone(
            f"the coordinator at {self.address} is gone ({error})",
            applied="unknown",
            fix="look why its process ended; the run cannot go on without it",
        )

    def fileno(self) -> int:
        """Descriptor for a loop that waits until something arrives."""
        return self._link.fileno()

    def close(self) -> None:
        """Close the connection; repeating is safe."""
        self._closed = True
        with contextlib.suppress(ConnectionError):
            self._link.close()
            self._close_others()
