"""The memory that requests of a client speak of, and the arrays on it that are used again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paramserve.messages import Run

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

VIEWS_MAX = 4096
"""Arrays that are kept for one client. A step has two for each block and slot."""


def aligned(size: int) -> Bytes:
    """New memory [size] of any content, at an address that is a multiple of 8."""
    return np.empty(-(-size // 8), np.uint64).view(np.uint8)[:size]


class Placed(Protocol):
    """What has a part in a request's memory."""

    mark: object
    """Stands for all that `view_at` depends on but its arguments."""

    def view_at(self, whole: Bytes | None, arena: int, offset: int) -> Array:
        """The part as an array, if it lies in these bytes.

        Raises:
            ShapeMismatch: it does not. Nothing was applied.
        """
        ...


class Memory:
    """The memory of a client, by arena number.

    A client pushes from and pulls to a few places of its arenas, step after step: what lies there
    is checked once, and the array is kept.

    Args:
        arenas: by number from 1. One of them may be replaced by another.
        mirrored: whether they are a mirror: what is written there has to be sent to the client.
    """

    __slots__ = ("_views", "arenas", "mirrored")

    def __init__(self, arenas: Mapping[int, Bytes], *, mirrored: bool) -> None:
        self.arenas, self.mirrored = arenas, mirrored
        self._views: dict[tuple[int, int, object], tuple[Bytes, Array]] = {}

    def get(self, arena: int) -> Bytes | None:
        """The bytes of an arena, if there is one of this number."""
        return self.arenas.get(arena)

    def at(self, arena: int, offset: int, placed: Placed) -> Array:
        """What lies there; raises as `Placed.view_at`."""
        place = arena, offset, placed.mark
        if place in self._views:
            whole, view = self._views[place]
            if arena in self.arenas and self.arenas[arena] is whole:
                return view
        view = placed.view_at(self.arenas.get(arena), arena, offset)
        if arena in self.arenas:  # an empty part lies anywhere
            if len(self._views) >= VIEWS_MAX:
                self._views.clear()
            self._views[place] = self.arenas[arena], view
        return view

    def has(self, run: Run) -> bool:
        """Whether these bytes lie in an arena."""
        arena, start, nbytes = run
        return arena in self.arenas and start + nbytes <= self.arenas[arena].size

    def forget(self) -> None:
        """Keep no array, nor with it the arena that another one has replaced."""
        self._views.clear()
