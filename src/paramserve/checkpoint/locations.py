"""Where checkpoints are: the path of a folder, or the URL of one that fsspec reaches."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from paramserve.checkpoint.object_store import ObjectStore
from paramserve.checkpoint.storage import LocalFolder, Storage
from paramserve.errors import CheckpointError, ParamServeError, shown

MARK = "://"
LOCAL = ("file", "local")
"""Protocols of a folder of this machine; fsspec is not asked for it."""


def is_url(path: str) -> bool:
    return MARK in path


def whole_path(what: str, path: Any) -> str:
    """The whole path, or the URL, of a folder that a user names.

    Args:
        what: is named, for errors.
    Raises:
        TypeError, ValueError: it is none, or no other process would see it.
    """
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        raise TypeError(f"{what} must be the path of a folder, not {path!r}")
    text = os.fspath(path)
    if not text:
        raise ValueError(f"{what} must be the path of a folder, and is empty")
    if not is_url(text):
        return os.path.abspath(os.path.expanduser(text))
    protocol, _, rest = text.partition(MARK)
    this = f"{what} is {shown(text)!r}"
    if "::" in text:
        raise ValueError(f"{this}, a chain of file systems: name one, such as 's3://bucket/run'")
    if protocol == "memory":
        raise ValueError(
            f"{this}, and memory:// is of one process: servers and driver would each see a folder "
            "of their own. Name one that all of them see"
        )
    if protocol not in LOCAL:
        if not shown(text).partition(MARK)[2].strip("/"):
            raise ValueError(f"{this}, without the name of a folder: 's3://bucket/run' has one")
        return text.rstrip("/")
    if not rest.startswith("/"):
        raise ValueError(f"{this}: {protocol}:// takes a whole path, as in 'file:///runs/a'")
    return os.path.abspath(rest)


def storage_at(folder: str) -> Storage:
    """The storage of a folder, as `whole_path` gave it.

    Raises:
        ParamServeError: what reaches it is not installed. CheckpointError: it cannot be reached so.
    """
    if not is_url(folder):
        return LocalFolder(folder)
    url = shown(folder)
    try:
        core = import_module("fsspec.core")
    except ImportError as error:
        raise ParamServeError(
            f"checkpoints in {url} are written by the library fsspec, which is not installed",
            fix="pip install 'paramserve[fsspec]', here and where the servers run",
        ) from error
    try:
        filesystem, root = core.url_to_fs(folder)
    except ImportError as error:
        raise ParamServeError(
            f"fsspec cannot reach {url}: {shown(str(error))}",
            fix="install that library too, here and where the servers run",
        ) from None
    except Exception as error:  # each file system refuses settings in its own way
        raise CheckpointError(
            f"fsspec cannot reach {url}: {type(error).__name__}: {shown(str(error))}",
            fix="look at the URL, and at the settings of its file system",
        ) from None
    return ObjectStore(folder, filesystem, root)
