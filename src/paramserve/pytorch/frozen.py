"""Frozen parameters (`requires_grad=False`): each rank keeps its own, and the servers hold none.

So they may be of any dtype and size, as the base of a model with adapters. They have to be equal on
all ranks: rank 0 tells a checksum of each, and the others compare. At the end rank 0's values go
into the result, unless they are too large for that.
"""

from __future__ import annotations

import zlib
from collections.abc import Container
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paramserve.errors import warn_user
from paramserve.pytorch.embedding import Rows

if TYPE_CHECKING:
    from paramserve.client import Client
    from paramserve.pytorch.existing_blocks import ExistingBlocks
    from paramserve.pytorch.naming import Names, Slot
    from paramserve.pytorch.registry import Registry

RESULT_BYTES_MAX = 256 << 20
"""Most bytes of frozen parameters that go into a result."""
_LOOKED_AT_MAX = 65_536
"""Elements of one parameter that its checksum is made of."""


def is_frozen(param: Tensor) -> bool:
    """Whether no gradient is computed for a parameter that is no table's."""
    return not param.requires_grad and not isinstance(param, Rows)


class Frozen:
    """The parameters of one model that are frozen when its optimizer is adopted.

    Args:
        group: name under which their checksums are defined.
    """

    def __init__(self, client: Client, names: Names, registry: Registry, group: str) -> None:
        self._client = client
        self._registry = registry
        self._group = group
        values = ((slot, slot.value()) for slot in names.parameters.values())
        self._params = {
            slot: param
            for slot, param in values
            if param is not None and is_frozen(param) and registry.owner(param) is None
        }

    def __bool__(self) -> bool:
        return bool(self._params)

    def compare(self, rank: int, names: Container[str], existing: ExistingBlocks) -> None:
        """Tell their checksums, on rank 0, or compare them with rank 0's. A rank that comes late
        may have others frozen than rank 0 had.

        Args:
            names: of those that no optimizer before has compared: it may have changed them since.
        Raises:
            ValueError: one has other values here. The optimizer was not adopted.
        """
        new = {id(param) for slot, param in self._params.items() if slot.name in names}
        params = {slot: param for slot, param in self._params.items() if id(param) in new}
        if not params:
            return
        there = existing.of(self._group)
        if (existing.again and there) or (existing.stepped and not there):
            return
        mine = np.array([(_key(s), _checksum(param)) for s, param in params.items()], np.int64)
        if rank == 0:
            self._client.define({self._group: mine}, rule=None, group=self._group)
            return
        block = (
            there[0]
            if there
            else self._client.directory.await_block(
                {self._group: mine.shape}, dtype=mine.dtype, rule=None, group=self._group
            )
        )
        values = self._client.dense.fetch(block, 0)[0].tolist()
        theirs = dict(zip(values[::2], values[1::2], strict=True))
        same = [theirs.get(key, own if there else None) == own for key, own in mine.tolist()]
        other = [slot.name for slot, equal in zip(params, same, strict=True) if not equal]
        if other:
            raise ValueError(
                f"the frozen parameter {other[0]!r} of rank {rank} has other values "
                f"than rank 0's ({len(other)} of {len(same)} differ): frozen parameters stay where "
                "they are, so all ranks have to build them alike. Applied: no. To fix: load the "
                "same weights on every rank, or call torch.manual_seed(worker.seed) before the "
                'model is built; if they are meant to differ, pass buffers="local"'
            )

    def values(self) -> dict[str, Any]:
        """Present values by name, on the CPU, for the result, without those that the servers hold
        by now; empty, with a warning, where they are too large."""
        params = {slot.name: slot.value() for slot in self._params}
        unowned = {
            name: param
            for name, param in params.items()
            if param is not None and self._registry.owner(param) is None and not param.is_meta
        }
        size = sum({id(p): p.numel() * p.element_size() for p in unowned.values()}.values())
        if size > RESULT_BYTES_MAX:
            warn_user(
                f"the result lacks {len(unowned)} frozen parameters of {size >> 20} MiB in all, at "
                f"most {RESULT_BYTES_MAX >> 20} MiB go into one: load it with strict=False into a "
                "model that has them"
            )
            return {}
        return {name: _plain(param).to("cpu", copy=True) for name, param in unowned.items()}


def _plain(param: Tensor) -> Tensor:
    return param.detach().as_subclass(torch.Tensor)


def _key(slot: Slot) -> int:
    """What stands for a name beside its checksum."""
    return zlib.crc32(slot.name.encode())


def _checksum(param: Tensor) -> int:
    """Checksum of a parameter's form and, where it has plain memory, of some of its elements,
    spread over all: weights that were made or loaded differently differ there as well."""
    crc = zlib.crc32(f"{param.dtype} {list(param.shape)}".encode())
    if param.is_meta or param.is_quantized or param.layout is not torch.strided:
        return crc
    flat = _plain(param).reshape(-1)
    sample = flat[:: flat.numel() // _LOOKED_AT_MAX + 1].cpu().contiguous()
    return zlib.crc32(sample.view(torch.uint8).numpy().tobytes(), crc)
