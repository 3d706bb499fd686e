"""Reading a cluster's values from outside: whole groups by name, and snapshots as they come."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paramserve.client import Client, Snapshots
from paramserve.core.partition import Block
from paramserve.errors import ParamServeError, UnknownName

State = dict[str, npt.NDArray[Any]]

SNAPSHOT_POLL_S = 0.05
"""Between two questions for the next snapshot."""
UNTRAINED = ".buffers"
"""What `worker.optimizer` does not train lies in the group of this name behind its own."""
EXTRA_STATE = "_extra_state"
"""Ends the name of what a module's `get_extra_state` gave, of any type. Source: torch.nn.Module."""


class Snapshot(NamedTuple):
    """A group's values at one version.

    `seconds` counts from when the group was first seen on the servers. `state` is what
    `model.load_state_dict` takes, with buffers and tied tensors: tensors if torch is imported,
    otherwise arrays; buffers are the present ones. `dropped`: earlier snapshots that were not read
    in time.
    """

    version: int
    seconds: float
    state: dict[str, Any]
    dropped: int


class Reader:
    """Reads whole groups through a client. May be used from any thread."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def blocks(self) -> dict[str, list[Block]]:
        """All blocks of tensors that are defined now, by group."""
        found: dict[str, list[Block]] = {}
        for block in self.client.blocks():
            found.setdefault(block.group_name, []).append(block)
        return found

    def read(self, name: str) -> State:
        """The present values of a group, or nothing if there is none."""
        groups = self.blocks()
        blocks = _of(name, groups)
        state = self._state(blocks) | self.means(name, groups)
        return with_aliases(state, [*blocks, *_of_ranks(name, groups)])

    def means(self, name: str, groups: Mapping[str, list[Block]]) -> State:
        """What each rank keeps for a mean (`buffers="mean"`): the mean of what they told last.

        Args:
            name: of the group that is trained.
            groups: as `blocks` gave them.
        """
        told: dict[str, list[npt.NDArray[Any]]] = {}
        for block in _of_ranks(name, groups):
            for tensor, value in self._state([block]).items():
                told.setdefault(tensor, []).append(value)
        return {
            tensor: np.asarray(np.mean(values, axis=0, dtype=np.float64), values[0].dtype)
            for tensor, values in told.items()
        }

    def read_all(self) -> dict[str, State]:
        """The present values of every group; what is not trained lies with what is."""
        names = [n for n in self.blocks() if not n.endswith(UNTRAINED)]
        return {name: self.read(name) for name in names}

    def state_dict(self, name: str) -> dict[str, Any]:
        """The present values of one group, as `as_state_dict` gives them. Raises what that does."""
        state = self.read(name)
        values = {name: state} if state else dict.fromkeys(self.blocks(), state)
        return as_state_dict(values, name, () if state else self.tables())

    def tables(self) -> list[str]:
        """Names of the keyed tables that are defined now."""
        return [table.name for table in self.client.tables()]

    def save_tables(self, folder: str) -> dict[str, str]:
        """Write every table, with its rule's state, to a file of its own.

        Returns:
            The files' paths, by table.
        Raises:
            ParamServeError: one could not be written. Those before it were.
        """
        files: dict[str, str] = {}
        for table in self.client.tables():
            path = os.path.join(folder, f"{_file_name(table.name)}.parquet")
            try:
                table.to_parquet(path, state=True)
            except OSError as error:
                raise ParamServeError(
                    f"table {table.name!r} was not written to {path}: {error}; written were: "
                    f"{', '.join(files) if files else 'none'}",
                    fix="make room there, or name another folder in save_tables=",
                ) from error
            files[table.name] = path
        return files

    def _state(self, blocks: Iterable[Block]) -> State:
        """The tensors of some blocks."""
        state: State = {}
        for block in blocks:
            flat, _ = self.client.dense.fetch(block, 0)
            for piece, low, high in zip(block.pieces, block.starts, block.starts[1:], strict=False):
                state[piece.name] = flat[low:high].reshape(piece.shape)
        return state


class Watching:
    """One reader of snapshots: takes them from the servers, oldest first.

    It has a client of its own, because the servers keep one watch for each client.

    Args:
        keep: snapshots that the servers hold for it.
        seconds: gives the run's time.
    """

    def __init__(self, group: str, every: int, keep: int, seconds: Callable[[], float]) -> None:
        self.group = group
        self._every = every
        self._keep = keep
        self._seconds = seconds
        self._reader: Reader | None = None
        self._since_s: float | None = None
        self._after = 0
        self._kept: deque[Snapshot] = deque()
        self._lock = threading.Lock()

    def take(self, connect: Callable[[], Client]) -> Snapshot | None:
        """The next one, or None if there is none yet.

        Args:
            connect: makes its client, at the first call.
        """
        with self._lock:
            if self._kept:
                return self._kept.popleft()
            if self._reader is None:
                self._reader = Reader(connect())
            return self._ask(self._reader)

    def drain(self) -> None:
        """Take over what the servers hold, because they are about to end."""
        with self._lock:
            if self._reader is None:
                return
            try:
                while (found := self._ask(self._reader)) is not None:
                    self._kept.append(found)
            except ValueError:  # a table of that name, which has none
                return

    def forget(self) -> None:
        """Let go of the client, which is closed."""
        self._reader = None

    def take_kept(self) -> Snapshot | None:
        """One that `drain` took over; when the servers are gone."""
        with self._lock:
            return self._kept.popleft() if self._kept else None

    def _ask(self, reader: Reader) -> Snapshot | None:
        now_s = self._seconds()
        groups = reader.blocks()  # the client learns of blocks that were defined meanwhile
        if self._since_s is None:
            if self.group not in groups:
                if self.group in reader.tables():
                    self._reader = None  # the end of the run has nothing to take over
                    raise ValueError(
                        f"{self.group!r} is a table, of which there are no snapshots: read it with "
                        f"job.table({self.group!r})"
                    )
                return None
            Snapshots(reader.client).watch(self.group, self._every, self._keep)
            self._since_s = now_s
        found = Snapshots(reader.client).take(self.group, self._after)
        if found is None:
            return None
        self._after = found.version
        state = dict(found.values)
        if self.group + UNTRAINED in groups:
            state = reader.read(self.group + UNTRAINED) | state
        state |= reader.means(self.group, groups)
        blocks = [*_of(self.group, groups), *_of_ranks(self.group, groups)]
        state = with_aliases(state, blocks)
        return Snapshot(found.version, now_s - self._since_s, as_tensors(state), found.dropped)


def _file_name(name: str) -> str:
    """A name with nothing in it that no file name can hold."""
    for letter in "%/\0":
        name = name.replace(letter, f"%{ord(letter):02X}")
    return name


def _of(name: str, groups: Mapping[str, list[Block]]) -> list[Block]:
    """The blocks that make up a group, those of what is not trained first: a tensor that is trained
    since then is in both."""
    return [*groups.get(name + UNTRAINED, ()), *groups.get(name, ())]


def _of_ranks(name: str, groups: Mapping[str, list[Block]]) -> list[Block]:
    """The blocks in which each rank keeps its own buffers of a group; see `Reader.means`."""
    own = re.compile(re.escape(name) + r"\.rank\d+" + re.escape(UNTRAINED))
    return [block for group, blocks in groups.items() if own.fullmatch(group) for block in blocks]


def with_aliases(state: State, blocks: Iterable[Block]) -> State:
    """The state with tied tensors under all their names."""
    names = {other: first for block in blocks for other, first in block.spec.aliases.items()}
    return state | {other: state[first] for other, first in names.items() if first in state}


def as_state_dict(
    values: Mapping[str, State], name: str, tables: Collection[str]
) -> dict[str, Any]:
    """One group's values: tensors if torch is imported here, else the arrays themselves.

    Args:
        tables: names of keyed tables, which are no groups of tensors.
    Raises:
        UnknownName: there is no such group.
    """
    if name in tables:
        raise UnknownName(
            f"{name!r} is a table, and no group of tensors",
            fix="use job.table(name) while the run goes on, or have tables written at its end by "
            "ps.run(..., save_tables=folder)",
        )
    if name not in values:
        known = ", ".join(map(repr, values)) if values else "none"
        raise UnknownName(
            f"the run has no group {name!r}; its groups: {known}",
            fix="name the group of worker.optimizer(..., name=), or 'default' for client.define",
        )
    return as_tensors(values[name])


def as_tensors(state: State) -> dict[str, Any]:
    """Tensors in the arrays' memory if torch is imported here, else the arrays themselves."""
    torch = sys.modules.get("torch")
    if torch is None:
        return dict(state)
    return {name: torch.from_numpy(array) for name, array in state.items()}


def is_extra(key: Any) -> bool:
    """Whether a name of a state dict is that of what a module gave besides tensors."""
    return isinstance(key, str) and key.rpartition(".")[2] == EXTRA_STATE
