"""The manifest of a checkpoint: which files it has, the hash of each part, and what was cut.

A JSON object whose last member is the hash of all bytes before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import groupby
from operator import attrgetter
from urllib.parse import quote

import msgspec
import xxhash
from msgspec import Struct

from paramserve.checkpoint.storage import Buffer
from paramserve.errors import CheckpointDamaged, CheckpointError
from paramserve.messages import BlockSpec

FORMAT = 1
"""Version of the file and manifest format; a reader refuses a later one."""
PART_BYTES = 8 << 20
"""Most bytes of a file under one hash: what a reader of a single element has to read."""
NAME_MAX = 100
"""Characters of a file's name that come from a group or table."""
SAFE = " ()[]+=,@"
"""Characters of file names besides lower case letters, digits and "_.-~"."""
LEAD = "manifest-"
RESIDUALS = "residuals"
_HASH = b',"hash":"'
_END = b'"}\n'
_WRITTEN = re.compile(
    rf"((values|sums|tables|{RESIDUALS})/[^/]+|state/[^/]+/[^/]+|worker-\d+)\.safetensors"
    r"|(cluster|(shard|worker)-\d+)\.msgpack"
)


def digest(data: Buffer) -> str:
    """The hash of a part: xxh3 of 128 bits, which finds damage, not forgery."""
    return xxhash.xxh3_128_hexdigest(data)


class Part(Struct, frozen=True, array_like=True):
    """Bytes of a file with their hash."""

    offset: int
    length: int
    digest: str


class Chunk(Struct, frozen=True, array_like=True):
    """Rows of a table's file that were written together."""

    first: int
    """Number of its first row."""
    low: int
    """The lowest place of its keys (`rows.places`); those of the chunk before are not above it."""


class Written(Struct, frozen=True):
    """A file, or the part of it that one process has written."""

    path: str
    size: int
    """Bytes of the whole file."""
    parts: tuple[Part, ...]
    chunks: dict[str, tuple[Chunk, ...]] = {}
    """Chunks of each section of a table's file, in order."""
    table: str = ""
    """The table that its rows are of."""
    full: bool = False
    """Whether it has all rows of its server, not those that have changed."""


class Cut(Struct, frozen=True, kw_only=True):
    """Contents of a checkpoint, for readers of it; what a server resumes from is in
    `shard-<k>.msgpack` and `cluster.msgpack`."""

    step: int
    """The clock that it is named after."""
    shards: int
    workers: int = 0
    seed: int | None = None
    clocks: dict[str, int] = {}
    """Clock of each group."""
    updates: int = 0
    """Updates applied to all groups, as the shards count them."""
    blocks: tuple[BlockSpec, ...] = ()
    """All that were defined, tables too."""
    torn: tuple[str, ...] = ()
    """Pushes that only some shards have, because the worker ended between them."""
    stale_state: tuple[int, ...] = ()
    """Ranks whose own state is older than the cut."""
    pause_s: float = 0.0
    """The longest that a shard executed nothing for it."""
    lost_residuals: tuple[int, ...] = ()
    """Ranks that had left something out of their gradients before the cut, and not flushed it."""


class Manifest(Struct, frozen=True, kw_only=True):
    """A checkpoint."""

    format: int = FORMAT
    number: int
    name: str
    run: str
    """Run that wrote it."""
    writer: str
    """Version of paramserve."""
    created_s: float
    """Seconds since 1970, by the coordinator's clock."""
    cut: Cut
    files: tuple[Written, ...]
    layers: dict[str, tuple[tuple[str, ...], ...]] = {}
    """Files of all rows of each table, then those of each increment, in order."""

    @property
    def nbytes(self) -> int:
        """Bytes of the checkpoint's files, those that it shares with others too."""
        return sum(each.size for each in self.files)

    def file(self, path: str) -> Written:
        """The entry of a file.

        Raises:
            CheckpointError: it has no such file.
        """
        for each in self.files:
            if each.path == path:
                return each
        raise CheckpointError(
            f"checkpoint {self.name} has no file {path}", fix="name one that `checkpoints show` has"
        )

    def own(self, path: str) -> Written:
        """File at a path within the folder that was written for this checkpoint."""
        return self.file(f"{self.name}/{path}")


class _Format(Struct):
    format: int


def manifest_path(number: int) -> str:
    return f"{LEAD}{number}.json"


def manifest_number(name: str) -> int | None:
    """The number of the checkpoint whose manifest has this name; None: it is none's."""
    digits = name.removeprefix(LEAD).removesuffix(".json")
    good = digits.isascii() and digits.isdigit() and manifest_path(int(digits)) == name
    return int(digits) if good else None


def encode(manifest: Manifest) -> bytes:
    text = msgspec.json.encode(manifest)
    assert text.endswith(b"}")
    return text[:-1] + _HASH + digest(text[:-1]).encode() + _END


def decode(data: bytes, path: str, where: str) -> Manifest:
    """What `encode` made.

    Args:
        path, where: the file and its folder, for errors.
    Raises:
        CheckpointDamaged: it is not that. CheckpointError: a later version made it.
    """
    at = data.rfind(_HASH)
    expected = data[at + len(_HASH) : -len(_END)].decode("ascii", "replace")
    actual = digest(data[: max(at, 0)])
    if at < 0 or not data.endswith(_END) or expected != actual:
        raise CheckpointDamaged(
            f"the manifest {path} in {where} is damaged: its {len(data)} bytes say that their hash "
            f"is {expected[:40] if at >= 0 else 'none'!r}, and it is {actual!r}",
            fix="use the checkpoint before, or a copy of this one",
        )
    try:
        made_by = msgspec.json.decode(data, type=_Format).format
        if made_by > FORMAT:
            raise CheckpointError(
                f"the checkpoint of {path} in {where} has format {made_by}, and this version of "
                f"paramserve reads {FORMAT}",
                fix="use the version of paramserve that wrote it",
            )
        manifest = msgspec.json.decode(data, type=Manifest)
        for each in manifest.files:
            _check(each)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CheckpointDamaged(
            f"the manifest {path} in {where} is no manifest: {error}",
            fix="use the checkpoint before",
        ) from None
    return manifest


def _check(file: Written) -> None:
    names = file.path.split("/")
    if not file.path or any(name in ("", ".", "..") for name in names) or "\0" in file.path:
        raise ValueError(f"the path {file.path!r} leads out of the folder")
    missing = gap(file)
    if missing is not None:
        raise ValueError(f"bytes {missing[0]} to {missing[1]} of {file.path} are in no part")


def gap(file: Written) -> tuple[int, int] | None:
    """The first bytes of a file that are not in exactly one part; None: all are."""
    end = 0
    for part in file.parts:
        if part.offset != end or not 0 < part.length <= file.size - end:
            return end, max(part.offset, end)
        end += part.length
    return (end, file.size) if end != file.size else None


def joined(reports: Iterable[Sequence[Written]]) -> tuple[Written, ...]:
    """The files that several processes have written, each with the parts of all.

    Raises:
        CheckpointError: a part of a file was written by none of them, or by two, or they do not
            agree on a file.
    """
    entries = sorted((each for report in reports for each in report), key=attrgetter("path"))
    files = []
    for path, group in groupby(entries, key=attrgetter("path")):
        copies = list(group)
        parts = tuple(sorted((part for each in copies for part in each.parts), key=_offset))
        whole = msgspec.structs.replace(copies[0], parts=parts)
        wrong = gap(whole)
        if wrong is not None or len({each.size for each in copies}) > 1:
            sizes = ", ".join(sorted({str(each.size) for each in copies}))
            raise CheckpointError(
                f"the file {path} of {sizes} bytes was not written whole: {len(copies)} processes "
                f"wrote to it, and bytes {wrong[0]} to {wrong[1]} are missing or there twice"
                if wrong is not None
                else f"the processes that wrote {path} say that it has {sizes} bytes",
                fix="report this: it is a bug of paramserve",
            )
        files.append(whole)
    return tuple(files)


def residual_loss(manifest: Manifest) -> str:
    """What of the workers' residuals a run lacks that goes on from a checkpoint; empty: nothing."""
    clocks = ", ".join(f"clock {clock} of {name!r}" for name, clock in manifest.cut.clocks.items())
    loss = f"checkpoint {manifest.name}: what codecs had left out of the gradients of"
    if any(each.path.split("/")[1:2] == [RESIDUALS] for each in manifest.files):
        return f"{loss} all ranks before {clocks} is lost: files of it are not read any more"
    ranks = ", ".join(map(str, manifest.cut.lost_residuals))
    whose = f"ranks {ranks}" if len(manifest.cut.lost_residuals) > 1 else f"rank {ranks}"
    return f"{loss} {whose} since their last flush before {clocks} is lost" if ranks else ""


_offset = attrgetter("offset")


def layers(
    name: str, files: Sequence[Written], before: Mapping[str, tuple[tuple[str, ...], ...]]
) -> dict[str, tuple[tuple[str, ...], ...]]:
    """The files that each table's rows are in.

    Args:
        name: of the checkpoint, for errors.
        files: written for it.
        before: of the checkpoint that its increments go on from.
    Raises:
        CheckpointError: a table's servers did not write the same kind, or what an increment goes
            on from is not there.
    """
    layers = dict[str, tuple[tuple[str, ...], ...]]()
    of_tables = sorted((each for each in files if each.table), key=attrgetter("table"))
    for table, group in groupby(of_tables, key=attrgetter("table")):
        group_files = list(group)
        new = tuple(each.path for each in group_files)
        kinds = {each.full for each in group_files}
        if kinds == {True}:
            layers[table] = (new,)
        elif kinds == {False} and table in before:
            layers[table] = (*before[table], new)
        else:
            raise CheckpointError(
                f"checkpoint {name} has only changes of table {table!r}, and not all the rows that "
                "they go on from",
                fix="report this: it is a bug of paramserve",
            )
    return layers


def is_written(path: str) -> bool:
    """Whether a path within a checkpoint's folder is one of those that follow. A `Writer` writes no
    other, so that pruning, which removes no other, leaves nothing."""
    return _WRITTEN.fullmatch(path) is not None


def values_path(group: str) -> str:
    """The file of a group's values."""
    return f"values/{file_name(group)}.safetensors"


def state_path(state: str, group: str) -> str:
    """The file of one state of a group's rule."""
    return f"state/{file_name(state)}/{file_name(group)}.safetensors"


def sums_path(group: str, shard: int) -> str:
    """The file of the gradients that wait in a group's buffer on one server."""
    return f"sums/{file_name(group)}.{shard}.safetensors"


def table_path(table: str, shard: int) -> str:
    """The file of a table's rows on one server."""
    return f"tables/{file_name(table)}.{shard}.safetensors"


def shard_path(shard: int) -> str:
    """The control state of a server."""
    return f"shard-{shard}.msgpack"


CLUSTER_PATH = "cluster.msgpack"
"""The control state of the coordinator."""


def worker_path(rank: int) -> str:
    """What a worker saved; its tensors are in the file of this name that ends in .safetensors."""
    return f"worker-{rank}.msgpack"


def file_name(name: str) -> str:
    """A name of the user's as part of a file's name; two names never give the same, also where a
    file system takes "A" for "a"."""
    quoted = "".join(f"%{ord(c):02X}" if "A" <= c <= "Z" else quote(c, safe=SAFE) for c in name)
    if quoted.startswith("."):
        quoted = "%2E" + quoted[1:]
    if len(quoted) > NAME_MAX:
        quoted = f"{quoted[:NAME_MAX]}-{blake2b(name.encode(), digest_size=16).hexdigest()}"
    return quoted or "%"
