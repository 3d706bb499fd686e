"""The group of commands, with the one that a distribution beside this package adds: `plan`."""

from __future__ import annotations

import click


class Commands(click.Group):
    """Commands of this package, and `plan`, which is imported when it is asked for: the planner
    itself imports `paramserve.cli`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted((*super().list_commands(ctx), "plan"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _planner() if cmd_name == "plan" else super().get_command(ctx, cmd_name)


def _planner() -> click.Command:
    from paramserve_plan.command import plan

    return plan
