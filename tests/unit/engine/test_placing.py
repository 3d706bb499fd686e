"""How roles are laid out, without a cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.suites import each_case

from paramserve.engine.placing import NOTHING, Needs, arrange, arrange_more, describe, shortfall

ROLES = ("coordinator", "server 0", "server 1", "worker 0", "worker 1", "worker 2")
NEEDS = {"coordinator": NOTHING, "server": Needs(num_cpus=2), "worker": Needs(num_cpus=1)}


def laid_out(servers: Any, workers: Any, **needs: Needs) -> list[tuple[str, bool, list[list[str]]]]:
    groups = arrange(ROLES, {**NEEDS, **needs}, servers, workers)
    return [(each.strategy, each.apart, [b.roles for b in each.bundles]) for each in groups]


def test_packed_servers_with_workers_beside_are_one_group() -> None:
    bundles = [["server 0", "coordinator"], ["server 1"], ["worker 0"], ["worker 1"], ["worker 2"]]
    assert laid_out("pack", "beside") == [("PACK", False, bundles)]


def test_spread_servers_take_workers_beside_in_turn() -> None:
    bundles = [["server 0", "coordinator", "worker 0", "worker 2"], ["server 1", "worker 1"]]
    assert laid_out("spread", "beside") == [("STRICT_SPREAD", False, bundles)]
    group = arrange(ROLES, NEEDS, "spread", "beside")[0]
    assert [bundle.amounts for bundle in group.bundles] == [{"CPU": 4.0}, {"CPU": 3.0}]


@each_case(
    ("workers", "strategy", "apart"), [("apart", "PACK", True), ("anywhere", "SPREAD", False)]
)
def test_workers_elsewhere_are_a_second_group(workers: str, strategy: str, apart: bool) -> None:
    main, own = laid_out("spread", workers)
    assert main == ("STRICT_SPREAD", False, [["server 0", "coordinator"], ["server 1"]])
    assert own == (strategy, apart, [["worker 0"], ["worker 1"], ["worker 2"]])


def test_coordinator_that_asks_for_something_particular_is_a_group_of_its_own() -> None:
    particular = Needs(num_cpus=0, resources={"head": 0.1})
    main, own = laid_out("pack", "beside", coordinator=particular)
    assert ["server 0"] in main[2]
    assert own == ("PACK", False, [["coordinator"]])


def test_roles_of_unknown_kinds_get_no_place() -> None:
    assert arrange(["a echo", "logger 3"], NEEDS, "pack", "beside") == []


def test_workers_without_servers_are_placed() -> None:
    for workers in ("beside", "apart", "anywhere"):
        groups = arrange(["worker 0"], NEEDS, "spread", workers)
        assert [[b.roles for b in group.bundles] for group in groups] == [[["worker 0"]]]


def test_labels_that_no_node_has_together_are_refused() -> None:
    needs = {kind: replace(NEEDS[kind], label_selector={"zone": kind}) for kind in NEEDS}
    with pytest.raises(ValueError, match=r"worker 0 needs .* zone=worker.*server 0 .*zone=server"):
        arrange(ROLES, needs, "spread", "beside")
    arrange(ROLES, needs, "pack", "beside")


def test_request_is_described_in_words() -> None:
    needs = {
        "coordinator": NOTHING,
        "server": Needs(num_cpus=1, label_selector={"zone": "a"}),
        "worker": Needs(num_cpus=0, num_gpus=0.5, resources={"gadget": 2}),
    }
    groups = arrange(["server 0", "worker 0"], needs, "spread", "apart")
    assert describe(groups) == (
        "1 CPU on a node with zone=a for server 0; 0.5 GPU and 2 gadget for worker 0, on other "
        "nodes than the servers"
    )


@each_case(
    ("settings", "error", "text"),
    [
        ({"num_cpus": -1}, ValueError, "num_cpus must be at least 0"),
        ({"num_gpus": "2"}, TypeError, "num_gpus must be a number, not '2'"),
        ({"num_cpus": float("nan")}, ValueError, "num_cpus must be at least 0"),
        ({"num_cpus": True}, TypeError, "num_cpus must be a number"),
        ({"resources": {"CPU": 1}}, ValueError, "use num_cpus="),
        ({"resources": {"x": -1}}, ValueError, r"resources\['x'\] must be at least 0"),
        ({"resources": ["x"]}, TypeError, "resources must be a dict"),
        ({"label_selector": {"zone": 1}}, TypeError, r"label_selector\['zone'\] must be a str"),
        ({"runtime_env": "env"}, TypeError, "runtime_env must be a dict"),
    ],
)
def test_needs_that_no_node_can_meet_are_refused(
    settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        Needs(**settings)


def added(servers: Any, workers: Any, **more: Needs) -> list[tuple[str, bool, list[Any]]]:
    roles = ("worker 3", "worker 4")
    groups = arrange_more(roles, {**NEEDS, **more}, servers, workers, ["node-a", "node-b"])
    return [
        (each.strategy, each.apart, [(b.roles, b.labels) for b in each.bundles]) for each in groups
    ]


def test_added_workers_beside_packed_servers_are_groups_of_their_own() -> None:
    assert added("pack", "beside") == [
        ("PACK", False, [(["worker 3"], {})]),
        ("PACK", False, [(["worker 4"], {})]),
    ]


def test_added_workers_beside_spread_servers_take_their_nodes_in_turn() -> None:
    labels = Needs(label_selector={"disk": "fast"})
    assert added("spread", "beside", worker=labels) == [
        ("PACK", False, [(["worker 3"], {"disk": "fast", "ray.io/node-id": "node-b"})]),
        ("PACK", False, [(["worker 4"], {"disk": "fast", "ray.io/node-id": "node-a"})]),
    ]


def test_added_workers_apart_stay_apart() -> None:
    assert [(strategy, apart) for strategy, apart, _ in added("spread", "apart")] == [
        ("PACK", True),
        ("PACK", True),
    ]


def test_added_workers_anywhere_are_spread_together() -> None:
    assert added("pack", "anywhere") == [
        ("SPREAD", False, [(["worker 3"], {}), (["worker 4"], {})])
    ]
    assert arrange_more([], NEEDS, "pack", "anywhere", []) == []


@each_case(
    ("totals", "needs", "told", "fix"),
    [
        (
            {"CPU": 2.0},
            {},
            "needs 3 CPU: 1 server x 1 + 2 workers x 1; the cluster has 2",
            "ps.OnRay(server=ps.Needs(num_cpus=0.65), worker=ps.Needs(num_cpus=0.65))",
        ),
        (
            {"CPU": 2.0},
            {"server": Needs(num_cpus=0), "worker": Needs(num_cpus=1.5)},
            "needs 3 CPU: 2 workers x 1.5; the cluster has 2",
            "ps.OnRay(worker=ps.Needs(num_cpus=1))",
        ),
        (
            {"CPU": 8.0},
            {"worker": Needs(num_gpus=1)},
            "needs 2 GPU: 2 workers x 1; the cluster has 0",
            "ask for less GPU",
        ),
        ({"CPU": 3.0}, {}, "", ""),
    ],
)
def test_shortfall_has_the_sum_and_what_fits(
    totals: dict[str, float], needs: dict[str, Needs], told: str, fix: str
) -> None:
    kinds = {"coordinator": NOTHING, "server": Needs(), "worker": Needs(), **needs}
    found = shortfall(["coordinator", "server 0", "worker 0", "worker 1"], kinds, totals)
    assert (found[0] if found else "") == told
    assert not found or fix in found[1]
