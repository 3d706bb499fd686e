"""One server's links to the others: what is sent to them is kept until a connection stands.

Nothing is sent again: of a connection that breaks, what it had taken may be lost. The sender sees
to it that what must arrive is repeated.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

from paramserve.config import Credentials, ServerConfig
from paramserve.errors import ParamServeError
from paramserve.logs import event
from paramserve.messages import Hello
from paramserve.transport.link import Link
from paramserve.transport.timing import Loop, Pending

logger = logging.getLogger("paramserve")

CONNECT_S = 5.0
"""How long one attempt to reach another server may take."""
QUEUE_MAX = 1024
"""Messages kept for a shard that is still being connected to, or that takes nothing; the oldest
go, `Vote` repeats."""
LOOK_S: Final = 0.01
"""How often is tried whether a shard that took nothing takes more."""


class PeerLink(Protocol):
    """What is used of a connection to another server; see `transport.link.Link`."""

    def offer(self, header: bytes) -> bool: ...

    def flush(self) -> bool: ...

    def close(self) -> None: ...


Dial = Callable[[Sequence[str], Callable[[], bool]], PeerLink]
"""Reaches another server at one of its addresses, as long as it is wanted; called in a thread,
since it waits."""


def dialer(config: ServerConfig, credentials: Credentials) -> Dial:
    """How the server of a process reaches the others: by sockets."""
    connect = partial(
        Link.connect,
        hello=Hello("server", client=config.shard, cluster=config.cluster),
        credentials=credentials,
        arenas=(),
        timeout_s=CONNECT_S,
        lost_s=config.deadlines.lost_s,
        limits=config.limits,
    )
    return lambda addresses, may_retry: connect(addresses, may_retry=may_retry)


class _Peer:
    """Messages to another shard: kept until the connection stands and takes them."""

    def __init__(self) -> None:
        self.link: PeerLink | None = None
        self.queue: deque[bytes] = deque(maxlen=QUEUE_MAX)
        self.connecting = False
        self.waiting = False
        """Whether its link took nothing, and is tried again and again."""


class PeerLinks:
    """Sends messages to other shards, in order. For one thread at a time.

    Args:
        shard: the one that sends.
        dial: see `Dial`.
    """

    def __init__(self, shard: int, dial: Dial, loop: Loop) -> None:
        self.addresses: Sequence[Sequence[str]] = ()
        """Addresses of each shard's server; before they are known, no connection is made."""
        self._shard = shard
        self._dial = dial
        self._loop = loop
        self._peers: dict[int, _Peer] = {}
        self._closed = False

    def send(self, shard: int, header: bytes) -> None:
        """Send a message without a payload, now or as soon as there is a connection that takes it.
        Never waits. Once closed, it does nothing."""
        if self._closed:
            return
        peer = self._peers.setdefault(shard, _Peer())
        peer.queue.append(header)
        if not peer.waiting and not self._flush(peer):
            self._look_later(shard, peer)
        self._need(shard, peer)

    def _flush(self, peer: _Peer) -> bool:
        """Send what is kept, as far as the peer takes it; False: it does not take all of it now."""
        if peer.link is None:
            return True
        try:
            while peer.queue:
                if not peer.link.offer(peer.queue[0]):
                    return False
                peer.queue.popleft()
            return peer.link.flush()
        except ConnectionError:
            peer.link.close()
            peer.link = None
            return True

    def _look_later(self, shard: int, peer: _Peer) -> None:
        peer.waiting = True
        self._loop.call_later(LOOK_S, partial(self._look, shard, peer))

    def _look(self, shard: int, peer: _Peer) -> None:
        """Try again whether a peer that took nothing takes what is kept."""
        peer.waiting = False
        if self._closed:
            return
        if self._flush(peer):
            self._need(shard, peer)
        else:
            self._look_later(shard, peer)

    def _need(self, shard: int, peer: _Peer) -> None:
        """Connect, if something is kept and there is no connection."""
        if peer.queue and peer.link is None and not peer.connecting and self.addresses:
            peer.connecting = True
            dial = partial(self._dial, self.addresses[shard], lambda: not self._closed)
            dialing = self._loop.run_in_executor(None, dial)
            dialing.add_done_callback(partial(self._connected, shard, peer))

    def _connected(self, shard: int, peer: _Peer, dialing: Pending[PeerLink]) -> None:
        peer.connecting = False
        error = dialing.exception()
        if isinstance(error, ParamServeError | ConnectionError):
            if self._closed:
                return
            extra = event("server-unreachable", role="server", server=self._shard, other=shard)
            text = "shard %d cannot reach shard %d: %s"
            logger.warning(text, self._shard, shard, error, extra=extra)
            return
        link = dialing.result()
        if self._closed:
            link.close()
            return
        peer.link = link
        if not peer.waiting and not self._flush(peer):
            self._look_later(shard, peer)

    def close(self) -> None:
        """Close all links; one that is being made is closed when it stands."""
        self._closed = True
        for peer in self._peers.values():
            if peer.link is not None:
                peer.link.close()
