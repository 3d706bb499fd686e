"""Who owns the value of each tensor of a worker's models: one optimizer's group, or none.

Several optimizers may be given one model, or models with tensors in common. Each tensor then has
one owner, the last optimizer that was given it: its group on the servers has the value, or gets it
at the end. The others neither keep nor take a copy, and tell readers where it is (`links`).
A tensor without an owner is a buffer, frozen, or left out of all optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor
from torch.nn import Module

from paramserve.messages import Link

if TYPE_CHECKING:
    from paramserve.pytorch.naming import Names, Slot
    from paramserve.training.host import Host


class Owner(NamedTuple):
    """Where the value of a tensor is."""

    tensor: Tensor
    """Kept, so that no other one gets its identity."""
    group: str
    name: str
    """Name in the group."""


class Member(Protocol):
    """An adopted optimizer, as the others of its worker and `Worker.assign` know it;
    `paramserve.pytorch.adopted.Adopted` is one, and says what these are."""

    group: str
    names: Names

    @property
    def is_taken_over(self) -> bool: ...
    def named(self) -> list[tuple[str, Tensor]]: ...
    def serves(self, tensor: Tensor) -> bool: ...
    def settle(self) -> None: ...
    def hand_over(self, parameter: str, other: str) -> None: ...
    def present(self) -> list[Any]: ...
    def store(self, values: Sequence[Any]) -> None: ...
    def take(self) -> None: ...


class Registry:
    """The tensors of one worker's models.

    Attributes:
        optimizers: those that were adopted, in order.
        begins: the worker was started again, and has made no step since, with any of them. What its
            program writes until then its older incarnation has written, too.
    """

    def __init__(self, *, begins: bool = False) -> None:
        self.optimizers: list[Member] = []
        self.begins = begins
        self._owners: dict[int, Owner] = {}
        self._watched: dict[tuple[int, str], Module | None] = {}
        """The modules, too, so that no other one gets the identity of one that was replaced."""
        self._replaced: set[tuple[int, str]] = set()
        self._unowned: dict[int, Tensor] = {}
        """What `unowned` has given, kept as in `Owner`."""

    @staticmethod
    def of(worker: Host) -> Registry:
        """The one of this worker."""
        if worker.registry is None:
            worker.registry = Registry(begins=worker.incarnation > 1)
        registry: Registry = worker.registry
        return registry

    @contextmanager
    def adopting(self) -> Iterator[None]:
        """Restore all where an optimizer cannot be adopted: it may be tried again."""
        before = self._owners.copy(), self._watched.copy(), self._replaced.copy()
        try:
            yield
        except BaseException:
            self._owners, self._watched, self._replaced = before
            raise

    def own(self, group: str, named: Iterable[tuple[str, Tensor]]) -> None:
        """Note that the values of these tensors are this group's from now on."""
        for name, tensor in named:
            self._owners[id(tensor)] = Owner(tensor, group, name)

    def owner(self, tensor: Tensor) -> Owner | None:
        """Owner of a tensor's value; None: no optimizer's group."""
        return self._owners.get(id(tensor))

    def unowned(self, pairs: Iterable[tuple[Slot, Tensor]]) -> list[str]:
        """The names of what has no owner, in places that no optimizer looks after; each tensor
        once, also where several optimizers of a model ask."""
        new = {
            id(tensor): (slot.name, tensor)
            for slot, tensor in pairs
            if self.owner(tensor) is None
            and id(tensor) not in self._unowned
            and (id(slot.owner), slot.attribute) not in self._watched
        }
        self._unowned |= {key: tensor for key, (_, tensor) in new.items()}
        return [name for name, _ in new.values()]

    def replace(self, slot: Slot) -> None:
        """Note that an older incarnation had replaced a parameter that an optimizer steps."""
        self._replaced.add((id(slot.owner), slot.attribute))

    def is_replaced(self, slot: Slot) -> bool:
        """Whether `replace` was told of a place: its value is that optimizer's to give."""
        return (id(slot.owner), slot.attribute) in self._replaced

    def watch(self, slots: Iterable[Slot]) -> list[Slot]:
        """Subset of these places that no optimizer before has looked after."""
        new = {(id(slot.owner), slot.attribute): slot for slot in slots}
        unwatched = [slot for key, slot in new.items() if key not in self._watched]
        self._watched |= {key: slot.owner for key, slot in new.items()}
        return unwatched

    def links(
        self, group: str, names: Names, named: Mapping[str, Tensor], *, first: bool
    ) -> tuple[Link, ...]:
        """What readers are told when a group defines tensors.

        Args:
            group: whose they are.
            names: of its model.
            named: the tensors that are defined.
            first: they are its first ones: what other groups own of its model is told, too.
        """
        links = []
        for other in self.optimizers:
            if other.group != group:
                other.names.look()
                pairs = {
                    theirs: name
                    for name, tensor in named.items()
                    if not other.serves(tensor)
                    for theirs in other.names.all_of(tensor)
                }
                links.append(Link(other.group, group, pairs))
        sources: dict[str, dict[str, str]] = {}
        mine = {id(tensor) for tensor in named.values()}
        for key, owner in self._owners.items() if first else ():
            if owner.group != group and key not in mine:
                pairs = dict.fromkeys(names.all_of(owner.tensor), owner.name)
                sources.setdefault(owner.group, {}).update(pairs)
        links += [Link(group, source, pairs) for source, pairs in sources.items()]
        return tuple(link for link in links if link.names)
