"""Parameters that an optimizer steps, and in whose places the model has others by now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import is_
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paramserve.errors import warn_user

if TYPE_CHECKING:
    from paramserve.pytorch.naming import Names, Slot


class Replacements:
    """Finds them; no step reaches what the model has there.

    Args:
        names: of the model.
        group: the optimizer's name, for the warning.
    Attributes:
        slots: their places, by name.
    """

    def __init__(self, names: Names, group: str) -> None:
        self._names = names
        self._group = group
        self.slots: dict[str, Slot] = {}
        self._stepped: list[tuple[str, Tensor]] = []
        self._params: list[Tensor] = []
        """Those of them that the model had when it was looked through last."""
        self._places: list[tuple[Mapping[str, Any], str]] = []
        """Where: the parameters of a module, and the name there."""

    def watch(self, stepped: Iterable[tuple[str, Tensor]]) -> None:
        """What is looked at from now on: all that the optimizer steps, by name."""
        self._stepped = list(stepped)
        self._remember()

    def _remember(self) -> None:
        slots = self._names.parameters
        known = [(slots[n], p) for n, p in self._stepped if n in slots and n not in self.slots]
        self._params = [param for _, param in known]
        self._places = [(slot.owner._parameters, slot.attribute) for slot, _ in known]

    def look(self) -> list[Slot]:
        """Those that were replaced since the last look, with a warning. Cheap enough for a step."""
        present = [module.get(name) for module, name in self._places]
        if all(map(is_, present, self._params)):
            return []
        new = []
        for name, param in self._stepped:
            slot = self._names.parameters.get(name)
            value = slot.value() if slot is not None else param
            if slot is not None and value is not param and name not in self.slots:
                self.slots[name] = slot
                new.append(slot)
                self._warn(name, value)
        self._remember()
        return new

    def _warn(self, name: str, value: Tensor | None) -> None:
        has = "another object under its name" if value is not None else "no such name any more"
        taken = "the model's own value at the end" if value is not None else "its last value"
        warn_user(
            f"parameter {name!r} is stepped by optimizer {self._group!r}, and the model has "
            f"{has}: the steps change the model there no more, and the result has {taken}. To "
            "keep it trained, write into the parameter before worker.optimizer(...), and do "
            "not replace it"
        )
