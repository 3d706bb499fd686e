"""What a shard makes of requests to a table, also of those that no client of ours would send."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.suites import each_case
from tests.unit.core.rig import ADD, PULLED, PUSHED, Rig, block_spec, done, gathered, refused

from paramserve.compiling import load_kernels, load_table
from paramserve.config import RuleSpec
from paramserve.consistency.built_in import Async, BoundedStaleness, LocalSteps, Sync
from paramserve.consistency.registry import spec as policy_spec
from paramserve.core.request_memory import Memory
from paramserve.core.table.options import LRU, Constant, MinCount, TableOptions
from paramserve.core.table.parts import (
    gradient_at,
    gradient_bytes,
    keys_at,
    keys_bytes,
    records_at,
    records_bytes,
    within,
)
from paramserve.errors import ParamServeError, ShapeMismatch, TableFull
from paramserve.messages import (
    Assign,
    BlockSpec,
    Contains,
    Define,
    Delete,
    Done,
    Fetch,
    Gradient,
    Keys,
    Piece,
    Put,
    ReadTarget,
    Refused,
    Scan,
    SetPolicy,
    Step,
    TableSpec,
    Watch,
)
from paramserve.rules import SGD, Adam, Rule
from paramserve.rules.custom import CustomRule
from paramserve.rules.registry import described_by
from paramserve.rules.rows import row_layout

DIM = 3
ME = 4
OPTIONS = TableOptions(Constant(1.0))

for rule in (ADD, SGD(0.1), SGD(0.1, momentum=0.9), Adam()):  # none is to wait for it in a test
    load_table(rule, row_layout(rule, DIM, "float32"))
    load_kernels(np.dtype(np.float64), rule)  # who loads one dtype shuts out what was not loaded


def table_spec(
    rule: Rule | None = ADD, options: TableOptions = OPTIONS, dim: int = DIM, **changed: Any
) -> BlockSpec:
    described = None if rule is None else described_by(rule, rows=True)
    table = TableSpec(dim, changed.pop("dtype", "float32"), 0, options.to_spec())
    policy = changed.pop("policy", Async())
    pieces = (Piece("users", (dim,)),)
    known = changed.get("as_", table)
    return BlockSpec(0, 0, "users", "float32", described, pieces, (), policy_spec(policy), known)


def rig(spec: BlockSpec | None = None, **options: Any) -> Rig:
    one = Rig(**options)
    one.join(ME, 0)
    for shard in range(len(one.shards)):
        done(one.send(ME, Define(0, spec if spec is not None else table_spec(), 1, 0, 0), shard))
    return one


def pushed(keys: list[int], value: float = 1.0) -> dict[int, Any]:
    values = np.full((len(keys), DIM), value, np.float32)
    return {0: gathered([np.array(keys, np.int64), values.reshape(-1)])}


def push(
    one: Rig, keys: list[int], value: float = 1.0, *, tick: bool = True, shard: int = 0
) -> Any:
    """A step with rows."""
    message = Step(0, 0, 0, tick, (Gradient(0, 0, 0, rows=len(keys)),), ())
    return one.send(ME, message, shard, pushed(keys, value) if keys else {})


def asked(keys: list[int]) -> Any:
    """The keys of a read whose rows are to lie in their order."""
    return gathered([np.array(keys, np.int64), np.arange(len(keys), dtype=np.int32)])


def rows_of(one: Rig, keys: list[int], shard: int = 0) -> list[float]:
    """The first value of each row, read without a trace."""
    block = one.shards[shard].blocks[0]
    place = ReadTarget(0, PULLED, 0, Keys(len(keys), PUSHED, 0, len(keys)))
    message = Step(0, 0, 0, False, (), (place,))
    memory = {PUSHED: asked(keys)}
    effects = one.send(ME, message, shard, memory)
    done(effects)
    payload = effects.replies[0][1].payload
    assert payload is not None
    assert block.nbytes > 0
    count = len(keys) * DIM
    return [float(v) for v in payload.view(np.float32)[:count].reshape(-1, DIM)[:, 0]]


# --- what is good -------------------------------------------------------------------------------


def test_push_creates_and_changes_rows() -> None:
    one = rig()
    assert done(push(one, [5, -1])).version == 1
    assert done(push(one, [5], 2.0)).version == 2
    assert rows_of(one, [5, -1, 7]) == [4.0, 2.0, 1.0]
    (report,) = one.shards[0].report()
    assert report.table is not None
    assert (report.table.rows, report.table.created, report.table.width) == (2, 2, 0)


def test_push_of_no_rows_without_memory_is_good() -> None:
    one = rig()
    done(push(one, []))
    assert rows_of(one, [5]) == [1.0]


def test_pull_reads_what_its_step_has_pushed() -> None:
    one = rig()
    keys = asked([6, 5])
    place = ReadTarget(0, PULLED, 0, Keys(2, PUSHED, 0, 2))
    message = Step(0, 0, 0, True, (Gradient(0, 0, keys.size, rows=1),), (place,))
    memory = {0: np.concatenate([keys, pushed([5])[0]])}
    effects = one.send(ME, message, 0, memory)
    done(effects)
    payload = effects.replies[0][1].payload
    assert payload is not None
    assert payload.view(np.float32)[: 2 * DIM].tolist() == [1.0] * DIM + [2.0] * DIM


def test_push_over_shared_memory_reads_to_the_places_named() -> None:
    one = rig()
    arena = np.zeros(4096, np.uint8)
    keys, places = keys_at(arena, 64, 2)
    keys[:], places[:] = [8, 9], [2, 0]
    pushed_keys, pushed_values = gradient_at(arena, 512, 1, DIM)
    pushed_keys[:], pushed_values[:] = 9, 4.0
    place = ReadTarget(0, 1, 1024, Keys(2, 1, 64, 3))
    message = Step(0, 0, 0, True, (Gradient(0, 1, 512, rows=1),), (place,))
    done(one.send(ME, message, 0, {1: arena}))
    out = np.frombuffer(arena, np.float32, 3 * DIM, 1024).reshape(3, DIM)
    assert out.tolist() == [[5.0] * DIM, [0.0] * DIM, [1.0] * DIM]


def test_held_pull_is_checked_again_when_it_is_let_go() -> None:
    one = rig(table_spec(policy=BoundedStaleness(0)))
    one.join(5, 1)
    for bad in (False, True):
        arena = np.full(4096, 7, np.uint8)
        keys, places = keys_at(arena, 64, 2)
        keys[:], places[:] = [8, 9], [0, 1]
        place = ReadTarget(0, 1, 1024, Keys(2, 1, 64, 2))
        done(push(one, [8], tick=False))
        done(one.send(ME, Step(0, 0, int(bad), True, (), ())))
        pull = Step(0, 0, 1 + bad, False, (), (place,))
        assert one.send(ME, pull, 0, {1: arena}).replies == []
        if bad:
            places[:] = [10**6, 0]
        (mine, *_) = one.send(5, Step(0, 0, int(bad), True, (), ())).replies
        assert isinstance(mine[1].message, Refused if bad else Done)
        out = np.frombuffer(arena, np.float32, 2 * DIM, 1024).tolist()
        assert out == ([out[0]] * 2 * DIM if bad else [2.0] * DIM + [1.0] * DIM)
        assert (arena[1024 + 2 * DIM * 4 :] == 7).all()


def test_read_writes_to_its_array_only_whatever_the_places_have_become() -> None:
    """Its client can change them at any time, also between the check and the read."""
    block = rig().shards[0].blocks[0]
    arena = np.full(1 << 16, 7, np.uint8)
    keys, places = keys_at(arena, 64, 2)
    keys[:], places[:] = [8, 9], [1000, -1000]
    block.read(Memory({1: arena}, mirrored=True), ReadTarget(0, 1, 1 << 15, Keys(2, 1, 64, 2)))
    end = (1 << 15) + 2 * DIM * 4
    assert (arena[256 : 1 << 15] == 7).all()
    assert (arena[end:] == 7).all()


# --- what is not --------------------------------------------------------------------------------


def test_gradient_with_rows_that_cannot_be_is_refused() -> None:
    one = rig()
    for rows in (-1, 1 << 40):
        message = Step(0, 0, 0, True, (Gradient(0, 0, 0, rows=rows),), ())
        error = refused(one.send(ME, message, 0, pushed([1, 2])))
        assert isinstance(error, ShapeMismatch)
        assert "'users'" in error.failed
        assert error.applied == "no"
        assert len(one.shards[0].blocks[0].store) == 0


OUTSIDE = [
    (2, 0, 1), (1, 8, 1), (1, -64, 1), (1, 4096, 1), (1, 0, 4096), (1, 4032, 2), (1, 1 << 62, 1),
]  # fmt: skip
"""Arena, offset and rows of gradients where an arena of 4,096 bytes, the first, has none."""


def test_gradient_outside_its_arena_is_refused() -> None:
    one = rig()
    for arena, offset, rows in OUTSIDE:
        message = Step(0, 0, 0, True, (Gradient(0, arena, offset, rows=rows),), ())
        error = refused(one.send(ME, message, 0, {1: np.zeros(4096, np.uint8)}))
        assert isinstance(error, ShapeMismatch)
        assert len(one.shards[0].blocks[0].store) == 0


def test_gradient_that_names_pieces_is_refused() -> None:
    one = rig()
    message = Step(0, 0, 0, True, (Gradient(0, 0, 0, (0,), rows=1),), ())
    assert "name the rows by their keys" in refused(one.send(ME, message, 0, pushed([1]))).fix


@each_case(
    "keys",
    [
        None,
        Keys(-1, 1, 64, 2),
        Keys(2, 2, 64, 2),
        Keys(2, 1, 60, 2),
        Keys(2, 1, 4032, 2),
        Keys(1 << 40, 1, 64, 2),
        Keys(2, 1, 64, 1),
        Keys(2, 1, 64, -5),
        Keys(2, 1, 64, 1 << 40),
        Keys(2, 1, 192, 2),
    ],
    ids=["none", "negative", "arena", "place", "end", "many", "few", "total", "far", "at"],
)
def test_read_whose_keys_or_places_do_not_lie_there_is_refused(keys: Keys | None) -> None:
    one = rig()
    arena = np.zeros(4096, np.uint8)
    keys_at(arena, 64, 2)[1][:] = [0, 1]
    keys_at(arena, 192, 2)[1][:] = [0, -1]
    error = refused(
        one.send(ME, Step(0, 0, 0, False, (), (ReadTarget(0, 1, 1024, keys),)), 0, {1: arena})
    )
    assert isinstance(error, ShapeMismatch)
    assert len(one.shards[0].blocks[0].store) == 0


def test_read_of_a_tensor_by_keys_and_of_a_table_without_is_refused() -> None:
    one = rig()
    one.define(ME, block_spec((4,), number=1, group=1))
    error = refused(
        one.send(ME, Step(0, 0, 0, False, (), (ReadTarget(0, 1, 0),)), 0, {1: np.zeros(64)})
    )
    assert "names no keys" in error.failed
    for block, group in ((0, 1), (1, 0)):
        message = Step(0, group, 0, True, (Gradient(block, 0, 0, rows=1),), ())
        assert isinstance(refused(one.send(ME, message, 0, pushed([1]))), ParamServeError)


@each_case(("rows", "width"), [(-1, -1), (4, 0), (4, 5), (4, -2), (1 << 40, -1)])
def test_scan_and_put_with_other_sizes_than_the_table_has_are_refused(
    rows: int, width: int
) -> None:
    one = rig(table_spec(Adam()))
    arena = {1: np.zeros(4096, np.uint8)}
    for message in (Scan(0, 0, 0, rows, width, 1, 0), Put(0, 0, rows, width, 1, 0)):
        error = refused(one.send(ME, message, 0, arena))
        assert isinstance(error, ShapeMismatch)
        assert error.applied == "no"
    assert len(one.shards[0].blocks[0].store) == 0


def test_scan_from_anywhere_gives_rows_or_nothing() -> None:
    one = rig()
    done(push(one, list(range(10))))
    for cursor, expected in (
        (0, (4, 4)),
        (8, (2, -1)),
        (10, (0, -1)),
        (1 << 40, (0, -1)),
        (-3, (4, 4)),
    ):
        assert done(one.send(ME, Scan(0, 0, cursor, 4, -1, 0, 0))).counts == expected  # fmt: skip


def test_read_of_no_rows_is_good_wherever_they_were_to_go() -> None:
    one = rig()
    for place in (
        ReadTarget(0, 99, -64, Keys(0, 99, 7, 0)),
        ReadTarget(0, 1, 0, Keys(0, 1, 0, 5)),
    ):
        done(one.send(ME, Step(0, 0, 0, False, (), (place,)), 0, {1: np.zeros(64, np.uint8)}))


def test_put_of_what_is_not_finite_is_refused() -> None:
    one = rig()
    error = refused(one.send(ME, Put(0, 0, 1, -1, 0, 0), 0, pushed([1], np.nan)))
    assert "NaN or Inf" in error.failed
    assert rows_of(one, [1]) == [1.0]


def test_table_has_no_fields_and_no_snapshots() -> None:
    one = rig()
    for message in (Fetch(0, 0, 0, 0, 0), Assign(0, 0, 0, 0, 0), Watch(0, 0, 1, 4)):
        error = refused(one.send(ME, message, 0, {0: np.zeros(64, np.uint8)}))
        assert "'users' is a table" in error.failed
    one.define(ME, block_spec((4,), number=1, group=1))
    assert "is no table" in refused(one.send(ME, Scan(0, 1, 0, 4, -1, 0, 0))).failed


@each_case(
    ("spec", "words"),
    [
        (table_spec(None), "has no rule"),
        (table_spec(options=TableOptions(Constant(1.0), max_bytes=10)), "no room for a row"),
        (table_spec(as_=TableSpec(DIM, "float64", 0, OPTIONS.to_spec())), "float64"),
        (table_spec(as_=TableSpec(DIM, "float32", 0, RuleSpec("TableOptions"))), "needs|needed"),
        (
            table_spec(as_=TableSpec(DIM, "float32", 0, RuleSpec("TableOptions", {"init": "X"}))),
            "'X' is no option",
        ),
        (table_spec(policy=LocalSteps()), "LocalSteps cannot be the policy of table 'users'"),
    ],
)
def test_definition_that_cannot_be_is_refused_and_leaves_nothing(
    spec: BlockSpec, words: str
) -> None:
    one = Rig()
    one.join(ME, 0)
    error = refused(one.send(ME, Define(0, spec, 1, 0, 0)))
    assert re.search(words, error.failed), error.failed
    assert (one.shards[0].blocks, one.shards[0].groups) == ({}, {})


def test_policy_that_needs_copies_is_not_set() -> None:
    one = rig()
    error = refused(one.send(ME, SetPolicy(0, 0, policy_spec(LocalSteps()))))
    assert "LocalSteps" in error.failed
    assert one.shards[0].groups[0].policies.changing is None


# --- sums ---------------------------------------------------------------------------------------


def test_clock_of_two_workers_applies_each_key_once_with_the_sum() -> None:
    one = rig(table_spec(SGD(1.0), policy=Sync(reduce="sum")))
    one.join(5, 1)
    assert push(one, [1, 2]).replies == []
    message = Step(0, 0, 0, True, (Gradient(0, 0, 0, rows=2),), ())
    assert len(one.send(5, message, 0, pushed([2, 3], 10.0)).replies) == 2
    assert rows_of(one, [1, 2, 3]) == [0.0, -10.0, -9.0]


def test_lru_of_a_table_is_divided_among_its_shards() -> None:
    spec = table_spec(options=TableOptions(Constant(1.0), evict=LRU(rows=5)))
    one = rig(spec, shards=2)
    assert [shard.blocks[0].store.rows_max for shard in one.shards] == [3, 3]


# --- where parts lie ----------------------------------------------------------------------------


def test_parts_lie_one_after_the_other_and_fill_what_is_measured() -> None:
    for rows, width, idle in product([0, 1, 7, 16, 17], [None, 0, 5], [False, True]):
        check_parts(rows, width, idle)


def check_parts(rows: int, width: int | None, idle: bool) -> None:
    memory = np.zeros(1 << 14, np.uint8)
    records = records_at(memory, 64, rows, DIM, width, idle)
    for number, each in enumerate(records):
        if each is not None:
            each[...] = number + 1
    end = 64 + records_bytes(rows, DIM, width, idle)
    filled = np.flatnonzero(memory)
    assert not rows or (filled.min() >= 64 and filled.max() < end)
    again = records_at(memory, 64, rows, DIM, width, idle)
    for number, each in enumerate(again):
        assert each is None or (each == number + 1).all()
    assert records_bytes(rows, DIM, None) == gradient_bytes(rows, DIM)
    assert keys_bytes(rows) % 64 == gradient_bytes(rows, DIM) % 64 == 0


def test_nothing_lies_anywhere_and_something_only_in_its_memory() -> None:
    assert within(None, 0, 0, "", 0, " rows").size == 0
    memory = np.zeros(128, np.uint8)
    assert within(memory, 64, 64, "", 8, " rows") is memory
    for offset, nbytes in ((0, 129), (64, 65), (32, 64), (-64, 64), (0, -1)):
        with pytest.raises(ShapeMismatch, match="keys of 7 rows of a table need"):
            within(memory, offset, nbytes, "keys of ", 7, " rows of a table")
    with pytest.raises(ShapeMismatch):
        within(None, 0, 1, "", 7, " rows")


@dataclass(frozen=True)
class Plus(CustomRule):
    """A user's rule: its update is prepared before the clock is decided."""

    runs: ClassVar[list[int]] = []

    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None:
        self.runs.append(push.clock)
        value += gradient


def under_vote(rule: Rule, options: TableOptions = OPTIONS) -> Rig:
    """Shard 1 has voted for a step of keys 7, 8 and 9, of which 7 and 8 have rows of 10.0."""
    load_table(rule, row_layout(rule, DIM, "float32"))
    spec = table_spec(rule, options, policy=Sync(reduce="sum"))
    one = rig(spec, shards=2, workers=1, rules={Plus.name: Plus})
    one.join(9)
    done(one.send(9, Put(0, 0, 2, -1, 0, 0), 1, pushed([7, 8], 10.0)))
    Plus.runs.clear()
    push(one, [7, 8, 9], shard=1)
    assert one.wire, "shard 1 waits for shard 0"
    return one


def decide(one: Rig) -> None:
    push(one, [], shard=0)
    one.deliver()
    assert [type(answer.message) for _, client, answer in one.replies[-2:]] == [Done, Done]


@each_case("key", [7, 8, 9])
def test_row_put_while_a_clock_is_under_vote_is_behind_it_and_no_rule_runs_again(key: int) -> None:
    one = under_vote(Plus())
    done(one.send(9, Put(0, 0, 1, -1, 0, 0), 1, pushed([key], 50.0)))
    decide(one)
    expected = {7: 11.0, 8: 11.0, 9: 2.0} | {key: 50.0}
    assert rows_of(one, [7, 8, 9], 1) == list(expected.values())
    assert Plus.runs == [0]


def test_rows_put_while_a_clock_is_under_vote_are_what_a_rule_of_ours_updates() -> None:
    one = under_vote(ADD)
    done(one.send(9, Put(0, 0, 2, -1, 0, 0), 1, pushed([7, 9], 50.0)))
    decide(one)
    assert rows_of(one, [7, 8, 9], 1) == [51.0, 11.0, 51.0]


def test_rows_deleted_while_a_clock_is_under_vote_are_gone_and_no_rule_runs_again() -> None:
    one = under_vote(Plus())
    assert done(one.send(9, Delete(0, 0, 2, 0, 0), 1, named([7, 9]))).counts == (1,)
    decide(one)
    assert contained(one, [7, 8, 9], 1) == [0, 1, 0]
    assert rows_of(one, [8], 1) == [11.0]
    assert Plus.runs == [0]


def test_rows_deleted_while_a_clock_is_under_vote_begin_anew_with_a_rule_of_ours() -> None:
    one = under_vote(ADD)
    assert done(one.send(9, Delete(0, 0, 1, 0, 0), 1, named([7]))).counts == (1,)
    decide(one)
    assert rows_of(one, [7, 8, 9], 1) == [2.0, 11.0, 2.0]


def test_keys_that_a_clock_under_vote_does_not_admit_are_counted_beside_rows_put() -> None:
    one = under_vote(Plus(), TableOptions(Constant(1.0), admit=MinCount(2)))
    done(one.send(9, Put(0, 0, 1, -1, 0, 0), 1, pushed([7], 50.0)))
    decide(one)
    assert contained(one, [7, 8, 9], 1) == [1, 1, 0]
    assert rows_of(one, [7, 8], 1) == [50.0, 11.0]
    (report,) = one.shards[1].report()
    assert report.table is not None
    assert report.table.unadmitted == 1


def test_rows_that_a_put_has_evicted_while_a_clock_is_under_vote_are_counted_anew() -> None:
    one = under_vote(Plus(), TableOptions(Constant(1.0), evict=LRU(rows=6), admit=MinCount(2)))
    done(one.send(9, Put(0, 0, 3, -1, 0, 0), 1, pushed([4, 5, 6], 50.0)))
    block = one.shards[1].blocks[0]
    assert block.contains(np.array([7, 8])).tolist() == [0, 0]
    decide(one)
    assert contained(one, [7, 8, 9], 1) == [0, 0, 0]
    assert rows_of(one, [4, 5, 6], 1) == [50.0] * 3


def test_rows_put_while_a_clock_is_decided_take_no_room_from_it() -> None:
    spec = table_spec(options=TableOptions(Constant(1.0)), policy=Sync(reduce="sum"))
    one = rig(spec, shards=2, workers=1)
    one.join(9)
    one.shards[1].blocks[0].store.rows_max = 2
    push(one, [7], shard=1)
    assert one.wire, "shard 1 waits for shard 0"
    full = refused(one.send(9, Put(0, 0, 2, -1, 0, 0), 1, pushed([8, 9], 10.0)))
    assert isinstance(full, TableFull)
    done(one.send(9, Put(0, 0, 1, -1, 0, 0), 1, pushed([8], 10.0)))
    push(one, [], shard=0)
    one.deliver()
    assert contained(one, [7, 8], 1) == [1, 1]
    one.shards[1].blocks[0].store.rows_max = 3
    done(one.send(9, Put(0, 0, 1, -1, 0, 0), 1, pushed([9], 10.0)))


def test_room_of_rows_that_are_deleted_while_a_clock_is_decided_is_kept_for_it() -> None:
    one = rig(table_spec(policy=Sync(reduce="sum")), shards=2, workers=1)
    one.join(9)
    one.shards[1].blocks[0].store.rows_max = 2
    done(one.send(9, Put(0, 0, 2, -1, 0, 0), 1, pushed([7, 8], 10.0)))
    push(one, [7], shard=1)
    assert done(one.send(9, Delete(0, 0, 1, 0, 0), 1, named([7]))).counts == (1,)
    assert refused(one.send(9, Put(0, 0, 1, -1, 0, 0), 1, pushed([9]))).applied == "no"
    push(one, [], shard=0)
    one.deliver()
    assert rows_of(one, [7], 1) == [2.0]
    assert done(one.send(9, Delete(0, 0, 1, 0, 0), 1, named([7]))).counts == (1,)
    done(one.send(9, Put(0, 0, 1, -1, 0, 0), 1, pushed([9])))


# --- which rows are there -----------------------------------------------------------------------


def named(keys: list[int]) -> dict[int, Any]:
    return {0: gathered([np.array(keys, np.int64)])}


def contained(one: Rig, keys: list[int], shard: int = 0) -> list[int]:
    effects = one.send(ME, Contains(0, 0, len(keys), 0, 0), shard, named(keys))
    done(effects)
    payload = effects.replies[0][1].payload
    assert payload is not None
    return payload[: len(keys)].tolist()


def test_delete_that_is_sent_again_removes_no_row_made_since() -> None:
    one = rig(table_spec(SGD(0.1, momentum=0.9)))
    push(one, [5, -1])
    message = Delete(2 + 1, 0, 4, 0, 0)
    effects = one.send(ME, message, 0, named([5, 5, 9, 5]))
    assert done(effects).counts == (1,)
    assert rows_of(one, [5, -1]) == [1.0, pytest.approx(0.9)]
    push(one, [5])
    assert done(one.again(ME, message, 0, named([5, 5, 9, 5]))).counts == (1,)
    assert contained(one, [5, -1, 9]) == [1, 1, 0]
    (report,) = one.shards[0].report()
    assert report.table is not None
    assert (report.table.rows, report.table.created, report.table.deleted) == (2, 3, 1)


def test_contains_says_it_behind_the_keys_and_uses_no_row() -> None:
    one = rig(table_spec(options=TableOptions(Constant(1.0), evict=LRU(2))))
    push(one, [1, 2])
    arena = np.zeros(256, np.uint8)
    arena[64 : 64 + 3 * 8].view(np.int64)[:] = [2, 3, 1]
    effects = one.send(ME, Contains(0, 0, 3, 1, 64), 0, {1: arena})
    assert done(effects).version == 1
    assert arena[128:192].tolist() == [1, 0, 1, *[0] * 61]
    push(one, [4])
    assert contained(one, [1, 2, 3, 4]) == [0, 1, 0, 1]


def test_contains_is_asked_again_where_its_answer_was_lost() -> None:
    one = rig()
    push(one, [1])
    effects = one.send(ME, Contains(0, 0, 2, 0, 0), 0, named([1, 2]))
    seq = done(effects).seq
    again = one.again(ME, Contains(seq, 0, 2, 0, 0), 0, named([1, 2]))
    payload = again.replies[0][1].payload
    assert payload is not None
    assert payload[:2].tolist() == [1, 0]


def test_keys_that_do_not_lie_where_they_are_named_are_refused() -> None:
    one = rig()
    push(one, [0, 1])
    places = [(-1, 0), (-3, 0), (9, 0), (1, 8), (1, 64), (1, -64)]
    for (rows, offset), arena, kind in product(places, [1, 2], [Delete, Contains]):
        memory = {arena: np.zeros(64, np.uint8)}
        error = refused(one.send(ME, kind(0, 0, rows, arena, offset), 0, memory))
        assert isinstance(error, ShapeMismatch)
        assert error.applied == "no"
        assert len(one.shards[0].blocks[0].store) == 2
    one.define(ME, block_spec((4,), number=1, group=1))
    for kind in (Delete, Contains):
        assert "is no table" in refused(one.send(ME, kind(0, 1, 0, 0, 0))).failed


def test_clock_that_is_clipped_is_refused_on_all_shards_if_one_has_no_room_for_its_rows() -> None:
    spec = table_spec(options=TableOptions(Constant(1.0)), policy=Sync(reduce="sum"))
    one = rig(spec, shards=2, workers=1)
    one.shards[1].blocks[0].store.rows_max = 1
    for shard, keys in enumerate(([1], [2, 3])):
        one.send(ME, Step(0, 0, 0, True, (Gradient(0, 0, 0, rows=len(keys)),), (), clip_norm=1.0),
                 shard, pushed(keys))  # fmt: skip
    one.deliver()
    told = [one.answers(ME, shard)[-1] for shard in (0, 1)]
    assert [(type(each), each.kind, each.applied) for each in told] == [
        (Refused, "TableFull", "no")
    ] * 2
    assert [len(shard.blocks[0].store) for shard in one.shards] == [0, 0]
