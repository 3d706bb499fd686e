"""What the servers have of one optimizer, for a rank that comes late.

A rank that was started again, or added, or that goes on from a checkpoint, may adopt an optimizer
with other parameters frozen than the ranks before it had then. What these have defined decides:
it takes the group's blocks as they are, and defines, or waits for, only what none of them has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paramserve.pytorch.block import Layout, split

if TYPE_CHECKING:
    from paramserve.client import Client
    from paramserve.core.partition import Block


class ExistingBlocks:
    """The blocks of one optimizer's groups that are on the servers.

    Args:
        group: the optimizer's.
        late: False: this rank was there from the beginning, and nothing is looked up for it.
        again: an older incarnation of this rank may have adopted the optimizer.
    Attributes:
        count: blocks that the group has by now.
    """

    def __init__(self, client: Client, group: str, *, late: bool, again: bool) -> None:
        self._client = client
        self._group = group
        self._stepped = {group}
        self._late = late
        self.again = again
        self._all: Sequence[Block] = ()
        self._trained: dict[int, Block] = {}
        self._ids: set[int] = set()

    @property
    def stepped(self) -> bool:
        """Whether a step of the optimizer was made: all that its adoption defines is there."""
        resumed = self._client.steps.resumed
        return self._late and any(resumed.get(group, 0) for group in self._stepped)

    @property
    def untouched(self) -> bool:
        """Whether no rank had made a step of the group when this one joined: what its older
        incarnation has written, or not any more, can be written again."""
        reports = (each for beat in self._client.connection.resume_reports for each in beat.groups)
        mine = [each for each in reports if each.name == self._group]
        return not any(clock for each in mine for _, clock in (*each.clocks, *each.left))

    def step_with(self, groups: Iterable[str]) -> None:
        """The optimizer has no group of its own: its steps are those of these tables' groups.

        Else they tell nothing of it: the program may have stepped a table before the adoption.
        """
        self._stepped.update(groups)

    @property
    def count(self) -> int:
        return len(self._ids)

    def look(self) -> None:
        """Learn of what is there now; before the layout of blocks that are to be there."""
        if self._late:
            self._all = self._client.blocks()
            self._trained = {
                each.id: each for each in self.of(self._group) if each.rule is not None
            }
            self._ids |= self._trained.keys()

    def of(self, group: str) -> list[Block]:
        """The blocks of one of its groups, in the order in which they were defined."""
        return sorted((each for each in self._all if each.group_name == group), key=_id)

    def add(self, block: Block) -> None:
        """This rank has one more block of the group."""
        self._ids.add(block.id)

    def has(self, names: Collection[str]) -> bool:
        """Whether a block of tensors with these names was there."""
        return any(_names(each) == tuple(names) for each in self._trained.values())

    def is_first(self, names: Collection[str]) -> bool:
        """Whether such a block is the group's first one, of its adoption: any other one may have
        been defined with the hyper-parameters of a later step."""
        return bool(self._trained) and _names(self._trained[min(self._trained)]) == tuple(names)

    def within(self, names: Collection[str]) -> set[str]:
        """The names of the blocks that have tensors of these names only."""
        blocks = (_names(each) for each in self._trained.values())
        return {name for each in blocks if set(names).issuperset(each) for name in each}

    def arrange(
        self, layouts: Sequence[Layout], cut: Callable[[Layout], Iterable[Layout]]
    ) -> list[Layout]:
        """Parameters as the blocks that are there, and what is left as `cut` has it."""
        blocks, names_there = list[Layout](), set[str]()
        for names in map(_names, self._trained.values()):
            for layout in layouts:
                if set(layout.names).issuperset(names):
                    blocks.append(layout.only(names))
                    names_there.update(names)
        own = (
            part.only([name for name in part.names if name not in names_there])
            for layout in layouts
            for part in cut(layout)
        )
        return [*blocks, *(part for part in own if part.names)]

    def take(self, params: Mapping[str, Tensor]) -> list[str]:
        """Take the values of what the group trains and this rank's optimizer was not given.

        Returns:
            The names.
        """
        names_taken = list[str]()
        for block in self._trained.values():
            names = [name for name in _names(block) if name in params]
            if not names:
                continue
            values = torch.from_numpy(self._client.dense.fetch(block, 0)[0])
            views = split(values, [piece.shape for piece in block.pieces])
            with torch.no_grad():
                for name, view in zip(_names(block), views, strict=True):
                    if name in params and params[name].shape == view.shape:
                        params[name].copy_(view)
            names_taken += names
        return names_taken


def _id(block: Block) -> int:
    return block.id


def _names(block: Block) -> tuple[str, ...]:
    return tuple(piece.name for piece in block.pieces)
