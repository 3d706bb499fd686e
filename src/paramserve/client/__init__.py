"""The client: routes pushes and pulls to the shards, by name or by block.

From the face down: `by_name` (key-value) and `leases`; `watching` (snapshots), `by_block` (steps,
values), `changing` (policies, rests), `defining` (blocks) and `life` (joining, resuming, closing),
each a class that derives from the next; `gradients` and `names` (what goes into shared memory);
`steps` (one message to every shard), with what they go by: `clocks` (how far this client is),
`pushes` (a block's gradient) and `ticket` (a step's outcome); `exchange` (sessions, waiting,
sending again) and `heartbeat`; `links` (connections, slots).
"""

from paramserve.client.by_name import Client
from paramserve.client.pushes import BlockPush
from paramserve.client.ticket import Outcome, Ticket
from paramserve.client.watching import GroupSnapshot

__all__ = ["BlockPush", "Client", "GroupSnapshot", "Outcome", "Ticket"]
