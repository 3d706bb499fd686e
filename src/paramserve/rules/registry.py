"""Rules by name: what a rule is on the wire, and which rules a server builds from that."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from numbers import Real
from types import MappingProxyType
from typing import Any

from paramserve import rules
from paramserve.config import RuleSpec
from paramserve.errors import UnknownRule
from paramserve.rules.base import NO_ROWS, Rule
from paramserve.rules.built_in import BuiltIn, check_plain_number
from paramserve.rules.custom import CustomRule

Option = float | str | bool

BUILT_IN: Mapping[str, type[Rule]] = MappingProxyType(
    {
        kind.name: kind
        for kind in vars(rules).values()
        if isinstance(kind, type) and issubclass(kind, BuiltIn)
    }
)
"""What `paramserve.rules` exports."""
NONE: Mapping[str, type[Any]] = MappingProxyType({})
TORCH = "torch"
"""Name of `rules.torch_rule.TorchRule`, which is imported, and torch with it, when it is named."""


def as_rule(value: Rule | Callable[..., Any] | str) -> Rule:
    """What `rule=` of `Client.define` or a table was given, as a rule.

    Args:
        value: a rule; or as `torch_kinds.rule_of` takes it. What else is no rule is given back:
            `spec` refuses it.
    Raises:
        TypeError: a class, a name, an optimizer.
        TypeError, ValueError: as `torch_kinds.rule_of`.
    """
    if isinstance(value, type) and issubclass(value, BuiltIn | CustomRule):
        raise TypeError(
            f"a rule is an object: write rule={value.__name__}(...), with its hyper-parameters, "
            f"and not rule={value.__name__}"
        )
    if isinstance(value, str):
        alike = [name for name in BUILT_IN if name.lower() == value.lower()]
        example = f"ps.{alike[0]}(...)" if alike else "ps.Adagrad(lr=0.1)"
        raise TypeError(
            f"a rule is an object, as in rule={example}, and not a name: rule={value!r}. "
            "Applied: no"
        )
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.optim.Optimizer):
        kind = type(value).__name__
        raise TypeError(
            f"rule= takes no optimizer, which has parameters of its own: give the class, as in "
            f"rule=torch.optim.{kind}, or functools.partial(torch.optim.{kind}, lr=0.01)"
        )
    if torch is not None and callable(value):
        converted: Rule = import_module("paramserve.rules.torch_kinds").rule_of(value)
        return converted
    rule: Any = value
    result: Rule = rule
    return result


def spec(rule: Rule) -> RuleSpec:
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
        if isinstance(value, tuple) and not value and field.default != ():
            raise TypeError(f"{field.name} of {rule!r} is empty, which cannot travel")
        if isinstance(value, tuple):
            options |= {f"{field.name}.{i}": _option(each) for i, each in enumerate(value)}
        else:
            options[field.name] = _option(value)
    return RuleSpec(type(rule).name, options)


def build(described: RuleSpec, registered: Mapping[str, type[Any]] = NONE) -> Rule:
    """Make the rule that `spec` described, from the built-in ones and the registered ones.

    Args:
        described: may come from a peer: only known classes are called, with their own options.
        registered: classes by their `name`, from the owner of the servers. They replace no
            built-in rule.
    Raises:
        UnknownRule: no rule has this name.
        ValueError: the rule does not take these options.
    """
    kind = _kind(described.name, registered)
    try:
        rule: Rule = kind(**arguments(described.options))
    except Exception as wrong:  # a user's class may raise anything
        raise ValueError(f"{described.name} does not take {described.options}: {wrong}") from wrong
    return rule


def _kind(name: str, registered: Mapping[str, type[Any]]) -> type[Any]:
    if name == TORCH:
        try:
            torch_rule: type[Any] = import_module("paramserve.rules.torch_rule").TorchRule
        except ImportError as error:
            raise UnknownRule(
                f"the servers cannot run torch's optimizers: {error}",
                fix="pip install 'paramserve[torch]' where the servers run",
            ) from None
        return torch_rule
    kinds: Mapping[str, type[Any]] = {**registered, **BUILT_IN}
    kind = kinds.get(name)
    if kind is None:
        raise UnknownRule(
            f"no rule is called {name!r} on the servers, "
            f"which know {', '.join(sorted(kinds))} and torch's optimizers",
            fix=f"start the servers with rules=[{name}] (paramserve serve: --rules module:{name}), "
            "or use one of these; servers run no code that they were not started with",
        )
    return kind


def is_built_in(rule: Rule) -> bool:
    """Whether a rule is one of ours with kernels, which need no guard."""
    return type(rule) in BUILT_IN.values()


def described_by(rule: Rule, rows: bool = False) -> RuleSpec:
    """Spec of a rule (see `spec`), after a check of what a client wants to define with.

    Servers may know rules that are not registered here, so an unknown one passes.

    Args:
        rows: whether it is for a table.
    Raises:
        TypeError: no rule, or another class under the name of a built-in one.
        ValueError: its options; or it is only for tables, and this is none.
    """
    described = spec(rule)
    if not rows and getattr(rule, "whole_rows", False):
        raise ValueError(NO_ROWS.format(described.name))
    kind = BUILT_IN.get(described.name)
    if kind is not None:
        if not isinstance(rule, kind):
            raise TypeError(f"{type(rule).__qualname__} has the name of a built-in rule: {_RENAME}")
        build(described)
    for name in getattr(rule, "hyper_names", ()):
        check_plain_number(described.name, name, getattr(rule, name, 0.0))
    return described


# --- registration ----------------------------------------------------------------------------

_RENAME = "rename the class, or give it another `name`"
_SIGNATURES: Mapping[str, int] = MappingProxyType(
    {"hyper": 0, "check": 1, "states": 1, "init_state": 2, "prepare": 1, "apply": 7}
)
"""Methods of the protocol `Rule` and how many arguments they are called with."""
_PLAIN = ("float", "bool", "str")


def check_registered(classes: Iterable[Any]) -> Mapping[str, type[Any]]:
    """The rules that an owner of servers registers, by name.

    Args:
        classes: subclasses of `CustomRule`, or classes with all of the protocol `Rule`.
    Raises:
        TypeError: one of them cannot be a rule, or two have one name; the text says what to do.
    """
    rules: dict[str, type[Any]] = {}
    for kind in classes:
        _check_class(kind)
        name = kind.name
        if name in BUILT_IN or name == TORCH:
            raise TypeError(f"rules=: {name!r} is the name of a built-in rule: {_RENAME}")
        if name in rules:
            raise TypeError(f"rules=: two rules are called {name!r}: {_RENAME}")
        rules[name] = kind
    return MappingProxyType(rules)


def _check_class(kind: Any) -> None:
    if not isinstance(kind, type):
        raise TypeError(
            "rules= takes classes of rules, policies and codecs, and functions for damping=, as in "
            f"rules=[MyRule], not {kind!r}"
        )
    where = f"rules=: {kind.__qualname__}"
    check_frozen(where, kind)
    if issubclass(kind, CustomRule):
        if kind.update is CustomRule.update:
            raise TypeError(
                f"{where} has no update(): define update(self, value, gradient, state, push)"
            )
        check_signature(where, kind, "update", "(self, value, gradient, state, push)", 4)
        check_signature(where, kind, "init", "(self, name, size, dtype)", 3)
    else:
        _check_protocol(where, kind)
    described: Any = kind
    names = described.state_names
    if not isinstance(names, tuple) or not all(isinstance(n, str) and n for n in names):
        raise TypeError(f"{where}.state_names has to be a tuple of texts, not {names!r}")
    if len(set(names)) < len(names):
        raise TypeError(f"{where}.state_names names a state twice: {names!r}")
    name = described.name
    if not isinstance(name, str) or not name.isidentifier():
        raise TypeError(f"{where}.name has to be a Python name, not {name!r}")
    for field in fields(kind):
        text = field.type if isinstance(field.type, str) else _type_name(field.type)
        if not field.init or not (text in _PLAIN or text.startswith("tuple[")):
            raise TypeError(
                f"{where}.{field.name} is {text}: fields are float, bool, str or a tuple[...] of "
                "these, and arguments of the constructor"
            )
        if field.default is MISSING:
            continue
        for each in field.default if isinstance(field.default, tuple) else (field.default,):
            _option(each)


def _type_name(kind: Any) -> str:
    return kind.__name__ if type(kind) is type else str(kind)


def _check_protocol(where: str, kind: type[Any]) -> None:
    needed = ("name", "hyper_names", "state_names", *_SIGNATURES)
    missing = [each for each in needed if not hasattr(kind, each)]
    if missing:
        raise TypeError(
            f"{where} has no {', '.join(missing)}: derive it from ps.CustomRule and define "
            "update(self, value, gradient, state, push)"
        )
    for method, count in _SIGNATURES.items():
        signature = str(inspect.signature(getattr(Rule, method)))
        check_signature(where, kind, method, signature, count)


def check_frozen(where: str, kind: type[Any]) -> None:
    """Raise `TypeError` unless a class is itself a frozen dataclass."""
    settings: Any = vars(kind).get("__dataclass_params__")
    if settings is None or not (settings.frozen and settings.eq):
        raise TypeError(f"{where} has to be a frozen dataclass: put @dataclass(frozen=True) on it")


def check_signature(where: str, kind: type[Any], method: str, shape: str, count: int) -> None:
    """Raise `TypeError` unless a method can be called with `count` arguments.

    Args:
        shape: its signature, for the error.
    """
    function = inspect.getattr_static(kind, method)
    try:
        inspect.signature(function).bind(None, *[None] * count)
    except (TypeError, ValueError) as wrong:
        raise TypeError(f"{where}.{method} has to be a method {method}{shape}: {wrong}") from None


def _option(value: Any) -> Option:
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"a field of a rule is a number, bool, str or tuple of these, not {value!r}")


def arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as keyword arguments, the elements of a tuple ("betas.0", "betas.1") together again.

    Raises:
        ValueError: what stands behind a dot is no number.
    """
    values: dict[str, Any] = {}
    elements: dict[str, dict[int, Any]] = {}
    for name, value in options.items():
        field, dot, index = name.partition(".")
        if dot:
            elements.setdefault(field, {})[int(index)] = value
        else:
            values[field] = value
    for field, at in elements.items():
        values[field] = tuple(at[i] for i in sorted(at))
    return values
