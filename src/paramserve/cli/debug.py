"""`paramserve debug`: one folder or zip file about a running cluster, to look at or to send."""

from __future__ import annotations

import json
import os
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paramserve.cli.cluster import tls_of, with_tls
from paramserve.config import Credentials, Deadlines, Limits
from paramserve.errors import ParamServeError
from paramserve.logs import without_secrets

if TYPE_CHECKING:
    from paramserve.messages import DebugReport

ANSWER_S = 5.0
"""Seconds for the answer of each process."""


def ask_process(
    addresses: Sequence[str], credentials: Credentials, *, coordinator: bool, whole: bool
) -> DebugReport:
    """What the server at these addresses tells of itself, or the coordinator.

    Raises:
        ParamServeError: it does not answer, or refuses this peer.
    """
    from paramserve.messages import AskDebug, DebugReport, Hello
    from paramserve.transport.control import ControlLink

    hello = Hello("driver" if coordinator else "probe")
    link = ControlLink.connect(
        tuple(addresses), hello, credentials=credentials, limits=Limits(), timeout_s=ANSWER_S
    )
    with closing(link):
        return link.call(AskDebug(0, whole), DebugReport, timeout_s=ANSWER_S, slack_s=0.0)


def collect(address: str, credentials: Credentials) -> Iterator[tuple[str, str]]:
    """The files of a report on the cluster of this first server, with their names. A process that
    does not answer has a file that says so.

    Raises:
        ParamServeError: no process answers at the address.
    """
    about: dict[str, Any] = {"collected": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    try:
        lead = ask_process([address], credentials, coordinator=True, whole=True)
    except ParamServeError as error:
        # Its server may answer where the coordinator does not: both are one process.
        alone = ask_process([address], credentials, coordinator=False, whole=True)
        yield "coordinator.failed.txt", str(error)
        yield from _files(f"server-{alone.number}", alone, about)
        yield "about.json", _json(about)
        return
    yield from _files("coordinator", lead, about)
    try:
        yield "status.json", _status(address, credentials)
    except ParamServeError as error:
        yield "status.failed.txt", str(error)
    remote = address.startswith("tcp:")
    for shard, addresses in enumerate(lead.servers):
        reached = [each for each in addresses if each.startswith("tcp:")] if remote else addresses
        name = f"server-{shard}"
        if not addresses:
            yield f"{name}.failed.txt", "the coordinator knows no such server: not there, or lost"
            continue
        try:
            answer = ask_process(reached or addresses, credentials, coordinator=False, whole=True)
        except ParamServeError as error:
            yield f"{name}.failed.txt", str(error)
        else:
            yield from _files(name, answer, about)
    yield "about.json", _json(about)


def _files(name: str, answer: DebugReport, about: dict[str, Any]) -> Iterator[tuple[str, str]]:
    about[name] = {
        "pid": answer.pid,
        "host": answer.host,
        "versions": answer.versions,
        "clock": answer.time_s - time.time(),
    }
    yield f"{name}.config.json", answer.config + "\n"
    yield f"{name}.log.jsonl", "".join(f"{line}\n" for line in answer.record)
    yield f"{name}.stacks.txt", answer.stacks


def _status(address: str, credentials: Credentials) -> str:
    from msgspec.json import encode, format

    from paramserve.launch.overview import Overview
    from paramserve.observe.checkpoints import checkpoint_status
    from paramserve.observe.status import of_cluster

    overview = Overview((address,), credentials, Limits(), Deadlines(), records=False, served=True)
    with closing(overview):
        latest = overview.fresh(ANSWER_S)
    saved = checkpoint_status(latest.checkpoints) if latest.checkpoints is not None else None
    return format(encode(of_cluster(latest, {}, saved)).decode()) + "\n"


def _json(about: Mapping[str, Any]) -> str:
    return json.dumps(about, indent=2) + "\n"


def write(out: Path, files: Iterator[tuple[str, str]]) -> list[str]:
    """Write files into a new folder, or a new zip file if its name says so, for this user only.

    Returns:
        Their names.
    Raises:
        OSError: it cannot be made.
    """
    names = []
    texts = [(name, without_secrets(text)) for name, text in files]
    if out.suffix == ".zip":
        fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with (
            os.fdopen(fd, "wb") as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed,
        ):
            for name, text in texts:
                packed.writestr(f"{out.stem}/{name}", text)
                names.append(name)
        return names
    out.mkdir(mode=0o700)
    for name, text in texts:
        (out / name).write_text(text, encoding="utf-8")
        names.append(name)
    return names


@click.command()
@click.argument("address", metavar="HOST:PORT")
@click.option("--token-file", type=click.Path(), help="The cluster's token.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="A new folder, or a new file *.zip.  [default: paramserve-debug-TIME.zip]",
)
@with_tls
def debug(address: str, token_file: str | None, out: Path | None, **options: Any) -> None:
    """Collect what tells why a running cluster does what it does.

    Of the coordinator and each server: versions, settings, what it has logged in the last minutes
    at all levels, where its threads are; and the cluster's status. Tokens, keys and passwords are
    in none of it. Names of hosts, paths and parameters are: look through it before you send it.
    """
    from paramserve.launch.connect import full_address
    from paramserve.transport.auth import credentials_of

    if out is None:
        out = Path(time.strftime("paramserve-debug-%Y%m%d-%H%M%S.zip"))
    if out.exists():
        raise click.UsageError(f"{out} is there already; nothing is overwritten")
    names = write(out, collect(full_address(address), credentials_of(token_file, tls_of(options))))
    click.echo(f"paramserve: {len(names)} files are in {out}")
    failed = [name.removesuffix(".failed.txt") for name in names if name.endswith(".failed.txt")]
    if failed:
        click.echo(f"paramserve: no answer from {', '.join(failed)}", err=True)
        sys.exit(1)
