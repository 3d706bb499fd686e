"""What of a model no optimizer of its worker has: buffers, and parameters that are left out.
Parameters that are frozen stay on the workers, see `frozen`.

They live on the servers as values without a rule, in the group `<name>.buffers`, so that a result
is a whole state dict. Rank 0's define them; the others take them at the start and never again.
Buffers, and parameters that change all the same, are assigned by rank 0 every `BUFFERS_EVERY` steps
and at the end, the other parameters at the end. One that another optimizer is given later is its
own from then on (`registry`), and not assigned any more.
Where rank 0 is dead for good, the lowest live rank assigns its own at the end.
With `buffers="mean"` each rank also keeps its own floating point buffers there, in a group of its
own, and a reader of the model takes the mean of what the ranks told last (`launch.reading`).
Where another incarnation may go on for this one, `changing` saves what changes. Buffers that are
too much for that are assigned after each step instead, by rank 0.
A dtype that the servers do not hold travels as a wider one that holds each of its values exactly,
and readers are told it.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from paramserve.core.partition import NARROW
from paramserve.errors import ShapeMismatch, warn_user
from paramserve.messages import VALUE
from paramserve.pytorch.block import split
from paramserve.pytorch.frozen import is_frozen
from paramserve.pytorch.naming import Names, Slot, persistent

if TYPE_CHECKING:
    from paramserve.client import Client
    from paramserve.core.partition import Block
    from paramserve.messages import Link
    from paramserve.pytorch.existing_blocks import ExistingBlocks
    from paramserve.pytorch.registry import Registry

BUFFERS_EVERY = 10
"""Steps of rank 0 between two assignments of the buffers."""

_PLAIN = (torch.float32, torch.float64, torch.int64)
_NARROW = {getattr(torch, name): getattr(torch, wide) for name, wide in NARROW.items()}
_HELD_AS: Mapping[torch.dtype, torch.dtype] = {dtype: dtype for dtype in _PLAIN} | _NARROW


class _Assigned(NamedTuple):
    block: Block
    dtype: torch.dtype
    sources: Sequence[Slot | None]
    """Slot of each piece; None: this model has it not."""
    often: bool

    def present(self) -> list[Slot]:
        return [source for source in self.sources if source is not None]


class Untrained:
    """The tensors of one model that are assigned instead of pushed.

    Args:
        group: name of their group.
        trained: ids of the parameters that the optimizer has; those that another one owns are
            left out as well.
        buffers: False keeps the buffers local.
        own_group: where this rank's own buffers are kept for a mean; empty: there is none.
    Raises:
        TypeError: a tensor's dtype cannot be held. Nothing was sent.
    """

    def __init__(
        self,
        client: Client,
        names: Names,
        registry: Registry,
        group: str,
        *,
        trained: Collection[int],
        buffers: bool,
        own_group: str = "",
    ) -> None:
        self._client = client
        self._names = names
        self._registry = registry
        self._group = group
        self._own_group = own_group
        self._own: list[_Assigned] = []
        self._sources: list[tuple[Slot, Tensor, bool]] = [
            (slot, tensor, False)
            for slot, tensor in names.first(names.parameters)
            if not (id(tensor) in trained or is_frozen(tensor) or self._elsewhere(tensor))
        ]
        if buffers:
            lasting = persistent(names.model)
            self._sources += [
                (slot, tensor, True)
                for slot, tensor in names.first(names.buffers)
                if slot.raw in lasting or slot.name in lasting
            ]
        for source, tensor, _ in self._sources:
            _check(source.name, tensor)
        self._assigned: list[_Assigned] = []
        self._links: Sequence[Link] = ()
        """What the next define tells."""
        self._warned: set[str] = set()

    def _elsewhere(self, tensor: Tensor | None) -> bool:
        """Whether an optimizer's group has the value."""
        owner = self._registry.owner(tensor) if tensor is not None else None
        return owner is not None and owner.group != self._group

    def __bool__(self) -> bool:
        return bool(self._assigned)

    def start(
        self,
        existing: ExistingBlocks,
        *,
        define: bool,
        take: Container[str],
        links: Sequence[Link] = (),
    ) -> None:
        """Define the values (rank 0) or wait for them, and take some. What is there already is
        taken as it is, and after a step of the group that is all: rank 0 has defined by then what
        its model had, and no rank may wait for more.

        Args:
            existing: what the servers have.
            take: the names of those that are taken.
            links: told with the first define.
        """
        self._links = links
        there = existing.of(self._group)
        for nth, block in enumerate(there):
            self._take_up(block, nth)
        names = self._names_held()
        complete = existing.stepped and (there or not define)
        rest = [
            (slot, is_buffer)
            for slot, _, is_buffer in self._sources
            if not (complete or slot.name in names)
            and not (there and self._registry.is_replaced(slot))
        ]
        for often in (False, True):
            slots = [slot for slot, is_buffer in rest if is_buffer == often]
            for sources, dtype in _by_dtype(slots):
                nth = max(len(there), len(self._assigned))
                if define:
                    block = self._define(sources, dtype, nth)
                else:
                    shapes = {each.name: tuple(each.tensor().shape) for each in sources}
                    block = self._await(shapes, dtype, nth)
                self._assigned.append(_Assigned(block, dtype, sources, often))
        if self._assigned and take:
            self._take(take)

    def _names_held(self) -> set[str]:
        return {source.name for entry in self._assigned for source in entry.present()}

    def _take_up(self, block: Block, nth: int) -> None:
        """Wait for a block that the servers have already, and assign it from now on, if this model
        has any of it.

        Args:
            nth: place of the block in its group.
        Raises:
            DefineMismatch: this model has a tensor of it with another shape or dtype.
        """
        slots = self._names.parameters | self._names.buffers
        candidates = (slots.get(each.name) for each in block.pieces)
        sources = [
            each if each is not None and each.value() is not None else None for each in candidates
        ]
        present = [source for source in sources if source is not None]
        shapes = {each.name: each.shape for each in block.pieces}
        for source in present:
            _check(source.name, source.tensor())
            shapes[source.name] = tuple(source.tensor().shape)
        for slots_of, dtype in _by_dtype(present):
            often = slots_of[0].name in self._names.buffers
            self._assigned.append(_Assigned(self._await(shapes, dtype, nth), dtype, sources, often))

    def keep(self, slots: Sequence[Slot]) -> None:
        """Keep frozen parameters that turned out to change. Rank 0 calls it."""
        names = self._names_held()
        new = [each for each in slots if each.name not in names and _is_held(each.present())]
        for sources, dtype in _by_dtype(new):
            block = self._define(sources, dtype, -1)
            self._assigned.append(_Assigned(block, dtype, sources, False))

    def tell_own(self, *, last: bool) -> None:
        """Overwrite what the servers have of this rank's own floating point buffers, if its values
        count for a mean; the first call defines them.

        Args:
            last: of this rank; as for `assign`.
        """
        if self._own_group and not self._own:
            for entry in self._assigned:
                if entry.often and entry.dtype.is_floating_point:
                    values = _values(entry.present(), entry.dtype)
                    block = self._client.define(values, rule=None, group=self._own_group)
                    self._own.append(entry._replace(block=block, sources=entry.present()))
        for entry in self._own:
            self._assign(entry, last=last)

    def _define(self, sources: Sequence[Slot], dtype: torch.dtype, nth: int) -> Block:
        values = _values(sources, dtype)
        aliases, links = self._names.aliases(values), self._links
        self._links = ()
        kinds = {each.name: each.tensor().dtype for each in sources}
        return self._client.define(
            values,
            rule=None,
            group=self._group,
            nth=nth,
            aliases=aliases,
            links=links,
            dtypes={name: _name(kind) for name, kind in kinds.items() if kind in _NARROW},
        )

    def _await(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, nth: int) -> Block:
        kind = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
        return self._client.directory.await_block(
            shapes, dtype=kind, rule=None, group=self._group, nth=nth
        )

    def _take(self, names: Container[str]) -> None:
        """Pull the assigned values, and copy those with these names into the model."""
        blocks = [entry.block for entry in self._assigned]
        ticket = self._client.dense.step(self._group, (), pull=blocks, tick=False)
        values = ticket.result().values
        with torch.no_grad():
            for entry in self._assigned:
                shapes = [piece.shape for piece in entry.block.pieces]
                views = split(torch.from_numpy(values[entry.block.id]), shapes)
                for source, view in zip(entry.sources, views, strict=True):
                    if source is None or source.name not in names:
                        continue
                    if not self._elsewhere(source.value()):
                        source.tensor().copy_(view)
        ticket.release()

    def assign(self, *, everything: bool, changing: Container[str] = ()) -> None:
        """Overwrite the servers' values with this worker's: the buffers', or all, at the end.

        What is no longer in the model keeps its last value there; so does at the end what has
        another shape.

        Args:
            changing: names of parameters that are assigned as the buffers.
        Raises:
            ShapeMismatch: a buffer has another shape. Nothing of its block was applied.
        """
        for entry in self._assigned:
            whole = entry.often or everything
            if whole or any(source.name in changing for source in entry.present()):
                self._assign(entry, last=everything, only=None if whole else changing)

    def check_shapes(self) -> None:
        """Raises what `assign` raises, before anything is assigned."""
        for entry in self._assigned:
            for source, piece in zip(entry.sources, entry.block.pieces, strict=True):
                tensor = source.present() if entry.often and source is not None else None
                if source is not None and tensor is not None and tensor.shape != piece.shape:
                    raise _grown(source, tensor, piece.shape)

    def _assign(self, entry: _Assigned, *, last: bool, only: Container[str] | None = None) -> None:
        """Assign the model's values to their block on the servers. What has changed its shape
        raises, or is told at the end of the function."""
        parts, present = [], []
        for index, (source, piece) in enumerate(
            zip(entry.sources, entry.block.pieces, strict=True)
        ):
            tensor = source.present() if source is not None else None
            is_included = source is not None and (only is None or source.name in only)
            if source is None or not is_included or self._elsewhere(source.value()):
                pass
            elif tensor is None:
                self._warn(source, "is no longer in the model")
            elif tuple(tensor.shape) != piece.shape:
                error = _grown(source, tensor, piece.shape)
                if not last:
                    raise error
                self._warn(source, error.failed.partition("' ")[2])
            else:
                present.append(index)
                parts.append(tensor.to("cpu", entry.dtype).flatten())
                continue
            parts.append(torch.zeros(prod(piece.shape), dtype=entry.dtype, device="cpu"))
        active = None if len(present) == len(parts) else tuple(present)
        if present:
            self._client.dense.store(entry.block, VALUE, torch.cat(parts).numpy(), active=active)

    def _warn(self, source: Slot, why: str) -> None:
        if source.name not in self._warned:
            self._warned.add(source.name)
            warn_user(f"buffer {source.name!r} {why}: the result keeps its last value from before")


def _values(sources: Sequence[Slot], dtype: torch.dtype) -> dict[str, Any]:
    return {s.name: s.tensor().to("cpu", dtype).contiguous().numpy() for s in sources}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _by_dtype(slots: Iterable[Slot]) -> Iterator[tuple[list[Slot], torch.dtype]]:
    """Slots by the dtype in which the servers hold their values."""
    remaining = list(slots)
    for dtype in dict.fromkeys(_HELD_AS.values()):
        if sources := [each for each in remaining if _HELD_AS[each.tensor().dtype] == dtype]:
            yield sources, dtype


def _is_held(tensor: Tensor | None) -> bool:
    """Whether the servers can hold its values."""
    if tensor is None or tensor.is_meta or tensor.layout is not torch.strided:
        return False
    return tensor.dtype in _HELD_AS


def _grown(source: Slot, tensor: Tensor, shape: tuple[int, ...]) -> ShapeMismatch:
    return ShapeMismatch(
        f"buffer {source.name!r} has shape {list(tensor.shape)} now, and {list(shape)} when "
        "defined",
        fix='use worker.optimizer(..., buffers="local"), or register the buffer with '
        "persistent=False",
    )


def _check(name: str, tensor: Tensor) -> None:
    if torch.nn.parameter.is_lazy(tensor):
        raise TypeError(
            f"{name!r} has no shape yet: run the lazy model on one batch before worker.optimizer"
        )
    if not _is_held(tensor):
        raise TypeError(
            f"{name!r} ({tensor.dtype}, {tensor.layout}, {tensor.device}) cannot be held by the "
            "servers. If it is a buffer, register it with persistent=False or use "
            'buffers="local"; else keep it out of the model'
        )
