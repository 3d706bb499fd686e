"""What a run starts from: values of models, rows of tables. Checked before anything is started."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import cloudpickle

from paramserve.checkpoint.tensors import dtype_of
from paramserve.client.arrow import check_file, saying, table_of
from paramserve.config import FIRST_OPTIMIZER
from paramserve.launch.checkpoints import ModelSource, RowSource
from paramserve.launch.reading import is_extra, table_file
from paramserve.launch.result import Result

STATE_BYTES_MAX = (1 << 32) - (1 << 20)
"""Most bytes of values that a worker is started with. Source: the msgpack specification, bin 32."""

TABLES_SUFFIX = ".parquet"
HASHED = re.compile(r"-[0-9a-f]{32}\.parquet$")
"""End of a file's name that has the beginning of its table's (`table_file`)."""


def pack_state(states_argument: ModelSource | None) -> bytes:
    """What `load_state=` gives, by the name of the optimizer that it is for, in cloudpickle; empty
    for None.

    Raises:
        TypeError: it is no state dict. ValueError: there is nothing in it, it is too large, or the
            file holds something else. OSError: the file cannot be read.
    """
    if states_argument is None:
        return b""
    states = _states(states_argument)
    packed: bytes = cloudpickle.dumps(
        {
            name: {key: _on_cpu(value) for key, value in state.items()}
            for name, state in states.items()
        }
    )
    if len(packed) > STATE_BYTES_MAX:
        raise ValueError(
            f"load_state has {len(packed) / 1e9:.1f} GB, and a worker is started with at most "
            f"{STATE_BYTES_MAX / 1e9:.1f} GB: load the model in the training function, "
            "before worker.optimizer"
        )
    return packed


def find_tables(argument: RowSource | None) -> dict[str, str]:
    """The files that `load_tables=` names, by table, with their whole paths.

    Raises:
        TypeError: it is neither a folder nor a mapping. ValueError: a folder has no table in it, or
            a file no rows. OSError: one is missing, or cannot be read. ParamServeError: pyarrow is
            not installed.
    """
    if argument is None:
        return {}
    files: dict[Any, Any]
    if isinstance(argument, Mapping):
        files = dict(argument)
    else:
        folder = _path(argument)
        names = [each for each in _listed(folder) if each.endswith(TABLES_SUFFIX)]
        files = {_table_in(folder, name): os.path.join(folder, name) for name in names}
    if not files:
        raise ValueError(f"load_tables has no table: no file *{TABLES_SUFFIX} is in {argument!r}")
    paths = {_name(name): os.path.abspath(_path(path)) for name, path in files.items()}
    for path in paths.values():
        check_file(path)
    return paths


def _table_in(folder: str, file: str) -> str:
    """The table whose rows a file has: by its own name, unless that may be the beginning only."""
    name = unquote(file.removesuffix(TABLES_SUFFIX))
    if HASHED.search(file) is None:
        return name
    table = table_of(os.path.join(folder, file))
    return table if table is not None and table_file(table) == file else name


def _listed(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise saying(
            error,
            f"load_tables={folder!r} cannot be read: {error.strerror} ({os.path.abspath(folder)}). "
            "Applied: no. To fix: give the folder that save_tables= of an earlier run wrote, or a "
            "dict with the path of a file for each table",
        ) from error


def _path(argument: Any) -> str:
    if not isinstance(argument, str | os.PathLike):
        raise TypeError(
            "load_tables must be the folder that save_tables= wrote to, or a dict with the path of "
            f"a file for each table, not {argument!r}"
        )
    return str(os.fspath(argument))


def _name(argument: Any) -> str:
    if not isinstance(argument, str):
        raise TypeError(f"load_tables goes by the names of tables, and {argument!r} is none")
    return argument


def _states(states: Any) -> Mapping[str, Mapping[str, Any]]:
    """State dicts by the optimizer's name."""
    if isinstance(states, Result):
        # A group of integers only is a mark of ours, such as that a table was taken over.
        names = [
            name
            for name, state in states.values.items()
            if any("float" in dtype_of(array) for array in state.values())
        ]
        if not names:
            raise ValueError("the result in load_state has no values: nothing was defined there")
        # Workers tell the steps of their optimizers; what client.define made has none.
        stepped = [name for name in names if name in states.steps]
        return {name: states.state_dict(name) for name in stepped or names}
    what = "load_state"
    if isinstance(states, str | os.PathLike):
        from paramserve.pytorch.loading import read_state

        path = os.fspath(states)
        what, states = f"the file {path!r} in load_state", read_state(path)
    if not isinstance(states, Mapping):
        raise TypeError(
            f"{what} must be a state dict, as model.state_dict() gives, the path of a file with "
            "one, a ps.Result, or a dict of state dicts by the optimizer's name, not "
            f"{type(states).__name__}"
        )
    if not states:
        raise ValueError(f"{what} is empty")
    nested = [
        key for key, each in states.items() if isinstance(each, Mapping) and not is_extra(key)
    ]
    if not nested:
        _check(states, what)
        return {FIRST_OPTIMIZER: states}
    others = ", ".join(repr(key) for key in states if key not in nested)
    if others:
        raise TypeError(
            f"{what} has the dict {nested[0]!r} beside {others}: give the state dict alone, as in "
            f"load_state=checkpoint[{nested[0]!r}]"
        )
    for name, state in states.items():
        _check(state, f"{what}, for the optimizer {name!r},")
    return states


def _check(state: Mapping[str, Any], what: str) -> None:
    for key, value in state.items():
        if not isinstance(key, str):
            raise TypeError(f"{what} has the key {key!r}; the keys of a state dict are strings")
        is_tensor = hasattr(value, "shape") and hasattr(value, "dtype")
        if not is_tensor and not is_extra(key):
            raise TypeError(
                f"{what} has {type(value).__name__} under {key!r}, and a state dict has tensors: "
                "give what model.state_dict() gave"
            )


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if hasattr(value, "detach") else value
