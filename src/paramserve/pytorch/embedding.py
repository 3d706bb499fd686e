"""`Embedding` and `EmbeddingBag`: torch's modules, with their rows in a keyed table.

`from_embedding` makes one from a trained torch module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, Self, overload

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paramserve.client.string_keys import hashed
from paramserve.config import BUFFERS
from paramserve.core.table import routing
from paramserve.errors import warn_user

if TYPE_CHECKING:
    from paramserve.client import Client
    from paramserve.client.table import Table
    from paramserve.rules.base import Rule


class Gradients(NamedTuple):
    """Gradients of some keys of a table: int64 [m] on the CPU, distinct; [m, dim]."""

    keys: Tensor
    values: Tensor


def _no_keys() -> Tensor:
    return torch.empty(0, dtype=torch.int64, device="cpu")


def _no_rows(dim: int) -> Tensor:
    """Empty rows as a table has them, whatever torch's default dtype and device are."""
    return torch.empty(0, dim, dtype=torch.float32, device="cpu")


class Rows(torch.nn.Parameter):
    """A table's rows as torch sees them: [0, dim], with a `grad` [m, dim] of the collected keys.

    The two shapes differ, which no other parameter's do: what goes over the values of parameters
    finds none here, and what goes over gradients finds these.

    It says that it requires no gradient, so that `DistributedDataParallel` leaves it alone. To
    freeze the table set `requires_grad = False`, as for any parameter: then `trained` is False.

    Attributes:
        of: the table's name, for messages.
        trained: whether a forward pass collects gradients.
        apart: dense layers are averaged over the workers, and rows are not: what is not finite in
            a row must not make this worker skip a step that the others make.
        stepped: an optimizer of `worker.optimizer` sends what is collected.
    """

    of: str
    trained: bool
    apart: bool
    stepped: bool
    _collected: Tensor | None
    _keys: Tensor | None
    _bad: Tensor | None
    _values_version: int
    _aside: Tensor | None

    @classmethod
    def empty(cls, of: str, dim: int) -> Rows:
        """Rows of a table of this name and width, without anything collected."""
        rows = cls(torch.empty(0, dim), requires_grad=False)
        rows.of, rows.trained, rows.apart, rows.stepped = of, True, False, False
        rows._collected, rows._keys, rows._bad, rows._values_version = None, None, None, 0
        rows._aside = None
        return rows

    @property
    def grad(self) -> Tensor | None:
        """The gradients of the keys that were collected."""
        return self._collected

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._collected = value

    @property
    def requires_grad(self) -> bool:
        """Always False: autograd never accumulates a gradient here."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.trained = bool(value)

    def requires_grad_(self, requires_grad: bool = True) -> Rows:
        """Train the rows from now on, or freeze them."""
        self.trained = requires_grad
        return self

    def collect(self, keys: Tensor, leaf: Tensor) -> None:
        """Add the gradient that a backward pass has left on a leaf.

        Args:
            keys: int64 [m] on the CPU, distinct.
            leaf: its first m rows are those of the keys.
        """
        if not self.stepped:
            warn_user(
                f"table {self.of!r} has collected gradients that no optimizer sends: give the "
                "model to worker.optimizer(model, optimizer), and step what that returns. To train "
                "nothing of the table set requires_grad = False on the module's rows"
            )
        gradient = leaf.grad
        assert gradient is not None, "called when it is there"
        leaf.grad = None  # a second backward through the same graph adds its own part only
        new = Gradients(keys, gradient.detach()[: len(keys)])
        if self.apart:
            new = self._finite(new)
        before = self._current()
        self._hold(new if before is None else _sum(before, new))

    def collected(self) -> Gradients:
        """What was collected since the last `drop`, in float32 on the CPU; it may be `grad` itself.

        Raises:
            RuntimeError: other code has put a gradient of another shape here.
        """
        gradients = self._current()
        if gradients is None:
            return Gradients(_no_keys(), _no_rows(self.shape[1]))
        return Gradients(gradients.keys, gradients.values.to("cpu", torch.float32).contiguous())

    def take_bad(self) -> Tensor:
        """Keys whose gradients were left out for NaN or Inf since the last call; `apart` only."""
        bad, self._bad = self._bad, None
        return bad if bad is not None else _no_keys()

    def drop(self) -> None:
        self._keys = None
        self.grad = self._aside = None

    def set_aside(self) -> None:
        """Hide what was collected from a step of torch's, which would add it to no elements."""
        self._aside = self.grad
        self.grad = None

    def bring_back(self) -> None:
        """Have again what was set aside and not dropped since."""
        if self._aside is not None:
            self.grad = self._aside
            self._aside = None

    def _hold(self, gradients: Gradients) -> None:
        keys, values = gradients
        self.grad = values
        self._keys, self._values_version = keys, values._version

    def _current(self) -> Gradients | None:
        """What is collected and was not dropped by a `zero_grad` of torch's."""
        self.bring_back()  # an interrupt may have ended the step that was to
        keys, values = self._keys, self.grad
        if keys is None or values is None:
            return None
        if values.shape != (len(keys), self.shape[1]):
            raise RuntimeError(
                f"the gradient of a table's rows is {list(values.shape)} now, and {len(keys)} rows "
                f"of {self.shape[1]} were collected: change it in place, or set it to None"
            )
        if values._version != self._values_version and not bool(values.any()):
            return None  # zeroed in place, by zero_grad(set_to_none=False)
        return Gradients(keys, values)

    def _finite(self, gradients: Gradients) -> Gradients:
        """The rows without NaN and Inf; the others' keys are remembered."""
        good = gradients.values.isfinite().all(dim=1)
        if bool(good.all()):
            return gradients
        finite = good.cpu()
        bad = gradients.keys[~finite]
        self._bad = bad if self._bad is None else torch.unique(torch.cat([self._bad, bad]))
        return Gradients(gradients.keys[finite], gradients.values[good])


def _sum(first: Gradients, second: Gradients) -> Gradients:
    """The sum by key."""
    both = torch.cat([first.keys, second.keys])
    keys, places = torch.unique(both, return_inverse=True)
    total = first.values.new_zeros(len(keys), first.values.shape[1])
    places = places.to(total.device)
    total.index_add_(0, places[: len(first.keys)], first.values)
    total.index_add_(0, places[len(first.keys) :], second.values.to(total))
    return Gradients(keys, total)


_rows_by_table: weakref.WeakKeyDictionary[Table, Rows] = weakref.WeakKeyDictionary()


def rows_of(table: Table) -> Rows:
    """The one parameter for a table: modules on the same table share it, as tied layers do.

    Raises:
        TypeError: the table counts in 64 bits.
    """
    if table.wide is not None:
        raise TypeError(
            f"table {table.name!r} counts in {table.wide}, and torch trains rows of float32: make "
            "the table of an embedding without dtype="
        )
    rows = _rows_by_table.get(table)
    if rows is None:
        rows = _rows_by_table[table] = Rows.empty(table.name, table.dim)
    return rows


READ_ROWS = 65536
"""Rows that are read or written at once where a whole table is copied."""
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_INT64 = torch.iinfo(torch.int64)
Ids = Tensor | npt.ArrayLike
"""Integers as a tensor, or strings as `ps.keys_of` takes them."""


class _Lookup(NamedTuple):
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
    `optimizer.step()` of `worker.optimizer` sends them, which creates the rows of new keys; until
    then these read as their initial values. `torch.compile` leaves the pull to Python and compiles
    what is before and behind it; with `fullgraph=True` it refuses the model.

    The table's own rule makes the steps, with the hyper-parameters that it was defined with: a
    learning rate scheduler of torch's, or the options of the torch optimizer, do not reach it.
    The rows are not part of `state_dict()`: export the table. A deep copy has the same table.

    Attributes:
        rows: what torch sees of the table: without elements, or with the gradients collected.
    """

    rows: Rows
    _untraced: ClassVar[Callable[[KeyedModule, Ids], _Lookup] | None] = None
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
        """Table of the rows."""
        return self._table

    @property
    def embedding_dim(self) -> int:
        """Width of a row."""
        return self._table.dim

    def extra_repr(self) -> str:
        padding = f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""
        return f"{self._table.name!r}, {self.embedding_dim}{padding}"

    def _look_up(self, ids: Ids) -> _Lookup:
        find = KeyedModule._untraced
        assert find is not None, "the first module has set it"
        return find(self, ids)

    def _find(self, ids: Ids) -> _Lookup:
        """The rows of these ids, pulled; with gradients enabled, a leaf that is collected from.

        Raises:
            TypeError: the ids are neither a tensor of integers nor strings, or have no memory:
                inside a transform of `torch.func`. Nothing was pulled.
        """
        learns = torch.is_grad_enabled() and self.rows.trained
        if not isinstance(ids, Tensor):
            what = f"ids of table {self._table.name!r}"
            keep = learns and self.training  # a push of their keys follows, without the strings
            found_keys = self._table.keys_of(ids) if keep else hashed(ids, what)
            ids = torch.from_numpy(found_keys).to(self.rows.device)
        if ids.dtype not in _INTEGERS:
            raise TypeError(
                f"ids must be a tensor of int64 or smaller integers, or strings, not {ids.dtype}"
            )
        flat = ids.detach().to("cpu", torch.int64).reshape(-1)
        try:
            keys_found, numbers = routing.distinct(flat.numpy())
        except RuntimeError as error:
            raise TypeError(
                f"{type(self).__name__} cannot pull the rows of ids that have no memory, as inside "
                "torch.func.grad or vmap: the rows come from the servers. Pull them outside of the "
                "transform and give it the rows, or use loss.backward()"
            ) from error
        keys, places = torch.from_numpy(keys_found), torch.from_numpy(numbers).long()
        padding = self._place_of_padding(keys)
        if padding is not None:
            keys = torch.cat([keys[:padding], keys[padding + 1 :]])
            behind = places - (places > padding).long()
            places = torch.where(places == padding, len(keys), behind)
            padding = len(keys)
        rows = self._pull(keys, learns=learns and self.training)
        if padding is not None:
            rows = torch.cat([rows, rows.new_zeros(1, self.embedding_dim)])
        rows = rows.to(ids.device, self.rows.dtype)
        if learns:
            rows.requires_grad_()
            self._collect_from(rows, keys)
        return _Lookup(places.reshape(ids.shape).to(ids.device), rows, padding)

    def _collect_from(self, leaf: Tensor, keys: Tensor) -> None:
        when_there: Any = leaf.register_post_accumulate_grad_hook  # torch has no types for it
        when_there(partial(self.rows.collect, keys))

    def _place_of_padding(self, keys: Tensor) -> int | None:
        if self.padding_idx is None:
            return None
        places = (keys == self.padding_idx).nonzero()
        return int(places) if len(places) else None

    def _pull(self, keys: Tensor, *, learns: bool = False, exact: bool = False) -> Tensor:
        if not len(keys):
            return _no_rows(self.embedding_dim)
        return torch.from_numpy(self._table.pull(keys.numpy(), learns=learns, exact=exact))

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
        values = torch.empty(count, self.embedding_dim, dtype=self.rows.dtype, device="cpu")
        for start in range(0, count, READ_ROWS):
            keys = torch.arange(start, min(start + READ_ROWS, count), device="cpu")
            values[start : start + READ_ROWS] = self._pull(keys, exact=True)
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
    """`torch.nn.Embedding` without a vocabulary: any int64 or string is a key of the table.

    Example:
        users = worker.client.table("users", dim=64, rule=ps.Adagrad(lr=0.05))
        model.users = ps.pytorch.Embedding(users)

    See `KeyedModule` for what is pulled and collected.

    Args:
        table: from `client.table`. Modules on the same table share its rows.
        padding_idx: this key reads as zeros, is not trained, and gets no row.
    """

    def forward(self, ids: Ids) -> Tensor:
        """The rows of `ids` [...], as [..., dim] on the same device.

        Strings are hashed to keys as by `table.keys_of`; their rows come on the module's device.

        Raises:
            TypeError: `ids` are neither a tensor of integers nor strings.
            ParamServeError: the pull failed; as `Table.pull`.
        """
        lookup = self._look_up(ids)
        if lookup.rows.is_cuda:
            return F.embedding(lookup.places, lookup.rows, lookup.padding)
        # The same values; on the CPU the gradient takes less than half the time of F.embedding's.
        # The padding's is left out where it is collected.
        rows = lookup.rows.index_select(0, lookup.places.reshape(-1))
        return rows.reshape(*lookup.places.shape, self.embedding_dim)

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
    """`torch.nn.EmbeddingBag` without a vocabulary: any int64 or string is a key of the table.

    See `KeyedModule` for what is pulled and collected.

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
        ids: Ids,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """One row for each bag, [bags, dim]; an empty bag gives zeros.

        Args:
            ids: [bags, ids in a bag], or [n] with `offsets`; integers or strings.
            offsets: [bags], where each bag begins.
            per_sample_weights: shape of `ids`: what each row is multiplied by; mode "sum" only.
        Raises:
            TypeError, ValueError: as torch's. Nothing was applied.
            ParamServeError: the pull failed; as `Table.pull`.
        """
        lookup = self._look_up(ids)
        return F.embedding_bag(
            lookup.places,
            lookup.rows,
            offsets.long() if offsets is not None else None,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=lookup.padding,
        )

    def to_embedding(self, num_embeddings: int | None = None) -> nn.EmbeddingBag:
        """Copy the table into a torch.nn.EmbeddingBag; see `Embedding.to_embedding`."""
        weight = self.read(num_embeddings)
        return nn.EmbeddingBag(
            len(weight),
            self.embedding_dim,
            mode=self.mode,
            _weight=weight,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        )


_MARK = f".taken-over{BUFFERS}"
"""Group of the value that says that all rows are there. Of groups whose names end so, a result
shows nothing by itself."""


@overload
def from_embedding(
    client: Client,
    name: str,
    embedding: nn.Embedding,
    *,
    rule: Rule | Callable[..., Any],
    **options: Any,
) -> Embedding: ...
@overload
def from_embedding(
    client: Client,
    name: str,
    embedding: nn.EmbeddingBag,
    *,
    rule: Rule | Callable[..., Any],
    **options: Any,
) -> EmbeddingBag: ...


def from_embedding(
    client: Client,
    name: str,
    embedding: nn.Embedding | nn.EmbeddingBag,
    *,
    rule: Rule | Callable[..., Any],
    **options: Any,
) -> Embedding | EmbeddingBag:
    """A module on a new table that has the rows of a trained torch module.

    In a run all ranks call this at the same point: rank 0's rows are the table's, the others wait
    for them. They are put once; where the table was taken over before (this is a worker that was
    started again), or begins with rows of `load_tables=`, it stays as it is.

    Args:
        client: `worker.client`, or one without a rank.
        name: of the table.
        embedding: not changed, and not needed afterwards. Its index i becomes the key i.
        rule: of the table.
        options: further ones of `client.table`; `init` is for keys that come later.
    Raises:
        TypeError: `embedding` is neither an nn.Embedding nor an nn.EmbeddingBag.
        ValueError: it has options that a table cannot follow (`max_norm`, `scale_grad_by_freq`), a
            padding row that is not zeros, or a weight that float32 does not hold exactly by its
            dtype, as float64. Nothing was defined.
        DefineTimeout: rank 0 did not put its rows in time.
        ParamServeError: as `client.table` and `Table.put`.
    """
    _check(embedding)
    table = client.table(name, dim=embedding.embedding_dim, rule=rule, **options)
    group, mark = name + _MARK, f"{name} is taken over"
    if client.rank > 0:
        client.directory.await_block({mark: (1,)}, dtype=np.dtype(np.int64), rule=None, group=group)
    elif all(block.group_name != group for block in client.blocks()):
        if name not in client.load_tables:
            _put(table, embedding)
        client.define({mark: np.ones(1, np.int64)}, rule=None, group=group)
    if isinstance(embedding, nn.Embedding):
        return Embedding(table, embedding.padding_idx)
    return EmbeddingBag(
        table,
        embedding.mode,
        padding_idx=embedding.padding_idx,
        include_last_offset=embedding.include_last_offset,
    )


def _check(embedding: nn.Embedding | nn.EmbeddingBag) -> None:
    if not isinstance(embedding, nn.Embedding | nn.EmbeddingBag):
        raise TypeError(
            f"from_embedding takes an nn.Embedding or nn.EmbeddingBag, not "
            f"{type(embedding).__name__}"
        )
    if embedding.max_norm is not None or embedding.scale_grad_by_freq:
        raise ValueError(
            "from_embedding: max_norm and scale_grad_by_freq change the rows in a way that a "
            "table's rule does not. Take over a module without them"
        )
    if torch.promote_types(embedding.weight.dtype, torch.float32) != torch.float32:
        raise ValueError(
            f"from_embedding: the weight is {embedding.weight.dtype}, and a table's rows are "
            "float32 for torch, which would round it. Give a copy that you have rounded: "
            "copy.deepcopy(embedding).float()"
        )
    padding = embedding.padding_idx if isinstance(embedding, nn.Embedding) else None
    if padding is not None and bool(embedding.weight[padding].any()):
        raise ValueError(
            f"from_embedding: the row of padding_idx {padding} is not zeros, and a table's padding "
            "reads as zeros. Zero it, or take it over as a row, with padding_idx None"
        )


def _put(table: Table, embedding: nn.Embedding | nn.EmbeddingBag) -> None:
    weight = embedding.weight.detach()
    keys = torch.arange(len(weight), device="cpu")
    if embedding.padding_idx is not None:
        keys = keys[keys != embedding.padding_idx]
    for start in range(0, len(keys), READ_ROWS):
        part = keys[start : start + READ_ROWS]
        values = weight[part.to(weight.device)].to("cpu", torch.float32)
        table.put(part.numpy(), values.contiguous().numpy())
