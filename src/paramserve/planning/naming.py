"""Short names of policies, as `--policy` takes them: `bounded:4`, `sync:backup=1,timeout_s=0.5`."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import MappingProxyType

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
"""By short name: the policy, and the field that a value without a name is for."""


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
    given = [ast.keyword(first, each) for each in call.args] + call.keywords
    words = [
        ast.keyword(each.arg, ast.Constant(each.value.id))
        if isinstance(each.value, ast.Name)  # sync:mean
        else each
        for each in given
    ]
    return ast.unparse(ast.Call(call.func, [], words))
