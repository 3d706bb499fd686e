"""The exchange over links that the test plays: windows, slots, reconnects, several threads."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.client.fakes import Links

from paramserve.client import exchange as module
from paramserve.client.exchange import FIRST_ARENA_BYTES, Exchange, Slot
from paramserve.config import NO_CREDENTIALS, ConsistencySpec, Deadlines, Limits
from paramserve.core.client_session import Operation
from paramserve.errors import (
    ClientClosed,
    ConnectTimeout,
    Overloaded,
    ProtocolError,
    ServerGone,
    WorkerFenced,
)
from paramserve.messages import Assign, Done, Fetch, Joined, Refused, ServerBeat, Waiting

ADDRESSES = (("unix:0",), ("unix:1",))
LIMITS = Limits()


class Bench:
    """An exchange with two shards."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.links = Links()
        joined = Joined(1, 5, 0, 1, 0, ADDRESSES, ConsistencySpec("Async"))
        deadlines = Deadlines(start_s=1.0, reconnect_s=0.1, request_s=1.0)
        self.exchange = Exchange(joined, -1, NO_CREDENTIALS, limits, deadlines, self.links)
        self.completed: list[Operation] = []

    def submit(self) -> Operation:
        operation = Operation(2)
        operation.on_complete = lambda: self.completed.append(operation)
        self.exchange.submit([Fetch(0, 0, 0, 1, 64)] * 2, operation)
        return operation

    def answer(self, seq: int, *shards: int) -> None:
        for shard in shards or (0, 1):
            self.links[shard].reply(Done(seq, version=seq))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(module, "RECONNECT_PAUSE_S", 0.0)
    bench = Bench()
    yield bench
    bench.exchange.close()


def in_thread(do: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            do()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


# --- windows ----------------------------------------------------------------------------------


def test_full_window_of_one_shard_keeps_the_others_from_getting_more(bench: Bench) -> None:
    for _ in range(4):
        assert bench.exchange.has_room()
        bench.submit()
    for seq in range(1, 5):
        bench.answer(seq, 0)
    assert not bench.exchange.wait_for_room(0.01, 1)
    assert bench.exchange.full(1) == "shard 1 left 4 calls unanswered"
    assert bench.links.said(0) == bench.links.said(1) == [1, 2, 3, 4]
    bench.answer(1, 1)
    assert bench.exchange.wait_for_room(1.0, 1)
    bench.submit()
    assert bench.links.said(1) == [1, 2, 3, 4, 5]


def test_request_whose_header_is_too_large_is_sent_to_no_shard_and_takes_no_number() -> None:
    bench = Bench(Limits(header_bytes_max=1000))
    large = Assign(0, 0, 0, 1, 64, active=tuple(range(2000)))
    operation = Operation(2)
    with pytest.raises(ProtocolError, match=r"not sent, the limit is 1000.*Applied: no"):
        bench.exchange.submit([Fetch(0, 0, 0, 1, 64), large], operation)
    assert (operation.numbered, bench.links[0].sent, bench.links[1].sent) == (False, [], [])
    for seq in (1, 2, 3, 4):
        assert bench.exchange.has_room()
        bench.submit()
        bench.answer(seq)
    assert bench.exchange.settle(1.0)
    assert (len(bench.completed), bench.links.said(1)) == (4, [1, 2, 3, 4])
    assert len(bench.links.made["unix:1"]) == 1, "the link is used on"
    bench.exchange.close()


def test_seconds_of_waiting_are_counted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(bench.exchange, "now", lambda: clock.now)
    ready = bench.exchange._ready

    def after_2_s(timeout_s: float, kind: object) -> object:
        clock.now += 2.0
        return ready(timeout_s, kind)

    monkeypatch.setattr(bench.exchange, "_ready", after_2_s)
    first, second = bench.submit(), bench.submit()
    bench.answer(1)
    assert bench.exchange.wait(first, 10.0)
    assert bench.exchange.wait(first, 10.0), "it is there: no thread waits"
    assert bench.exchange.waited_s == 2.0
    bench.answer(2)
    assert bench.exchange.settle(10.0)
    assert bench.exchange.waited_s == 4.0
    assert second.complete


# --- slots ------------------------------------------------------------------------------------


def test_lost_slots_of_a_client_that_is_never_quiet_are_bounded(bench: Bench) -> None:
    exchange = bench.exchange
    under_way = bench.submit()
    for seq in range(1, 50):
        exchange.take(1024)  # nothing refers to it: as if an interrupt had come
        following = bench.submit()
        bench.answer(seq)
        assert exchange.wait(under_way, 1.0)
        under_way = following
        assert exchange._pool.in_use <= 4 * 1024


def test_slots_are_aligned_and_never_share_bytes(bench: Bench) -> None:
    slots = [bench.exchange.take(n) for n in (1, 64, 65, 1000, 8, 300_000, 2_000_000, 1)]
    places = sorted((slot.arena, slot.offset, slot.offset + slot.bytes.size) for slot in slots)
    for (arena, _, end), (other, start, _) in itertools.pairwise(places):
        assert other > arena or start >= end
    assert all(slot.offset % 64 == 0 and slot.offset >= 64 for slot in slots)
    bench.exchange.give_back(slots[:1])
    assert bench.exchange.take(1) is slots[0]


def test_arenas_grow_by_half_until_one_slot_needs_more(bench: Bench) -> None:
    slots = list[Slot]()
    for taken in range(1, 31):
        slots.append(bench.exchange.take(FIRST_ARENA_BYTES - 64))
        sizes = [FIRST_ARENA_BYTES, *bench.links[0].attached]
        assert sum(sizes) <= max(1.5 * taken, taken + 1) * FIRST_ARENA_BYTES
    assert bench.links[1].attached == sizes[1:]
    assert len(sizes) <= 10
    slots.append(bench.exchange.take(100 << 20))
    assert bench.links[0].attached[-1] == (100 << 20) + 128


def test_refused_growth_falls_back_to_what_is_needed(bench: Bench) -> None:
    bench.links[1].refuse_arenas_over = 700_000
    held = [bench.exchange.take(FIRST_ARENA_BYTES - 64)]
    slot = bench.exchange.take(500_000)
    assert bench.links[1].attached == [500_128]
    with pytest.raises(Overloaded):
        bench.exchange.take(800_000)
    bench.exchange.give_back([slot])
    assert bench.exchange.take(500_000) is slot
    assert held[0].arena != slot.arena


def test_lost_slots_are_free_at_the_next_take_when_no_request_may_speak_of_them(
    bench: Bench,
) -> None:
    pool = bench.exchange._pool
    lost = bench.exchange.take(64)
    place = lost.arena, lost.offset
    bench.submit()
    del lost  # as by an interrupt
    second = bench.exchange.take(64)
    assert (second.arena, second.offset) != place
    assert pool.in_use == 128
    bench.answer(1)
    assert bench.exchange.settle(1.0)
    third = bench.exchange.take(64)
    assert pool.in_use == 128
    bench.exchange.give_back([second, third])
    assert pool.in_use == 0


# --- links ------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["sending", "reading"])
def test_broken_link_is_made_anew_and_sends_again_in_order(bench: Bench, when: str) -> None:
    first = bench.submit()
    old = bench.links[0]
    if when == "sending":
        old.broken = True
    second = bench.submit()
    if when == "reading":
        old.break_off()
    assert not bench.exchange.poll(second)
    new = bench.links[0]
    assert (new is not old, old.closed) == (True, True)
    assert bench.links.said(0) == [1, 2]
    assert set(bench.exchange._by_fileno) == {new.fileno(), bench.links[1].fileno()}
    bench.answer(1)
    bench.answer(2)
    assert bench.exchange.wait(second, 1.0)
    assert first.complete


def test_answer_that_is_repeated_changes_nothing(bench: Bench) -> None:
    first = bench.submit()
    bench.answer(1)
    assert bench.exchange.wait(first, 1.0)
    second = bench.submit()
    bench.answer(1)
    bench.answer(2)
    assert bench.exchange.wait(second, 1.0)
    assert bench.completed == [first, second]


def test_refusal_of_the_connection_is_the_error_of_what_was_sent(bench: Bench) -> None:
    operation = bench.submit()
    bench.links.refuses["unix:0"] = WorkerFenced("dead", fix="end")
    bench.links[0].reply(Refused(0, "WorkerFenced", "dead", "no", "end"))
    assert bench.exchange.wait(operation, 1.0)
    assert isinstance(operation.error, WorkerFenced)
    assert operation.error.applied == "unknown"  # it may have been applied before


class Mute:
    """A `connect` that meets a server which listens and does not answer, on a clock of its own."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(bench.exchange, "now", lambda: self.now)
        monkeypatch.setattr(bench.exchange, "_dial", self)

    def __call__(self, *_: object, timeout_s: float, **__: object) -> None:
        self.now += timeout_s
        raise ConnectTimeout("busy", fix="wait") from TimeoutError()


def test_time_without_a_call_that_waits_does_not_count_as_silence(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation, mute = bench.submit(), Mute(bench, monkeypatch)
    bench.links[0].break_off()
    for _ in range(2):
        assert not bench.exchange.wait(operation, 10.0)
        mute.now += 60.0
    assert bench.exchange.wait(operation, 20.0)
    assert isinstance(operation.error, ServerGone)
    assert mute.now == pytest.approx(140.0 + Deadlines().stall_s, abs=1.0)


def test_connection_that_breaks_while_it_is_sent_again_ends_the_silence(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation, mute = bench.submit(), Mute(bench, monkeypatch)
    bench.links[0].break_off()

    def breaks_at_once(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(bench.exchange, "_dial", mute)
        link = bench.links(*args, **options)
        link.broken = True
        return link

    assert not bench.exchange.wait(operation, 10.0)
    monkeypatch.setattr(bench.exchange, "_dial", breaks_at_once)
    assert not bench.exchange.wait(operation, 10.0)
    assert operation.error is None


def test_questions_of_several_threads_each_get_their_own_answers(bench: Bench) -> None:
    bench.submit()
    found: dict[str, list[Any]] = {}

    def ask(what: str, question: Callable[[], list[Any]]) -> threading.Thread:
        sent = [len(bench.links[shard].sent) for shard in (0, 1)]
        thread, _ = in_thread(lambda: found.update({what: question()}))
        while any(len(bench.links[shard].sent) == sent[shard] for shard in (0, 1)):
            assert thread.is_alive()
        return thread

    threads = [
        ask("of 3", lambda: bench.exchange.inquire(3, 2.0)),
        ask("reports", lambda: bench.exchange.reports(2.0)),
        ask("of 4", lambda: bench.exchange.inquire(4, 2.0)),
    ]
    waiting = {group: Waiting(group, 0, ((group, 7),), "") for group in (3, 4)}
    for shard in (0, 1):
        for answer in (waiting[3], ServerBeat(shard, ()), waiting[4]):
            bench.links[shard].reply(answer)
    for thread in threads:
        thread.join(5.0)
    assert found["of 3"] == [waiting[3]] * 2
    assert found["reports"] == [ServerBeat(0, ()), ServerBeat(1, ())]
    assert found["of 4"] == [waiting[4]] * 2


# --- several threads --------------------------------------------------------------------------


def test_thread_that_is_interrupted_leaves_the_reading_to_another(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = bench.submit()
    ready = bench.exchange._ready

    def interrupted(timeout_s: float, kind: object) -> None:
        while not bench.exchange._waiters:  # until the other thread waits for this one
            time.sleep(0.001)
        monkeypatch.setattr(bench.exchange, "_ready", ready)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.exchange, "_ready", interrupted)
    threads = [in_thread(lambda: bench.exchange.wait(operation, 30.0)) for _ in range(2)]
    while bench.exchange._ready is not ready:
        time.sleep(0.001)
    bench.answer(1)
    for thread, _ in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert [type(each) for _, errors in threads for each in errors] == [KeyboardInterrupt]
    assert operation.complete


def test_child_of_a_fork_is_told_so_even_if_the_lock_was_held(bench: Bench) -> None:
    operation = bench.submit()
    held = bench.exchange._lock
    thread, _ = in_thread(held.acquire)  # and never released: as in a child of a fork
    thread.join()
    bench.exchange.abandon()
    bench.exchange._pid -= 1
    with pytest.raises(ClientClosed, match="connect anew in the child"):
        bench.exchange.wait(operation, 1.0)


def test_close_with_a_reason_gives_it_to_a_call_under_way_and_to_later_ones(bench: Bench) -> None:
    operation = bench.submit()
    waiting = threading.Event()

    def wait_for_nothing() -> None:
        waiting.set()
        while bench.exchange.wait(Operation(1), 5.0):
            pass

    thread, errors = in_thread(wait_for_nothing)
    assert waiting.wait(5.0)
    reason = ServerGone("server 1 was killed by SIGKILL", applied="unknown", fix="start again")
    bench.exchange.close(reason)
    thread.join(5.0)
    with pytest.raises(ServerGone, match="server 1 was killed") as later:
        bench.submit()
    raised = [*errors, operation.error, later.value]
    assert [str(error) for error in raised] == [str(reason)] * 3
    assert len({id(error) for error in (reason, *raised)}) == 4
