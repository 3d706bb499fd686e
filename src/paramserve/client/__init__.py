"""The client: routes pushes and pulls to the shards, by name or by block.

From the face down: `by_name` (key-value) and `leases`; `by_block` (steps, values), `changing`
(policies, rests), `defining` (blocks) and `life` (joining, resuming, closing), each a class that
derives from the next; `gradients` and `names` (what goes into shared memory); `steps` and `ticket`
(one message to every shard, and its outcome); `exchange` (sessions, waiting, sending again) and
`heartbeat`; `links` (connections, slots).
"""

from paramserve.client.by_name import Client, GroupSnapshot
from paramserve.client.steps import BlockPush
from paramserve.client.ticket import Outcome, Ticket

__all__ = ["BlockPush", "Client", "GroupSnapshot", "Outcome", "Ticket"]
