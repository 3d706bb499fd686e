"""What an owner of servers registers: rules, policies and functions, in one list that travels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from paramserve.consistency.base import Policy
from paramserve.consistency.registry import BUILT_IN, NONE, PARTS
from paramserve.rules.base import Rule
from paramserve.rules.registry import BUILT_IN as BUILT_IN_RULES
from paramserve.rules.registry import NONE as NO_RULES
from paramserve.rules.registry import TORCH
from paramserve.rules.registry import check_registered as check_rules


class Registered(NamedTuple):
    """By name: what servers may run besides what is built in."""

    rules: Mapping[str, type[Any]] = NO_RULES
    policies: Mapping[str, Any] = NONE
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
    found = Registered(check_rules(classes), check_registered(given, consistency))
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
    return [kind for kind in kinds if kind.name not in {*BUILT_IN_RULES, TORCH}]


# --- policies and functions ---------------------------------------------------------------------


def check_registered(given: Iterable[Any], consistency: Policy | None = None) -> Mapping[str, Any]:
    """What an owner of servers registers, by name.

    Args:
        given: classes derived from `Policy`, and functions.
        consistency: its class, and a function in its fields, are registered with it.
    Raises:
        TypeError: one of them can be neither, or two have one name; the text says what to do.
    """
    found: dict[str, Any] = {}
    for each in (*given, *_own(consistency)):
        name = getattr(each, "__name__", "")
        if found.get(name) is each:
            continue
        _check(each, name)
        if name in BUILT_IN or name in PARTS or name in BUILT_IN_RULES:
            raise TypeError(f"policies=: {name!r} is the name of a built-in one: rename yours")
        if name in found:
            raise TypeError(f"policies=: two are called {name!r}: rename one")
        found[name] = each
    return MappingProxyType(found)


def _own(consistency: Policy | None) -> list[Any]:
    policy: Any = consistency
    if not is_dataclass(policy) or isinstance(policy, type):
        return []
    kind: Any = type(policy)
    own = [] if kind in BUILT_IN.values() else [kind]
    values = (getattr(policy, each.name) for each in fields(policy))
    return own + [value for value in values if inspect.isfunction(value)]


def _check(given: Any, name: str) -> None:
    each: Any = given
    if inspect.isfunction(each):
        if not name.isidentifier():
            raise TypeError(
                f"policies=: {each!r} has no name: write it with def, not lambda, so that clients "
                "can name it"
            )
        return
    if not (isinstance(each, type) and issubclass(each, Policy)):
        raise TypeError(
            f"policies= takes classes derived from ps.Policy and functions, not {each!r}"
        )
    settings: Any = getattr(each, "__dataclass_params__", None)
    if "__dataclass_params__" not in vars(each) or not (settings.frozen and settings.eq):
        raise TypeError(
            f"policies=: {each.__qualname__} has to be a frozen dataclass: put "
            "@dataclass(frozen=True) on it"
        )
    for method, wanted in _METHODS.items():
        _check_method(each, method, wanted)


_METHODS: Mapping[str, int] = MappingProxyType(
    {"on_push": 2, "on_pull": 2, "on_clock": 1, "on_membership": 1, "scale": 1, "check": 1}
)
"""And how many arguments each is called with."""


def _check_method(kind: type[Policy], method: str, count: int) -> None:
    function: Callable[..., Any] = inspect.getattr_static(kind, method)
    try:
        inspect.signature(function).bind(None, *[None] * count)
    except (TypeError, ValueError) as wrong:
        shape = str(inspect.signature(getattr(Policy, method)))
        raise TypeError(
            f"policies=: {kind.__qualname__}.{method} has to be a method {method}{shape}: {wrong}"
        ) from None
