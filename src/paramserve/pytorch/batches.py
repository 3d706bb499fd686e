"""What every loader is made of: the order of an epoch, whole batches of tensors, checks.

A loader or sampler that is made again with the same dataset and arguments goes on with the epochs
that follow, as if the first one were iterated again (`make_once`).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    get_worker_info,
)

from paramserve.client import Client, Table
from paramserve.client.loop_progress import LoopProgress
from paramserve.client.names import as_keys
from paramserve.client.row_reads import RowRead, TableRead
from paramserve.config import check_count
from paramserve.core.table import routing
from paramserve.errors import did_you_mean
from paramserve.pytorch.embedding import KeyedModule
from paramserve.seeding import seed_everything

if TYPE_CHECKING:
    from paramserve.training.host import Host, PassesByDataset

_OWN = ("sampler", "batch_sampler", "drop_last")
"""DataLoader options that decide who gets which samples: they are the loader's own."""


class _Rows(Dataset[list[torch.Tensor]]):
    """A `TensorDataset` that is indexed with a whole batch: one `index_select` for each tensor.

    About 6 times as fast as fetching and stacking 128 MNIST images one by one.
    """

    def __init__(self, dataset: TensorDataset) -> None:
        self._tensors = dataset.tensors

    def __getitem__(self, rows: npt.NDArray[np.int64]) -> list[torch.Tensor]:
        indices = torch.from_numpy(rows)
        return [tensor.index_select(0, indices.to(tensor.device)) for tensor in self._tensors]


class SeededBatch(list[int]):
    """Indices of a batch. A process of a `DataLoader` that begins to fetch its samples seeds its
    generators: what it draws for a batch does not depend on the batches that it has loaded before.

    Where the batch is loaded in the worker itself, whose generators a restart finds where they
    were, nothing is seeded.

    Args:
        entropy: of this batch, the same after a restart.
    """

    def __init__(self, indices: Sequence[int], entropy: tuple[int, ...]) -> None:
        super().__init__(indices)
        self._entropy = entropy

    def __iter__(self) -> Iterator[int]:
        if get_worker_info() is not None:
            seed_everything(int(np.random.SeedSequence(self._entropy).generate_state(1)[0]))
        return super().__iter__()

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededBatch, ([*super().__iter__()], self._entropy)


def order(size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The common order of an epoch's samples, with shuffling: [size]."""
    return np.random.default_rng((seed, epoch)).permutation(size)


def by_rows(dataset: Dataset[Any], options: dict[str, Any]) -> bool:
    """Whether a dataset is read a batch at a time, by arrays of indices."""
    return type(dataset) is TensorDataset and options.get("collate_fn") is None


def loading(
    dataset: Dataset[Any], batches: Sampler[Any], options: dict[str, Any]
) -> DataLoader[Any]:
    """Torch's loader over batches: of arrays where `by_rows`, else of lists."""
    if by_rows(dataset, options):
        assert isinstance(dataset, TensorDataset)
        return DataLoader(_Rows(dataset), batch_size=None, sampler=batches, **options)
    return DataLoader(dataset, batch_sampler=batches, **options)


def check_options(options: dict[str, Any], own: Sequence[str]) -> None:
    """Raise `TypeError` for an option that is the loader's own, or that torch's loader has not.

    Args:
        own: the names of the loader's own arguments, of which one may be meant.
    """
    excluded = [option for option in _OWN if option in options]
    if excluded:
        raise TypeError(
            f"worker.loader decides {', '.join(excluded)} by itself; for your own choice use "
            "DataLoader(dataset, sampler=worker.sampler(dataset), ...)"
        )
    torchs = [*inspect.signature(DataLoader).parameters]
    for name in options:
        if name not in torchs:
            raise unknown_argument("loader", name, {*own, *torchs}.difference(_OWN))


def unknown_argument(function: str, name: str, names: Collection[str]) -> TypeError:
    """The error for a keyword that a function of the worker's does not have."""
    hint = did_you_mean(name, sorted(names))
    return TypeError(f"worker.{function} got an unexpected keyword argument {name!r}{hint}")


def check_counts(batch_size: Any, epochs: Any, steps: Any, batches_per_step: Any) -> None:
    """Raise `TypeError` or `ValueError` unless each is an int of at least 1; the last two may be
    None."""
    check_count("batch_size", batch_size)
    check_count("epochs", epochs)
    for name, value in (("steps", steps), ("batches_per_step", batches_per_step)):
        if value is not None:
            check_count(name, value)


def size_of(dataset: Any) -> int:
    """How many samples it has. Raises `TypeError` if it does not know."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{type(dataset).__name__} has no length and order of its own to share among the "
            "workers: use a map-style dataset, or split the stream by worker.rank "
            "(docs/recipes.md#streams)"
        )
    return len(dataset)


T = TypeVar("T")
KeysOf = Callable[[Any], Mapping[Any, npt.ArrayLike] | Iterable[tuple[Any, npt.ArrayLike]]]
"""The keys that a batch uses: by table, name of a table or module on one; a mapping, or pairs."""
KEPT_MAX = 4
"""Datasets of a worker that are kept in memory because nothing can refer to them weakly (a list,
slots); the one whose loader was made longest ago goes first. The others go when the training
function has dropped them."""


def make_once(
    passes: PassesByDataset, dataset: Any, arguments: Hashable, make: Callable[[], T]
) -> T:
    """What loaders and samplers of a dataset have in common, as the epochs that they have begun;
    kept by the worker.

    Args:
        passes: of the worker.
        dataset: the same object as before; of a `TensorDataset`, with the same tensors.
        make: called for the first one; what it gives must not hold the dataset.
    """
    known_by = (*dataset.tensors,) if type(dataset) is TensorDataset else (dataset,)
    key = tuple(id(each) for each in known_by)
    entry = passes.pop(key, None)
    passes[key] = entry = entry if entry is not None else (_anchors(passes, key, known_by), {})
    # A collection at any moment may drop entries: over a copy of the keys.
    strong = [each for each in [*passes] if not _weak(passes.get(each, ((), {}))[0])]
    if len(strong) > KEPT_MAX:
        del passes[strong[0]]
    by_arguments = entry[1]
    if arguments not in by_arguments:
        by_arguments[arguments] = make()
    result: T = by_arguments[arguments]
    return result


def _anchors(
    passes: PassesByDataset, key: tuple[int, ...], known_by: tuple[Any, ...]
) -> tuple[Any, ...]:
    """What the entry holds of these objects, so that it goes before an identity is used again."""

    def drop(_: object) -> None:
        passes.pop(key, None)

    try:
        return tuple(weakref.ref(each, drop) for each in known_by)
    except TypeError:
        return known_by


def _weak(anchors: tuple[Any, ...]) -> bool:
    return all(isinstance(each, weakref.ref) for each in anchors)


def check_range(epochs: int, start: int) -> None:
    """Raise `TypeError` or `ValueError` unless a loop may go from `start` up to `epochs`."""
    check_count("epochs", epochs, least=0)
    check_count("start", start, least=0)


def loop(worker: Host, first: int, done: int, epochs: int) -> Iterator[int]:
    """The numbers of a loop over epochs; each step tells its own one to later incarnations.

    Args:
        first: of the loop's whole range.
        done: epochs at its beginning that were done before this incarnation.
        epochs: end of the range.
    """
    steps = worker.client.steps
    steps.epochs += done
    try:
        for epoch in range(first + done, epochs):
            if worker.retiring:
                return
            steps.epochs += 1
            steps.loop.begin_epoch(epoch - first, epochs - first)
            yield epoch
    finally:
        steps.loop.end_epochs()
        worker.course.loops_ended += 1


def loop_progress(worker: Host) -> LoopProgress:
    """What a loop over batches reports its progress to; an evaluation's is not shown."""
    return worker.client.steps.loop if torch.is_grad_enabled() else LoopProgress()


def ahead(
    batches: Iterable[T], client: Client, keys_of: KeysOf, batch_of: Callable[[T], Any]
) -> Generator[T, None, None]:
    """Yield batches, each when the rows of the one behind it have been asked for.

    All rows of a batch are asked for in one message to each shard, before the present batch is
    pushed: they are one step older, and not even this worker's last push is in them. Those that
    no pull has read when the batch after theirs is asked for, or at the end, are released. One pair
    serves one pull: a module that is called twice needs two.

    A forward pass pulls anew, and nothing is gained, where steps have ended more than one clock on
    a table since its rows were asked for, or under a policy whose workers all read the values of
    one clock (`ps.Sync`) any; see `Table.prefetch`.

    Where a module is named, and not its table, the row of its padding is not asked for.

    Args:
        batch_of: what `keys_of` is given of each.
    Raises:
        TypeError: `keys_of` gave something else. And what it raises, what the batches raise, and
            what `Table.prefetch` does.
    """
    present: tuple[T, list[RowRead]] | None = None
    coming: list[RowRead] = []
    try:
        for each in batches:
            coming = client.prefetch_tables(_reads(client, keys_of(batch_of(each))))
            if present is not None:
                yield present[0]
                for read in present[1]:
                    read.drop()
            present, coming = (each, coming), []
        if present is not None:
            yield present[0]
    finally:
        for read in [*(present[1] if present is not None else ()), *coming]:
            read.drop()


def _reads(client: Client, answer: Any) -> list[TableRead]:
    pairs = answer.items() if isinstance(answer, Mapping) else answer
    try:
        table_keys = [(where, keys) for where, keys in pairs]
    except (TypeError, ValueError):
        raise TypeError(
            "the function of prefetch= gives a mapping from tables, their names or modules on "
            f"them to keys, or pairs of them, not {answer!r}"
        ) from None
    return [_read(client, where, keys) for where, keys in table_keys]


def _read(client: Client, where: Any, keys: Any) -> TableRead:
    if isinstance(keys, Tensor):
        keys = keys.detach().cpu().numpy()
    if isinstance(where, KeyedModule):  # as its forward pass will pull them
        distinct, _ = routing.distinct(as_keys(keys, where.table.name)[0])
        if where.padding_idx is not None:
            distinct = distinct[distinct != where.padding_idx]
        return TableRead(where.table, distinct)
    table = client.table(where) if isinstance(where, str) else where
    if not isinstance(table, Table):
        raise TypeError(
            "the function of prefetch= names what it gives keys for by a table, its name or a "
            f"module on it, not by {where!r}"
        )
    return TableRead(table, keys)
