"""What the clients of a simulated cluster train: blocks, their gradients, and what values say.

A run has one `Workload`. It is composed of `Parameters` of one or more kinds: tensors whose values
tell which pushes are in them (`Counting`), and whatever stands beside these or in place of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paramserve.client.links import Slot
from paramserve.client.step_parts import BlockPush, StepOptions, StepParts
from paramserve.client.ticket import Outcome
from paramserve.compiling import load_kernels
from paramserve.consistency import registry as policies
from paramserve.core.block import ShardBlock
from paramserve.core.partition import Block
from paramserve.core.table.block import KeyedBlock
from paramserve.messages import BlockSpec, Piece, PlaceBlock, ShardRequest
from paramserve.rules import Add, Rule
from paramserve.rules.registry import spec
from paramserve_testing.history import Call, Row

if TYPE_CHECKING:
    from paramserve_testing.client import SimulatedClient
    from paramserve_testing.scenario import Scenario
    from paramserve_testing.scripts import Script
    from paramserve_testing.simulated import SimulatedCluster

Array = npt.NDArray[Any]

WAIT_S = 60.0
"""A define waits this long for another client's define."""


class Pushed(NamedTuple):
    """Which push of which client a gradient belongs to."""

    writer: int
    rank: int
    number: int
    clock: int


class GroupStep(NamedTuple):
    """What one step does with one group, of which the history is told when it is sent."""

    what: str
    """A step or a pull, as an error names it."""
    group: str
    push: Sequence[Any]
    pull: Sequence[Any]
    which: Pushed | None
    """The push that its gradients are of; None: it has no gradients."""
    options: StepOptions
    spoiled: bool
    """One element of the gradient, on one shard, is NaN."""
    wrong: bool
    """One shard refuses the step, whatever its gradient."""
    samples: tuple[int, int] | None
    """[start, stop) of those that its gradients come from."""


class Setting(NamedTuple):
    """What a workload is made for.

    Attributes:
        seed, scenario: of the run.
        writers: processes of clients that there may be in it.
    """

    seed: int
    scenario: Scenario
    writers: int


class Parameters:
    """Parameters of one kind, in one group. Subclass it and write what differs from tensors that
    say nothing and are neither pushed to nor read.

    Attributes:
        group: the group's name.
        blocks: by name, the pieces of each block, in the order in which clients define them.
        dtype, rule: how they are defined.
        keyed: whether they are a table.
    """

    group: str = "default"
    blocks: Mapping[str, tuple[Piece, ...]] = MappingProxyType({})
    dtype: np.dtype[Any] = np.dtype(np.float32)
    rule: Rule = Add()
    keyed: bool = False

    def prepare(self) -> None:
        """Load the kernels; after the first time this costs next to nothing."""
        if self.blocks:
            load_kernels(self.dtype, self.rule)

    # --- clients ------------------------------------------------------------------------

    def enter(self, client: SimulatedClient) -> None:
        """A client has joined and made its `Steps`."""

    def placing(self, client: SimulatedClient, name: str, placing: PlaceBlock) -> PlaceBlock:
        """How a client defines a block of this kind, from how a plain one would be."""
        return placing

    def start(self, slot: Array, block: Block) -> None:
        """Write a block's first values: [size], a whole block."""
        slot.fill(0.0)

    def first_values(self, client: SimulatedClient, block: Block) -> Sequence[Slot]:
        """A block's first values; none: its rows are created by pushes."""
        slot = client.exchange.take(block.nbytes)
        self.start(slot.array(block), block)
        return [slot]

    def prepare_calls(self, client: SimulatedClient) -> None:
        """A client has computed, and makes its next calls."""

    def record_requests(
        self, client: SimulatedClient, requests: Sequence[ShardRequest | None]
    ) -> None:
        """A client sends requests, one to each shard, or reads to some."""

    def every(self, client: SimulatedClient) -> list[Any]:
        """What a client chooses from what it pushes to and reads: blocks, or what has a number
        `id` and a `group_name`, too."""
        return []

    def fill(self, slot: Array, block: Block, push: Pushed) -> tuple[int, ...] | None:
        """Write the gradient of one push for one block, [size], and return its active pieces."""
        raise NotImplementedError

    def capture(
        self, client: SimulatedClient, block: Block, push: Pushed
    ) -> tuple[BlockPush, Slot]:
        """The gradient of one push for one block, in a client's memory."""
        slot = client.exchange.take(block.nbytes)
        values = slot.array(block)
        return BlockPush(block, values, self.fill(values, block, push)), slot

    def add(self, client: SimulatedClient, step: GroupStep, parts: StepParts) -> StepParts:
        """What a client sends of a step, with the gradients and reads of this kind."""
        return parts

    def record(
        self,
        client: SimulatedClient,
        call: Call,
        outcome: Outcome,
        pull: Sequence[Any],
        parts: StepParts,
    ) -> None:
        """Tell a call of the history what it has read."""

    # --- shards -------------------------------------------------------------------------

    def watch(self, shard: int, block: ShardBlock | KeyedBlock) -> None:
        """A shard has made its part of a block, which is not defined yet."""

    def rows(
        self, block: ShardBlock | KeyedBlock, shard: int, shards: int
    ) -> list[tuple[int, Row]]:
        """What the part of a block on one of so many shards says, with the number by which calls
        name the block."""
        return []

    def masks(
        self, block: ShardBlock | KeyedBlock, shard: int, shards: int
    ) -> list[tuple[int, tuple[int, ...]]]:
        """Masks by writer of rows that could be read at a glance; see `rows`."""
        return []

    def bytes_of(self, block: ShardBlock | KeyedBlock) -> bytes:
        """All values of a shard's part of a block."""
        assert isinstance(block, ShardBlock)
        return block.value.tobytes()

    # --- the end ------------------------------------------------------------------------

    def judge(self, cluster: SimulatedCluster) -> Mapping[str, Sequence[str]]:
        """What is wrong after a run, by the name of the invariant that does not hold."""
        return {}


class Workload:
    """All that the clients of one run train.

    Args:
        parameters: those of the first group come first; of one group, those whose blocks clients
            choose before those that go with these.
        script: of its workers, where `Scenario` does not say which.
    """

    def __init__(self, *parameters: Parameters, script: type[Script] | None = None) -> None:
        self.parameters = parameters
        self.script = script
        self.blocks = {n: pieces for each in parameters for n, pieces in each.blocks.items()}
        """Blocks by name, all that are defined, in this order."""
        self.groups = tuple(dict.fromkeys(each.group for each in parameters))
        self._owners = {n: each for each in parameters for n in each.blocks}
        self._names = {pieces[0].name: name for name, pieces in self.blocks.items()}
        for each in parameters:
            each.prepare()

    @property
    def group(self) -> str:
        """The first group, whose clocks are those of the clients."""
        return self.groups[0]

    @property
    def rules(self) -> dict[str, type[Rule]]:
        """Rules of the blocks by name: shards are started with them."""
        return {type(each.rule).name: type(each.rule) for each in self.parameters}

    @property
    def in_order(self) -> list[str]:
        """The groups, in the order of their parts in a call: tables first."""
        keyed = {each.group for each in self.parameters if each.keyed}
        return sorted(self.groups, key=lambda group: group not in keyed)

    def owner(self, spec: BlockSpec) -> Parameters:
        """The kind that a block is of."""
        return self._owners[self._names[spec.pieces[0].name]]

    def placing(self, client: SimulatedClient, name: str) -> PlaceBlock:
        """The call by which a client defines a block."""
        owner, second = self._owners[name], client.cluster.scenario.second
        own = None if owner.group == self.group or second is None else policies.spec(second)
        rule, pieces = spec(owner.rule), owner.blocks[name]
        plain = PlaceBlock(
            0, owner.group, owner.dtype.name, rule, pieces, True, WAIT_S, consistency=own
        )
        return owner.placing(client, name, plain)

    def every(self, client: SimulatedClient) -> list[Any]:
        """What a client chooses from what it pushes to and reads."""
        return [thing for each in self.parameters for thing in each.every(client)]

    def parts(self, client: SimulatedClient, step: GroupStep) -> StepParts:
        """What a client sends of a step."""
        parts = StepParts(step.what, client.block_of(step.group), options=step.options)
        for each in self.parameters:
            if each.group == step.group:
                parts = each.add(client, step, parts)
        return parts

    def record(
        self,
        client: SimulatedClient,
        call: Call,
        outcome: Outcome,
        pull: Sequence[Any],
        parts: StepParts,
    ) -> None:
        """Tell a call of the history what it has read of the group of `parts`."""
        for each in self.parameters:
            if each.group == parts.block.group_name:
                each.record(client, call, outcome, pull, parts)

    def record_requests(
        self, client: SimulatedClient, requests: Sequence[ShardRequest | None]
    ) -> None:
        """A client sends requests, one to each shard, or reads to some."""
        for each in self.parameters:
            each.record_requests(client, requests)

    def judge(self, cluster: SimulatedCluster) -> dict[str, Sequence[str]]:
        """What is wrong after a run, by invariant."""
        found: dict[str, Sequence[str]] = {}
        for each in self.parameters:
            found |= {name: texts for name, texts in each.judge(cluster).items() if texts}
        return found


WorkloadFactory = Callable[[Setting], Workload]
"""Makes the workload of one run."""
