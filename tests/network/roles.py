"""What runs on the hosts: servers, workers that push what can be told apart, readers, wires.

Each function is the whole life of one process. It tells what happens as lines of JSON.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import signal
import struct
import time
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from tests.network.keeper import Teller, enter

import paramserve as ps
from paramserve.client import BlockPush, Client, Connection
from paramserve.core.partition import Block
from paramserve.errors import ParamServeError, PushTimeout, RankTaken
from paramserve.launch.overview import Overview
from paramserve.rules import PushInfo
from paramserve.rules.add import Add
from paramserve.transport.auth import credentials_of
from paramserve_testing import Counting, Pushed

_TUNSETIFF = 0x400454CA
_TAP = 0x0002 | 0x1000
"""IFF_TAP and IFF_NO_PI (linux/if_tun.h)."""
FRAME_BYTES_MAX = 2048


@dataclass(frozen=True)
class Doubled(ps.CustomRule):
    """A rule of a user's own."""

    def update(self, value: Any, gradient: Any, state: Any, push: PushInfo) -> None:
        value += 2.0 * gradient


def load() -> None:
    """Have the keeper load what all need, once."""
    import_module("paramserve.launch.serve")
    Counting(1).prepare()


def server(
    tell: Teller,
    bind: str,
    token: str,
    *,
    sync: bool = False,
    deadlines: dict[str, float] | None = None,
    tls: tuple[str, str, str] | None = None,
    rules: bool = False,
    checkpoint: str | None = None,
    every_s: float | None = None,
    strict: bool = False,
    **options: Any,
) -> None:
    """`ps.serve` until it is told to end. `rules`: with `Doubled`."""
    if checkpoint is not None:
        options["checkpoint"] = ps.Checkpoint(checkpoint, every_s=every_s, strict=strict)
    ps.serve(
        bind,
        token_file=token,
        tls=ps.TLS(*tls) if tls is not None else None,
        rules=[Doubled] if rules else [],
        consistency=ps.Sync(reduce="sum") if sync else ps.Async(),
        deadlines=ps.Deadlines(**(deadlines or {})),
        ready=lambda address: tell(ready=address),
        **options,
    )


def define(client: Client, counting: Counting) -> list[Block]:
    """The blocks that count, or those that another worker has defined."""
    return [
        client.define({piece.name: np.zeros(piece.shape) for piece in pieces}, rule=Add())
        for pieces in counting.blocks.values()
    ]


def rows(counting: Counting, block: Block, values: Any) -> list[Any]:
    """What each shard's part of a block says: (block, shard, counts, pushes, sound)."""
    found: list[Any] = []
    for shard in range(len(block.spec.cuts) - 1):
        low, high = block.range(shard)
        if high > low:
            found.append((block.id, shard, *counting.read(values[low:high], low)))
    return found


def worker(
    tell: Teller,
    address: str,
    token: str,
    *,
    rank: int,
    workers: int,
    writer: int,
    writers: int,
    clocks: int,
    pause_s: float = 0.0,
    deadlines: dict[str, float] | None = None,
    connect_s: float = 0.0,
    sync: bool = False,
) -> None:
    """Push to all blocks once each clock until `clocks`, and read them; tell what was answered.

    `connect_s`: how long to try again while the rank is still another's.
    """
    counting = Counting(writers)
    settings = ps.Deadlines(**(deadlines or {}))
    until = time.monotonic() + connect_s
    while True:
        try:
            joined = ps.connect(
                address, rank=rank, workers=workers, token_file=token, deadlines=settings
            )
            break
        except RankTaken:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
    with joined:
        client = joined.client
        blocks = define(client, counting)
        tell(joined=client.connection.incarnation, clock=client.clock(), links=links(client))
        for number, clock in enumerate(range(client.clock(), clocks)):
            call = {
                "writer": writer,
                "number": number,
                "push": number,
                "blocks": [block.id for block in blocks],
                "rank": rank,
                "clock": clock,
                "state": clock + 1 if sync else None,
            }
            step(tell, client, counting, blocks, call)
            time.sleep(pause_s)


def step(
    tell: Teller, client: Client, counting: Counting, blocks: list[Block], call: dict[str, Any]
) -> None:
    """One step of a worker: tell of the call before it is sent, and then what was answered."""
    number, clock = call["number"], call["clock"]
    push = []
    for block in blocks:
        slot = client.dense.gradient_slot(block)
        counting.fill(slot, block, Pushed(call["writer"], call["rank"], number, clock))
        push.append(BlockPush(block, slot))
    tell(call={**call, "issued": time.monotonic_ns()})
    tell(step=clock)
    try:
        ticket = client.dense.step("default", push, pull=blocks)
        outcome = ticket.result()
    except ParamServeError as error:
        told = {"number": number, "error": type(error).__name__, "applied": error.applied}
        tell(answer={**told, "at": time.monotonic_ns()})
        raise
    at = time.monotonic_ns()
    reads = [row for b in blocks for row in rows(counting, b, outcome.values[b.id])]
    tell(answer={"number": number, "at": at, "skipped": outcome.skipped, "reads": reads})
    ticket.release()


def links(client: Client) -> list[tuple[str, bool]]:
    """For each shard, the address that was reached and whether memory is shared."""
    found = [shard.link for shard in client.connection.exchange.shards]
    return [(link.address, link.shared) for link in found if link is not None]


def reader(tell: Teller, address: str, token: str, *, writers: int) -> None:
    """Tell what all parts hold now."""
    counting = Counting(writers)
    with Client(Connection.join(f"tcp:{address}", credentials_of(token))) as client:
        blocks = client.blocks()
        values = {block.id: client.dense.fetch(block, 0)[0] for block in blocks}
        tell(final=[row for block in blocks for row in rows(counting, block, values[block.id])])


def watcher(tell: Teller, address: str, token: str) -> None:
    """Tell every change of a rank's state, and of the servers that are missing, until killed."""
    overview = Overview((f"tcp:{address}",), credentials_of(token), ps.Limits(), ps.Deadlines())
    before: dict[int, str] = {}
    missing: tuple[int, ...] = ()
    tell(ready=True)
    while True:
        overview.ask_now(time.monotonic(), 1.0)
        status = overview.status
        if status is not None:
            now = {member.rank: member.state for member in status.members}
            for rank, state in now.items():
                if before.get(rank) != state:
                    tell(member=[rank, state])
            if status.silent_servers != missing:
                tell(missing=list(status.silent_servers))
            before, missing = now, status.silent_servers
        time.sleep(0.05)


def uploader(
    tell: Teller, address: str, token: str, *, elements: int, pushes: int, hasty_s: float
) -> None:
    """Push a large value several times; the last time with a deadline that is too short."""
    with ps.connect(address, rank=0, workers=1, token_file=token) as worker:
        client = worker.client
        client.define("w", np.zeros(elements), rule=Add())
        for number in range(pushes):
            client.push("w", np.full(elements, 2.0**number)).result()
            tell(pushed=number)
        ticket = client.push("w", np.full(elements, 2.0**pushes))
        try:
            ticket.result(hasty_s)
        except PushTimeout as error:
            tell(late=error.applied)
        tell(version=ticket.result().version)
        found = client.pull("w")
        tell(values=[float(found.min()), float(found.max())])


def counter(
    tell: Teller,
    address: str,
    token: str,
    *,
    rank: int,
    steps: int,
    back_s: float,
    deadlines: dict[str, float],
) -> None:
    """Add 1 in each step, as a rank that goes on with servers that come back."""

    def count(worker: ps.Worker) -> None:
        tell(began=worker.clock)
        worker.client.define({"w": np.zeros(4)}, rule=Add(), group="model")
        for step in range(worker.clock, steps):
            worker.client.push_pull({"w": np.ones(4)}, tick=True)
            time.sleep(0.005)
            if step == steps // 2:
                tell(half=True)

    waits = ps.Deadlines(**deadlines)
    ps.work(count, address, rank=rank, token_file=token, back_s=back_s, deadlines=waits)


def holder(tell: Teller, address: str, token: str, *, rank: int, workers: int) -> None:
    """Hold a rank until killed."""
    with ps.connect(address, rank=rank, workers=workers, token_file=token) as worker:
        tell(joined=worker.incarnation)
        signal.pause()


# --- a wire --------------------------------------------------------------------------------------


def wire(
    tell: Teller, namespace: str, port: str, *, loss: float, delay_s: float, seed: int = 1
) -> None:
    """Carry frames between a host's eth0 and a port of the bridge; lose some, delay all."""
    hub_side = _tap(port)
    enter(namespace)
    host_side = _tap("eth0")
    chance = random.Random(seed)
    other = {hub_side: host_side, host_side: hub_side}
    queue: list[tuple[float, int, int, bytes]] = []
    number = 0
    tell(ready=True)
    while True:
        wait_s = max(queue[0][0] - time.monotonic(), 0.0) if queue else None
        for side in select.select([hub_side, host_side], [], [], wait_s)[0]:
            frame = os.read(side, FRAME_BYTES_MAX)
            number += 1
            if chance.random() >= loss:
                heapq.heappush(queue, (time.monotonic() + delay_s, number, other[side], frame))
        while queue and queue[0][0] <= time.monotonic():
            _, _, side, frame = heapq.heappop(queue)
            try:
                os.write(side, frame)
            except OSError:  # the device is not up yet, or not any more
                continue


def _tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP))
    return fd
