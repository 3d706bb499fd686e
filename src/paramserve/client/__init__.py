"""The client: routes pushes and pulls to the shards, by name, by block or by key.

From the face down: `by_name` (key-value) and `leases`; `watching` (snapshots), `by_block` (steps,
values), `tables`, `keyed` and `reading` (tables: who defines one; their pushes; their reads),
`changing` (policies, rests), `defining` (blocks) and `life` (joining, resuming, closing), each a
class that derives from the next. `gradients`, `rows` and `names`: what goes into shared memory.
`steps` (one message to every shard), with what they go by: `clocks` (how far this client is),
`ticket` (a step's outcome). `table` (a table as its users
hold it), `row_cache`, `arrow`. `exchange` (sessions, waiting, sending again) and `heartbeat`;
`links` (connections, slots) and `payloads` (bytes in frames).
"""

from paramserve.client.by_name import Client
from paramserve.client.row_cache import CacheReport
from paramserve.client.steps import BlockPush
from paramserve.client.table import Table, TablePush
from paramserve.client.ticket import Outcome, Ticket
from paramserve.client.watching import GroupSnapshot

__all__ = [
    "BlockPush",
    "CacheReport",
    "Client",
    "GroupSnapshot",
    "Outcome",
    "Table",
    "TablePush",
    "Ticket",
]
