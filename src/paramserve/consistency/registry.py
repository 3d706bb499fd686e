"""Policies by name: what a policy is on the wire, and which policies a server builds from that.

What a server may run is fixed before it listens: the built-in policies and what its owner
registered (`registered`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from types import CodeType, MappingProxyType
from typing import Any, NamedTuple

from paramserve.codecs.base import Codec
from paramserve.codecs.registry import NONE as NO_CODECS
from paramserve.codecs.registry import build as build_codec
from paramserve.codecs.registry import check_registered as check_codecs
from paramserve.codecs.registry import spec as codec_spec
from paramserve.config import CodecSpec, ConsistencySpec, RuleSpec
from paramserve.consistency import built_in
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import DAMPINGS, OWN_STEPS, Adaptive, Buffered
from paramserve.errors import UnknownCodec, UnknownRule, warn_user
from paramserve.rules.base import Rule
from paramserve.rules.registry import BUILT_IN as BUILT_IN_RULES
from paramserve.rules.registry import NONE as NO_RULES
from paramserve.rules.registry import TORCH, check_frozen, check_signature
from paramserve.rules.registry import build as build_rule
from paramserve.rules.registry import check_registered as check_rules
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
NONE: Mapping[str, Any] = MappingProxyType({})


class PolicyTraits(NamedTuple):
    """What a client needs to know of a group's policy, built in or not."""

    collects: bool
    refuses: bool
    """Whether NaN and Inf are refused."""
    policy: Policy | None
    """None: it is one that is known on the servers only."""

    @property
    def waits(self) -> bool:
        """Whether a worker may wait for members that are slower."""
        decides_pulls = self.policy is None or type(self.policy).on_pull is not Policy.on_pull
        return self.collects or decides_pulls


def check_table_policy(name: str, policy: Policy, table: bool) -> None:
    """Refuse a table's policy that would need copies of all that a worker has read.

    Raises:
        ValueError: nothing was applied.
    """
    if table and is_dense_only(policy):
        raise ValueError(
            f"{type(policy).__name__} cannot be the policy of table {name!r}: it works with copies "
            "of whole parameters, and no worker has a copy of a table. Give a table ps.Async(), "
            "ps.Sync(), ps.BoundedStaleness() or ps.Buffered()"
        )


def is_dense_only(policy: Policy) -> bool:
    """Whether a policy needs copies of whole parameters, so that no table can have it."""
    return policy.keeps_reads or isinstance(policy, OWN_STEPS)


def is_for_tables(policy: ConsistencySpec, dtype: str) -> bool:
    """Whether a table without a policy of its own can step under the cluster's.

    Args:
        dtype: of the table. Parts of what workers push are no whole numbers: int64 takes no mean
            of them, and no damping.
    """
    options = policy.options
    parts = policy.name == Buffered.__name__ or options.get("reduce") == "mean"
    parts = parts or options.get("damping") is not None
    return not policy.dense_only and not (dtype == "int64" and parts)


def is_built_in(policy: Policy) -> bool:
    """Whether a policy is one of ours, which needs no guard; a function in it is not."""
    damping = getattr(policy, "damping", None)
    return type(policy) in BUILT_IN.values() and not inspect.isroutine(damping)


def spec(policy: Policy) -> ConsistencySpec:
    """The policy as data: what travels to a server.

    A field is a number, bool, text or None, a rule, a codec, or an object like `ps.Inverse(0.1)`,
    which becomes its name and one option for each of its own fields ("damping.alpha"); a function
    travels as its name.

    Raises:
        TypeError: `policy` is no policy, or a field is something else.
    """
    candidate: Any = policy
    if isinstance(candidate, type) and issubclass(candidate, Policy):
        name = (
            f"ps.{candidate.__name__}" if candidate in BUILT_IN.values() else candidate.__qualname__
        )
        raise TypeError(
            f"consistency must be an object, not the class {candidate.__name__}: call it: {name}()"
        )
    if not isinstance(candidate, Policy):
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
        type(policy).__name__,
        options,
        policy.collects,
        policy.on_nonfinite == "skip",
        is_dense_only(policy),
    )


def _put(options: dict[str, int | float | str | bool | None], name: str, value: Any) -> None:
    if value is None or isinstance(value, bool | str | int | float):
        options[name] = value
    elif isinstance(value, Rule | Codec):
        described = rule_spec(value) if isinstance(value, Rule) else codec_spec(value)
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
            f"{name} of a policy is a number, bool, text, rule, codec, function or "
            f"ps.Inverse(...) and its like, not {value!r}"
        )


def build(described: ConsistencySpec, registered: Mapping[str, Any] = NONE) -> Policy:
    """The policy that a spec describes.

    Args:
        described: may come from a peer: only known classes are called, with their own options.
        registered: by name, from the owner of the servers. They replace nothing that is built in.
    Raises:
        UnknownRule: there is no policy, or no function, of this name.
        UnknownCodec: there is no codec of this name.
        ValueError: the policy does not take these options. In both cases nothing was applied.
    """
    kind = BUILT_IN.get(described.name) or registered.get(described.name)
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        names = sorted({*BUILT_IN, *(k for k, v in registered.items() if isinstance(v, type))})
        raise UnknownRule(
            f"unknown consistency policy {described.name!r}; known: {', '.join(names)}",
            fix=f"start the servers with rules=[{described.name}] (paramserve serve: --rules "
            f"module:{described.name}), or use one of these; servers run no code that they were "
            "not started with",
        )
    try:
        return kind(**_arguments(kind, described, registered))
    except (UnknownRule, UnknownCodec):
        raise
    except Exception as wrong:  # a user's class may raise anything
        raise ValueError(f"{described.name} does not take {described.options}: {wrong}") from wrong


def _arguments(
    kind: type[Policy], described: ConsistencySpec, registered: Mapping[str, Any]
) -> dict[str, Any]:
    """What a policy's class is called with: options `field.inner` are made into the codec, rule,
    damping or function that the field's annotation names."""
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
        if "Codec" in types.get(name, "") and isinstance(value, str):
            plain[name] = build_codec(CodecSpec(value, nested.get(name, {})))
        elif name in nested or _is_object(types.get(name, ""), value):
            plain[name] = _part(name, value, nested.get(name, {}), registered)
    return plain


def _is_object(declared: str, value: Any) -> bool:
    """Whether a text stands for an object or a function."""
    return isinstance(value, str) and any(
        each in declared for each in ("Damping", "Callable", "Rule", "Adaptive")
    )


def _part(name: str, value: Any, options: dict[str, Any], registered: Mapping[str, Any]) -> Any:
    if value in PARTS:
        return PARTS[value](**options)
    thing = registered.get(value)
    if inspect.isfunction(thing):
        return thing
    if value in BUILT_IN_RULES or isinstance(thing, type):
        return build_rule(RuleSpec(value, options), registered)
    raise UnknownRule(
        f"the servers know no function {value!r} for {name}",
        fix=f"start them with rules=[{value}], or use ps.Inverse(...) or its like",
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


class Registered(NamedTuple):
    """Registered classes by name: what servers may run besides what is built in."""

    rules: Mapping[str, type[Any]] = NO_RULES
    policies: Mapping[str, Any] = NONE
    """Classes of policies, and functions."""
    codecs: Mapping[str, type[Codec]] = NO_CODECS

    @property
    def all(self) -> Mapping[str, Any]:
        """Rules and policies: a policy may have a rule in its fields."""
        return {**self.rules, **self.policies}

    @property
    def things(self) -> tuple[Any, ...]:
        """All of them, as `registered` takes them."""
        return (*self.rules.values(), *self.policies.values(), *self.codecs.values())


def registered(things: Iterable[Any], consistency: Policy | None = None) -> Registered:
    """Tell rules, policies, functions and codecs from each other, and check each.

    Args:
        things: as a user gave them as `rules=`: classes of rules, classes derived from `Policy` or
            `CustomCodec`, and functions, in any order. What is there twice counts once.
        consistency: its class, and rules' classes and functions in its fields, are registered with
            the others.
    Raises:
        TypeError: one of them can be none of these, or two have one name; the text says what to
            do.
    """
    if isinstance(things, str) or not isinstance(things, Iterable):
        name = getattr(things, "__name__", "MyRule")
        raise TypeError(f"rules= takes a list, as in rules=[{name}], not {things!r}")
    rules: list[Any] = []
    policies: list[Any] = []
    codecs: list[Any] = []
    for each in {id(each): each for each in (*things, *_own(consistency))}.values():
        if isinstance(each, type) and issubclass(each, Codec):
            codecs.append(each)
        elif inspect.isfunction(each) or (isinstance(each, type) and issubclass(each, Policy)):
            policies.append(each)
        else:
            rules.append(each)
    registry = Registered(check_rules(rules), _check_policies(policies), check_codecs(codecs))
    both = sorted(registry.rules.keys() & registry.policies.keys())
    if both:
        raise TypeError(f"rules=: {both[0]!r} is the name of a rule and of a policy: rename one")
    return registry


def _own(consistency: Policy | None) -> list[Any]:
    """A policy's class, and the rules' classes and functions in its fields, without what is built
    in."""
    policy: Any = consistency
    if not is_dataclass(policy) or isinstance(policy, type):
        return []
    kind: Any = type(policy)
    own = [] if kind in BUILT_IN.values() else [kind]
    values = [getattr(policy, each.name) for each in fields(policy)]
    rules = [type(value) for value in values if isinstance(value, Rule)]
    own += [rule for rule in rules if rule.name not in {*BUILT_IN_RULES, TORCH}]
    return own + [value for value in values if inspect.isfunction(value)]


# --- policies and functions ---------------------------------------------------------------------


def _check_policies(things: Iterable[Any]) -> Mapping[str, Any]:
    """Classes derived from `Policy`, and functions, by name; raises as `registered`."""
    policies: dict[str, Any] = {}
    for each in things:
        name = each.__name__
        _check(each, name)
        if name in BUILT_IN or name in PARTS or name in BUILT_IN_RULES:
            raise TypeError(f"rules=: {name!r} is the name of a built-in one: rename yours")
        if name in policies:
            raise TypeError(f"rules=: two are called {name!r}: rename one")
        policies[name] = each
    return MappingProxyType(policies)


def _check(each: Any, name: str) -> None:
    if inspect.isfunction(each):
        if not name.isidentifier():
            raise TypeError(
                f"rules=: {each!r} has no name: write it with def, not lambda, so that clients "
                "can name it"
            )
        return
    where = f"rules=: {each.__qualname__}"
    check_frozen(where, each)
    for method, count in _METHODS.items():
        signature = str(inspect.signature(getattr(Policy, method)))
        check_signature(where, each, method, signature, count)
    _check_names(where, each)


def _check_names(where: str, kind: type[Policy]) -> None:
    """Refuse a class with a method that was meant to be one of `_METHODS` and has another name, and
    warn of one with methods none of which a shard calls.

    A method `on_...` is refused if it resembles one that the class does not have, and is used by
    none of its own.
    """
    kinds: list[type[Policy]] = [Policy, *BUILT_IN.values()]
    bases = {base for each in kinds for base in each.__mro__}
    methods = [
        (name, thing)
        for base in kind.__mro__
        if base not in bases
        for name, thing in vars(base).items()
        if inspect.isfunction(thing)
    ]
    own = [n for n, _ in methods if not n.startswith("_") and not hasattr(Policy, n)]
    if not own:
        return
    lacks = [name for name in _METHODS if getattr(kind, name) is getattr(Policy, name)]
    used = {name for _, method in methods for name in _names(inspect.unwrap(method))}
    for name in own:
        match = get_close_matches(name, _METHODS, 1, RESEMBLES)
        if name.startswith("on_") and name not in used and match and match[0] in lacks:
            raise TypeError(
                f"{where}.{name} is called by no server, which asks {', '.join(_METHODS)}: "
                f"rename it {match[0]}"
            )
    if len(lacks) == len(_METHODS):
        warn_user(
            f"{where} defines {', '.join(own)} and none of {', '.join(_METHODS)}, which are all "
            "that a server asks: it is as ps.Async()"
        )


def _names(function: Any) -> set[str]:
    """The attributes and globals that a function uses, with the functions in it."""
    codes = [function.__code__] if inspect.isfunction(function) else []
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return {name for code in codes for name in code.co_names}


RESEMBLES = 0.75
"""How like a method of a policy another name has to be to be taken for a slip of the pen."""
_METHODS: Mapping[str, int] = MappingProxyType(
    {"on_push": 2, "on_pull": 2, "on_clock": 1, "on_membership": 1, "scale": 1, "check": 1}
)
"""And how many arguments each is called with."""
