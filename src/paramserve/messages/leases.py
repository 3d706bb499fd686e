"""Worker and coordinator: who takes which samples of a loader."""

from __future__ import annotations

from msgspec import Struct


class LeasePlan(Struct, frozen=True, array_like=True):
    """How a loader's samples are shared by lease: the same on all ranks.

    `size`: samples of the dataset. A turn, which is one iteration over the loader, takes `epochs`
    passes over them or, if `steps` is not 0, `steps` x `batch` x workers samples. `batch`: samples
    of a batch of one rank, in the mean, and `low` and `high` what it may be by speed.
    `batches_per_step`: of one rank. `order`: seed of the common order; -1: as they lie.
    """

    size: int
    epochs: int
    steps: int
    batch: int
    low: int
    high: int
    batches_per_step: int
    order: int


class Lease(Struct, frozen=True, array_like=True, tag="lease"):
    """A worker asks for samples, and waits up to `wait_s` while others may still give some back.

    `turn` counts the iterations over the loader. `seen`: number of the last lease that this worker
    knows of; of a later one the reply was lost. `speed`: samples per second of its own compute;
    0: unknown. `idle`: it has nothing left to do and no step outstanding; `taken` (lease, samples)
    then is the mark of its last step: all up to there is in the values. `known`: only if the
    checkpoint has this loader that the cluster goes on from.
    """

    call: int
    loader: str
    plan: LeasePlan
    turn: int
    seen: int
    wait_s: float
    speed: float = 0.0
    idle: bool = False
    taken: tuple[int, int] | None = None
    known: bool = False


class Leased(Struct, frozen=True, array_like=True, tag="leased"):
    """The positions [start, stop) of an epoch's common order, in batches of `batch` samples.

    `lease` 0: none. Then `over` says that there will be none in this turn; else ask again, and
    `holders` has (rank, samples) of ranks that are not finished.
    """

    call: int
    lease: int = 0
    epoch: int = 0
    start: int = 0
    stop: int = 0
    batch: int = 0
    over: bool = False
    holders: tuple[tuple[int, int], ...] = ()


class GiveBack(Struct, frozen=True, array_like=True, tag="give-back"):
    """A worker will not take what is beyond `mark` of what was leased to it in a turn, and steps
    with what is up to there before it steps with any later lease."""

    call: int
    loader: str
    turn: int
    mark: tuple[int, int]


class LeaseReport(Struct, frozen=True, array_like=True):
    """How one loader's samples were shared."""

    loader: str
    ranks: tuple[tuple[int, int, int], ...]
    """(rank, samples given to it, samples of these that are in the values)."""
    repeated: int = 0
    """Samples that some shards have had from a worker that ended, and then from another one."""
    left_over: int = 0
    """Samples at the end of a turn that filled no step."""


class DatasetSize(Struct, frozen=True, array_like=True, tag="dataset-size"):
    """A worker made a loader whose dataset, of `size` samples, is to be the same on all ranks.

    `loader`: what it is known by, the same on all ranks.
    """

    call: int
    loader: str
    size: int


class SameSize(Struct, frozen=True, array_like=True, tag="same-size"):
    """`rank` made this loader first, over `size` samples."""

    call: int
    rank: int
    size: int
