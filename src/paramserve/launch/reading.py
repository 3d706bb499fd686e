"""Reading a cluster's values from outside: whole groups by name, and snapshots as they come."""

from __future__ import annotations

import math
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paramserve.checkpoint.plain import as_tensor
from paramserve.checkpoint.tensors import dtype_of
from paramserve.client import Client, Snapshots, Table
from paramserve.client.timeouts import SAY_S
from paramserve.config import BUFFERS, LOOSE, is_trained
from paramserve.core.partition import Block
from paramserve.errors import ParamServeError, UnknownName, warn_user
from paramserve.messages import Link

State = dict[str, npt.NDArray[Any]]

FILE_NAME_MAX = 240
"""Bytes of a table's name in that of its file; file systems take 255 with the suffix."""
SNAPSHOT_POLL_S = 0.05
"""Seconds between two questions for the next snapshot."""
EXTRA_STATE = "_extra_state"
"""Ends the name of what a module's `get_extra_state` gave, of any type. Source: torch.nn.Module."""


class Snapshot(NamedTuple):
    """A group's values at one version.

    `seconds` counts from when this call of `snapshots` first saw the group on the servers: another
    call begins at 0 again. `state` is what `model.load_state_dict` takes, with buffers and tied
    tensors: tensors if torch is imported, otherwise arrays; buffers are the present ones.
    `dropped`: earlier snapshots that were not read in time.
    """

    version: int
    seconds: float
    state: dict[str, Any]
    dropped: int


class Reader:
    """Reads whole groups through a client, and rows as they are. May be used from any thread."""

    def __init__(self, client: Client) -> None:
        client.reads.exact = True
        self.client = client

    def blocks(self) -> dict[str, list[Block]]:
        """All blocks of tensors that are defined now, by group."""
        blocks: dict[str, list[Block]] = {}
        for block in self.client.blocks():
            blocks.setdefault(block.group_name, []).append(block)
        return blocks

    def read(self, name: str) -> State:
        """The present values of a group, or nothing if there is none."""
        return self._read([name])[name]

    def _read(self, names: Collection[str]) -> dict[str, State]:
        """The values of groups at one moment: all are of one cut."""
        groups = self.blocks()
        blocks = [block for name in names for block in _all_of(name, groups)]
        if not blocks:
            return {name: {} for name in names}
        with self.client.dense.cut(blocks) as cut:
            return {name: state_of(name, groups, partial(self._state, cut=cut)) for name in names}

    def with_others(self, name: str, values: State, groups: Mapping[str, list[Block]]) -> State:
        """A group's values, completed as `read` completes those of now.

        Args:
            values: of the blocks of this very group.
            groups: as `blocks` gave them.
        """
        others = [block for block in _all_of(name, groups) if block.group_name != name]
        if not others:
            return values | state_of(name, groups, partial(_select, values))
        with self.client.dense.cut(others) as cut:

            def read(blocks: Iterable[Block]) -> State:
                state = State()
                for block in blocks:
                    own = block.group_name == name
                    state |= _select(values, [block]) if own else self._state([block], cut)
                return state

            return values | state_of(name, groups, read)

    def read_all(self) -> dict[str, State]:
        """The present values of every group; what is not trained lies with what is."""
        return self._read([*filter(is_trained, self.blocks())])

    def state_dict(self, name: str) -> dict[str, Any]:
        """The present values of one group, as `as_state_dict` gives them. Raises what that does."""
        state = self.read(name)
        values = {name: state} if state else dict.fromkeys(filter(is_trained, self.blocks()), state)
        tables = () if state else self.tables()
        if not (values or tables):
            raise _not_yet(f"group {name!r}")
        return as_state_dict(values, name, tables)

    def table(self, name: str) -> Table:
        """A keyed table that is defined now. Raises `UnknownName` if there is none."""
        try:
            return self.client.table(name)
        except UnknownName:
            if self.blocks() or self.tables():
                raise
            raise _not_yet(f"table {name!r}") from None

    def tables(self) -> list[str]:
        """Names of the keyed tables that are defined now."""
        return [table.name for table in self.client.tables()]

    def save_tables(self, folder: str) -> dict[str, str]:
        """Write every table, with its rule's state, to a file of its own. A table without rows, as
        of a run that failed early, replaces no file: that is warned of.

        Returns:
            The files' paths, by table.
        Raises:
            ParamServeError: one could not be written. Those before it were.
        """
        files: dict[str, str] = {}
        for table in self.client.tables():
            path = os.path.join(folder, table_file(table.name))
            if os.path.exists(path) and not len(table):
                warn_user(
                    f"table {table.name!r} has no rows: {path} stays as it was before. To fix: "
                    "delete that file if it is not wanted, or give load_tables= to go on from it"
                )
                continue
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

    def _state(self, blocks: Iterable[Block], cut: int = 0) -> State:
        """The tensors of some blocks, of a cut or as they are now."""
        state: State = {}
        for block in blocks:
            flat, _ = self.client.dense.fetch(block, 0, cut=cut)
            for piece, low, high in zip(block.pieces, block.starts, block.starts[1:], strict=False):
                values = flat[low:high].reshape(piece.shape)
                state[piece.name] = as_model_has(values, block.spec.dtypes.get(piece.name))
        return state


def state_of(
    name: str, groups: Mapping[str, list[Block]], read: Callable[[Iterable[Block]], State]
) -> State:
    """A group's values, with what of it is not trained or lies in another group, and under all
    names; nothing if there is no such group.

    Of a tensor that has been assigned and is trained since then, the trained value counts; of one
    that two groups have defined, as where its module was replaced, the later one's.

    Args:
        groups: all blocks, by group.
        read: gives the tensors of some blocks.
    """
    if not _own(name, groups):
        return State()
    served = [block for block in groups.get(name, ()) if block.spec.rule is not None]
    assigned = [block for block in _of(name, groups) if block.spec.rule is None]
    dtypes = {piece: dtype for each in assigned for piece, dtype in each.spec.dtypes.items()}
    means = _means(name, groups, read)
    means = {piece: as_model_has(mean, dtypes.get(piece)) for piece, mean in means.items()}
    state = read(assigned) | means | read(served)
    last = {piece.name: block.id for block in served for piece in block.pieces}
    for defined, link in _links_to(name, groups):
        values = read(_sources(link, groups))
        state |= {
            mine: values[each]
            for mine, each in link.names.items()
            if each in values and defined > last.get(mine, -1)
        }
    return with_aliases(state, _own(name, groups))


def _means(
    name: str, groups: Mapping[str, list[Block]], read: Callable[[Iterable[Block]], State]
) -> State:
    by_tensor: dict[str, list[npt.NDArray[Any]]] = {}
    for block in _of_ranks(name, groups):
        for tensor, value in read([block]).items():
            by_tensor.setdefault(tensor, []).append(value)
    return {
        tensor: np.asarray(np.mean(values, axis=0, dtype=np.float64), values[0].dtype)
        for tensor, values in by_tensor.items()
    }


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
        self._watches = 0
        """The client for which the present servers were told to keep snapshots; 0: none."""
        self._group_names: list[str] = []
        """The run's groups and tables, as long as this one is none of them."""
        self._missing_since_s: float | None = None
        """When others appeared; infinite: it was warned of."""
        self._after = 0
        self._buffer: deque[Snapshot] = deque()
        self._lock = threading.Lock()

    @property
    def group_exists(self) -> bool:
        """Whether the group was there at some question."""
        return self._since_s is not None

    def take(self, connect: Callable[[], Client]) -> Snapshot | None:
        """The next one, or None if there is none yet. Warns once of a group that is not defined
        long after others are.

        Args:
            connect: makes its client, at the first call.
        """
        with self._lock:
            if self._buffer:
                return self._buffer.popleft()
            if self._reader is None:
                self._reader = Reader(connect())
            return self._ask(self._reader)

    def drain(self) -> None:
        """Take over what the servers hold, because they are about to end."""
        with self._lock:
            if self._reader is None:
                return
            try:
                while (snapshot := self._ask(self._reader)) is not None:
                    self._buffer.append(snapshot)
            except ValueError:  # a table of that name, which has none
                return

    def forget(self) -> None:
        """Release the client, which is closed. Other servers begin with an older version."""
        self._reader, self._watches, self._after = None, 0, 0

    def take_kept(self) -> Snapshot | None:
        """One that `drain` took over; when the servers are gone."""
        with self._lock:
            return self._buffer.popleft() if self._buffer else None

    def unknown(self) -> UnknownName | None:
        """The error of a run that has ended while its groups were others; else None."""
        if self.group_exists or not self._group_names:
            return None
        return unknown_group(self.group, self._group_names)

    def _ask(self, reader: Reader) -> Snapshot | None:
        """Ask the servers for the next snapshot, and before the first one to keep them."""
        now_s = self._seconds()
        groups = reader.blocks()  # the client learns of blocks that were defined meanwhile
        if self._watches != reader.client.connection.id:  # the first time, or in a new session
            if self.group not in groups:
                tables = reader.tables()
                if self.group in tables:
                    self._reader = None  # the end of the run has nothing to take over
                    raise ValueError(
                        f"{self.group!r} is a table, of which there are no snapshots: read it with "
                        f"job.table({self.group!r})"
                    )
                self._miss([*filter(is_trained, groups), *tables], now_s)
                return None
            Snapshots(reader.client).watch(self.group, self._every, self._keep)
            self._watches = reader.client.connection.id
            if self._since_s is None:
                self._since_s = now_s
        assert self._since_s is not None, "it is set with the first watch"
        latest = Snapshots(reader.client).take(self.group, self._after)
        if latest is None:
            return None
        self._after = latest.version
        state = reader.with_others(self.group, dict(latest.values), groups)
        state = of_model(state)
        return Snapshot(latest.version, now_s - self._since_s, as_tensors(state), latest.dropped)

    def _miss(self, names: list[str], now_s: float) -> None:
        """Note what there is in place of the group, and warn of a name that may be wrong."""
        self._group_names = names
        if not names:
            return
        if self._missing_since_s is None:
            self._missing_since_s = now_s
        waited_s = now_s - self._missing_since_s
        if waited_s >= SAY_S:
            self._missing_since_s = math.inf
            warn_user(
                f"snapshots of group {self.group!r} have waited {waited_s:.0f} s: the run has not "
                f"defined it; its groups: {', '.join(map(repr, names))}. They wait for it until "
                "the run ends. To fix: give the name of one of these, as in "
                f"snapshots(name={_nearest(self.group, names)!r})"
            )


def _nearest(name: str, names: list[str]) -> str:
    return (get_close_matches(name, names, n=1) or names)[0]


def table_file(name: str) -> str:
    """The file of a table: its name, with nothing in it that no file name can hold; of one that is
    too long for that, the beginning, and a hash."""
    quoted = name
    for letter in "%/\0":
        quoted = quoted.replace(letter, f"%{ord(letter):02X}")
    if len(quoted.encode()) > FILE_NAME_MAX:
        first = quoted.encode()[: FILE_NAME_MAX - 33].decode(errors="ignore")
        quoted = f"{first}-{blake2b(name.encode(), digest_size=16).hexdigest()}"
    return f"{quoted}.parquet"


def _of(name: str, groups: Mapping[str, list[Block]]) -> list[Block]:
    """The blocks that make up a group, those of what is not trained first: a tensor that is trained
    by now may be in both."""
    return [*groups.get(name + BUFFERS, ()), *groups.get(name, ())]


def _of_ranks(name: str, groups: Mapping[str, list[Block]]) -> list[Block]:
    """The blocks in which each rank keeps its own buffers of a group for a mean
    (`buffers="mean"`): what it told last."""
    own = re.compile(re.escape(name) + r"\.rank\d+" + re.escape(BUFFERS))
    return [block for group, blocks in groups.items() if own.fullmatch(group) for block in blocks]


def _own(name: str, groups: Mapping[str, list[Block]]) -> list[Block]:
    return [*_of(name, groups), *_of_ranks(name, groups)]


def _links_to(name: str, groups: Mapping[str, list[Block]]) -> list[tuple[int, Link]]:
    """Links of this group's tensors into other groups, the latest last, each with the id of the
    block that it was defined with."""
    blocks = sorted((each for blocks in groups.values() for each in blocks), key=lambda b: b.id)
    return [(block.id, link) for block in blocks for link in block.spec.links if link.group == name]


def _sources(link: Link, groups: Mapping[str, list[Block]]) -> list[Block]:
    """The blocks that have what a link names."""
    names = set(link.names.values())
    blocks = _of(link.source, groups)
    return [block for block in blocks if any(piece.name in names for piece in block.pieces)]


def _all_of(name: str, groups: Mapping[str, list[Block]]) -> list[Block]:
    """Every block that `state_of` reads for a group."""
    own = _own(name, groups)
    links = _links_to(name, groups) if own else []
    sources = [block for _, link in links for block in _sources(link, groups)]
    return list({block.id: block for block in (*own, *sources)}.values())


def as_model_has(values: npt.NDArray[Any], dtype: str | None) -> npt.NDArray[Any]:
    """Values of a block in the dtype in which the model has them (`BlockSpec.dtypes`); numpy has no
    bfloat16: the bits in uint16."""
    if dtype != "bfloat16":
        return values if dtype is None else values.astype(dtype)
    bits = values.view(np.uint32)
    bits = bits + np.where(np.isnan(values), 0, 0x7FFF + (bits >> 16 & 1)).astype(np.uint32)
    return (bits >> 16).astype(np.uint16)


def _select(values: State, blocks: Iterable[Block]) -> State:
    """Subset of some values that these blocks have."""
    dtypes = {p.name: block.spec.dtypes.get(p.name) for block in blocks for p in block.pieces}
    return {
        name: as_model_has(values[name], dtype) for name, dtype in dtypes.items() if name in values
    }


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
            "ps.run(..., checkpoint=ps.Checkpoint(save_tables=folder))",
        )
    if name not in values:
        raise unknown_group(name, [*values, *tables])
    return as_tensors(of_model(values[name]))


def of_model(state: State) -> State:
    """A group's values without parameters that are in its optimizer and not in its model."""
    return {name: value for name, value in state.items() if not name.startswith(LOOSE)}


def _not_yet(what: str) -> UnknownName:
    """The error for something that is asked for before anything is defined."""
    return UnknownName(
        f"{what} is not there yet: the workers have called none of worker.optimizer(...), "
        "client.define(...) and client.table(...) so far",
        fix="wait and ask again: status().groups names what there is; workers take some seconds to "
        "start",
    )


def unknown_group(name: str, names: Collection[str]) -> UnknownName:
    """The error for a group that a run does not have."""
    if not names:
        return UnknownName(
            f"the run has no group {name!r}, and no other: no worker has called "
            "worker.optimizer(...), client.define(...) or client.table(...)",
            fix="call optimizer = worker.optimizer(model, optimizer) in the training function",
        )
    return UnknownName(
        f"the run has no group {name!r}; its groups: {', '.join(map(repr, names))}",
        fix="name the group of worker.optimizer(..., name=), or 'default' for client.define",
    )


def as_tensors(state: State) -> dict[str, Any]:
    """Tensors in the arrays' memory if torch is imported here, else the arrays themselves."""
    torch = sys.modules.get("torch")
    if torch is None:
        return dict(state)
    return {name: as_tensor(array, dtype_of(array)) for name, array in state.items()}


def is_extra(key: Any) -> bool:
    """Whether a name of a state dict is that of what a module gave besides tensors."""
    return isinstance(key, str) and key.rpartition(".")[2] == EXTRA_STATE
