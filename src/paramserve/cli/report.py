"""`paramserve report`: the page of a run, or of several runs beside each other."""

from __future__ import annotations

import os

import click

from paramserve.observe.report import RunReport, page, read, write
from paramserve.reporters.html import DATA, PAGE


@click.command()
@click.argument("folders", metavar="DIR...", nargs=-1, required=True, type=click.Path())
@click.option(
    "--out",
    type=click.Path(dir_okay=False),
    help="The page; report.html in DIR, or of several in the present folder, if it is left out.",
)
def report(folders: tuple[str, ...], out: str | None) -> None:
    """Write one HTML page of the runs that reported to DIR..., and print its path.

    DIR is a folder of report_to=[ps.HTML(DIR)]. The curves of several runs share a chart.
    """
    runs: dict[str, RunReport] = {}
    for folder, label in zip(folders, _labels(folders), strict=True):
        path = os.path.join(folder, DATA)
        if not os.path.isfile(path):
            raise click.BadParameter(
                f"{folder} has no {DATA}: name a folder of report_to=[ps.HTML(folder)]",
                param_hint="DIR",
            )
        runs[label] = read(path)
    if out is None:
        out = os.path.join(folders[0], PAGE) if len(folders) == 1 else PAGE
    write(out, page(runs).encode())
    click.echo(out)


def _labels(folders: tuple[str, ...]) -> list[str]:
    """The folders' own names, or where these are not all different, what was given."""
    if len(set(folders)) < len(folders):
        raise click.BadParameter("a folder is named twice", param_hint="DIR")
    names = [os.path.basename(os.path.abspath(each)) for each in folders]
    return names if len(set(names)) == len(names) else list(folders)
