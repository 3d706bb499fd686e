"""`Embedding` and `EmbeddingBag`: torch's modules, with their rows in a keyed table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paramserve.core.table import routing
from paramserve.pytorch.rows import Rows, rows_of

if TYPE_CHECKING:
    from paramserve.client.table import Table

READ_ROWS = 65536
"""Rows that are read or written at once where a whole table is copied."""
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_INT64 = torch.iinfo(torch.int64)


class _Found(NamedTuple):
    """Rows of a batch's ids.

    `places` int64 [*ids.shape] says which of `rows` [m or m + 1, dim] each id has. If an id is the
    padding, `padding` is its place, and the row there is zeros.
    """

    places: Tensor
    rows: Tensor
    padding: int | None


class KeyedModule(nn.Module):
    """A module whose rows are in a table.

    A forward pass pulls the rows of the ids that it is given, each once. While gradients are
    enabled, the backward pass leaves theirs on `rows`, which all modules on one table share, and
    `optimizer.step()` of `worker.optimizer` sends them. In training mode a row is created when it
    is first used. Under `torch.no_grad()`, and in `eval()`, unknown keys read as their initial
    values and nothing is created. `torch.compile` leaves the pull to Python and compiles what is
    before and behind it; with `fullgraph=True` it refuses the model.

    The table's own rule makes the steps, with the hyper-parameters that it was defined with: a
    learning rate scheduler of torch's, or the options of the torch optimizer, do not reach it.
    The rows are not part of `state_dict()`: export the table. A deep copy has the same table.

    Attributes:
        rows: what torch sees of the table: without elements, or with the gradients collected.
    """

    rows: Rows
    _untraced: ClassVar[Callable[[KeyedModule, Tensor], _Found] | None] = None
    """`_find`, which `torch.compile` leaves to Python: it sends and waits."""

    def __init__(self, table: Table, padding_idx: int | None = None) -> None:
        super().__init__()
        if padding_idx is not None:
            if isinstance(padding_idx, bool) or not isinstance(padding_idx, int):
                raise TypeError(f"padding_idx must be an int or None, not {padding_idx!r}")
            if not _INT64.min <= padding_idx <= _INT64.max:
                raise ValueError(f"padding_idx must be an int64 key, not {padding_idx}")
        self._table = table
        self.padding_idx = padding_idx
        self.rows = rows_of(table)
        if KeyedModule._untraced is None:
            # Imports torch._dynamo, which every optimizer of torch's does as well.
            disable: Any = torch.compiler.disable  # torch has no types for it
            KeyedModule._untraced = disable(KeyedModule._find)

    @property
    def table(self) -> Table:
        """Where the rows are."""
        return self._table

    @property
    def embedding_dim(self) -> int:
        """Width of a row."""
        return self._table.dim

    def extra_repr(self) -> str:
        padding = f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""
        return f"{self._table.name!r}, {self.embedding_dim}{padding}"

    def _found(self, ids: Tensor) -> _Found:
        find = KeyedModule._untraced
        assert find is not None, "the first module has set it"
        return find(self, ids)

    def _find(self, ids: Tensor) -> _Found:
        """The rows of these ids, pulled; with gradients enabled, a leaf that is collected from.

        Raises:
            TypeError: the ids are not integers, or have no memory: inside a transform of
                `torch.func`. Nothing was pulled.
        """
        if not isinstance(ids, Tensor) or ids.dtype not in _INTEGERS:
            kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise TypeError(f"ids must be a tensor of int64 or smaller integers, not {kind}")
        flat = ids.detach().to("cpu", torch.int64).reshape(-1)
        try:
            found, numbers = routing.distinct(flat.numpy())
        except RuntimeError as error:
            raise TypeError(
                f"{type(self).__name__} cannot pull the rows of ids that have no memory, as inside "
                "torch.func.grad or vmap: the rows come from the servers. Pull them outside of the "
                "transform and give it the rows, or use loss.backward()"
            ) from error
        keys, places = torch.from_numpy(found), torch.from_numpy(numbers).long()
        padding = self._place_of_padding(keys)
        if padding is not None:
            keys = torch.cat([keys[:padding], keys[padding + 1 :]])
            behind = places - (places > padding).long()
            places = torch.where(places == padding, len(keys), behind)
            padding = len(keys)
        learns = torch.is_grad_enabled() and self.rows.trained
        rows = self._pull(keys, create=learns and self.training)
        if padding is not None:
            rows = torch.cat([rows, rows.new_zeros(1, self.embedding_dim)])
        rows = rows.to(ids.device, self.rows.dtype)
        if learns:
            rows.requires_grad_()
            self._collect_from(rows, keys)
        return _Found(places.reshape(ids.shape).to(ids.device), rows, padding)

    def _collect_from(self, leaf: Tensor, keys: Tensor) -> None:
        when_there: Any = leaf.register_post_accumulate_grad_hook  # torch has no types for it
        when_there(partial(self.rows.collect, keys))

    def _place_of_padding(self, keys: Tensor) -> int | None:
        if self.padding_idx is None:
            return None
        found = (keys == self.padding_idx).nonzero()
        return int(found) if len(found) else None

    def _pull(self, keys: Tensor, *, create: bool) -> Tensor:
        if not len(keys):
            return torch.empty(0, self.embedding_dim)
        return torch.from_numpy(self._table.pull(keys.numpy(), create=create))

    # --- copies ------------------------------------------------------------------------------

    def read(self, num_embeddings: int | None = None) -> Tensor:
        """The values of the keys 0 to `num_embeddings` - 1 as one tensor [num_embeddings, dim].

        Unknown keys have their initial values; the row of the padding is zeros.

        Args:
            num_embeddings: None: up to the largest key of the table.
        Raises:
            ValueError: the table has a negative key, or none, and `num_embeddings` is not given;
                or it is not above the padding.
        """
        count = num_embeddings if num_embeddings is not None else self._count()
        padding = self.padding_idx
        if padding is not None and not 0 <= padding < count:
            raise ValueError(f"padding_idx {padding} is not among the keys 0 to {count - 1}")
        values = torch.empty(count, self.embedding_dim, dtype=self.rows.dtype)
        for start in range(0, count, READ_ROWS):
            keys = torch.arange(start, min(start + READ_ROWS, count))
            values[start : start + READ_ROWS] = self._pull(keys, create=False)
        if padding is not None:
            values[padding] = 0
        return values.to(self.rows.device)

    def _count(self) -> int:
        keys = self._table.keys()
        if not len(keys) or int(keys.min()) < 0:
            which = "has no rows" if not len(keys) else f"has the key {int(keys.min())}"
            raise ValueError(
                f"table {self._table.name!r} {which}: torch's modules have the indices 0 to "
                "num_embeddings - 1. Say how many: to_embedding(num_embeddings)"
            )
        return int(keys.max()) + 1

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(prefix + "rows", None)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        missing_keys[:] = [key for key in missing_keys if key != prefix + "rows"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        from copy import deepcopy

        memo[id(self._table)] = self._table
        memo[id(self.rows)] = self.rows
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update({name: deepcopy(each, memo) for name, each in vars(self).items()})
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} on table {self._table.name!r} cannot be pickled: its rows are "
            "on the servers. Save state_dict() and export the table, or use to_embedding()"
        )


class Embedding(KeyedModule):
    """`torch.nn.Embedding` without a vocabulary: any int64 is a key of the table.

    Example:
        users = worker.client.table("users", dim=64, rule=ps.Adagrad(lr=0.05))
        model.users = ps.pytorch.Embedding(users)

    See `KeyedModule` for what is pulled, created and collected.

    Args:
        table: from `client.table`. Modules on the same table share its rows.
        padding_idx: this key reads as zeros, is not trained, and gets no row.
    """

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of `ids` [...], as [..., dim] on the same device.

        Raises:
            TypeError: `ids` are not integers.
            ParamServeError: the pull failed; as `Table.pull`.
        """
        found = self._found(ids)
        if found.rows.is_cuda:
            return F.embedding(found.places, found.rows, found.padding)
        # The same values; on the CPU the gradient takes less than half the time of F.embedding's.
        # The padding's is left out where it is collected.
        chosen = found.rows.index_select(0, found.places.reshape(-1))
        return chosen.reshape(*ids.shape, self.embedding_dim)

    def to_embedding(self, num_embeddings: int | None = None) -> nn.Embedding:
        """A torch module with the present rows of the keys 0 to `num_embeddings` - 1.

        Unknown keys have their initial values; nothing is created.

        Args:
            num_embeddings: None: up to the largest key of the table.
        Raises:
            ValueError: the table has a negative key, or none, and `num_embeddings` is not given;
                or it is not above `padding_idx`.
        """
        weight = self.read(num_embeddings)
        return nn.Embedding(len(weight), self.embedding_dim, self.padding_idx, _weight=weight)


class EmbeddingBag(KeyedModule):
    """`torch.nn.EmbeddingBag` without a vocabulary: any int64 is a key of the table.

    See `KeyedModule` for what is pulled, created and collected.

    Args:
        table: from `client.table`. Modules on the same table share its rows.
        mode: "sum", "mean" or "max" of the rows of a bag.
        padding_idx: this key is left out of its bag, and gets no row.
        include_last_offset: `offsets` have one more element, the number of ids.
    Raises:
        ValueError: `mode` is none of these.
    """

    def __init__(
        self,
        table: Table,
        mode: str = "mean",
        padding_idx: int | None = None,
        include_last_offset: bool = False,
    ) -> None:
        super().__init__(table, padding_idx)
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f'mode must be "sum", "mean" or "max", not {mode!r}')
        self.mode = mode
        self.include_last_offset = include_last_offset

    def extra_repr(self) -> str:
        last = ", include_last_offset=True" if self.include_last_offset else ""
        return f"{super().extra_repr()}, mode={self.mode!r}{last}"

    def forward(
        self,
        ids: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """One row for each bag, [bags, dim]; an empty bag gives zeros.

        Args:
            ids: [bags, ids in a bag], or [n] with `offsets`.
            offsets: [bags], where each bag begins.
            per_sample_weights: shape of `ids`: what each row is multiplied by; mode "sum" only.
        Raises:
            TypeError, ValueError: as torch's. Nothing was applied.
            ParamServeError: the pull failed; as `Table.pull`.
        """
        found = self._found(ids)
        return F.embedding_bag(
            found.places,
            found.rows,
            offsets.long() if offsets is not None else None,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=found.padding,
        )

    def to_embedding(self, num_embeddings: int | None = None) -> nn.EmbeddingBag:
        """As `Embedding.to_embedding`, a torch.nn.EmbeddingBag."""
        weight = self.read(num_embeddings)
        return nn.EmbeddingBag(
            len(weight),
            self.embedding_dim,
            mode=self.mode,
            _weight=weight,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        )
