"""What loaders and samplers that are made again have in common: one made with the same dataset and
arguments goes on with the epochs that follow, as if the first one were iterated again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch.utils.data import TensorDataset

T = TypeVar("T")
KEPT_MAX = 64
"""Datasets of a worker that are kept, with what their loaders have in common; the one whose loader
was made longest ago goes first."""

Kept = dict[tuple[int, ...], tuple[tuple[Any, ...], dict[Hashable, Any]]]
"""By the identity of a dataset: what it is known by, which keeps that identity, and what its
loaders have in common, by their arguments."""


class Epochs:
    """The number of the next epoch."""

    def __init__(self) -> None:
        self.next = 0


def shared(kept: Kept, dataset: Any, arguments: Hashable, make: Callable[[], T]) -> T:
    """What loaders of this dataset with these arguments have in common.

    Args:
        kept: of the worker.
        dataset: the same object as before; of a `TensorDataset`, with the same tensors.
        make: called for the first one.
    """
    anchors = (*dataset.tensors,) if type(dataset) is TensorDataset else (dataset,)
    key = tuple(id(each) for each in anchors)
    found = kept.pop(key, (anchors, {}))
    kept[key] = found
    if len(kept) > KEPT_MAX:
        del kept[next(iter(kept))]
    by_arguments = found[1]
    if arguments not in by_arguments:
        by_arguments[arguments] = make()
    result: T = by_arguments[arguments]
    return result
