"""Parameters that a model has got since its optimizer was adopted, as those of a module that was
added, and that no optimizer has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paramserve.errors import warn_user

if TYPE_CHECKING:
    from paramserve.pytorch.naming import Names
    from paramserve.pytorch.registry import Registry


class Additions:
    """Tells of them once; what the model had at the adoption may be meant to stay as it is.

    Args:
        names: of the model.
        registry: knows what some optimizer has.
        group: the optimizer's name, for the warning.
    """

    def __init__(self, names: Names, registry: Registry, group: str) -> None:
        self._names = names
        self._registry = registry
        self._group = group
        self._looks = names.looks
        self._names_before = set(names.parameters)

    def look(self) -> None:
        """Warn of those that are new since the last look. Cheap enough for a step, where the names
        follow the model."""
        if self._looks == self._names.looks:
            return
        self._looks = self._names.looks
        pairs = self._names.first(self._names.parameters)
        new = [(slot, each) for slot, each in pairs if slot.name not in self._names_before]
        self._names_before.update(self._names.parameters)
        names = self._registry.unowned((slot, each) for slot, each in new if each.requires_grad)
        if names:
            more = f" (and {len(names) - 1} more)" if names[1:] else ""
            warn_user(
                f"parameter {names[0]!r}{more} was added to the model of optimizer "
                f"{self._group!r} behind worker.optimizer(...), and no optimizer has it: no step "
                "trains it, and the result does not have it. To train it, call "
                "optimizer.add_param_group(...) on all ranks at the same point; if it is to stay "
                "as it is, let it not require gradients"
            )
