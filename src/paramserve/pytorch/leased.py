"""Loader and sampler whose samples the coordinator leases out, a few batches at a time."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from paramserve.config import check_count
from paramserve.messages import LeasePlan
from paramserve.pytorch.batches import (
    KeysOf,
    SeededBatch,
    ahead,
    by_rows,
    check_counts,
    check_range,
    loading,
    loop,
    loop_progress,
    make_once,
    order,
    size_of,
)
from paramserve.training.leases import AS_WORKER_SAYS, DrawnBatch, LeasedWork

if TYPE_CHECKING:
    from paramserve.training.host import Host

ORDERS_KEPT = 2
"""Epochs whose order is kept: leases of two may be under way at once."""


class _Order:
    """Indices of the samples behind positions."""

    def __init__(self, plan: LeasePlan) -> None:
        self._size = plan.size
        self._seed = plan.order
        self._orders: dict[int, npt.NDArray[np.int64]] = {}

    def indices(self, batch: DrawnBatch) -> npt.NDArray[np.int64]:
        """[drawn.stop - drawn.start]."""
        if self._seed < 0:
            return np.arange(batch.start, batch.stop, dtype=np.int64)
        if batch.epoch not in self._orders:
            if len(self._orders) >= ORDERS_KEPT:
                del self._orders[next(iter(self._orders))]
            self._orders[batch.epoch] = order(self._size, self._seed, batch.epoch)
        return self._orders[batch.epoch][batch.start : batch.stop]


class _Drawing(Sampler[Any]):
    """The batches that are there at this moment, for a loop that waits by itself."""

    def __init__(self, work: LeasedWork, seed: int, *, arrays: bool) -> None:
        self._work = work
        self._seed = seed
        self._order = _Order(work.plan)
        self._arrays = arrays

    def __iter__(self) -> Iterator[Any]:
        while (batch := self._work.draw()) is not None:
            indices = self._order.indices(batch)
            if self._arrays:
                yield np.ascontiguousarray(indices)
            else:
                yield SeededBatch(indices.tolist(), (self._seed, batch.epoch, batch.start))


class LeasedLoader:
    """One rank's batches of a dataset that all ranks share by lease.

    How many there are, and which, is known when all is done: a worker gets what it has the time
    for. Iterating again goes on with the epochs that follow, or with what a loop that was broken
    off has left.

    Args:
        prefetch: which rows of tables a batch needs; see `batches.ahead`.
    """

    def __init__(
        self, work: LeasedWork, batches: DataLoader[Any], worker: Host, prefetch: KeysOf | None
    ) -> None:
        self._work = work
        self._batches = batches
        self._worker = worker
        self._prefetch = prefetch

    def __len__(self) -> int:
        """An estimate of this rank's batches of one iteration: equal shares of batches of
        `batch_size`. How many come is known at the end."""
        return self._work.batches_expected

    def epochs(self, epochs: int, *, start: int = 0) -> Iterator[int]:
        """`range(start, epochs)` without the epochs that are done; see `Loader.epochs`.

        A worker that was started again, or added, begins at the first epoch that has samples left.
        In an epoch the other ranks may be faster, so that this one gets no batch of it.

        Raises:
            TypeError, ValueError: a number is not an int of at least 0.
        """
        check_range(epochs, start)
        return self._epochs_left(epochs, start)

    def _epochs_left(self, epochs: int, start: int) -> Iterator[int]:
        worker = self._worker
        done = 0
        if worker.incarnation > 1 or worker.client.connection.added_late:
            done = self._work.leave_out(max(epochs - start, 0))
            worker.course.steps_left = 0
        return loop(worker, start, done, epochs)

    def __iter__(self) -> Iterator[Any]:
        work = self._work
        if torch.is_grad_enabled():
            self._worker.loop_with_gradients()
        work.begin()
        # By equal shares: how many batches this rank gets is known at the end.
        loop, number = loop_progress(self._worker), 0
        try:
            while True:
                with closing(self._present_batches()) as batches:
                    for batch in batches:
                        work.delivered()
                        loop.take_batch(number, work.batches_expected)
                        number += 1
                        yield batch
                        if work.retiring:
                            work.settle()
                            return
                if torch.is_grad_enabled() and self._worker.trains_alone:
                    self._worker.notices.warn_of_training_alone()
                if not work.more():
                    return
        finally:
            work.close()

    def _present_batches(self) -> Generator[Any, None, None]:
        """The batches that are there at this moment; rows are asked for ahead."""
        if self._prefetch is None:
            yield from self._batches
        else:
            client = self._worker.client
            yield from ahead(self._batches, client, self._prefetch, lambda batch: batch)


class LeasedSampler(Sampler[list[int]]):
    """Batches of indices that the coordinator leases to this rank, for a `DataLoader` of your own.

    Give it as `batch_sampler`. Each step of the worker's client takes the next `batches_per_step`
    batches: step once with them, in order. With `ps.LocalSteps` and `ps.ElasticAverage` that is an
    exchange, and each own step has one batch. Iterating again goes on with the epochs that follow.

    A `DataLoader` with `num_workers` draws batches before they are stepped with. Its loop ends when
    nothing is left to draw, while others may still give something back: iterate over
    `until_done(loader)` to take part in that as well.
    """

    def __init__(self, work: LeasedWork) -> None:
        self._work = work
        self._order = _Order(work.plan)

    def __len__(self) -> int:
        """An estimate, as of a leased loader: this rank's batches of one iteration."""
        return self._work.batches_expected

    def __iter__(self) -> Iterator[list[int]]:
        work = self._work
        work.begin()
        try:
            while True:
                batch = work.draw()
                if batch is not None:
                    yield self._order.indices(batch).tolist()
                elif work.unfinished:
                    work.pause()
                    return
                elif not work.more():
                    break
        except GeneratorExit:
            work.close()
            raise
        work.close()

    def until_done(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Batches of a loader over this sampler, until all samples are in the values.

        Args:
            loader: made with `batch_sampler=` this sampler.
        """
        while True:
            yield from loader
            if not self._work.more():
                return


def lease(
    worker: Host,
    dataset: Dataset[Any],
    *,
    batch_size: int,
    epochs: int = 1,
    steps: int | None = None,
    shuffle: bool = True,
    batches_per_step: int | None = None,
    adaptive_batch: tuple[int, int] | None = None,
    name: str | None = None,
    reports_delivery: bool,
) -> LeasedWork:
    """A worker's part in a dataset that is shared by lease; arguments as `load_leased`.

    One with the same arguments as before goes on where that one is.

    Args:
        reports_delivery: whether it will be said which batches were delivered.
    """
    check_counts(batch_size, epochs, steps, batches_per_step)
    size = size_of(dataset)
    if size < batch_size:
        raise ValueError(
            f"the dataset has {size} samples, less than one batch of {batch_size}: make "
            "batch_size smaller"
        )
    low, high = _bounds(adaptive_batch, batch_size)
    if name == "" or not isinstance(name, str | None):
        raise TypeError(f"a loader's name is a str that is not empty, not {name!r}")
    order = worker.seed if shuffle else -1
    several = batches_per_step if batches_per_step is not None else AS_WORKER_SAYS
    plan = LeasePlan(size, epochs, steps or 0, batch_size, low, high, several, order)
    arguments = ("leased", plan, name, reports_delivery)

    def make() -> LeasedWork:
        named = name or worker.leases.next_name()
        course, leases = worker.course, worker.leases
        return LeasedWork(
            leases,
            named,
            plan,
            reports_delivery=reports_delivery,
            has_others=lambda: course.has_static,
        )

    work = make_once(worker.passes, dataset, arguments, make)
    return work if not work.active else make()


def _bounds(adaptive_batch: Any, batch_size: int) -> tuple[int, int]:
    if adaptive_batch is None:
        return batch_size, batch_size
    try:
        low, high = adaptive_batch
    except (TypeError, ValueError):
        raise TypeError(
            f"adaptive_batch is a pair (smallest, largest batch), not {adaptive_batch!r}"
        ) from None
    check_count("adaptive_batch's smallest batch", low)
    check_count("adaptive_batch's largest batch", high)
    if not low <= batch_size <= high:
        raise ValueError(
            f"adaptive_batch=({low}, {high}) must hold batch_size={batch_size}, which is the mean "
            "over the workers"
        )
    return low, high


def load_leased(
    worker: Host,
    dataset: Dataset[Any],
    dataloader_options: dict[str, Any],
    prefetch: KeysOf | None,
    **sharing: Any,
) -> LeasedLoader:
    """`worker.loader` with `shards="dynamic"`; arguments and errors as `load` and `lease`."""
    if not dataloader_options.get("in_order", True):
        raise ValueError('shards="dynamic" needs its batches in order: leave in_order at True')
    work = lease(worker, dataset, reports_delivery=True, **sharing)
    batches = _Drawing(work, worker.seed, arrays=by_rows(dataset, dataloader_options))
    torch_loader = loading(dataset, batches, dataloader_options)
    return LeasedLoader(work, torch_loader, worker, prefetch)
