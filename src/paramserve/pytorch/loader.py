"""Each worker's part of a dataset: one common order, disjoint parts.

Static parts have equally many batches, and are made here; dynamic ones by `leased.py`, from ranges
of each epoch that are leased to the workers as they ask for them. There every sample comes once in
each epoch, the last batch may be smaller, and what a worker that ended had not finished goes to
another: in Sync exactly that, in Async with what some servers have had already;
`LeaseReport.repeated` counts it. A loop ends when all ranks have finished. Every batch must be
stepped with, or the loop left. The coordinator knows what a worker that was started again has done.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, Dataset, Sampler

from paramserve.pytorch import leased
from paramserve.pytorch.batches import (
    Epochs,
    KeysOf,
    ahead,
    by_rows,
    check_counts,
    check_options,
    loading,
    order,
    shared,
    size_of,
)

if TYPE_CHECKING:
    from paramserve.worker import Worker

T = TypeVar("T")
STATIC, DYNAMIC = "static", "dynamic"


class RankSampler(Sampler[int]):
    """Indices of one rank's samples, for a `DataLoader` of your own.

    An epoch's order is one permutation of all samples, drawn from (seed, epoch); rank r takes the
    places r, r + workers, r + 2 * workers, ... of it. So b batches of all ranks together are the
    first b * workers * batch_size samples of that order, however many workers share them. Every
    rank has `len(dataset) // workers` samples; up to workers - 1 at the end of the order are left
    out, other ones in each epoch.

    Each iteration is the next epoch, or the one that `set_epoch` has chosen for it. A sampler that
    is made again with the same dataset and arguments goes on there.

    Args:
        epochs: common to the samplers that go on from each other.
    """

    def __init__(
        self, size: int, rank: int, workers: int, seed: int, shuffle: bool, epochs: Epochs
    ) -> None:
        self._size = size
        self._rank = rank
        self._workers = workers
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._epoch = epochs.next

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        if epoch < 0:
            raise ValueError(f"epoch must be at least 0, not {epoch}")
        self._epoch = self._epochs.next = epoch

    def indices(self) -> npt.NDArray[np.int64]:
        """This rank's samples in the present epoch, in order: [len(self)]."""
        stop = len(self) * self._workers
        if not self._shuffle:
            return np.arange(self._rank, stop, self._workers, dtype=np.int64)
        return order(self._size, self._seed, self._epoch)[self._rank : stop : self._workers]

    def __iter__(self) -> Iterator[int]:
        self._epoch = self._epochs.next
        self._epochs.next += 1
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


class Loader:
    """One rank's batches over the epochs of a run.

    All ranks get equally many batches, each of exactly `batch_size` samples: in each epoch up to
    workers * batch_size - 1 samples at the end of the common order are left out, other ones in each
    epoch. Iterating again goes on with the epochs that follow; so does a loader that is made again
    with the same dataset and arguments, as in each round of a loop over epochs.

    In a worker that was started again, the first iterations leave out the batches of the steps that
    were done before, and load none of them: what comes is what would have come without the restart.
    A clock that the others decided without this worker takes its batches along, so that all ranks
    end at the same one. When the run wants the worker to end, the iteration does.

    Args:
        epochs: common to the loaders that go on from each other.
        prefetch: which rows of tables a batch needs; see `batches.ahead`.
    """

    def __init__(
        self,
        worker: Worker,
        loading: DataLoader[Any],
        batches: _Batches,
        sampler: RankSampler,
        length: int,
        batches_per_step: int | None,
        resume: bool,
        epochs: Epochs,
        prefetch: KeysOf | None = None,
    ) -> None:
        self._worker = worker
        self._prefetch = prefetch
        self._batches_per_step = batches_per_step
        self._loading = loading
        self._batches = batches
        self._sampler = sampler
        self._length = length
        self._resume = resume
        self._epochs = epochs

    def __len__(self) -> int:
        """Batches of one iteration, over all its epochs, with those that a restart leaves out."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        worker = self._worker
        worker.leased = None  # steps are no longer with the batches of a leased loader
        done = self._done_before()
        epochs, first = divmod(done, len(self._batches))
        if done == self._length:
            self._epochs.next += -(-done // len(self._batches))
            return
        self._epochs.next += epochs
        missed, late = worker.missed, 0
        with closing(self._loaded(first, self._length - done)) as loaded:
            for epoch, batch in loaded:
                self._epochs.next = epoch + 1
                if worker.missed != missed:
                    late += (worker.missed - missed) * self._per_step
                    missed = worker.missed
                if worker.retiring:
                    return
                if late:
                    late -= 1
                else:
                    yield batch

    def _loaded(self, first: int, left: int) -> Generator[tuple[int, Any], None, None]:
        """As many batches as are left, each with its epoch; rows are asked for ahead."""
        batches = self._in_order(first, left)
        if self._prefetch is None:
            return batches
        return ahead(batches, self._worker.client, self._prefetch, itemgetter(1))

    def _in_order(self, first: int, left: int) -> Generator[tuple[int, Any], None, None]:
        epoch = self._epochs.next
        while left:
            self._sampler.set_epoch(epoch)
            begun, self._batches.first, first = first > 0, first, 0
            if self._resume and not begun:
                self._worker.go_on_drawing()
            batches = iter(self._loading)  # draws a number, which a pass in its middle has drawn
            if self._resume and begun:
                self._worker.go_on_drawing()
            for batch in batches:
                yield epoch, batch
                left -= 1
                if not left:
                    return
            epoch += 1

    def _done_before(self) -> int:
        """How many batches of the next iteration were stepped with before a restart."""
        worker = self._worker
        if not (self._resume and worker.steps_before):
            return 0
        steps = min(worker.steps_before, self._length // self._per_step)
        worker.steps_before -= steps
        return self._length if worker.steps_before else steps * self._per_step

    @property
    def _per_step(self) -> int:
        told = self._batches_per_step
        return told if told is not None else self._worker.batches_per_step


def sampler(
    worker: Worker,
    dataset: Dataset[Any],
    *,
    shuffle: bool = True,
    shards: str = STATIC,
    **sharing: Any,
) -> RankSampler | leased.LeasedSampler:
    """See `Worker.sampler`."""
    if _dynamic(shards, None):
        if "batch_size" not in sharing:
            raise TypeError('with shards="dynamic" the sampler makes the batches: give batch_size')
        work = leased.lease(worker, dataset, shuffle=shuffle, told=False, **sharing)
        return leased.LeasedSampler(work)
    if sharing:
        raise TypeError(
            f'{", ".join(sorted(sharing))} goes with shards="dynamic": a static sampler gives '
            "indices, and the DataLoader makes its batches"
        )
    size = size_of(dataset)
    if size < worker.workers:
        raise ValueError(
            f"the dataset has {size} samples for {worker.workers} workers: each needs at least one"
        )
    epochs = shared(worker.passes, dataset, ("sampler", shuffle), Epochs)
    return RankSampler(size, worker.rank, worker.workers, worker.seed, shuffle, epochs)


def _dynamic(shards: str | None, adaptive_batch: object) -> bool:
    """Whether samples are shared by lease."""
    if shards not in (None, STATIC, DYNAMIC):
        raise ValueError(f'shards is "static" or "dynamic", not {shards!r}')
    if shards == STATIC and adaptive_batch is not None:
        raise ValueError(
            'adaptive_batch needs shards="dynamic": with "static" all ranks have equal batches'
        )
    return shards == DYNAMIC or adaptive_batch is not None


def load(
    worker: Worker,
    dataset: Dataset[T],
    *,
    batch_size: int,
    epochs: int = 1,
    steps: int | None = None,
    shuffle: bool = True,
    batches_per_step: int | None = None,
    resume: bool = True,
    shards: str | None = None,
    adaptive_batch: tuple[int, int] | None = None,
    name: str | None = None,
    prefetch: KeysOf | None = None,
    **dataloader_options: Any,
) -> Loader | leased.LeasedLoader:
    """See `Worker.loader`."""
    passes = _Passes(batch_size, epochs, steps, shuffle, batches_per_step)
    if _dynamic(shards, adaptive_batch):
        sharing = {**passes._asdict(), "adaptive_batch": adaptive_batch, "name": name}
        return leased.load_leased(worker, dataset, dataloader_options, prefetch, **sharing)
    if name is not None:
        raise ValueError('name is that of a leased loader: it needs shards="dynamic"')
    return _load_static(worker, dataset, passes, resume, prefetch, dataloader_options)


class _Passes(NamedTuple):
    """How a loader goes through its dataset, as `load` was told."""

    batch_size: int
    epochs: int
    steps: int | None
    shuffle: bool
    batches_per_step: int | None


def _load_static(
    worker: Worker,
    dataset: Dataset[Any],
    passes: _Passes,
    resume: bool,
    prefetch: KeysOf | None,
    dataloader_options: dict[str, Any],
) -> Loader:
    """Batches of a part of its own, as many on every rank."""
    batch_size, epochs, steps, shuffle, batches_per_step = passes
    check_counts(batch_size, epochs, steps, batches_per_step)
    check_options(dataloader_options)
    size = size_of(dataset)
    if size < worker.workers * batch_size:
        raise ValueError(
            f"the dataset has {size} samples, {worker.workers} workers with batch_size "
            f"{batch_size} need {worker.workers * batch_size} for one step: make batch_size smaller"
        )
    own = RankSampler(size, worker.rank, worker.workers, worker.seed, shuffle, Epochs())
    batches = _Batches(own, batch_size, arrays=by_rows(dataset, dataloader_options))

    length = steps if steps is not None else epochs * len(batches)
    torch_loader = loading(dataset, batches, dataloader_options)
    epochs_done = shared(
        worker.passes, dataset, ("loader", batch_size, epochs, steps, shuffle, resume), Epochs
    )
    return Loader(
        worker, torch_loader, batches, own, length, batches_per_step, resume, epochs_done, prefetch
    )
