"""Policies by name: what a policy is on the wire, and which policies a server builds from that.

What a server may run is fixed before it listens: the built-in policies and what its owner
registered (`registered`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from paramserve.config import ConsistencySpec, RuleSpec
from paramserve.consistency import built_in
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import DAMPINGS, Adaptive, ElasticAverage, LocalSteps
from paramserve.errors import UnknownRule
from paramserve.rules.base import Rule
from paramserve.rules.registry import BUILT_IN as BUILT_IN_RULES
from paramserve.rules.registry import build as build_rule
from paramserve.rules.registry import spec as rule_spec

BUILT_IN: Mapping[str, type[Policy]] = MappingProxyType(
    {
        name: kind
        for name, kind in vars(built_in).items()
        if isinstance(kind, type) and issubclass(kind, Policy) and kind is not Policy
    }
)
"""What `consistency.built_in` defines."""
PARTS: Mapping[str, type[Any]] = MappingProxyType(
    {kind.__name__: kind for kind in (*DAMPINGS, Adaptive)}
)
"""Objects that stand in a policy's fields."""
Registered = Mapping[str, Any]
"""By name: classes of policies, and functions."""
NONE: Registered = MappingProxyType({})


class PolicyTraits(NamedTuple):
    """What a client needs to know of a group's policy, built in or not."""

    collects: bool
    refuses: bool
    """Whether NaN and Inf are refused."""
    policy: Policy | None
    """None: it is one that is known on the servers only."""


def check_table_policy(name: str, policy: Policy, table: bool) -> None:
    """Refuse a table's policy that would need copies of all that a worker has read.

    Raises:
        ValueError: nothing was applied.
    """
    if table and (policy.keeps_reads or isinstance(policy, LocalSteps | ElasticAverage)):
        raise ValueError(
            f"{type(policy).__name__} cannot be the policy of table {name!r}: it works with copies "
            "of whole parameters, and no worker has a copy of a table. Give a table ps.Async(), "
            "ps.Sync(), ps.BoundedStaleness() or ps.Buffered()"
        )


def is_built_in(policy: Policy) -> bool:
    """Whether a policy is one of ours, which needs no guard; a function in it is not."""
    damping = getattr(policy, "damping", None)
    return type(policy) in BUILT_IN.values() and not inspect.isroutine(damping)


def spec(policy: Policy) -> ConsistencySpec:
    """The policy as data: what travels to a server.

    A field is a number, bool, text or None, a rule, or an object like `ps.Inverse(0.1)`, which
    becomes its name and one option for each of its own fields ("damping.alpha"); a function travels
    as its name.

    Raises:
        TypeError: `policy` is no policy, or a field is something else.
    """
    given: Any = policy
    if isinstance(given, type) or not isinstance(given, Policy):
        raise TypeError(
            f"consistency must be one of {', '.join(BUILT_IN)}, or of a class of yours that "
            f"derives from ps.Policy (an object, as in ps.Async()), not {policy!r}"
        )
    plain: Any = policy
    if not is_dataclass(plain):
        raise TypeError(
            f"{type(policy).__qualname__} has to be a dataclass: @dataclass(frozen=True)"
        )
    options: dict[str, int | float | str | bool | None] = {}
    for each in fields(plain):
        _put(options, each.name, getattr(plain, each.name))
    return ConsistencySpec(
        type(policy).__name__, options, policy.collects, policy.on_nonfinite == "skip"
    )


def _put(options: dict[str, int | float | str | bool | None], name: str, value: Any) -> None:
    if value is None or isinstance(value, bool | str | int | float):
        options[name] = value
    elif isinstance(value, Rule):
        described = rule_spec(value)
        options[name] = described.name
        options |= {f"{name}.{key}": each for key, each in described.options.items()}
    elif inspect.isfunction(value):
        options[name] = value.__name__
    elif type(value) in PARTS.values():
        options[name] = type(value).__name__
        for each in fields(value):
            _put(options, f"{name}.{each.name}", getattr(value, each.name))
    else:
        raise TypeError(
            f"{name} of a policy is a number, bool, text, rule, function or ps.Inverse(...) and "
            f"its like, not {value!r}"
        )


def build(described: ConsistencySpec, registered: Registered = NONE) -> Policy:
    """The policy that a spec describes.

    Args:
        described: may come from a peer: only known classes are called, with their own options.
        registered: by name, from the owner of the servers. They replace nothing that is built in.
    Raises:
        UnknownRule: there is no policy, or no function, of this name.
        ValueError: the policy does not take these options. In both cases nothing was applied.
    """
    kind = BUILT_IN.get(described.name) or registered.get(described.name)
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        known = sorted({*BUILT_IN, *(k for k, v in registered.items() if isinstance(v, type))})
        raise UnknownRule(
            f"unknown consistency policy {described.name!r}; known: {', '.join(known)}",
            fix=f"start the servers with policies=[{described.name}] (paramserve serve: --rules "
            f"module:{described.name}), or use one of these; servers run no code that they were "
            "not started with",
        )
    try:
        return kind(**_arguments(kind, described, registered))
    except UnknownRule:
        raise
    except Exception as wrong:  # a user's class may raise anything
        raise ValueError(f"{described.name} does not take {described.options}: {wrong}") from wrong


def _arguments(
    kind: type[Policy], described: ConsistencySpec, registered: Registered
) -> dict[str, Any]:
    nested: dict[str, dict[str, Any]] = {}
    plain: dict[str, Any] = {}
    for name, value in described.options.items():
        field, dot, inner = name.partition(".")
        if dot:
            nested.setdefault(field, {})[inner] = value
        else:
            plain[field] = value
    types = {each.name: str(each.type) for each in fields(kind)}  # type: ignore[arg-type]  # all are
    for name, value in plain.items():
        if name in nested or _is_object(types.get(name, ""), value):
            plain[name] = _part(name, value, nested.get(name, {}), registered)
    return plain


def _is_object(declared: str, value: Any) -> bool:
    """Whether a text stands for an object or a function."""
    return isinstance(value, str) and any(
        each in declared for each in ("Damping", "Callable", "Rule", "Adaptive")
    )


def _part(name: str, value: Any, options: dict[str, Any], registered: Registered) -> Any:
    if value in PARTS:
        return PARTS[value](**options)
    found = registered.get(value)
    if inspect.isfunction(found):
        return found
    if value in BUILT_IN_RULES or isinstance(found, type):
        return build_rule(RuleSpec(value, options), registered)
    raise UnknownRule(
        f"the servers know no function {value!r} for {name}",
        fix=f"start them with policies=[{value}] (or rules=, if it is a rule), or use "
        "ps.Inverse(...) or its like",
    )


def terms(described: ConsistencySpec) -> PolicyTraits:
    """What a client needs to know; it may not have the class of a registered policy."""
    policy = None
    if described.name in BUILT_IN:
        try:
            policy = build(described)
        except UnknownRule:  # its damping is a function that the servers know
            policy = None
    return PolicyTraits(described.collects, not described.skips, policy)
