"""What an adopted optimizer does on the servers: define, push, pull, fetch and store.

`Served` lets the servers make the steps; for steps of the worker's own see `local.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paramserve.client.gradients import active_parts
from paramserve.errors import warn_user
from paramserve.pytorch import state as torch_state
from paramserve.pytorch.adopted import Adopted, Plan, reciprocal
from paramserve.pytorch.block import ServedBlock, as_tensor
from paramserve.pytorch.hyper import HyperReader
from paramserve.pytorch.loaded_state import StateMarks
from paramserve.pytorch.settings import Settings
from paramserve.pytorch.tables import clip, tensors
from paramserve.rules.torch_kinds import Kind, ParamGroup

if TYPE_CHECKING:
    from paramserve.client import BlockPush, Ticket
    from paramserve.client.rows import TablePush
    from paramserve.rules.base import Rule
    from paramserve.training.host import Host


class Served(Adopted[ServedBlock]):
    """An optimizer whose steps the servers make."""

    def __init__(
        self, worker: Host, model: torch.nn.Module, kind: Kind, settings: Settings
    ) -> None:
        super().__init__(worker, model, settings)
        self._kind = kind
        self._marks = StateMarks(worker.client, worker.rank, settings.name)
        self._stay = int(settings.overlap)
        """Steps that are under way between two calls of `step`."""
        self._unserved_state: torch_state.State = {}
        """State of frozen parameters: it was loaded, and goes to the servers when they do."""
        self._warned = False

    # --- start and end ------------------------------------------------------------------------

    def finish(self) -> None:
        """Install what is outstanding; then as `Adopted.finish`."""
        self.install_pending()
        super().finish()

    def settle(self) -> None:
        self.install_pending()

    def _plan(self, index: int, group: ParamGroup) -> list[Plan[ServedBlock]]:
        plans = []
        for layout in self._layouts(index, group):
            hyper = HyperReader(self._kind, group)
            part = partial(ServedBlock, layout=layout, hyper=hyper)
            plans.append(Plan(layout, hyper.defined, part))
        return plans

    def _begin(self, plans: Sequence[Plan[ServedBlock]], state: Mapping[Tensor, Any]) -> None:
        self._unserved_state = dict(state)
        self._define(plans)
        self._worker.optimizers.refresh_by(self.refresh)

    def _define(self, plans: Sequence[Plan[ServedBlock]]) -> list[ServedBlock]:
        """Install what is outstanding, of the blocks so far; then as `Adopted._define`, with the
        state that was loaded before. A worker that comes late finds the servers' own state."""
        self.install_pending()
        state = self._unserved_state
        fields = {
            plan.layout.names: torch_state.prepare(plan.layout, plan.rule, state)
            for plan in plans
            if any(param in state for param in plan.layout.params)
        }
        loaded = [names[0] for names in fields]
        self._marks.begin(loaded)
        parts = super()._define(plans)
        anew = self._existing.untouched  # rank 0 may have died between defining and storing
        new = [
            part
            for part in parts
            if part.layout.names in fields and (anew or not self._existing.has(part.layout.names))
        ]
        self._store(new, [fields[part.layout.names] for part in new])
        self._marks.end(loaded)
        self._marks.wait(part.layout.names[0] for part in parts)
        for part in parts:
            for param in part.layout.params:
                state.pop(param, None)
        return parts

    def _keep_unserved_state(self, state: Mapping[Tensor, Any]) -> None:
        served = self._served()
        self._unserved_state = {p: entry for p, entry in state.items() if id(p) not in served}

    def refresh(self) -> None:
        """Take the servers' present values, as after a step."""
        self.install_pending()
        if self._parts and self._successor is None:
            self.schedules.mark_behind()
            self._pull(self._parts)

    # --- a step ---------------------------------------------------------------------------------

    def step(
        self, groups: Sequence[ParamGroup], grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Push the gradients and pull the values; called under `torch.no_grad()`.

        Args:
            grad_scale: what `GradScaler` multiplied the loss by, if it has not divided yet.
            found_inf: not zero where `GradScaler` found Inf or NaN: this step is skipped.
        """
        if self._registry.begins:
            self._warn_of_repeats()
        self.regroup(groups)
        if not self._warned:
            self._warn_of_changes()
        if self._in_flight[self._stay :]:
            self._forget(keep=self._stay)
        client = self._client
        note = {}
        if self._parts or self.schedules.is_saved:
            self.schedules.before_step(groups)
        if self._parts and (packed := self.schedules.note()):
            note["note"] = packed
        weight = self._weight()
        if found_inf is not None and bool(found_inf):
            self._send((), self.tables.nothing(), weight=weight, skip=True, **note)
        else:
            unscale = reciprocal(grad_scale) if grad_scale is not None else None
            push = [part.gather(client, groups, unscale) for part in self._parts]
            rows = self.tables.collected(unscale, own=self._settings.clip_norm is not None)
            clip_norm = self._clip(push, rows)
            self._send(push, rows, weight=weight, clip_norm=clip_norm, **note)
        if self._in_flight[self._stay :]:
            self._take_oldest()
        self._count_step()

    def _send(
        self, push: Sequence[BlockPush], rows: Sequence[TablePush], *, weight: float, **options: Any
    ) -> None:
        """Push, tick and pull, blocks and tables in one message to each shard."""
        if not self._parts:
            self._client.push_tables(
                rows,
                tick=True,
                weight=weight,
                skip=options.get("skip", False),
                leased=True,
                numbered=self._numbered_rows,
            )
            return
        name, numbered = self._settings.name, self._numbered
        if rows:
            options["tables"], numbered = rows, self._numbered_rows
        self._client.dense.step(
            name, push, pull=self._blocks, weight=weight, numbered=numbered, **options
        )

    def _numbered(self, ticket: Ticket) -> None:
        self._in_flight += [ticket]
        self.schedules.count_step(noted=True)

    def _numbered_rows(self, ticket: Ticket) -> None:
        super()._numbered_rows(ticket)
        self.schedules.count_step(noted=True)

    def _clip(self, push: Sequence[BlockPush], rows: Sequence[TablePush]) -> float:
        """Clip what is clipped on this worker; the norm for the servers to clip by, or 0."""
        norm = self._settings.clip_norm
        if norm is None or not rows:
            return norm if norm is not None else 0.0
        if push and self._client.steps.terms(self._settings.name).collects:
            clip(tensors(rows), norm)
            return norm
        dense = [
            as_tensor(array, part.layout.dtype)
            for part, each in zip(self._parts, push, strict=True)
            for _, array in active_parts(each)
        ]
        clip([*dense, *tensors(rows)], norm)
        return 0.0

    def install_pending(self) -> None:
        """Wait for the push that `overlap` left outstanding, and install its values."""
        self._forget(keep=self._stay)
        if self._in_flight:
            with torch.no_grad():
                self._take_oldest()

    def _warn_of_changes(self) -> None:
        for part in self._parts:
            name = part.changed_outside()
            if name is not None:
                self._warned = True
                for each in self._parts:
                    each.watches = False
                warn_user(
                    f"parameter {name!r} was changed outside optimizer.step(): the values live on "
                    "the servers, and the next ones overwrite it. Load weights before "
                    "worker.optimizer(...), or call worker.assign() on all ranks after writing"
                )
                return

    # --- state ------------------------------------------------------------------------------------

    def first_state(self, groups: Sequence[ParamGroup]) -> torch_state.State:
        """A state of each parameter that is trained, of the form that torch would give it."""
        with torch.no_grad():
            state = {
                param: torch_state.first(rule, param)
                for part, rule in self._rules(groups)
                for param in part.layout.params
                if param.requires_grad
            }
        return {param: entry for param, entry in state.items() if entry}

    def fetch_state(self, groups: Sequence[ParamGroup]) -> torch_state.State:
        """State of all parameters that have had an update, as torch would hold it."""
        self.install_pending()
        state: torch_state.State = {}
        with torch.no_grad():
            for part, rule in self._rules_of_state(groups):
                read = partial(self._client.dense.fetch, part.block)
                state.update(torch_state.fetch(read, part.layout, rule))
        state |= self._unserved_state
        ids = {id(param) for group in groups for param in group["params"]}
        return {param: entry for param, entry in state.items() if id(param) in ids}

    def _rules(self, groups: Sequence[ParamGroup]) -> list[tuple[ServedBlock, Rule]]:
        """Each part with its rule, as the groups' options are now."""
        return [(part, part.hyper.rule(group)) for part, group in self._with_groups(groups)]

    def _rules_of_state(self, groups: Sequence[ParamGroup]) -> list[tuple[ServedBlock, Rule]]:
        """Each part with a rule that has the state that lies on the servers, also where an option
        that needs state, as a momentum, is 0 now."""
        return [
            (part, part.hyper.rule_of_state(group)) for part, group in self._with_groups(groups)
        ]

    def _with_groups(
        self, groups: Sequence[ParamGroup]
    ) -> list[tuple[ServedBlock, ParamGroup | None]]:
        """Each part with the group that it belongs to now; None: with none any more."""
        if self._successor is None:
            self.regroup(groups)
        at = [groups[part.group] if part.group is not None else None for part in self._parts]
        return list(zip(self._parts, at, strict=True))

    def store_state(self, groups: Sequence[ParamGroup], state: Mapping[Tensor, Any]) -> None:
        """Overwrite the state on the servers with this one, on rank 0; the others only check it."""
        self.install_pending()
        fields = [
            torch_state.prepare(part.layout, rule, state)
            for part, rule in self._rules_of_state(groups)
        ]
        # Before its first step a restarted worker has theirs.
        if not self._registry.begins or self._existing.untouched:
            self._store(self._parts, fields)
        self._keep_unserved_state(state)

    def _store(
        self, parts: Sequence[ServedBlock], fields: Sequence[list[torch_state.Field]]
    ) -> None:
        if self._worker.rank == 0:
            for part, arrays in zip(parts, fields, strict=True):
                for field in arrays:
                    field.store(self._client, part.block)
