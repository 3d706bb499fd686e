"""Requests and answers whose bytes travel in frames, because a server does not map this memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import structs

from paramserve.codecs.base import Codec, Floats
from paramserve.codecs.delta import Delta
from paramserve.codecs.keys import order_of
from paramserve.core.client_session import PendingRequest
from paramserve.core.delta_stream import CopyUpdate, DeltaReader
from paramserve.core.partition import Block
from paramserve.core.request_memory import aligned
from paramserve.core.table.encoded import RowCodecs
from paramserve.core.table.parts import gradient_bytes, keys_at, padded, records_bytes
from paramserve.errors import ProtocolError
from paramserve.messages import (
    ALIGN,
    Assign,
    Contains,
    Define,
    Delete,
    Fetch,
    Gradient,
    Keys,
    Put,
    Read,
    ReadTarget,
    Scan,
    ShardRequest,
    Step,
    TakeSnapshot,
)
from paramserve.rules.compiled import compiled
from paramserve.transport.arena import Arena

Bytes = npt.NDArray[np.uint8]


class ExactKeys(Keys, frozen=True, array_like=True):
    """Keys of a read whose rows come as they are, where their table has a codec of pulls, too. To a
    shard it is `Keys`, which is told so where they are coded."""


class GivesPayload(Protocol):
    """A link whose last header was followed by a payload of so many bytes."""

    payload_bytes: int

    def read_payload(self, into: Sequence[Bytes]) -> None: ...


class Outgoing:
    """A payload to be sent: its parts, one after the other, each padded on the wire."""

    def __init__(self) -> None:
        self.parts: list[Bytes] = []
        self.nbytes = 0

    def add(self, part: Bytes) -> int:
        """Add a part; the offset at which it will lie."""
        offset = self.nbytes
        self.parts.append(part)
        self.nbytes += -(-part.nbytes // ALIGN) * ALIGN
        return offset


class Payloads:
    """Which bytes of this client's memory a request speaks of.

    Args:
        blocks: by id; what the parts of a request are measured by.
        arenas: by number.
    """

    def __init__(self, blocks: Mapping[int, Block], arenas: Mapping[int, Arena]) -> None:
        self._blocks = blocks
        self._arenas = arenas
        self.read_bytes: dict[str, tuple[int, int]] = {}
        """Bytes as sent and as they are, for each group whose values arrived encoded."""
        self._readers: dict[tuple[int, int], DeltaReader] = {}
        """Reader by block and shard: what it has of values sent as differences."""

    def inline(self, shard: int, message: ShardRequest, payload: Outgoing) -> ShardRequest:
        """Copy of a request with its bytes in the frame instead of an arena.

        Args:
            payload: of the frame; the request's parts are added.
        """
        if isinstance(message, Step):
            return self._inline_step(shard, message, payload)
        if isinstance(message, Read):
            pull = self._inline_reads(shard, message.pull, payload)
            return structs.replace(message, pull=pull)
        if isinstance(message, TakeSnapshot):
            pull = self._inline_reads(shard, message.pull, payload, exact=True)
            return structs.replace(message, pull=pull)
        if isinstance(message, Define):
            if message.spec.table is not None:
                return message
            number = message.spec.block
            offset = payload.add(self._kept_part(shard, number, message.arena, message.offset))
        elif isinstance(message, Assign):
            offset = payload.add(
                self._kept_part(shard, message.block, message.arena, message.offset)
            )
        elif isinstance(message, Put):
            offset = payload.add(self._records(message))
        elif isinstance(message, Delete | Contains):
            end = message.offset + 8 * message.rows
            offset = payload.add(self._arenas[message.arena].memory[message.offset : end])
        elif isinstance(message, Fetch | Scan):
            offset = 0
        else:
            return message
        return structs.replace(message, arena=0, offset=offset)

    def _inline_step(self, shard: int, step: Step, payload: Outgoing) -> Step:
        push: list[Gradient] = []
        for header in step.push:
            offset = payload.add(self._pushed(shard, header))
            push.append(structs.replace(header, arena=0, offset=offset))
        pull = self._inline_reads(shard, step.pull, payload)
        return structs.replace(step, push=tuple(push), pull=pull)

    def _inline_reads(
        self, shard: int, places: Sequence[ReadTarget], payload: Outgoing, exact: bool = False
    ) -> tuple[ReadTarget, ...]:
        """Reads whose values come in the answer's frame, in this order; keys go along.

        Args:
            exact: whether values come as they are kept.
        """
        pull: list[ReadTarget] = []
        end = 0
        for place in places:
            block, keys = self._blocks[place.block], place.keys
            delta = block.delta(shard) if block.pull_codec is not None and not exact else None
            if delta is not None:
                has = self._reader(delta, block, shard).position
                offset = payload.add(has.packed())
                pull.append(structs.replace(place, arena=0, offset=offset))
                continue
            if keys is None:
                low, high = block.range(shard)
                nbytes = (high - low) * (block.kept if exact else block.dtype).itemsize
                if block.pull_codec is not None and not exact:
                    nbytes = block.pull_codec.size(high - low)
            else:
                assert block.table is not None
                codecs, memory = block.row_codecs, self._arenas[keys.arena].memory
                nbytes = 4 * block.table.dim * keys.rows
                lying = memory[keys.offset : keys.offset + 8 * keys.rows]
                if codecs is not None:
                    nbytes = codecs.answer_bytes(keys.rows, exact=type(keys) is ExactKeys)
                    if keys.rows:
                        lying = _coded_keys(codecs, keys, memory)
                keys = structs.replace(keys, arena=0, offset=payload.add(lying))
            pull.append(structs.replace(place, arena=0, offset=end, keys=keys))
            end += -(-nbytes // ALIGN) * ALIGN
        return tuple(pull)

    def _pushed(self, shard: int, header: Gradient) -> Bytes:
        table = self._blocks[header.block].table
        if table is None and header.extent:
            end = header.offset + header.extent
            return self._arenas[header.arena].memory[header.offset : end]
        if table is None:
            return self._part(shard, header.block, header.arena, header.offset)
        extent = header.extent
        nbytes = -extent if extent < 0 else gradient_bytes(extent, table.dim)
        end = header.offset + nbytes
        return self._arenas[header.arena].memory[header.offset : end]

    def _records(self, message: Scan | Put) -> Bytes:
        block = self._blocks[message.block]
        assert block.table is not None
        width = message.width if message.width >= 0 else None
        end = message.offset + records_bytes(message.rows, block.table.dim, width, message.idle)
        return self._arenas[message.arena].memory[message.offset : end]

    def _part(self, shard: int, number: int, arena: int, offset: int) -> Bytes:
        block = self._blocks[number]
        low, high = block.range(shard)
        return self._arenas[arena].memory[offset : offset + (high - low) * block.dtype.itemsize]

    def _kept_part(self, shard: int, number: int, arena: int, offset: int) -> Bytes:
        """Bytes in an arena of values as the servers keep them."""
        block = self._blocks[number]
        low, high = block.range(shard)
        return self._arenas[arena].memory[offset : offset + (high - low) * block.kept.itemsize]

    def read(self, shard: int, link: GivesPayload, request: PendingRequest) -> None:
        """Read the payload of an answer to where its request wants it.

        Raises:
            ProtocolError: it is none that a server sends.
        """
        message = request.message
        if isinstance(message, Step | Read | TakeSnapshot):
            exact = isinstance(message, TakeSnapshot)
            # Loops and `+=`, as in `Steps._prepare`: a small step has few calls.
            placed: list[ReadTarget] = []
            landings: list[Bytes] = []
            changed: list[tuple[ReadTarget, Delta]] = []
            for place in message.pull:
                block = self._blocks[place.block]
                delta = block.delta(shard) if block.pull_codec is not None and not exact else None
                if delta is not None:
                    changed += [(place, delta)]
                else:
                    placed += [place]
                    landings += [self._landing(shard, place, exact)]
            if changed:
                landings += [self._behind(shard, link, landings, changed[0][1])]
            link.read_payload(landings)
            for place, landed in zip(placed, landings, strict=False):
                block = self._blocks[place.block]
                if place.keys is not None:
                    self._spread(place, place.keys, landed)
                elif block.pull_codec is not None and not exact:
                    part = self._part(shard, place.block, place.arena, place.offset)
                    try:
                        _decode(block.pull_codec, block, landed, part)
                    except ValueError as wrong:
                        raise _not_decoded(shard, block.pull_codec, wrong) from None
                    self._count(block, landed.nbytes, part.nbytes)
            if changed:
                self._take_changes(shard, changed, landings[-1])
        elif isinstance(message, Scan):
            link.read_payload([self._records(message)])
        elif isinstance(message, Contains):
            start = message.offset + padded(8 * message.rows)
            memory = self._arenas[message.arena].memory
            link.read_payload([memory[start : start + message.rows]])
        else:
            assert isinstance(message, Fetch)
            number, arena, offset = message.block, message.arena, message.offset
            link.read_payload([self._kept_part(shard, number, arena, offset)])

    def _behind(
        self, shard: int, link: GivesPayload, landings: Sequence[Bytes], delta: Delta
    ) -> Bytes:
        """Memory for what comes behind these parts, whose size only the server knows."""
        rest = link.payload_bytes - sum(padded(each.nbytes) for each in landings)
        if rest < 0:
            lacks = ValueError(f"{link.payload_bytes} bytes came, {-rest} lack")
            raise _not_decoded(shard, delta, lacks)
        return aligned(rest)

    def _take_changes(
        self, shard: int, changed: Sequence[tuple[ReadTarget, Delta]], data: Bytes
    ) -> None:
        """What has changed of values, to where they are wanted; or of none, if a part is wrong."""
        updates: list[tuple[DeltaReader, CopyUpdate]] = []
        at = 0
        for place, delta in changed:
            reader = self._reader(delta, self._blocks[place.block], shard)
            try:
                updates.append((reader, reader.read(data[at:])))
            except ValueError as wrong:
                raise _not_decoded(shard, delta, wrong) from None
            at += padded(updates[-1][1].nbytes)
        if at != data.size:
            more = ValueError(f"its parts have {at} bytes, and {data.size} came")
            raise _not_decoded(shard, changed[0][1], more)
        for (place, _), (reader, update) in zip(changed, updates, strict=True):
            reader.keep(update)
            part = self._part(shard, place.block, place.arena, place.offset)
            _place(self._blocks[place.block], update.values, part)
            self._count(self._blocks[place.block], update.nbytes, part.nbytes)

    def _count(self, block: Block, encoded_bytes: int, plain: int) -> None:
        """Values of a group came encoded, in so many bytes."""
        before = self.read_bytes.get(block.group_name, (0, 0))
        self.read_bytes[block.group_name] = before[0] + encoded_bytes, before[1] + plain

    def _reader(self, delta: Delta, block: Block, shard: int) -> DeltaReader:
        reader = self._readers.get((block.id, shard))
        if reader is None:
            low, high = block.range(shard)
            reader = self._readers[block.id, shard] = DeltaReader(delta, high - low)
        return reader

    def _landing(self, shard: int, place: ReadTarget, exact: bool) -> Bytes:
        """Where the values of a place are read to."""
        block = self._blocks[place.block]
        if place.keys is None and block.pull_codec is not None and not exact:
            low, high = block.range(shard)
            return aligned(block.pull_codec.size(high - low))
        if place.keys is None:
            of = self._kept_part if exact else self._part
            return of(shard, place.block, place.arena, place.offset)
        codecs, table = block.row_codecs, block.table
        if codecs is not None:
            exact = type(place.keys) is ExactKeys
            return aligned(codecs.answer_bytes(place.keys.rows, exact=exact))
        assert table is not None
        return np.empty(4 * table.dim * place.keys.rows, np.uint8)

    def _spread(self, place: ReadTarget, keys: Keys, rows: Bytes) -> None:
        """Rows that came in the order of their keys, to their places."""
        block = self._blocks[place.block]
        table = block.table
        assert table is not None
        if block.row_codecs is not None and type(keys) is not ExactKeys:
            encoded_bytes = rows.nbytes
            rows = _decoded(block.group_name, block.row_codecs, keys.rows, rows)
            self._count(block, encoded_bytes, rows.nbytes)
        _, places = keys_at(self._arenas[keys.arena].memory, keys.offset, keys.rows)
        memory = self._arenas[place.arena].memory
        values = np.frombuffer(memory, np.float32, keys.total * table.dim, place.offset)
        values.reshape(-1, table.dim)[places] = rows.view(np.float32).reshape(-1, table.dim)


def _coded_keys(codecs: RowCodecs, request: Keys, memory: Bytes) -> Bytes:
    """The keys of a read as they travel. They and the places of their rows, which the answer
    follows, are put in that order where they lie."""
    keys, places = keys_at(memory, request.offset, request.rows)
    order = order_of(keys)
    keys[...], places[...] = keys[order], places[order]
    return codecs.encode_request(keys, exact=type(request) is ExactKeys)


def _decoded(table: str, codecs: RowCodecs, count: int, data: Bytes) -> Bytes:
    """Rows that came encoded, as the bytes of float32.

    Raises:
        ProtocolError: they are none.
    """
    rows = np.empty(count * codecs.dim, np.float32)
    try:
        codecs.read_answer(data, rows)
    except ValueError as error:
        raise ProtocolError(
            f"what a server sent as rows of table {table!r} is none: {error}",
            fix="run the same version of paramserve everywhere",
        ) from error
    return rows.view(np.uint8)


def _decode(codec: Codec, block: Block, landed: Bytes, part: Bytes) -> None:
    """Values that came encoded, to where a step reads them."""
    if block.spec.half is None:
        codec.decode(landed, part.view(np.float32))
        return
    values = np.empty(part.size // block.dtype.itemsize, np.float32)
    codec.decode(landed, values)
    _place(block, values, part)


def _place(block: Block, values: Floats, part: Bytes) -> None:
    """Values in float32, to where a step reads them."""
    if block.spec.half is None:
        part.view(np.float32)[...] = values
    else:
        compiled().round_into(part.view(block.dtype), values)


def _not_decoded(shard: int, codec: Codec, wrong: ValueError) -> ProtocolError:
    return ProtocolError(
        f"shard {shard} sent values that {codec.called} cannot decode: {wrong}",
        fix="run the same version of paramserve everywhere",
    )
