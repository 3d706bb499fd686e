"""Bugs that delta streams could have, each as a small change of a server's end or a reader's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

import pytest
from tests.sim.workloads.delta_pulls import WatchedStream

from paramserve.core.block import ShardBlock
from paramserve.core.delta_stream import CopyUpdate, DeltaReader, DeltaStream, Position


def _reads_as_if_it_had(
    monkeypatch: pytest.MonkeyPatch, number: Callable[[Position, int, Position], int]
) -> None:
    """Deltas are added to the copy as if that had another number.

    Args:
        number: which one, by what it has, from where the answer goes on, and what it leads to.
    """
    own = DeltaReader._read_deltas

    def read(reader: DeltaReader, position: Position, first: int, data: Any) -> CopyUpdate:
        before = reader._has
        if before is not None and before[0].stream == position.stream:
            has = number(before[0], first, position)
            reader._has = before[0]._replace(number=has), before[1]
        try:
            return own(reader, position, first, data)
        finally:
            reader._has = before

    monkeypatch.setattr(DeltaReader, "_read_deltas", read)


def delta_added_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader adds all deltas of an answer, also those that an earlier answer has had."""
    _reads_as_if_it_had(monkeypatch, lambda has, first, position: first)


def delta_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that needs several deltas leaves out the first one."""

    def number(has: Position, first: int, position: Position) -> int:
        return has.number + 1 if position.number > has.number + 1 else has.number

    _reads_as_if_it_had(monkeypatch, number)


def deltas_of_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that is begun anew has the id of the one before."""
    begin = WatchedStream.__init__

    def same(stream: WatchedStream, codec: Any, size: int, streams: Any, *rest: Any) -> None:
        begin(stream, codec, size, repeat(next(streams)), *rest)

    monkeypatch.setattr(WatchedStream, "__init__", same)


def server_goes_by_what_it_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server takes all readers to have what it sent last, whatever they say; and a reader does
    not look from where an answer goes on."""
    own = DeltaStream.answer
    sent: dict[int, Position] = {}

    def answer(stream: DeltaStream, values: Any, revision: int, has: Position) -> Any:
        believed = sent.get(id(stream), has) if has.stream else has
        part = own(stream, values, revision, believed)
        sent[id(stream)] = stream.position
        return part

    monkeypatch.setattr(DeltaStream, "answer", answer)
    _reads_as_if_it_had(monkeypatch, lambda has, first, position: first)


def change_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An applied gradient leaves the revision of the values as it was."""
    own = ShardBlock.apply

    def apply(block: ShardBlock, *given: Any) -> None:
        before = block.revision
        own(block, *given)
        block.revision = before

    monkeypatch.setattr(ShardBlock, "apply", apply)


def interrupted_reading_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader writes to its copy before it is certain that the answer is taken."""
    own = DeltaReader._read_deltas

    def read(reader: DeltaReader, position: Position, first: int, data: Any) -> CopyUpdate:
        taken = own(reader, position, first, data)
        assert reader._has is not None
        if taken.values is not reader._has[1] and position.number % 2:
            reader._has[1][...] = taken.values
            return taken._replace(position=reader._has[0])
        return taken

    monkeypatch.setattr(DeltaReader, "_read_deltas", read)


ALL: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    delta_added_twice,
    delta_skipped,
    deltas_of_another_stream,
    server_goes_by_what_it_sent,
    change_is_not_counted,
    interrupted_reading_counts,
)
