"""What of a model the optimizer does not train: buffers, and parameters that it was not given.
Parameters that are frozen stay on the workers, see `frozen`.

They live on the servers as values without a rule, in the group `<name>.buffers`, so that a result
is a whole state dict. Rank 0's define them; the others take them at the start and never again.
Buffers are assigned by rank 0 every `BUFFERS_EVERY` steps and at the end, parameters at the end.
Where rank 0 is dead for good, the lowest live rank assigns its own at the end.
With `buffers="mean"` each rank also keeps its own floating point buffers there, in a group of its
own, and a reader of the model takes the mean of what the ranks told last (`launch.reading`).
Where another incarnation may go on for this one, each rank saves those of its buffers that change,
as of each step (`client.saving`), and its next incarnation goes on from them. What is too much to
be saved is assigned after each step instead, by rank 0.
A dtype that the servers do not hold travels as a wider one that holds each of its values exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from paramserve.checkpoint.plain import dump, load
from paramserve.errors import ShapeMismatch, warn_user
from paramserve.messages import VALUE
from paramserve.pytorch.block import aliases_of, split
from paramserve.pytorch.embedding import Rows
from paramserve.pytorch.frozen import is_frozen

if TYPE_CHECKING:
    from paramserve.client import Client
    from paramserve.core.partition import Block

BUFFERS_EVERY = 10
"""Steps of rank 0 between two assignments of the buffers."""

_HELD_AS = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.int64: torch.int64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.bool: torch.int64,
    torch.uint8: torch.int64,
    torch.int8: torch.int64,
    torch.int16: torch.int64,
    torch.int32: torch.int64,
}


class Source(NamedTuple):
    """Where a tensor is found: looked up each time, since `model.to()` replaces buffers."""

    name: str
    owner: torch.nn.Module
    attribute: str

    def tensor(self) -> Tensor:
        found: Tensor = getattr(self.owner, self.attribute)
        return found.detach()

    def present(self) -> Tensor | None:
        """The tensor; None: it is not in the model any more."""
        found = getattr(self.owner, self.attribute, None)
        return found.detach() if isinstance(found, Tensor) else None


class _Kept(NamedTuple):
    block: Block
    dtype: torch.dtype
    sources: list[Source]
    often: bool


class Untrained:
    """The tensors of one model that are assigned instead of pushed.

    Args:
        group: name of their group.
        trained: ids of the parameters that the optimizer has.
        buffers: False keeps the buffers local.
        own_group: where this rank's own buffers are kept for a mean; empty: there is none.
    Raises:
        TypeError: a tensor's dtype cannot be held. Nothing was sent.
    """

    def __init__(
        self,
        client: Client,
        model: torch.nn.Module,
        group: str,
        *,
        trained: Collection[int],
        buffers: bool,
        own_group: str = "",
    ) -> None:
        self._client = client
        self._model = model
        self._group = group
        self._own_group = own_group
        self._own: list[_Kept] = []
        persistent = model.state_dict(keep_vars=True).keys()
        self._chosen: list[tuple[Source, Tensor, bool]] = [
            (_source(model, name), tensor, False)
            for name, tensor in model.named_parameters()
            if not (id(tensor) in trained or is_frozen(tensor) or isinstance(tensor, Rows))
        ]
        if buffers:
            self._chosen += [
                (_source(model, name), tensor, True)
                for name, tensor in model.named_buffers()
                if name in persistent
            ]
        for source, tensor, _ in self._chosen:
            _check(source.name, tensor)
        self._kept: list[_Kept] = []
        self._warned: set[str] = set()
        self._first: dict[str, Tensor] = {}
        """Buffers that have not changed since the start."""

    def __bool__(self) -> bool:
        return bool(self._kept)

    def start(self, *, define: bool, take: bool, again: bool) -> None:
        """Define the values (rank 0) or wait for them; take them (the others, and rank 0 where it
        goes on for an older incarnation).

        Args:
            again: whether this is not the rank's first incarnation.
        """
        for often in (False, True):
            for dtype in dict.fromkeys(_HELD_AS.values()):
                sources = [
                    source
                    for source, tensor, is_buffer in self._chosen
                    if is_buffer == often and _HELD_AS[tensor.dtype] == dtype
                ]
                if sources:
                    self._kept.append(self._begin(sources, dtype, often, define=define))
        if self._kept and take:
            self._take()
        moved = self._go_on() if self._kept and again else set()
        if self._client.connection.restarts and any(kept.often for kept in self._kept):
            found = {source.name: source.tensor() for source in self._often()}
            self._first = {name: each.clone() for name, each in found.items() if name not in moved}
            self._client.saving.ask(self._group, self._changed)

    def _often(self) -> Iterator[Source]:
        for kept in self._kept:
            if kept.often:
                yield from kept.sources

    @property
    def saves(self) -> bool:
        """Whether each step saves the buffers that change."""
        return self._client.saving.asks(self._group)

    def _changed(self) -> bytes:
        """Those that have changed since the rank's first incarnation began, for the next one."""
        found = {each.name: each.present() for each in self._often()}
        for name, first in list(self._first.items()):
            if not _same(first, found[name]):
                del self._first[name]
        changed = {n: t for n, t in found.items() if n not in self._first and t is not None}
        return dump(changed, f"buffers of {self._group}")

    def _go_on(self) -> set[str]:
        """Take what this rank's older incarnation saved; the names of these buffers."""
        packed = self._client.saving.older(self._group)
        saved: dict[str, Tensor] = load(packed) if packed is not None else {}
        known = {each.name: each.tensor() for each in self._often()}
        with torch.no_grad():
            for name, value in saved.items():
                if name in known and known[name].shape == value.shape:
                    known[name].copy_(value)
        return set(saved)

    def tell_own(self, *, last: bool) -> None:
        """Overwrite what the servers have of this rank's own floating point buffers, if its values
        count for a mean; the first call defines them.

        Args:
            last: of this rank; as for `assign`.
        """
        if self._own_group and not self._own:
            for kept in self._kept:
                if kept.often and kept.dtype.is_floating_point:
                    values = _values(kept.sources, kept.dtype)
                    block = self._client.define(values, rule=None, group=self._own_group)
                    self._own.append(kept._replace(block=block))
        for kept in self._own:
            self._assign(kept, last=last)

    def _begin(
        self, sources: list[Source], dtype: torch.dtype, often: bool, *, define: bool
    ) -> _Kept:
        values = _values(sources, dtype)
        nth = len(self._kept)
        shapes = {name: value.shape for name, value in values.items()}
        if define:
            block = self._client.define(
                values,
                rule=None,
                group=self._group,
                nth=nth,
                aliases=aliases_of(self._model, values),
            )
        else:
            block = self._client.directory.await_block(
                shapes,
                dtype=next(iter(values.values())).dtype,
                rule=None,
                group=self._group,
                nth=nth,
            )
        return _Kept(block, dtype, sources, often)

    def _take(self) -> None:
        blocks = [kept.block for kept in self._kept]
        ticket = self._client.dense.step(self._group, (), pull=blocks, tick=False)
        values = ticket.result().values
        with torch.no_grad():
            for kept in self._kept:
                shapes = [piece.shape for piece in kept.block.pieces]
                views = split(torch.from_numpy(values[kept.block.id]), shapes)
                for source, view in zip(kept.sources, views, strict=True):
                    source.tensor().copy_(view)
        ticket.release()

    def assign(self, *, everything: bool) -> None:
        """Overwrite the servers' values with this worker's: the buffers', or all, at the end.

        What is no longer in the model keeps its last value there; so does at the end what has
        another shape.

        Raises:
            ShapeMismatch: a buffer has another shape. Nothing of its block was applied.
        """
        for kept in self._kept:
            if kept.often or everything:
                self._assign(kept, last=everything)

    def _assign(self, kept: _Kept, *, last: bool) -> None:
        parts, present = [], []
        for index, (source, piece) in enumerate(zip(kept.sources, kept.block.pieces, strict=True)):
            tensor = source.present()
            if tensor is None:
                self._warn(source, "is no longer in the model")
            elif tuple(tensor.shape) != piece.shape:
                change = f"has shape {list(tensor.shape)} now, and {list(piece.shape)} when defined"
                if not last:
                    raise ShapeMismatch(
                        f"buffer {source.name!r} {change}",
                        fix='use worker.optimizer(..., buffers="local"), or register the buffer '
                        "with persistent=False",
                    )
                self._warn(source, change)
            else:
                present.append(index)
                parts.append(tensor.to("cpu", kept.dtype).flatten())
                continue
            parts.append(torch.zeros(prod(piece.shape), dtype=kept.dtype, device="cpu"))
        active = None if len(present) == len(parts) else tuple(present)
        if present:
            self._client.dense.store(kept.block, VALUE, torch.cat(parts).numpy(), active=active)

    def _warn(self, source: Source, why: str) -> None:
        if source.name not in self._warned:
            self._warned.add(source.name)
            warn_user(f"buffer {source.name!r} {why}: the result keeps its last value from before")


def _values(sources: Sequence[Source], dtype: torch.dtype) -> dict[str, Any]:
    return {s.name: s.tensor().to("cpu", dtype).contiguous().numpy() for s in sources}


def _same(first: Tensor, present: Tensor | None) -> bool:
    if present is None or (first.dtype, first.device) != (present.dtype, present.device):
        return False
    return torch.equal(first, present)


def _source(model: torch.nn.Module, name: str) -> Source:
    path, _, attribute = name.rpartition(".")
    return Source(name, model.get_submodule(path), attribute)


def _check(name: str, tensor: Tensor) -> None:
    if torch.nn.parameter.is_lazy(tensor):
        raise TypeError(
            f"{name!r} has no shape yet: run the lazy model on one batch before worker.optimizer"
        )
    if tensor.dtype not in _HELD_AS or tensor.is_meta or tensor.layout is not torch.strided:
        raise TypeError(
            f"{name!r} ({tensor.dtype}, {tensor.layout}, {tensor.device}) cannot be held by the "
            "servers. If it is a buffer, register it with persistent=False or use "
            'buffers="local"; else keep it out of the model'
        )
