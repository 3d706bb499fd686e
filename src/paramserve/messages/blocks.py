"""What a block is: tensors defined together, and which shard holds what of them."""

from __future__ import annotations

from msgspec import Struct

from paramserve.config import CodecSpec, ConsistencySpec, RuleSpec

VALUE = 0
"""`field` of a block that holds its values; 1, 2, ... are its rule's state arrays."""


class Piece(Struct, frozen=True, array_like=True):
    """One tensor of a block."""

    name: str
    shape: tuple[int, ...]


class TableSpec(Struct, frozen=True, array_like=True):
    """What makes a block a table: rows by key, spread over all shards by a hash of
    the key. The options are `core.table.options.TableOptions`, as they travel."""

    dim: int
    """32-bit words of a row's values in a message: a value has two where `dtype` has 64 bits."""
    dtype: str
    """Dtype in which values are kept: float32, bfloat16 or float16; float64 or int64, to count."""
    seed: int
    options: RuleSpec
    labels: int = 0
    """Strings of its keys that are kept, at most; 0: it keeps none."""


class Link(Struct, frozen=True, array_like=True):
    """Tensors of one model whose values another group has: a reader of `group` finds each of
    `names` there under the name of its own that stands beside it."""

    group: str
    source: str
    """The other group."""
    names: dict[str, str]


class BlockSpec(Struct, frozen=True, array_like=True):
    """Tensors defined together: same group, dtype and rule; `cuts` say which shard holds what.

    `cuts` has one entry more than there are shards: shard k holds the elements
    [cuts[k], cuts[k + 1]) of the tensors laid end to end.
    """

    block: int
    group: int
    group_name: str
    dtype: str
    rule: RuleSpec | None
    pieces: tuple[Piece, ...]
    cuts: tuple[int, ...]
    consistency: ConsistencySpec | None = None
    """Policy of the group, which its first block decides; None: the cluster's."""
    table: TableSpec | None = None
    """The only block of its group; one piece, the table's name and [dim]; no cuts."""
    aliases: dict[str, str] = {}
    """Further names of tied tensors, each with the one that a piece of the group has."""
    push: CodecSpec | None = None
    """How gradients of it are encoded between hosts; None: they are not."""
    pull: CodecSpec | None = None
    """Codec of the values that a step reads."""
    half: str | None = None
    """Dtype of 16-bit models, "bfloat16" or "float16", in which gradients, and values that a step
    reads, lie in clients' memory and travel. Values and state are kept in `dtype`, float32. None:
    in `dtype`, too."""
    links: tuple[Link, ...] = ()
    """What its definer knew of tensors that several groups have in their models; they may be any
    groups. Of two for one name, the one in the later block counts."""
    dtypes: dict[str, str] = {}
    """Dtypes of those tensors of its definer's model that are narrower there than `dtype`
    (`core.partition.NARROW`): readers of whole states give them so."""
