"""Each worker's part of a dataset: one common order, disjoint parts.

Static parts have equally many batches, and are made here; so are loaders over a part that is the
rank's own already, which have as many batches as the smallest part. Dynamic ones are made by
`leased.py`, from ranges of each epoch that are leased to the workers as they ask for them. There
every sample comes once in each epoch, the last batch may be smaller, and what a worker that ended
had not finished goes to another: in Sync exactly that, in Async with what some servers have had
already; `LeaseReport.repeated` counts it. A loop ends when all ranks have finished. Every batch
must be stepped with, or the loop left. The coordinator knows what a worker that was started again
has done.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator
from contextlib import closing
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from paramserve.pytorch import leased
from paramserve.pytorch.batches import (
    KeysOf,
    SeededBatch,
    ahead,
    by_rows,
    check_counts,
    check_options,
    check_range,
    loading,
    loop,
    loop_progress,
    make_once,
    order,
    size_of,
    unknown_argument,
)
from paramserve.training.company import all_have_stopped
from paramserve.training.course import Epochs, Shape
from paramserve.training.irregular import Extent

if TYPE_CHECKING:
    from paramserve.training.host import Host

T = TypeVar("T")
STATIC, DYNAMIC, OWN = "static", "dynamic", "own"
_LEASING = [*inspect.signature(leased.lease).parameters][2:-1]
"""Arguments of a leased loader or sampler: of its own, as `lease` has them."""


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
        self.size = size
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
        return order(self.size, self._seed, self._epoch)[self._rank : stop : self._workers]

    @property
    def entropy(self) -> tuple[int, int]:
        """Entropy of the present epoch."""
        return self._seed, self._epoch

    def __iter__(self) -> Iterator[int]:
        self._epoch = self._epochs.next
        self._epochs.next += 1
        return iter(self.indices().tolist())

    def __len__(self) -> int:
        return self.size // self._workers


class _Batches(Sampler[Any]):
    """The first `count` whole batches of a sampler, as lists of indices or, with `arrays`, as
    arrays.

    Args:
        rank: of the worker, whose processes draw other random numbers than those of others.
    """

    def __init__(
        self, sampler: RankSampler, batch_size: int, count: int, rank: int, *, arrays: bool
    ) -> None:
        self._sampler = sampler
        self._rank = rank
        self.batch_size = batch_size
        self._count = count
        self._arrays = arrays
        self.first = 0
        """Batch at which the next pass begins."""

    def __iter__(self) -> Iterator[Any]:
        first = self.first  # torch makes two iterators where it has processes, and uses one
        rows = self._sampler.indices()[first * self.batch_size : len(self) * self.batch_size]
        batches = np.ascontiguousarray(rows).reshape(-1, self.batch_size)
        if self._arrays:
            return iter(batches)
        entropy = self._sampler.entropy
        return (
            SeededBatch(each, (*entropy, self._rank, number))
            for number, each in enumerate(batches.tolist(), first)
        )

    def __len__(self) -> int:
        return self._count


class _OwnParts(Epochs):
    """What loaders over one rank's own part have in common.

    Args:
        batches: of an epoch, on each rank.
    """

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.batches = batches


class Loader:
    """One rank's batches over the epochs of a run: what `worker.loader` gives.

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
        worker: Host,
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

    def epochs(self, epochs: int, *, start: int = 0) -> Iterator[int]:
        """`range(start, epochs)` without the epochs that are done, for a loop over epochs.

        In each round iterate over this loader once:

            for epoch in loader.epochs(10):
                for inputs, labels in loader:
                    ...

        A worker that was started again begins at the first epoch of which a step is left to do, so
        that what follows each epoch, as an evaluation or `torch.save`, is not repeated with the
        values of today. An epoch whose last step is done counts as done: what follows it is not
        made up for. Schedulers that are stepped once for each epoch are where they would be. Where
        the run wants the worker to end, the loop does.

        Args:
            epochs: end of the range.
            start: first epoch of this run, as where it goes on from a file.
        Raises:
            TypeError, ValueError: a number is not an int of at least 0.
        """
        check_range(epochs, start)
        return self._epochs_left(epochs, start)

    def _epochs_left(self, epochs: int, start: int) -> Iterator[int]:
        worker, course, done = self._worker, self._worker.course, 0
        if self._resume:
            course.check(self._shape)
            before, most = course.steps_left, max(epochs - start, 0)
            done, steps, epochs_begun = course.whole_passes(self._epochs, self._extent, most)
            if done and before == steps and not worker.returned_before:
                resumed, remaining = worker.client.steps.resumed, epochs - start - done
                clocks = {
                    each: resumed[each] for each in worker.optimizers.groups if resumed.get(each)
                }
                epoch = course.epoch_behind(done)
                if remaining and all_have_stopped(worker.client, clocks, epoch):
                    worker.notices.report_that_others_have_stopped(start + done - 1)
                    return loop(worker, start, done, start + done)
                worker.notices.report_behind_epoch(start + done - 1)
            course.leave_out(self._epochs, done, steps)
            self._epochs.next += epochs_begun
        return loop(worker, start, done, epochs)

    @property
    def _extent(self) -> Extent:
        return Extent(self._length, self._per_step, -(-self._length // len(self._batches)))

    def __iter__(self) -> Iterator[Any]:
        # A pass begins with the first batch that is asked for, not in `iter(loader)`: a collective
        # between the two comes before the pass, also in a rank that goes on within the pass. Its
        # place would lie behind the steps that this pass leaves out.
        worker, trains = self._worker, torch.is_grad_enabled()
        course = worker.course
        if (
            worker.leases.present is not None
        ):  # steps are no longer with the batches of a leased loader
            worker.leases.present = None
            course.forget_missed()
        if trains:
            worker.loop_with_gradients()
            if self._resume:
                course.check(self._shape)
                course.remember(self._shape)
            else:
                worker.client.steps.clock_read = True  # its user has said that it begins anew
        present = course.begin(self._epochs, self._extent, resume=self._resume, trains=trains)
        if present.start >= present.end:
            present.close(present.epochs)
            self._epochs.next += present.epochs
            return
        epochs, first = divmod(present.start, len(self._batches))
        first_epoch = self._epochs.next
        self._epochs.next += epochs
        if self._epochs.ended:
            self._tell_if_alone()
        epoch_now = self._epochs.next
        loop = loop_progress(worker)
        try:
            with closing(self._loaded(first, present.end - present.start)) as loaded:
                for number, (epoch, batch) in enumerate(loaded, present.start):
                    loop.take_batch(number, self._length)
                    if epoch != epoch_now:
                        epoch_now = epoch
                        self._tell_if_alone()
                    self._epochs.next = epoch + 1
                    takes = present.takes(number)
                    if worker.retiring:
                        return
                    if takes:
                        yield batch
        finally:
            present.close(self._epochs.next - first_epoch)
        loop.take_batch(1, 1)
        self._epochs.ended = self._epochs.ended or torch.is_grad_enabled()

    def _tell_if_alone(self) -> None:
        """An epoch was gone through and the next one begins: say where no server knows of it."""
        if torch.is_grad_enabled() and self._worker.trains_alone:
            self._worker.notices.warn_of_training_alone()

    def _loaded(self, first: int, count: int) -> Generator[tuple[int, Any], None, None]:
        """Yield the batches that are left, each with its epoch; rows are asked for ahead."""
        batches = self._in_order(first, count)
        if self._prefetch is None:
            return batches
        return ahead(batches, self._worker.client, self._prefetch, itemgetter(1))

    def _in_order(self, first: int, count: int) -> Generator[tuple[int, Any], None, None]:
        """Yield so many batches over as many epochs, each with its epoch, the random numbers as in
        an unbroken run."""
        epoch = self._epochs.next
        while count:
            self._sampler.set_epoch(epoch)
            in_middle, self._batches.first, first = first > 0, first, 0
            if self._resume and not in_middle:
                self._worker.go_on_drawing()
            batches = iter(self._loading)  # draws a number, which a pass in its middle has drawn
            if self._resume and in_middle:
                self._worker.go_on_drawing()
            for batch in batches:
                yield epoch, batch
                count -= 1
                if not count:
                    return
            epoch += 1

    @property
    def _shape(self) -> Shape:
        batches, sampler = self._batches, self._sampler
        return Shape(sampler.size, batches.batch_size, self._per_step)

    @property
    def _per_step(self) -> int:
        per_step = self._batches_per_step
        return per_step if per_step is not None else self._worker.optimizers.batches_per_step


def sampler(
    worker: Host,
    dataset: Dataset[Any],
    *,
    shuffle: bool = True,
    shards: str = STATIC,
    **sharing: Any,
) -> RankSampler | leased.LeasedSampler:
    """See `Worker.sampler`."""
    for argument in sharing:
        if argument not in _LEASING:
            raise unknown_argument("sampler", argument, ["dataset", "shuffle", "shards", *_LEASING])
    if shards == OWN:
        raise ValueError(
            'shards="own" is for worker.loader: a DataLoader over a part that is the rank\'s own '
            "needs no sampler of the worker"
        )
    if _dynamic(shards, None):
        if "batch_size" not in sharing:
            raise TypeError('with shards="dynamic" the sampler makes the batches: give batch_size')
        work = leased.lease(worker, dataset, shuffle=shuffle, reports_delivery=False, **sharing)
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
    arguments = ("sampler", shuffle)
    epochs = make_once(worker.passes, dataset, arguments, lambda: _checked(worker, arguments, size))
    return RankSampler(size, worker.rank, worker.workers, worker.seed, shuffle, epochs)


def _dynamic(shards: str | None, adaptive_batch: object) -> bool:
    """Whether samples are shared by lease."""
    if shards not in (None, STATIC, DYNAMIC, OWN):
        raise ValueError(f'shards is "static", "dynamic" or "own", not {shards!r}')
    if shards in (STATIC, OWN) and adaptive_batch is not None:
        raise ValueError(
            f'adaptive_batch needs shards="dynamic": with "{shards}" all ranks have equal batches'
        )
    return shards == DYNAMIC or adaptive_batch is not None


def load(
    worker: Host,
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
    if dataloader_options:
        check_options(dataloader_options, [*inspect.signature(load).parameters][1:-1])
    if _dynamic(shards, adaptive_batch):
        return leased.load_leased(
            worker,
            dataset,
            dataloader_options,
            prefetch,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            shuffle=shuffle,
            batches_per_step=batches_per_step,
            adaptive_batch=adaptive_batch,
            name=name,
        )
    if name is not None:
        raise ValueError('name is that of a leased loader: it needs shards="dynamic"')
    check_counts(batch_size, epochs, steps, batches_per_step)
    arguments = ("loader", batch_size, epochs, steps, shuffle, resume, shards == OWN)
    size, seed = size_of(dataset), worker.seed
    done: Epochs
    if shards == OWN:
        make_own = partial(_agree, worker, size // batch_size)
        done = own = make_once(worker.passes, dataset, arguments, make_own)
        sampler, count = RankSampler(size, 0, 1, seed, shuffle, Epochs()), own.batches
        _check_own(worker, size, batch_size, count)
    else:
        _check_size(worker, size, batch_size)
        if resume:
            _check_shares(worker)
        make = partial(_checked, worker, arguments, size)
        done = make_once(worker.passes, dataset, arguments, make)
        sampler = RankSampler(size, worker.rank, worker.workers, seed, shuffle, Epochs())
        count = len(sampler) // batch_size
    batches = _Batches(
        sampler, batch_size, count, worker.rank, arrays=by_rows(dataset, dataloader_options)
    )
    length = steps if steps is not None else epochs * count
    torch_loader = loading(dataset, batches, dataloader_options)
    return Loader(
        worker, torch_loader, batches, sampler, length, batches_per_step, resume, done, prefetch
    )


def _checked(worker: Host, arguments: tuple[object, ...], size: int) -> Epochs:
    """What loaders of one dataset have in common, once it is compared with the other ranks'."""
    worker.compare_size(arguments, size)
    return Epochs()


def _agree(worker: Host, batches: int) -> _OwnParts:
    """Agree on the batches of the rank whose part is the smallest; all ranks call this."""
    return _OwnParts(worker.agree_on_batches(batches))


def _check_size(worker: Host, size: int, batch_size: int) -> None:
    needed = worker.workers * batch_size
    if size < needed:
        raise ValueError(
            f"the dataset has {size} samples, {worker.workers} workers with batch_size "
            f"{batch_size} need {needed} for one step: make batch_size smaller"
        )


def _check_shares(worker: Host) -> None:
    """Refuse a loader that would leave out what other shares had taken."""
    before, now = worker.client.connection.before, worker.workers
    if before not in (0, now):
        raise ValueError(
            f"the run goes on from a checkpoint of {before} workers with {now}: equal shares of "
            "what is left cannot be told from the clocks. Applied: no. To fix: go on with "
            f'{before} workers; only a loader that had shards="dynamic" then goes on with another '
            "number; one with resume=False begins its epochs anew"
        )


def _check_own(worker: Host, size: int, batch_size: int, count: int) -> None:
    """Refuse a part that has no batch, on every rank, and one of a rank that was added which has
    fewer than the others agreed on."""
    here = f"rank {worker.rank} has {size} samples: {size // batch_size} batches of {batch_size}"
    if not count:
        raise ValueError(
            f'shards="own": the smallest part of all ranks has less than one batch; {here}. Make '
            "batch_size smaller, or the parts more equal"
        )
    if size // batch_size < count:
        raise ValueError(
            f'shards="own": the ranks have agreed on {count} batches of an epoch, and {here}. Give '
            "a rank that was added or started again as many samples as the others have"
        )
