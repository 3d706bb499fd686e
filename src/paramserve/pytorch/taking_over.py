"""`from_embedding`: a trained torch module's rows become a table's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import nn

from paramserve.pytorch.embedding import READ_ROWS, Embedding, EmbeddingBag

if TYPE_CHECKING:
    from paramserve.client import Client
    from paramserve.client.table import Table
    from paramserve.rules.base import Rule

_MARK = ".taken-over.buffers"
"""Group of the value that says that all rows are there. Of groups whose names end so, a result
shows nothing by itself."""


@overload
def from_embedding(
    client: Client, name: str, embedding: nn.Embedding, *, rule: Rule, **options: Any
) -> Embedding: ...
@overload
def from_embedding(
    client: Client, name: str, embedding: nn.EmbeddingBag, *, rule: Rule, **options: Any
) -> EmbeddingBag: ...


def from_embedding(
    client: Client,
    name: str,
    embedding: nn.Embedding | nn.EmbeddingBag,
    *,
    rule: Rule,
    **options: Any,
) -> Embedding | EmbeddingBag:
    """A module on a new table that has the rows of a trained torch module.

    In a run all ranks call this at the same point: rank 0's rows are the table's, the others wait
    for them. They are put once; where the table was taken over before (this is a worker that was
    started again), it stays as it is.

    Args:
        client: `worker.client`, or one without a rank.
        name: of the table.
        embedding: not changed, and not needed afterwards. Its index i becomes the key i.
        rule: of the table.
        options: further ones of `client.table`; `init` is for keys that come later.
    Raises:
        TypeError: `embedding` is neither an nn.Embedding nor an nn.EmbeddingBag.
        ValueError: it has options that a table cannot follow (`max_norm`, `scale_grad_by_freq`), a
            padding row that is not zeros, or a weight that float32 does not hold exactly by its
            dtype, as float64. Nothing was defined.
        DefineTimeout: rank 0 did not bring its rows in time.
        ParamServeError: as `client.table` and `Table.put`.
    """
    _check(embedding)
    table = client.table(name, dim=embedding.embedding_dim, rule=rule, **options)
    group, mark = name + _MARK, f"{name} is taken over"
    if client.rank > 0:
        client.directory.await_block({mark: (1,)}, dtype=np.dtype(np.int64), rule=None, group=group)
    elif all(block.group_name != group for block in client.blocks()):
        _put(table, embedding)
        client.define({mark: np.ones(1, np.int64)}, rule=None, group=group)
    if isinstance(embedding, nn.Embedding):
        return Embedding(table, embedding.padding_idx)
    return EmbeddingBag(
        table,
        embedding.mode,
        padding_idx=embedding.padding_idx,
        include_last_offset=embedding.include_last_offset,
    )


def _check(embedding: nn.Embedding | nn.EmbeddingBag) -> None:
    if not isinstance(embedding, nn.Embedding | nn.EmbeddingBag):
        raise TypeError(
            f"from_embedding takes an nn.Embedding or nn.EmbeddingBag, not "
            f"{type(embedding).__name__}"
        )
    if embedding.max_norm is not None or embedding.scale_grad_by_freq:
        raise ValueError(
            "from_embedding: max_norm and scale_grad_by_freq change the rows in a way that a "
            "table's rule does not. Take over a module without them"
        )
    if torch.promote_types(embedding.weight.dtype, torch.float32) != torch.float32:
        raise ValueError(
            f"from_embedding: the weight is {embedding.weight.dtype}, and a table's rows are "
            "float32 for torch, which would round it. Give a copy that you have rounded: "
            "copy.deepcopy(embedding).float()"
        )
    padding = embedding.padding_idx if isinstance(embedding, nn.Embedding) else None
    if padding is not None and bool(embedding.weight[padding].any()):
        raise ValueError(
            f"from_embedding: the row of padding_idx {padding} is not zeros, and a table's padding "
            "reads as zeros. Zero it, or take it over as a row, with padding_idx None"
        )


def _put(table: Table, embedding: nn.Embedding | nn.EmbeddingBag) -> None:
    weight = embedding.weight.detach()
    keys = torch.arange(len(weight))
    if embedding.padding_idx is not None:
        keys = keys[keys != embedding.padding_idx]
    for start in range(0, len(keys), READ_ROWS):
        part = keys[start : start + READ_ROWS]
        values = weight[part.to(weight.device)].to("cpu", torch.float32)
        table.put(part.numpy(), values.contiguous().numpy())
