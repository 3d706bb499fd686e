"""Steps: what goes to each shard, tickets, and how their errors and slots are handled."""

from __future__ import annotations

import sys
from contextlib import suppress
from types import FrameType
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from tests.unit.client.fakes import Memory, block_of

from paramserve.client.encoding import Encoder
from paramserve.client.staging import Staged
from paramserve.client.step_parts import BlockPush, StepOptions, StepParts, check_push
from paramserve.client.steps import Steps
from paramserve.client.ticket import Ticket
from paramserve.client.waits import Waits
from paramserve.codecs import Int4
from paramserve.codecs.registry import spec as codec_spec
from paramserve.config import ConsistencySpec
from paramserve.consistency.built_in import Sync
from paramserve.consistency.registry import spec
from paramserve.core.client_session import Operation
from paramserve.core.partition import Block
from paramserve.core.policy_traits import GroupTraits
from paramserve.errors import (
    ClientClosed,
    DefineTimeout,
    ParamServeError,
    PullTimeout,
    PushTimeout,
    ServerGone,
)
from paramserve.messages import (
    Assign,
    Done,
    Fetch,
    GroupPolicy,
    Step,
    SuspendMembership,
    Waiting,
)
from paramserve.rules import SGD

BLOCK = block_of({"a": (30_000,)}, shards=2)
HYPER = (0.5, 0.0, 0.0, 0.0, 0.0, 0.0)


class Bench:
    """Steps over memory, with two shards."""

    def __init__(self, memory: Memory | None = None) -> None:
        self.memory = memory if memory is not None else Memory(shards=2)
        self.terms = GroupTraits(ConsistencySpec("Async"))
        waits = Waits(self.memory, 7, 5.0)  # a fake
        self.steps = Steps(self.memory, 7, waits, self.terms)
        self.steps.versions[BLOCK.group] = [0, 0]

    def send(
        self, what: str = "push", pull: bool = False, block: Block = BLOCK, **options: object
    ) -> object:
        slot = self.memory.take(block.nbytes)
        push = BlockPush(block, slot.array(block), None, HYPER)
        pulled = [block] if pull else []
        waited = self.steps.staged.pop(block.group_name, Staged()).tickets
        step = StepOptions(**options)
        parts = StepParts(what, block, [(push, slot)], pulled, step, staged=waited)
        return self.steps.send([parts])[0]

    def sent(self, which: int) -> list[Step]:
        requests, _ = self.memory.sent[which]
        assert all(isinstance(each, Step) for each in requests)
        return requests


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_each_shard_gets_its_part_of_every_slot(bench: Bench) -> None:
    bench.send(pull=True, tick=True, weight=2.0)
    first, second = bench.sent(0)
    middle = BLOCK.spec.cuts[1] * 8
    assert (first.tick, first.clock, first.weight, first.skip) == (True, 0, 2.0, False)
    for shard in ("push", "pull"):
        low, high = getattr(first, shard)[0], getattr(second, shard)[0]
        assert (low.arena, high.offset - low.offset) == (1, middle)
    assert first.push[0].hyper == HYPER
    assert first.push[0].offset != first.pull[0].offset


def test_clock_grows_with_each_tick_only(bench: Bench) -> None:
    for tick in (True, False, True):
        bench.send(tick=tick)
    assert [bench.sent(n)[0].clock for n in range(3)] == [0, 1, 1]
    assert bench.steps.clocks == {"default": 2}


def test_skip_sends_no_gradients_and_gives_their_slots_back(bench: Bench) -> None:
    bench.send(skip=True, tick=True)
    assert [(each.push, each.skip) for each in bench.sent(0)] == [((), True)] * 2
    bench.memory.answer()
    assert bench.memory.taken == []


def test_flush_with_nothing_left_out_is_sent_once_and_by_no_call_that_only_pulls(
    bench: Bench,
) -> None:
    block = Block(structs.replace(BLOCK.spec, push=codec_spec(Int4())))
    bench.memory.shared = True  # type: ignore[attr-defined]
    encoder = bench.steps.encoder = Encoder(0, lambda sizes: [bench.memory.take(n) for n in sizes])
    asked = Operation(1)
    asked.answered(0, Done(0, flush=(7, -1, 0)))
    encoder.answered([], asked)
    bench.steps.send([StepParts("pull", block, [], [block], StepOptions())])
    for _ in range(2):
        bench.send(block=block, tick=True)
    assert [bench.sent(n)[0].flush for n in range(3)] == [0, 7, 0]


@pytest.mark.parametrize("what", ["pull", "assign"])
def test_flush_may_be_asked_for_in_the_answer_to_any_call(bench: Bench, what: str) -> None:
    """Also to one that encodes nothing."""
    block = Block(structs.replace(BLOCK.spec, push=codec_spec(Int4())))
    bench.memory.shared = True  # type: ignore[attr-defined]
    bench.steps.encoder = Encoder(0, lambda sizes: [bench.memory.take(n) for n in sizes])
    if what == "pull":
        bench.steps.send([StepParts("pull", block, [], [block], StepOptions())])
    else:
        with suppress(PushTimeout):  # memory has no thread that answers
            bench.steps.finish(what, [Assign(0, block.id, 0, 0, 0)] * 2, 0.0, [])
    _, operation = bench.memory.sent[0]
    for shard in range(2):
        operation.answered(shard, Done(0, flush=(7, -1, 0)))
    bench.send(block=block, tick=True)
    assert bench.sent(1)[0].flush == 7


def test_base_is_the_version_read_last_on_each_shard(bench: Bench) -> None:
    ticket = bench.send(pull=True)
    _, operation = bench.memory.sent[0]
    operation.answered(0, Done(0, version=4))
    operation.answered(1, Done(0, version=6))
    assert ticket.result().version == 4
    bench.send()
    assert [each.base for each in bench.sent(1)] == [4, 6]


def test_gradient_slots_go_back_when_all_shards_have_answered(bench: Bench) -> None:
    ticket = bench.send(pull=True)
    assert len(bench.memory.taken) == 2
    bench.memory.answer(version=1)
    assert len(bench.memory.taken) == 1
    ticket.release()
    ticket.release()
    assert bench.memory.taken == []


def test_outcome_is_the_worst_of_the_shards(bench: Bench) -> None:
    ticket = bench.send()
    _, operation = bench.memory.sent[0]
    assert not ticket.done()
    operation.answered(1, Done(0, version=5, staleness=1, skipped=True))
    operation.answered(0, Done(0, version=7, staleness=3))
    assert ticket.done()
    outcome = ticket.result()
    assert (outcome.version, outcome.staleness, outcome.skipped) == (5, 3, True)


def test_unread_errors_are_raised_once_oldest_first_and_free_their_slots(bench: Bench) -> None:
    for which in range(2):
        bench.send(pull=True)
        bench.memory.refuse(which)
    for which in range(2):
        with pytest.raises(ParamServeError, match=f"no {which}"):
            bench.steps.begin()
    bench.steps.begin()
    assert bench.memory.taken == []


def test_error_that_another_thread_reads_meanwhile_is_raised_by_the_next_call(
    bench: Bench,
) -> None:
    """It comes between any two instructions, as a thread that reads answers holds no lock."""
    bench.send()
    bench.memory.refuse(0)
    found = bench.steps._unread
    came: list[Ticket] = []

    def another(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not Steps.raise_unread.__code__:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode" and len(came) < 100:
            ticket = Ticket(bench.steps, "push", BLOCK.group)
            ticket.operation = Operation(1)
            came.append(ticket)
            found[ticket] = None
        return another

    before = sys.gettrace()
    sys.settrace(another)
    try:
        with pytest.raises(ParamServeError, match="no 0"):
            bench.steps.begin()
    finally:
        sys.settrace(before)
    assert list(found) == came != []


def test_error_read_from_one_of_a_steps_tickets_is_not_raised_again(bench: Bench) -> None:
    staged = bench.steps.stage(BLOCK, Staged(), None)
    with pytest.raises(ClientClosed, match="not ended"):
        staged.result()
    ticket = bench.send("tick", tick=True)
    bench.memory.refuse(kind="HyperMismatch")
    for each in (staged, ticket, staged):
        with pytest.raises(ParamServeError, match="no 0"):
            each.result()
    bench.steps.begin()


def test_full_window_leaves_staged_tickets_and_slots_alone(bench: Bench) -> None:
    staged = bench.steps.stage(BLOCK, Staged(), None)
    bench.memory.no_room = True
    with pytest.raises(PushTimeout, match=r"shard 0 is full: .*Applied: no"):
        bench.steps.begin()
    with pytest.raises(PullTimeout, match=r"shard 0 is full: .*Applied: no"):
        bench.steps.begin(0.0, "pull")
    bench.memory.no_room = False
    bench.steps.begin()
    bench.send("tick", tick=True)
    bench.memory.answer(version=1)
    assert staged.result().version == 1


def test_step_that_cannot_be_sent_gives_all_slots_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: object) -> None:
        raise ClientClosed("closed", fix="none")

    monkeypatch.setattr(bench.memory, "submit", closed)
    with pytest.raises(ClientClosed):
        bench.send(pull=True, tick=True)
    assert bench.memory.taken == []
    assert bench.steps.clocks == {}


def test_forgotten_ticket_gives_its_slots_back_when_it_is_answered(bench: Bench) -> None:
    ticket = bench.send("pull", pull=True)
    with pytest.raises(PullTimeout, match="rank 7 waited"):
        ticket.result(0.0)
    bench.steps.forget(ticket)
    bench.steps.begin()
    assert len(bench.memory.taken) == 2
    bench.memory.answer()
    bench.steps.begin()
    assert bench.memory.taken == []


@pytest.mark.parametrize(
    ("what", "error", "applied"),
    [
        ("push", PushTimeout, "unknown"),
        ("tick", PushTimeout, "unknown"),
        ("assign", PushTimeout, "unknown"),
        ("define", DefineTimeout, "unknown"),
        ("pull", PullTimeout, "no"),
        ("fetch", PullTimeout, "no"),
    ],
)
def test_timeout_says_what_was_late_and_who_is_missing(
    bench: Bench, what: str, error: type[ParamServeError], applied: str
) -> None:
    bench.memory.waiting = [
        Waiting(1, 3, ((1, 3), (2, 2)), "the clock waits"),
        Waiting(1, 3, (), "shard 1 waits for shard 0"),
    ]
    late = bench.steps.waits.timed_out(what, 1, 2.0)
    assert type(late) is error
    assert late.applied == applied
    assert "rank 7 waited 2.0 s" in str(late)
    assert "worker 1 (at clock 3), worker 2 (at clock 2); shard 1 waits for shard 0" in str(late)
    assert "the servers did not answer" in str(bench.steps.waits.timed_out(what, None, 2.0))


def test_finish_gives_slots_back_only_when_answered(bench: Bench) -> None:
    slot = bench.memory.take(64)
    requests = [Fetch(0, 0, 0, 1, 0)] * 2
    with pytest.raises(PullTimeout):
        bench.steps.finish("fetch", requests, 0.0, [slot])
    assert bench.memory.taken == [slot]
    bench.memory.answer()
    assert bench.memory.taken == []
    bench.memory.gone = ServerGone("gone", fix="start again")
    slot = bench.memory.take(64)
    with pytest.raises(ServerGone):
        bench.steps.finish("fetch", requests, 0.0, [slot])
    assert bench.memory.taken == []


def test_momentum_may_be_turned_off(bench: Bench) -> None:
    block = block_of({"w": (2,)}, rule=SGD(0.1, momentum=0.9))
    check_push(BlockPush(block, np.zeros(2), (0,), HYPER))


# --- what answers say besides ---------------------------------------------------------------------


def clock(bench: Bench) -> int:
    return bench.steps.clocks["default"]


def test_late_step_goes_on_at_the_latest_clock_that_a_shard_names(bench: Bench) -> None:
    bench.send(tick=True)
    _, operation = bench.memory.sent[0]
    operation.answered(0, Done(0, skipped=True, at=4))
    assert (clock(bench), bench.steps.missed) == (1, 0), "not all have answered"
    operation.answered(1, Done(0, skipped=True, at=6))
    assert (clock(bench), bench.steps.missed) == (6, 5)
    bench.send(tick=True)
    assert (bench.sent(1)[0].clock, clock(bench)) == (6, 7)


def test_late_steps_on_their_way_count_each_missed_clock_once(bench: Bench) -> None:
    for _ in range(2):
        bench.send(tick=True)
    bench.memory.answer(0, skipped=True, at=5)
    assert (clock(bench), bench.steps.missed) == (5, 3)
    bench.memory.answer(1, skipped=True, at=6)
    assert (clock(bench), bench.steps.missed) == (6, 4), "two own steps and four missed ones"


def test_clock_never_goes_back(bench: Bench) -> None:
    for _ in range(3):
        bench.send(tick=True)
    bench.memory.answer(0, skipped=True, at=1)
    assert (clock(bench), bench.steps.missed) == (3, 0)
    bench.steps.advance_to("default", 2)
    assert clock(bench) == 3


def test_step_that_was_not_skipped_has_missed_nothing(bench: Bench) -> None:
    bench.send(tick=True)
    bench.memory.answer(at=9)
    assert (clock(bench), bench.steps.missed) == (9, 0)


def test_answer_that_comes_before_its_step_was_counted_is_not_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may read it at once."""
    submit = bench.memory.submit

    def answered_at_once(requests: Any, operation: Any, numbered: Any = None) -> None:
        submit(requests, operation, numbered)
        bench.memory.answer(skipped=True, at=8)

    monkeypatch.setattr(bench.memory, "submit", answered_at_once)
    bench.send(tick=True)
    assert (clock(bench), bench.steps.missed) == (8, 7)


def test_retired_worker_is_told_by_any_answer(bench: Bench) -> None:
    bench.send()
    bench.memory.answer(version=1)
    assert not bench.steps.retiring
    bench.send()
    _, operation = bench.memory.sent[1]
    operation.answered(0, Done(0))
    operation.answered(1, Done(0, retire=True))
    bench.send()
    bench.memory.answer(2)
    assert bench.steps.retiring


@pytest.mark.parametrize("kind", ["step", "suspend"])
def test_news_hold_from_their_clock_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    news = GroupPolicy(BLOCK.group, 1, 2, spec(Sync()))
    if kind == "step":
        bench.send(tick=True)
        bench.memory.answer(news=(news,))
    else:
        monkeypatch.setattr(
            bench.memory, "wait", lambda *_, **__: bench.memory.answer(news=(news,)) or True
        )
        bench.steps.finish("suspend", [SuspendMembership(0, BLOCK.group)] * 2, 1.0, ())
        bench.send(tick=True)
    assert not bench.steps.traits_of(BLOCK).collects
    bench.send(tick=True)
    assert bench.steps.traits_of(BLOCK).collects


def test_mark_is_asked_for_once_a_tick_and_factor_is_in_every_step(bench: Bench) -> None:
    marks = iter([(3, 8), None, (3, 16)])
    bench.steps.next_mark = lambda: next(marks)
    bench.steps.factor = 0.5
    for tick in (True, False, True, True):
        bench.send(tick=tick)
    told = [[(each.mark, each.factor) for each in bench.sent(n)] for n in range(4)]
    assert told == [[(mark, 0.5)] * 2 for mark in ((3, 8), None, None, (3, 16))]
    assert next(marks, "no more") == "no more"
