"""Who belongs to the cluster: servers, workers with their incarnations, other clients.

A rank is *expected* until its worker joins, then *live*, and at the end *left* (by its own wish) or
*dead*. Each join of a rank is a new incarnation with a new client id; older ones are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from paramserve.errors import ParamServeError
from paramserve.ids import NO_RANK
from paramserve.messages import Join, Member, Members, Register, ServerBeat

EXPECTED, LIVE, LEFT, DEAD = "expected", "live", "left", "dead"


@dataclass
class ServerEntry:
    pid: int
    addresses: tuple[str, ...]
    heard_at: float
    beat: ServerBeat


class Membership:
    """The coordinator's knowledge of who is there, as a value that changes only through calls."""

    def __init__(self, servers: int, workers: int) -> None:
        self.expected_servers = servers
        self.workers = workers
        self.number = 1
        """Of the membership: grows with every change."""
        self.members = {rank: Member(rank, 0, 0, EXPECTED) for rank in range(workers)}
        self.servers: dict[int, ServerEntry] = {}
        self._heard: dict[int, float] = {}
        """By rank."""
        self._next_client = 1

    @property
    def complete(self) -> bool:
        """Whether every server has registered."""
        return len(self.servers) == self.expected_servers

    def register(self, call: Register, now: float) -> None:
        """A server is up.

        Raises:
            ParamServeError: the cluster has no such shard, or has it already.
        """
        if not 0 <= call.shard < self.expected_servers or call.shard in self.servers:
            raise ParamServeError(
                f"a server registered as shard {call.shard}; the cluster has "
                f"{self.expected_servers} shards, taken: {sorted(self.servers)}",
                fix="start each shard once",
            )
        beat = ServerBeat(call.shard, ())
        self.servers[call.shard] = ServerEntry(call.pid, call.addresses, now, beat)
        self.number += 1

    def addresses(self) -> tuple[tuple[str, ...], ...]:
        """Of each shard's server, in shard order; the cluster must be complete."""
        return tuple(self.servers[shard].addresses for shard in range(self.expected_servers))

    def join(self, call: Join, now: float) -> tuple[int, int]:
        """Give a client its identity: (client id, incarnation).

        Raises:
            ParamServeError: the rank does not exist, or a live worker has it.
        """
        client = self._next_client
        if call.rank == NO_RANK:
            self._next_client += 1
            return client, 0
        member = self.members.get(call.rank)
        if member is None:
            raise ParamServeError(
                f"a worker joined as rank {call.rank}, the cluster has {self.workers} workers",
                fix="use ranks 0 to workers - 1, or start with more workers",
            )
        if member.state == LIVE:
            raise ParamServeError(
                f"rank {call.rank} is taken by a live worker (client {member.client})",
                fix="give each worker its own rank, or wait until the first one has ended",
            )
        self._next_client += 1
        incarnation = member.incarnation + 1
        self._heard[call.rank] = now
        self._change(Member(call.rank, client, incarnation, LIVE))
        return client, incarnation

    def _change(self, member: Member) -> None:
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

    def heard_worker(self, rank: int, now: float) -> None:
        self._heard[rank] = now

    def heard_server(self, beat: ServerBeat, now: float) -> None:
        entry = self.servers.get(beat.shard)
        if entry is not None:
            entry.heard_at, entry.beat = now, beat

    def silent_workers(self, now: float, stall_s: float) -> list[int]:
        """Live ranks that have not been heard of for `stall_s`."""
        return [
            rank
            for rank, member in sorted(self.members.items())
            if member.state == LIVE and now - self._heard[rank] > stall_s
        ]

    def silent_servers(self, now: float, stall_s: float) -> tuple[int, ...]:
        """Shards whose server has not been heard of for `stall_s`."""
        return tuple(
            shard for shard, entry in sorted(self.servers.items()) if now - entry.heard_at > stall_s
        )

    def snapshot(self) -> Members:
        """The membership, whole, as it is sent to the servers."""
        members = tuple(member for _, member in sorted(self.members.items()))
        return Members(self.number, members, self.addresses() if self.complete else ())
