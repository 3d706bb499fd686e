"""What the history of a simulated run is told, by those to whom it happens.

It looks at the cluster and changes nothing there.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from paramserve.consistency import registry as policies
from paramserve.consistency.built_in import Sync
from paramserve.core.block import ShardBlock
from paramserve.core.events import Effects, Event, MembersChanged, Requested
from paramserve.core.group_members import JoinedBy
from paramserve.core.group_state import GroupState
from paramserve.core.membership import RETIRING
from paramserve.core.shard import Shard
from paramserve.core.shard_sessions import (
    FENCED_STATES,
    Answer,
    ClientHere,
    ReadRequest,
    ShardSession,
)
from paramserve.core.table.block import KeyedBlock
from paramserve.messages import (
    BlockSpec,
    Commit,
    Decision,
    Done,
    GroupPolicy,
    Members,
    NotRead,
    Read,
    Refused,
    ShardRequest,
    Step,
    Values,
)
from paramserve_testing.counting import AddWhole
from paramserve_testing.history import (
    Answered,
    Applied,
    Decided,
    Entered,
    History,
    Part,
    Shared,
    Switched,
    Update,
)
from paramserve_testing.nemesis import _Slow
from paramserve_testing.network import Faults
from paramserve_testing.process import ClientProcess
from paramserve_testing.scenario import Scenario

if TYPE_CHECKING:
    from paramserve_testing.simulated import SimulatedCluster

MOVE_S = 5.0
"""Seconds within which, after healing, a live client has a call answered."""
PROMPT_DELAYS = 6
"""Longest delays within which a clock that can be decided is: the decision before may still be on
its way to another shard, whose `Vote` then comes back."""


def new_history(scenario: Scenario, faults: Faults) -> History:
    """History of a run that is about to begin."""
    policy, ranks = scenario.consistency, tuple(range(scenario.workers))
    history = History(policy.collects, ranks, [(0, policy)])
    if scenario.samples:
        history.shared = Shared(scenario.samples)
    lossless = faults == faults.healed()
    if lossless and all(isinstance(each, _Slow) for each in scenario.script):
        history.prompt_s = PROMPT_DELAYS * 2 * faults.delay_s
    return history


def number_of(message: ShardRequest | Done | Refused) -> int:
    """The number of a request, or of its answer, among those of its client to one shard; below 0 of
    a read, which are counted by themselves."""
    return -message.seq if isinstance(message, Read | Values | NotRead) else message.seq


class Recorder:
    """Writes a run's history.

    Args:
        cluster: whose history it is.
    """

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._told: dict[int, GroupPolicy] = {}
        """Changes of policy by number, as the first shard told of them."""
        self._came: dict[tuple[str, int], dict[int, dict[int, float]]] = {}
        """Arrival of each step, by group and clock, shard and rank."""
        self._told_by: dict[int, list[Applied]] = {}
        """Rule calls in the present event, by shard."""
        self._decided_at: dict[str, float] = {}
        """Time of the last decision by group."""
        self._healed_at: float | None = None
        self._moved_at: dict[int, float] = {}
        """Time of the last answer by writer."""
        self._free_at: dict[int, float] = {}
        """End of each rank's last process: the next one may have waited for that."""

    # --- clients ------------------------------------------------------------------------

    def samples_over(self, client: ClientProcess) -> None:
        """A worker was told that no samples are left, and not only because it is to end."""
        shared = self._cluster.history.shared
        member = self._cluster.coordinator.coordination.membership.members[client.rank]
        if shared is not None and member.state != RETIRING:
            shared.over = True

    def healed(self) -> None:
        """All faults have ended."""
        self._healed_at = self._cluster.clock.now

    def moved(self, client: ClientProcess) -> None:
        """A client has had a call answered."""
        now = self._cluster.clock.now
        if self._healed_at is not None:
            moved_at = self._moved_at.get(client.writer, self._free_at.get(client.rank, 0.0))
            since = max(self._healed_at, moved_at)
            if now - since > MOVE_S:
                slow = f"writer {client.writer} waited {now - since:.1f} s"
                self._cluster.history.slow.append(slow)
        self._moved_at[client.writer] = now

    def ended(self, client: ClientProcess) -> None:
        """A client's process has ended."""
        self._free_at[client.rank] = self._cluster.clock.now

    # --- shards -------------------------------------------------------------------------

    def admitted(self, shard: int, newer: ClientProcess) -> None:
        """A shard has admitted a client: older incarnations of its rank have ended there."""
        for client in self._cluster.clients:
            same = client.rank == newer.rank and client.rank >= 0
            if same and 0 < client.incarnation < newer.incarnation:
                self._cluster.history.fenced(shard, client.writer)

    def arrived(self, shard: int, client: ClientProcess, request: ShardRequest) -> None:
        """A numbered request has reached a shard."""
        cluster = self._cluster
        group, call = cluster.call_of.get((client.writer, shard, number_of(request)), ("", None))
        if call is None:
            return
        history = cluster.histories[group]
        key = (shard, client.writer, call.number)
        if key not in history.reached:
            history.reached[key] = history.next()
        if call.push is not None:
            history.arrived(shard, client.writer, call.push)
        if call.tick and isinstance(request, Step):
            came = self._came.setdefault((group, call.clock), {}).setdefault(shard, {})
            came.setdefault(client.rank, cluster.clock.now)

    def accepted(self, shard: int, client: ClientProcess, request: ShardRequest) -> None:
        """A shard has a request, answered or not."""
        key = client.writer, shard, number_of(request)
        group, call = self._cluster.call_of.get(key, ("", None))
        if call is not None and call.push is not None:
            history = self._cluster.histories[group]
            history.accepted.setdefault((shard, client.writer, call.push), history.next())

    def members_told(self, shard: int, message: Members) -> None:
        """A shard has been told who belongs to the cluster."""
        for member in message.members:
            ended = member.state in FENCED_STATES
            for client in self._cluster.clients:
                if (
                    client.rank == member.rank
                    and 0 < client.incarnation < member.incarnation + ended
                ):
                    self._cluster.history.fenced(shard, client.writer)

    def learned(self, shard: int, change: GroupPolicy | None) -> None:
        """A shard has told of a change of policy."""
        if change is not None:
            self._told.setdefault(change.number, change)
            told = Switched(shard, change.number, change.clock, repr(change.policy))
            self._cluster.history.switched.setdefault(told)

    def rule(self, shard: int) -> type[AddWhole]:
        """The rule of a shard, which tells what it is asked for."""
        told = self._told_by.setdefault(shard, [])
        return type(AddWhole.__name__, (AddWhole,), {"told": told})

    def applied(self, shard: int) -> tuple[Applied, ...]:
        """What the rules of a shard were asked for since this was called last, once for all blocks
        of a push."""
        told = self._told_by.get(shard, [])
        found: dict[tuple[int, ...], Applied] = {}
        for each in told:
            before = found.get(each[:3], each)
            found[each[:3]] = each._replace(change=max(each.change, before.change))
        told.clear()
        return tuple(found.values())

    def decided(self, commit: Commit, group: GroupState, step_s: float | None) -> None:
        """The lead has decided about a synchronous clock, with this median time of a step."""
        history = self._cluster.histories[group.name]
        known = {client.id: (client.rank, client.writer) for client in self._cluster.clients}
        contributors = tuple(known[each] for each in commit.contributors)
        order, now = history.next(), self._cluster.clock.now
        before = self._decided_at.get(group.name, 0.0)
        came = self._came.get((group.name, commit.clock), {})
        first = min((min(each.values()) for each in came.values()), default=now)
        due = self._due(group.name, commit.clock, len(group.clocks))
        history.decided.append(
            Decided(
                commit.clock,
                order,
                contributors,
                not contributors,
                now - max(first, before),
                0.0 if due is None else now - max(due, before),
                step_s,
            )
        )
        self._decided_at[group.name] = now

    def _due(self, group: str, clock: int, counting: int) -> float | None:
        """When as many steps as the policy asks for had reached every shard; None: not known."""
        scenario = self._cluster.scenario
        policy = scenario.consistency
        whole = counting == scenario.workers  # else a worker has just left, or rests
        one = len(self._cluster.histories) == 1
        if self._told or not one or not isinstance(policy, Sync) or not whole:
            return None
        needed = max(1, counting - policy.backup)
        due = 0.0
        for shard in range(scenario.servers):
            times = sorted(self._came.get((group, clock), {}).get(shard, {}).values())
            if len(times) < needed:
                return None
            due = max(due, times[needed - 1])
        return due

    # --- the coordinator, and the end ---------------------------------------------------

    def belonging(self, message: Members) -> None:
        """The coordinator has changed the membership."""
        history = self._cluster.history
        for member in message.members:
            ended = member.state in ("left", "dead")
            if history.is_away(member.rank) and not ended:
                for each in self._cluster.histories.values():
                    each.rests(member.rank, True)  # until it joins
            history.belongs(member.rank, ended)

    def finish(self) -> None:
        """Check a run that has ended: what is left, and who has not ended."""
        cluster, history = self._cluster, self._cluster.history
        for server in cluster.servers:
            for report in server.shard.report():
                self.learned(server.number, report.change)
        for _, change in sorted(self._told.items()):
            policy = policies.build(change.policy, cluster.registered)
            history.policies.append((change.clock, policy))
        if history.shared is not None:
            reports = cluster.coordinator.coordination.leases.reports()
            history.shared.counted = sum(report.repeated for report in reports)
        shards = len(cluster.servers)
        for server in cluster.servers:
            for _, block in sorted(server.shard.blocks.items()):
                own = cluster.histories[block.spec.group_name]
                kind = cluster.workload.owner(block.spec)
                for number, row in kind.rows(block, server.number, shards):
                    own.final[Part(number, server.number)] = row
        servers = cluster.coordinator.coordination.membership.servers.values()
        lost = any(each.lost for each in servers)  # its driver would end the run: none is admitted
        for client in cluster.clients:
            if client.alive and not (lost and not hasattr(client, "exchange")):
                waiting = [
                    f"shard {c.number}: {[each.message.seq for each in c.session.unanswered]}"
                    f", {len(c.session.reads)} reads"
                    for c in client.exchange.shards
                ]
                history.unfinished.append(
                    f"writer {client.writer} (rank {client.rank}, clock {client.clock}) has not "
                    f"finished, unanswered: {'; '.join(waiting)}"
                )


class ShardRecorder:
    """Tells the history what happens on one shard.

    Args:
        shard: whose values, clocks and answers it compares with those before.
    """

    def __init__(self, cluster: SimulatedCluster, shard: Shard) -> None:
        self._cluster = cluster
        self._recorder = cluster.recorder
        self._shard = shard
        self._decided: dict[int, int] = {}
        """Last clock of each group that the history knows of."""
        self._steps_s: dict[int, float] = {}
        """Median time of a step, by group, as it was last."""
        self._clocks: dict[tuple[int, int], int] = {}
        """Clocks by group and rank, as they were last."""
        self._counting: dict[int, dict[int, int]] = {}
        """Clocks of the members by group, as they were last."""
        self._joined: dict[tuple[int, int], JoinedBy] = {}
        """Joins by group and rank, when the rank became a member last."""
        self._newest: dict[int, int] = {}
        """Last answered call by writer."""
        self._versions: dict[int, int] = {}
        """Versions by group, as they were last."""
        self._pushes: dict[tuple[int, int], tuple[int, ...]] = {}
        """Masks of all writers by group and block, as they were last."""
        self._empty: set[int] = set()
        """Groups that had no member between two decisions of the present event."""

    def watch(self, block: ShardBlock | KeyedBlock) -> None:
        """A part of a block has been made."""
        self._cluster.workload.owner(block.spec).watch(self._shard.number, block)

    def before(self, event: Event) -> None:
        """An event is about to happen."""
        if isinstance(event, Requested):
            writer = self._cluster.writers[event.client]
            client = self._cluster.clients[writer]
            self._recorder.arrived(self._shard.number, client, event.message)

    def decided(self) -> None:
        """A decision was applied; another one may follow in the same event."""
        groups = self._shard.groups
        self._empty |= {number for number in groups if not groups[number].state.clocks}

    def after(self, event: Event, effects: Effects) -> None:
        """An event has happened."""
        if isinstance(event, Requested):
            session = self._shard.sessions.by_client.get(event.client)
            read = isinstance(event.message, Read)
            if session is not None and not read and session.last >= event.message.seq:
                client = self._cluster.clients[self._cluster.writers[event.client]]
                self._recorder.accepted(self._shard.number, client, event.message)
        if isinstance(event, ClientHere) and effects.refused is None:
            client = self._cluster.clients[self._cluster.writers[event.client]]
            self._recorder.admitted(self._shard.number, client)
        self._look(effects)
        if isinstance(event, MembersChanged):
            self._recorder.members_told(self._shard.number, event.message)

    def _look(self, effects: Effects) -> None:
        """Tell the history what has changed here: values, clocks, who counts, who is answered."""
        order = self._cluster.history.next()
        versions = dict(self._versions)
        applied = self._recorder.applied(self._shard.number)
        for machine in self._shard.groups.values():
            group = machine.state
            if group.version != self._versions.get(group.id, 0):
                self._updated(group, order, applied if group.table is None else ())
            if group.clocks.keys() != self._counting.get(group.id, {}).keys():
                self._who_counts(group, order)
            self._counting[group.id] = dict(group.clocks)
            last = None if machine.lead is None else machine.lead.last
            if last is not None and last.clock != self._decided.get(group.id):
                one = last.clock == self._decided.get(group.id, -1) + 1
                self._decided[group.id] = last.clock
                step_s = self._steps_s.get(group.id, 0.0) if one else None
                self._recorder.decided(last, group, step_s)
            self._steps_s[group.id] = group.step_s
            for rank, clock in group.clocks.items():
                before = self._clocks.get((group.id, rank), 0)
                if clock < before:
                    self._cluster.histories[group.name].backwards.append(
                        f"shard {self._shard.number}: the clock of rank {rank} went from {before} "
                        f"back to {clock}"
                    )
                self._clocks[group.id, rank] = clock

        self._empty.clear()
        for client, answer in effects.replies:
            if isinstance(answer.message, Done):
                self._answered(client, answer, answer.message, order, versions)

    def _updated(self, group: GroupState, order: int, applied: tuple[Applied, ...]) -> None:
        """Values have changed: which pushes are in them that were not."""
        new: dict[tuple[int, int], None] = {}
        workload = self._cluster.workload
        blocks, shards = sorted(group.blocks.items()), self._cluster.scenario.servers
        number = self._shard.number
        seen = [workload.owner(b.spec).masks(b, number, shards) for _, b in blocks]
        for number, masks in chain.from_iterable(seen):
            old = self._pushes.get((group.id, number), (0,) * len(masks))
            self._pushes[group.id, number] = masks
            for writer, (was, is_now) in enumerate(zip(old, masks, strict=True)):
                more = is_now & ~was
                while more:
                    low = more & -more
                    new[writer, low.bit_length() - 1] = None
                    more ^= low
        version = self._versions.get(group.id, 0)
        self._versions[group.id] = group.version
        self._cluster.histories[group.name].updates.append(
            Update(
                self._shard.number,
                order,
                version,
                group.version,
                tuple(new),
                not group.clocks or group.id in self._empty,
                applied,
            )
        )

    def _who_counts(self, group: GroupState, order: int) -> None:
        history = self._cluster.histories[group.name]
        before = self._counting.get(group.id, {})
        slowest = min(before.values(), default=None)
        for rank in sorted({*before, *group.clocks}):
            here = rank in group.clocks
            if here is (rank in before):
                continue
            changes = history.counted.setdefault((self._shard.number, rank), [])
            changes.append((order, here))
            if here:
                joins = len(changes) == 1 and rank not in history.ranks
                others = [clock for each, clock in group.clocks.items() if each != rank]
                entry = self._entry_of(rank, group.name)
                then = min(others, default=None) if entry is None else self._fastest(rank, *entry)
                clock = group.clocks[rank]
                by = group.members.joined[rank]
                leads = self._shard.groups[group.id].lead is not None
                told = None if leads or by == self._joined.get((group.id, rank)) else by.clock
                self._joined[group.id, rank] = by
                history.entered.append(
                    Entered(self._shard.number, rank, order, clock, slowest, joins, then, told)
                )

    def _entry_of(self, rank: int, group: str) -> tuple[GroupState, GroupState] | None:
        """The group that a rank has joined, and this one, if it joins this one behind it."""
        for client in self._cluster.clients:
            if client.rank == rank and not client.dead and group in client.follows:
                known = {each.state.name: each.state for each in self._shard.groups.values()}
                return self._shard.groups[client.follows[group]].state, known[group]
        return None

    @staticmethod
    def _fastest(rank: int, entry: GroupState, group: GroupState) -> int | None:
        """The furthest at which a rank may begin behind its entry: as far before the fastest of the
        others as it is there."""
        here, there = (
            [clock for each, clock in state.clocks.items() if each != rank]
            for state in (group, entry)
        )
        if not here:
            return None
        lead = entry.clocks[rank] - max(there) if there and rank in entry.clocks else 0
        return max(here) + max(lead, 0)

    def _answered(
        self, client: int, answer: Answer, done: Done, order: int, before: dict[int, int]
    ) -> None:
        """A shard's answer to a step, for the first time or again."""
        for news in done.news:
            self._recorder.learned(self._shard.number, news)
        writer = self._cluster.writers.get(client, -1)
        seq = number_of(done)
        deletion = self._cluster.deletion_of.get((writer, self._shard.number, seq))
        if deletion is not None:
            deletion.executed.setdefault(self._shard.number, order)
        name, call = self._cluster.call_of.get((writer, self._shard.number, seq), ("", None))
        if call is not None:
            group = next(g for g, each in self._shard.groups.items() if each.state.name == name)
            versions = (before.get(group, 0), self._versions.get(group, 0))
            key = (self._shard.number, writer, call.number)
            answers = self._cluster.histories[name].answers
            first = answers.setdefault(key, Answered(order, done.skipped, *versions))
            newest = self._newest.get(writer, -1)
            self._newest[writer] = max(newest, call.number)
            if isinstance(done, Values) and (first.order != order or call.number < newest):
                call.reread.add(self._shard.number)

    def read_late(self, client: int, read: Read) -> None:
        """A read is tried behind later requests of its client."""
        writer = self._cluster.writers.get(client, -1)
        key = writer, self._shard.number, number_of(read)
        _, call = self._cluster.call_of.get(key, ("", None))
        if call is not None:
            call.reread.add(self._shard.number)


class RecordedShard(Shard):
    """A shard that tells what happens on it."""

    recorder: ShardRecorder

    def new_block(self, spec: BlockSpec, attempt: int) -> ShardBlock | KeyedBlock:
        block = super().new_block(spec, attempt)
        self.recorder.watch(block)
        return block

    def _apply(self, decision: Decision) -> None:
        super()._apply(decision)
        self.recorder.decided()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        answer = self.reads.answer

        def recorded(session: ShardSession, request: ReadRequest, *others: Any) -> None:
            if session.executed > request.message.behind:
                self.recorder.read_late(session.client, request.message)
            answer(session, request, *others)

        self.reads.answer = recorded  # type: ignore[method-assign, assignment]

    def step(self, event: Event, now: float) -> Effects:
        self.recorder.before(event)
        effects = super().step(event, now)
        self.recorder.after(event, effects)
        return effects
