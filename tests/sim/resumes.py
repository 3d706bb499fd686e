"""Whole clusters that are lost, and go on from a checkpoint that a crash of the disk has left."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

from msgspec import structs
from tests.disk import SECTOR_BYTES, Disk, Fail, Image
from tests.sim.policies import POLICIES
from tests.sim.workloads.tables import KEYS, RowKey, table, table_beside_tensors

from paramserve.checkpoint.folder import Folder
from paramserve.checkpoint.manifest import Manifest
from paramserve.config import CheckpointPlan
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, BoundedStaleness, Buffered, Sync
from paramserve.consistency.registry import spec as policy_spec
from paramserve.core.checkpointing import FolderMade
from paramserve.core.coordination import CoordinatorEvent, Decided, FilesWorked, Noticed
from paramserve.messages import BeginCheckpoint, CutTaken
from paramserve_testing import Faults, Scenario, Violation
from paramserve_testing.checkers import SHOWN_MAX, part_name, samples_are_used
from paramserve_testing.client import SimulatedClient
from paramserve_testing.history import Call, History, Part
from paramserve_testing.policy_checkers import may_leave_out
from paramserve_testing.scripts import LeasingScript, Script, WorkerScript
from paramserve_testing.server import SimulatedCoordinator, SimulatedDriver, SimulatedServer
from paramserve_testing.simulated import RESTART_S, SimulatedCluster

EVERY_S = 0.01
"""Between two checkpoints: a run takes some hundred milliseconds."""
CRASH_S = 0.15
"""Everything is lost within this time."""
FOR_EVER_S = 1e9


FAULTS = Faults(slow=0.1, cut=0.02, lose=0.02, duplicate=0.05, kill=0.02)
NO_KILLS = replace(FAULTS, kill=0.0)


class Times(NamedTuple):
    """The orders between which the cut of a checkpoint was taken."""

    after: int
    before: int


MORE = 4
"""Writers that come after everything was lost, besides those that may come in every run."""


class SimulatedResumes(SimulatedCluster):
    """A simulated cluster that writes checkpoints all the time, is lost once, and goes on.

    Attributes:
        fell_to: the checkpoint that it has gone on from; None: from the beginning.
        lost: writers of before.
        kept: by group and part, what its values held when it went on.
        ahead: (group, rank) where a step of a rank was in the values, of a call that was not over.
    """

    writers_more = MORE
    was_buffered = False
    same_servers = False
    """Whether it goes on with as many servers."""
    crash_s: float = CRASH_S
    """It is lost within this time."""
    then: Policy | None = None
    """The policy that it goes on with; None: the one of before."""
    fail: Fail = staticmethod(lambda number, method: None)
    """Which calls of its first disk fail."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.disk: Disk = Disk(fail=self.fail)
        self.checkpoint_plan = CheckpointPlan(
            folder="disk", run="simulated", every_s=EVERY_S, keep=2
        )
        self.crashed = False
        self.fell_to: Manifest | None = None
        self.lost: set[int] = set()
        self.kept: dict[tuple[str, Part], tuple[int, ...]] = {}
        self.ahead: set[tuple[str, int]] = set()
        self._begun = self._taken = 0
        self.times: dict[str, Times] = {}
        """Times by checkpoint."""
        self.committed: list[str] = []
        """Checkpoints that were reported to the servers as committed."""
        self.failed = 0
        """How many failed."""
        self.calls_before = 0
        """Calls of the disk before the first checkpoint."""
        super().__init__(*arguments, **options)
        self._watch(self.coordinator.coordination)
        self._dice = Random(f"resume {self.seed}")
        self.clock.after(self._dice.random() * self.crash_s, self._crash)

    def _watch(self, one: Any) -> None:
        """Note when the first coordinator has cuts taken."""
        step = one.step

        def watched(event: CoordinatorEvent, now: float) -> Decided:
            if isinstance(event, Noticed) and isinstance(event.message, CutTaken):
                self._taken = self.history.next()
            if isinstance(event, FilesWorked) and isinstance(event.event, FolderMade):
                self.times[event.event.name] = Times(self._begun, self._taken)
            decided: Decided = step(event, now)
            if any(isinstance(notice, BeginCheckpoint) for _, notice in decided.notices):
                self._begun = self.history.next()
                self.calls_before = self.calls_before or self.disk.calls
            for report in decided.checkpoints:
                if report.failed > self.failed:
                    self.failed = report.failed
                else:
                    self.committed.append(report.name)
            return decided

        one.step = watched

    # --- the loss --------------------------------------------------------------------------------

    def _crash(self) -> None:
        """Every process ends at once, and the disk loses a part of what was not synced."""
        if self.done:
            return
        self.crashed = True
        self.network.note("everything is lost")
        self.lost = {client.writer for client in self.clients}
        for client in self.clients:
            if client.alive:
                client.kill()
                self.recorder.ended(client)
                self.history.ended.add(client.writer)
        for process in (self.coordinator, *self.servers):
            process.loop.freeze(FOR_EVER_S)
        self.disk = Disk(self._left())
        _, self.fell_to, refused = Folder(self.disk).first_valid(lambda saved: saved.verify())
        for error in refused:
            raise Violation(f"a crash has left a damaged checkpoint: {error}\nagain: {self.again}")
        name = self.fell_to.name if self.fell_to is not None else ""
        self._check_newest(name)
        self.checkpoint_plan = structs.replace(self.checkpoint_plan, resume=name)
        servers, workers = self._dice.choice((1, 2, 2, 3)), self._dice.choice((1, 2, 2, 3))
        servers = self.scenario.servers if self.same_servers else servers
        self.scenario = replace(self.scenario, servers=servers, workers=workers)
        if self.then is not None:
            self.was_buffered = self._buffers
            self.scenario = replace(self.scenario, consistency=self.then)
            self.described = policy_spec(self.then)
        self.wanted = self.least_wanted = workers
        self.blocks.clear()
        self.coordinator = SimulatedCoordinator(self)
        self.servers = [SimulatedServer(self, k) for k in range(self.scenario.servers)]
        self.driver = SimulatedDriver(self)
        if self.fell_to is not None:
            self.kept = dict(self._masks())
            states = [each.state for one in self.servers for each in one.shard.groups.values()]
            self.ahead = {(state.name, rank) for state in states for rank in state.already_applied}
        for rank in range(self.scenario.workers):
            self.start_worker(self.random.random() * RESTART_S, rank)
        self.start(self.random.random() * RESTART_S, self.reader_script, -1)

    def _left(self) -> Image:
        """What the crash leaves on the disk."""
        done, kept = len(self.disk.log), dict[int, int | None]()
        for number in self.disk.unsynced(done):
            if self._dice.random() < 0.5:
                torn = self._dice.random() < 0.5
                sectors = len(self.disk.log[number].data) // SECTOR_BYTES
                kept[number] = self._dice.randrange(sectors + 1) * SECTOR_BYTES if torn else None
        return self.disk.crashed(done, kept)

    def _check_newest(self, name: str) -> None:
        """The checkpoint after a crash is not older than the last one that was told of."""
        order = list(self.times)
        last = self.committed[-1] if self.committed else ""
        if last and (not name or order.index(name) < order.index(last)):
            raise Violation(f"{last} was committed, the crash left {name!r}\nagain: {self.again}")

    def _masks(self) -> Any:
        for server in self.servers:
            for _, block in sorted(server.shard.blocks.items()):
                shards = self.scenario.servers
                for number, row in self.workload.owner(block.spec).rows(
                    block, server.number, shards
                ):
                    yield (block.spec.group_name, Part(number, server.number)), row.pushes

    @property
    def _buffers(self) -> bool:
        """Whether a push may be in no values for a while, and in those of the shards one by one."""
        return self.was_buffered or isinstance(self.scenario.consistency, Buffered)

    @property
    def _lost_alone(self) -> set[int]:
        """Ranks of workers that ended besides the loss of everything."""
        ended = self.history.ended - self.lost
        first = Counter(self.clients[writer].rank for writer in self.lost)
        again = {rank for rank, writers in first.items() if writers > 1}
        return again | {self.clients[writer].rank for writer in ended}

    # --- what has to hold ------------------------------------------------------------------------

    def check(self) -> None:
        """Require that the checkpoint has of each call all or nothing, all that was acknowledged
        before it and nothing of after it; and that in the end all of it is there, no more of what
        was before, and all of what was acknowledged since."""
        wrong = [*self.history.unfinished, *self.history.raised]
        for group, history in self.histories.items():
            wrong += self._wrong_in_cut(group, history) + self._wrong_in_the_end(group, history)
        if self.crashed:
            wrong += samples_are_used(self.history)
        if wrong:
            shown = "\n".join(wrong[:SHOWN_MAX])
            raise Violation(f"{len(wrong)} findings:\n{shown}\nagain: {self.again}")

    def _wrong_in_cut(self, group: str, history: History) -> list[str]:
        if self.fell_to is None:
            return []
        wrong, times = [], self.times[self.fell_to.name]
        held = {part: masks for (name, part), masks in self.kept.items() if name == group}
        if self._buffers:  # what a buffer held is in the values by now
            held = {part: row.pushes for part, row in history.final.items()}
        torn = {int(each.split()[-1]) for each in self.fell_to.cut.torn}
        torn_writers = {writer for writer in self.lost if self.clients[writer].id in torn}
        for call in history.calls:
            if call.push is None or call.writer not in self.lost:
                continue
            there = {
                bool(masks[call.writer] >> call.push & 1)
                for part, masks in held.items()
                if part.block in call.blocks
            }
            shards = range(len(call.bases))
            left_out = any(may_leave_out(history, call, shard) for shard in shards)
            who = f"{self.fell_to.name}: push {call.push} of writer {call.writer} to {group}"
            if len(there) > 1 and not (left_out or call.writer in torn_writers):
                wrong.append(f"{who} is in some parts")
            known = call.answered is not None and call.answered < times.after
            if known and call.acknowledged and there == {False}:
                wrong.append(f"{who} was acknowledged before the cut, and is not in it")
            if call.issued > times.before and True in there:
                wrong.append(f"{who} was sent after the cut, and is in it")
        return wrong

    def _wrong_in_the_end(self, group: str, history: History) -> list[str]:
        wrong = []
        for place, row in history.final.items():
            where = f"{group}, {part_name(place)}"
            masks = self.kept.get((group, place), (0,) * len(row.pushes))
            for writer in self.lost:
                gone = masks[writer] & ~row.pushes[writer]
                if gone or (row.pushes[writer] != masks[writer] and not self._buffers):
                    wrong.append(
                        f"{where} has {row.pushes[writer]:b} of writer {writer} in the end, and "
                        f"had {masks[writer]:b}"
                    )
            if row.counts != tuple(each.bit_count() for each in row.pushes):
                wrong.append(f"{where}: counts {row.counts}, pushes {row.pushes}")
            for call in history.calls:
                if call.push is None or call.writer in self.lost or place.block not in call.blocks:
                    continue
                there = bool(row.pushes[call.writer] >> call.push & 1)
                again = (group, call.rank) in self.ahead and self._is_first(history, call)
                if call.acknowledged_on(place.shard) and not (there or again):
                    wrong.append(f"{where}: push {call.push} of writer {call.writer} is lost")
                if call.rejected_on(place.shard) and there:
                    wrong.append(f"{where}: push {call.push} of writer {call.writer} was refused")
        return wrong

    def _is_first(self, history: History, call: Call) -> bool:
        """Whether no step of a rank since everything was lost was answered before this one was
        sent."""
        return not any(
            each.rank == call.rank
            and each.writer not in self.lost
            and (each.push is not None or each.tick)
            and each.answered is not None
            and each.answered < call.issued
            for each in history.calls
        )


def all_of(script: Script) -> list[Any]:
    """All tensors, and all keys of the table."""
    dense = [each for each in script.client.blocks.values() if each.table is None]
    return [*dense, *(RowKey(number) for number in range(KEYS.size))]


class BatchScript(WorkerScript):
    """Steps tensors and all rows in one call for each batch of its rank, as a training function
    does: it goes on with the batch of its clock."""

    def __init__(self, client: SimulatedClient) -> None:
        super().__init__(client)
        self._made = 0

    every = property(all_of)

    def next(self) -> bool:
        if self.client.left <= 0:
            return False
        self.client.left -= 1
        batch, every = self._began_at + self._made, self.every
        pull = every if self.cluster.random.random() < 0.7 else []
        groups = self.cluster.workload.groups
        samples = batch, batch + 1
        sent = self.step(every, pull, tick=True, samples=samples, groups=groups)
        self._made += sent
        return True

    @property
    def _began_at(self) -> int:
        return self.client.steps.resumed.get(self.cluster.workload.group, 0)


class SimulatedBatchResumes(SimulatedResumes):
    """Resumes with workers that make a batch again if a part of it is lost."""

    worker_script = BatchScript

    def check(self) -> None:
        """Require besides that each batch is in the tensors and in the table once. A rank that was
        also lost alone is not looked at: who comes after it makes its last call again."""
        super().check()
        wrong = []
        places = [(g, place) for g, history in self.histories.items() for place in history.final]
        found = {(group, place): self._batches(group, place) for group, place in places}
        for rank in set(range(self.scenario.workers)) - self._lost_alone:
            every = Counter[int]()
            for batches in found.values():
                every |= batches[rank]
            whole = Counter(set(+every))
            for (group, place), batches in found.items():
                if batches[rank] != whole:
                    more, less = batches[rank] - whole, whole - batches[rank]
                    where = f"{group}, {part_name(place)}"
                    wrong.append(
                        f"{where}: batches of rank {rank} too often {sorted(more)}, missing "
                        f"{sorted(less)}, of {sorted(whole)}"
                    )
        if wrong:
            shown = "\n".join(wrong[:SHOWN_MAX])
            raise Violation(f"{len(wrong)} findings:\n{shown}\nagain: {self.again}")

    def _batches(self, group: str, place: Part) -> dict[int, Counter[int]]:
        """Count of each batch in the values of a part, by rank."""
        history = self.histories[group]
        row = history.final[place]
        found: dict[int, Counter[int]] = defaultdict(Counter)
        for call in history.calls:
            if call.push is not None and call.samples is not None:
                found[call.rank][call.samples[0]] += row.pushes[call.writer] >> call.push & 1
        return found


class SampleScript(LeasingScript):
    """Steps tensors and all rows in one call with the samples that it draws by lease."""

    every = property(all_of)

    def step(self, push: Sequence[Any] = (), pull: Sequence[Any] = (), **options: Any) -> bool:
        return super().step(push, pull, **{"groups": self.cluster.workload.groups, **options})


class SimulatedSampleResumes(SimulatedResumes):
    """Resumes with samples that the workers share by lease."""

    worker_script = SampleScript

    def check(self) -> None:
        """Require besides that each sample is in the tensors and in the table once; in the table
        twice if a rank had begun a call with it that has not come again. Runs in which a rank was
        also lost alone are not looked at."""
        super().check()
        wrong = []
        for group, history in () if self._lost_alone else self.histories.items():
            for place, row in history.final.items():
                times, gone = Counter[int](), Counter[int]()
                for call in history.calls:
                    there = call.push is not None and row.pushes[call.writer] >> call.push & 1
                    if there and call.samples is not None:
                        times.update(range(*call.samples))
                        if call.rank >= self.scenario.workers:
                            gone.update(range(*call.samples))
                every = Counter(range(self.scenario.samples))
                more, less = times - every - gone, every - times
                if more or less:
                    where = f"{group}, {part_name(place)}"
                    wrong.append(f"{where}: too often {sorted(more)}, missing {sorted(less)}")
        if wrong:
            shown = "\n".join(wrong[:SHOWN_MAX])
            raise Violation(f"{len(wrong)} findings:\n{shown}\nagain: {self.again}")


BATCHES: dict[str, Any] = {
    "kind": SimulatedBatchResumes,
    "workload": table_beside_tensors,
    "consistency": Sync("sum"),
    "second": Async(),
    "workers": 4,
    "restarts": False,
    "faults": NO_KILLS,
}
SAMPLES = {**BATCHES, "kind": SimulatedSampleResumes, "samples": 40}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"consistency": POLICIES[name]} for name in ("async", "sync")},
    "drawn faults": {"consistency": Sync("sum"), "faults": None, "workers": 3},
    "buffered": {"consistency": POLICIES["buffered"]},
    "leases, async": {"consistency": Async(), "samples": 60},
    "leases, sync": {"consistency": Sync("sum"), "samples": 60},
    "sync, then async": {"consistency": Sync("sum"), "then": Async()},
    "async, then sync": {"consistency": Async(), "then": Sync("sum")},
    "buffered, then bounded": {"consistency": POLICIES["buffered"], "then": BoundedStaleness(2)},
    "two groups": {"consistency": Sync("sum"), "second": Async()},
    "collectives": {"consistency": Sync("sum"), "collectives": True},
    "table": {"workload": table, "consistency": Sync("sum")},
    "table beside tensors": {
        "workload": table_beside_tensors,
        "consistency": Async(),
        "second": Async(),
    },
    "batches of a table beside Sync": BATCHES,
    "samples of a table beside Sync": SAMPLES,
}
"""What `resumed` runs, by name."""


def resumed(
    seed: int,
    kind: type[SimulatedResumes] = SimulatedResumes,
    then: Policy | None = None,
    **options: Any,
) -> SimulatedResumes:
    """Run one seed and check it."""
    plain = {"workers": 2, "steps": 14, "restarts": True, "others": (), "faults": FAULTS}
    cluster = kind(seed, Scenario(**{**plain, **options}))
    cluster.then = then
    cluster.run()
    cluster.check()
    return cluster
