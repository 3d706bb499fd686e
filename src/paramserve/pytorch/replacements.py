"""Parameters that an optimizer steps, and in whose places the model has others by now: they were
replaced, or the modules that they are in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
        """Parameters that the model had when it was looked through last."""
        self._places: list[tuple[Mapping[str, Any], str]] = []
        """Places: the parameters of a module, and the name there."""
        self._looks = 0
        """Count of looks at the names when these places were collected."""

    def watch(self, stepped: Iterable[tuple[str, Tensor]]) -> None:
        """What is looked at from now on: all that the optimizer steps, by name."""
        self._stepped = list(stepped)
        self._remember()

    def _remember(self) -> None:
        slots, self._looks = self._names.parameters, self._names.looks
        pairs = [(slots[n], p) for n, p in self._stepped if n in slots and n not in self.slots]
        self._params = [param for _, param in pairs]
        self._places = [
            (slot.owner._parameters if slot.owner is not None else {}, slot.attribute)
            for slot, _ in pairs
        ]

    def look(self) -> list[Slot]:
        """Parameters that were replaced since the last look, with a warning. Cheap enough for a
        step, where the names follow the model."""
        if self._looks == self._names.looks:
            present = [module.get(name) for module, name in self._places]
            if all(map(is_, present, self._params)):
                return []
        new = []
        for name, param in self._stepped:
            slot = self._names.parameters.get(name)
            if slot is not None and slot.value() is not param and name not in self.slots:
                self.slots[name] = slot
                new.append(slot)
        self._remember()
        for is_removed in (False, True):
            if names := [slot.name for slot in new if (slot.value() is None) == is_removed]:
                self._warn(names, is_removed)
        return new

    def _warn(self, names: Sequence[str], is_removed: bool) -> None:
        more = f" (and {len(names) - 1} more)" if names[1:] else ""
        has = "no such name any more" if is_removed else "another object under its name"
        values = "its last value" if is_removed else "the model's own value at the end"
        warn_user(
            f"parameter {names[0]!r}{more} is stepped by optimizer {self._group!r}, and the model "
            f"has {has}: the steps change the model there no more, and the result has {values}. To "
            "keep it trained, write into the parameter before worker.optimizer(...), and do "
            "not replace it or its module"
        )
