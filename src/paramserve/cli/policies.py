"""Policies as `--consistency` and `--policy` take them: `bounded:4`, or as Python writes them."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

import click

from paramserve.codecs.registry import BUILT_IN as CODECS
from paramserve.consistency.base import Policy
from paramserve.consistency.registry import BUILT_IN, PARTS
from paramserve.rules.registry import BUILT_IN as RULES

SHORT: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "sync": ("Sync", "reduce"),
        "async": ("Async", "drop_after"),
        "bounded": ("BoundedStaleness", "bound"),
        "delay": ("DelayCompensated", "lam"),
        "buffered": ("Buffered", "size"),
        "local": ("LocalSteps", "every"),
        "elastic": ("ElasticAverage", "rho"),
    }
)
"""Policy by short name, and the field that a value without a name is for."""
POLICY_HELP = (
    f"{', '.join(SHORT)}, with a value as in bounded:4 or sync:backup=1, or as in Python: "
    "'Async(damping=Inverse(0.1), drop_after=20)'."
)


def policy_of(
    text: str, registered: Sequence[Any] = (), *, option: str = "--consistency"
) -> Policy:
    """The policy that an option names: its short form, or as it is written in Python.

    Args:
        text: only classes that are known are called, with plain values and each other.
        registered: classes and functions of the user's own.
        option: for messages.
    Raises:
        click.BadParameter: it is none.
    """
    own = {getattr(each, "__name__", ""): each for each in registered}
    names = {**own, **RULES, **CODECS, **PARTS, **BUILT_IN}
    policies = {**{name: each for name, each in own.items() if _is_policy(each)}, **BUILT_IN}
    try:
        written = in_python(text)
        value = evaluate(_parsed(text, written, policies, option), names)
        if _is_policy(value):
            value = value()
    except (SyntaxError, ValueError, TypeError) as error:
        raise click.BadParameter(f"{text!r}: {error}", param_hint=option) from error
    if not isinstance(value, Policy):
        raise click.BadParameter(f"{text!r} is no policy; give {POLICY_HELP}", param_hint=option)
    return value


def _is_policy(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, Policy)


def _parsed(text: str, written: str, policies: Mapping[str, Any], option: str) -> ast.expr:
    """A policy's expression; where it begins with a word that names none, that is what is told."""
    word = text.strip().partition(":")[0].partition("(")[0]
    if word.isidentifier() and written == text and word not in policies:
        valid = ", ".join((*SHORT, *sorted(policies)))
        near = get_close_matches(word, (*SHORT, *policies), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        if not near and "(" in text and option == "--consistency":  # which has --rules beside it
            hint = f"; import your own with --rules module:{word}"
        raise ValueError(f"no policy is called {word!r}{hint}; known: {valid}")
    return ast.parse(written, mode="eval").body


def evaluate(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of an expression of known names, calls of them and plain values.

    Raises:
        ValueError, TypeError: it holds anything else, or a call is refused.
    """
    if isinstance(node, ast.Name):
        if node.id not in names:
            raise ValueError(f"unknown name {node.id!r}; known: {', '.join(sorted(names))}")
        return names[node.id]
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    args = [evaluate(each, names) for each in node.args]
    named = {each.arg or "**": evaluate(each.value, names) for each in node.keywords}
    kind = evaluate(node.func, names) if isinstance(node.func, ast.Name) else None
    if not isinstance(kind, type):
        raise ValueError(f"{ast.unparse(node.func)} is no class")
    return kind(*args, **named)


def in_python(text: str) -> str:
    """A policy in its long form, as Python writes it; a text that is no short form stays.

    Raises:
        ValueError: what stands after the colon are no options.
    """
    name, _, options = text.strip().partition(":")
    if name not in SHORT:
        return text
    kind, first = SHORT[name]
    try:
        call = ast.parse(f"{kind}({options})", mode="eval").body
    except (SyntaxError, MemoryError, RecursionError):
        call = None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or len(call.args) > 1:
        raise ValueError(
            f"{text!r}: after {name}: stands a value of {first}, or NAME=VALUE with commas between"
        )
    args = [ast.keyword(first, each) for each in call.args] + call.keywords
    words = [
        ast.keyword(each.arg, ast.Constant(each.value.id))
        if isinstance(each.value, ast.Name)  # sync:mean
        else each
        for each in args
    ]
    return ast.unparse(ast.Call(call.func, [], words))
