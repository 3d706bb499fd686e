"""Settings of a cluster in a TOML file, which its servers and workers share.

The tables [deadlines] and [limits] have fields of `ps.Deadlines` and `ps.Limits`. [serve] and [run]
have options of these commands, which check them.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from paramserve.config import Deadlines, Limits, check_setting
from paramserve.errors import did_you_mean

KINDS: Final[Mapping[str, type[Deadlines | Limits]]] = {"deadlines": Deadlines, "limits": Limits}
"""The tables of settings."""
COMMANDS: Final = ("serve", "run")
"""The tables of options of a command."""

Tables = dict[str, dict[str, Any]]


def read(path: str | os.PathLike[str]) -> Tables:
    """The tables of a file; of those of `KINDS`, names, types and ranges are checked.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no TOML, or has a table, name or value that there is not.
    """
    with open(path, "rb") as file:
        try:
            tables = tomllib.load(file)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no TOML: {error}") from error
    for name, table in tables.items():
        check_name(f"{path}: no table", name, (*KINDS, *COMMANDS))
        if not isinstance(table, dict):
            raise ValueError(f"{path}: {name} must be a table, as in [{name}], not {table!r}")
        if name not in KINDS:
            continue
        for field, number in table.items():
            check_name(f"{path}: [{name}]: no setting", field, names_of(KINDS[name]))
            try:
                check_setting(f"{path}: [{name}] {field}", KINDS[name], field, number)
            except TypeError as error:  # of a file, all that is wrong is a wrong value
                raise ValueError(str(error)) from error
    return tables


def settings_in(path: str | os.PathLike[str]) -> dict[str, Deadlines | Limits]:
    """The arguments `deadlines` and `limits` of `ps.connect` that a file has. Raises as `read`."""
    tables = read(path)
    return {name: kind(**tables[name]) for name, kind in KINDS.items() if name in tables}


def check_name(where: str, name: str, valid: tuple[str, ...]) -> None:
    """Raise `ValueError` for a name that is unknown, with the nearest one or all."""
    if name not in valid:
        near = did_you_mean(name, valid) or f"; known: {', '.join(valid)}"
        raise ValueError(f"{where} is called {name!r}{near}")


def names_of(kind: type[Deadlines | Limits]) -> tuple[str, ...]:
    """The fields of a class of settings."""
    return tuple(field.name for field in msgspec.structs.fields(kind))
