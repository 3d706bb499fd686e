"""Room in the cluster: reserved for a whole group, or not at all, and given back.

What is asked for is decided in `placing`; here Ray is asked.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from paramserve.engine.on_ray.control import LOOK_S, bounded, import_ray
from paramserve.engine.placing import (
    FEWER,
    LEAST_CPU,
    Group,
    Needs,
    Servers,
    Workers,
    arrange,
    arrange_more,
    describe,
    shortfall,
)
from paramserve.errors import CannotPlace

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

logger = logging.getLogger("paramserve")

NODES_SHOWN_MAX = 8


@dataclass(frozen=True)
class Layout:
    """What each kind of role needs, how they lie together, how long it may take. See `OnRay`."""

    needs: Mapping[str, Needs]
    servers: Servers
    workers: Workers
    place_s: float

    def groups(self, roles: Sequence[str]) -> list[Group]:
        """What a run asks for. Raises `ValueError` if no node can have it."""
        return arrange(roles, self.needs, self.servers, self.workers)

    def more(self, roles: Sequence[str], server_nodes: Sequence[str]) -> list[Group]:
        """What further workers ask for, where the servers are on these nodes."""
        return arrange_more(roles, self.needs, self.servers, self.workers, server_nodes)


class Place(NamedTuple):
    """A bundle that is kept for a role, whichever process has it."""

    group: PlacementGroup
    bundle: int

    def node(self) -> str:
        """Ray's name of the node that it is on."""
        node: str = _table(self.group)["bundles_to_node_id"][self.bundle]
        return node

    def state(self) -> str:
        """Ray's word for how its group stands; "CREATED": it has its nodes."""
        state: str = _table(self.group)["state"]
        return state


def reserve(
    groups: Sequence[Group],
    place_s: float,
    excluded: Iterable[str] = (),
    closed: Callable[[], bool] = lambda: False,
    *,
    keep: Callable[[PlacementGroup], None] = lambda group: None,
) -> list[tuple[Group, PlacementGroup]]:
    """Reserve room for all groups, or for none.

    Args:
        excluded: nodes that groups which are to be apart must not be on.
        closed: whether it is no longer needed.
        keep: is told each group as soon as there is one.
    Raises:
        CannotPlace: there is none after `place_s`.
        RuntimeError: it was closed meanwhile.
    """
    from ray.util.placement_group import placement_group

    deadline = time.monotonic() + place_s
    placed: list[tuple[Group, PlacementGroup]] = []
    others = set(excluded)
    try:
        for group in groups:
            labels = [dict(bundle.labels) for bundle in group.bundles]
            if group.apart and others:
                for each in labels:
                    each["ray.io/node-id"] = f"!in({','.join(sorted(others))})"
            placement = placement_group(
                [bundle.amounts or {"CPU": LEAST_CPU} for bundle in group.bundles],
                strategy=group.strategy,
                bundle_label_selector=labels if any(labels) else None,
            )
            placed.append((group, placement))
            keep(placement)
            while not placement.wait(LOOK_S):
                if closed():
                    raise RuntimeError("this fleet is closed")
                if time.monotonic() > deadline:
                    raise CannotPlace(
                        f"the Ray cluster did not make room for {describe(groups)} within "
                        f"{place_s:g} s. {what_there_is()}",
                        fix=f"ask for less (ps.OnRay(server=ps.Needs(...), ...)), {FEWER}, add "
                        "nodes, end what else runs there, or raise place_s where nodes are being "
                        "added",
                    )
            if not group.apart:
                others |= set(_table(placement)["bundles_to_node_id"].values())
    except BaseException:
        remove(placement for _, placement in placed)
        raise
    return placed


def check_totals(roles: Sequence[str], needs: Mapping[str, Needs], place_s: float) -> None:
    """Compare what roles need with all that the cluster has, before any of it is reserved.

    A Ray that this process has started, on one node, gets no other node: there it is an error. To
    all others nodes may be added, by an autoscaler or by hand: there it is only said.

    Raises:
        CannotPlace: there can be no room.
    """
    ray = import_ray()
    short = shortfall(roles, needs, ray.cluster_resources())
    if short is None:
        return
    lack, fix = short
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if started_here(ray) and len(nodes) == 1:
        raise CannotPlace(f"this Ray cannot have room for the run: it {lack}", fix=fix)
    logger.warning(
        "the run %s; waiting up to %g s (place_s) for more nodes. Otherwise %s",
        lack,
        place_s,
        fix,
    )


def started_here(ray: ModuleType) -> bool:
    """Whether this process has started the Ray that it is connected to; False where this version
    of Ray does not tell."""
    worker = getattr(getattr(ray, "_private", None), "worker", None)
    node = getattr(worker, "_global_node", None)
    return node is not None and bool(node.is_head())


def remove(groups: Iterable[PlacementGroup]) -> None:
    """Give back what was reserved. Where this process has left the cluster, Ray has done so."""
    import ray
    from ray.util.placement_group import remove_placement_group

    for group in groups if ray.is_initialized() else ():
        bounded(functools.partial(remove_placement_group, group))


def _table(group: PlacementGroup) -> dict[str, Any]:
    from ray.util.placement_group import placement_group_table

    table: dict[str, Any] = placement_group_table(group)
    return table


def what_there_is() -> str:
    """The cluster's nodes and what of them is free, in words."""
    ray = import_ray()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    lines = []
    for node in nodes[:NODES_SHOWN_MAX]:
        labels = node.get("Labels") or {}
        user_labels = [f"{n}={v}" for n, v in sorted(labels.items()) if not n.startswith("ray.io/")]
        amounts = _amounts(node["Resources"])
        lines.append(f"{node['NodeManagerAddress']} ({', '.join([amounts, *user_labels])})")
    if len(nodes) > NODES_SHOWN_MAX:
        lines.append(f"and {len(nodes) - NODES_SHOWN_MAX} more")
    count = f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}"
    return f"It has {count}: {', '.join(lines)}; free now: {_amounts(ray.available_resources())}"


def _amounts(resources: Mapping[str, float]) -> str:
    amounts = {
        name: amount
        for name, amount in sorted(resources.items())
        if "memory" not in name and not name.startswith("node:") and "_group_" not in name
    }
    return " ".join(f"{amount:g} {name}" for name, amount in amounts.items()) or "nothing"
