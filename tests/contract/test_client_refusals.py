"""Wrong use of the client: a clear error, nothing applied, everybody else unharmed."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import RoleCluster
from tests.suites import each_case

from paramserve.client import BlockPush, Client
from paramserve.config import Limits
from paramserve.errors import (
    DefineMismatch,
    DtypeMismatch,
    NonFinite,
    Overloaded,
    ParamServeError,
    ProtocolError,
    ShapeMismatch,
    UnknownName,
    UnknownRule,
)
from paramserve.rules import SGD, Adam, Add
from paramserve.rules.custom import CustomRule

LARGE = 20_000
HOUSE_FORM = re.compile(r"(?s).+[^.]\. Applied: (yes|no|unknown)\. To fix: .+[^.]")


@dataclass(frozen=True)
class Unknown:
    """A rule that no server knows."""

    name: ClassVar[str] = "Unknown"
    lr: float = 1.0


def a_slot(client: Client) -> tuple[Any, Any]:
    block = client.blocks()[0]
    slot = client.dense.gradient_slot(block)
    slot[:] = 1.0
    return block, slot


def step(client: Client, **options: Any) -> Any:
    block, slot = a_slot(client)
    fields = {name: options.pop(name) for name in ("active", "hyper") if name in options}
    push = [BlockPush(block, slot, **fields)]
    return client.dense.step(options.pop("group", "default"), push, **options).result()


def foreign_slot(client: Client) -> Any:
    block, slot = a_slot(client)
    return client.dense.step("default", [BlockPush(block, slot.copy())])


def pushed_twice(client: Client) -> Any:
    block, slot = a_slot(client)
    return client.dense.step("default", [BlockPush(block, slot), BlockPush(block, slot)])


@dataclass(frozen=True)
class Lr(CustomRule):
    """A rule of the user's."""

    lr: float

    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None:
        """Change nothing."""


ONES = np.ones(LARGE)
CASES: dict[str, tuple[Callable[[Client], Any], type[Exception], str]] = {
    # push
    "shape": (lambda c: c.push("w", np.ones(3)), ShapeMismatch, r"'w'.*\[20000\], got \[3\]"),
    "rank": (lambda c: c.push("w", ONES.reshape(1, -1)), ShapeMismatch, r"got \[1, 20000\]"),
    "scalar": (lambda c: c.push("w", 1.0), ShapeMismatch, r"got \[\]"),
    "int": (lambda c: c.push("w", np.ones(LARGE, int)), DtypeMismatch, r"float64, got int64"),
    "complex": (lambda c: c.push("w", ONES * 1j), DtypeMismatch, "got complex128"),
    "text": (lambda c: c.push("w", np.full(LARGE, "x")), DtypeMismatch, "got <U1"),
    "bool": (lambda c: c.push("w", np.ones(LARGE, bool)), DtypeMismatch, "got bool"),
    "ragged": (lambda c: c.push("w", [[1.0], [1.0, 2.0]]), ValueError, "inhomogeneous"),
    "none": (lambda c: c.push("w"), TypeError, "no value was given for 'w'"),
    "empty": (lambda c: c.push({}), ValueError, "names nothing"),
    "number": (lambda c: c.push(7, ONES), TypeError, "a name is"),
    "no name": (lambda c: c.push("", ONES), TypeError, "a name is"),
    "number in mapping": (lambda c: c.push({7: ONES}), TypeError, "a name is a str"),
    "both": (lambda c: c.push({"w": ONES}, ONES), TypeError, "either one name"),
    "one of two wrong": (
        lambda c: c.push({"w": ONES, "b": np.ones(3)}),
        ShapeMismatch,
        r"'b' has shape \[2\]",
    ),
    "one of two unknown": (lambda c: c.push({"w": ONES, "x": ONES}), UnknownName, "'x'"),
    "several groups": (
        lambda c: c.push({"w": ONES, "o": np.ones(2)}),
        ValueError,
        r"one call goes to one group.*\['default', 'other'\]",
    ),
    "no rule": (lambda c: c.push("fixed", np.ones(2)), ParamServeError, "'fixed' has no rule"),
    "nan": (lambda c: c.push("w", ONES * np.nan), NonFinite, "gradient of 'w'.*without a rank"),
    "inf": (lambda c: c.push_pull({"w": ONES * np.inf}), NonFinite, "gradient of 'w'"),
    # names
    "unknown push": (lambda c: c.push("x", ONES), UnknownName, r"'x'; defined: b, c, fixed, o, w"),
    "unknown pull": (lambda c: c.pull("x"), UnknownName, "no parameter is named 'x'"),
    "unknown among known": (lambda c: c.pull(["w", "x"]), UnknownName, "'x'"),
    "pull a number": (lambda c: c.pull([3]), TypeError, "a name is a str"),
    "unknown assign": (lambda c: c.assign("x", ONES), UnknownName, "'x'"),
    "unknown gradient": (lambda c: c.gradient("x"), UnknownName, "'x'"),
    "unknown group": (lambda c: c.tick("x"), UnknownName, "group 'x' is not defined"),
    "step of unknown group": (lambda c: c.dense.step("x", ()), UnknownName, "group 'x'"),
    # assign
    "assign shape": (lambda c: c.assign("w", np.ones(3)), ShapeMismatch, r"got \[3\]"),
    "assign dtype": (lambda c: c.assign("c", np.ones(2)), DtypeMismatch, "int64, got float64"),
    "store shape": (lambda c: c.dense.store(c.blocks()[0], 0, np.ones(3)), ShapeMismatch, r"\[3\]"),
    "store dtype": (
        lambda c: c.dense.store(c.blocks()[0], 0, np.ones(LARGE + 2) * 1j),
        DtypeMismatch,
        "got complex128",
    ),
    "store field": (
        lambda c: c.dense.store(c.blocks()[0], 5, np.ones(LARGE + 2)),
        ParamServeError,
        "0 state arrays, number 5",
    ),
    "store counts": (
        lambda c: c.dense.store(c.blocks()[0], 0, np.ones(LARGE + 2), counts=(1,)),
        ShapeMismatch,
        "2 pieces, 1 counts",
    ),
    "store piece": (
        lambda c: c.dense.store(c.blocks()[0], 0, np.ones(LARGE + 2), active=(9,)),
        ShapeMismatch,
        r"pieces \[9\]",
    ),
    "fetch field": (lambda c: c.dense.fetch(c.blocks()[0], -1), ParamServeError, "number -1"),
    # define
    "other shape": (
        lambda c: c.define({"w": np.ones(3), "b": np.ones(2)}, rule=SGD(0.1)),
        DefineMismatch,
        r"'w', 'b' in group 'default'.*the shapes 'w' \[20000\], now 'w' \[3\] came",
    ),
    "other pieces": (lambda c: c.define("w", ONES, rule=SGD(0.1)), DefineMismatch, "names"),
    "other rule": (
        lambda c: c.define({"w": ONES, "b": np.ones(2)}, rule=Adam()),
        DefineMismatch,
        "with the rule SGD, now Adam came",
    ),
    "other option": (
        lambda c: c.define({"w": ONES, "b": np.ones(2)}, rule=SGD(0.2)),
        DefineMismatch,
        r"SGD\(lr=0.1\), now SGD\(lr=0.2\) came",
    ),
    "other dtype": (
        lambda c: c.define({"w": ONES.astype("f"), "b": np.ones(2, "f")}, rule=SGD(0.1)),
        DefineMismatch,
        "dtype float64, now float32",
    ),
    "mixed dtypes": (
        lambda c: c.define({"x": np.ones(2), "y": np.ones(2, "f")}),
        TypeError,
        "one dtype, got float32, float64",
    ),
    "two dtypes of 16 bits": (
        lambda c: c.define("x", np.ones(2, np.float16), dtype="bfloat16"),
        TypeError,
        "values of a bfloat16 block are float32 or bfloat16, got float16",
    ),
    "float64 in 16 bits": (
        lambda c: c.define("x", np.ones(2), dtype="float16"),
        TypeError,
        "values of a float16 block are float32 or float16, got float64",
    ),
    "dtype of 8 bits": (
        lambda c: c.define("x", np.ones(2, np.float32), dtype="int8"),
        ValueError,
        "dtype of define is 'bfloat16' or 'float16', not 'int8'",
    ),
    "bool value": (lambda c: c.define("x", True), TypeError, "got bool"),
    "objects": (lambda c: c.define("x", np.array([None])), TypeError, "got object"),
    "int with a rule": (
        lambda c: c.define("x", np.ones(2, int), rule=Add()),
        TypeError,
        "with a rule are float32 or float64 or bfloat16 or float16, got int64",
    ),
    "nan value": (lambda c: c.define("x", np.nan, rule=Add()), NonFinite, "first value of 'x'"),
    "rule that is none": (lambda c: c.define("x", ONES, rule="SGD"), TypeError, "rule=ps.SGD"),
    "rule option": (lambda c: c.define("x", ONES, rule=Lr("0.1")), TypeError, "lr of Lr must be a"),
    "rule class": (lambda c: c.define("x", ONES, rule=SGD), TypeError, "a rule is an object"),
    "unknown rule": (lambda c: c.define("x", ONES, rule=Unknown()), UnknownRule, "'Unknown'"),
    "group number": (lambda c: c.define("x", ONES, group=3), TypeError, "a group's name"),
    "control characters": (lambda c: c.define("x\n", ONES), ParamServeError, "control characters"),
    # step
    "piece": (lambda c: step(c, active=(2,)), ShapeMismatch, r"pieces \(2,\).*has 2"),
    "negative piece": (lambda c: step(c, active=(-1,)), ShapeMismatch, r"pieces \(-1,\)"),
    "negative lr": (lambda c: step(c, hyper=(-0.1, 0, 0, 0, 0, 0)), ValueError, "lr of SGD"),
    "nan lr": (lambda c: step(c, hyper=(np.nan, 0, 0, 0, 0, 0)), ValueError, "lr of SGD"),
    "too few hyper": (lambda c: step(c, hyper=(0.1,)), ValueError, "takes 6"),
    "new momentum": (
        lambda c: step(c, hyper=(0.1, 0.9, 0, 0, 0, 0)),
        ParamServeError,
        "needs the state momentum_buffer",
    ),
    "weight": (lambda c: step(c, weight=0.0), ValueError, "weight must be > 0"),
    "nan weight": (lambda c: step(c, weight=np.nan), ValueError, "weight must be > 0"),
    "clip": (lambda c: step(c, clip_norm=-1.0), ValueError, "clip_norm >= 0"),
    "group of another": (lambda c: step(c, group="other"), ValueError, "group 'default', not"),
    "foreign gradient": (foreign_slot, ValueError, "not what gradient_slot gave"),
    "pushed twice": (pushed_twice, ValueError, "not what gradient_slot gave"),
    # others
    "timeout": (lambda c: setattr(c, "timeout_s", 0), ValueError, "timeout_s must be > 0"),
    "log": (lambda c: c.connection.log(0, {"loss": "low"}), ValueError, "could not convert"),
}  # fmt: skip


@pytest.fixture
def house(make_cluster: MakeCluster) -> RoleCluster:
    """Wrong use is refused before it reaches a transport, or by a shard."""
    return make_cluster("unix", servers=2)


def test_wrong_use_is_refused_whole(house: RoleCluster) -> None:
    """Each by a client of its own, beside one that goes on."""
    other = house.client()
    for case in CASES:
        client = house.client()
        client.define({"w": np.zeros(LARGE), "b": np.zeros(2)}, rule=SGD(0.1))
        client.define("c", np.zeros(2, np.int64))
        client.define("fixed", np.zeros(2))
        client.define("o", np.zeros(2), rule=Add(), group="other")
        refuse(house, client, other, case)
        client.close()


def refuse(house: RoleCluster, client: Client, other: Client, case: str) -> None:
    use, error, words = CASES[case]
    before, versions = other.pull(), group_versions(house)
    with pytest.raises(error, match=words) as caught:
        use(client)
    assert type(caught.value) is error, case
    if isinstance(caught.value, ParamServeError):
        assert caught.value.applied == "no", case
        assert HOUSE_FORM.fullmatch(str(caught.value)), case
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value), case
    for each in (client, other):
        values = each.pull()
        assert set(values) == set(before) == {"w", "b", "c", "fixed", "o"}, case
        assert all(np.array_equal(values[name], before[name]) for name in before), case
    assert group_versions(house) == versions, case
    assert client.clock() == 0, case
    for each in (client, other):
        versions = [[default + 1, rest] for default, rest in versions]
        assert each.push({"w": ONES, "b": np.ones(2)}).result().version == versions[0][0], case
    assert np.allclose(other.pull("w"), before["w"] - 0.2), case
    assert group_versions(house) == versions, case
    client.drain()
    lent = len(client.dense.gradients.caller_slots)  # a slot that is still the caller's
    assert len(client.connection.exchange._pool.in_use_by) == lent, case


def group_versions(house: RoleCluster) -> list[list[int]]:
    """On each server, of the groups "default" and "other"."""
    groups = [running.role.shard.groups for running in house.servers]
    return [[each.state.version for each in found.values()] for found in groups]


def test_name_in_two_groups_is_asked_for_by_block_only(house: RoleCluster) -> None:
    client = house.client()
    first = client.define("w", np.ones(2), rule=Add(), group="a")
    second = client.define("w", np.zeros(3), rule=Add(), group="b")
    for use in (lambda: client.pull("w"), lambda: client.pull(), lambda: client.push("w", ONES)):
        with pytest.raises(UnknownName, match="'w' is in several groups: a, b"):
            use()
    assert client.dense.fetch(first, 0)[0].tolist() == [1.0, 1.0]
    assert client.dense.fetch(second, 0)[0].tolist() == [0.0] * 3


# --- limits -----------------------------------------------------------------------------------


def test_client_over_clients_max_is_refused_and_others_go_on(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("unix", limits=Limits(clients_max=2))
    first, second = cluster.client(), cluster.client()
    first.define("w", np.zeros(3), rule=Add())
    with pytest.raises(Overloaded, match=r"2 clients, its clients_max.*Applied: no"):
        cluster.client()
    second.close()
    third = cluster.client()
    assert third.push("w", np.ones(3)).result().version == 1
    assert first.pull("w").tolist() == [1.0] * 3


@each_case("kind", ["unix", "tcp"])
@pytest.mark.parametrize(
    "limits", [Limits(arena_bytes_max=3 << 20), Limits(arenas_max=2)], ids=["bytes", "number"]
)
def test_arenas_over_the_limit_are_refused_and_the_client_goes_on(
    make_cluster: MakeCluster, limits: Limits, kind: str
) -> None:
    cluster = make_cluster(kind, servers=2, limits=limits)
    client, other = cluster.client(limits=limits), cluster.client(limits=limits)
    client.define("w", np.zeros(60_000), rule=Add())
    tickets = []

    def use_more() -> None:
        for _ in range(20):
            tickets.append(client.dense.step("default", (), pull=client.blocks(), tick=False))

    with pytest.raises(Overloaded, match=r"arenas_max is|arena_bytes_max"):
        use_more()
    assert len(tickets) > 1
    for ticket in tickets:
        ticket.release()
    for each in (client, other):
        assert each.push("w", np.ones(60_000)).result().version > 0
    for shard in range(2):
        cluster.cut(client, shard)  # the next connection passes the arenas that there are
    client.push("w", np.ones(60_000)).result()
    assert (other.pull("w") == 3.0).all()
    client.drain()
    assert not client.connection.exchange._pool.in_use_by


def test_mirror_over_the_limit_of_its_server_is_told_and_others_go_on(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("tcp", limits=Limits(arena_bytes_max=3 << 20))
    client, other = cluster.client(), cluster.client()
    client.define("w", np.zeros(3), rule=Add())
    with pytest.raises(Overloaded, match="arena_bytes_max 3145728"):
        client.define("v", np.zeros(1 << 19), rule=Add())
    assert other.push("w", np.ones(3)).result().version == 1


def test_payload_over_the_limit_is_told(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("tcp", limits=Limits(payload_bytes_max=100_000))
    client, other = cluster.client(), cluster.client()
    client.define("w", np.zeros(3), rule=Add())
    with pytest.raises(ProtocolError, match=r"payload of 160000 bytes, the limit is 100000"):
        client.define("v", np.zeros(20_000), rule=Add())
    assert other.push("w", np.ones(3)).result().version == 1


def test_rank_that_does_not_exist_is_refused(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("unix", workers=2)
    for rank in (2, -2):
        with pytest.raises(ParamServeError, match=rf"rank {rank}, the cluster was started for 2"):
            cluster.client(rank)
    assert cluster.client(1).rank == 1
