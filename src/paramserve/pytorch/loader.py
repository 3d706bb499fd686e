"""Each worker's part of a dataset: one common order, disjoint parts, equally many batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

T = TypeVar("T")
_OWN = ("sampler", "batch_sampler", "drop_last")
"""DataLoader options that decide who gets which samples: they are the loader's own."""


class Worker(Protocol):
    """What a loader needs of its worker."""

    @property
    def rank(self) -> int: ...
    @property
    def workers(self) -> int: ...
    @property
    def seed(self) -> int:
        """The run's seed: the same number on all ranks."""
        ...

    @property
    def steps_before(self) -> int:
        """Steps of older incarnations whose batches no loader has left out yet."""
        ...

    @steps_before.setter
    def steps_before(self, steps: int, /) -> None: ...


class RankSampler(Sampler[int]):
    """Indices of one rank's samples, for a `DataLoader` of your own.

    An epoch's order is one permutation of all samples, drawn from (seed, epoch); rank r takes the
    places r, r + workers, r + 2 * workers, ... of it. So b batches of all ranks together are the
    first b * workers * batch_size samples of that order, however many workers share them. Every
    rank has `len(dataset) // workers` samples; up to workers - 1 at the end of the order are left
    out, other ones in each epoch.

    Call `set_epoch` before each epoch, or the order repeats.
    """

    def __init__(self, size: int, rank: int, workers: int, seed: int, shuffle: bool) -> None:
        self._size = size
        self._rank = rank
        self._workers = workers
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        if epoch < 0:
            raise ValueError(f"epoch must be at least 0, not {epoch}")
        self._epoch = epoch

    def indices(self) -> npt.NDArray[np.int64]:
        """This rank's samples in the present epoch, in order: [len(self)]."""
        stop = len(self) * self._workers
        if not self._shuffle:
            return np.arange(self._rank, stop, self._workers, dtype=np.int64)
        order = np.random.default_rng((self._seed, self._epoch)).permutation(self._size)
        return order[self._rank : stop : self._workers]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices().tolist())

    def __len__(self) -> int:
        return self._size // self._workers


class _Batches(Sampler[Any]):
    """The whole batches of a sampler, as lists of indices or, with `arrays`, as arrays."""

    def __init__(self, sampler: RankSampler, batch_size: int, *, arrays: bool) -> None:
        self._sampler = sampler
        self._batch_size = batch_size
        self._arrays = arrays
        self.first = 0
        """Batch at which the next pass begins."""

    def __iter__(self) -> Iterator[Any]:
        first, self.first = self.first, 0
        rows = self._sampler.indices()[first * self._batch_size : len(self) * self._batch_size]
        batches = np.ascontiguousarray(rows).reshape(-1, self._batch_size)
        return iter(batches if self._arrays else batches.tolist())

    def __len__(self) -> int:
        return len(self._sampler) // self._batch_size


class _Rows(Dataset[list[torch.Tensor]]):
    """A `TensorDataset` that is indexed with a whole batch: one `index_select` for each tensor.

    About 6 times as fast as fetching and stacking 128 MNIST images one by one.
    """

    def __init__(self, dataset: TensorDataset) -> None:
        self._tensors = dataset.tensors

    def __getitem__(self, rows: npt.NDArray[np.int64]) -> list[torch.Tensor]:
        chosen = torch.from_numpy(rows)
        return [tensor.index_select(0, chosen.to(tensor.device)) for tensor in self._tensors]


class Loader:
    """One rank's batches over the epochs of a run.

    All ranks get equally many batches, each of exactly `batch_size` samples: in each epoch up to
    workers * batch_size - 1 samples at the end of the common order are left out. Iterating again
    goes on with the epochs that follow.

    In a worker that was started again, the first iterations leave out the batches of the steps that
    were done before, and load none of them: what comes is what would have come without the restart.
    """

    def __init__(
        self,
        loading: DataLoader[Any],
        batches: _Batches,
        sampler: RankSampler,
        length: int,
        done: Callable[[int], int],
    ) -> None:
        self._loading = loading
        self._batches = batches
        self._sampler = sampler
        self._length = length
        self._done = done
        self._epoch = 0

    def __len__(self) -> int:
        """Batches of one iteration, over all its epochs, with those that a restart leaves out."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        done = self._done(self._length)
        epochs, first = divmod(done, len(self._batches))
        if done == self._length:
            self._epoch += -(-done // len(self._batches))
            return
        self._epoch += epochs
        left = self._length - done
        while left:
            self._sampler.set_epoch(self._epoch)
            self._epoch += 1
            self._batches.first, first = first, 0
            for batch in self._loading:
                yield batch
                left -= 1
                if not left:
                    return


def sampler(worker: Worker, dataset: Dataset[Any], *, shuffle: bool = True) -> RankSampler:
    """`worker.sampler`: this rank's part of a dataset, for a `DataLoader` of your own.

    Raises:
        TypeError: the dataset has no length.
        ValueError: it has fewer samples than there are workers.
    """
    size = _size_of(dataset)
    if size < worker.workers:
        raise ValueError(
            f"the dataset has {size} samples for {worker.workers} workers: each needs at least one"
        )
    return RankSampler(size, worker.rank, worker.workers, worker.seed, shuffle)


def load(
    worker: Worker,
    dataset: Dataset[T],
    *,
    batch_size: int,
    epochs: int = 1,
    steps: int | None = None,
    shuffle: bool = True,
    batches_per_step: int = 1,
    resume: bool = True,
    **dataloader_options: Any,
) -> Loader:
    """`worker.loader`: this rank's batches, equally many on every rank.

    A worker that was started again goes on where its older incarnation was: of the first loaders
    with `resume` that it iterates, the batches of `worker.clock` steps are left out. So a function
    that trains over one loader after another goes on in the right one, if each step takes
    `batches_per_step` batches of such a loader.

    Args:
        dataset: map-style, with a length. A `TensorDataset` is read a batch at a time.
        batch_size: samples in each batch of one rank.
        epochs: passes over the dataset.
        steps: number of batches instead of `epochs`: passes are added or cut as it needs.
        shuffle: a new order for each epoch, from (seed, epoch).
        batches_per_step: batches whose gradients add up to one step. What an iteration has left
            over at its end belongs to no step.
        resume: False for a loader that is not stepped with, as for evaluation, if it is iterated
            before the training loader has come to its place.
        dataloader_options: as `torch.utils.data.DataLoader` takes them, except for `sampler`,
            `batch_sampler` and `drop_last`.
    Raises:
        TypeError: an unknown or excluded option, a number that is not an int, or a dataset
            without length.
        ValueError: a number is below 1, or the dataset has no whole batch for every worker.
    """
    _check_count("batch_size", batch_size)
    _check_count("epochs", epochs)
    _check_count("batches_per_step", batches_per_step)
    if steps is not None:
        _check_count("steps", steps)
    excluded = [option for option in _OWN if option in dataloader_options]
    if excluded:
        raise TypeError(
            f"worker.loader decides {', '.join(excluded)} by itself; for your own choice use "
            "DataLoader(dataset, sampler=worker.sampler(dataset), ...)"
        )
    size = _size_of(dataset)
    if size < worker.workers * batch_size:
        raise ValueError(
            f"the dataset has {size} samples, {worker.workers} workers with batch_size "
            f"{batch_size} need {worker.workers * batch_size} for one step: make batch_size smaller"
        )
    own = RankSampler(size, worker.rank, worker.workers, worker.seed, shuffle)
    loading, batches = _loading(dataset, own, batch_size, dataloader_options)

    def done(length: int) -> int:
        """How many of the next `length` batches were stepped with before a restart."""
        if not (resume and worker.steps_before):
            return 0
        steps = min(worker.steps_before, length // batches_per_step)
        worker.steps_before -= steps
        return length if worker.steps_before else steps * batches_per_step

    length = steps if steps is not None else epochs * len(batches)
    return Loader(loading, batches, own, length, done)


def _loading(
    dataset: Dataset[Any], own: RankSampler, batch_size: int, options: dict[str, Any]
) -> tuple[DataLoader[Any], _Batches]:
    """Torch's loader over a rank's batches, and these."""
    rows = type(dataset) is TensorDataset and options.get("collate_fn") is None
    batches = _Batches(own, batch_size, arrays=rows)
    if rows:
        assert isinstance(dataset, TensorDataset)
        return DataLoader(_Rows(dataset), batch_size=None, sampler=batches, **options), batches
    return DataLoader(dataset, batch_sampler=batches, **options), batches


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")


def _size_of(dataset: Any) -> int:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{type(dataset).__name__} has no length and order of its own to share among the "
            "workers: use a map-style dataset, or split the stream by worker.rank"
        )
    return len(dataset)
