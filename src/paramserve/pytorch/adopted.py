"""What all adopted optimizers have in common: their blocks, their start and end.

`served.py` lets the servers make the steps, `local.py` and `hybrid.py` the worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from paramserve.client.encoding import in_words
from paramserve.config import BUFFERS
from paramserve.errors import ParamServeError, warn_user
from paramserve.logs import write_line
from paramserve.messages import VALUE
from paramserve.observe.history import History, StepRecord
from paramserve.pytorch.additions import Additions
from paramserve.pytorch.block import AdoptedBlock, Layout, Sample, lay_out, sharing
from paramserve.pytorch.buffers import BUFFERS_EVERY, Untrained
from paramserve.pytorch.changing import Changing
from paramserve.pytorch.codecs import CodecsByName, split_by_codec
from paramserve.pytorch.embedding import Rows
from paramserve.pytorch.existing_blocks import ExistingBlocks
from paramserve.pytorch.frozen import Frozen, is_frozen
from paramserve.pytorch.hyper import check_options
from paramserve.pytorch.naming import Names, extra_states
from paramserve.pytorch.registry import Member, Registry
from paramserve.pytorch.replacements import Replacements
from paramserve.pytorch.schedules import Schedules
from paramserve.pytorch.settings import Settings
from paramserve.pytorch.tables import Tables
from paramserve.rules.torch_kinds import ParamGroup

if TYPE_CHECKING:
    from paramserve.client import Ticket
    from paramserve.client.ticket import Outcome
    from paramserve.core.partition import Block
    from paramserve.messages import Link
    from paramserve.rules.base import Rule
    from paramserve.training.host import Host

B = TypeVar("B", bound=AdoptedBlock)

SKIPPED_MAX = 10
"""Steps that a policy skips in a row for NaN or Inf, without a warning."""


def _named(layouts: Iterable[Layout]) -> Iterator[tuple[str, Tensor]]:
    for layout in layouts:
        yield from zip(layout.names, layout.params, strict=True)


class Plan(NamedTuple, Generic[B]):
    """A block that is checked and not yet defined."""

    layout: Layout
    rule: Rule
    """What it is defined with."""
    part: Callable[[Block], B]


def reciprocal(grad_scale: Tensor) -> float:
    """What undoes a gradient's scale: in float64, then rounded, as `GradScaler.unscale_` does."""
    return float(grad_scale.double().reciprocal().float())


class Adopted(ABC, Generic[B]):
    """One adopted optimizer's blocks: defined together, and stepped in one group.

    Args:
        worker: rank 0 defines; it gets the final call.
        apart: see `Tables`.
    Attributes:
        group: its group on the servers.
        names: of its model's tensors.
        schedules: of its hyper-parameters.
    """

    every = 1
    """Steps of one clock."""

    def __init__(
        self,
        worker: Host,
        model: torch.nn.Module,
        settings: Settings,
        *,
        apart: bool = False,
    ) -> None:
        if settings.name in worker.optimizers.histories:
            raise ValueError(
                f"this worker has an optimizer called {settings.name!r} already: give the second "
                "one another name="
            )
        self._worker = worker
        self._client = worker.client
        self._model = model
        self._settings = settings
        self._push_codecs = CodecsByName.of(settings.push, "push")
        self._pull_codecs = CodecsByName.of(settings.pull, "pull")
        self.group = settings.name
        self.names = Names(model)
        self._registry = Registry.of(worker)
        self.tables = Tables(worker.client, model, worker.rank, apart=apart)
        self._parts: list[B] = []
        self._blocks: tuple[Block, ...] = ()
        self._steps = 0
        self._grouped: list[list[Tensor]] = []
        """The lists of parameters as the parts' groups were found from them."""
        self.history = History()
        """Outcomes of its steps."""
        self._in_flight: list[Ticket] = []
        """Tickets of steps whose answers are not in the model yet, oldest first. What an interrupt
        or a timeout has left here is forgotten with the next step: its slots go back then."""
        self._skipped = 0
        """Steps in a row that were not applied, up to the last."""
        self._clocked = settings.name
        """The group whose clock its steps count."""
        self._not_trained: list[str] = []
        """What the group trained when this worker came late, and this worker's optimizer was not
        given."""
        self._at_rest: dict[str, tuple[Tensor, Sample]] = {}
        """What it was given then, and had frozen: the values, for the first steps."""
        self._replacements = Replacements(self.names, settings.name)
        self._additions = Additions(self.names, self._registry, settings.name)
        self._unserved: dict[int, Tensor] = {}
        """Frozen parameters that the optimizer was given, by identity: they are defined when they
        are trained after all."""
        self._told_extra = False
        """Whether the driver has something of this rank that the servers did not hold."""
        self._successor: tuple[str, str] | None = None
        """A parameter that another optimizer has taken over since, and that optimizer's name."""
        self.unnamed = True
        """Whether no scheduler was named, as far as the first step has looked."""
        self.late = worker.incarnation > 1 or worker.client.connection.added_late
        again = worker.incarnation > 1 and settings.name in worker.client.steps.resumed
        self._existing = ExistingBlocks(worker.client, settings.name, late=self.late, again=again)
        self.schedules = Schedules(
            worker.client,
            settings.name,
            worker.rank,
            late=self.late,
            steps_per_clock=self.every,
        )

    def start(self, groups: Sequence[ParamGroup], state: Mapping[Tensor, Any]) -> None:
        """Check everything, then define on rank 0 or wait for it, and take the values."""
        settings, worker = self._settings, self._worker
        self._check_codecs(groups)
        plans = self._plans(dict(enumerate(groups)))
        tables = self.tables.find(groups)
        if not plans:
            self._existing.step_with(each.table.group for each in tables)
        sharers = self._takes(plans)
        trained = {id(param) for group in groups for param in group["params"]}
        self._check_trains(groups, bool(tables))
        self._warn_of_another_model(groups)
        own = self._own(groups)
        self._untrained = self._untrained_of(trained)
        self._changing = Changing(
            self._client,
            self._registry,
            self.names,
            settings.name,
            worker.rank,
            self._find_replacements,
        )
        self._frozen = Frozen(
            self._client, self.names, self._registry, f"{settings.name}.frozen{BUFFERS}"
        )
        if settings.buffers != "local":
            self._frozen.compare(worker.rank, self._changing.mine, self._existing)
        self._begin(plans, state)
        if plans:
            self.schedules.start(groups)
        self._untrained.start(
            self._existing,
            define=worker.rank == 0,
            take=self._changing.mine if worker.rank != 0 or self.late else (),
            links=() if plans else self._links(own, first=True),
        )
        self._not_trained = self._take_served()
        self._changing.start(again=worker.incarnation > 1)
        if worker.rank == 0:
            self._tell_extra_state()
        self.tables.adopt(tables, groups)
        self._take_over(sharers)
        self._keep_unserved(groups)
        self._registry.optimizers.append(self)
        if not plans and self.tables.groups:
            self._clocked = self.tables.groups[0]
        stepped = [settings.name] * bool(plans) + [*self.tables.groups]
        worker.optimizers.adopt(settings.name, stepped, self.history, self.finish)

    def _check_codecs(self, groups: Sequence[ParamGroup]) -> None:
        """Refuse patterns of codecs that no parameter needs.

        Raises:
            ValueError: nothing was defined.
        """
        names = [
            self.names.of_optimizer(index, place, param)
            for index, group in enumerate(groups)
            for place, param in enumerate(group["params"])
            if not isinstance(param, Rows)
        ]
        self._push_codecs.check(names)
        self._pull_codecs.check(names)

    def _check_trains(self, groups: Sequence[ParamGroup], tables: bool) -> None:
        """Refuse an optimizer whose steps would change nothing.

        Raises:
            ValueError: all its parameters are frozen. Nothing was defined.
        """
        params = [param for group in groups for param in group["params"]]
        if params and not tables and all(map(is_frozen, params)):
            raise ValueError(
                f"all {len(params)} parameters of the optimizer are frozen (requires_grad=False): "
                "its steps would change nothing. Let some require gradients before "
                "worker.optimizer(...)"
            )

    def _warn_of_another_model(self, groups: Sequence[ParamGroup]) -> None:
        """Warn where the optimizer has parameters that the model has not, and the model some that
        no optimizer has: it was made from another model, or before this one was changed."""
        params = [p for group in groups for p in group["params"] if not isinstance(p, Rows)]
        foreign = [param for param in params if self.names.of(param) is None]
        stepped = {id(param) for param in params}
        untrained = [
            slot.name
            for slot, param in self.names.first(self.names.parameters)
            if param.requires_grad
            and id(param) not in stepped
            and self._registry.owner(param) is None
        ]
        if foreign and untrained:
            some = ", ".join(map(repr, untrained[:3])) + (", ..." if len(untrained) > 3 else "")
            warn_user(
                f"the optimizer has {len(foreign)} parameters that are not the model's, and not "
                f"{some} ({len(untrained)} in all) of the model, which no step trains: it was made "
                "from another model, or before this one was changed. Make the optimizer from "
                "model.parameters() of the model that worker.optimizer(...) is given"
            )

    def _untrained_of(self, trained: set[int]) -> Untrained:
        """What of the model is not trained on the servers."""
        return Untrained(
            self._client,
            self.names,
            self._registry,
            f"{self._settings.name}{BUFFERS}",
            trained=trained,
            buffers=self._settings.buffers != "local",
            own_group=self._own_group(),
        )

    def _own_group(self) -> str:
        """Where this rank's own buffers are kept for a mean; empty: there is none."""
        name, rank = self._settings.name, self._worker.rank
        return f"{name}.rank{rank}{BUFFERS}" if self._settings.buffers == "mean" else ""

    def finish(self) -> None:
        """Assign buffers and untrained parameters, and give the result frozen ones and what modules
        keep besides; on rank 0, or where it is dead on the lowest rank that is not."""
        rank = self._worker.rank
        self._find_replacements()
        self._untrained.tell_own(last=True)
        leaves = self._untrained or self._frozen or self._replacements.slots
        if rank == 0 or (leaves and self._client.connection.is_dead(range(rank))):
            self._assign_changing(everything=True)
            self._tell_extra_state()

    def _tell_extra_state(self) -> None:
        """Give the driver what the servers do not hold: at the start, so that a snapshot is a whole
        state, when something is unfrozen, and at the end; it replaces what was told before."""
        extra = {**self._frozen.values(), **extra_states(self._model)}
        if extra or self._told_extra:
            self._told_extra = True
            self._worker.tell_extra_state(self._settings.name, extra)

    def add_group(self, index: int, group: ParamGroup) -> None:
        """Define the blocks of one more parameter group, as `start` does.

        Raises:
            RuntimeError: another optimizer has taken over a parameter. Nothing was defined.
        """
        self._check_owner()
        self.names.look()
        tables = self.tables.find([group])
        self._define_later(self._plans({index: group}))
        params = {id(param) for param in group["params"]}
        slots = self.names.parameters.values()
        self._registry.watch(slot for slot in slots if id(slot.value()) in params)
        self.tables.adopt(tables, [group])
        self._keep_unserved([group])
        self._worker.optimizers.step_with(each.table.group for each in tables)

    def _define_later(self, plans: Sequence[Plan[B]]) -> None:
        """Define blocks of an optimizer that has been adopted.

        Raises:
            ValueError: the optimizer trains another parameter under such a name. Nothing was sent.
        """
        names = {name for part in self._parts for name in part.layout.names}
        again = [name for plan in plans for name in plan.layout.names if name in names]
        if again:
            raise ValueError(
                f"parameter {again[0]!r} is another one than this optimizer trains by that name. "
                "Applied: no. To fix: give the new module another name in the model, or write its "
                "values into the old one and call worker.assign() on all ranks"
            )
        sharers = self._takes(plans)
        self._define(plans)
        self._take_over(sharers)

    # --- frozen parameters ------------------------------------------------------------------------

    def _served(self) -> set[int]:
        """The parameters that the servers have, by identity."""
        return {id(param) for part in self._parts for param in part.layout.params}

    def _keep_unserved(self, groups: Sequence[ParamGroup]) -> None:
        """Remember the frozen parameters of these groups."""
        served = self._served()
        params = (param for group in groups for param in group["params"])
        self._unserved |= {id(p): p for p in params if is_frozen(p) and id(p) not in served}

    def serves(self, tensor: Tensor) -> bool:
        """Whether this optimizer's group has a block with a tensor."""
        return any(tensor is param for part in self._parts for param in part.layout.params)

    def _is_stepped(self, tensor: Tensor) -> bool:
        """Whether an optimizer of this worker steps it."""
        owner = self._registry.owner(tensor)
        return owner is not None and (owner.group != self.group or self.serves(tensor))

    def _define_unfrozen(self, groups: Sequence[ParamGroup]) -> None:
        """Define frozen parameters that are trained from now on, as `add_group` does: all ranks
        let them require gradients before the same step."""
        keys = {key for key, param in self._unserved.items() if param.requires_grad}
        if not keys:
            return
        thawed = {
            index: group
            for index, group in enumerate(groups)
            if any(id(param) in keys for param in group["params"])
        }
        self._define_later(self._plans(thawed))
        for key in keys:
            del self._unserved[key]
        if self._worker.rank == 0:
            self._tell_extra_state()

    def _take_served(self) -> list[str]:
        """Take, for what of the model this worker's optimizers were not given, the values that the
        group has: it may have been added before this worker came. They are the group's here, too,
        for the optimizers that are adopted next.

        Returns:
            The names.
        """
        mine = {
            slot.name: param
            for slot, param in self.names.first(self.names.parameters)
            if self._registry.owner(param) is None
        }
        parts = [part.layout for part in self._parts if self._existing.has(part.layout.names)]
        self._at_rest = {name: (p, Sample([p])) for name, p in _named(parts) if is_frozen(p)}
        for _, sample in self._at_rest.values():
            sample.take()
        names = self._existing.take(mine)
        self._registry.own(self.group, ((name, mine[name]) for name in names))
        return names

    def _warn_not_trained(self) -> None:
        """Warn, at the first step, of what the group has trained and this worker does not have."""
        params = {name: self.names.parameters[name].value() for name in self._not_trained}
        self._not_trained = []
        self._warn_of(
            name
            for name, param in params.items()
            if param is not None and (is_frozen(param) or not self._is_stepped(param))
        )

    def _find_trained(self) -> None:
        """Warn, after one of the first steps, of what is frozen here and trained by others."""
        frozen = {name: sample for name, (p, sample) in self._at_rest.items() if is_frozen(p)}
        changed = [name for name, sample in frozen.items() if sample.changed()]
        if changed or self._steps >= BUFFERS_EVERY:
            self._at_rest = {}
        self._warn_of(changed)

    def _warn_of(self, names: Iterable[str]) -> None:
        if missing := list(names):
            some = ", ".join(map(repr, missing[:3])) + (", ..." if len(missing) > 3 else "")
            warn_user(
                f"rank {self._worker.rank} joined a run whose optimizer {self.group!r} has "
                f"trained {some} ({len(missing)} in all), and does not train it: it sends no "
                "gradients for it, and if it has not given it to the optimizer, its model keeps "
                "the values of now. That is right where all ranks have stopped training it. Else "
                "unfreeze or add it by what is true from then on, before the first step, as in "
                "`if worker.clock >= 100` or `if epoch >= 1`: a loop leaves out the epochs that "
                "are done"
            )

    # --- replaced parameters ----------------------------------------------------------------------

    def _find_replacements(self) -> None:
        """Find parameters that the model has replaced: these change without a step from now on.
        Tell of those that were added to it."""
        self.names.follow()
        if self._successor is None:
            for slot in self._replacements.look():
                self._changing.add(slot)
            self._additions.look()

    def _assign_replaced(self) -> None:
        """Give the servers the model's own values of parameters that were replaced."""
        for part in self._parts:
            places, values = [], []
            for place, (name, param) in enumerate(_named([part.layout])):
                slot = self._replacements.slots.get(name)
                value = slot.present() if slot is not None else None
                fits = value is not None and value.shape == param.shape
                places += [place] * fits
                source = value if fits and value is not None else param.detach()
                values.append(source.to("cpu", part.layout.kept_dtype).flatten())
            if places:
                flat = torch.cat(values).numpy()
                self._client.dense.store(part.block, VALUE, flat, active=tuple(places))

    # --- whose a parameter is ---------------------------------------------------------------------

    def settle(self) -> None:
        """Finish what a step has left outstanding: no other step follows."""

    def _takes(self, plans: Sequence[Plan[B]]) -> dict[Member, str]:
        """The other optimizers that had some of these parameters so far, with one's name.

        They are settled, so that the values here are final before they are read.

        Raises:
            ValueError: two parameters of this optimizer have memory in common.
        """
        mine = [*self.named(), *_named(plan.layout for plan in plans)]
        for first, second in sharing(mine):
            raise ValueError(
                f"parameters {mine[first][0]!r} and {mine[second][0]!r} share memory, and each "
                "would be updated by itself. Give the optimizer one of them; to tie modules, give "
                "both the same Parameter object"
            )
        sharers: dict[Member, str] = {}
        for other in sorted(self._registry.optimizers, key=lambda each: each.group):
            if other is self or other.is_taken_over:
                continue
            theirs = other.named()
            for first, second in sharing([*theirs, *mine]):
                if first < len(theirs) <= second:
                    sharers[other] = theirs[first][0]
        for other in sharers:
            with self._worker.course.take_over():
                other.settle()
        return sharers

    def _take_over(self, sharers: Mapping[Member, str]) -> None:
        """Stop the other optimizers: their values would overwrite this one's."""
        for other, name in sharers.items():
            other.hand_over(name, self._settings.name)
            self._worker.optimizers.replace(other.group)

    def regroup(self, groups: Sequence[ParamGroup]) -> None:
        """Follow what was edited in `param_groups`; called before they are used.

        Parameters that are in no group any more are not stepped, groups may change their order.

        Raises:
            RuntimeError: another optimizer has taken over a parameter. Nothing was sent.
            ValueError: a parameter came into a group otherwise than by `add_param_group`, or the
                groups of some that are stepped together are several now. Nothing was sent.
        """
        self._check_owner()
        if self._unserved:
            self._define_unfrozen(groups)
        if self._not_trained:
            self._warn_not_trained()
        if len(groups) == len(self._grouped):
            for group, before in zip(groups, self._grouped, strict=True):
                params = group["params"]
                if len(params) != len(before) or not all(map(is_, params, before)):
                    break
            else:
                return
        self._place(groups)
        self._grouped = [list(group["params"]) for group in groups]

    def _check_owner(self) -> None:
        if self._successor is not None:
            parameter, other = self._successor
            raise RuntimeError(
                f"optimizer {self._settings.name!r} steps no more: parameter {parameter!r} "
                f"was given to optimizer {other!r} after it, and each would overwrite the "
                "other's updates. Applied: no. To fix: give each parameter to one optimizer only"
            )

    def _place(self, groups: Sequence[ParamGroup]) -> None:
        """Find the group of each part anew; see `regroup`."""
        places = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        positions = []
        for part in self._parts:
            present = tuple(id(param) in places for param in part.layout.params)
            inside = {places.pop(id(p)) for p in part.layout.params if id(p) in places}
            if len(inside) > 1:
                names = ", ".join(part.layout.names)
                raise ValueError(
                    f"the parameters {names} were defined as one group and are in the groups "
                    f"{sorted(inside)} of optimizer {self._settings.name!r} now: those of one "
                    "group are stepped with one set of options. Applied: no. To fix: make the "
                    "groups before worker.optimizer(...), or move all of them"
                )
            positions.append((next(iter(inside), None), None if all(present) else present))
        for index, group in enumerate(groups):
            for place, param in enumerate(group["params"]):
                if id(param) in places and not (is_frozen(param) or self.tables.steps(param)):
                    name = self.names.of(param) or f"number {place}"
                    raise ValueError(
                        f"parameter {name} was put into group {index} of optimizer "
                        f"{self._settings.name!r} after worker.optimizer(...), and the servers do "
                        "not have it. Applied: no. To fix: optimizer.add_param_group(...), on all "
                        "ranks at the same point"
                    )
        for part, (at, each) in zip(self._parts, positions, strict=True):
            part.group, part.present = at, each
        self._keep_unserved(groups)

    # --- defining ---------------------------------------------------------------------------------

    @abstractmethod
    def _plan(self, index: int, group: ParamGroup) -> list[Plan[B]]:
        """The blocks that a parameter group becomes; raises for what is not supported."""

    def _plans(self, groups: Mapping[int, ParamGroup]) -> list[Plan[B]]:
        """The blocks that parameter groups become, by index of the group; raises as `_plan`."""
        self._existing.look()
        return [plan for index, group in groups.items() for plan in self._plan(index, group)]

    def _layouts(self, index: int, group: ParamGroup) -> list[Layout]:
        """What a parameter group has that is trained, or was before this worker came late, and is
        not served yet."""
        check_options(group)
        dense = [param for param in group["params"] if not isinstance(param, Rows)]
        names = [self.names.of_optimizer(index, place, each) for place, each in enumerate(dense)]
        served, there = self._served(), self._existing.within(names)
        left_out = {
            id(param)
            for name, param in zip(names, dense, strict=True)
            if id(param) in served or (is_frozen(param) and name not in there)
        }
        layouts = lay_out(self.names, index, dense, left_out)
        layouts = split_by_codec(layouts, self._push_codecs, self._pull_codecs)
        return self._existing.arrange(layouts, self._cut)

    def _cut(self, layout: Layout) -> Iterable[Layout]:
        """A layout as the blocks that it is to be defined in."""
        return (layout,)

    def _begin(self, plans: Sequence[Plan[B]], state: Mapping[Tensor, Any]) -> None:
        self._define(plans)

    def _own(self, groups: Sequence[ParamGroup]) -> Mapping[str, Tensor]:
        """Own what of the model this optimizer steps without a block of it."""
        return {}

    def _links(self, named: Mapping[str, Tensor], *, first: bool) -> Sequence[Link]:
        """What rank 0 tells readers with tensors that are defined; see `Registry.links`."""
        if self._worker.rank != 0:
            return ()
        return self._registry.links(self.group, self.names, named, first=first)

    def _define(self, plans: Sequence[Plan[B]]) -> list[B]:
        """Define these blocks on rank 0, or wait for it, and take their values; their parts."""
        if not plans:
            return []
        client, name, existing = self._client, self._settings.name, self._existing
        consistency = self._settings.consistency
        parts, first = list[B](), not self._parts
        links = self._links(dict(_named(plan.layout for plan in plans)), first=first)
        for layout, rule, part in plans:
            checks = existing.is_first(layout.names) or not existing.has(layout.names)
            if self._worker.rank == 0 and checks:
                block = client.define(
                    layout.values(),
                    rule=rule,
                    group=name,
                    consistency=consistency,
                    nth=existing.count,
                    aliases=self.names.aliases(layout.names),
                    links=links,
                    push=layout.push,
                    pull=layout.pull,
                )
                links = ()
            else:
                block = client.directory.await_block(
                    layout.shapes(),
                    dtype=layout.array_dtype,
                    rule=rule,
                    group=name,
                    consistency=consistency,
                    nth=existing.count,
                    push=layout.push,
                    pull=layout.pull,
                    half=layout.half,
                )
            existing.add(block)
            parts.append(part(block))
        # As the servers have them: on all ranks in one order, which own steps go by.
        self._parts = sorted([*self._parts, *parts], key=lambda each: each.block.id)
        self._blocks = tuple(part.block for part in self._parts)
        self._replacements.watch(_named(part.layout for part in self._parts))
        self._registry.own(name, _named(plan.layout for plan in plans))
        encodes = self._settings.push is not None or self._settings.pull is not None
        if first and encodes and self._worker.rank == 0:
            connection = client.connection
            again, local = connection.incarnation > 1, connection.exchange.shared
            lost_before = client.steps.resumed.get(name, 0) if again else 0
            words = in_words(name, self._blocks, local=local, lost_before=lost_before)
            write_line(words)
        client.enter(name)  # before the values are read: they stay present from then on
        self._pull(parts)
        return parts

    def _pull(self, parts: Sequence[B]) -> None:
        """Take the servers' present values."""
        blocks = [part.block for part in parts]
        ticket = self._client.dense.step(self._settings.name, (), pull=blocks, tick=False)
        try:
            values = ticket.result().values
            with torch.no_grad():
                for part in parts:
                    part.scatter(values[part.block.id])
        except BaseException:
            self._client.steps.forget(ticket)
            raise
        ticket.release()

    @property
    def may_come_again(self) -> bool:
        """Whether another incarnation of this rank may follow."""
        return self._client.connection.restarts

    def name_scheduler(self, key: str, scheduler: LRScheduler) -> None:
        """Have a scheduler come back; raises as `Schedules.name`."""
        self.schedules.name(key, scheduler)
        self.unnamed = False
        if not self._parts:
            self.schedules.save()

    # --- what other optimizers call ---------------------------------------------------------------

    def named(self) -> list[tuple[str, Tensor]]:
        """What its group has, by name."""
        return [*_named(part.layout for part in self._parts)]

    def hand_over(self, parameter: str, other: str) -> None:
        """Step no more: another optimizer was given a parameter."""
        self._successor = parameter, other

    # --- what `Worker.assign` calls ---------------------------------------------------------------

    @property
    def is_taken_over(self) -> bool:
        """Whether another optimizer has its parameters by now."""
        return self._successor is not None

    def present(self) -> list[Any]:
        """Copies of the model's present values, by block, as the servers keep them."""
        return [part.values() for part in self._parts]

    def store(self, values: Sequence[Any]) -> None:
        """Overwrite the servers' values with what `present` gave."""
        for part, each in zip(self._parts, values, strict=True):
            self._client.dense.store(part.block, VALUE, each)

    def take(self) -> None:
        """Take the servers' present values."""
        self._at_rest = {}
        if self._parts:
            self._pull(self._parts)

    # --- steps under way --------------------------------------------------------------------------

    def _numbered(self, ticket: Ticket) -> None:
        """A step is certain to be sent. What goes with it changes here and nowhere else: an
        interrupt later repeats and loses nothing, and one in here closes the client."""
        self._in_flight += [ticket]

    def _numbered_rows(self, ticket: Ticket) -> None:
        """Number the rows of a step that has what the tables have collected; see `_numbered`."""
        self.tables.drop()
        self._in_flight += [ticket]

    def _forget(self, keep: int = 0) -> None:
        """Leave steps to the client whose answers were not taken, but for the last so many."""
        while self._in_flight[keep:]:
            self._client.steps.forget(self._in_flight[0])
            del self._in_flight[0]

    def _take_oldest(self) -> None:
        """Wait for the answer to the oldest step under way, remember its outcome, and install
        its values."""
        ticket, *after = self._in_flight
        began = perf_counter()
        try:
            outcome = ticket.result()
        except ParamServeError:
            if ticket.done():  # it was refused, and is over
                del self._in_flight[0]
            raise
        waited_s = perf_counter() - began
        clock = self._client.steps.clocks.get(self._clocked, 0)
        for _ in after:
            clock -= 1
        version, staleness = outcome.version, outcome.staleness
        self.history.add(StepRecord(clock, version, staleness, waited_s, outcome.skipped))
        self._skipped = self._skipped + 1 if outcome.skipped else 0
        if self._skipped == SKIPPED_MAX:
            self._warn_of_nonfinite()
        self._install(outcome)
        ticket.release()
        del self._in_flight[0]
        if self._at_rest:
            self._find_trained()

    def _warn_of_nonfinite(self) -> None:
        """Tell of steps in a row that were skipped for NaN or Inf: once for all ranks, where each
        of them costs all ranks their clock."""
        name, rank = self._clocked, self._worker.rank
        policy = self._client.steps.terms(name).policy
        if policy is None or policy.on_nonfinite == "refuse":
            return
        late = policy.collects and policy.partial
        late = late or getattr(policy, "drop_after", None) is not None or bool(self.tables.groups)
        shared = policy.collects and not policy.skips_alone
        if late or (shared and rank):
            return
        whose = "of some rank" if shared else f"of rank {rank}"
        warn_user(
            f"the last {SKIPPED_MAX} steps of group {name!r} were left out, because the gradients "
            f"{whose} hold NaN or Inf, and {type(policy).__name__}(on_nonfinite='skip') leaves "
            "them out. To fix: lower the learning rate, or clip; on_nonfinite='refuse' names the "
            "tensor"
        )

    def _install(self, outcome: Outcome) -> None:
        """Copy a step's values into the parameters."""
        for part in self._parts:
            part.scatter(outcome.values[part.block.id])

    def _weight(self) -> float:
        """Weight of this step; asked before the client's step, which ends the loader's count."""
        return self._settings.weight_now(self._worker.leases.step_samples)

    def _warn_of_repeats(self) -> None:
        """Warn of repeated steps, before the first step of a worker that was started again."""
        self._registry.begins = False
        self._worker.notices.warn_of_repeated_steps(self._worker.optimizers.groups[0])

    def _count_step(self) -> None:
        """A step was made: on rank 0 assign the buffers, if it is time, and on all ranks those that
        a mean is made of. Where another incarnation may go on from these, it always is."""
        self._steps += 1
        assigned = self._client.connection.restarts and not self._changing.saves_buffers
        due = self._steps % BUFFERS_EVERY == 0
        first = self._steps == 1
        if due or first:
            self._find_replacements()
        if first and self._worker.rank == 0:
            self._untrained.check_shapes()
        if due or assigned:
            if self._worker.rank == 0:
                self._assign_changing(everything=False)
            self._untrained.tell_own(last=False)
        if due:
            self._changing.warn(assigned=self._worker.rank == 0)

    def _assign_changing(self, *, everything: bool) -> None:
        """Give the servers what changes without steps: buffers and parameters; at the end all that
        no optimizer has."""
        slots = self._changing.look()
        if self._settings.buffers != "local":
            self._untrained.keep(slots)
        self._untrained.assign(everything=everything, changing=self._changing.names)
        self._assign_replaced()
