"""What several commands share: the options of TLS, MODULE:NAME, and policies in a command line."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from paramserve.config import TLS
from paramserve.core.decisions import Policy
from paramserve.core.policies import BUILT_IN, PARTS
from paramserve.rules.registry import BUILT_IN as RULES

F = TypeVar("F", bound=Callable[..., Any])
SHORT: Mapping[str, str] = {
    "sync": "Sync()",
    "sync:mean": "Sync()",
    "sync:sum": "Sync(reduce='sum')",
    "async": "Async()",
}
POLICY_HELP = (
    f"{', '.join(SHORT)}, or as in Python: BoundedStaleness(4), "
    "Async(damping=Inverse(0.1), drop_after=20)."
)


def with_tls(command: F) -> F:
    """Adds the three options that make `tls_of`."""
    for name, text in (
        ("authority", "Who must have signed the other side's certificate; PEM."),
        ("key", "This side's private key; PEM."),
        ("certificate", "This side's certificate; PEM. With it, all connections use TLS."),
    ):
        command = click.option(
            f"--tls-{name}", type=click.Path(exists=True, dir_okay=False), help=text
        )(command)
    return command


def tls_of(options: dict[str, Any]) -> TLS | None:
    """Takes the three options out of `options`.

    Raises:
        click.UsageError: some are given and some are not.
    """
    names = ("tls_certificate", "tls_key", "tls_authority")
    files = [options.pop(name) for name in names]
    if not any(files):
        return None
    if not all(files):
        raise click.UsageError("TLS needs --tls-certificate, --tls-key and --tls-authority")
    return TLS(files[0], files[1], files[2])


def split_reference(
    reference: str, form: str = "MODULE:NAME, as in training:train"
) -> tuple[str, str]:
    """Module and name of MODULE:NAME.

    Args:
        form: what an error says that it should be.
    Raises:
        ValueError: it is something else.
    """
    module, colon, name = reference.partition(":")
    if not (module and colon and name.isidentifier()):
        raise ValueError(f"{reference!r} is not {form}")
    return module, name


def policy_of(text: str, registered: Sequence[Any] = ()) -> Policy:
    """The policy that `--consistency` names: a short name, or a policy as it is written in Python.

    Args:
        text: only classes that are known are called, with plain values and each other.
        registered: classes and functions of the user's own.
    Raises:
        click.BadParameter: it is none.
    """
    own = {getattr(each, "__name__", ""): each for each in registered}
    known = {**own, **RULES, **PARTS, **BUILT_IN}
    hint = "--consistency"
    try:
        found = _made(ast.parse(SHORT.get(text, text), mode="eval").body, known)
    except (SyntaxError, ValueError, TypeError) as error:
        raise click.BadParameter(f"{text!r}: {error}", param_hint=hint) from error
    if not isinstance(found, Policy):
        raise click.BadParameter(f"{text!r} is no policy; give {POLICY_HELP}", param_hint=hint)
    return found


def _made(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """What an expression of known names, calls of them and plain values stands for."""
    if isinstance(node, ast.Name):
        if node.id not in known:
            raise ValueError(f"unknown name {node.id!r}; known: {', '.join(sorted(known))}")
        return known[node.id]
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    given = [_made(each, known) for each in node.args]
    named = {each.arg or "**": _made(each.value, known) for each in node.keywords}
    kind = _made(node.func, known) if isinstance(node.func, ast.Name) else None
    if not isinstance(kind, type):
        raise ValueError(f"{ast.unparse(node.func)} is no class")
    return kind(*given, **named)
