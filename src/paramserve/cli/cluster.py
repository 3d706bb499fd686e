"""Commands around a cluster that runs by itself: serve, status, scale, get, token."""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click
from msgspec.json import encode

from paramserve.cli import server_log
from paramserve.cli.paths import Place, check_out, save
from paramserve.cli.policies import POLICY_HELP, policy_of
from paramserve.cli.settings import EPILOG, require, take_settings, with_settings
from paramserve.config import TLS, Credentials, Deadlines, Limits
from paramserve.errors import CoordinatorGone
from paramserve.logs import event

if TYPE_CHECKING:
    from paramserve.reporters import Prometheus

F = TypeVar("F", bound=Callable[..., Any])
logger = logging.getLogger("paramserve")

TOKEN_BYTES = 32
STATUS_S = 5.0
"""A cluster that does not answer a command for this long is not there."""


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


@click.command(epilog=EPILOG)
@click.option("--bind", metavar="HOST:PORT", help="Where to listen; port 0: any.  [required]")
@click.option("--token-file", type=click.Path(), help="See `paramserve token`.  [required]")
@click.option("--join", metavar="HOST:PORT", help="The first server; without it this is the first.")
@click.option("--servers", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--workers", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--consistency", metavar="POLICY", default="async", show_default=True, help=POLICY_HELP
)
@click.option(
    "--rules",
    multiple=True,
    metavar="MODULE:NAME",
    help="A rule, policy, damping function or codec of your own; repeatable.",
)
@click.option("--advertise", default="", metavar="HOST", help="How others reach --bind 0.0.0.0.")
@click.option(
    "--restart",
    "restart_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Under every policy: how long a worker that died may take to come again and go on where "
    "it was; Sync waits for it. Without it, it goes on at the clock of the others.",
)
@click.option(
    "--until-done",
    is_flag=True,
    help="End when all workers have come and left. One that died counts as having left, with "
    "--restart after these seconds.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="With --until-done: how long that may take; then the first server ends with status 124.",
)
@click.option(
    "--checkpoint",
    type=Place(file_okay=False),
    metavar="DIR",
    help="A folder that all servers see, or its URL: begin with its newest checkpoint, and write "
    "more.",
)
@click.option(
    "--checkpoint-every",
    "every_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Between two checkpoints; 60 if it is left out.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Serve the cluster's metrics for Prometheus there; the first server only. 0: any.",
)
@click.option(
    "--metrics-host",
    default="127.0.0.1",
    show_default=True,
    metavar="HOST",
    help="Where --metrics-port listens; 0.0.0.0 lets other hosts in.",
)
@click.option(
    "--log",
    "log_form",
    type=click.Choice(["plain", "json"]),
    default="plain",
    show_default=True,
    help="How stderr tells of joins, deaths, refusals, checkpoints, ends. json: an object a line.",
)
@with_settings
@with_tls
def serve(
    rules: tuple[str, ...],
    consistency: str,
    checkpoint: str | None,
    every_s: float | None,
    metrics_port: int | None,
    metrics_host: str,
    log_form: str,
    **options: Any,
) -> None:
    """Run a server, the first one or one that joins it, until it is stopped.

    The first one is told --servers, --workers, --consistency and --checkpoint for the whole
    cluster. On stderr it logs which members come, leave, die and are refused.
    """
    from paramserve.launch.checkpoints import Checkpoint
    from paramserve.launch.serve import serve as run
    from paramserve.reporters import Prometheus

    take_settings(options)
    require(options, "bind", "token_file")
    if every_s is not None and checkpoint is None:
        raise click.UsageError("--checkpoint-every needs --checkpoint")

    reporters = []
    if metrics_port is not None:
        reporters = [Prometheus(metrics_port, host=metrics_host)]
    tls = tls_of(options)
    own = [load_object(each) for each in rules]
    policy = policy_of(consistency, own)
    server_log.begin(log_form)
    with server_log.log_errors(log_form):
        run(
            rules=own,
            consistency=policy,
            tls=tls,
            checkpoint=Checkpoint(checkpoint, every_s=every_s) if checkpoint is not None else None,
            report_to=reporters,
            ready=lambda address: _announce(log_form, address, reporters),
            **options,
        )
    for number in (signal.SIGTERM, signal.SIGHUP):  # the exit status tells that it ended in order
        signal.signal(number, signal.SIG_IGN)


def _announce(form: str, address: str, reporters: Sequence[Prometheus]) -> None:
    """Print where the server listens; as JSON both are lines of the log, for collectors read stdout
    and stderr as one, and "serving" is there already."""
    urls = [f"http://{each.address}/metrics" for each in reporters]
    if form == "plain":
        click.echo(f"paramserve: serving at {address}")
    for url in urls:
        if form == "plain":
            click.echo(f"paramserve: metrics at {url}")
        else:
            logger.info("metrics at %s", url, extra=event("metrics", address=url))


@click.command()
@click.argument("address", metavar="HOST:PORT")
@click.option("--token-file", type=click.Path(), help="The cluster's token.")
@click.option("--watch", "every_s", type=click.FloatRange(min=0.1), metavar="SECONDS")
@click.option("--json", "as_json", is_flag=True, help="As one line of JSON, for programs.")
@click.option(
    "--probe",
    is_flag=True,
    help="Only ask the server at this address, any one of the cluster, whether it answers, within "
    f"{STATUS_S:g} s; status 1 where it does not.",
)
@with_tls
def status(
    address: str,
    token_file: str | None,
    every_s: float | None,
    as_json: bool,
    probe: bool,
    **options: Any,
) -> None:
    """Show a running cluster: its last checkpoint, servers, workers, clocks, versions and
    staleness.

    On a terminal as tables, elsewhere as plain columns.
    """
    from rich.console import Console

    from paramserve.launch.connect import full_address
    from paramserve.launch.overview import Overview
    from paramserve.observe.checkpoints import checkpoint_status
    from paramserve.observe.cluster import as_table, as_text
    from paramserve.observe.status import of_cluster
    from paramserve.transport.auth import credentials_of

    if probe and (every_s is not None or as_json):
        raise click.UsageError("--probe shows nothing: leave out --watch and --json")
    credentials = credentials_of(token_file, tls_of(options))
    at = (full_address(address),)
    if probe:
        _probe(at, credentials)
        return
    overview = Overview(at, credentials, Limits(), Deadlines(), records=False, served=True)
    if hasattr(sys.stdout, "reconfigure"):  # a locale may lack what rich draws
        sys.stdout.reconfigure(errors="replace")
    terminal = Console() if sys.stdout.isatty() else None
    try:
        while True:
            latest = overview.fresh(STATUS_S)
            if as_json:
                report = latest.checkpoints
                saved = checkpoint_status(report) if report is not None else None
                print(encode(of_cluster(latest, {}, saved)).decode(), flush=True)
            elif terminal is not None:
                terminal.print(as_table(address, latest, terminal.width))
            else:
                print(as_text(address, latest), flush=True)
            if every_s is None:
                return
            time.sleep(every_s)
    finally:
        overview.close()


def _probe(at: tuple[str, ...], credentials: Credentials) -> None:
    """Have the server's loop answer once. Raises as `ControlLink.connect`."""
    from paramserve.messages import Hello
    from paramserve.transport.control import ControlLink

    ControlLink.connect(
        at, Hello("probe"), credentials=credentials, limits=Limits(), timeout_s=STATUS_S
    ).close()


@click.command()
@click.argument("address", metavar="HOST:PORT")
@click.option("--workers", type=click.IntRange(min=1), required=True, help="How many from now on.")
@click.option("--token-file", type=click.Path(), help="The cluster's token.")
@with_tls
def scale(address: str, workers: int, token_file: str | None, **options: Any) -> None:
    """Change how many workers a cluster has, while those that stay go on.

    More: their processes may be started from now on, and no worker waits for them before they come.
    Fewer: those with the highest ranks are told to end. For a run, use its `Job.scale`.
    """
    from paramserve.errors import rebuild
    from paramserve.launch.connect import full_address
    from paramserve.launch.overview import Overview
    from paramserve.messages import Failed
    from paramserve.transport.auth import credentials_of

    overview = Overview(
        (full_address(address),), credentials_of(token_file, tls_of(options)), Limits(), Deadlines()
    )
    try:
        answer = overview.answer(overview.scale(workers), STATUS_S)
    except ConnectionError:
        answer = None
    finally:
        overview.close()
    if answer is None:
        raise CoordinatorGone(
            f"the coordinator at {address} did not answer in {STATUS_S} s",
            applied="unknown",
            fix="look whether it runs, and whether a firewall is in between",
        )
    if isinstance(answer, Failed):
        raise rebuild(answer.kind, answer.failed, answer.applied, answer.fix)
    click.echo(f"paramserve: the cluster at {address} has {workers} workers from now on")


@click.command()
@click.argument("address", metavar="HOST:PORT")
@click.option("--token-file", type=click.Path(), help="The cluster's token.")
@click.option(
    "--out", type=click.Path(dir_okay=False), help="Where to write the model, for torch.load."
)
@click.option("--group", default="model", show_default=True, help="The name of its optimizer.")
@click.option(
    "--tables", type=click.Path(file_okay=False), help="A folder for the keyed tables, as Parquet."
)
@with_tls
def get(
    address: str,
    token_file: str | None,
    out: str | None,
    group: str,
    tables: str | None,
    **options: Any,
) -> None:
    """Write the present values of a running cluster to files, while it goes on."""
    from paramserve.launch.connect import attach

    if out is None and tables is None:
        raise click.UsageError("say what to write: --out FILE, --tables FOLDER, or both")
    if out is not None:
        out = check_out(out, "--out")
    with attach(address, token_file=token_file, tls=tls_of(options)) as cluster:
        if out is not None:
            save(out, state := cluster.state_dict(group))
            click.echo(f"paramserve: {len(state)} tensors of {group!r} are in {out}")
        for name, path in cluster.save_tables(tables).items() if tables is not None else ():
            click.echo(f"paramserve: table {name!r} is in {path}")


@click.command()
@click.argument("file", type=click.Path(dir_okay=False))
def token(file: str) -> None:
    """Make a new token for a cluster: FILE, which only you can read."""
    if file in ("", "-"):  # a name that other commands take for standard output
        raise click.UsageError(f"FILE is the path of a new file, not {file!r}")
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise click.UsageError(f"{file} is there already; a token is not overwritten") from None
    with os.fdopen(fd, "w") as out:
        out.write(secrets.token_hex(TOKEN_BYTES) + "\n")
    click.echo(f"paramserve: a new token is in {file}; give the same file to every process")


def load_object(target: str) -> Any:
    """What MODULE:NAME names; modules of the present folder can be imported.

    Raises:
        click.BadParameter: there is no such module or name.
    """
    module, colon, name = target.partition(":")
    if not (module and colon and name.isidentifier()):
        raise click.BadParameter(f"{target!r} is not MODULE:NAME, as in training:MyRule")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise click.BadParameter(f"{target}: {error}") from error


COMMANDS: Sequence[click.Command] = (serve, status, scale, get, token)
