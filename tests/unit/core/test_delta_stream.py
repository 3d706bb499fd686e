"""Values that are pulled as what has changed: server and readers have the same, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.suites import each_case

from paramserve.codecs import BFloat16, Codec, Delta, Int4, Int8, RandomK, Sign, TopK
from paramserve.compiling import load_codecs, load_kernels
from paramserve.core.delta_stream import (
    DELTAS_MAX,
    HEAD_BYTES,
    LENGTH_BYTES,
    WHOLE,
    DeltaReader,
    DeltaStream,
    Position,
)
from paramserve.core.request_memory import aligned

SIZE = 700


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    """Other tests of this process may have closed them to types that are not loaded."""
    load_codecs()
    load_kernels(np.dtype("float32"))


INT4 = Int4()
CODECS: list[Codec] = [
    *(BFloat16(), Int8(), Int4(), Int4(rounding="stochastic"), Sign(32)),
    *(TopK(0.05), RandomK(0.1), TopK(0.1) | Int4(8)),
]
FINE: list[Codec] = [BFloat16(), Int8(), Int4(), Int4(rounding="stochastic")]


class Source:
    """Values that change, and their stream."""

    def __init__(self, codec: Codec = INT4, size: int = SIZE, first: int = 1) -> None:
        self.codec = Delta(codec)
        self.drawn = np.random.default_rng(1)
        self.values = self.drawn.normal(size=size).astype(np.float32)
        self.revision = 0
        self.ids: Iterator[int] = count(first)
        self.stream = DeltaStream(self.codec, size, self.ids)

    def change(self, scale: float = 0.1) -> None:
        self.values += scale * self.drawn.normal(size=self.values.size).astype(np.float32)
        self.revision += 1

    def answer(self, reader: DeltaReader | Position) -> Any:
        has = reader if isinstance(reader, Position) else reader.position
        assert self.stream.why_not(has) is None
        return self.stream.answer(self.values, self.revision, has)

    @property
    def reference(self) -> Any:
        return self.stream.reference(self.values, self.revision)

    def reader(self) -> DeltaReader:
        return DeltaReader(self.codec, self.values.size)


def copy_of(reader: DeltaReader) -> Any:
    assert reader._has is not None
    return reader._has[1]


def follow(source: Source, reader: DeltaReader) -> int:
    """Let a reader read; the bytes of the answer."""
    part = source.answer(reader)
    taken = reader.read(part)
    assert taken.nbytes == part.size
    reader.keep(taken)
    assert copy_of(reader).tobytes() == source.reference.tobytes()
    assert reader.position == source.stream.position
    return int(part.size)


@each_case("codec", CODECS, ids=repr)
def test_readers_have_the_reference_bit_by_bit(codec: Codec) -> None:
    """Readers that come late, read again, miss some, and lose what they have."""
    source, random = Source(codec), Random(1)
    readers = [source.reader() for _ in range(4)]
    for _ in range(80):
        if random.random() < 0.7:
            source.change()
        chosen = random.randrange(len(readers))
        if random.random() < 0.1:
            readers[chosen] = source.reader()
        follow(source, readers[chosen])


def test_first_read_is_exact() -> None:
    source = Source()
    reader = source.reader()
    assert follow(source, reader) == HEAD_BYTES + 4 * SIZE
    np.testing.assert_array_equal(copy_of(reader), source.values)
    assert follow(source, reader) == HEAD_BYTES, "nothing has changed"


@each_case("codec", FINE, ids=repr)
def test_what_one_delta_leaves_out_is_in_the_next_ones(codec: Codec) -> None:
    """So the values of readers stay as close, over any number of deltas, and come ever closer where
    the values do not change any more."""
    source = Source(codec)
    reader = source.reader()
    follow(source, reader)
    for _ in range(200):
        source.change()
        follow(source, reader)
    off = np.abs(copy_of(reader) - source.values).max()
    assert off < 0.1
    for _ in range(4):
        source.revision += 1
        follow(source, reader)
    assert np.abs(copy_of(reader) - source.values).max() < 0.1 * off + 1e-6


@each_case("codec", [TopK(0.05), RandomK(0.1), Sign(32)], ids=repr)
def test_what_is_left_out_comes_in_the_end_with_codecs_that_choose(codec: Codec) -> None:
    source = Source(codec)
    reader = source.reader()
    follow(source, reader)
    source.change(1.0)
    follow(source, reader)
    before = np.linalg.norm(copy_of(reader) - source.values)
    for _ in range(60):
        source.revision += 1
        follow(source, reader)
    assert np.linalg.norm(copy_of(reader) - source.values) < 0.1 * before


def test_one_encode_serves_all_readers_of_a_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    encode = Int4.encode

    def counted(*given: Any) -> int:
        calls.append(given)
        return encode(*given)

    monkeypatch.setattr(Int4, "encode", counted)
    source = Source()
    readers = [source.reader() for _ in range(5)]
    for _ in range(3):
        source.change()
        for reader in readers:
            follow(source, reader)
    assert len(calls) == 2, "the first read begins the stream"


@each_case("codec", [Int4(256), TopK(0.01) | Int4()], ids=repr)
def test_reader_that_is_behind_gets_what_takes_fewer_bytes(codec: Codec) -> None:
    source = Source(codec, size=4096)
    delta = LENGTH_BYTES + -(-codec.size(4096) // 8) * 8
    ahead, behind = source.reader(), source.reader()
    follow(source, behind)
    kept = min(DELTAS_MAX, 4 * 4096 // delta) if codec.fixed else DELTAS_MAX
    for number in range(1, kept + 3):
        source.change()
        follow(source, ahead)
        nbytes = source.answer(behind.position).size
        if number > kept:
            assert nbytes == HEAD_BYTES + 4 * 4096
        elif codec.fixed:
            assert nbytes == HEAD_BYTES + number * delta
        assert nbytes <= HEAD_BYTES + 4 * 4096
        assert len(source.stream._deltas) == min(number, kept)
        assert source.stream._kept_bytes <= 4 * 4096
    follow(source, behind)


def test_reader_of_another_stream_or_of_none_gets_all() -> None:
    source, other = Source(), Source(first=50)
    reader = other.reader()
    for _ in range(3):
        other.change()
        follow(other, reader)
        source.change()
        follow(source, source.reader())
    assert reader.position.number == source.stream.position.number
    assert follow(source, reader) == HEAD_BYTES + 4 * SIZE


@each_case("wrong", [np.nan, np.inf, 3e38])
def test_values_without_a_finite_change_begin_a_stream(wrong: float) -> None:
    source = Source()
    reader = source.reader()
    source.values[3] = -3e38
    follow(source, reader)
    first = source.stream.position
    source.values[3] = wrong
    source.revision += 1
    assert follow(source, reader) == HEAD_BYTES + 4 * SIZE
    assert source.stream.position == (first.stream + 1, 0)
    np.testing.assert_array_equal(copy_of(reader), source.values)
    source.values[3] = 1.0
    source.revision += 1
    follow(source, reader)


def test_answers_that_were_asked_for_before_others_came_are_of_use() -> None:
    """Two requests say the same, since neither was answered; and one answer comes twice."""
    source = Source()
    reader = source.reader()
    follow(source, reader)
    has = reader.position
    source.change()
    first = source.answer(has)
    source.change()
    second = source.answer(has)
    for part in (first, second):
        reader.keep(reader.read(part))
    assert copy_of(reader).tobytes() == source.reference.tobytes()
    before = copy_of(reader).copy()
    for part in (first, second):  # again, or one that another has overtaken
        reader.keep(reader.read(part))
        assert copy_of(reader).tobytes() == before.tobytes()
        assert reader.position == source.stream.position


def test_answer_that_is_read_and_not_kept_changes_nothing() -> None:
    """Its reading was interrupted: it comes again."""
    source = Source()
    reader = source.reader()
    follow(source, reader)
    for _ in range(3):
        source.change()
        before, has = copy_of(reader).copy(), reader.position
        reader.read(source.answer(reader))
        assert copy_of(reader).tobytes() == before.tobytes()
        assert reader.position == has
        follow(source, reader)


def test_reader_cannot_have_what_was_not_told() -> None:
    source = Source()
    follow(source, source.reader())
    stream, number = source.stream.position
    for has in ((stream, number + 1), (-1, 0), (stream, -1)):
        assert source.stream.why_not(Position(*has)) is not None
    for good in ((stream, number), (0, 0), (stream + 9, 12)):
        assert source.stream.why_not(Position(*good)) is None


def changed(part: Any, word: int, value: int) -> Any:
    out = aligned(part.size)
    out[...] = part
    out[: 8 * (word + 1)].view(np.int64)[word] = value
    return out


def is_refused(reader: DeltaReader, part: Any) -> bool:
    try:
        reader.read(part)
    except ValueError:
        return True
    return False


def test_bad_parts_are_refused_whole() -> None:
    source = Source()
    reader = source.reader()
    follow(source, source.reader())
    with pytest.raises(ValueError, match="nothing was there"):
        reader.read(source.answer(source.stream.position))
    for _ in range(4):
        follow(source, reader)
        source.change()
    before, (stream, number) = copy_of(reader).copy(), reader.position
    part = source.answer(reader)
    scale = np.nan
    spoiled = changed(part, 0, stream)
    spoiled[HEAD_BYTES + LENGTH_BYTES :][:4].view(np.float32)[0] = scale
    bad = {
        "another stream": changed(part, 0, stream + 1),
        "no stream": changed(part, 0, 0),
        "from the future": changed(changed(part, 1, number + 1), 2, number + 2),
        "backwards": changed(part, 2, number - 1),
        "before the first": changed(part, 1, -2),
        "more than came": changed(part, 2, number + 2),
        "too many": changed(part, 2, number + DELTAS_MAX + 1),
        "another length": changed(part, 3, Int4().size(SIZE) - 8),
        "too long": changed(part, 3, 1 << 40),
        "negative": changed(part, 3, -8),
        "cut": part[:-8],
        "no head": part[: HEAD_BYTES - 8],
        "not whole": changed(part, 1, WHOLE),
        "a scale that is none": spoiled,
    }
    for what, data in bad.items():
        assert is_refused(reader, data), what
        assert copy_of(reader).tobytes() == before.tobytes(), what
        assert reader.position == (stream, number), what
    reader.keep(reader.read(part))
    assert copy_of(reader).tobytes() == source.reference.tobytes()


def test_parts_of_random_bytes_are_refused_or_read() -> None:
    """What a peer has made up raises `ValueError` and nothing else, and the copy stays."""
    source, drawn = Source(), np.random.default_rng(2)
    reader = source.reader()
    follow(source, reader)
    source.change()
    part, before = source.answer(reader), copy_of(reader).copy()
    refused = 0
    for _ in range(400):
        data = aligned(int(drawn.integers(0, part.size + 200)) // 8 * 8)
        data[...] = 0
        data[: part.size] = part[: data.size]
        for at in drawn.integers(0, data.size, 3) if data.size else ():
            data[at % 40 if drawn.random() < 0.7 else at] = drawn.integers(256)
        refused += is_refused(reader, data)
        assert copy_of(reader).tobytes() == before.tobytes()
    assert 100 < refused < 400, refused
