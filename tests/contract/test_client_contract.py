"""One suite of the client over all transports, with 1 and 2 shards, under Async.

The key-value calls are here; tickets and blocks in `test_client_steps.py`, Sync in
`test_client_sync.py`, broken connections in `test_client_links.py`, wrong use in
`test_client_refusals.py`.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from tests.contract.role_cluster import RoleCluster, in_threads, taken

from paramserve.errors import DefineMismatch, DefineTimeout, ShapeMismatch
from paramserve.rules import SGD, Add

LARGE = 40_000
"""float64 elements that are split over the shards."""
LAYOUTS = [("unix", 1), ("unix", 2), ("tcp", 2)]
"""Each transport, and one shard once: what a single shard saves is the same over all of them."""


@pytest.fixture(params=LAYOUTS, ids=lambda layout: f"{layout[0]}-{layout[1]}")
def layout(request: pytest.FixtureRequest) -> tuple[str, int]:
    return tuple(request.param)


# --- define -----------------------------------------------------------------------------------


def test_define_values_can_be_pulled_by_another_client(cluster: RoleCluster) -> None:
    first, second = cluster.client(), cluster.client()
    values = np.arange(float(LARGE)).reshape(200, 200)
    first.define("w", values, rule=Add())
    assert np.array_equal(second.pull("w"), values)
    assert second.pull("w").dtype == np.float64
    assert (first.rank, first.connection.id != second.connection.id) == (-1, True)


def test_define_any_shape_and_dtype_comes_back(cluster: RoleCluster) -> None:
    client = cluster.client()
    shapes = [(), (0,), (1,), (3, 0, 2), (7, 5), (20_000,)]
    for dtype, shape in product(["float32", "float64", "int64"], shapes):
        name = f"{dtype} {shape}"
        value = (np.random.default_rng(0).random(shape) * 100).astype(dtype)
        client.define(name, value, rule=None)
        back = client.pull(name)
        assert (back.shape, back.dtype) == (shape, value.dtype)
        assert np.array_equal(back, value), name


def test_define_mapping_is_one_block_with_many_pieces(cluster: RoleCluster) -> None:
    client = cluster.client()
    block = client.define({"a": np.ones((2, 3)), "b": np.zeros(4)}, rule=Add(), group="g")
    assert [(piece.name, piece.shape) for piece in block.pieces] == [("a", (2, 3)), ("b", (4,))]
    assert (block.size, block.starts, block.group_name) == (10, (0, 6, 10), "g")
    assert client.blocks() == [block]


def test_define_again_checks_and_never_writes(cluster: RoleCluster) -> None:
    first, second = cluster.client(), cluster.client()
    first.define("w", np.ones(LARGE), rule=Add())
    block = second.define("w", np.full(LARGE, 7.0), rule=Add())
    assert block == first.blocks()[0]
    assert (second.pull("w") == 1.0).all()


def test_define_at_once_by_several_takes_one_of_their_values_whole(cluster: RoleCluster) -> None:
    clients = [cluster.client() for _ in range(4)]
    in_threads(
        *[
            lambda c=c, v=float(v): c.define("w", np.full(LARGE, v), rule=Add())
            for v, c in enumerate(clients)
        ]
    )
    values = {client.pull("w").tobytes() for client in clients}
    assert len(values) == 1
    assert len(set(clients[0].pull("w"))) == 1


def test_await_block_returns_when_another_has_defined_it(cluster: RoleCluster) -> None:
    first, second = cluster.client(), cluster.client()
    found = []

    def wait() -> None:
        found.append(
            second.directory.await_block({"w": (3,)}, dtype="float64", rule=SGD(0.5), group="g")
        )

    in_threads(wait, lambda: first.define("w", np.ones(3), rule=SGD(0.1), group="g") and None)
    assert found == first.blocks()
    assert second.pull("w").tolist() == [1.0] * 3


def test_await_block_that_is_never_defined_times_out(cluster: RoleCluster) -> None:
    client = cluster.client()
    with pytest.raises(DefineTimeout, match=r"'g'.*'w' was not defined in 0\.1 s"):
        client.directory.await_block(
            {"w": (3,)}, dtype="float32", rule=None, group="g", timeout_s=0.1
        )


def test_await_block_with_another_shape_is_a_mismatch(cluster: RoleCluster) -> None:
    first, second = cluster.client(), cluster.client()
    first.define("w", np.ones(3), rule=Add())
    with pytest.raises(DefineMismatch, match=r"'w' \[3\], now 'w' \[4\] came"):
        second.directory.await_block({"w": (4,)}, dtype="float64", rule=Add())


# --- push, pull, assign -----------------------------------------------------------------------


def test_push_captures_the_bytes_before_it_returns(cluster: RoleCluster) -> None:
    client = cluster.client()
    client.define("w", np.zeros(LARGE), rule=Add())
    gradient = np.ones(LARGE)
    tickets = []
    for _ in range(10):
        gradient[:] = 1.0
        tickets.append(client.push("w", gradient))
        gradient[:] = np.nan
    for ticket in tickets:
        ticket.result()
    assert (client.pull("w") == 10.0).all()


def test_push_any_floating_gradient_of_the_shape(cluster: RoleCluster) -> None:
    client = cluster.client()
    gradients = {
        "float32": np.ones((4, 6), np.float32),
        "transposed": np.ones((6, 4)).T,
        "strided": np.ones((8, 6))[::2],
        "big-endian": np.ones((4, 6)).astype(">f8"),
        "lists": np.ones((4, 6)).tolist(),
        "read-only": np.broadcast_to(1.0, (4, 6)),
    }
    for name, gradient in gradients.items():
        client.define(name, np.zeros((4, 6)), rule=Add())
        client.push(name, gradient).result()
        assert (client.pull(name) == 1.0).all(), name


def test_push_mapping_updates_only_its_names(cluster: RoleCluster) -> None:
    client = cluster.client()
    client.define({"a": np.zeros(3), "b": np.zeros(LARGE), "c": np.zeros(3)}, rule=Add())
    client.define("d", np.zeros(2), rule=Add())
    client.push({"c": np.ones(3), "d": np.ones(2)})
    client.push({"b": np.ones(LARGE)})
    values = client.pull()
    assert {name: value[0] for name, value in values.items()} == {"a": 0, "b": 1, "c": 1, "d": 1}
    counts = [client.dense.fetch(block, 0)[1] for block in client.blocks()]
    assert counts == [(0, 1, 1), (1,)]


def test_pull_one_several_and_all(cluster: RoleCluster) -> None:
    client = cluster.client()
    client.define({"a": np.ones(2), "b": np.full(3, 2.0)}, rule=Add())
    client.define("c", np.full(1, 3.0), rule=Add(), group="other")
    assert client.pull("a").tolist() == [1, 1]
    assert list(client.pull(["c", "a"])) == ["c", "a"]
    assert {k: v.tolist() for k, v in client.pull().items()} == {
        "a": [1, 1],
        "b": [2, 2, 2],
        "c": [3],
    }
    assert client.pull([]) == {}


def test_pull_into_out_writes_there(cluster: RoleCluster) -> None:
    client = cluster.client()
    client.define({"a": np.ones(LARGE), "b": np.ones(2)}, rule=Add())
    mine = np.zeros(LARGE)
    assert client.pull("a", out=mine) is mine
    assert (mine == 1.0).all()
    both = {"b": np.zeros(2)}
    found = client.pull(["a", "b"], out=both)
    assert found["b"] is both["b"]
    assert (found["a"] == 1.0).all()
    assert taken(client) == 0


def test_pull_into_a_wrong_out_is_refused(cluster: RoleCluster) -> None:
    client = cluster.client()
    client.define("w", np.ones(3), rule=Add())
    wrong: list[tuple[object, type[Exception]]] = [
        (np.zeros(4), ShapeMismatch),
        (np.zeros(3, np.float32), ShapeMismatch),
        ([0.0] * 3, TypeError),
        (np.broadcast_to(0.0, 3), TypeError),
    ]
    for out, error in wrong:
        with pytest.raises(error, match="out for 'w'"):
            client.pull("w", out=out)
        with pytest.raises((TypeError, ValueError), match="out"):
            client.pull(["w"], out=out if error is TypeError else {"x": out})
        assert taken(client) == 0, out


def test_pull_copy_is_the_callers_to_keep(cluster: RoleCluster) -> None:
    client = cluster.client()
    client.define("w", np.zeros(LARGE), rule=Add())
    before = client.pull("w")
    client.push("w", np.ones(LARGE))
    client.pull("w")
    before += 1.0
    assert (before == 1.0).all()


def test_pull_without_copy_is_read_only_until_the_names_are_pulled_again(
    cluster: RoleCluster,
) -> None:
    client = cluster.client()
    client.define("a", np.zeros(LARGE), rule=Add())
    client.define("b", np.full(LARGE, 5.0), rule=Add())
    views = client.pull(["a", "b"], copy=False)
    assert not views["a"].flags.writeable
    for _ in range(3):
        client.push("a", np.ones(LARGE))
        assert (client.pull("a") >= 1.0).all()
    assert (views["b"] == 5.0).all()
    client.pull("b")
    assert taken(client) == 0


def test_push_pull_sees_its_own_push(cluster: RoleCluster) -> None:
    client = cluster.client()
    client.define({"a": np.zeros(LARGE), "b": np.zeros(3)}, rule=Add())
    for step in range(1, 5):
        values = client.push_pull({"b": np.ones(3), "a": np.ones(LARGE)}, copy=step % 2 == 0)
        assert list(values) == ["b", "a"]
        assert all((value == step).all() for value in values.values())
    client.pull(["a", "b"])
    assert taken(client) == 0


def test_names_of_one_block_are_pushed_and_read_in_any_order_and_number(
    cluster: RoleCluster,
) -> None:
    client = cluster.client()
    shapes = {"a": (3,), "b": (2, 5), "c": (LARGE,), "d": ()}
    total = {name: np.zeros(shape) for name, shape in shapes.items()}
    client.define(total, rule=Add())
    chance = np.random.default_rng(1)
    for step in range(40):
        names = chance.permutation([*shapes])[: 1 + step % 4].tolist()
        given: dict[str, np.ndarray] = {}
        for name in names:
            gradient = chance.integers(9, size=shapes[name]).astype(chance.choice(["f4", "f8"]))
            if chance.random() < 0.5:
                given[name] = client.gradient(name)
                given[name][...] = gradient
            else:
                given[name] = gradient if chance.random() < 0.5 else gradient.T.copy().T
            total[name] = total[name] + gradient
        values = client.push_pull(given, copy=bool(chance.random() < 0.5))
        assert list(values) == names
        for name in names:
            assert np.array_equal(values[name], total[name])
    for name, value in client.pull([*reversed(shapes)]).items():
        assert np.array_equal(value, total[name])


def test_views_end_when_their_own_name_is_read(cluster: RoleCluster) -> None:
    client = cluster.client()
    block = client.define({"a": np.zeros(LARGE), "b": np.zeros(3)}, rule=Add())
    view = client.pull("a", copy=False)
    client.push("a", np.ones(LARGE)).result()
    step = client.dense.step("default", (), pull=[block], tick=False)
    assert (step.result().values[block.id][:LARGE] == 1.0).all()
    assert (view == 0.0).all()
    step.release()
    view.shape = (LARGE // 2, 2)
    assert client.pull("a", copy=False).shape == (LARGE,)
    assert taken(client) == 1


def test_assign_overwrites_only_its_names(cluster: RoleCluster) -> None:
    client = cluster.client()
    client.define({"a": np.zeros(LARGE), "b": np.zeros(3)}, rule=Add())
    client.push("a", np.ones(LARGE))
    client.assign("b", np.full(3, 9.0, np.float32))
    assert client.pull("b").tolist() == [9.0] * 3
    assert (client.pull("a") == 1.0).all()
    client.assign({"a": np.full(LARGE, 2.0), "b": np.zeros(3)})
    assert (client.pull("a") == 2.0).all()


def test_gradient_is_pushed_without_a_copy(cluster: RoleCluster) -> None:
    client = cluster.client()
    client.define("w", np.zeros((200, 200)), rule=Add())
    for step in range(1, 4):
        gradient = client.gradient("w")
        assert (gradient.shape, gradient.dtype) == ((200, 200), np.float64)
        assert client.gradient("w") is gradient
        gradient[:] = 1.0
        client.push("w", gradient)
        assert (client.pull("w") == step).all()
    assert taken(client) == 0


def test_gradient_transposed_is_pushed_as_given(cluster: RoleCluster) -> None:
    client = cluster.client()
    client.define("w", np.zeros((3, 3)), rule=Add())
    gradient = client.gradient("w")
    gradient[:] = np.arange(9.0).reshape(3, 3)
    client.push("w", gradient.T)
    assert np.array_equal(client.pull("w"), np.arange(9.0).reshape(3, 3).T)


def test_gradient_stays_the_callers_until_its_own_push(cluster: RoleCluster) -> None:
    client = cluster.client()
    client.define({"a": np.zeros(100), "b": np.zeros(100)}, rule=Add())
    a, b = client.gradient("a"), client.gradient("b")
    a[:], b[:] = 1.0, 2.0
    client.push("a", a)
    client.pull("b")
    client.gradient("a")[:] = 3.0
    client.pull(["a", "b"])  # these two would take the slot, had the first push released it
    client.push("b", b)
    assert (client.pull("a") == 1.0).all()
    assert (client.pull("b") == 2.0).all()
