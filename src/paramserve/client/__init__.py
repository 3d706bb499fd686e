"""The client: routes pushes and pulls to the shards, by name, by block or by key.

`client` is what users hold. It owns the parts that make its calls: `connection` (joins, leaves),
`steps` (one message to every shard, of `step_parts`; `clocks`: how far the client is), `directory`
(what is defined), `dense` (parameters by name and by block; `gradients`: their way into shared
memory), `keyed` and `row_reads` (tables; `row_cache`, `row_slots`), `groups` (policies, rests).
`leases` and `snapshots` work through a client. `table` and `ticket` are what its calls give back;
`names` and `arrow` read what they are given. Below: `exchange` (sessions, waiting, sending again),
`links` (connections, slots), `carried` (bytes in frames), `decoding` and `heartbeat`.
"""

from paramserve.client.client import Client
from paramserve.client.connection import Connection
from paramserve.client.row_cache import CacheReport
from paramserve.client.rows import TablePush
from paramserve.client.snapshots import GroupSnapshot, Snapshots
from paramserve.client.step_parts import BlockPush
from paramserve.client.table import Table
from paramserve.client.ticket import Outcome, Ticket

__all__ = [
    "BlockPush",
    "CacheReport",
    "Client",
    "Connection",
    "GroupSnapshot",
    "Outcome",
    "Snapshots",
    "Table",
    "TablePush",
    "Ticket",
]
