"""Deadlines, limits and a TOML file as options of a command: --stall-s, --config, --show-config."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from paramserve.config import Deadlines, Limits, check_setting
from paramserve.launch import config_file
from paramserve.launch.config_file import COMMANDS, KINDS, check_name, names_of

F = TypeVar("F", bound=Callable[..., Any])
OWN = ("config", "show_config")
"""Parameters that are of no table."""
EPILOG = (
    "Each deadline and limit is an option, too, such as --stall-s 30 or --clients-max 8192: "
    "--show-config lists them all."
)
"""End of a command's help."""


class Setting(click.ParamType):  # type: ignore[type-arg]  # click 8.1's has none
    """A field of `Deadlines` or `Limits`."""

    def __init__(self, kind: type[Deadlines | Limits], field: str) -> None:
        self._kind, self._field = kind, field
        self._whole = isinstance(getattr(kind(), field), int)
        self.name = "count" if self._whole else "seconds" if field.endswith("_s") else "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str):
            try:
                value = int(value) if self._whole else float(value)
            except ValueError:
                self.fail(f"{value!r} is not {'an int' if self._whole else 'a number'}", param, ctx)
        try:
            check_setting(self._field, self._kind, self._field, value)
        except (TypeError, ValueError) as error:
            self.fail(str(error), param, ctx)
        return value


def with_settings(command: F) -> F:
    """Adds an option for each deadline and limit, --config and --show-config; `take_settings`
    takes them out again."""
    for table, kind in reversed([*KINDS.items()]):
        for field in reversed(names_of(kind)):
            option = f"--{field.replace('_', '-')}"
            key = f"{table}_{field}"
            command = click.option(option, key, type=Setting(kind, field), hidden=True)(command)
    command = click.option(
        "--show-config",
        is_flag=True,
        help="Print what holds, deadlines and limits included, as a file for --config; do nothing.",
    )(command)
    return click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False),
        is_eager=True,
        callback=_load,
        help="A TOML file with tables [serve] or [run] of options, [deadlines] and [limits]; the "
        "command line beats it.",
    )(command)


def take_settings(options: dict[str, Any]) -> None:
    """Replace in `options` what `with_settings` has added by `deadlines` and `limits`: the
    settings, or None where none was given. With --show-config, print what holds and exit."""
    if options["show_config"]:
        click.echo("\n".join(_toml_lines(click.get_current_context(), options)))
        click.get_current_context().exit()
    for name in OWN:
        del options[name]
    for table, kind in KINDS.items():
        values = {field: options.pop(f"{table}_{field}") for field in names_of(kind)}
        values = {field: number for field, number in values.items() if number is not None}
        options[table] = kind(**values) if values else None


def require(options: Mapping[str, Any], *names: str) -> None:
    """Raise `click.MissingParameter` for an option that was not given, on the command line or in
    the file. One that is declared as required would be asked for by --show-config, too."""
    context = click.get_current_context()
    for param in context.command.params:
        if param.name in names and options[param.name] is None:
            raise click.MissingParameter(ctx=context, param=param)


def meanings(kind: type[Deadlines | Limits]) -> dict[str, str]:
    """What the text behind each field of a class of settings says, on one line each."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(field.target, ast.Name)
            assert isinstance(text, ast.Expr), f"{field.target.id} has no text"
            texts[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return texts


# --- the file ------------------------------------------------------------------------------------


def _load(context: click.Context, param: click.Parameter, path: str | None) -> str | None:
    """Have the file's values stand for what the command line does not give."""
    if path is None:
        return None
    values: dict[str, Any] = {}
    try:
        tables = config_file.read(path)
        for table in KINDS:
            for field, number in tables.get(table, {}).items():
                values[f"{table}_{field}"] = number
        root = context.find_root()
        for name in COMMANDS:
            own = name == context.command.name
            command = context.command if own else _command(root, name)
            options = _options(path, name, command, tables.get(name, {}))
            values |= _converted(context, path, name, options) if own else {}
    except (OSError, ValueError) as error:
        raise click.BadParameter(str(error), context, param) from error
    context.default_map = values
    return path


def _command(root: click.Context, name: str) -> click.Command | None:
    return root.command.get_command(root, name) if isinstance(root.command, click.Group) else None


def _options(
    path: str, table: str, command: click.Command | None, values: Mapping[str, Any]
) -> list[tuple[click.Option, Any]]:
    """The options that a command's table of the file means, with their values.

    Raises:
        ValueError: the command has no such option, or its values are of another type.
    """
    if command is None:
        return []
    by_name = {_name(option): option for option in _of_table(command)}
    for name in values:
        check_name(f"{path}: [{table}]: no option", name, tuple(by_name))
        _check_type(f"{path}: [{table}] {name}", by_name[name], values[name])
    return [(by_name[name], value) for name, value in values.items()]


def _converted(
    context: click.Context, path: str, table: str, pairs: list[tuple[click.Option, Any]]
) -> dict[str, Any]:
    for option, value in pairs:
        try:
            option.type_cast_value(context, value)
        except click.BadParameter as error:
            raise ValueError(f"{path}: [{table}] {_name(option)}: {error.message}") from error
    return {str(option.name): value for option, value in pairs}


def _of_table(command: click.Command) -> Iterator[click.Option]:
    """The options of a command that its table may have."""
    for param in command.params:
        eligible = isinstance(param, click.Option) and param.name not in OWN
        if eligible and not any(str(param.name).startswith(f"{table}_") for table in KINDS):
            assert isinstance(param, click.Option)
            yield param


def _name(option: click.Option) -> str:
    return option.opts[0].lstrip("-")


def _check_type(where: str, option: click.Option, value: Any) -> None:
    """Raise `ValueError` unless TOML's type is that of the option."""
    what: tuple[str, type[Any] | tuple[type[Any], ...]]
    if option.is_flag:
        what = "true or false", bool
    elif option.multiple:
        what = "a list of strings", list
    elif isinstance(option.type, click.types.IntParamType):
        what = "an int", int
    elif isinstance(option.type, click.types.FloatParamType):
        what = "a number", (int, float)
    else:
        what = "a string", str
    kind_text, kind = what
    wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
    if not wrong and isinstance(value, list):
        wrong = not all(isinstance(each, str) for each in value)
    if wrong:
        raise ValueError(f"{where} must be {kind_text}, not {value!r}")


# --- what holds ----------------------------------------------------------------------------------


def _toml_lines(context: click.Context, options: Mapping[str, Any]) -> Iterator[str]:
    """What holds, as TOML that --config takes; each value with where it comes from."""
    table = str(context.command.name)
    yield f"[{table}]"
    for option in _of_table(context.command):
        value = context.params.get(str(option.name))
        name = _name(option)
        if value is None or value == ():
            yield f"# {name} is not given"
        else:
            yield f"{name} = {_toml(value)}{_source(context, options, str(option.name))}"
    for part, kind in KINDS.items():
        yield f"\n[{part}]"
        texts = meanings(kind)
        for field in names_of(kind):
            key = f"{part}_{field}"
            value = options[key] if options[key] is not None else getattr(kind(), field)
            yield f"# {texts[field]}"
            yield f"{field} = {_toml(value)}{_source(context, options, key)}"


def _source(context: click.Context, options: Mapping[str, Any], name: str) -> str:
    source = context.get_parameter_source(name)
    if source is ParameterSource.COMMANDLINE:
        return "  # from the command line"
    return f"  # from {options['config']}" if source is ParameterSource.DEFAULT_MAP else ""


def _toml(value: Any) -> str:
    """A value as TOML: JSON's strings, numbers, booleans and lists of strings are TOML's."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)
