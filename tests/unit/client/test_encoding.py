"""What is kept of what a codec leaves out: error feedback with drops, decay and clipping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from tests.suites import each_case
from tests.unit.client.fakes import block_of

from paramserve.client.encoding import Encoded, Encoder, in_words
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
        data = encoded.slot.bytes[header.offset : header.offset + header.encoded_bytes]
        codec.decode(data, decoded[low:high])
    for each in before:
        answer(encoder, each)
    encoder.mark_sent([encoded])
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


@each_case("kind", [Int4, Int2, Sign, TopK], ids=lambda kind: kind.__name__)
def test_residual_is_that_of_what_was_applied(kind: Any) -> None:
    for decay, window, meanwhile in product((1.0, 0.75), (1, 2, 5), (False, True)):
        check_residual(kind, decay, window, meanwhile)


def check_residual(kind: Any, decay: float, window: int, meanwhile: bool) -> None:
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
    case = str((decay, window, meanwhile))
    assert any(any(each.applied) != all(each.applied) for each in pushes), case
    left = left_of(block, pushes, decay)
    assert np.linalg.norm(left) > 1.0, case
    np.testing.assert_allclose(encoder.residual(block), left, atol=2e-5, err_msg=case)


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


def test_flush_is_made_once_and_again_where_a_shard_has_not_applied_it() -> None:
    """By the next call, or by the one of a clock."""
    block = block_with(Int4())
    encoder, drawn = Encoder(0, take), np.random.default_rng(0)
    asked = push(encoder, block, drawn, 0.0)
    operation = Operation(SHARDS)
    operation.answered(0, Done(1, flush=(3, -1, 0)))
    operation.answered(1, Done(1))
    assert encoder.flush_of([(0, 5)], [block]) == 0
    assert encoder.leaves(block.group, {block.id: asked.encoded})
    encoder.answered([asked.encoded], operation)
    for dropped in (True, False):
        assert encoder.flush_of([(0, 5)], [block]) == 3
        whole = encoder.whole(BlockPush(block, drawn.normal(size=block.size).astype("f4")), [])
        assert whole is not None
        assert not encoder.leaves(block.group, {block.id: whole})
        encoder.mark_sent([whole], 3)
        assert encoder.flush_of([(0, 5)], [block]) == 0
        pushed = Pushed(None, None, None, whole, (True, not dropped))
        answer(encoder, pushed)
        low, high = block.range(1)
        left = encoder.residual(block)
        assert (left is not None and left[low:high].any()) == dropped
    again = push(encoder, block, drawn, 0.0)
    operation = Operation(SHARDS)
    operation.answered(0, Done(1, flush=(4, 2, 7)))
    operation.answered(1, Done(1))
    encoder.answered([again.encoded], operation)
    assert [encoder.flush_of([(1, 7), (2, clock)], [block]) for clock in (6, 7, 8)] == [0, 4, 0]


def test_flush_is_that_which_was_asked_for_last_and_of_a_push_whose_codec_leaves_out() -> None:
    """A second request of the same number may have a lower group, or none; an older one counts
    no more."""
    encoder, block = Encoder(0, take), block_with(Int4())
    for flush in ((5, 3, 11), (5, 1, 40), (4, 3, 12)):
        operation = Operation(1)
        operation.answered(0, Done(1, flush=flush))
        encoder.answered([], operation)
    assert [encoder.flush_of([call], [block]) for call in ((3, 11), (1, 40), (3, 12))] == [0, 5, 0]
    operation = Operation(1)
    operation.answered(0, Done(1, flush=(5, -1, 0)))
    encoder.answered([], operation)
    assert encoder.flush_of([(3, 12)], [block]) == 5
    assert encoder.flush_of([(3, 12)], []) == 0  # as a pull
    assert encoder.flush_of([(3, 12)], [block_of(SIZES), block_with(BFloat16())]) == 0


def test_step_says_what_pieces_without_a_gradient_and_other_blocks_keep() -> None:
    block = block_with(TopK(0.1))
    encoder, drawn = Encoder(0, take), np.random.default_rng(3)
    assert not encoder.leaves(block.group, {})
    for _ in range(5):
        answer(encoder, push(encoder, block, drawn, 0.0))
    given = drawn.normal(size=block.size).astype(np.float32)
    whole = encoder.whole(BlockPush(block, given, (0,)), [])
    assert whole is not None
    assert encoder.leaves(block.group, {block.id: whole})
    assert encoder.leaves(block.group, {})
    assert not encoder.leaves(block.group + 1, {})


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
    assert in_words("model", blocks, local=True, lost_before=7) == told + whole
    loss = "; what was left out of the gradients of rank 0 before clock 7 is lost"
    assert in_words("model", blocks, local=False, lost_before=7) == told + loss
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
    encoder.mark_sent([first])
    second = encoder.whole(BlockPush(block, given), [])
    assert second is not None
    answer(encoder, applied(first))  # while the second one is about to be sent
    encoder.mark_sent([second])
    answer(encoder, applied(second))
    both = first.slot.array(block) + second.slot.array(block)
    wanted = given + left
    wanted[: block.starts[1]] += given[: block.starts[1]]
    np.testing.assert_allclose(both, wanted, atol=1e-6)
    assert encoder.residual(block) is None
    assert encoder.whole(BlockPush(block, given), []) is None
