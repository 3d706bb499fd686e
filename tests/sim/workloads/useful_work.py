"""How much of what workers with own steps can do reaches the servers, while some are slow or die.

A simulated cluster under `LocalSteps` or `AsyncLocalSteps`: the client's steps, sessions and
codecs, the shards, the coordinator and the policies are those that ship, on a virtual clock and on
links with a bandwidth. Own steps take virtual time; so do frames on links. What computing on
servers and encoding takes is left out.

The model stands for a larger one: it has 1 / `Work.scale` of its values, and each byte of a payload
takes as long as `scale` bytes. The values count own steps instead of learning something: each
exchange adds to the element of its writer how many own steps are behind it, so that what the
servers hold in the end says whose steps have reached them. A step counts once for each part of the
model that it has changed, by the part's size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import structs
from tests.sim.workloads.bandwidth import SharedLinks
from tests.sim.workloads.own_steps import OwnSteps

from paramserve.client.links import Slot
from paramserve.client.step_parts import BlockPush, StepParts
from paramserve.codecs.registry import spec
from paramserve.compiling import load_codecs
from paramserve.config import Deadlines
from paramserve.consistency.built_in import AsyncLocalSteps, LocalSteps
from paramserve.core.block import ShardBlock
from paramserve.core.partition import PIECE_BYTES_MIN, Block
from paramserve.messages import Piece, PlaceBlock
from paramserve.rules import Add, Hyper, PushInfo, Run
from paramserve.rules.compiled import compiled
from paramserve_testing.client import SimulatedClient
from paramserve_testing.history import Call, History
from paramserve_testing.network import Faults
from paramserve_testing.scenario import Scenario
from paramserve_testing.scripts import Script
from paramserve_testing.simulated import SimulatedCluster
from paramserve_testing.workload import GroupStep, Parameters, Pushed, Workload

Array = npt.NDArray[Any]

WRITERS_MAX = 64
"""Processes of workers in one run: each has an element of its own in the first block of a codec."""
LOOKS_S = 0.1
"""How often it is looked whether a worker is to die."""
ENDS_S = 600.0
"""Within this after `Work.lasts_s` all workers have ended."""
DELAY_S = 0.02
"""One way through the network is 0 to twice this."""


@dataclass(frozen=True)
class Work:
    """What a run of `SimulatedWork` is made of, besides the policy and the seed.

    Attributes:
        workers, servers: of the cluster.
        step_s: of a worker that is not slow, one own step.
        slow: the last rank's own steps take this many times as long.
        model_bytes: in float32.
        link_bytes_s: of each worker's and each server's link, in each direction.
        deaths_every: after each so many outer steps a worker dies, drawn from all that live; an
            outer step is one change of the whole model's values: a clock of `LocalSteps` (of all
            its fragments), an exchange of any worker under `AsyncLocalSteps`. 0: none dies.
        restart_s: until a worker that has died is there again.
        restarts: whether clocks wait for a worker that has died, as with `ps.Restart()`.
        lasts_s: the workers then exchange what they have, and end.
    """

    workers: int = 8
    servers: int = 4
    step_s: float = 0.1
    slow: float = 5.0
    model_bytes: float = 20e6
    link_bytes_s: float = 100e6 / 8
    deaths_every: int = 50
    restart_s: float = 10.0
    restarts: bool = True
    lasts_s: float = 1800.0


class Useful(NamedTuple):
    """Outcomes of the own steps that all workers could have made while they were alive.

    All but `deaths` and `outer_steps` are parts of 1, and the first four together are 1.
    """

    useful: float
    """Their change has reached the servers and was applied."""
    waited: float
    """Not made: the worker waited for an exchange, or for the first values."""
    dropped: float
    """The servers have left them out: they came after their clock's decision."""
    lost: float
    """A worker died before it had exchanged them, or in the middle of one."""
    deaths: int
    outer_steps: int


class AddSteps(Add):
    """value += gradient, whatever the policy multiplies a gradient by."""

    name: ClassVar[str] = "AddSteps"

    def apply(
        self,
        value: Array,
        gradient: Array,
        state: tuple[Array, ...],
        hyper: Hyper,
        runs: Sequence[Run],
        push: PushInfo,
        out: Array | None = None,
    ) -> None:
        super().apply(value, gradient, state, hyper, runs, push._replace(scale=1.0), out)


class StepsCounting(Parameters):
    """A model whose values count own steps, in a block for each fragment. Each block is split over
    all servers, as a large one is.

    Element w of each shard's part of a block is the count of writer w.
    """

    rule = AddSteps()

    def __init__(self, policy: LocalSteps | AsyncLocalSteps, servers: int) -> None:
        fragments = policy.fragments if isinstance(policy, LocalSteps) else 1
        size = servers * PIECE_BYTES_MIN // 4
        self.blocks = {f"part.{n}": (Piece(f"part.{n}", (size,)),) for n in range(fragments)}
        self.values = fragments * size
        self._policy = policy
        self._behind: dict[tuple[int, int], int] = {}
        """Own steps behind the next exchange, by writer and block."""

    def prepare(self) -> None:
        load_codecs()
        compiled().prepare(self.dtype)
        self.rule.prepare(self.dtype)

    def fill(self, slot: Array, block: Block, push: Pushed) -> None:
        slot.fill(0.0)
        for shard in range(len(block.spec.cuts) - 1):
            low, high = block.range(shard)
            if high > low:
                slot[low + push.writer] = self._behind[push.writer, block.id]

    def placing(self, client: SimulatedClient, name: str, placing: PlaceBlock) -> PlaceBlock:
        push, pull = self._policy.push, self._policy.pull
        return structs.replace(
            placing,
            push=None if push is None else spec(push),
            pull=None if pull is None else spec(pull),
        )

    def every(self, client: SimulatedClient) -> list[Any]:
        return list(client.blocks.values())

    def add(self, client: SimulatedClient, step: GroupStep, parts: StepParts) -> StepParts:
        script = client.script
        assert isinstance(script, Working)
        script.in_exchange = 0.0
        for block in step.push:
            behind = script.behind[script.fragment_of(block)]
            self._behind[client.writer, block.id] = behind
            script.in_exchange += behind * block.size / self.values
        pushes = list[tuple[BlockPush, Slot]]()
        if step.which is not None:
            pushes = [self.capture(client, block, step.which) for block in step.push]
        return structs.replace(parts, pushes=pushes, pull=step.pull)


class Working(OwnSteps):
    """Own steps until the run's time is over.

    Attributes:
        in_exchange: own steps whose changes are in its exchange.
        dropped: own steps that it was told to be left out.
        busy_s: how long it has computed.
    """

    cluster: SimulatedWork

    def __init__(self, client: SimulatedClient) -> None:
        super().__init__(client)
        self.dropped = self.in_exchange = 0.0
        self._computing_since = 0.0
        self.busy_s = 0.0

    @property
    def step_s(self) -> float:
        work = self.cluster.work
        return work.step_s * (work.slow if self.client.rank == work.workers - 1 else 1.0)

    @property
    def computing_s(self) -> float:
        """How long it has been making the own steps that it is at."""
        return self.cluster.clock.now - self._computing_since if self._making else 0.0

    def fragment(self, number: int) -> list[Any]:
        return [self.client.blocks[f"part.{number}"]]

    def steps_until(self, goal: int) -> int:
        left_s = max(0.0, self.cluster.work.lasts_s - self.cluster.clock.now)
        return min(super().steps_until(goal), int(left_s / self.step_s))

    def pause_s(self) -> float:
        self._computing_since = self.cluster.clock.now
        return super().pause_s()

    def next(self) -> bool:
        self.busy_s += self._making * self.step_s
        if self.cluster.clock.now + self.step_s > self.cluster.work.lasts_s:
            self.client.left = 0
        return super().next()

    def _exchanged(self, call: Call, error: Any) -> None:
        if call.skipped or error is not None:
            self.dropped += self.in_exchange
        super()._exchanged(call, error)


class SimulatedWork(SimulatedCluster):
    """A simulated cluster whose workers make own steps, while one is slow and some die.

    Args:
        policy: the codecs are its own, `push` and `pull`.
    """

    worker_script = Working
    client_deadlines = server_deadlines = coordinator_deadlines = Deadlines()

    def __init__(
        self,
        seed: int,
        policy: LocalSteps | AsyncLocalSteps,
        work: Work | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.work = work if work is not None else Work()
        self.policy = policy
        self.deaths = 0
        self._lives: dict[int, tuple[float, float]] = {}
        """Begin and end of each writer."""
        model = StepsCounting(policy, self.work.servers)
        self._chance = Random(f"deaths {seed}")
        scenario = Scenario(
            servers=self.work.servers,
            workers=self.work.workers,
            steps=1 << 30,
            consistency=policy,
            links="tcp",
            restarts=self.work.restarts,
            evaluates=False,
            faults=Faults(delay_s=DELAY_S),
            others=(),
            workload=lambda setting: Workload(model),
        )
        super().__init__(seed, scenario, log)
        self.clock.events_max = None
        scale = self.work.model_bytes / (4 * model.values)
        self.network.links = SharedLinks(self.clock, lambda place: self.work.link_bytes_s, scale)

    def _start_clients(self) -> None:
        for rank in range(self.work.workers):
            self.start_worker(self.network.delay_s(), rank)

    # --- deaths -------------------------------------------------------------------------

    @property
    def outer_steps(self) -> int:
        """Changes of the whole model's values so far."""
        groups = self.servers[0].shard.groups.values()
        return sum(each.state.version for each in groups) // len(self.workload.blocks)

    def _look(self) -> None:
        """Let a worker die where it is time, somewhere within its next own steps."""
        every, now = self.work.deaths_every, self.clock.now
        if every and self.outer_steps // every > self.deaths:
            self.deaths += 1
            within_s = self.policy.every * self.work.step_s
            self.clock.after(self._chance.random() * within_s, self._let_die)
        if now + LOOKS_S < self.work.lasts_s:
            self.clock.after(LOOKS_S, self._look)

    def _let_die(self) -> None:
        living = [each for each in self.clients if each.alive]
        if living and self.clock.now < self.work.lasts_s:
            self.kill(self._chance.choice(living))

    def _start(self, script: type[Script], rank: int) -> None:
        super()._start(script, rank)
        self._lives[len(self.clients) - 1] = (self.clock.now, self.clock.now)

    def ended(self, client: SimulatedClient) -> None:
        assert isinstance(client.script, Working)
        self._lives[client.writer] = (self._lives[client.writer][0], self.clock.now)
        client.script.busy_s += client.script.computing_s
        if not client.finished and self.clock.now < self.work.lasts_s:
            self.start_worker(self.work.restart_s, client.rank)
        if self.done:
            self.clock.stop()

    # --- a run --------------------------------------------------------------------------

    def _run(self) -> History:
        self._look()
        self.clock.run(self.work.lasts_s)
        self.clock.run(self.clock.now + ENDS_S)
        self.recorder.finish()
        for client in self.clients:
            client.end_fiber()
        return self.history

    def useful(self) -> Useful:
        """Use of the workers' time."""
        assert not self.history.unfinished, self.history.unfinished[:3]
        assert not self.history.raised, self.history.raised[:3]
        possible = busy = applied = dropped = 0.0
        reached = self._reached()
        for client in self.clients:
            script = client.script
            assert isinstance(script, Working)
            began, ended = self._lives[client.writer]
            possible += (ended - began) / script.step_s
            busy += script.busy_s / script.step_s
            applied += reached[client.writer]
            dropped += script.dropped
        return Useful(
            float(applied / possible),
            1.0 - busy / possible,
            dropped / possible,
            float((busy - applied - dropped) / possible),
            sum(client.dead for client in self.clients),
            self.outer_steps,
        )

    def _reached(self) -> Array:
        """Own steps, by writer, whose change the servers hold."""
        found, values = np.zeros(WRITERS_MAX), 0
        for server in self.servers:
            for block in server.shard.blocks.values():
                assert isinstance(block, ShardBlock)
                if block.size:
                    found += block.value[:WRITERS_MAX].astype(np.float64) * block.size
                    values += block.size
        return found / values
