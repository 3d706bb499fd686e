"""What workers have left out of their gradients (`client.encoding`), as of a checkpoint.

A worker reaches each server once more for it (`Hello.role` is "residuals", with its client's number
and its rank), and sends and fetches there without numbers: one message is answered before the next
one comes. Shard 0 tells the coordinator of a cut, and the coordinator the workers, since a worker
that sends no request hears of none.
"""

from __future__ import annotations

from msgspec import Struct

RESIDUAL_ELEMENTS_MAX = 1 << 20
"""Of one message."""


ALL_KEPT = -1
"""In place of a block's number."""


class KeepResidual(Struct, frozen=True, array_like=True, tag="keep-residual"):
    """A worker to a server: some elements of a block's residual as of a cut, float32 [count] in the
    payload, from the element `start` of the block on.

    Those of one block come in order, from the first to the last that the server holds; none at all
    as one message with `count` 0. `count` -1: nothing was left out of this block's gradients.
    `block` -1: that was all, and of other blocks the worker knows nothing.
    `cut` below 0: the worker ends, and this is for checkpoints that are taken later, if they have
    its requests up to the number `-cut` and no more.
    """

    cut: int
    block: int
    start: int
    count: int


class ResidualKept(Struct, frozen=True, array_like=True, tag="residual-kept"):
    """The answer, when they are written. `wanted`: whether the rest is wanted, too; not if the
    checkpoint is over, or does without this worker's."""

    wanted: bool


class AskResidual(Struct, frozen=True, array_like=True, tag="ask-residual"):
    """A worker to a server: give `count` elements of a block from `start` on of the residual that
    the checkpoint has of this rank, which the run goes on from; rank 0 gets with its own the sum of
    those of ranks that the run goes on without."""

    block: int
    start: int
    count: int


class ResidualFound(Struct, frozen=True, array_like=True, tag="residual-found"):
    """The answer, float32 [count] in the payload. `count` 0: there is none, or this rank has gone
    on from it already. `lost`: ranks of which the checkpoint has none for this block."""

    count: int
    lost: tuple[int, ...] = ()


class ResidualsWanted(Struct, frozen=True, array_like=True, tag="residuals-wanted"):
    """Shard 0 to the coordinator, which tells each of these clients: the shards have taken a cut
    for a checkpoint. `clients`: (client, number of its last request that is in it)."""

    cut: int
    clients: tuple[tuple[int, int], ...]


ResidualRequest = KeepResidual | AskResidual
ResidualReply = ResidualKept | ResidualFound
