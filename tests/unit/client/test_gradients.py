"""Gradients on their way into shared memory."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.client.fakes import Memory, block_of

from paramserve.client import gradients
from paramserve.client.gradients import CLIP_EPSILON, Gradients, Pushes, clip
from paramserve.client.names import Names
from paramserve.client.step_parts import BlockPush, Filling
from paramserve.compiling import load_kernels
from paramserve.core.partition import Block
from paramserve.errors import NonFinite, Overloaded, ParamServeError

BLOCK = block_of({"a": (3,), "b": (2,)})
ONE = np.ones(3)
TWO = np.full(2, 2.0)


class Bench:
    """Gradients with their memory and the blocks that are known."""

    def __init__(self, refuses: bool = True) -> None:
        self.memory, self.names = Memory(), Names()
        self.names.add(BLOCK)
        self.memory.blocks[BLOCK.id] = BLOCK
        self.refuses = refuses
        self.gradients = Gradients(self.memory, self.asked, 3)  # a fake
        self.kept: dict[int, Filling] = {}

    def asked(self, block: Block) -> bool:
        assert block is BLOCK
        return self.refuses

    def lend(self, name: str) -> np.ndarray:
        return self.gradients.lend(BLOCK, self.names.piece(name))

    def capture(self, given: dict[str, np.ndarray]) -> tuple[Pushes, bool]:
        selection = self.names.select(tuple(given))
        return self.gradients.capture(selection, selection.checked_gradients(given))

    def stage(self, given: dict[str, np.ndarray], at_once: bool = False) -> None:
        selection = self.names.select(tuple(given))
        self.gradients.stage(selection, selection.checked_gradients(given), self.kept, at_once)


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    load_kernels(np.dtype(np.float32))
    load_kernels(np.dtype(np.float64))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_capture_copies_all_or_the_named_pieces(bench: Bench) -> None:
    ((whole, _),), largest = bench.capture({"a": ONE, "b": TWO})
    assert (whole.active, largest) == (None, 2.0)
    assert whole.gradient.tolist() == [1, 1, 1, 2, 2]
    ((part, _),), largest = bench.capture({"b": TWO})
    assert (part.active, largest) == ((1,), 2.0)
    assert part.gradient[3:].tolist() == [2, 2]
    assert len(bench.memory.taken) == 2


def test_capture_hands_over_what_was_lent(bench: Bench) -> None:
    a = bench.lend("a")
    a[:] = 5.0
    ((push, slot),), _ = bench.capture({"a": a, "b": TWO})
    assert np.shares_memory(slot.bytes, a)
    assert push.gradient.tolist() == [5, 5, 5, 2, 2]
    assert not np.shares_memory(bench.lend("a"), a)


def test_refused_capture_leaves_everything_as_it_was(bench: Bench) -> None:
    a = bench.lend("a")
    a[:] = np.nan
    with pytest.raises(NonFinite, match="gradient of 'a' on rank 3 holds NaN or Inf"):
        bench.capture({"a": a})
    assert len(bench.memory.taken) == 1
    assert np.shares_memory(bench.lend("a"), a)
    with pytest.raises(NonFinite, match="'b'"):
        bench.capture({"b": TWO * np.inf})
    assert len(bench.memory.taken) == 1


def test_stage_of_some_pieces_has_no_others(bench: Bench) -> None:
    bench.stage({"b": TWO})
    ((push, _),), _ = bench.gradients.staged(bench.kept)
    assert push.active == (1,)


@pytest.mark.parametrize("first", [True, False], ids=["nothing staged", "something staged"])
def test_refused_stage_stages_nothing_of_it(bench: Bench, first: bool) -> None:
    if not first:
        bench.stage({"a": ONE, "b": TWO})
    with pytest.raises(NonFinite, match="'b'"):
        bench.stage({"a": ONE, "b": TWO * np.nan})
    assert len(bench.memory.taken) == (0 if first else 1)
    bench.stage({"a": ONE, "b": TWO})
    ((push, _),), _ = bench.gradients.staged(bench.kept)
    factor = 1 if first else 2
    assert push.gradient.tolist() == [factor, factor, factor, 2 * factor, 2 * factor]


@pytest.mark.parametrize("pushed", ["the lent one", "another"])
def test_lent_gradient_written_to_between_push_and_tick_is_refused_at_the_tick(
    bench: Bench, pushed: str
) -> None:
    a = bench.lend("a")
    a[:] = 1.0
    bench.stage({"a": a if pushed == "the lent one" else ONE})
    bench.stage({"b": TWO})
    a[1] = np.nan
    with pytest.raises(NonFinite, match="gradient of 'a' on rank 3 holds NaN or Inf"):
        bench.gradients.staged(bench.kept)
    assert bench.memory.taken == []


def test_lent_gradient_that_has_grown_since_the_push_is_said_to_be_as_large_as_it_is(
    bench: Bench,
) -> None:
    a = bench.lend("a")
    a[:] = 1.0
    bench.stage({"a": a})
    a[1] = 5.0
    assert bench.gradients.staged(bench.kept)[1] == 5.0


def test_call_that_ticks_looks_at_a_lent_gradient_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = bench.lend("a")
    a[:] = 3.0
    bench.stage({"a": a, "b": TWO}, at_once=True)
    monkeypatch.setattr(gradients, "compiled", None)
    assert bench.gradients.staged(bench.kept)[1] == 3.0


def test_stage_without_a_rule_is_refused(bench: Bench) -> None:
    fixed = block_of({"f": (2,)}, number=1, rule=None)
    bench.names.add(fixed)
    with pytest.raises(ParamServeError, match="'f' has no rule"):
        bench.stage({"a": ONE, "f": TWO})
    assert bench.kept == {}


def test_slot_and_staged_gradients_do_not_mix(bench: Bench) -> None:
    bench.stage({"a": ONE, "b": TWO})
    bench.gradients.slot(BLOCK)[:] = 99.0
    ((push, _),), _ = bench.gradients.staged(bench.kept)
    assert push.gradient.tolist() == [1, 1, 1, 2, 2]


def test_drop_gives_the_slots_back(bench: Bench) -> None:
    slot = bench.gradients.slot(BLOCK)
    bench.gradients.drop([BlockPush(BLOCK, slot)])
    assert bench.memory.taken == []


@pytest.mark.parametrize("active", [None, (0,)])
def test_clip_scales_the_active_pieces_by_their_norm(
    bench: Bench, active: tuple[int, ...] | None
) -> None:
    slot = bench.gradients.slot(BLOCK)
    slot[:] = [3.0, 0.0, 4.0, 12.0, 0.0]
    pushes, _ = bench.gradients.take([BlockPush(BLOCK, slot, active)])
    clip(pushes, 1.0)
    norm = (13.0 if active is None else 5.0) + CLIP_EPSILON
    assert slot[:3] == pytest.approx(np.array([3.0, 0.0, 4.0]) / norm)
    assert slot[3] == (12.0 if active else pytest.approx(12.0 / norm))
    before = slot.copy()
    clip(pushes, 100.0)
    assert np.array_equal(slot, before)


def test_terms_are_asked_for_when_something_is_not_finite(bench: Bench) -> None:
    """They may change from one step to the next."""
    bench.stage({"a": ONE})
    bench.refuses = False
    bench.stage({"b": TWO * np.nan})
    bench.refuses = True
    with pytest.raises(NonFinite, match="'b'"):
        bench.gradients.staged(bench.kept)
    slot = bench.gradients.slot(BLOCK)
    slot[:] = np.nan
    with pytest.raises(NonFinite, match="'a'"):
        bench.gradients.take([BlockPush(BLOCK, slot)])
    bench.refuses = False
    assert bench.gradients.take([BlockPush(BLOCK, slot)])[1] == np.inf


@pytest.mark.parametrize("stages", [False, True])
def test_push_without_memory_for_all_its_blocks_leaves_everything_as_it_was(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, stages: bool
) -> None:
    second, large = block_of({"c": (2,)}, number=1), block_of({"d": (9,)}, number=2)
    for block in (second, large):
        bench.names.add(block)
    take = bench.memory.take

    def full(nbytes: int) -> object:
        if nbytes == large.nbytes:
            raise Overloaded("no memory", fix="push less")
        return take(nbytes)

    monkeypatch.setattr(bench.memory, "take", full)
    arrays = {"a": bench.lend("a"), "c": TWO, "d": np.ones(9)}
    arrays["a"][:] = 1.0
    push = bench.stage if stages else bench.capture
    for _ in range(2):
        with pytest.raises(Overloaded):
            push(arrays)
    assert (len(bench.memory.taken), bench.kept) == (1, {}), "the lent one only"
    assert np.shares_memory(bench.lend("a"), arrays["a"])
