"""What loaders and samplers that are made again have in common: one made with the same dataset and
arguments goes on with the epochs that follow, as if the first one were iterated again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch.utils.data import TensorDataset

T = TypeVar("T")
KEPT_MAX = 4
"""Datasets of a worker that are kept in memory because nothing can refer to them weakly (a list,
slots); the one whose loader was made longest ago goes first. The others go when the training
function has let go of them."""

Kept = dict[tuple[int, ...], tuple[tuple[Any, ...], dict[Hashable, Any]]]
"""By the identity of a dataset: what it is known by (weak references, which drop the entry, or the
object), and what its loaders have in common, by their arguments."""


class Epochs:
    """The number of the next epoch."""

    def __init__(self) -> None:
        self.next = 0


def shared(kept: Kept, dataset: Any, arguments: Hashable, make: Callable[[], T]) -> T:
    """What loaders of this dataset with these arguments have in common.

    Args:
        kept: of the worker.
        dataset: the same object as before; of a `TensorDataset`, with the same tensors.
        make: called for the first one; what it gives must not hold the dataset.
    """
    known_by = (*dataset.tensors,) if type(dataset) is TensorDataset else (dataset,)
    key = tuple(id(each) for each in known_by)
    found = kept.pop(key, None)
    kept[key] = found = found if found is not None else (_anchors(kept, key, known_by), {})
    # A collection at any moment may drop entries: over a copy of the keys.
    strong = [each for each in [*kept] if not _weak(kept.get(each, ((), {}))[0])]
    if len(strong) > KEPT_MAX:
        del kept[strong[0]]
    by_arguments = found[1]
    if arguments not in by_arguments:
        by_arguments[arguments] = make()
    result: T = by_arguments[arguments]
    return result


def _anchors(kept: Kept, key: tuple[int, ...], known_by: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the entry holds of these objects, so that it goes before an identity is used again."""

    def drop(_: object) -> None:
        kept.pop(key, None)

    try:
        return tuple(weakref.ref(each, drop) for each in known_by)
    except TypeError:
        return known_by


def _weak(anchors: tuple[Any, ...]) -> bool:
    return all(isinstance(each, weakref.ref) for each in anchors)
