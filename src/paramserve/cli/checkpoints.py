"""The commands `paramserve checkpoints`: look at a run's checkpoints, check, export, prune them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from paramserve.checkpoint.locations import is_url, storage_at
from paramserve.cli.paths import Place, check_out, save
from paramserve.errors import CheckpointError, shown
from paramserve.observe.amounts import in_bytes

if TYPE_CHECKING:
    from paramserve.checkpoint.folder import Folder
    from paramserve.checkpoint.manifest import Manifest
    from paramserve.launch.exporting import Progress


FOLDER = Place(exists=True, file_okay=False)


@click.group()
def checkpoints() -> None:
    """Look at the checkpoints of a run, check, export and prune them.

    FOLDER is what the run was given as checkpoint=, such as runs/a or s3://bucket/a; PATH is the
    folder for the newest of them, or one, such as runs/a/step-4000.
    """


@checkpoints.command("ls")
@click.argument("folder", type=FOLDER)
def list_all(folder: str) -> None:
    """List the checkpoints in FOLDER, the newest first."""
    from paramserve.observe.parts import Part

    manifests, refused = _folder(folder).manifests()
    columns = ("NAME", "WRITTEN", "SIZE", "SERVERS", "RUN")
    table = Part("", *columns, least=("SERVERS", "RUN", "SIZE", "WRITTEN"))
    for each in manifests:
        written, size = _when(each), in_bytes(each.nbytes)
        table.add_row(each.name, written, size, str(each.cut.shards), each.run)
    if manifests:
        for line in table.as_lines(_terminal_width()):
            click.echo(line)
    else:
        click.echo(f"paramserve: {shown(folder)} has no checkpoints")
    for error in refused.values():
        click.echo(f"paramserve: {error}", err=True)
    if refused:
        raise click.exceptions.Exit(1)


@checkpoints.command()
@click.argument("path", type=Place())
def show(path: str) -> None:
    """Tell what a checkpoint has: what was cut, its groups, tables and files."""
    _, manifest = _newest_or_named(path)
    cut = manifest.cut
    click.echo(f"{manifest.name}, written {_when(manifest)} by run {manifest.run!r}")
    click.echo(f"  {in_bytes(manifest.nbytes)} of {cut.shards} servers and {cut.workers} workers")
    for name, clock in cut.clocks.items():
        click.echo(f"  group {name!r} at clock {clock}")
    for table, layers in manifest.layers.items():
        more = f" and {len(layers) - 1} increments" if len(layers) > 1 else ""
        click.echo(f"  table {table!r}: all rows{more}")
    for client in cut.torn:
        click.echo(f"  only some servers have {client}")
    if cut.stale_state:
        ranks = ", ".join(map(str, cut.stale_state))
        click.echo(f"  what these ranks saved is older than the rest: {ranks}")
    if cut.lost_residuals:
        ranks = ", ".join(map(str, cut.lost_residuals))
        click.echo(f"  without what codecs have left out of the gradients of ranks {ranks}")
    for file in manifest.files:
        click.echo(f"  {in_bytes(file.size):>10}  {file.path}")


@checkpoints.command()
@click.argument("path", type=Place())
def verify(path: str) -> None:
    """Read checkpoints whole and compare all hashes: one, or all in a folder."""
    from paramserve.checkpoint.reader import Checkpoint

    root, name = _split(path)
    folder = _folder(root)
    manifests, refused = ([folder.named(name)], {}) if name else folder.manifests()
    bad = [*refused.values()]
    for manifest in manifests:
        with Checkpoint(folder.storage, manifest) as saved, _bar(manifest) as progress:
            try:
                saved.verify(progress)
            except CheckpointError as error:
                bad.append(error)
                continue
        files = f"{len(manifest.files)} files, {in_bytes(manifest.nbytes)}"
        click.echo(f"paramserve: {manifest.name} is whole: {files}")
    for each in bad:
        click.echo(f"paramserve: {each}", err=True)
    if not manifests and not bad:
        click.echo(f"paramserve: {shown(root)} has no checkpoints", err=True)
    if bad or not manifests:
        raise click.exceptions.Exit(1)


@checkpoints.command()
@click.argument("path", type=Place())
@click.option(
    "--to",
    "kind",
    type=click.Choice(["torch", "safetensors", "parquet"]),
    required=True,
    help="torch, safetensors: a model's state dict. parquet: all tables.",
)
@click.option(
    "--out", type=click.Path(), required=True, help="A file; for parquet the folder of the files."
)
@click.option("--group", help="The name of the model's optimizer.  [default: model]")
@click.option(
    "--optimizer",
    is_flag=True,
    help='torch: a dict of both, the state dicts of "model" and "optimizer".',
)
def export(path: str, kind: str, out: str, group: str | None, optimizer: bool) -> None:
    """Write what a checkpoint has to files for other tools."""
    from paramserve.checkpoint.reader import Checkpoint
    from paramserve.launch import exporting

    if kind == "torch":
        out = check_out(out, "--out")
    elif optimizer:
        raise click.UsageError("--optimizer is of --to torch")
    folder, manifest = _newest_or_named(path)
    with Checkpoint(folder.storage, manifest) as saved, _bar(manifest) as progress:
        if kind == "parquet":
            if group is not None:
                raise click.UsageError("--group is of a model, and --to parquet writes the tables")
            written = exporting.write_tables(saved, out, progress)
            lines = [f"{rows} rows of {name!r} are in {at}" for name, (at, rows) in written.items()]
        else:
            state = exporting.model_of(saved, group, progress)
            more = " and the optimizer's state" if optimizer else ""
            lines = [f"{len(state)} tensors{more} of {manifest.name} are in {out}"]
            if optimizer:
                both = {"model": state, "optimizer": exporting.optimizer_of(saved, group, progress)}
                save(out, both)
            elif kind == "torch":
                save(out, state)
            else:
                exporting.write_safetensors(out, state)
    for line in lines:
        click.echo(f"paramserve: {line}")


@checkpoints.command()
@click.argument("folder", type=FOLDER)
@click.option("--keep", type=click.IntRange(min=1), required=True, help="So many of the newest.")
def prune(folder: str, keep: int) -> None:
    """Remove old checkpoints, and files that none needs any more. No run may be writing there."""
    name = f"paramserve checkpoints prune {os.getpid()}"
    with _folder(folder).claimed(name, passing=True) as owned:
        pruned = owned.prune(keep)
    names = ", ".join(pruned.checkpoints) or "no checkpoint"
    click.echo(f"paramserve: removed {names}, {in_bytes(pruned.nbytes)}")


def _terminal_width() -> int | None:
    """None: the output goes to a file or another program, which gets all."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _folder(root: str) -> Folder:
    from paramserve.checkpoint.folder import Folder

    return Folder(storage_at(root))


def _split(path: str) -> tuple[str, str | None]:
    from paramserve.checkpoint.folder import split_path

    root, name = split_path(path)
    if not is_url(root) and not os.path.isdir(root):
        raise click.BadParameter(f"there is no folder {root}", param_hint="PATH")
    return root, name


def _newest_or_named(path: str) -> tuple[Folder, Manifest]:
    """The checkpoint that a path means; of a folder the newest that can be read."""
    root, name = _split(path)
    folder = _folder(root)
    if name is not None:
        return folder, folder.named(name)
    found, refused = folder.manifests()
    for error in refused.values():
        click.echo(f"paramserve: {error}", err=True)
    if not found:
        raise CheckpointError(
            f"{shown(root)} has no checkpoint that can be read", fix="name another one"
        )
    return folder, found[0]


def _when(manifest: Manifest) -> str:
    return datetime.fromtimestamp(manifest.created_s).strftime("%Y-%m-%d %H:%M:%S")


@contextmanager
def _bar(manifest: Manifest) -> Iterator[Progress]:
    """A bar of the bytes read, on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    hidden = sys.stderr is None or not sys.stderr.isatty()
    columns: tuple[Any, ...] = ("{task.description}", BarColumn(), DownloadColumn())
    with Progress(
        *columns,
        TransferSpeedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=hidden,
    ) as progress:
        task = progress.add_task(manifest.name, total=manifest.nbytes)
        yield lambda nbytes: progress.advance(task, nbytes)
