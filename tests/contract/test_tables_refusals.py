"""What a table refuses: who, what was expected, what came, and that nothing
was applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.contract.harness import Harness
from tests.contract.role_cluster import WAIT_S, RoleCluster, in_threads
from tests.contract.test_tables import DIM, MakeCluster, ones, users

from paramserve.client import BlockPush, Client, Snapshots
from paramserve.client.rows import TablePush
from paramserve.client.table import Table
from paramserve.consistency.built_in import (
    Async,
    BoundedStaleness,
    DelayCompensated,
    ElasticAverage,
    LocalSteps,
    Sync,
)
from paramserve.core.table.options import LRU, TTL, Constant, MinCount, Normal, Zeros
from paramserve.errors import (
    DefineMismatch,
    DtypeMismatch,
    NonFinite,
    ParamServeError,
    RuleFailed,
    ShapeMismatch,
    UnknownName,
    UnknownRule,
)
from paramserve.messages import Arenas, Batch, Done, Gradient, ShardReply, Step, decoder, encode
from paramserve.rules import SGD, Adagrad, Adam, Add
from paramserve.rules.custom import CustomRule
from paramserve.transport.link import Link

pytestmark = pytest.mark.usefixtures("tables_ready")


def refused(
    use: Callable[[], object], error: type[BaseException], *words: str, applied: str = "no"
) -> None:
    """It raises this error, with these words in the text, and says what was applied."""
    with pytest.raises(error) as raised:
        use()
    text = str(raised.value)
    assert [word for word in words if word not in text] == [], text
    if isinstance(raised.value, ParamServeError):
        assert f"Applied: {applied}." in text
        assert "To fix: " in text


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> RoleCluster:
    """Over one transport: what is refused is the same over all."""
    return make_cluster("tcp", servers=2)


@pytest.fixture
def two(make_cluster: MakeCluster) -> RoleCluster:
    """Two shards, for what the client or the coordinator refuses."""
    return make_cluster("unix", servers=2)


@pytest.fixture
def table(two: RoleCluster) -> Table:
    """With a row for key 1, and nothing else."""
    table = users(two.client())
    table.put([1], ones(1))
    return table


def unchanged(table: Table) -> bool:
    return table.keys().tolist() == [1] and table.pull([1]).tolist() == [[1.0] * DIM]


# --- keys and gradients -----------------------------------------------------------------------


NO_KEYS: list[tuple[Any, type[Exception], str]] = [
    ([1.0, 2.0], TypeError, "not float64"),
    ([0.5], TypeError, "not float64"),
    ([True, False], TypeError, "not bool"),
    ([None], TypeError, "position 0 is None"),
    ([2**64], TypeError, "position 0 is 18446744073709551616, more than 64 bits"),
    (np.array([2**63], np.uint64), ValueError, "9223372036854775808 is above"),
    (np.array(["2020-01-01"], "datetime64[D]"), TypeError, "not datetime64"),
]


def test_keys_that_are_no_integers_of_64_bits_are_refused(table: Table) -> None:
    for keys, error, word in NO_KEYS:
        for use in (
            lambda k=keys: table.pull(k),
            lambda k=keys: table.push(k, ones(np.size(k))),
            lambda k=keys: table.prefetch(k),
            lambda k=keys: table.put(k, ones(np.size(k))),
        ):
            refused(use, error, "table 'users'", word)
    assert unchanged(table)


SHAPES: list[tuple[list[Any], tuple[int, ...]]] = [
    ([1, 2], (3, DIM)), ([1, 2, 3], (2, DIM)), ([1, 2], (2, DIM + 1)), ([1, 2], (2,)),
    ([1], (DIM,)), ([[1, 2]], (2, DIM)), ([], (1, DIM)), ([1, 2], (2, DIM, 1)),
]  # fmt: skip


def test_keys_and_rows_of_different_shapes_are_refused(table: Table) -> None:
    for keys, shape in SHAPES:
        expected = [*np.shape(keys), DIM]
        words = ("table 'users'", f"shape {list(shape)}", f"expected {expected}")
        for use in (table.push, table.put):
            refused(lambda u=use, k=keys, s=shape: u(k, np.ones(s)), ShapeMismatch, *words)
    assert unchanged(table)


def test_gradients_that_are_no_floating_point_are_refused(table: Table) -> None:
    for values in (np.ones((1, DIM), int), [["a"] * DIM], np.ones((1, DIM), bool)):
        refused(lambda v=values: table.push([1], v), DtypeMismatch, "'users'", "floating point")
    assert unchanged(table)


def test_gradient_that_is_not_finite_is_refused_with_its_key(table: Table) -> None:
    gradients = ones(3)
    for bad in (np.nan, np.inf, -np.inf):
        gradients[1, DIM - 1] = bad
        refused(
            lambda: table.push([5, -6, 7], gradients),
            NonFinite,
            "the gradient of key -6 of table 'users'",
            "NaN or Inf",
            "a client without a rank",
        )
    assert unchanged(table)


def test_gradients_whose_sum_or_cast_is_not_finite_are_refused_with_the_key(table: Table) -> None:
    large = np.full((4, DIM), 3e38, np.float32)
    refused(lambda: table.push([1, 9, 9, 2], large), NonFinite, "key 9", "its sum with others")
    wide = np.full((2, DIM), 1e300)
    refused(lambda: table.push([4, 5], wide), NonFinite, "key 4 ")
    assert unchanged(table)


def test_values_that_are_not_finite_are_not_put_and_the_key_is_named(table: Table) -> None:
    values = ones(40)
    values[17, 1] = np.nan
    keys = np.arange(100, 140)
    refused(lambda: table.put(keys, values), NonFinite, "key 117", "table 'users'")
    assert unchanged(table)


def test_gradient_that_is_not_finite_is_skipped_where_the_policy_says_so(
    cluster: RoleCluster,
) -> None:
    table = users(cluster.client(), consistency=Async(on_nonfinite="skip"))
    gradients = ones(20)
    gradients[3] = np.nan
    assert table.push(np.arange(20), gradients).result().skipped
    assert len(table) == 0
    assert not table.push([1], ones(1)).result().skipped
    assert table.pull([1]).tolist() == [[0.5] * DIM]


def test_weight_that_is_no_positive_number_is_refused(table: Table) -> None:
    push = TablePush(table, [1], ones(1))
    for weight in (0.0, -1.0, np.nan, np.inf):
        for use in (
            lambda w=weight: table.push([1], ones(1), weight=w),
            lambda w=weight: table.client.push_tables([push], weight=w),
        ):
            refused(use, ValueError, "weight must be > 0")
    assert unchanged(table)


def test_hyper_that_the_rule_refuses_is_named_and_changes_nothing(table: Table) -> None:
    bad = SGD(0.5).hyper()
    bad = (-1.0, *bad[1:])
    with pytest.raises(ValueError, match="lr"):
        table.push([1], ones(1), hyper=bad)
    with pytest.raises(ValueError, match=r"needs the state momentum.*Applied: no"):
        table.push([1], ones(1), hyper=SGD(0.5, momentum=0.9).hyper())
    with pytest.raises(ValueError):
        table.push([1], ones(1), hyper=(0.5,))
    assert unchanged(table)


def test_hyper_that_the_rule_refuses_leaves_the_synchronous_clock_as_it_was(
    make_cluster: MakeCluster,
) -> None:
    """A step that was counted here, and by no server, could never be ended."""
    client = make_cluster("unix", servers=2, workers=1).client(0)
    table = users(client, consistency=Sync())
    for _ in range(2):
        with pytest.raises(ValueError, match="lr"):
            client.push_tables([TablePush(table, [1], ones(1), (-1.0, *SGD(0.5).hyper()[1:]))])
        with pytest.raises(ValueError, match="lr"):
            table.push([1], ones(1), hyper=(-1.0, *SGD(0.5).hyper()[1:]))
        client.push_tables([TablePush(table, [1], ones(1))]).result(5.0)
    assert table.pull([1])[0].tolist() != table.pull([2])[0].tolist()


def test_scan_and_put_refuse_numbers_and_states_that_do_not_fit(two: RoleCluster) -> None:
    table = users(two.client(), rule=Adam(lr=0.1))
    table.push([1], ones(1)).result()
    before = [tuple(map(np.ndarray.tolist, part[:4])) for part in table.scan(state=True)]
    refused(lambda: next(table.scan(0)), ValueError, "rows must be at least 1, not 0")
    for state, counts in ((ones(1, 3), [1]), (ones(2, 2 * DIM), [1]), (ones(1, 2 * DIM), [1, 2])):
        refused(
            lambda s=state, c=counts: table.put([1], ones(1), s, c),
            ShapeMismatch,
            "table 'users'",
            f"expected [1, {2 * DIM}]",
        )
    refused(lambda: table.put([1], ones(1), ones(1, 2 * DIM)), ValueError, "come together")
    assert [tuple(map(np.ndarray.tolist, part[:4])) for part in table.scan(state=True)] == before


def test_step_that_names_a_table_twice_is_refused(table: Table) -> None:
    pushes = [TablePush(table, [1], ones(1)), TablePush(table, [2], ones(1))]
    refused(lambda: table.client.push_tables(pushes), ValueError, "name each of them once")
    assert unchanged(table)


def test_step_of_no_table_or_of_another_clients_or_with_half_a_push_is_refused(
    two: RoleCluster,
) -> None:
    client, other = two.client(), two.client()
    table, theirs = users(client), users(other)
    table.put([1], ones(1))
    refused(lambda: client.push_tables([]), ValueError, "names at least one")
    push = TablePush(theirs, [1], ones(1))
    for tick in (True, False):
        refused(
            lambda t=tick: client.push_tables([push], tick=t),
            ValueError,
            "table 'users' was got from another client",
        )
    for half in (TablePush(table, [1]), TablePush(table, None, ones(1))):
        refused(lambda h=half: client.push_tables([h]), ValueError, "come together")
    assert unchanged(table)


def test_table_is_no_block_of_tensors(table: Table) -> None:
    client, block = table.client, table.block
    for use in (
        lambda: client.dense.fetch(block, 0),
        lambda: client.dense.store(block, 0, np.zeros(DIM)),
        lambda: client.dense.step("users", [], pull=[block]),
        lambda: client.dense.step("users", [BlockPush(block, np.zeros(DIM))]),
    ):
        refused(use, ValueError, "'users' is a table")
    assert unchanged(table)


def test_step_whose_tensors_are_refused_gives_the_tables_memory_back(two: RoleCluster) -> None:
    client = two.client()
    table = users(client)
    dense = client.define("w", np.zeros(3), rule=Add())
    slot = client.dense.gradient_slot(dense)
    slot[:] = np.nan
    before = len(client.connection.exchange._pool.in_use_by)
    for skip, error in ((False, NonFinite), (True, ValueError)):
        push = BlockPush(dense, slot if not skip else np.zeros(3))
        with pytest.raises(error):
            client.dense.step("default", [push], tables=[TablePush(table, [1], ones(1))], skip=skip)
    assert len(client.connection.exchange._pool.in_use_by) == before
    assert (len(table), client.clock("users")) == (0, 0)


def test_scan_of_more_rows_than_there_are_takes_no_memory_for_them(table: Table) -> None:
    assert [part.keys.tolist() for part in table.scan(10**12)] == [[1]]


# --- names ------------------------------------------------------------------------------------


def test_table_that_is_not_defined_is_unknown(two: RoleCluster) -> None:
    client = two.client()
    refused(lambda: client.table("users"), UnknownName, "'users'")
    client.define("w", np.zeros(3), rule=Add())
    refused(lambda: client.table("w"), UnknownName, "'w'")
    refused(lambda: client.table("default"), UnknownName, "'default'")


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"dim": 5}, "shape"),
    ({"rule": Adagrad(lr=0.5)}, "rule"),
    ({"init": Zeros()}, "options"),
    ({"init": Constant(2.0)}, "options"),
    ({"dtype": "float16"}, "options"),
    ({"admit": MinCount(2)}, "options"),
    ({"evict": LRU(rows=10)}, "options"),
    ({"evict": TTL(3)}, "options"),
    ({"max_bytes": 1 << 20}, "options"),
    ({"seed": 1}, "options"),
    ({"consistency": BoundedStaleness(1)}, "policy"),
]


def test_table_defined_twice_with_other_options_is_refused(two: RoleCluster) -> None:
    client, other = two.client(), two.client()
    table = users(client, consistency=Async())
    table.put([1], ones(1))
    for changed, word in OTHERS:
        options = {"consistency": Async(), **changed}
        for each in (client, other):
            refused(lambda c=each, o=options: users(c, **o), DefineMismatch, "'users'", word)
    assert unchanged(table)
    assert users(other).pull([1]).tolist() == [[1.0] * DIM]


def test_table_defined_at_once_by_several_is_one(cluster: RoleCluster) -> None:
    clients = [cluster.client() for _ in range(4)]
    in_threads(*[lambda c=c: users(c).push([1], ones(1)).result() for c in clients])
    assert users(clients[0]).pull([1]).tolist() == [[1.0 - 4 * 0.5] * DIM]


def test_names_of_tables_and_of_groups_are_of_one_kind(two: RoleCluster) -> None:
    client, other = two.client(), two.client()
    users(client)
    client.define("w", np.zeros(3), rule=Add(), group="dense")
    for each in (client, other):
        refused(
            lambda c=each: c.define("w", np.zeros(3), rule=Add(), group="users"),
            DefineMismatch,
            "'users' is the name of a table",
        )
        refused(
            lambda c=each: c.table("dense", dim=3, rule=Add()),
            DefineMismatch,
            "'dense' is the name of a group of tensors",
        )
        for use in (
            lambda c=each: c.pull("users"),
            lambda c=each: c.push("users", np.zeros(DIM)),
            lambda c=each: c.assign("users", np.zeros(DIM)),
        ):
            refused(use, UnknownName, "'users' is a table")
    assert [block.pieces[0].name for block in other.blocks()] == ["w"]
    assert client.pull("w").tolist() == [0.0] * 3


def test_request_that_names_bytes_behind_its_clients_arena_is_refused_alone(
    harness: Harness,
) -> None:
    push = Step(1, 0, 0, False, (Gradient(0, 1, 4096),), ())
    link = harness.untrusted()
    link.send(encode(Arenas(((1, 4096),))))
    link.arenas = {1: np.zeros(4096, np.uint8)}
    link.send(encode(Batch((push, Step(2, 0, 0, False, (), ())))), [(1, 64, 64)])
    first, second = (decoder(ShardReply).decode(link.receive(WAIT_S)) for _ in range(2))
    assert (first.seq, first.kind, first.applied) == (1, "ShapeMismatch", "no")
    assert "4096" in first.failed
    assert isinstance(second, Done)
    link.close()
    harness.goes_on()


def test_requests_of_one_frame_behind_a_gap_cut_the_connection_only(
    harness: Harness,
) -> None:
    link = harness.untrusted()
    steps = tuple(Step(seq, 0, 0, False, (), ()) for seq in (2, 1, 3, 9))
    link.send(encode(Batch(steps)))
    with pytest.raises(ConnectionError):
        _read_on(link)
    link.close()


def _read_on(link: Link) -> None:
    while True:
        link.receive(WAIT_S)


def test_table_has_no_snapshots(table: Table) -> None:
    refused(
        lambda: Snapshots(table.client).watch("users", 1), ParamServeError, "'users' is a table"
    )
    assert unchanged(table)


# --- options ----------------------------------------------------------------------------------


CANNOT_BE: list[tuple[dict[str, Any], Any, str]] = [
    ({"dim": 0}, ValueError, "dim of table 'users' has to be an int from 1 to 65536, not 0"),
    ({"dim": -3}, ValueError, "not -3"),
    ({"dim": 65_537}, ValueError, "not 65537"),
    ({"dim": 2.0}, ValueError, "not 2.0"),
    ({"dim": True}, ValueError, "not True"),
    ({"rule": None}, ValueError, "needs a rule"),
    ({"rule": "sgd"}, (TypeError, ValueError), "sgd"),
    ({"dtype": "float64"}, ValueError, "float64"),
    ({"seed": -1}, ValueError, "seed"),
    ({"seed": 1.5}, ValueError, "seed"),
    ({"init": 3.0}, (TypeError, ValueError), "init"),
    ({"admit": 3}, (TypeError, ValueError), "admit"),
    ({"evict": 3}, (TypeError, ValueError), "evict"),
    ({"max_bytes": -1}, (TypeError, ValueError), "max_bytes"),
    ({"init": Constant(1e6), "dtype": "float16"}, ValueError, "float16"),
    ({"consistency": DelayCompensated()}, ValueError, "DelayCompensated cannot be the policy"),
    ({"consistency": LocalSteps(every=4)}, ValueError, "LocalSteps cannot be the policy"),
    ({"consistency": ElasticAverage(rho=0.5)}, ValueError, "ElasticAverage cannot be the policy"),
]


def test_option_that_cannot_be_is_refused_before_anything_is_sent(two: RoleCluster) -> None:
    client = two.client()
    for changed, error, word in CANNOT_BE:
        refused(lambda c=changed: users(client, **c), error, word)
        refused(lambda: client.table("users"), UnknownName, "'users'")
    assert len(users(client)) == 0


def test_table_smaller_than_one_row_is_refused_and_its_name_stays_free(
    cluster: RoleCluster,
) -> None:
    client = cluster.client()
    with pytest.raises((ValueError, ParamServeError), match="max_bytes=10 has no room for a row"):
        users(client, max_bytes=10)
    assert users(client).pull([1]).tolist() == [[1.0] * DIM]


def test_name_that_cannot_be_is_refused(two: RoleCluster) -> None:
    client = two.client()
    names: list[Any] = ["", "a\nb", "x" * 513, 7, None]
    for name in names:
        with pytest.raises((TypeError, ValueError, ParamServeError), match="name"):
            client.table(name, dim=3, rule=Add())


@dataclass(frozen=True)
class Doubled(CustomRule):
    """value -= 2 * gradient; but no gradient above 100."""

    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None:
        if float(np.abs(gradient).max(initial=0.0)) > 100.0:
            raise ArithmeticError("too steep")
        value -= 2.0 * gradient


def test_custom_rule_runs_on_rows_and_its_failure_changes_nothing(
    make_cluster: MakeCluster,
) -> None:
    client = make_cluster("unix", servers=2, registers=[Doubled]).client()
    table = users(client, rule=Doubled())
    table.push([1, 2, 2], ones(3)).result()
    assert table.pull([1, 2])[:, 0].tolist() == [-1.0, -3.0]
    refused(
        lambda: table.push([1], 200 * ones(1)).result(),
        RuleFailed,
        "'Doubled'",
        "'users'",
        "too steep",
        applied="unknown",  # the other shard had nothing of it, and says that it is done
    )
    assert table.pull([1, 2])[:, 0].tolist() == [-1.0, -3.0]


def test_rule_that_the_servers_do_not_know_is_refused_by_name(cluster: RoleCluster) -> None:
    client = cluster.client()
    with pytest.raises(UnknownRule, match="Doubled"):
        users(client, rule=Doubled())
    assert len(users(client)) == 0


def test_policy_that_a_table_cannot_have_is_not_set_either(cluster: RoleCluster) -> None:
    client: Client = cluster.client()
    table = users(client, init=Normal())
    table.put([1], ones(1))
    for policy in (DelayCompensated(), LocalSteps(every=4), ElasticAverage(rho=0.5)):
        name = type(policy).__name__
        with pytest.raises((ValueError, ParamServeError), match=f"{name} cannot be"):
            client.set_consistency("users", policy)
        assert cluster.servers[0].role.shard.groups[0].policies.changing is None
    client.set_consistency("users", BoundedStaleness(2))
    client.set_consistency("users", Sync())
    assert len(table) == 1


# --- numbers that rows cannot hold ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "value", "limit"),
    [
        ("float16", 1e6, "65520"),
        ("float16", -65520.0, "65520"),
        ("bfloat16", 3.4e38, "3.39618e+38"),
    ],
)
def test_values_beyond_16_bits_are_not_put_and_the_key_is_named(
    two: RoleCluster, dtype: str, value: float, limit: str
) -> None:
    table = users(two.client(), dtype=dtype)
    table.put([1], ones(1))
    values = ones(40)
    values[17, 1] = value
    told = (
        f"key 117 of table 'users' hold {np.float32(value)}",
        f"{dtype} has no NaN, Inf or {limit}",
    )
    refused(lambda: table.put(np.arange(100, 140), values), NonFinite, *told)
    assert unchanged(table)
    values[17, 1] = 0.99 * float(limit)
    table.put(np.arange(100, 140), values)
    assert np.isfinite(table.pull(np.arange(100, 140))).all()


def test_state_that_is_not_finite_is_not_put_and_the_key_is_named(two: RoleCluster) -> None:
    table = users(two.client(), rule=Adagrad(lr=0.5))
    table.put([1], ones(1))
    state = ones(3)
    for bad in (np.nan, np.inf, -np.inf):
        state[1, DIM - 1] = bad
        told = ("the state for key -6 of table 'users' holds", str(bad))
        refused(lambda: table.put([5, -6, 7], ones(3), state, [1, 1, 1]), NonFinite, *told)
    assert unchanged(table)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_update_of_16_bits_that_goes_too_far_ends_at_the_largest(
    cluster: RoleCluster, dtype: str
) -> None:
    table = users(cluster.client(), dtype=dtype, rule=SGD(1.0), init=Zeros())
    largest = 65504.0 if dtype == "float16" else np.float32(2.0**128 - 2.0**120)
    for sign in (1.0, -1.0):
        table.put([1], np.zeros((1, DIM), np.float32))
        table.push([1], np.full((1, DIM), -sign * 3.4e38)).result()
        assert table.pull([1]).tolist() == [[sign * largest] * DIM]
        table.push([1], np.full((1, DIM), sign * largest)).result()
        assert table.pull([1]).tolist() == [[0.0] * DIM]
