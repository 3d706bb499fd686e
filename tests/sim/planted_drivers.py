"""Bugs that the drivers of a server and of the coordinator could have, each in the code that ships.

The checkers know none of them. Each function plants one and returns the cluster to run.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs
from tests.sim.planted import STRAGGLER, Plant
from tests.sim.test_deadlines import ResendsLate

from paramserve.client.exchange import Exchange
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, Sync
from paramserve.coordinator import CoordinatorRole
from paramserve.core import collectives
from paramserve.core.collectives import Collectives, _Ended, _Open, reduced
from paramserve.core.coordination import Called, CoordinatorEvent
from paramserve.core.events import ClientGone, DeadlineReached, Effects
from paramserve.core.group import GroupMachine
from paramserve.core.shard_sessions import Answer
from paramserve.messages import AllReduce, Hello, Leave, Member, Members, Ok, encode
from paramserve.server import ServerRole
from paramserve.transport.connection import Connection, StreamConnection
from paramserve.transport.peers import PeerLinks, _Peer
from paramserve_testing import Faults, SimulatedCluster, slow, stop

STALLS = Faults(slow=0.1, stall=0.03, kill=0.02)
COORDINATOR_STALLS = (
    stop(coordinator=True, seconds=20.0, clock=3),
    *(slow(worker=rank, factor=400.0) for rank in range(3)),
)


def timer_never_moved_earlier(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A server that waits for a deadline takes no notice of one that comes before it."""
    wake_at = ServerRole._wake_at

    def only_if_none_is_set(self: ServerRole, deadline: float) -> None:
        if self._timer is None:
            wake_at(self, deadline)

    monkeypatch.setattr(ServerRole, "_wake_at", only_if_none_is_set)

    return ResendsLate  # else the timer is often due


def message_dropped_while_connecting(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A message to a server that is not connected is dropped, and the shard repeats none."""
    send = PeerLinks.send

    def drop(self: PeerLinks, shard: int, header: bytes) -> None:
        send(self, shard, header)
        peer = self._peers[shard]
        if peer.link is None:
            peer.queue.clear()

    monkeypatch.setattr(PeerLinks, "send", drop)
    monkeypatch.setattr(GroupMachine, "_repeat_vote", lambda self, vote: None)
    return SimulatedCluster


def answered_on_the_older_connection(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A client that connects again is answered where it was first."""
    client = ServerRole._client

    def keep(self: ServerRole, conn: Connection, hello: Hello) -> None:
        older = self._clients.pop(hello.client, None)
        client(self, conn, hello)
        if older is not None:
            self._clients[hello.client] = older

    monkeypatch.setattr(ServerRole, "_client", keep)
    return SimulatedCluster


def end_of_the_older_connection_ends_the_newer(
    monkeypatch: pytest.MonkeyPatch,
) -> type[SimulatedCluster]:
    """When the end of a client's older connection is told, its newer one is forgotten."""

    def closed(self: ServerRole, conn: Connection) -> None:
        self._parties.pop(conn)
        if self._clients.pop(conn.hello.client, None) is not None:
            self._happen(ClientGone(conn.hello.client))

    monkeypatch.setattr(ServerRole, "closed", closed)
    return SimulatedCluster


def only_the_first_of_several_notices(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """Apply only the oldest of several memberships that were read together."""
    take = ServerRole.take_notices

    def oldest(self: ServerRole, notices: list[Members]) -> None:
        take(self, notices[:1])

    monkeypatch.setattr(ServerRole, "take_notices", oldest)
    return SimulatedCluster


def control_not_read_after_it_was_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> type[SimulatedCluster]:
    """A server that has reached the coordinator again hears no more of it."""
    restored = ServerRole._restored

    def deaf(self: ServerRole, done: Any) -> None:
        restored(self, done)
        self._loop.remove_reader(self._control_fd)

    monkeypatch.setattr(ServerRole, "_restored", deaf)
    return SimulatedCluster


def failed_attempt_stays_the_last(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A server that could not be reached is never tried again."""
    connected = PeerLinks._connected

    def forgets(self: PeerLinks, shard: int, peer: _Peer, dialing: Any) -> None:
        connected(self, shard, peer, dialing)
        peer.connecting = dialing.exception() is not None

    monkeypatch.setattr(PeerLinks, "_connected", forgets)
    return SimulatedCluster


def stuck_link_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """What a server did not take at once waits for ever."""

    def look_later(self: PeerLinks, shard: int, peer: _Peer) -> None:
        peer.waiting = True

    monkeypatch.setattr(PeerLinks, "_look_later", look_later)
    return SimulatedCluster


def heartbeats_wait_for_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A heartbeat is sent as a call is: the server stands still while the coordinator does."""

    def beat(self: ServerRole) -> None:
        self._beating = self._loop.call_later(self.config.deadlines.heartbeat_s, self._beat)
        self._happen(DeadlineReached())
        assert self._control is not None
        self._control.notify(self._report(), waits=True)
        self._flush()

    monkeypatch.setattr(ServerRole, "_beat", beat)
    return SimulatedCluster


def leave_forgotten(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """The coordinator says yes to a worker that leaves, and forgets it."""
    step = CoordinatorRole._step

    def forget(self: CoordinatorRole, event: CoordinatorEvent) -> None:
        if isinstance(event, Called) and isinstance(event.message, Leave):
            self._connections[event.connection].send(encode(Ok(event.message.call)))
        else:
            step(self, event)

    monkeypatch.setattr(CoordinatorRole, "_step", forget)
    return SimulatedCluster


def membership_told_to_the_first_server_only(
    monkeypatch: pytest.MonkeyPatch,
) -> type[SimulatedCluster]:
    """The coordinator tells changes of the membership to one server."""
    opened = CoordinatorRole.opened

    def first(self: CoordinatorRole, conn: Connection, hello: Hello) -> None:
        opened(self, conn, hello)
        self._servers = set(sorted(self._servers)[:1])

    monkeypatch.setattr(CoordinatorRole, "opened", first)
    return SimulatedCluster


def coordinator_ticks_once(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """The coordinator looks at its deadlines once, and never again."""
    tick = CoordinatorRole._tick

    def once(self: CoordinatorRole) -> None:
        if self._stepped_at == 0.0:
            tick(self)

    monkeypatch.setattr(CoordinatorRole, "_tick", once)
    return SimulatedCluster


# --- clients that read slowly ---------------------------------------------------------------------


def slow_reader_read_no_more(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A server that has paused with a client goes on with it never."""
    monkeypatch.setattr(StreamConnection, "_resume", lambda self: None)
    return SimulatedCluster


def frames_before_the_pause_forgotten(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """What had been read from a client when its server paused waits until more comes."""

    def resume(self: StreamConnection) -> None:
        if not self._closed and self._paused and not self._is_full():
            self._paused = False
            self._loop.add_reader(self._fd, self._readable)

    monkeypatch.setattr(StreamConnection, "_resume", resume)
    return SimulatedCluster


def answers_not_read_while_sending(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A client whose server takes nothing reads nothing either."""
    monkeypatch.setattr(Exchange, "_read_while_blocked", lambda self, shard: None)
    return SimulatedCluster


SLOW_READERS: tuple[Plant, ...] = (
    slow_reader_read_no_more,
    frames_before_the_pause_forgotten,
    answers_not_read_while_sending,
)


# --- collectives ----------------------------------------------------------------------------------


def value_of_the_last_collective(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A rank that comes again gets the newest result, whichever call it makes."""

    def newest(self: Collectives, message: AllReduce, member: Member) -> _Ended | None:
        return self._ended[self.number] if self._ended and message.seen < self.number else None

    monkeypatch.setattr(Collectives, "_find", newest)
    return SimulatedCluster


def collective_waits_for_the_dead(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A change of the membership does not end a collective."""
    monkeypatch.setattr(Collectives, "changed", lambda self: None)
    return SimulatedCluster


def own_value_overwritten(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """The value of the last rank is lost."""

    def lost(calls: list[AllReduce]) -> tuple[bytes, str]:
        return reduced(calls[:-1] or calls)

    monkeypatch.setattr(collectives, "reduced", lost)
    return SimulatedCluster


def last_rank_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """The last rank gets its own value, whichever calls those made that have returned."""
    monkeypatch.setattr(Collectives, "_returned_without", lambda self, opened: [])
    return SimulatedCluster


def refused_while_others_live(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A rank is refused where one has returned, although others live."""

    def without(self: Collectives, opened: _Open) -> list[int]:
        return sorted(self._membership.left_unasked - opened.sent.keys())

    monkeypatch.setattr(Collectives, "_returned_without", without)
    return SimulatedCluster


def next_result_wherever_a_rank_is(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A rank that comes again gets the results in order from the first one, and its place says
    nothing."""

    def following(self: Collectives, message: AllReduce, member: Member) -> _Ended | None:
        return self._ended.get(message.seen + 1)

    monkeypatch.setattr(Collectives, "_find", following)
    return SimulatedCluster


def first_step_passes_nothing_by(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A rank that has made its first step is waited for in the calls that it has left out."""
    monkeypatch.setattr(Collectives, "begin_steps", lambda self, message, member: None)
    return SimulatedCluster


def place_of_the_first_optimizer(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """Where two optimizers step in turn, calls at one clock of the first one are taken for one."""
    find = Collectives._find

    def first(self: Collectives, message: AllReduce, member: Member) -> _Ended | None:
        return find(self, structs.replace(message, ticks=0), member)

    monkeypatch.setattr(Collectives, "_find", first)
    return SimulatedCluster


def bytes_go_by_the_present_link(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """Values that lie in a mirror are not sent where the client's memory is mapped by now."""
    act = ServerRole._act

    def by_link(role: ServerRole, effects: Effects) -> None:
        for at, (client, answer) in enumerate(effects.replies):
            if client in role._clients and role._clients[client].shared:
                effects.replies[at] = client, Answer(answer.message)
        act(role, effects)

    monkeypatch.setattr(ServerRole, "_act", by_link)
    return SimulatedCluster


COLLECTIVE = {"collectives": True, "others": ()}
CASES: tuple[tuple[Plant, Policy, dict[str, Any]], ...] = (
    (
        timer_never_moved_earlier,
        Sync(reduce="sum", timeout_s=0.02),
        {"faults": Faults(), "script": STRAGGLER},
    ),
    (only_the_first_of_several_notices, Sync(reduce="sum"), {"faults": STALLS}),
    (message_dropped_while_connecting, Sync(reduce="sum"), {}),
    (bytes_go_by_the_present_link, Async(), {}),
    (answered_on_the_older_connection, Async(), {}),
    (end_of_the_older_connection_ends_the_newer, Async(), {}),
    (control_not_read_after_it_was_restored, Sync(reduce="sum"), {}),
    (failed_attempt_stays_the_last, Sync(reduce="sum"), {}),
    (stuck_link_not_looked_at_again, Sync(reduce="sum"), {}),
    (
        heartbeats_wait_for_the_coordinator,
        Async(),  # under Sync the others wait until it has taken that one leaves
        {"faults": Faults(), "script": COORDINATOR_STALLS},
    ),
    (leave_forgotten, Async(), {}),
    (membership_told_to_the_first_server_only, Sync(reduce="sum"), {}),
    (coordinator_ticks_once, Sync(reduce="sum"), {}),
    (value_of_the_last_collective, Async(), COLLECTIVE),
    (collective_waits_for_the_dead, Async(), COLLECTIVE),
    (own_value_overwritten, Sync(reduce="sum"), COLLECTIVE),
    (last_rank_is_left_alone, Async(), COLLECTIVE),
    (refused_while_others_live, Async(), COLLECTIVE),
    (next_result_wherever_a_rank_is, Async(), COLLECTIVE),
    (place_of_the_first_optimizer, Sync(reduce="sum"), COLLECTIVE),
    (
        first_step_passes_nothing_by,
        Sync(reduce="sum"),
        {**COLLECTIVE, "restarts": True},  # one of some 1,000 seeds finds it
    ),
)
"""What is planted, under which policy, in which scenario."""
