"""What an owner of servers registers: rules, policies and functions, in one list that travels."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from paramserve.consistency import registry as policies
from paramserve.consistency.base import Policy
from paramserve.rules import registry
from paramserve.rules.base import Rule


class Registered(NamedTuple):
    """By name: what servers may run besides what is built in."""

    rules: Mapping[str, type[Any]] = registry.NONE
    policies: Mapping[str, Any] = policies.NONE
    """Classes of policies, and functions."""

    @property
    def all(self) -> Mapping[str, Any]:
        """Both: a policy may have a rule in its fields."""
        return {**self.rules, **self.policies}


def registered(things: Iterable[Any]) -> Registered:
    """Tell rules from policies and functions, and check each.

    Args:
        things: classes of rules, classes derived from `Policy`, and functions, in any order.
    Raises:
        TypeError: one of them can be none of these, or two have one name; the text says what to
            do.
    """
    return check(*split(things))


def split(things: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """What can only be for `rules=`, and what is for `policies=`; nothing is checked."""
    rules: list[Any] = []
    others: list[Any] = []
    for each in things:
        (others if _is_of_policies(each) else rules).append(each)
    return rules, others


def _is_of_policies(thing: Any) -> bool:
    return inspect.isfunction(thing) or (isinstance(thing, type) and issubclass(thing, Policy))


def check(
    rules: Iterable[Any], given: Iterable[Any], consistency: Policy | None = None
) -> Registered:
    """As `registered`, of what a user gave as `rules=` and as `policies=`.

    Args:
        consistency: its class, and rules' classes and functions in its fields, are registered with
            the others.
    Raises:
        TypeError: as `registered`.
    """
    classes = list(rules)
    classes += [each for each in _rules_of(consistency) if each not in classes]
    found = Registered(
        registry.check_registered(classes), policies.check_registered(given, consistency)
    )
    both = sorted(found.rules.keys() & found.policies.keys())
    if both:
        raise TypeError(f"policies=: {both[0]!r} is the name of a rule in rules=: rename one")
    return Registered(*map(MappingProxyType, found))


def _rules_of(consistency: Policy | None) -> list[type[Any]]:
    """Classes of rules in a policy's fields that are not built in."""
    owner: Any = consistency
    if not is_dataclass(owner) or isinstance(owner, type):
        return []
    values = [getattr(owner, each.name) for each in fields(owner)]
    kinds = [type(value) for value in values if isinstance(value, Rule)]
    return [kind for kind in kinds if kind.name not in {*registry.BUILT_IN, registry.TORCH}]
