"""Rules by name: what a rule is on the wire, and which rules a server builds from that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any

from paramserve.config import PolicySpec
from paramserve.errors import UnknownRule
from paramserve.rules.adam import Adam
from paramserve.rules.add import Add
from paramserve.rules.base import Rule
from paramserve.rules.sgd import SGD

Option = float | str | bool

BUILT_IN: Mapping[str, type[Rule]] = MappingProxyType(
    {kind.name: kind for kind in (Add, SGD, Adam)}
)
NONE: Mapping[str, type[Any]] = MappingProxyType({})


def spec(rule: Rule) -> PolicySpec:
    """Describe a rule: its name, and its fields as options.

    A field is a number, a bool, a str, or a tuple of these, which becomes one option for each
    element ("betas.0", "betas.1"). Numbers arrive as floats.

    Raises:
        TypeError: the rule is not a dataclass, or a field is something else.
    """
    instance: Any = rule
    if not is_dataclass(instance) or isinstance(instance, type):
        raise TypeError(f"a rule must be an instance of a frozen dataclass, not {rule!r}")
    options: dict[str, Option] = {}
    for field in fields(instance):
        value = getattr(rule, field.name)
        if isinstance(value, tuple):
            options |= {f"{field.name}.{i}": _option(each) for i, each in enumerate(value)}
        else:
            options[field.name] = _option(value)
    return PolicySpec(type(rule).name, options)


def build(described: PolicySpec, registered: Mapping[str, type[Any]] = NONE) -> Rule:
    """Make the rule that `spec` described, from the built-in ones and the registered ones.

    Args:
        described: may come from a peer: only known classes are called, with their own options.
        registered: classes by their `name`, from the owner of the servers. They replace no
            built-in rule.
    Raises:
        UnknownRule: no rule has this name.
        ValueError: the rule does not take these options.
    """
    known: Mapping[str, type[Any]] = {**registered, **BUILT_IN}
    kind = known.get(described.name)
    if kind is None:
        raise UnknownRule(
            f"no rule is called {described.name!r} on the servers, "
            f"which know {', '.join(sorted(known))}",
            fix="use one of these rules; servers run no code that they were not started with",
        )
    try:
        rule: Rule = kind(**_arguments(described.options))
    except (TypeError, ValueError) as wrong:
        raise ValueError(f"{described.name} does not take {described.options}: {wrong}") from wrong
    return rule


def _option(value: Any) -> Option:
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"a field of a rule is a number, bool, str or tuple of these, not {value!r}")


def _arguments(options: Mapping[str, Option]) -> dict[str, Any]:
    """Options as keyword arguments, the elements of a tuple together again."""
    arguments: dict[str, Any] = {}
    elements: dict[str, dict[int, Option]] = {}
    for name, value in options.items():
        field, dot, index = name.partition(".")
        if dot:
            elements.setdefault(field, {})[int(index)] = value
        else:
            arguments[field] = value
    for field, at in elements.items():
        arguments[field] = tuple(at[i] for i in sorted(at))
    return arguments
