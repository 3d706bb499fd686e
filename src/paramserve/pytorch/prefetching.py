"""What a loader does ahead: rows of the next batch are asked for while this one is computed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

from paramserve.client import Client, Table
from paramserve.client.names import as_keys
from paramserve.client.row_reads import RowRead, TableRead
from paramserve.core.table import routing
from paramserve.pytorch.embedding import KeyedModule

T = TypeVar("T")
KeysOf = Callable[[Any], Mapping[Any, npt.ArrayLike] | Iterable[tuple[Any, npt.ArrayLike]]]
"""The keys that a batch uses: by table, name of a table or module on one; a mapping, or pairs."""


def ahead(
    batches: Iterable[T], client: Client, keys_of: KeysOf, batch_of: Callable[[T], Any]
) -> Generator[T, None, None]:
    """The same batches; each comes when the rows of the one behind it have been asked for.

    All rows of a batch are asked for in one message to each shard, before the present batch is
    pushed: they are one step older, and not even this worker's last push is in them. Those that
    nobody has read when the batch after theirs is asked for, or at the end, are let go. One pair
    serves one pull: a module that is called twice needs two.

    A forward pass pulls anew, and nothing is gained, where steps have ended more than one clock on
    a table since its rows were asked for, or under a policy whose workers all read the values of
    one clock (`ps.Sync`) any; see `Table.prefetch`.

    Where a module is named, and not its table, its padding gets no row. Under `torch.no_grad()`,
    and for modules in `eval()`, no row is created.

    Args:
        batch_of: what `keys_of` is given of each.
    Raises:
        TypeError: `keys_of` gave something else. And what it raises, what the batches raise, and
            what `Table.prefetch` does.
    """
    present: tuple[T, list[RowRead]] | None = None
    coming: list[RowRead] = []
    try:
        for each in batches:
            coming = client.prefetch_tables(_reads(client, keys_of(batch_of(each))))
            if present is not None:
                yield present[0]
                for read in present[1]:
                    read.drop()
            present, coming = (each, coming), []
        if present is not None:
            yield present[0]
    finally:
        for read in [*(present[1] if present is not None else ()), *coming]:
            read.drop()


def _reads(client: Client, told: Any) -> list[TableRead]:
    pairs = told.items() if isinstance(told, Mapping) else told
    try:
        chosen = [(where, keys) for where, keys in pairs]
    except (TypeError, ValueError):
        raise TypeError(
            "the function of prefetch= gives a mapping from tables, their names or modules on "
            f"them to keys, or pairs of them, not {told!r}"
        ) from None
    return [_read(client, where, keys) for where, keys in chosen]


def _read(client: Client, where: Any, keys: Any) -> TableRead:
    if isinstance(keys, Tensor):
        keys = keys.detach().cpu().numpy()
    learns = torch.is_grad_enabled()
    if isinstance(where, KeyedModule):  # as its forward pass will pull them
        learns = learns and where.rows.trained and where.training
        distinct, _ = routing.distinct(as_keys(keys, where.table.name)[0])
        if where.padding_idx is not None:
            distinct = distinct[distinct != where.padding_idx]
        return TableRead(where.table, distinct, learns)
    table = client.table(where) if isinstance(where, str) else where
    if not isinstance(table, Table):
        raise TypeError(
            "the function of prefetch= names what it gives keys for by a table, its name or a "
            f"module on it, not by {where!r}"
        )
    return TableRead(table, keys, learns)
