"""Decides how the roles of a run are laid out on a cluster: as groups of bundles.

A bundle is what must fit on one node; a group is placed as a whole. Pure: `on_ray/room.py` asks Ray
for what is decided here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from paramserve.config import check_number

Servers: TypeAlias = Literal["pack", "spread"]
Workers: TypeAlias = Literal["beside", "apart", "anywhere"]

LEAST_CPU = 0.001
"""Cores of a bundle whose roles need nothing: Ray wants a bundle to have something."""
SHARE_STEP = 0.05
"""Step of the share of a core that an error proposes for each process."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What one process of a kind needs of the node that it runs on.

    Args:
        num_cpus: cores that Ray counts as taken.
        num_gpus: GPUs; the process sees only its own.
        resources: custom resources by name, as the nodes were started with.
        label_selector: labels that the node must have, as Ray writes them: `{"zone": "a"}`,
            `{"zone": "!a"}`, `{"zone": "in(a,b)"}`.
        runtime_env: Ray's runtime environment of the process. One that differs from the job's own
            costs seconds: no process that waits for work can be used.
    Raises:
        TypeError, ValueError: a value that no node can have.
    """

    num_cpus: float = 1
    num_gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    label_selector: Mapping[str, str] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for each in fields(self)[2:]:
            value = getattr(self, each.name)
            if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
                raise TypeError(f"{each.name} must be a dict with names as keys, not {value!r}")
        check_number("num_cpus", self.num_cpus)
        check_number("num_gpus", self.num_gpus)
        for name, amount in self.resources.items():
            if name in ("CPU", "GPU"):
                raise ValueError(f"use num_{name.lower()}s= instead of resources={{{name!r}: ...}}")
            check_number(f"resources[{name!r}]", amount)
        for name, value in self.label_selector.items():
            if not isinstance(value, str):
                raise TypeError(f"label_selector[{name!r}] must be a str, not {value!r}")

    @property
    def amounts(self) -> dict[str, float]:
        """Amount of each resource, as Ray names them; what is not needed is not in it."""
        named = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: float(amount) for name, amount in named.items() if amount}

    @property
    def is_plain(self) -> bool:
        """Whether any node with free cores will do."""
        return not (self.num_gpus or self.resources or self.label_selector)


NOTHING = Needs(num_cpus=0)


@dataclass
class Bundle:
    """Roles that must be on one node, and what that node must have for them."""

    roles: list[str] = field(default_factory=list)
    amounts: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)

    def add(self, role: str, needs: Needs) -> Bundle:
        """Put one more role into it.

        Raises:
            ValueError: no node can have both what it and what the others ask for.
        """
        self.roles.append(role)
        for name, amount in needs.amounts.items():
            self.amounts[name] = self.amounts.get(name, 0.0) + amount
        for name, value in needs.label_selector.items():
            if self.labels.setdefault(name, value) != value:
                raise ValueError(
                    f"{role} needs a node with label {name}={value}, and is to be beside "
                    f"{self.roles[0]} on one with {name}={self.labels[name]}; to fix: give both "
                    "the same label_selector, or use workers='apart' or 'anywhere'"
                )
        return self

    def __str__(self) -> str:
        """Bundle in words, such as "1 CPU on a node with zone=a for coordinator, server 0"."""
        amounts = " and ".join(f"{n:g} {name}" for name, n in sorted(self.amounts.items()))
        labels = ", ".join(f"{name}={value}" for name, value in self.labels.items())
        where = f" on a node with {labels}" if labels else ""
        return f"{amounts if amounts else 'nothing'}{where} for {', '.join(self.roles)}"


@dataclass
class Group:
    """Bundles that are placed together.

    Attributes:
        strategy: Ray's name of how they lie to each other.
        apart: whether they must be on other nodes than all groups before.
    """

    strategy: Literal["PACK", "SPREAD", "STRICT_SPREAD"]
    bundles: list[Bundle]
    apart: bool = False

    def __str__(self) -> str:
        how = {
            "PACK": "",
            "SPREAD": "",
            "STRICT_SPREAD": ", each on a node of its own" if len(self.bundles) > 1 else "",
        }[self.strategy]
        away = ", on other nodes than the servers" if self.apart else ""
        return "; ".join(str(bundle) for bundle in self.bundles) + how + away


def kind_of(role: str) -> str:
    """The kind of a role, by its name: "worker" of "worker 3"."""
    return role.partition(" ")[0]


def arrange(
    roles: Sequence[str], needs: Mapping[str, Needs], servers: Servers, workers: Workers
) -> list[Group]:
    """What to ask for, in this order. Roles of a kind without needs get no place.

    Servers that are packed share a group with the workers beside them: Ray then fills one node
    after the other. Where servers are spread, worker r is on the node of server r modulo their
    number. The coordinator is with server 0, unless it asks for something particular.

    Raises:
        ValueError: what must be on one node asks for what no node can have.
    """
    by_kind: dict[str, list[str]] = {kind: [] for kind in needs}
    for role in roles:
        if kind_of(role) in by_kind:
            by_kind[kind_of(role)].append(role)
    main = [Bundle().add(role, needs["server"]) for role in by_kind["server"]]
    particular: list[Bundle] = []
    for role in by_kind["coordinator"]:
        if main and needs["coordinator"].is_plain:
            main[0].add(role, needs["coordinator"])
        else:
            particular.append(Bundle().add(role, needs["coordinator"]))
    groups = []
    own = [Bundle() for _ in by_kind["worker"]]
    if workers == "beside" and servers == "spread" and main:
        own = [main[rank % len(main)] for rank in range(len(own))]
    elif workers == "beside":
        main += own
    for role, bundle in zip(by_kind["worker"], own, strict=True):
        bundle.add(role, needs["worker"])
    if main:
        groups.append(Group("STRICT_SPREAD" if servers == "spread" else "PACK", main))
    if own and workers != "beside":
        groups.append(Group("PACK" if workers == "apart" else "SPREAD", own, workers == "apart"))
    if particular:
        groups.append(Group("PACK", particular))
    return groups


def arrange_more(
    roles: Sequence[str],
    needs: Mapping[str, Needs],
    servers: Servers,
    workers: Workers,
    server_nodes: Sequence[str],
) -> list[Group]:
    """What to ask for when workers are added to what `arrange` has laid out.

    Each is a group of its own, so that its place can be given back alone. That they are anywhere
    means evenly: then they are one group.

    Args:
        server_nodes: Ray's name of the node of each server.
    """
    bundles = [Bundle().add(role, needs["worker"]) for role in roles]
    if workers == "anywhere":
        return [Group("SPREAD", bundles)] if bundles else []
    if workers == "beside" and servers == "spread" and server_nodes:
        for role, bundle in zip(roles, bundles, strict=True):
            node = server_nodes[_number_of(role) % len(server_nodes)]
            bundle.labels["ray.io/node-id"] = node
    return [Group("PACK", [bundle], workers == "apart") for bundle in bundles]


def _number_of(role: str) -> int:
    return int(role.partition(" ")[2])


FEWER = "use fewer workers or servers (of the command: --workers, --servers)"
"""What also a run of `paramserve run` can do, whose processes need one CPU each."""


def shortfall(
    roles: Sequence[str], needs: Mapping[str, Needs], totals: Mapping[str, float]
) -> tuple[str, str] | None:
    """What roles need that a whole cluster does not have, with the sum, and what would help.

    Args:
        totals: of each resource that the cluster has, free or not.
    Returns:
        None: the totals suffice; whether the nodes' parts do is not known.
    """
    counts: dict[str, int] = {}
    for role in roles:
        if kind_of(role) in needs:
            counts[kind_of(role)] = counts.get(kind_of(role), 0) + 1
    for name in {name: None for kind in counts for name in needs[kind].amounts}:
        parts = {kind: needs[kind].amounts.get(name, 0.0) for kind in counts}
        parts = {kind: amount for kind, amount in parts.items() if amount}
        needed, have = sum(counts[kind] * parts[kind] for kind in parts), totals.get(name, 0.0)
        if needed > have + LEAST_CPU:
            total = " + ".join(
                f"{counts[kind]} {kind}{'s' if counts[kind] > 1 else ''} x {parts[kind]:g}"
                for kind in parts
            )
            return f"needs {needed:g} {name}: {total}; the cluster has {have:g}", _help(
                name, have, {kind: counts[kind] for kind in parts}
            )
    return None


def _help(name: str, have: float, counts: Mapping[str, int]) -> str:
    """What can be done where a resource is short."""
    share = math.floor(have / sum(counts.values()) / SHARE_STEP + 1e-9) * SHARE_STEP
    if name != "CPU" or share < SHARE_STEP:
        return f"{FEWER}, ask for less {name}, or add nodes"
    kinds = ", ".join(f"{kind}=ps.Needs(num_cpus={share:g})" for kind in counts)
    return f"let processes share cores, as in ps.OnRay({kinds}), {FEWER}, or add nodes"


def describe(groups: Sequence[Group]) -> str:
    return "; ".join(str(group) for group in groups)
