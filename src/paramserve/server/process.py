"""The server's process: builds its role, listens, registers, and ends with the driver."""

from __future__ import annotations

import asyncio
import os
import secrets

import msgspec

from paramserve import machine
from paramserve.checkpoint.folder import answer_probe
from paramserve.checkpoint.locations import storage_at
from paramserve.compiling import load_if_compiled
from paramserve.config import Credentials, ServerConfig
from paramserve.consistency.registry import Registered, registered
from paramserve.consistency.registry import build as build_policy
from paramserve.core.shard import Shard
from paramserve.engine.child import Bootstrap, call_soon
from paramserve.logs import hide
from paramserve.messages import Hello, Ok, Reconnect, Register
from paramserve.recent import recorded
from paramserve.server.checkpoints import restore_from_checkpoint
from paramserve.server.cut_memory import PreparedMemory
from paramserve.server.role import Control, ServerRole
from paramserve.transport.control import ControlLink
from paramserve.transport.listener import listen
from paramserve.transport.peers import dialer
from paramserve.transport.tcp import join_place
from paramserve.transport.timing import SYSTEM

NOTHING = Registered()


def new_shard(config: ServerConfig, registered: Registered = NOTHING) -> Shard:
    """The decisions of a server that is told this, with what its checkpoint has.

    Raises:
        UnknownRule: the cluster's policy is neither built in nor registered. CheckpointError: the
            checkpoint is not there, or damaged.
    """
    shard = Shard(
        config.shard,
        config.servers,
        config.workers,
        build_policy(config.consistency, registered.all),
        limits=config.limits,
        resend_s=config.deadlines.resend_s,
        rules=registered.rules,
        policies=registered.all,
        codecs=registered.codecs,
        cut_memory=PreparedMemory(),
        first_stream=1 + secrets.randbits(62),
    )
    if config.checkpoints.resume:
        restore_from_checkpoint(shard, config.checkpoints, SYSTEM.monotonic())
    return shard


def process_role(
    config: ServerConfig,
    credentials: Credentials,
    control: Control | None,
    registered: Registered = NOTHING,
    *,
    shard: Shard | None = None,
) -> ServerRole:
    """The server of this process: on the running event loop, with sockets to the others.

    Args:
        shard: decides; None: one that is made here, while the loop stands still.
    """
    shard = shard if shard is not None else new_shard(config, registered)
    loop = asyncio.get_running_loop()
    dial, plan = dialer(config, credentials), config.checkpoints
    storage = storage_at(plan.folder) if plan.folder else None
    wake_s = SYSTEM.wake_s()
    return ServerRole(
        config,
        shard,
        loop,
        control,
        dial,
        storage=storage,
        wake_s=wake_s,
        memory_bytes=machine.resident_bytes,
    )


async def _serve(boot: Bootstrap, config: ServerConfig) -> None:
    credentials = boot.credentials
    control = await asyncio.to_thread(
        ControlLink.connect,
        config.coordinator,
        Hello("register"),
        credentials=credentials,
        limits=config.limits,
        timeout_s=config.deadlines.start_s,
        lost_s=config.deadlines.lost_s,
    )
    role = process_role(config, credentials, control, registered(boot.load() or ()))
    loop = asyncio.get_running_loop()
    boot.on_stop(lambda: call_soon(loop, role.ended.set))
    listeners = await listen(
        config.directory,
        f"s{config.shard}",
        join_place(boot.host, 0) if boot.host else config.tcp_bind,
        credentials,
        role,
        config.limits,
        advertise=config.advertise,
        lost_s=config.deadlines.lost_s,
    )
    addresses = tuple(listener.address for listener in listeners)
    role.listeners = listeners
    try:
        await register(role, control, addresses)
        boot.report("ready", msgspec.msgpack.encode(addresses))
        await role.ended.wait()  # or until the driver is gone
    finally:
        for listener in listeners:
            listener.close()
        role.close()
        control.close()


async def register(role: ServerRole, control: ControlLink, addresses: tuple[str, ...]) -> None:
    """Tell the coordinator that a server is up, and that it sees the folder of checkpoints.

    Raises:
        CheckpointError: it does not.
    """
    folder = role.config.checkpoints.folder
    if folder:
        nonce = role.config.cluster.hex()
        await asyncio.to_thread(answer_probe, storage_at(folder), nonce, role.config.shard)
    call = Register(0, role.config.shard, os.getpid(), addresses)
    timeout_s = role.config.deadlines.start_s
    await asyncio.to_thread(control.call, call, Ok, timeout_s=timeout_s)
    config = role.config
    identity = Reconnect(
        0, config.cluster, shard=config.shard, pid=call.pid, addresses=call.addresses
    )
    control.identify(identity, config.deadlines)
    role.take_notices(control.read_notices())


def prepare_process() -> None:
    """Load what a server needs before it is forked; see `engine.prepared`."""
    load_if_compiled()


def main(boot: Bootstrap) -> None:
    config = msgspec.msgpack.decode(boot.payload, type=ServerConfig)
    hide(boot.credentials.token)
    with recorded("server"):
        asyncio.run(_serve(boot, config))
