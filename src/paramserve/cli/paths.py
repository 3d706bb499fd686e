"""Paths that commands take, and files that they write a model to."""

from __future__ import annotations

import os
import secrets
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from paramserve.checkpoint.locations import is_url, whole_path
from paramserve.errors import ParamServeError


class Place(click.Path):
    """A path, or a URL, which is looked at when it is used."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str) or not is_url(value):
            return super().convert(value, param, ctx)
        try:
            return whole_path("it", value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def check_out(path: str, option: str) -> str:
    """The whole path of a file that `save` can write.

    Raises:
        click.BadParameter: its folder is missing, or takes no file. ParamServeError: torch is not
            installed, or cannot be imported.
    """
    folder = os.path.dirname(os.path.realpath(path))
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise click.BadParameter(
            f"{path} cannot be written: {error.strerror}: {folder}. Make this folder, or name a "
            "file in one that you may write to",
            param_hint=option,
        ) from error
    try:
        from paramserve.pytorch import loading  # noqa: F401 - what imports torch
    except ModuleNotFoundError as error:
        raise ParamServeError(
            f"{option} {path}: a model is written by {error.name}, which is not installed",
            fix="pip install 'paramserve[torch]'",
        ) from error
    except (ImportError, OSError) as error:  # a library of torch's is missing or broken
        raise ParamServeError(
            f"{option} {path}: a model is written by torch, which cannot be imported: {error}",
            fix="install torch again",
        ) from error
    return os.path.abspath(path)


def save(path: str, state: Mapping[str, Any]) -> None:
    """Write a state dict for `torch.load`; where that fails, to the present folder or to that for
    temporary files.

    Raises:
        ParamServeError: the file could not be written; the text says where the state is.
    """
    from paramserve.pytorch.loading import save_state

    name, failed = Path(path), list[str]()
    folders: Sequence[Callable[[], str]] = (
        lambda: str(name.parent),
        os.getcwd,
        tempfile.gettempdir,
    )
    for folder in folders:
        file = name.name if not failed else f"{name.stem}-{secrets.token_hex(4)}{name.suffix}"
        try:
            target = Path(folder()) / file  # there may be no such folder any more
            save_state(target, state)
        except (OSError, RuntimeError) as error:  # torch raises either where a disk is full
            cause = error if isinstance(error, OSError) else error.__context__
            words = cause.strerror if isinstance(cause, OSError) else str(error)
            failed.append(words or type(error).__name__)
        else:
            break
    else:
        raise ParamServeError(
            f"the model was not written: to {path}: {failed[0]}; to the present folder: "
            f"{failed[1]}; to the folder for temporary files: {failed[2]}",
            fix="make room; of a run that has ended, the values are lost",
        )
    if failed:
        raise ParamServeError(
            f"the model was not written to {path}: {failed[0]}. It is in {target}",
            fix=f"mv {shlex.quote(str(target))} {shlex.quote(path)}",
        )
