"""What the coordinator knows goes into a checkpoint and comes back."""

from __future__ import annotations

import msgspec
import pytest

from paramserve.config import ConsistencySpec
from paramserve.core.cluster_state import ClusterRecord, ClusterState, blocks_for
from paramserve.core.leases import Marks
from paramserve.core.membership import EXPECTED
from paramserve.errors import DefineMismatch, ParamServeError
from paramserve.messages import AllReduce, Join, Piece, PlaceBlock, Register


def state(
    record: ClusterRecord | None = None, *, servers: int = 2, workers: int = 2
) -> ClusterState:
    made = ClusterState(servers, workers, 1 << 20, ConsistencySpec("Async"), record)
    for shard in range(servers):
        made.membership.register(Register(1, shard, 1, ()), 0.0)
    return made


def saved(one: ClusterState, blocks: tuple[int, ...] = ()) -> ClusterRecord:
    """What is read of it again."""
    one.begin()
    one.cut_taken(blocks)
    data = msgspec.msgpack.encode(one.record(Marks([])))
    one.let_go()
    return msgspec.msgpack.decode(data, type=ClusterRecord)


def join(one: ClusterState, rank: int) -> tuple[int, int]:
    return one.membership.join(Join(1, rank, 1), 0.0)


def place(name: str, elements: int = 4, *, whole: bool = False, shape: int = 1) -> PlaceBlock:
    pieces = tuple(Piece(f"{name}{i}", (elements,)) for i in range(shape))
    return PlaceBlock(1, name, "float32", None, pieces, True, 1.0, whole)


def define(one: ClusterState, call: PlaceBlock) -> int:
    placed = one.directory.place(call, 1)
    assert placed is not None
    spec, attempt = placed
    one.directory.defined(spec.block, attempt)
    return spec.block


def test_every_rank_is_expected_again_as_its_next_incarnation() -> None:
    first = state(workers=4)
    for rank in range(4):
        join(first, rank)
    join(first, -1)
    first.membership.ended(1, "left")
    first.membership.ended(2, "dead")
    number = first.membership.number
    again = state(saved(first), workers=3)
    found = again.membership
    assert found.number > number
    assert {rank: each.state for rank, each in found.members.items()} == {
        0: "expected",
        1: "expected",
        2: "expected",
        3: "dead",
    }
    assert join(again, 1) == (6, 2)
    assert found.late(1, 2)
    with pytest.raises(ParamServeError, match="more ranks than workers"):
        join(again, 3)


def test_rank_that_the_checkpoint_does_not_know_is_waited_for() -> None:
    first = state()
    join(first, 0)
    again = state(saved(first), workers=3)
    assert {each.state for each in again.membership.members.values()} == {EXPECTED}
    assert again.membership.members.keys() == {0, 1, 2}
    client, incarnation = join(again, 2)
    assert incarnation == 1
    assert again.membership.late(2, 1)
    assert client not in again.membership.came_later
    assert join(again, 1)[1] == 1  # it had not come before
    assert not again.membership.late(1, 1)


def test_blocks_keep_their_numbers_and_those_not_in_the_cut_are_open() -> None:
    first = state()
    define(first, place("a"))
    refused = first.directory.place(place("b"), 1)
    assert refused is not None
    first.directory.defined(refused[0].block, -refused[1])
    kept = define(first, place("c", 50_000))
    after = define(first, place("d"))
    defining = first.directory.place(place("e"), 1)
    assert defining is not None
    record = saved(first, (0, kept, defining[0].block))
    assert [spec.block for spec in blocks_for(record, 2)] == [0, kept]
    again = state(record)
    assert again.directory.find(None) == blocks_for(record, 2)
    spec, attempt = again.directory.place(place("d"), 9) or (None, 0)
    assert spec is not None
    assert (spec.block, attempt) == (after, 2)
    assert define(again, place("f")) == 5
    assert again.directory.place(place("c", 50_000), 9) == (blocks_for(record, 2)[1], 0)
    with pytest.raises(DefineMismatch):
        again.directory.place(place("c", 7), 9)


def test_blocks_are_cut_for_another_number_of_servers() -> None:
    first = state(servers=2)
    define(first, place("small"))
    define(first, place("large", 1 << 20))
    define(first, place("whole", 1 << 16, whole=True, shape=3))
    record = saved(first, (0, 1, 2))
    assert blocks_for(record, 2) == first.directory.find(None)
    small, large, whole = blocks_for(record, 3)
    assert small.cuts == (0, 4, 4, 4)
    assert large.cuts[-1] == 1 << 20
    assert len({b - a for a, b in zip(large.cuts, large.cuts[1:], strict=False)}) <= 2
    assert whole.cuts == (0, 1 << 16, 2 << 16, 3 << 16)
    assert blocks_for(record, 1)[2].cuts == (0, 3 << 16)
    assert state(record, servers=3).directory.find(None) == (small, large, whole)


def test_ended_collectives_are_told_to_ranks_that_begin_anew() -> None:
    first = state()

    def reduce(one: ClusterState, rank: int, value: bytes, seen: int, place: int) -> bytes | None:
        call = AllReduce(1, "sum", "int64", (1,), value, seen, place, 1.0)
        done = one.collectives.call(call, one.membership.members[rank])
        return done.value if done is not None else None

    two, three, five = (each.to_bytes(8, "little") for each in (2, 3, 5))
    for rank in (0, 1):
        join(first, rank)
    assert reduce(first, 0, two, 0, 0) is None
    assert reduce(first, 1, three, 0, 0) == five
    assert reduce(first, 0, two, 1, 4) is None
    assert reduce(first, 1, three, 1, 4) == five
    assert reduce(first, 0, two, 2, 8) is None  # open at the cut
    record = saved(first)
    again = state(record)
    for rank in (0, 1):
        join(again, rank)
        assert reduce(again, rank, two, 0, 0) == five
    assert reduce(again, 1, two, 1, 8) is None
    assert reduce(again, 0, two, 1, 8) == (4).to_bytes(8, "little")
    other = state(record, workers=3)
    for rank in range(3):
        join(other, rank)
        assert reduce(other, rank, two, 0, 0) == five, "also a rank that is new"
        assert reduce(other, rank, two, 1, 4) == five
    assert reduce(other, 2, two, 2, 5) is None
    parts = msgspec.structs.replace(record.collectives.ended[0], parts=1)
    own = msgspec.structs.replace(record.collectives, agreed=(parts,))
    other = state(msgspec.structs.replace(record, collectives=own), workers=1)
    join(other, 0)
    assert reduce(other, 0, two, 0, 0) == two, "others had agreed on parts of their own"
