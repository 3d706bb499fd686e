"""The command `paramserve`: run a script's training function, and the group of all commands."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TextIO

import click
import cloudpickle

from paramserve import __version__
from paramserve.cli.checkpoints import checkpoints
from paramserve.cli.cluster import COMMANDS, load_object
from paramserve.cli.commands import Commands
from paramserve.cli.debug import debug
from paramserve.cli.doctor import doctor
from paramserve.cli.paths import Place, check_out, save
from paramserve.cli.policies import POLICY_HELP, policy_of
from paramserve.cli.report import report
from paramserve.cli.settings import EPILOG, require, take_settings, with_settings
from paramserve.cli.statuses import INTERRUPTED, status_of
from paramserve.cli.warm import warm
from paramserve.errors import ParamServeError
from paramserve.observe.view import SHOWS, Show

if TYPE_CHECKING:
    from paramserve.launch import Result


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="paramserve")
def cli() -> None:
    """The parameter server for PyTorch."""


@cli.command(epilog=EPILOG)
@click.argument("target", metavar="SCRIPT:FUNCTION", required=False)
@click.argument("script_args", metavar="[-- SCRIPT ARGUMENTS]", nargs=-1)
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--servers", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--consistency", metavar="POLICY", default="sync", show_default=True, help=POLICY_HELP
)
@click.option("--seed", type=click.IntRange(min=0), help="Repeats a sync run bit by bit.")
@click.option("--threads-per-worker", type=click.IntRange(min=1))
@click.option("--timeout", "timeout_s", type=float, metavar="SECONDS", help="Of the whole run.")
@click.option(
    "--on-worker-death",
    type=click.Choice(["stop", "continue", "restart"]),
    default="stop",
    show_default=True,
)
@click.option(
    "--rules",
    multiple=True,
    metavar="MODULE:NAME",
    help="A rule, policy, damping function or codec of your own; repeatable.",
)
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="ray: on the Ray cluster that RAY_ADDRESS names, or a local one.",
)
@click.option(
    "--show",
    type=click.Choice(SHOWS),
    default="table",
    show_default=True,
    help="How far the run is, each second; elsewhere than on a terminal a line.",
)
@click.option(
    "--save",
    "out",
    type=click.Path(dir_okay=False),
    help="Where to write the model at the end, for torch.load; also after Ctrl-C or a failure.",
)
@click.option(
    "--load-state",
    type=click.Path(exists=True, dir_okay=False),
    help="A model's file that the workers start from.",
)
@click.option(
    "--load-tables",
    type=click.Path(exists=True, file_okay=False),
    help="A folder of --save-tables whose rows the tables begin with.",
)
@click.option("--save-tables", type=click.Path(file_okay=False), help="A folder for keyed tables.")
@click.option(
    "--checkpoint",
    type=Place(file_okay=False),
    help="A folder, or its URL, for checkpoints: one each minute, from which the run goes on if a "
    "server dies.",
)
@click.option(
    "--resume", is_flag=True, help="Go on from the newest in --checkpoint, if there is one."
)
@click.option(
    "--resume-from", type=Place(exists=True), help="Go on from this checkpoint, or folder."
)
@with_settings
def run(
    target: str | None,
    script_args: tuple[str, ...],
    consistency: str,
    show: Show,
    on_worker_death: str,
    rules: tuple[str, ...],
    engine: str,
    threads_per_worker: int | None,
    out: str | None,
    resume: bool,
    resume_from: str | None,
    **options: Any,
) -> None:
    """Run FUNCTION of SCRIPT on workers: it is called as FUNCTION(worker).

    The script is loaded once, here, with its arguments in sys.argv; the workers get the function
    and see the same arguments. A run that it starts itself belongs under
    `if __name__ == "__main__":`.
    """
    from paramserve.launch import run as run_function
    from paramserve.launch.packing import WithArguments

    take_settings(options)
    require({"target": target}, "target")
    assert target is not None
    if out is not None:
        out = check_out(out, "--save")
    own = [load_object(each) for each in rules]
    policy = policy_of(consistency, own)
    path, function = load_function(target, script_args)
    try:
        result = run_function(
            WithArguments(function, [path, *script_args]),
            consistency=policy,
            on_worker_death=_on_worker_death(on_worker_death),
            rules=own,
            engine=_engine(
                engine,
                threads_per_worker=threads_per_worker,
                deadlines=options.pop("deadlines"),
                limits=options.pop("limits"),
            ),
            show=show,
            checkpoint=_checkpoint(
                options.pop("checkpoint"),
                load_state=options.pop("load_state"),
                load_tables=options.pop("load_tables"),
                save_tables=options.pop("save_tables"),
            ),
            resume=resume_from if resume_from is not None else resume,
            **options,
        )
    except KeyboardInterrupt as interrupt:  # it is told already; click would add an empty line
        _save_rest(getattr(interrupt, "result", None), out)
        raise click.exceptions.Exit(INTERRUPTED) from None
    except ParamServeError as failed:
        _save_rest(failed.result, out)
        raise
    for rank, returned in result.returns.items():
        if returned is not None:
            click.echo(f"worker {rank} returned {returned!r}")
    for error in result.failures.values():
        click.echo(str(error), err=True)
    if out is not None and not result.values:
        click.echo(f"paramserve: {out} was not written: the run has defined no values", err=True)
        raise click.exceptions.Exit(1)
    if out is not None:
        click.echo(f"paramserve: {_save(result, out)} in {out}")


for command in (*COMMANDS, debug, doctor, checkpoints, report, warm):
    cli.add_command(command)


def _save(result: Result, path: str) -> str:
    """Write the model: the group "model" or the only one, else each group by its name.

    Returns:
        What was written.
    """
    names = list(result.values)
    name = "model" if "model" in names else names[0] if len(names) == 1 else None
    if name is not None:
        save(path, state := result.state_dict(name))
        return f"{len(state)} tensors of {name!r} are"
    save(path, {each: result.state_dict(each) for each in names})
    return f"{' and '.join(map(repr, names))} are"


def _save_rest(result: Result | None, path: str | None) -> None:
    """Write what there is of the model of a run that has not ended in order. A failure is
    reported, and hides nothing."""
    if path is None:
        return
    if result is None:
        outcome = "was not written: the servers could not be read"
    elif not result.values:
        outcome = "was not written: the run has defined no values"
    else:
        try:
            _save(result, path)
            outcome = "has the model as it was when the run ended early"
        except ParamServeError as error:  # it names the file, and where the model is instead
            click.echo(f"paramserve: {error}", err=True)
            return
        except OSError as error:
            outcome = f"was not written: {error}"
    click.echo(f"paramserve: {path} {outcome}", err=True)


def _on_worker_death(name: str) -> Any:
    if name == "restart":
        from paramserve.launch.roster import Restart

        return Restart()
    return name


def _checkpoint(path: str | None, **files: Any) -> Any:
    if all(each is None for each in (path, *files.values())):
        return None
    from paramserve.launch.checkpoints import Checkpoint

    return Checkpoint(path, **files)


def _engine(name: str, **settings: Any) -> Any:
    if name == "ray":
        from paramserve.engine.on_ray import OnRay

        return OnRay(**settings)
    from paramserve.engine.local import Local

    return Local(**settings)


def load_function(target: str, argv: Sequence[str]) -> tuple[str, Callable[..., Any]]:
    """The path and the function that SCRIPT:FUNCTION names.

    Raises:
        click.BadParameter: there is no such script or function.
    """
    path, colon, name = target.rpartition(":")
    if not colon or not path or not name.isidentifier():
        raise click.BadParameter(f"{target!r} is not SCRIPT:FUNCTION", param_hint="SCRIPT:FUNCTION")
    script = Path(path)
    if not script.is_file():
        raise click.BadParameter(f"there is no file {path}", param_hint="SCRIPT:FUNCTION")
    sys.path.insert(0, str(script.resolve().parent))
    module = load_script(script, argv)
    function = getattr(module, name, None)
    if not callable(function):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise click.BadParameter(
            f"{path} has no function {name!r}; it has {', '.join(names) if names else 'none'}",
            param_hint="SCRIPT:FUNCTION",
        )
    return path, function


def load_script(script: Path, argv: Sequence[str]) -> ModuleType:
    """Run a script as a module that travels to workers by value, with `argv` in `sys.argv`."""
    name = f"paramserve_script_{script.stem}"
    spec = importlib.util.spec_from_file_location(name, script)
    if spec is None or spec.loader is None:
        raise click.BadParameter(f"{script} is no Python file", param_hint="SCRIPT:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    cloudpickle.register_pickle_by_value(module)
    before, sys.argv = sys.argv, [str(script), *argv]
    try:
        spec.loader.exec_module(module)
    finally:
        sys.argv = before
    return module


@contextmanager
def _own_warnings_in_one_line() -> Iterator[None]:
    """Show a warning that is about no line of the user's as "paramserve: ..."."""
    library = str(Path(click.__file__).parent)

    with warnings.catch_warnings():
        before = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if filename.startswith(library):  # what called this package is the command
                click.echo(f"paramserve: {message}", err=True)
            else:
                before(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


def main(argv: Sequence[str] | None = None) -> int:
    try:
        with _own_warnings_in_one_line():
            outcome = cli.main(
                args=list(argv) if argv is not None else None,
                prog_name="paramserve",
                standalone_mode=False,
            )
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except (ParamServeError, OSError, ValueError, TypeError) as error:
        click.echo(f"paramserve: {type(error).__name__}: {error}", err=True)
        return status_of(error)
    return outcome if isinstance(outcome, int) else 0
