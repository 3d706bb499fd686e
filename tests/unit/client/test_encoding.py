"""What is kept of what a codec leaves out: error feedback with drops, decay and clipping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from tests.unit.client.fakes import block_of

from paramserve.client.encoding import Captured, Encoded, Encoder, in_words
from paramserve.client.exchange import Slot
from paramserve.client.step_parts import BlockPush
from paramserve.codecs import BFloat16, Codec, Feedback, Int2, Int4, Int8, Sign, TopK
from paramserve.codecs.registry import spec
from paramserve.compiling import load_codecs
from paramserve.core.client_session import Operation
from paramserve.core.partition import Block
from paramserve.messages import Done, Refused
from paramserve.rules import Add
from paramserve.rules.compiled import compiled

SIZES = {"a": (30, 10), "b": (340,)}
CUTS = (0, 250, 640)
SHARDS = 2


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    load_codecs()
    compiled().prepare(np.dtype(np.float32))


def take(sizes: Sequence[int]) -> list[Slot]:
    return [Slot(0, 0, np.zeros(-(-size // 64) * 64, np.uint8)) for size in sizes]


def block_with(codec: Codec, **options: Any) -> Block:
    plain = block_of(SIZES, dtype="float32", rule=Add(), **options)
    return Block(structs.replace(plain.spec, cuts=CUTS, push=spec(codec)))


@dataclass
class Pushed:
    """A gradient as it was, what arrives of it, and where it is applied."""

    gradient: Any
    decoded: Any
    active: Any
    """[size]: whether its piece has a gradient."""
    encoded: Encoded
    applied: tuple[bool, ...]


def push(
    encoder: Encoder,
    block: Block,
    drawn: np.random.Generator,
    lost: float,
    before: Sequence[Pushed] = (),
) -> Pushed:
    """Send a random gradient, of which each shard drops its part with the rate `lost`.

    Args:
        before: what is answered when it is encoded and not yet sent.
    """
    codec = block.push_codec
    assert codec is not None
    (slot,) = take([block.nbytes])
    gradient = slot.array(block)
    gradient[:] = drawn.normal(size=block.size)
    pieces = ((0,), (1,), None, None)[drawn.integers(4)]
    active = np.ones(block.size, bool)
    if pieces is not None:
        gone = 1 - pieces[0]
        active[block.starts[gone] : block.starts[gone + 1]] = False
    encoded = encoder.encode(BlockPush(block, gradient, pieces), slot, [])
    decoded = np.zeros(block.size, np.float32)
    for shard, header in enumerate(encoded.headers):
        low, high = block.range(shard)
        data = encoded.slot.bytes[header.offset : header.offset + header.extent]
        codec.decode(data, decoded[low:high])
    for each in before:
        answer(encoder, each)
    encoder.sent([encoded])
    applied = tuple(drawn.random(SHARDS) >= lost)
    return Pushed(gradient.copy() * active, decoded, active, encoded, applied)


def answer(encoder: Encoder, pushed: Pushed) -> None:
    operation = Operation(SHARDS)
    for shard, applied in enumerate(pushed.applied):
        refused = not applied and shard == 0
        reply = Refused(1, "NonFinite", "", "no", "") if refused else Done(1, skipped=not applied)
        operation.answered(shard, reply)
    encoder.answered([pushed.encoded], operation)


def left_of(block: Block, pushes: Sequence[Pushed], decay: float) -> Any:
    """The residual as if only what was applied had been pushed."""
    left = np.zeros(block.size, np.float64)
    for each in pushes:
        for shard, applied in enumerate(each.applied):
            low, high = block.range(shard)
            if applied:
                new = decay * left + each.gradient - each.decoded
                left[low:high] = np.where(each.active, new, left)[low:high]
    return left


@pytest.mark.parametrize("meanwhile", [False, True])
@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("decay", [1.0, 0.75])
@pytest.mark.parametrize("kind", [Int4, Int2, Sign, TopK], ids=lambda kind: kind.__name__)
def test_residual_is_that_of_what_was_applied(
    kind: Any, decay: float, window: int, meanwhile: bool
) -> None:
    """Answers come between two pushes, or while one is about to be sent."""
    feedback = Feedback(decay=decay) if decay < 1.0 else True
    block = block_with(kind(feedback=feedback))
    encoder, drawn = Encoder(0, take), np.random.default_rng(window)
    pushes = list[Pushed]()
    for number in range(30):
        before = pushes[number - window : number - window + 1] if number >= window else []
        if not meanwhile:
            for each in before:
                answer(encoder, each)
        pushes.append(push(encoder, block, drawn, 0.3, before if meanwhile else ()))
    for each in pushes[len(pushes) - window :]:
        answer(encoder, each)
    assert any(any(each.applied) != all(each.applied) for each in pushes)
    left = left_of(block, pushes, decay)
    assert np.linalg.norm(left) > 1.0
    np.testing.assert_allclose(encoder.residual(block), left, atol=2e-5)


def test_residual_is_clipped_by_its_norm_where_it_is_added() -> None:
    block = block_with(TopK(0.05, feedback=Feedback(decay=0.5, clip_norm=2.0)))
    encoder, drawn = Encoder(0, take), np.random.default_rng(1)
    left, clipped = np.zeros(block.size), 0
    for _ in range(12):
        pushed = push(encoder, block, drawn, 0.0)
        added = 0.5 * left * pushed.active
        norm = np.linalg.norm(added)
        clipped += norm > 2.0
        added *= min(1.0, 2.0 / max(norm, 1e-9))
        new = added + pushed.gradient - pushed.decoded
        left = np.where(pushed.active, new, left)
        answer(encoder, pushed)
        np.testing.assert_allclose(encoder.residual(block), left, atol=1e-5)
    assert 3 < clipped < 12


def test_report_counts_bytes_and_measures_what_is_left_out_by_group() -> None:
    encoder, drawn = Encoder(0, take), np.random.default_rng(2)
    first = block_with(Sign(), number=1, group="one")
    second = block_with(Sign(), number=2, group="one")
    other = block_with(Int4(feedback=False), number=3, group="two")
    assert encoder.report() == ()
    for block in (first, second, second, other):
        answer(encoder, push(encoder, block, drawn, 0.0))
    told = {each.group: each for each in encoder.report()}
    size = sum(Sign().size(high - low) for low, high in map(first.range, range(SHARDS)))
    left = np.concatenate([encoder.residual(first), encoder.residual(second)])
    assert (told["one"].sent_bytes, told["one"].plain_bytes) == (3 * size, 3 * 4 * 640)
    assert told["one"].residual_norm == pytest.approx(np.linalg.norm(left), rel=1e-6)
    assert told["one"].residual_norm > 1.0
    assert told["two"].plain_bytes == 4 * 640
    assert told["two"].residual_norm == 0.0
    assert encoder.sent_bytes == told["one"].sent_bytes + told["two"].sent_bytes


def answer_after(encoder: Encoder, pushed: Pushed, cut: int) -> None:
    """All shards have applied it, and say that a cut lies before it (0: say nothing)."""
    operation = Operation(SHARDS)
    for shard in range(SHARDS):
        operation.answered(shard, Done(1, taken=cut or -1))
    encoder.answered([pushed.encoded], operation)


def capturing(kind: Any = Int4) -> tuple[Encoder, Block, list[Captured]]:
    encoder, captured = Encoder(0, take), list[Captured]()
    encoder.captured = captured.append
    return encoder, block_with(kind()), captured


def test_residual_of_a_cut_is_as_the_last_push_in_it_left_it() -> None:
    """Bit by bit, whatever is on its way; and it is copied once."""
    encoder, block, captured = capturing()
    drawn = np.random.default_rng(0)
    first = push(encoder, block, drawn, 0.0)
    answer_after(encoder, first, 0)
    expected = encoder.residual(block)
    assert expected is not None
    behind = [push(encoder, block, drawn, 0.0) for _ in range(3)]
    for each in behind:
        answer_after(encoder, each, 5)
    ((cut, ((found_block, found),)),) = captured
    assert (cut, found_block.id) == (5, block.id)
    assert found.tobytes() == expected.tobytes()


def test_residual_of_a_cut_waits_for_answers_that_are_in_it() -> None:
    encoder, block, captured = capturing()
    drawn = np.random.default_rng(0)
    pushes = [push(encoder, block, drawn, 0.0) for _ in range(3)]
    for number, each in enumerate(pushes, 1):
        each.encoded.seq = number
    answer_after(encoder, pushes[0], 0)
    encoder.cut_at(5, 2)
    assert not captured
    answer_after(encoder, pushes[1], 0)
    ((_, ((_, found),)),) = captured
    expected = sum(each.gradient - each.decoded for each in pushes[:2])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    encoder.cut_at(5, 2)
    encoder.cut_at(4, 1)
    assert len(captured) == 1, "of a cut that is known, and of an older one"


def test_residual_is_not_copied_where_it_may_be_of_a_later_push() -> None:
    """A refusal of which a part was applied does not say whether it is behind a cut."""
    encoder, block, captured = capturing()
    drawn = np.random.default_rng(0)
    refused = push(encoder, block, drawn, 0.0)
    operation = Operation(SHARDS)
    for shard in range(SHARDS):
        operation.answered(shard, Refused(1, "Overloaded", "", "yes", ""))
    encoder.answered([refused.encoded], operation)
    found = encoder.residual(block)
    assert found is not None
    np.testing.assert_allclose(found, refused.gradient - refused.decoded, atol=1e-5)
    answer_after(encoder, push(encoder, block, drawn, 0.0), 5)
    assert not captured
    answer_after(encoder, push(encoder, block, drawn, 0.0), 6)
    assert [each.cut for each in captured] == [6]


def test_client_that_begins_with_a_residual_adds_it_to_its_first_gradient() -> None:
    encoder, block, _ = capturing()
    left = np.random.default_rng(1).normal(size=block.size).astype(np.float32)
    encoder.begin(block, left.copy())
    pushed = push(encoder, block, np.random.default_rng(0), 0.0)
    answer_after(encoder, pushed, 0)
    whole = left + pushed.gradient
    found = encoder.residual(block)
    assert found is not None
    expected = np.where(pushed.active, whole - pushed.decoded, left)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_codecs_are_told_in_words() -> None:
    plain = block_of(SIZES, dtype="float32", rule=Add())
    assert in_words("model", [plain], local=True) == ""
    both = structs.replace(plain.spec, push=spec(Int8()), pull=spec(BFloat16()))
    blocks = [Block(both), Block(both)]
    told = (
        "group 'model' pushes ps.Int8 (25.5% of the bytes) and pulls ps.BFloat16 (50% of the bytes)"
    )
    assert in_words("model", blocks, local=False) == told
    whole = "; rank 0 sends and gets whole values, since its servers are on its host"
    assert in_words("model", blocks, local=True, clock=7, lost=[0]) == told + whole
    assert in_words("model", blocks, local=False, clock=7) == told
    lost = "; what was left out of the gradients of ranks 0, 3 before clock 7 is lost"
    assert in_words("model", blocks, local=False, clock=7, lost={3, 0}) == told + lost
    sparse = Block(structs.replace(plain.spec, push=spec(TopK(0.01, even_local=True))))
    told = "group 'model' pushes ps.TopK (at most 2.46% of the bytes)"
    assert in_words("model", [sparse], local=True) == told


def test_what_is_drawn_depends_on_the_rank_and_the_clock_and_not_on_earlier_pushes() -> None:
    block = block_with(Int8(rounding="stochastic", feedback=False))
    values = np.random.default_rng(0).normal(size=block.size)

    def sent(encoder: Encoder, clock: int) -> bytes:
        (slot,) = take([block.nbytes])
        gradient = slot.array(block)
        gradient[:] = values
        return encoder.encode(BlockPush(block, gradient), slot, [], clock).slot.bytes.tobytes()

    whole, later = Encoder(1, take), Encoder(1, take)
    found = [sent(whole, clock) for clock in (0, 1, 1, 2)]
    assert len(set(found)) == 4
    assert [sent(later, clock) for clock in (1, 1, 2)] == found[1:]
    assert sent(Encoder(2, take), 2) != found[3]


def test_whole_gradient_takes_along_what_was_left_out_and_then_there_is_nothing() -> None:
    block = block_with(TopK(0.1))
    encoder, drawn = Encoder(0, take), np.random.default_rng(3)
    assert encoder.whole(BlockPush(block, np.zeros(block.size, np.float32)), []) is None
    answer(encoder, push(encoder, block, drawn, 0.0))
    left = encoder.residual(block)
    assert left is not None
    given = drawn.normal(size=block.size).astype(np.float32)
    some = given.copy()
    some[block.starts[1] :] = np.nan  # has no gradient, and is not looked at

    def applied(encoded: Encoded) -> Pushed:
        return Pushed(None, None, None, encoded, (True,) * SHARDS)

    first = encoder.whole(BlockPush(block, some, (0,)), [])
    assert first is not None
    encoder.sent([first])
    second = encoder.whole(BlockPush(block, given), [])
    assert second is not None
    answer(encoder, applied(first))  # while the second one is about to be sent
    encoder.sent([second])
    answer(encoder, applied(second))
    both = first.slot.array(block) + second.slot.array(block)
    wanted = given + left
    wanted[: block.starts[1]] += given[: block.starts[1]]
    np.testing.assert_allclose(both, wanted, atol=1e-6)
    assert encoder.residual(block) is None
    assert encoder.whole(BlockPush(block, given), []) is None
