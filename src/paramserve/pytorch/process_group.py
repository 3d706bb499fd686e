"""`worker.process_group`: a `torch.distributed` group of all workers of a run.

The workers find each other through the servers, by values without a rule: when all are there, they
meet at a store of torch's that rank 0 has opened. What then goes between them is torch's own,
beside the servers: it is neither authenticated nor encrypted.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # torch does not say it exports them
    PrefixStore,
    TCPStore,
)

from paramserve.config import BUFFERS
from paramserve.errors import DefineTimeout, ParamServeError, Timeout
from paramserve.transport.tcp import family_of, reached_at, split_place, way_to

if TYPE_CHECKING:
    from paramserve.client import Client

_GROUP = f"process-group{BUFFERS}"
"""Group in which the ranks exchange their addresses. Of groups whose names end so, a result shows
nothing by itself."""
CARD_BYTES = 320
"""Room for a host's name, at most 253 characters (RFC 1035), and a device's."""
LEAST_S = 0.1
"""How long is asked for a rank when the time is over: those that are there answer at once."""
LOOPBACK = "127.0.0.1"
_opened: WeakKeyDictionary[Client, TCPStore] = WeakKeyDictionary()
"""Stores to which not all ranks have come yet."""
_LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
_INTERFACE = "GLOO_SOCKET_IFNAME"


class StartedGroup(NamedTuple):
    """A process group, and what is to be undone at its end."""

    group: dist.ProcessGroup
    set_interface: bool

    def end(self) -> None:
        """Destroy it; nothing if that was done."""
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.set_interface:
            os.environ.pop(_INTERFACE, None)


def start(
    client: Client,
    backend: str | None = None,
    *,
    host: str | None = None,
    timeout_s: float | None = None,
) -> StartedGroup:
    """Make the default process group of this process; see `Worker.process_group`."""
    _check(client)
    limit_s = timeout_s if timeout_s is not None else client.timeout_s
    place = host if host is not None else own_host(client.connection.addresses)
    set_interface = _bind_gloo(place)
    try:
        group = _join(client, backend, place, limit_s)
    except BaseException as error:
        if set_interface:
            os.environ.pop(_INTERFACE, None)
        if isinstance(error, dist.DistError):
            raise Timeout(
                f"the process group of {client.connection.workers} workers was not made on rank "
                f"{client.rank} in {limit_s:.1f} s: {error}",
                fix="look whether the workers can reach each other; host= names this worker's "
                "address for the others",
            ) from error
        raise
    return StartedGroup(group, set_interface)


def _check(client: Client) -> None:
    who = f"rank {client.rank}"
    if client.rank < 0:
        raise ParamServeError(
            "a process group is for workers, and this client has no rank", fix="use a worker's"
        )
    joined = client.connection
    if joined.incarnation > 1 or joined.added_late:
        again = f"was started again (incarnation {joined.incarnation})"
        reason = "" if joined.added_late else again
        raise ParamServeError(
            f"no process group for {who}, which {reason or 'came later than the others'}: a "
            "process group cannot take a worker in later",
            fix="run without ps.Restart and job.scale, or keep the dense layers on the servers "
            '(dense="servers"), where workers may come and go',
        )
    if dist.is_initialized():
        raise ParamServeError(
            f"{who} has a process group of torch.distributed already, which is not the worker's",
            fix="use that one, or destroy it first",
        )


def _join(client: Client, backend: str | None, host: str, limit_s: float) -> dist.ProcessGroup:
    limit = timedelta(seconds=limit_s)
    store = _store_of(client, host, limit) if client.rank == 0 else None
    own = _Card(host, store.port if store is not None else 0, _device())
    cards = _meet(client, own, limit_s)
    _opened.pop(client, None)
    if store is None:
        first = cards[0]
        store = TCPStore(
            first.host, first.port, client.connection.workers, False, limit, wait_for_workers=False
        )
    dist.init_process_group(
        backend if backend is not None else _backend(cards),
        store=PrefixStore("group", store),
        rank=client.rank,
        world_size=client.connection.workers,
        timeout=limit,
    )
    group = dist.group.WORLD
    assert group is not None, "just made"
    return group


# --- where -------------------------------------------------------------------------------------


def own_host(addresses: Sequence[str]) -> str:
    """This worker's host as the other workers reach it.

    Args:
        addresses: the coordinator's, the reached one first. Where it was reached by a Unix socket
            it is on this host, and its TCP address has this host's; without one all are here.
    """
    first, *others = addresses
    if first.startswith("tcp:"):
        host, _ = split_place(first.removeprefix("tcp:"))
        return way_to(host)
    for address in others:
        if address.startswith("tcp:"):
            return reached_at(split_place(address.removeprefix("tcp:"))[0])
    return LOOPBACK


def _bind_gloo(host: str) -> bool:
    """Have gloo listen on this address only; whether a variable was set for it.

    Without being told, gloo takes the address that the host's name stands for. It is told by its
    variable, here for the life of the group, unless the user has set that.
    """
    if _INTERFACE in os.environ:
        return False
    name = _LOOPBACK_INTERFACE if _is_loopback(host) else _interface_of(host)
    if name is None:
        return False
    os.environ[_INTERFACE] = name
    return True


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _interface_of(host: str) -> str | None:
    """The network interface with this address, for `GLOO_SOCKET_IFNAME`; None: not found, or not
    on this system."""
    if not sys.platform.startswith("linux"):
        return None
    if ":" in host:
        return _interface_of_ipv6(host)
    import fcntl

    get_address = 0x8915  # SIOCGIFADDR, linux/sockios.h
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        host_bytes = socket.inet_aton(socket.gethostbyname(host))
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no such address
                request = name.encode()[:15].ljust(256, b"\0")
                if fcntl.ioctl(asking, get_address, request)[20:24] == host_bytes:
                    return name
    return None


def _interface_of_ipv6(host: str) -> str | None:
    """The network interface with this IPv6 address; None: not found."""
    with contextlib.suppress(OSError):
        host_bytes = socket.inet_pton(socket.AF_INET6, host.partition("%")[0]).hex()
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, *_, name = line.split()
            if address == host_bytes:
                return name
    return None


# --- meeting -----------------------------------------------------------------------------------


class _Card(NamedTuple):
    """What each rank tells the others."""

    host: str
    port: int
    """Port of the store, which is rank 0's; 0 on all others."""
    device: str
    """What tells its CUDA device from all others; empty: it has none."""

    def written(self) -> npt.NDArray[np.int64]:
        """Card as a value that the servers hold: [1 + CARD_BYTES]."""
        text = f"{self.host} {self.device}".encode()
        card = np.zeros(1 + CARD_BYTES, np.int64)
        card[0] = self.port
        card[1 : 1 + len(text)] = np.frombuffer(text, np.uint8)
        return card

    @classmethod
    def read(cls, value: npt.NDArray[Any]) -> _Card:
        """What `written` gave."""
        host, device = bytes(value[1:].astype(np.uint8)).rstrip(b"\0").decode().split(" ")
        return cls(host, int(value[0]), device)


def _meet(client: Client, own: _Card, limit_s: float) -> list[_Card]:
    """The cards of all ranks, when all are there.

    Raises:
        Timeout: some did not come; the text names them.
    """
    until = time.monotonic() + limit_s
    written = {_name(client.rank): own.written()}
    client.define(written, rule=None, group=_GROUP)
    client.assign(written)  # an earlier call may have defined another one
    cards = []
    for rank in range(client.connection.workers):
        shapes = {_name(rank): (1 + CARD_BYTES,)}
        left_s = max(until - time.monotonic(), LEAST_S)
        try:
            block = client.directory.await_block(
                shapes, dtype=np.dtype(np.int64), rule=None, group=_GROUP, timeout_s=left_s
            )
        except DefineTimeout as error:
            raise _late(client, limit_s) from error
        cards.append(_Card.read(client.dense.fetch(block, 0)[0]))
    return cards


def _name(rank: int) -> str:
    return f"rank {rank}"


def _late(client: Client, limit_s: float) -> Timeout:
    there = {
        piece.name
        for block in client.blocks()
        if block.group_name == _GROUP
        for piece in block.pieces
    }
    missing = [str(rank) for rank in range(client.connection.workers) if _name(rank) not in there]
    return Timeout(
        f"the process group timed out: rank {client.rank} waited {limit_s:.1f} s for "
        f"rank{'s' if len(missing) != 1 else ''} {', '.join(missing)} of "
        f"{client.connection.workers} to call worker.process_group()",
        fix="call it on all ranks at the same point; or raise timeout_s",
    )


def _store_of(client: Client, host: str, limit: timedelta) -> TCPStore:
    """The store of rank 0: that of its last call, if the others did not come in time. They may have
    read its card since, and connect to it."""
    store = _opened.get(client)
    if store is None:
        store = _opened[client] = _open_store(host, client.connection.workers, limit)
    return store


def _open_store(host: str, workers: int, limit: timedelta) -> TCPStore:
    """Torch's store of the group, which listens on this address only."""
    # Left to itself it listens on every address of the host.
    with socket.create_server((host, 0), family=family_of(host)) as listening:
        port = listening.getsockname()[1]
        descriptor = os.dup(listening.fileno())
        return TCPStore(
            host,
            port,
            workers,
            True,
            limit,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )


def _device() -> str:
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _backend(cards: Sequence[_Card]) -> str:
    """NCCL for CUDA tensors only if no two workers share a device: it refuses that."""
    devices = {card.device for card in cards}
    own = "" not in devices and len(devices) == len(cards)
    return "cpu:gloo,cuda:nccl" if own else "gloo"
