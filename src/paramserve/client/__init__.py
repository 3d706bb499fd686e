"""The client: routes pushes and pulls to the shards, by name or by block.

From the face down: `by_name` (key-value), `by_block` (joining, blocks, steps), `gradients` and
`names` (what goes into shared memory), `steps` and `ticket` (one message to every shard, and its
outcome), `exchange` (links, sessions, slots, reconnects), `heartbeat`.
"""

from paramserve.client.by_name import Client, GroupSnapshot
from paramserve.client.steps import BlockPush
from paramserve.client.ticket import Outcome, Ticket

__all__ = ["BlockPush", "Client", "GroupSnapshot", "Outcome", "Ticket"]
