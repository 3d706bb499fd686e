"""Models' values in files, and those that each rank's models start from (`load_state=`)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paramserve.checkpoint.plain import as_tensor
from paramserve.checkpoint.tensors import dtype_of
from paramserve.client.arrow import replacing
from paramserve.config import FIRST_OPTIMIZER
from paramserve.pytorch.naming import AROUND, plain_name, plain_text
from paramserve.pytorch.registry import Registry

if TYPE_CHECKING:
    from paramserve.training.host import Host


KINDS_BY_HEAD = {
    b"PK": "a zip archive that is cut off or of another kind",
    b"\x80": "a pickle that is cut off, or that another program than torch.save has written",
    b"PAR1": "a Parquet file: tables are loaded with load_tables=",
    b"\x89HDF": "an HDF5 file",
    b"\x93NUMPY": "an array of numpy.save: give a dict with it under the parameter's name",
}
"""What a file may be that is no state dict, by its first bytes."""
HEAD_BYTES = 16
"""First bytes of a file of no known kind that an error shows."""


def read_state(path: str) -> Any:
    """What `torch.save` has written; none of the file's own code is run.

    Raises:
        OSError: it cannot be read. ValueError: it holds something else than tensors and plain data.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # of any type: bytes of another kind are read as a pickle's
        kind, fix = _content_and_fix(path, str(error))
        raise ValueError(
            f"the file {path!r} in load_state is not what torch.save(model.state_dict(), path) "
            f"writes. Expected: names and tensors. Found: {kind}. Applied: no. To fix: {fix}"
        ) from error


def _content_and_fix(path: str, reason: str) -> tuple[str, str]:
    """What a file is that could not be read, and what to do.

    Args:
        reason: by torch.
    """
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    fix = "name a file of torch.save(model.state_dict(), path), or give the state dict itself"
    if (unsafe := re.search(r"\bGLOBAL (\S+)", reason)) is not None:
        return (
            f"an object that needs {unsafe[1]}, such as a whole model",
            "if you trust the file, read it yourself with torch.load(path, weights_only=False), "
            "and give load_state the state dict in it",
        )
    if head[8:10] == b'{"':
        return "a safetensors file", "load_state=safetensors.torch.load_file(path)"
    unknown = f"a file that begins with {head!r}" if head else "an empty file"
    kinds = (kind for begin, kind in KINDS_BY_HEAD.items() if head.startswith(begin))
    return next(kinds, unknown), fix


def save_state(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write a state dict, or one for each name, for `torch.load`. The file is complete when it is
    there under its name.

    Raises:
        OSError: it cannot be written. What was there before still is.
    """
    with replacing(path) as file:
        torch.save({name: _as_tensors(each) for name, each in state.items()}, file)


def load_given(worker: Host, name: str, model: torch.nn.Module) -> None:
    """Load into a model what the run was given for its optimizer, if anything; once.

    What another optimizer owns of the model stays as it is: it was loaded for that one, and may
    have been trained since.

    Raises:
        ValueError: it does not fit. Nothing was defined.
    """
    states = worker.load_state
    key = name if name in states else FIRST_OPTIMIZER
    if key not in states:
        return
    state = _as_model_has(model, _as_tensors(states[key]))
    owner = Registry.of(worker).owner
    present = model.state_dict(keep_vars=True)
    owned = {each for each, value in present.items() if _is_owned(value, owner)}
    try:
        unowned = {name: value for name, value in state.items() if name not in owned}
        mismatch = model.load_state_dict(unowned, strict=not owned)
        if not owned.issuperset(mismatch.missing_keys) or mismatch.unexpected_keys:
            raise RuntimeError(str(mismatch))
    except RuntimeError as error:
        fix = _fix(list(present), list(state))
        raise ValueError(
            f"load_state does not fit the model of optimizer {name!r}: {error}. Applied: no. To "
            f"fix: {fix}"
        ) from error
    del states[key]


def _is_owned(value: Any, owner: Callable[[torch.Tensor], object]) -> bool:
    return isinstance(value, torch.Tensor) and owner(value) is not None


def _as_model_has(model: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state under the names that the model has with its own wrappers, whichever it was saved
    with; a name that fits none stays."""
    names = model.state_dict(keep_vars=True).keys()
    by_plain = {plain_name(model, name): name for name in names}
    renamed = {}
    for name, value in state.items():
        plain = plain_text(name)
        options = (name, by_plain.get(name), by_plain.get(plain), _unwrapped(plain, by_plain))
        renamed[next((each for each in options if each in names), name)] = value
    return renamed


def _unwrapped(name: str, by_plain: Mapping[str, str]) -> str | None:
    """What a name is without `module.` before it, once or twice."""
    while name.startswith(AROUND):
        name = name.removeprefix(AROUND)
        if name in by_plain:
            return by_plain[name]
    return None


def _fix(expected: Sequence[str], actual: Sequence[str]) -> str:
    """What to do where names differ: by a prefix, in part, or all of them."""
    for longer, shorter, line in (
        (actual, expected, "{{name.removeprefix({0!r}): value for name, value in state.items()}}"),
        (expected, actual, "{{{0!r} + name: value for name, value in state.items()}}"),
    ):
        prefix = _prefix(longer, set(shorter))
        if prefix:
            return f"the names differ by {prefix!r} only: give load_state=" + line.format(prefix)
    if set(expected).isdisjoint(actual):
        return "give a state dict of this model: no name in this one is in the model"
    return (
        "give a state dict of this model, or load the part that fits in the training function: "
        "model.load_state_dict(state, strict=False) before worker.optimizer"
    )


def _prefix(longer: Sequence[str], shorter: set[str]) -> str:
    """What all of some names have before the others; empty: there is no such prefix."""
    for name in shorter:
        for each in longer:
            prefix = each.removesuffix(name)
            if each == prefix + name and prefix.endswith("."):
                fits = {one.removeprefix(prefix) for one in longer if one.startswith(prefix)}
                return prefix if fits >= shorter else ""
    return ""


def _as_tensors(tree: Any) -> Any:
    """Arrays as tensors in their memory, also within a dict; those of uint16 are of bfloat16."""
    if isinstance(tree, Mapping):
        return {name: _as_tensors(value) for name, value in tree.items()}
    return as_tensor(tree, dtype_of(tree)) if isinstance(tree, np.ndarray) else tree
