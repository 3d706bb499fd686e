"""The worker process: runs a training function.

The function reaches this process by the engine's own way and never through a socket of ours: that
is why it may be unpickled here.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import cloudpickle
import msgspec
from msgspec import Struct

from paramserve import seeding
from paramserve.client import Client, Connection
from paramserve.compiling import load_if_compiled
from paramserve.config import Deadlines, Limits
from paramserve.logs import hide
from paramserve.worker.worker import Worker

if TYPE_CHECKING:
    from paramserve.engine.child import Bootstrap


class WorkerConfig(Struct, frozen=True):
    """What a worker is told when it starts."""

    rank: int
    coordinator: tuple[str, ...]
    """Addresses of the coordinator."""
    seed: int
    limits: Limits = Limits()
    deadlines: Deadlines = Deadlines()
    state: bytes = b""
    """What its models start from (`load_state`), in cloudpickle; empty: their own values."""
    tables: dict[str, str] = {}
    """Files of the rows that tables begin with (`load_tables`), by table."""
    run: int = 0
    """Tells one run from another that goes on from its checkpoint; 0: there are none."""


class Resumed(Struct, frozen=True, array_like=True):
    """Body of the report "resumed": where a restarted worker goes on, and how many steps of its
    predecessor some shards had applied that it takes again."""

    incarnation: int
    clock: int
    repeated: int


def _pickle(returned: Any) -> bytes:
    try:
        packed: bytes = cloudpickle.dumps(returned)
    except Exception as error:
        raise TypeError(
            f"what the training function returned ({type(returned).__name__}) cannot be sent to "
            f"the driver: {error}"
        ) from error
    return packed


def prepare_process() -> None:
    """Import what a worker needs, torch's part where torch is imported, before it is forked."""
    load_if_compiled()
    if "torch" in sys.modules:
        from paramserve.pytorch.optimizer import import_all

        import_all()


def main(boot: Bootstrap) -> None:
    """Run a training function: the entry of a worker process."""
    config = msgspec.msgpack.decode(boot.payload, type=WorkerConfig)
    hide(boot.credentials.token)
    # Before connecting: this may import torch, while the servers start.
    function, args, kwargs = boot.load()
    seeding.seed_everything(seeding.rank_seed(config.seed, config.rank))
    connection = Connection.join(
        config.coordinator,
        boot.credentials,
        rank=config.rank,
        limits=config.limits,
        deadlines=config.deadlines,
    )
    client = Client(connection)
    client.load_tables = config.tables
    client.steps.run = config.run
    boot.report("ready", msgspec.msgpack.encode(client.connection.incarnation))
    worker = Worker(client, config.seed, boot.report)
    if config.state:
        worker.load_state = cloudpickle.loads(config.state)
    del config  # with the bytes of the state, which may be large
    if client.connection.incarnation > 1:
        resumed = Resumed(connection.incarnation, worker._clock, client.steps.repeated)
        boot.report("resumed", msgspec.msgpack.encode(resumed))
    try:
        returned = _pickle(function(worker, *args, **kwargs))
    except BaseException:
        client.connection.send_log()  # what it logged last says most about why
        worker.tell_steps()
        raise
    worker.finish()
    boot.report("returned", returned)
