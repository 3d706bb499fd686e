"""Which processes belong to the cluster: servers, workers with their incarnations, other clients.

A rank is *expected* until its worker joins, then *live*, and at the end *left* (in order) or
*dead*; between two lives it is *restarting*: a synchronous clock waits for it as for a live one.
Each join of a rank is a new incarnation with a new client id; older ones are refused.

The number of workers may change. Ranks that are added are open, and no members before they join:
no worker waits for a process that starts. Those that are removed while they live are *retiring*:
live in every way until they end.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct, structs

from paramserve.config import NO_RANK
from paramserve.errors import ParamServeError, RankTaken
from paramserve.messages import Join, Member, Members, Register, ServerBeat

EXPECTED, LIVE, LEFT, DEAD = "expected", "live", "left", "dead"
RESTARTING, RETIRING = "restarting", "retiring"


@dataclass
class ServerEntry:
    pid: int
    addresses: tuple[str, ...]
    heard_at: float
    beat: ServerBeat
    lost: bool = False
    """Whether its connection has ended."""


class MembershipRecord(Struct, frozen=True):
    """The membership as it is saved. `awaited`: ranks that were waited for from the beginning."""

    number: int
    next_client: int
    workers: int
    members: tuple[Member, ...]
    awaited: tuple[int, ...]


class Membership:
    """The coordinator's knowledge of its members, as a value that changes only through calls."""

    def __init__(self, servers: int, workers: int) -> None:
        self.expected_servers = servers
        self.workers = workers
        """How many there are to be at present."""
        self.workers_at_first = workers
        """How many the cluster was started for."""
        self.workers_before = 0
        """How many the checkpoint is of that the cluster has gone on from; 0: of none."""
        self._awaited_from_first = set(range(workers))
        """Ranks that the others wait for from the beginning, as long as they have not ended."""
        self.number = 1
        """Number of the membership: grows with every change."""
        self.members = {rank: Member(rank, 0, 0, EXPECTED) for rank in range(workers)}
        self.servers: dict[int, ServerEntry] = {}
        self._last_beats: dict[int, float] = {}
        """Last beat by rank."""
        self._restarting: dict[int, float] = {}
        """Start of each rank's restart."""
        self.came_later: set[int] = set()
        """Clients of ranks that the others have been under way without: added ones, and those that
        have come again after they had ended for good."""
        self.left_unasked: set[int] = set()
        """Ranks that have left without being asked to, and have not joined again."""
        self._enlisted: set[int] = set()
        """Shards that were given out to servers which have not registered yet."""
        self._next_client = 1

    def restore(self, record: MembershipRecord) -> None:
        """Restore the membership as if every rank had ended when it was saved: each is expected
        again, for its next incarnation, and so is a new one."""
        self.number = record.number + 1
        self._next_client = record.next_client
        self.workers_before = record.workers
        self._awaited_from_first = {each for each in record.awaited if each < self.workers}
        self.members = {}
        for each in record.members:
            ended = LEFT if each.state == LEFT else DEAD
            state = EXPECTED if each.rank < self.workers else ended
            self.members[each.rank] = structs.replace(each, state=state)
        for rank in range(self.workers):
            self.members.setdefault(rank, Member(rank, 0, 0, EXPECTED))

    def record(self) -> MembershipRecord:
        """The membership, to be saved."""
        return MembershipRecord(
            self.number,
            self._next_client,
            self.workers,
            tuple(member for _, member in sorted(self.members.items())),
            tuple(sorted(self._awaited_from_first)),
        )

    @property
    def complete(self) -> bool:
        """Whether every server has registered."""
        return len(self.servers) == self.expected_servers

    @property
    def missing_servers(self) -> list[int]:
        """Shards whose server has not registered yet."""
        return [shard for shard in range(self.expected_servers) if shard not in self.servers]

    def enlist(self) -> int:
        """Give out a free shard number.

        Raises:
            ParamServeError: all are given out, or one's server was lost. Nothing was changed.
        """
        used = self._enlisted.union(self.servers)
        for shard in range(self.expected_servers):
            if shard not in used:
                self._enlisted.add(shard)
                return shard
        for shard, entry in sorted(self.servers.items()):
            if entry.lost:
                raise ParamServeError(
                    f"a server registered at a cluster that has lost the server of shard {shard}, "
                    "and its values with it: no other one can take its place",
                    fix="start the whole cluster again",
                )
        raise ParamServeError(
            f"one more server registered at a cluster of {self.expected_servers}: all its shards "
            "have their servers",
            fix="start as many servers as the first one was told, or tell it more (--servers)",
        )

    def resign(self, shard: int) -> None:
        """The server that was given this number ended before it registered: it is free again."""
        self._enlisted.discard(shard)

    def server_lost(self, shard: int) -> None:
        """A server's connection has ended, and it was not asked to end."""
        entry = self.servers.get(shard)
        if entry is not None:
            entry.lost = True

    def register(self, call: Register, now: float, enlisted: int | None = None) -> None:
        """A server is up.

        Args:
            enlisted: the number that was given out to this server, if one was.
        Raises:
            ParamServeError: the cluster has no such shard, or has given it to another server.
        """
        used = (self._enlisted - {enlisted}).union(self.servers)
        if not 0 <= call.shard < self.expected_servers or call.shard in used:
            raise ParamServeError(
                f"a server registered as shard {call.shard}; the cluster has "
                f"{self.expected_servers} shards, taken: {sorted(used)}",
                fix="start each shard once",
            )
        beat = ServerBeat(call.shard, ())
        self._enlisted.discard(call.shard)
        self.servers[call.shard] = ServerEntry(call.pid, call.addresses, now, beat)
        self.number += 1

    def addresses(self) -> tuple[tuple[str, ...], ...]:
        """Addresses of each shard's server, in shard order; the cluster must be complete."""
        return tuple(self.servers[shard].addresses for shard in range(self.expected_servers))

    def join(self, call: Join, now: float) -> tuple[int, int]:
        """Give a client its identity: (client id, incarnation).

        Raises:
            ParamServeError: the rank does not exist (any more), or the worker was started as one of
                another number of workers.
            RankTaken: a live worker has it. In both cases nothing was changed.
        """
        client = self._next_client
        if call.rank == NO_RANK:
            self._next_client += 1
            return client, 0
        if not self.workers:
            raise ParamServeError(
                f"rank {call.rank} joined a cluster that was started without workers: it takes "
                "clients without a rank only",
                fix="say how many there are where it is started: paramserve serve --workers 2, or "
                "workers=2 of ps.serve or ps.Cluster",
            )
        if call.workers not in (0, self.workers, self.workers_at_first):
            raise ParamServeError(
                f"the cluster was started for {self._for_workers}, but rank {call.rank} was "
                f"started as one of {call.workers}",
                fix="start both with the same number",
            )
        if not 0 <= call.rank < self.workers:
            raise ParamServeError(
                f"more ranks than workers: a worker joined as rank {call.rank}, the cluster was "
                f"started for {self._for_workers}",
                fix=f"use ranks 0 to {self.workers - 1}, or start with more workers",
            )
        member = self.members.get(call.rank, Member(call.rank, 0, 0, EXPECTED))
        if member.state in (LIVE, RETIRING):
            silent_s = now - self._last_beats[call.rank]
            note = ", which is asked to end," if member.state == RETIRING else ""
            raise RankTaken(
                f"rank {call.rank} is taken by a live worker{note} (client {member.client}, "
                f"incarnation {member.incarnation}), heard of {silent_s:.1f} s ago",
                fix="give each worker its own rank; to replace that worker, end its process first",
            )
        self._next_client += 1
        incarnation = member.incarnation + 1
        self._last_beats[call.rank] = now
        if call.rank not in self.members or member.state in (LEFT, DEAD):
            self.came_later.add(client)
        self._change(Member(call.rank, client, incarnation, LIVE))
        return client, incarnation

    @property
    def _for_workers(self) -> str:
        first, now = self.workers_at_first, self.workers
        return f"{first} workers" + (f" and has {now} now" if now != first else "")

    def late(self, rank: int, incarnation: int) -> bool:
        """Whether a worker may find the others under way."""
        first = rank == NO_RANK or rank in self._awaited_from_first
        return not first or incarnation > 1

    def scale(self, workers: int) -> None:
        """Set how many workers there are to be from now on.

        Ranks below may join, those above retire: live workers are asked to end, missing ones are
        no longer waited for. One that is retiring already keeps on, and its rank is free after it.

        Raises:
            ParamServeError: less than 1. Nothing was changed.
        """
        if workers < 1:
            raise ParamServeError(
                f"the cluster was not scaled: it needs at least 1 worker, not {workers}",
                fix="to end it, stop it",
            )
        self.workers = workers
        after = {LIVE: RETIRING, EXPECTED: LEFT, RESTARTING: DEAD}
        for rank, member in sorted(self.members.items()):
            if rank >= workers and member.state in after:
                self._change(structs.replace(member, state=after[member.state]))

    def _change(self, member: Member) -> None:
        """Put a rank into another state; all servers hear of it by the number."""
        if member.state in (LEFT, DEAD):  # The others go on without it.
            self._awaited_from_first.discard(member.rank)
        self._restarting.pop(member.rank, None)
        before = self.members.get(member.rank)
        if member.state == LEFT and before is not None and before.state == LIVE:
            self.left_unasked.add(member.rank)
        else:
            self.left_unasked.discard(member.rank)
        self.members[member.rank] = member
        self.number += 1

    def ended(self, rank: int, state: str, client: int | None = None) -> bool:
        """A worker left or died; False if it had ended before or is a newer incarnation."""
        member = self.members.get(rank)
        if member is None or member.state in (LEFT, DEAD):
            return False
        if client is not None and client != member.client:
            return False
        self._change(structs.replace(member, state=state))
        return True

    def restarting(self, rank: int, now: float, client: int | None = None) -> bool:
        """A worker died and will be started again; False if it had ended before, is waited for
        already, or is a newer incarnation."""
        member = self.members.get(rank)
        if member is not None and member.state == RESTARTING:
            return False
        if not self.ended(rank, RESTARTING, client):
            return False
        self._restarting[rank] = now
        return True

    def overdue(self, now: float, restart_s: float) -> list[int]:
        """Ranks that have been waited for since `restart_s` or more."""
        return [r for r, since in sorted(self._restarting.items()) if now - since >= restart_s]

    def heard_worker(self, rank: int, now: float) -> None:
        self._last_beats[rank] = now

    def heard_server(self, beat: ServerBeat, now: float) -> None:
        entry = self.servers.get(beat.shard)
        if entry is not None:
            entry.heard_at, entry.beat = now, beat

    def furthest(self, rank: int) -> tuple[str, int]:
        """The group that a rank has ended most steps of, and how many, as the servers told last;
        ("", 0): none is known."""
        clocks: dict[str, int] = {}
        for entry in self.servers.values():
            for report in entry.beat.groups:
                for each, clock in report.clocks:
                    if each == rank:
                        clocks[report.name] = min(clock, clocks.get(report.name, clock))
        return max(clocks.items(), key=lambda each: each[1], default=("", 0))

    def paused(self, seconds: float) -> None:
        """No process could be heard for so long: each was heard of, or left, that much later."""
        for times in (self._last_beats, self._restarting):
            for rank in times:
                times[rank] += seconds
        for entry in self.servers.values():
            entry.heard_at += seconds

    def silent_workers(self, now: float, stall_s: float) -> list[int]:
        """Live ranks that have not been heard of for `stall_s`."""
        return [
            rank
            for rank, member in sorted(self.members.items())
            if member.state in (LIVE, RETIRING) and now - self._last_beats[rank] > stall_s
        ]

    def silent_servers(self, now: float, stall_s: float) -> tuple[int, ...]:
        """Shards whose server is gone, or has not been heard of for `stall_s`."""
        return tuple(
            shard
            for shard, entry in sorted(self.servers.items())
            if entry.lost or now - entry.heard_at > stall_s
        )

    def present(self) -> tuple[Member, ...]:
        """The ranks that are expected or have ever joined: one that the cluster was scaled below
        before it came is none of its workers."""
        everyone = self.snapshot().members
        return tuple(each for each in everyone if each.incarnation or each.state != LEFT)

    def snapshot(self) -> Members:
        """The membership, whole, as it is sent to the servers."""
        members = tuple(member for _, member in sorted(self.members.items()))
        return Members(self.number, members, self.addresses() if self.complete else ())
