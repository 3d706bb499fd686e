"""Which block holds which names, and who is defining it: one answer for the whole cluster."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import numpy as np
from msgspec import Struct, structs

from paramserve.codecs.base import Codec
from paramserve.codecs.rows import why_not_rows
from paramserve.config import CodecSpec, ConsistencySpec, RuleSpec
from paramserve.consistency.built_in import Async
from paramserve.consistency.registry import is_for_tables
from paramserve.consistency.registry import spec as policy_spec
from paramserve.core import differences
from paramserve.core.differences import Difference
from paramserve.core.partition import (
    DTYPES,
    HALVES,
    METADATA,
    NARROW,
    PLAIN_DTYPES,
    borders,
    cut,
    size_of,
)
from paramserve.core.user_codecs import codec_of, why_not_pulled, why_not_pushed
from paramserve.errors import CodecMismatch, DefineMismatch, ParamServeError, UnknownCodec
from paramserve.messages import BlockSpec, Piece, PlaceBlock

NAME = re.compile(r"[^\x00-\x1f\x7f]{1,512}")
"""Names are shown in errors and tables: no control characters."""
DIM_MAX = 1 << 16
"""Values in a row of a table."""
TABLE_POLICY = policy_spec(Async())
"""Policy of a table defined without one, where the cluster's is not for tables."""
PIECES_MAX = 100_000
"""Tensors in one block."""
DIMENSIONS_MAX = 64
"""Most dimensions of a tensor, the same as numpy's."""
ELEMENTS_MAX = 1 << 48
"""Elements in one block: more could not be encoded, whatever the memory."""
LINKED_MAX = 4 * PIECES_MAX
"""Names in the links of one block."""
NAMED_MAX = 3
"""Tensors of a block that an error names."""


class Stage(Enum):
    OPEN = "open"
    """Its definer ended before the values were everywhere: the next client may define it."""
    DEFINING = "defining"
    DEFINED = "defined"
    REFUSED = "refused"
    """The shards refused it: its names are free."""


@dataclass
class Entry:
    """One block. `attempt` counts the clients that began to define it."""

    spec: BlockSpec
    attempt: int
    definer: int
    stage: Stage
    nth: int = -1
    """Place of the block in its group; see `PlaceBlock.nth`."""
    whole_tensors: bool = False
    """True: no tensor is cut between shards; see `PlaceBlock.whole_tensors`."""
    saved: bool = False
    """Whether it is of the checkpoint that the cluster goes on from."""


class BlockRecord(Struct, frozen=True):
    """A block as it is saved. `stage`: "defined", "open" or "refused"."""

    spec: BlockSpec
    attempt: int
    stage: str
    nth: int
    whole_tensors: bool


class Directory:
    """All blocks of a cluster, in the order in which they were placed.

    Args:
        policy: the cluster's; None: it is not known, and no policies are compared with it.
    """

    def __init__(self, shards: int, policy: ConsistencySpec | None = None) -> None:
        self._policy = policy
        self._entries: list[Entry] = []
        self._groups: dict[str, int] = {}
        self._policies: dict[str, ConsistencySpec | None] = {}
        """Policy of each group that has a block: its own, or None for the cluster's."""
        self._by_name: dict[tuple[str, str], Entry] = {}
        self._loads = [0] * shards
        """Bytes of values on each shard."""

    def restore(self, record: Sequence[BlockRecord]) -> None:
        """Have the saved blocks, which are cut anew where they were on another number of shards.
        What was not defined then is open."""
        for each in record:
            spec, stage = each.spec, Stage(each.stage)
            if spec.table is None and len(spec.cuts) != len(self._loads) + 1:
                cuts = self._cuts(spec, each.whole_tensors)
                spec = structs.replace(spec, cuts=cuts)
            saved = stage is Stage.DEFINED
            entry = Entry(spec, each.attempt, 0, stage, each.nth, each.whole_tensors, saved)
            self._groups[spec.group_name] = spec.group
            self._entries.append(entry)
            if stage is not Stage.REFUSED:
                self._policies.setdefault(spec.group_name, spec.consistency)
                self._enter(entry)

    def record(self, saved: Collection[int]) -> tuple[BlockRecord, ...]:
        """All blocks, to be saved; defined are those of these numbers that are defined now."""
        return tuple(
            BlockRecord(each.spec, each.attempt, _saved(each, saved), each.nth, each.whole_tensors)
            for each in self._entries
        )

    def place(self, call: PlaceBlock, client: int) -> tuple[BlockSpec, int] | None:
        """The block for these tensors, and the attempt with which this client must define it.

        Returns:
            Attempt 0: it is defined. None: another client is defining it, or has to; ask again.
        Raises:
            DefineMismatch: a name is defined with another shape, dtype, rule or group, or its
                group with another policy.
            ParamServeError: the tensors cannot be placed. In both cases nothing was applied.
        """
        self._check_policy(call)
        entry = self._existing(call)
        if entry is not None and entry.stage is Stage.DEFINED:
            return entry.spec, 0
        if not call.define:
            return None
        if entry is None:
            entry = self._new(call, client)
        elif entry.stage is Stage.OPEN:
            entry.stage, entry.definer = Stage.DEFINING, client
            entry.attempt += 1
        elif entry.definer != client:
            return None
        return entry.spec, entry.attempt

    def defined(self, block: int, attempt: int) -> None:
        """The definer has the values on all shards; or, with the attempt's number below 0, some
        shard refused them: then the names are free for the next define."""
        if not (0 <= block < len(self._entries) and self._entries[block].attempt == abs(attempt)):
            return
        entry = self._entries[block]
        if attempt > 0 and entry.stage is not Stage.REFUSED:
            entry.stage = Stage.DEFINED
        elif attempt < 0 and entry.stage is Stage.DEFINING:
            self._free(entry)

    def _free(self, entry: Entry) -> None:
        """Refuse an entry's block, so that its names can be defined anew."""
        entry.stage = Stage.REFUSED
        spec = entry.spec
        remaining = [each for each in self._entries if each.stage is not Stage.REFUSED]
        if all(each.spec.group != spec.group for each in remaining):
            del self._policies[spec.group_name]
        for piece in spec.pieces:
            del self._by_name[spec.group_name, piece.name]
        self._load(spec, -1)

    def _load(self, spec: BlockSpec, sign: int) -> None:
        """Count a block's bytes on each shard; those of a table come with its keys."""
        itemsize = np.dtype(spec.dtype).itemsize
        for shard, (low, high) in enumerate(pairwise(spec.cuts)):
            self._loads[shard] += sign * (high - low) * itemsize

    def client_gone(self, client: int) -> None:
        """What this client was defining is open to the next client that asks."""
        for entry in self._entries:
            if entry.stage is Stage.DEFINING and entry.definer == client:
                entry.stage = Stage.OPEN

    def has_group(self, name: str) -> bool:
        """Whether a block of this group was placed."""
        return any(entry.spec.group_name == name for entry in self._entries)

    def find(self, names: tuple[str, ...] | None) -> tuple[BlockSpec, ...] | None:
        """Defined blocks with these names (None: all); None if one of them is not defined yet."""
        ready = [entry.spec for entry in self._entries if entry.stage is Stage.DEFINED]
        if names is None:
            return tuple(ready)
        requested = set(names)
        specs = [s for s in ready if any(piece.name in requested for piece in s.pieces)]
        have = {piece.name for spec in specs for piece in spec.pieces}
        return tuple(specs) if requested <= have else None

    def _check_policy(self, call: PlaceBlock) -> None:
        """Refuse another policy than the group's; a call without one takes the group's."""
        if call.consistency is None or call.group not in self._policies:
            return
        theirs = self._policies[call.group]
        if call.consistency != (self._policy if theirs is None else theirs):
            diff = differences.of_policies(theirs, call.consistency)
            raise DefineMismatch(
                f"group {call.group!r} is defined with {diff.existing}, now {diff.incoming} came",
                fix="give a group's policy with its first define, and everywhere the same one; "
                "client.set_consistency changes it later",
            )

    def _existing(self, call: PlaceBlock) -> Entry | None:
        """Find the entry that has the names of a call; None: none has. Raises where it is described
        otherwise: each difference is named."""
        entries = {
            id(entry): entry
            for piece in call.pieces
            if (entry := self._by_name.get((call.group, piece.name))) is not None
        }
        if not entries:
            self._check_kind(call)
            self._check_order(call)
            return None
        entry = next(iter(entries.values()))
        spec, mismatches = entry.spec, list[Difference]()
        if len(entries) > 1 or spec.pieces != call.pieces:
            mismatches.append(differences.of_pieces(spec.pieces, call.pieces))
        if spec.table != call.table:
            mismatches.append(differences.of_tables(spec.table, call.table))
        if (spec.dtype, spec.half) != (call.dtype, call.half):
            mismatches.append(Difference("dtype", spec.half or spec.dtype, call.half or call.dtype))
        theirs, ours = entry.spec.rule, call.rule
        if not call.define and theirs is not None and ours is not None:
            # A client that waits sends its hyper-parameters with each push.
            same = theirs.name == ours.name and _texts(theirs) == _texts(ours)
        else:
            same = theirs == ours
        if not same:
            mismatches.append(differences.of_rules(theirs, ours))
        codecs = [
            differences.of_codecs(what, existing, incoming)
            for what, existing, incoming in (
                ("the codec of pushes", spec.push, call.push),
                ("the codec of pulls", spec.pull, call.pull),
            )
            if existing != incoming
        ]
        if mismatches or codecs:
            raise _mismatch(
                call, entry, [*mismatches, *codecs], DefineMismatch if mismatches else CodecMismatch
            )
        return entry

    def _check_order(self, call: PlaceBlock) -> None:
        """Refuse other names than those that another rank has for the same block: the ones that are
        asked for would never be defined."""
        for entry in self._entries:
            spec = entry.spec
            same = call.nth >= 0 and (spec.group_name, entry.nth) == (call.group, call.nth)
            if same and entry.stage is not Stage.REFUSED:
                names = [p.name for p in spec.pieces], [p.name for p in call.pieces]
                diff = differences.of_names(*names)
                if entry.saved:
                    raise _mismatch(call, entry, [diff])
                raise DefineMismatch(
                    f"the ranks have other names for block {call.nth} of group {call.group!r}: it "
                    f"is defined with {diff.what} {diff.existing}, now {diff.incoming} came",
                    fix="build the same model on all ranks, wrap it on all or on none, and give "
                    "the same codecs",
                )

    def _check_kind(self, call: PlaceBlock) -> None:
        """Refuse what would put a table and tensors, or two tables, into one group."""
        for entry in self._entries:
            spec = entry.spec
            if spec.group_name != call.group or entry.stage is Stage.REFUSED:
                continue
            if spec.table is not None or call.table is not None:
                what = "a table" if spec.table is not None else "a group of tensors"
                tensors = ", ".join(repr(piece.name) for piece in call.pieces[:NAMED_MAX])
                raise DefineMismatch(
                    f"{call.group!r} is the name of {what}; now {tensors} would be defined in it",
                    fix="give each table a name of its own, that no group of tensors has",
                )
            return

    def _new(self, call: PlaceBlock, client: int) -> Entry:
        """Place a block that is not defined yet, for this client to define."""
        _check(call)
        cuts: tuple[int, ...] = ()
        if call.table is None:
            cuts = self._cuts(call, call.whole_tensors)
        group = self._groups.setdefault(call.group, len(self._groups))
        policy = call.consistency
        if policy is None and call.table is not None and self._policy is not None:
            follows = is_for_tables(self._policy, call.table.dtype)
            policy = None if follows else TABLE_POLICY
        policy = self._policies.setdefault(call.group, policy)
        spec = BlockSpec(
            len(self._entries),
            group,
            call.group,
            call.dtype,
            call.rule,
            call.pieces,
            cuts,
            policy,
            call.table,
            call.aliases,
            call.push,
            call.pull,
            call.half,
            call.links,
            call.dtypes,
        )
        entry = Entry(spec, 1, client, Stage.DEFINING, call.nth, call.whole_tensors)
        self._entries.append(entry)
        self._enter(entry)
        return entry

    def _cuts(self, placement: PlaceBlock | BlockSpec, whole_tensors: bool) -> tuple[int, ...]:
        """Cuts of a new block."""
        pieces = placement.pieces
        at = borders(pieces) if whole_tensors else None
        wire_dtype = HALVES.get(placement.half or "", np.dtype(placement.dtype))
        return cut(size_of(pieces), wire_dtype.itemsize, self._loads, at)

    def _enter(self, entry: Entry) -> None:
        """Let a block's names be known."""
        self._load(entry.spec, 1)
        for piece in entry.spec.pieces:
            self._by_name[entry.spec.group_name, piece.name] = entry


def _saved(entry: Entry, saved: Collection[int]) -> str:
    """The stage of a block in a checkpoint that has these blocks."""
    stage = Stage.OPEN
    if entry.stage is Stage.REFUSED or (entry.stage is Stage.DEFINED and entry.spec.block in saved):
        stage = entry.stage
    text: str = stage.value
    return text


def _is_table(call: PlaceBlock) -> bool:
    assert call.table is not None
    dim = call.table.dim
    fits = call.pieces == (Piece(call.group, (dim,)),) and 1 <= dim <= DIM_MAX
    return fits and call.rule is not None and call.dtype == "float32"


def _texts(rule: RuleSpec) -> dict[str, str]:
    """The options that no push sends anew."""
    return {name: each for name, each in rule.options.items() if isinstance(each, str)}


def _mismatch(
    call: PlaceBlock,
    entry: Entry,
    mismatches: Sequence[Difference],
    kind: type[DefineMismatch] = DefineMismatch,
) -> DefineMismatch:
    """The error for a define that differs from what is there in all of this."""
    names = ", ".join(repr(piece.name) for piece in call.pieces)
    if len(call.pieces) > NAMED_MAX:  # the first ones may be those that do not differ
        names = f"a block of {len(entry.spec.pieces)} tensors"
    there = "is in the checkpoint" if entry.saved else "is defined"
    listing = "; ".join(
        f"with {each.what} {each.existing}, now {each.incoming} came" for each in mismatches
    )
    fix = "define a name with one shape, dtype, rule and group, or choose another name"
    if kind is CodecMismatch:
        fix = "give the same codecs on all ranks, and after a resume those of before"
    elif entry.saved:
        fix = (
            "go on with the model and the rule that were saved, or begin anew without resume=; "
            "another learning rate is set after worker.optimizer, in optimizer.param_groups"
        )
    return kind(f"{names} in group {entry.spec.group_name!r} {there} {listing}", fix=fix)


def _existing(described: CodecSpec | None) -> Codec | None:
    """A codec that is built in; None: only the servers may know it, and else refuse it."""
    with contextlib.suppress(UnknownCodec):
        return codec_of(described)
    return None


def why_not_encoded(call: PlaceBlock) -> str | None:
    """Why these tensors or rows cannot be encoded as a define asks; None: they can be, if the
    servers know the codecs."""
    if call.push is None and call.pull is None:
        return None
    names = ", ".join(repr(piece.name) for piece in call.pieces[:NAMED_MAX])
    try:
        push, pull = _existing(call.push), _existing(call.pull)
    except ValueError as error:
        return str(error)
    if call.table is not None:
        for described, codec in ((call.push, push), (call.pull, pull)):
            if described is not None and codec is None:
                return f"{described.name} is a codec of your own, and rows of a table take none"
            if codec is not None and (wrong := why_not_rows(codec)):
                return wrong
        return None
    if call.dtype != "float32":
        return f"a codec encodes float32, and {names} is {call.dtype}"
    if call.push is not None and call.rule is None:
        return f"a codec of pushes is for tensors with a rule, and {names} has none"
    wrong = why_not_pushed(push) if push is not None else None
    if wrong is None and pull is not None:
        wrong = why_not_pulled(pull)
    return wrong


def _check(call: PlaceBlock) -> None:
    """Refuse what no shard could hold; the client checks the same before it asks."""
    wrong = None
    allowed = DTYPES if call.rule is not None else PLAIN_DTYPES
    names = [piece.name for piece in call.pieces]
    linked = [name for link in call.links for pair in link.names.items() for name in pair]
    groups = [call.group, *(group for link in call.links for group in (link.group, link.source))]
    if not names or len(names) > PIECES_MAX:
        wrong = f"{len(names)} tensors in one block, allowed are 1 to {PIECES_MAX}"
    elif len(set(names)) != len(names):
        wrong = "a name stands twice in one define"
    elif call.dtype not in allowed:
        wrong = f"dtype {call.dtype!r}, allowed are {', '.join(allowed)}"
    elif call.half is not None and (
        call.half not in HALVES or call.dtype != DTYPES[0] or call.table is not None
    ):
        wrong = f"{call.half!r} for {call.dtype}: tensors of float32 may be {' or '.join(HALVES)}"
    elif len(call.aliases) > PIECES_MAX:
        wrong = f"{len(call.aliases)} further names of tied tensors, allowed are {PIECES_MAX}"
    elif call.dtypes and (call.rule is not None or not set(names).issuperset(call.dtypes)):
        wrong = "dtypes of tensors that it does not have, or that have a rule"
    elif not all(NARROW.get(each) == call.dtype for each in call.dtypes.values()):
        wrong = f"a dtype of a tensor that {call.dtype} does not stand for"
    elif len(linked) > 2 * LINKED_MAX:
        wrong = f"{len(linked) // 2} names in other groups, allowed are {LINKED_MAX}"
    elif not all(NAME.fullmatch(name) for name in (*names, *call.aliases, *linked, *groups)):
        wrong = "a name is empty, longer than 512 characters or has control characters"
    elif METADATA in (*names, *call.aliases):
        wrong = (
            f"no tensor can be called {METADATA!r}: safetensors files keep the name for themselves"
        )
    elif call.table is not None and not _is_table(call):
        wrong = f"a table needs a rule, its own name for its group, and a dim from 1 to {DIM_MAX}"
    elif any(length < 0 for piece in call.pieces for length in piece.shape):
        wrong = "a negative length in a shape"
    elif any(len(piece.shape) > DIMENSIONS_MAX for piece in call.pieces):
        wrong = f"a tensor of more than {DIMENSIONS_MAX} dimensions"
    elif (size := size_of(call.pieces)) > ELEMENTS_MAX:
        wrong = f"tensors of {size} elements in one block, allowed are {ELEMENTS_MAX}"
    else:
        wrong = why_not_encoded(call)
    if wrong is not None:
        raise ParamServeError(f"define in group {call.group!r}: {wrong}", fix="correct the define")
