"""What a model's tensors are called: on the servers, in results and in files.

A wrapper that changes nothing of a model is no part of a name: `torch.compile`, of the model or of
a module in it, and `DataParallel`, `DistributedDataParallel` and `AveragedModel` around the whole.
So what a compiled model was trained to fits the plain one, and the other way round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from paramserve.config import LOOSE
from paramserve.pytorch.embedding import Rows

_UNSEEN = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Attributes under which torch's wrappers have the wrapped module, at any place in a model."""
_AROUND = (DataParallel, DistributedDataParallel, AveragedModel)
"""Wrappers of whole models, which have them as `module`."""
AROUND = "module."
"""What they put before each name."""


class Place(NamedTuple):
    """A module of a model."""

    name: str
    raw: str
    """Name with the wrappers."""
    module: Module

    def of(self, attribute: str) -> tuple[str, str]:
        """Both names of one of its tensors."""
        return _joined(self.name, attribute), _joined(self.raw, attribute)


@dataclass(eq=False)
class Slot:
    """Where a tensor is: looked up each time, since models replace their tensors, and modules: see
    `Names.follow`."""

    name: str
    raw: str
    """Name with the wrappers, as `model.state_dict()` has it."""
    owner: Module | None
    """None: the model has no such module any more."""
    attribute: str

    def value(self) -> Tensor | None:
        """The object that is there now; None: there is none any more."""
        value = getattr(self.owner, self.attribute, None)
        return value if isinstance(value, Tensor) else None

    def tensor(self) -> Tensor:
        """Tensor without a gradient. It is known to be there."""
        value: Tensor = getattr(self.owner, self.attribute)
        return value.detach()

    def present(self) -> Tensor | None:
        """Tensor of the slot; None: it is not in the model any more."""
        value = self.value()
        return value.detach() if value is not None else None


def places(model: Module) -> Iterator[Place]:
    """All modules, those that are in it twice under both names."""
    return _places(model, "", "", True)


def _places(module: Module, name: str, raw: str, top: bool) -> Iterator[Place]:
    """Args: top: nothing but wrappers is around this module."""
    yield Place(name, raw, module)
    for key, child in module._modules.items():
        if child is None:
            continue
        whole = top and key == "module" and isinstance(module, _AROUND)
        unseen = whole or key in _UNSEEN
        inner = name if unseen else _joined(name, key)
        yield from _places(child, inner, _joined(raw, key), top and unseen)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class Names:
    """The tensors of one model, as of the last look at it.

    Attributes:
        parameters: by name, tied ones by each of theirs, without rows of tables.
        buffers: the same.
        looks: how often it was looked at.
    """

    def __init__(self, model: Module) -> None:
        self.model = model
        self.parameters: dict[str, Slot] = {}
        self.buffers: dict[str, Slot] = {}
        self.looks = 0
        self._names_by_id: dict[int, tuple[Tensor, list[str]]] = {}
        """Names by identity; the tensors too, so that no other one gets the same."""
        self._modules: list[Module | None] = []
        """All but the model itself, as they were at the last look."""
        self._holders: list[Mapping[str, Module | None]] = []
        """Modules of each place, by name."""
        self._keys: list[str] = []
        """Names of the places in their modules."""
        self.look()

    def follow(self) -> None:
        """Look again, if a module is no longer where it was, or was added. Cheap enough for a
        step."""
        keys, present = self._children()
        if keys != self._keys or not all(map(is_, present, self._modules)):
            self.look()

    def _children(self) -> tuple[list[str], list[Module | None]]:
        """The names and modules that the holders have now."""
        modules = chain.from_iterable(each.values() for each in self._holders if each)
        return [*chain.from_iterable(self._holders)], [*modules]

    def look(self) -> None:
        """Learn of tensors that are new in the model, and of modules that others have replaced."""
        self.looks += 1
        all_places = list(places(self.model))
        self._holders = [place.module._modules for place in all_places]
        self._keys, self._modules = self._children()
        modules_now = {place.raw: place.module for place in all_places}
        for slot in (*self.parameters.values(), *self.buffers.values()):
            slot.owner = modules_now.get(slot.raw.rpartition(".")[0])
        for place in all_places:
            module = place.module
            for kind, tensors in (
                (self.parameters, module._parameters),
                (self.buffers, module._buffers),
            ):
                for attribute, tensor in tensors.items():
                    if tensor is None or isinstance(tensor, Rows):
                        continue
                    name, raw = place.of(attribute)
                    slot = kind.setdefault(name, Slot(name, raw, module, attribute))
                    slot.raw, slot.owner, slot.attribute = raw, module, attribute
                    _, names = self._names_by_id.setdefault(id(tensor), (tensor, []))
                    if name not in names:
                        names.append(name)

    def of(self, tensor: Tensor) -> str | None:
        """The name of a tensor, the first one of a tied one; None: the model has it not."""
        names = self.all_of(tensor)
        return names[0] if names else None

    def all_of(self, tensor: Tensor) -> list[str]:
        """Every name of a tensor."""
        entry = self._names_by_id.get(id(tensor))
        return entry[1] if entry is not None else []

    def first(self, slots: Mapping[str, Slot]) -> list[tuple[Slot, Tensor]]:
        """Slots with what is in them now, each tensor under its first name."""
        pairs = [(slot, slot.value()) for slot in slots.values()]
        return [(s, t) for s, t in pairs if t is not None and self.of(t) in (s.name, None)]

    def aliases(self, names: Collection[str] | None = None) -> dict[str, str]:
        """Further names of tied tensors, each with the first one, which is the one on the servers.

        Args:
            names: only of tensors with these first names; None: of all.
        """
        tied = (names for _, names in self._names_by_id.values())
        return {
            other: first
            for first, *others in tied
            for other in others
            if names is None or first in names
        }

    def of_optimizer(self, index: int, place: int, param: Tensor) -> str:
        """What a parameter of an optimizer is called: one that the model does not have by where it
        is in the optimizer, which no name in a model can be.

        Args:
            index: of the parameter group.
            place: in the group.
        """
        name = self.of(param)
        return name if name is not None else f"{LOOSE}{index}.{place}"


def plain_name(model: Module, raw: str) -> str:
    """A name in a model's state dict without what wrappers add."""
    name, module, top = list[str](), model, True
    for key in raw.split("."):
        whole = top and key == "module" and isinstance(module, _AROUND)
        if not (whole or key in _UNSEEN):
            name.append(key)
            top = False
        child = module._modules.get(key) if module is not None else None
        module = child  # type: ignore[assignment]  # None below the last module
    return ".".join(name)


def plain_text(name: str) -> str:
    """A name of a file without what wrappers at any place in a model add."""
    return ".".join(key for key in name.split(".") if key not in _UNSEEN)


def persistent(model: Module) -> Collection[str]:
    """The names, with the wrappers, of what a state dict has."""
    return model.state_dict(keep_vars=True).keys()


def extra_states(model: Module) -> dict[str, object]:
    """What `get_extra_state` gives of each module that has one, by name in the state dict."""
    return {
        place.of("_extra_state")[0]: place.module.get_extra_state()
        for place in places(model)
        if type(place.module).get_extra_state is not torch.nn.Module.get_extra_state
    }
