"""Values that are written between two steps; see `Worker.assign`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paramserve.errors import warn_user

if TYPE_CHECKING:
    from paramserve.pytorch.registry import Registry
    from paramserve.training.host import Host


def assign(worker: Host, registry: Registry) -> None:
    """Overwrite the servers' values of all optimizers with one rank's present ones, and have all
    ranks take them.

    What the ranks have sent before, and exchange of their own steps here, must not come onto the
    values that are assigned, whatever the policy: these are stored when all ranks are settled, and
    read when they are stored.
    """
    optimizers = [each for each in registry.optimizers if not each.is_taken_over]
    if not optimizers:
        return
    values = [each.present() for each in optimizers]
    for each in optimizers:
        each.settle()
    worker.barrier()
    rank = worker.rank
    if rank == 0 or worker.client.connection.is_dead(range(rank)):
        if registry.begins:
            _warn_not_written(rank)
        else:
            for each, present in zip(optimizers, values, strict=True):
                each.store(present)
    worker.barrier()
    for each in optimizers:
        each.take()


def _warn_not_written(rank: int) -> None:
    warn_user(
        f"rank {rank} was started again, and worker.assign() before its first step has written "
        "nothing: the servers' values count, with what it had assigned before it died. Where it "
        "died behind its last step and in this call, that write is lost"
    )
