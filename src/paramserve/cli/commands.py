"""The group of commands, with the one that a distribution beside this package adds: `plan`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import click

from paramserve import __version__
from paramserve.errors import ParamServeError

REMOVED: Mapping[str, str] = MappingProxyType(
    {
        "certs": "in a clone, `python deploy/certificates.py DIR` makes certificates for tests; "
        "elsewhere, `pip install trustme` and `python -m trustme`",
        "demo": "in a clone, `make demo` trains MNIST, and `python examples/linear_regression.py` "
        "needs no torch; elsewhere, docs/tutorial/01_first_run.md has a script",
        "bench": "in a clone, `python -m benchmarks.push_pull` measures this machine, and "
        "`make bench` measures everything",
    }
)
"""What replaces commands that there were."""


class Commands(click.Group):
    """Commands of this package, and `plan`, which is imported when it is asked for: the planner
    itself imports `paramserve.cli`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted((*super().list_commands(ctx), "plan"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _planner() if cmd_name == "plan" else super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in REMOVED:
            ctx.fail(f"the command {args[0]!r} was removed: {REMOVED[args[0]]}.")
        return super().resolve_command(ctx, args)


def _planner() -> click.Command:
    """The command `plan`; without paramserve-plan, one that says how to install it."""
    try:
        from paramserve_plan.command import plan
    except ImportError as error:
        return _absent("plan", str(error))
    return plan


def _absent(name: str, reason: str) -> click.Command:
    @click.command(
        name,
        short_help=f"Not installed: pip install 'paramserve[{name}]'",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True},
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def absent(arguments: tuple[str, ...]) -> None:
        raise ParamServeError(
            f"paramserve {name} did not start: the distribution paramserve-{name}, which has it, "
            f"cannot be imported ({reason})",
            fix=f"pip install 'paramserve[{name}]=={__version__}', or from a clone: "
            f"pip install . ./packages/{name}",
        )

    return absent
