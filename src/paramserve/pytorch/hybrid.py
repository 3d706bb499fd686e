"""`dense="local"`: the worker's own optimizer steps the dense layers, and only tables are sent.

With several workers something must make their dense gradients equal before the step:

    worker.process_group()
    model = DistributedDataParallel(model)
    optimizer = worker.optimizer(model, optimizer, dense="local")

All ranks then make the same number of steps, as `worker.loader` with static shares gives them.
Buffers are each worker's own; rank 0's values at the end are the result.

On several workers the rows are no part of `model.parameters()` any more: a norm for clipping with
each worker's own rows in it would drive the dense layers apart. For the same reason a row whose
gradient is NaN or Inf does not make `GradScaler` skip a step here that the others make: it is left
out. A step does not wait for the answer to its push: the next one raises what it was refused with.
`model.zero_grad()` does not reach them either, and leaves the gradients that were collected for
rows: clear with `optimizer.zero_grad()`, which has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from paramserve.pytorch.adopted import Adopted, Plan, reciprocal
from paramserve.pytorch.block import AdoptedBlock
from paramserve.pytorch.buffers import Untrained
from paramserve.pytorch.embedding import Rows
from paramserve.pytorch.local import unscale
from paramserve.pytorch.settings import Settings
from paramserve.pytorch.tables import clip, tensors
from paramserve.rules.torch_kinds import ParamGroup

if TYPE_CHECKING:
    from paramserve.client import Ticket
    from paramserve.client.rows import TablePush
    from paramserve.training.host import Host


class Hybrid(Adopted[AdoptedBlock]):
    """Own steps of the dense layers, and pushes of the tables' rows.

    Raises:
        ValueError: a setting that is for layers on the servers, or several workers without a
            process group: their dense layers would drift apart.
    """

    def __init__(self, worker: Host, model: torch.nn.Module, settings: Settings) -> None:
        several = worker.workers > 1
        if settings.overlap or settings.consistency is not None:
            raise ValueError(
                'dense="local" sends no dense layers: overlap and consistency are for those on the '
                "servers. A table has its own consistency: client.table(..., consistency=)"
            )
        if several and not dist.is_initialized():
            raise ValueError(
                f'dense="local" with {worker.workers} workers needs their gradients averaged: call '
                "worker.process_group(), then wrap the model in DistributedDataParallel, then "
                "worker.optimizer(...)"
            )
        super().__init__(worker, model, settings, apart=several)

    def _plan(self, index: int, group: ParamGroup) -> list[Plan[AdoptedBlock]]:
        return []

    def _untrained_of(self, trained: set[int]) -> Untrained:
        """Every value of the model, kept for the result: the last ones of rank 0."""
        return Untrained(
            self._client,
            self.names,
            self._registry,
            self._settings.name,
            trained=(),
            buffers=self._settings.buffers != "local",
            own_group=self._own_group(),
        )

    def _own(self, groups: Sequence[ParamGroup]) -> Mapping[str, Tensor]:
        names = [(self.names.of(param), param) for param in _dense(groups)]
        named = {name: param for name, param in names if name is not None}
        self._registry.own(self.group, named.items())
        return named

    def run(
        self,
        own_step: Callable[[Callable[[], Any] | None], Any],
        closure: Callable[[], Any] | None,
        groups: Sequence[ParamGroup],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> Any:
        """Make one own step of the dense layers, and push the rows; what the own step returned.

        Of a closure that is called several times, the last gradients of rows count.

        Args:
            own_step: of the torch optimizer's class; takes a closure or None.
            grad_scale: what the gradients are multiplied by still; None: nothing.
            found_inf: not None: a `GradScaler` is used; not zero: this step is left out.
        Raises:
            NonFinite: rows' gradients hold NaN or Inf. Nothing was stepped or sent.
        """
        if self._registry.begins:
            self._warn_of_repeats()
        if self.schedules.is_saved:
            self.schedules.before_step(groups)
        factor = reciprocal(grad_scale) if grad_scale is not None else None
        pushes: list[TablePush] = []

        def take() -> None:
            if found_inf is None:
                self.tables.refuse_bad()
            else:
                self.tables.forgive_bad()
            pushes[:] = self._clipped(groups, self.tables.collected(factor))
            self.tables.set_aside()

        def evaluated() -> Any:
            assert closure is not None
            if pushes:  # of the evaluation before
                self.tables.drop()
            loss = closure()
            take()
            return loss

        try:
            if found_inf is not None and bool(found_inf):
                pushes[:], loss = self.tables.nothing(), None
            elif closure is not None:
                loss = own_step(evaluated)
            else:
                if factor is not None:
                    unscale(_dense(groups), factor)
                take()
                loss = own_step(None)
        finally:
            self.tables.bring_back()  # they are dropped when they are certain to be sent
        self._push(pushes)
        return loss

    def _clipped(self, groups: Sequence[ParamGroup], rows: list[TablePush]) -> list[TablePush]:
        """Clip: all that this worker has by one norm; or, where the dense layers are the same on
        several workers, these by theirs and the rows by their own."""
        norm = self._settings.clip_norm
        if norm is None:
            return rows
        dense = [param.grad for param in _dense(groups) if param.grad is not None]
        if self._worker.workers > 1:
            clip(dense, norm)
            clip(tensors(rows), norm)
        else:
            clip([*dense, *tensors(rows)], norm)
        return rows

    def _push(self, pushes: list[TablePush]) -> None:
        """Send the rows, and raise the error of the push before: these rows are sent all the
        same, for the dense layers have made this step."""
        weight = self._weight()
        try:
            if self._in_flight:
                self._take_oldest()
        finally:
            self._forget()
            if pushes:
                self._client.push_tables(
                    pushes,
                    tick=True,
                    weight=weight,
                    leased=True,
                    numbered=self._numbered_rows,
                )

    def _numbered_rows(self, ticket: Ticket) -> None:
        super()._numbered_rows(ticket)
        self.schedules.count_step(noted=True)

    def finish(self) -> None:
        """Wait for the last push; then as `Adopted.finish`."""
        if self._in_flight:
            self._take_oldest()
        super().finish()


def _dense(groups: Sequence[ParamGroup]) -> list[Tensor]:
    return [p for group in groups for p in group["params"] if not isinstance(p, Rows)]
