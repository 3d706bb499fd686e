"""What of a model changes without an optimizer's step, kept for the rank's next incarnation.

Buffers do, and parameters that no optimizer has: target networks and averages that are moved in
the loop, codebooks that `forward` replaces. Where another incarnation may go on for this one, each
rank saves with each step those that have changed since its first incarnation began
(`client.saving`): as they are when the step is sent. Its next incarnation goes on from them.

Parameters are looked at cheaply, for a frozen base may be large: which object it is, how often
torch has seen it written to, and a `Sample` of its values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paramserve.checkpoint.plain import dump, load
from paramserve.checkpoint.tensors import KINDS
from paramserve.client.saving import BYTES_MAX
from paramserve.errors import warn_user
from paramserve.pytorch.block import INTEGERS, Sample
from paramserve.pytorch.naming import Names, Slot, persistent

if TYPE_CHECKING:
    from paramserve.client import Client
    from paramserve.pytorch.registry import Registry

_MIB = 1 << 20


class Changing:
    """The tensors of one model that no optimizer steps and that may change.

    Args:
        group: the optimizer's name.
        rank: for messages.
        find_replacements: adds the parameters whose places have other ones by now.
    Attributes:
        mine: names of what no optimizer before looks after. The others' present values are here.
        names: of parameters that have changed.
    """

    def __init__(
        self,
        client: Client,
        registry: Registry,
        names: Names,
        group: str,
        rank: int,
        find_replacements: Callable[[], None],
    ) -> None:
        self._client = client
        self._registry = registry
        self._rank = rank
        self._find_replacements = find_replacements
        self._saves_others = False
        """Whether some were saved: from then on it is told where there are none."""
        self._buffers_name = f"{group}.buffers"
        self._others_name = f"{group}.unstepped"
        lasting = persistent(names.model)
        self._slots = names.parameters | names.buffers
        pairs = names.first(self._slots)
        self.mine = {slot.name for slot in registry.watch(slot for slot, _ in pairs)}
        own = [(slot, tensor) for slot, tensor in pairs if slot.name in self.mine]
        buffers = {slot.name for slot, _ in own} & names.buffers.keys()
        self._buffers = [
            slot
            for slot, _ in own
            if slot.name in buffers and (slot.raw in lasting or slot.name in lasting)
        ]
        """Buffers that a state dict has."""
        self._first: dict[str, Tensor] = {}
        """Buffers that have not changed since the start."""
        often = {slot.name for slot in self._buffers}
        self._still = {slot.name: (slot, each) for slot, each in own if slot.name not in often}
        """What has not changed of parameters and of other buffers, with the objects."""
        self._versions: list[int] = []
        self._samples: list[tuple[list[str], Sample]] = []
        self.names: set[str] = set()
        self._warned: set[str] = set()

    def start(self, *, again: bool) -> None:
        """Take what this rank's older incarnation saved, and save from now on.

        Args:
            again: there may be one.
        """
        self._still = {
            name: (slot, each)
            for name, (slot, each) in self._still.items()
            if self._registry.owner(each) is None
        }
        moved = self._go_on() if again else set[str]()
        self.names |= moved - {slot.name for slot in self._buffers}
        for name in moved:
            self._still.pop(name, None)
        self._remember()
        if not self._client.connection.restarts:
            return
        saving = self._client.saving
        if self._buffers:
            buffers_now = {slot.name: slot.tensor() for slot in self._buffers}
            self._first = {
                name: each.clone() for name, each in buffers_now.items() if name not in moved
            }
            saving.ask(self._buffers_name, self._changed_buffers)
        saving.ask(self._others_name, self._changed_others)

    @property
    def saves_buffers(self) -> bool:
        """Whether each step saves the buffers that change."""
        return not self._buffers or self._client.saving.asks(self._buffers_name)

    def add(self, slot: Slot) -> None:
        """A parameter that was stepped was replaced by another one, which is not."""
        self._slots[slot.name] = slot  # it may have been added after the adoption
        self.names.add(slot.name)

    def look(self) -> list[Slot]:
        """Parameters, and buffers that no state dict has, that have changed so far; their names are
        in `names` from now on."""
        names = self._different()
        if names:
            self.names |= names
            for name in names:
                self._still.pop(name, None)
            self._remember()
        return self._changed()

    def _changed(self) -> list[Slot]:
        return [self._slots[name] for name in sorted(self.names & self._slots.keys())]

    def warn(self, *, assigned: bool) -> None:
        """Warn, once, where more changes than can be saved.

        Args:
            assigned: whether the servers have the buffers as of each step.
        """
        if not self._client.connection.restarts:
            return
        if not (assigned or self.saves_buffers):
            self._warn(self._buffers_name, self._buffers)
        if (changed := self._changed()) and not self._client.saving.asks(self._others_name):
            self._warn(self._others_name, changed)

    def _warn(self, key: str, slots: Sequence[Slot]) -> None:
        if key in self._warned:
            return
        self._warned.add(key)
        tensors = [each for each in (slot.present() for slot in slots) if each is not None]
        size = sum(each.numel() * each.element_size() for each in tensors)
        warn_user(
            f"rank {self._rank} has tensors that change and that no optimizer steps, as "
            f"{slots[0].name!r} ({len(slots)} in all, {size / _MIB:.1f} MiB), and saves at most "
            f"{BYTES_MAX / _MIB:.0f} MiB with each step: if it is started again, or the run goes "
            "on from a checkpoint, they begin anew. Make them from what comes back, or keep them "
            "on the servers: client.define(...) and client.assign(...)"
        )

    # --- what has changed -------------------------------------------------------------------------

    def _remember(self) -> None:
        """What parameters are looked at for."""
        self._versions = [_version(each) for _, each in self._still.values()]
        by_size: dict[int, list[str]] = {}
        for name, (_, each) in self._still.items():
            if _is_plain(each) and each.itemsize in INTEGERS:
                by_size.setdefault(each.itemsize, []).append(name)
        self._samples = [
            (names, Sample([self._still[name][1] for name in names])) for names in by_size.values()
        ]
        for _, sample in self._samples:
            sample.take()

    def _different(self) -> set[str]:
        """The names of what has another object, count of writes, or value than remembered."""
        changed, owned = set[str](), set[str]()
        for (name, (slot, tensor)), before in zip(self._still.items(), self._versions, strict=True):
            value = slot.value()
            if value is not tensor or _version(tensor) != before:
                changed.add(name)
        for names, sample in self._samples:
            changed.update(names[place] for place in sample.changed())
        for name in changed:
            value = self._still[name][0].value()
            if value is None or self._registry.owner(value) is not None:
                owned.add(name)  # removed, or stepped by now
        for name in owned:
            del self._still[name]
        if owned:
            self._remember()
        return changed - owned

    def _changed_buffers(self) -> bytes:
        """Packed buffers that have changed since the rank's first incarnation began."""
        buffers = {each.name: each.present() for each in self._buffers}
        for name, first in list(self._first.items()):
            if not _same(first, buffers[name]):
                del self._first[name]
        changed = {n: t for n, t in buffers.items() if n not in self._first and t is not None}
        return _packed(changed)

    def _changed_others(self) -> bytes | None:
        self._find_replacements()
        slots = self.look() if self._still or self.names else []
        if not (slots or self._saves_others):
            return None
        self._saves_others = True
        values = {slot.name: slot.value() for slot in slots}
        return _packed(
            {
                name: value
                for name, value in values.items()
                if value is not None and self._registry.owner(value) is None
            }
        )

    # --- what an older incarnation saved ----------------------------------------------------------

    def _go_on(self) -> set[str]:
        """Take it; the names of these tensors."""
        saved: dict[str, Tensor] = {}
        for name in (self._buffers_name, self._others_name):
            packed = self._client.saving.older(name)
            saved |= load(packed) if packed else {}
        with torch.no_grad():
            for name, bits in saved.items():
                slot = self._slots.get(name)
                target = slot.present() if slot is not None else None
                if slot is not None and target is not None and target.shape == bits.shape:
                    self._put(slot, target, _as(bits, target.dtype))
        return set(saved)

    def _put(self, slot: Slot, target: Tensor, value: Tensor) -> None:
        """Give a tensor its saved value; one that was replaced then, and is stepped now, is
        replaced again."""
        own = slot.value()
        if isinstance(own, torch.nn.Parameter) and self._registry.owner(own) is not None:
            self._registry.replace(slot)
            values = value.to(target.device, target.dtype)
            setattr(slot.owner, slot.attribute, torch.nn.Parameter(values, own.requires_grad))
        else:
            target.copy_(value)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its values lie in memory as they are."""
    own = type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return own and tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _same(first: Tensor, present: Tensor | None) -> bool:
    if present is None or (first.dtype, first.device) != (present.dtype, present.device):
        return False
    return torch.equal(first, present)


def _packed(tensors: dict[str, Tensor]) -> bytes:
    """Tensors packed as `_go_on` unpacks them; too many for a save are not copied for it."""
    size = sum(each.numel() * each.element_size() for each in tensors.values())
    if size > BYTES_MAX:
        return bytes(BYTES_MAX + 1)
    return dump({name: _bits(each) for name, each in tensors.items()}, "tensors of the model")


def _bits(tensor: Tensor) -> Tensor:
    """The values on the CPU; of a dtype that cannot be saved as it is, the bits."""
    plain = tensor.detach().as_subclass(Tensor).cpu()
    if str(plain.dtype).removeprefix("torch.") in KINDS or plain.itemsize not in INTEGERS:
        return plain
    return plain.contiguous().view(INTEGERS[plain.itemsize])


def _as(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """What `_bits` was given, for a tensor of this dtype."""
    name = str(dtype).removeprefix("torch.")
    kept_as_bits = name not in KINDS and dtype.itemsize in INTEGERS
    return bits.view(dtype) if kept_as_bits and bits.dtype != dtype else bits
