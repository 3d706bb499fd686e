"""One server's links to the others: what is sent to them is kept until a connection stands.

Nothing is sent again: of a connection that breaks, what it had taken may be lost. Who sends sees to
it that what must arrive is repeated.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from paramserve.config import Credentials, ServerConfig
from paramserve.errors import ParamServeError
from paramserve.messages import Hello
from paramserve.transport.link import Link

logger = logging.getLogger("paramserve")

QUEUE_MAX = 1024
"""Messages kept for a shard that is still being connected to, or that takes nothing; the oldest
go, `Vote` repeats."""
LOOK_S = 0.01
"""How often is tried whether a shard that took nothing takes more."""


class _Peer:
    """Messages to another shard: kept until the connection stands and takes them."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.queue: deque[bytes] = deque(maxlen=QUEUE_MAX)
        self.connecting = False
        self.waiting = False
        """Whether its link took nothing, and is tried again and again."""


class PeerLinks:
    """Sends messages to other shards, in order. For one thread at a time.

    Args:
        config: of the server that sends.
        connect_s: how long one attempt to reach another server may take.
        spawn: starts a coroutine in the server's event loop.
    """

    def __init__(
        self,
        config: ServerConfig,
        credentials: Credentials,
        connect_s: float,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self.addresses: Sequence[Sequence[str]] = ()
        """Of each shard's server; before they are known, nobody is connected to."""
        self._config = config
        self._credentials = credentials
        self._connect_s = connect_s
        self._spawn = spawn
        self._peers: dict[int, _Peer] = {}
        self._closed = False

    def send(self, shard: int, header: bytes) -> None:
        """Send a message without a payload, now or as soon as there is a connection that takes it.
        Never waits. Once closed, it does nothing."""
        if self._closed:
            return
        peer = self._peers.setdefault(shard, _Peer())
        peer.queue.append(header)
        if not peer.waiting and not self._sent(peer):
            peer.waiting = True
            self._spawn(self._wait(shard, peer))
        self._need(shard, peer)

    def _sent(self, peer: _Peer) -> bool:
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

    def _need(self, shard: int, peer: _Peer) -> None:
        """Connect, if something is kept and there is no connection."""
        if peer.queue and peer.link is None and not peer.connecting and self.addresses:
            peer.connecting = True
            self._spawn(self._connect(shard, peer))

    async def _wait(self, shard: int, peer: _Peer) -> None:
        try:
            while not self._closed and not self._sent(peer):
                await asyncio.sleep(LOOK_S)
        finally:
            peer.waiting = False
        if not self._closed:
            self._need(shard, peer)

    async def _connect(self, shard: int, peer: _Peer) -> None:
        own = self._config.shard
        try:
            link = await asyncio.to_thread(
                Link.connect,
                self.addresses[shard],
                Hello("server", client=own, cluster=self._config.cluster),
                credentials=self._credentials,
                arenas=(),
                timeout_s=self._connect_s,
                lost_s=self._config.deadlines.lost_s,
                limits=self._config.limits,
            )
            if self._closed:
                link.close()
                return
            peer.link = link
            if not peer.waiting and not self._sent(peer):
                peer.waiting = True
                self._spawn(self._wait(shard, peer))
        except (ParamServeError, ConnectionError) as error:
            logger.warning("shard %d cannot reach shard %d: %s", own, shard, error)
        finally:
            peer.connecting = False

    def close(self) -> None:
        """Close all links; one that is being made is closed when it stands."""
        self._closed = True
        for peer in self._peers.values():
            if peer.link is not None:
                peer.link.close()
