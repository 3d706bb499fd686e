"""What several commands share: the options of TLS, and MODULE:NAME."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from paramserve.config import TLS

F = TypeVar("F", bound=Callable[..., Any])


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
