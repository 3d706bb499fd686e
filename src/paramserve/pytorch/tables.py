"""The tables of one adopted optimizer: what its model's backward has collected, on its way.

`worker.optimizer` finds the modules on tables (`Embedding`, `EmbeddingBag`) that are in the model.
Each `optimizer.step()` sends what their backward has collected, after unscaling and clipping: all
tables and dense layers in one message to each server. Each table has its own rule, policy and
clock, and each step ends one of its clocks, also without a gradient for it. Under `Async` a table
takes each worker's gradients in full; `Sync(reduce="mean")` takes their mean.

- The options of the torch optimizer, and its learning rate schedulers, do not reach a table: its
  rule has the hyper-parameters that it was defined with.
- The rows are among the optimizer's parameters, so that `GradScaler.unscale_` finds them. A step
  that the scaler leaves out sends nothing, and drops what was collected.
- `clip_norm` clips all gradients of this worker together, rows too, where it is this worker that
  clips. Where the dense ones are clipped elsewhere (by the servers, under Sync) or must be clipped
  alike on all workers (`dense="local"` on several), this worker's rows are clipped by their own
  norm.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from paramserve.client.rows import TablePush
from paramserve.core.commit import CLIP_EPSILON
from paramserve.errors import NonFinite
from paramserve.pytorch.embedding import KeyedModule, Rows
from paramserve.rules.torch_kinds import ParamGroup

if TYPE_CHECKING:
    from paramserve.client import Client
    from paramserve.client.table import Table


class Stepped(NamedTuple):
    """A table, and what of it has been collected."""

    table: Table
    rows: Rows


class Tables:
    """The tables that a model's keyed modules are on, as far as this optimizer steps them.

    A table is stepped by the first optimizer that is adopted with a model that has it.

    Args:
        rank: for messages.
        apart: the dense layers are averaged over several workers, and step on each; see `Rows`.
    """

    def __init__(
        self, client: Client, model: torch.nn.Module, rank: int, *, apart: bool = False
    ) -> None:
        self._client = client
        self._model = model
        self._rank = rank
        self._apart = apart
        self._stepped: dict[int, Stepped] = {}
        """Stepped rows by their identity."""
        self._last_params: list[Tensor] = []
        """The list of parameters that `_added` are in."""
        self._added: list[Rows] = []
        """Rows that the optimizer had not been given."""

    def __bool__(self) -> bool:
        return bool(self._stepped)

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(each.table.group for each in self._stepped.values())

    def steps(self, param: Tensor) -> bool:
        """Whether this parameter is the rows of a table that steps with this optimizer."""
        return id(param) in self._stepped

    # --- start -------------------------------------------------------------------------------

    def find(self, groups: Sequence[ParamGroup]) -> list[Stepped]:
        """The model's tables that are to be taken over, checked.

        Raises:
            ValueError: a table is another client's, or the optimizer was given rows that another
                one steps, or that the model does not have. Nothing was changed.
        """
        ids = {id(p) for group in groups for p in group["params"] if isinstance(p, Rows)}
        by_rows: dict[int, Stepped] = {}
        for module in self._modules():
            if id(module.rows) not in self._stepped and self._is_ours(module, ids):
                by_rows[id(module.rows)] = Stepped(module.table, module.rows)
        if ids - by_rows.keys() - self._stepped.keys():
            raise ValueError(
                "the optimizer has the rows of a table that no module of the model is on: give "
                "worker.optimizer the model that they came from"
            )
        return list(by_rows.values())

    def adopt(self, tables: Sequence[Stepped], groups: Sequence[ParamGroup]) -> None:
        """Step these tables from now on; show their rows to users of the optimizer.

        Args:
            groups: what the optimizer has been given, or one more group of it.
        """
        ids = {id(param) for group in groups for param in group["params"]}
        # At the end of all groups: torch numbers parameters by their place.
        self._remove_added()
        self._last_params = groups[-1]["params"]
        self._last_params += self._added
        for each in tables:
            self._stepped[id(each.rows)] = each
            each.rows.stepped, each.rows.apart = True, self._apart
            if id(each.rows) not in ids:
                self._added.append(each.rows)
                self._last_params.append(each.rows)
        for module in self._modules() if self._apart else ():
            _hide(module)

    def _modules(self) -> list[KeyedModule]:
        return [each for each in self._model.modules() if isinstance(each, KeyedModule)]

    def _is_ours(self, module: KeyedModule, ids: set[int]) -> bool:
        """Whether this optimizer is to step a module's rows. Raises where it cannot: they are
        another client's, or stepped already."""
        if module.table.client is not self._client:
            raise ValueError(
                f"the table {module.table.name!r} belongs to {module.table.client!r}, not to this "
                "worker's client: make it with worker.client.table(...)"
            )
        if module.rows.stepped and id(module.rows) in ids:
            raise ValueError(
                f"the table {module.table.name!r} is stepped already by the optimizer that was "
                "given to worker.optimizer first. Give it the one that has the table's rows first"
            )
        return not module.rows.stepped

    @contextlib.contextmanager
    def hidden(self, hides: bool = True) -> Iterator[None]:
        """While this lasts, the optimizer has only the parameters that it was given.

        Args:
            hides: False: it keeps them all.
        """
        if not hides:
            yield
            return
        self._remove_added()
        try:
            yield
        finally:
            self._last_params += self._added

    def _remove_added(self) -> None:
        for rows in self._added:
            self._last_params[:] = [param for param in self._last_params if param is not rows]

    def left_out_of(self, state_dict: dict[str, Any]) -> bool:
        """Whether a state dict is without the rows that the optimizer was not given.

        One that `torch.distributed.checkpoint` loads was made anew, from all that is shown.
        """
        groups = state_dict.get("param_groups")
        return not groups or len(groups[-1]["params"]) != len(self._last_params)

    # --- a step ------------------------------------------------------------------------------

    def collected(self, unscale: float | None = None, *, own: bool = False) -> list[TablePush]:
        """What was collected since the last `drop`, for every table, also for those without.

        It stays here until a step that has it is certain to be sent: see `drop`.

        Args:
            unscale: what each gradient is multiplied by; None: they are as they should be.
            own: not in the memory of `Rows.grad`.
        """
        pushes = []
        for table, rows in self._stepped.values():
            keys, values = rows.collected()
            if unscale is not None:
                values = values * unscale
            elif own:
                values = values.clone()
            pushes.append(TablePush(table, keys.numpy(), values.numpy()))
        return pushes

    def set_aside(self) -> None:
        """Set aside the collected rows of all tables; see `Rows.set_aside`."""
        for _, rows in self._stepped.values():
            rows.set_aside()

    def bring_back(self) -> None:
        """Restore the rows set aside of all tables; see `Rows.bring_back`."""
        for _, rows in self._stepped.values():
            rows.bring_back()

    def nothing(self) -> list[TablePush]:
        """A step of all tables without gradients."""
        return [TablePush(table) for table, _ in self._stepped.values()]

    def drop(self) -> None:
        """Forget what was collected."""
        for _, rows in self._stepped.values():
            rows.drop()
            rows.take_bad()

    def refuse_bad(self) -> None:
        """Refuse rows whose gradients hold NaN or Inf, if there are any; see `Rows.take_bad`.

        Raises:
            NonFinite: there are. They and all others that were collected are dropped.
        """
        for table, rows in self._stepped.values():
            bad = rows.take_bad()
            if len(bad):
                self.drop()
                raise NonFinite(
                    f"the gradient of key {int(bad[0])} of table {table.name!r} on rank "
                    f"{self._rank} holds NaN or Inf ({len(bad)} keys in all)",
                    fix="lower the learning rate, or clip",
                )

    def forgive_bad(self) -> None:
        """Leave out rows whose gradients hold NaN or Inf: the loss scale was too large for them."""
        for _, rows in self._stepped.values():
            rows.take_bad()


def _hide(module: KeyedModule) -> None:
    """Leave the rows out of `module.parameters()`.

    Workers that average their dense layers must change them alike. They would not, if each clipped
    them by a norm with its own rows in it.
    """
    rows = module._parameters.pop("rows", None)
    if rows is not None:
        module.__dict__["rows"] = rows


# --- clipping ----------------------------------------------------------------------------------


def clip(gradients: Sequence[Tensor], norm: float) -> None:
    """Clip gradients by their global norm, in place, as torch does.

    What holds NaN or Inf stays as it is: it is found and refused where it is sent.
    """
    parts = [each for each in gradients if each.numel()]
    total = float(torch.nn.utils.get_total_norm(parts))
    if math.isfinite(total) and total + CLIP_EPSILON > norm:
        torch._foreach_mul_(parts, norm / (total + CLIP_EPSILON))


def tensors(pushes: Sequence[TablePush]) -> list[Tensor]:
    """The gradients of rows as tensors in the same memory."""
    return [torch.from_numpy(each.gradients) for each in pushes]
