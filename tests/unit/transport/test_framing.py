"""Frames as bytes: what is refused, and that a stream may be cut anywhere."""

from __future__ import annotations

import struct
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.suites import each_case

from paramserve.errors import ProtocolError
from paramserve.messages import PROTOCOL_VERSION
from paramserve.transport import framing
from paramserve.transport.framing import BUFFER_BYTES, FrameReader

HEADER_MAX = 200_000
PAYLOAD_MAX = 1 << 20


def raw_prelude(
    magic: bytes = b"PSRV",
    version: int = PROTOCOL_VERSION,
    zero: int = 0,
    header: int = 0,
    payload: int = 0,
) -> bytes:
    """The layout written down a second time, field by field."""
    return magic + struct.pack("<HHIQ", version, zero, header, payload)


def framed(header: bytes, payload: bytes) -> bytes:
    """A frame whose payload is two runs, the layout written down a second time."""
    if payload:
        half = len(payload) // 2
        runs = [(3, 64, half), (1, 0, len(payload) - half)]
        header += b"".join(struct.pack("<QQQ", *run) for run in runs) + struct.pack("<I", 2)
    return raw_prelude(header=len(header), payload=len(payload)) + header + payload


def parse(data: bytes) -> tuple[int, int]:
    return framing.parse_prelude(data, header_max=HEADER_MAX, payload_max=PAYLOAD_MAX)


def read_all(stream: bytes, cuts: list[int]) -> list[tuple[bytes, bytes]]:
    """All frames of a stream that arrives in pieces of these sizes, over and over."""
    reader = FrameReader(HEADER_MAX, PAYLOAD_MAX)
    frames: list[tuple[bytes, bytes]] = []
    payload = bytearray()
    missing = 0
    header = b""
    position = turn = 0
    while position < len(stream):
        room = reader.space()
        size = min(len(room), cuts[turn % len(cuts)], len(stream) - position)
        assert size > 0
        room[:size] = stream[position : position + size]
        position += size
        turn += 1
        reader.more(size)
        while True:
            if missing:
                part = bytearray(missing)
                rest = deque([memoryview(part)])
                reader.place(rest)
                left = sum(map(len, rest))
                payload += part[: missing - left]
                missing = left
                if missing:
                    break
                frames.append((header, bytes(payload)))
            found = reader.next()
            if found is None:
                break
            header, missing, payload = found, reader.payload_bytes, bytearray()
            if not missing:
                frames.append((header, b""))
    return frames


def test_prelude_has_the_documented_layout() -> None:
    assert framing.prelude(60, 1 << 40) == raw_prelude(header=60, payload=1 << 40)
    assert framing.PRELUDE_BYTES == 20


def test_parse_prelude_at_the_limits_is_accepted() -> None:
    assert parse(raw_prelude(header=HEADER_MAX, payload=PAYLOAD_MAX)) == (HEADER_MAX, PAYLOAD_MAX)


@each_case(
    ("data", "says"),
    [
        (raw_prelude(magic=b"GET "), "starts with b'GET '"),
        (raw_prelude(version=PROTOCOL_VERSION + 1), f"version {PROTOCOL_VERSION + 1}, this"),
        (raw_prelude(zero=7), "7 in a field that must be 0"),
        (raw_prelude(header=HEADER_MAX + 1), "header of 200001 bytes, the limit is 200000"),
        (raw_prelude(payload=PAYLOAD_MAX + 1), "payload of 1048577 bytes, the limit is 1048576"),
    ],
)
def test_prelude_that_is_not_allowed_is_refused_by_both_readers(data: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        parse(data)
    reader = FrameReader(HEADER_MAX, PAYLOAD_MAX)
    reader.space()[: len(data)] = data
    with pytest.raises(ProtocolError, match=says):
        reader.filled(len(data))


frames_strategy = st.lists(
    st.tuples(st.binary(max_size=90), st.binary(max_size=400)), min_size=1, max_size=12
)


@given(frames=frames_strategy, cuts=st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_stream_cut_anywhere_gives_the_same_frames(
    frames: list[tuple[bytes, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(framed(h, p) for h, p in frames)
    assert read_all(stream, cuts) == frames


@each_case("cut", [1 << 12, BUFFER_BYTES, 1 << 30])
def test_headers_longer_than_the_buffer_pass_among_short_ones(cut: int) -> None:
    sizes = [5, 150_000, 7, BUFFER_BYTES - 20, BUFFER_BYTES - 19, 3, HEADER_MAX - 52, 1]
    frames = [(bytes([i]) * size, b"p" * (i * 100)) for i, size in enumerate(sizes)]
    stream = b"".join(framed(h, p) for h, p in frames)
    assert read_all(stream, [cut]) == frames


@given(
    frames=frames_strategy,
    left=st.integers(1, 400),
    cuts=st.lists(st.integers(1, 99), min_size=1, max_size=4),
)
def test_truncated_stream_gives_only_whole_frames(
    frames: list[tuple[bytes, bytes]], left: int, cuts: list[int]
) -> None:
    stream = b"".join(framed(h, p) for h, p in frames)
    found = read_all(stream[: max(len(stream) - left, 0)], cuts)
    assert found == frames[: len(found)]
    assert len(found) < len(frames)


@given(data=st.binary(min_size=1, max_size=300), cuts=st.lists(st.integers(1, 50), min_size=1))
def test_random_bytes_are_refused_or_wait_for_more(data: bytes, cuts: list[int]) -> None:
    if data[:4] == b"PSRV"[: len(data)]:
        return
    if len(data) >= framing.PRELUDE_BYTES:
        with pytest.raises(ProtocolError):
            read_all(data, cuts)
    else:
        assert read_all(data, cuts) == []


@given(data=st.binary(min_size=14, max_size=14), tail=st.binary(max_size=60))
def test_random_sizes_never_make_the_reader_hold_more_than_its_limit(
    data: bytes, tail: bytes
) -> None:
    reader = FrameReader(HEADER_MAX, PAYLOAD_MAX)
    stream = b"PSRV" + struct.pack("<H", PROTOCOL_VERSION) + data + tail
    reader.space()[: len(stream)] = stream
    try:
        reader.filled(len(stream))
    except ProtocolError:
        return
    assert len(reader.space()) <= max(HEADER_MAX + framing.PRELUDE_BYTES, BUFFER_BYTES)
    assert reader.payload_bytes <= PAYLOAD_MAX


@given(runs=st.lists(st.tuples(st.integers(1, 2), st.integers(0, 50), st.integers(0, 50))))
def test_runs_come_back_as_they_were_framed(runs: list[tuple[int, int, int]]) -> None:
    arenas = {1: np.arange(100, dtype=np.uint8), 2: np.arange(100, 200, dtype=np.uint8)}
    views, size = framing.framed(b"header", runs, arenas)
    data = b"".join(views)
    assert len(data) == size
    assert all(len(view) for view in views)
    reader = FrameReader(HEADER_MAX, PAYLOAD_MAX)
    reader.space()[:size] = data
    assert reader.filled(size) == b"header"
    sent = tuple(run for run in runs if run[2])
    assert (reader.runs if sent else ()) == sent
    assert reader.payload_bytes == sum(run[2] for run in runs)
    found = {number: np.zeros(100, np.uint8) for number in arenas}
    rest = framing.located(sent, found)
    reader.place(rest)
    assert not rest
    for arena, start, nbytes in runs:
        run = np.s_[start : start + nbytes]
        assert found[arena][run].tobytes() == arenas[arena][run].tobytes()


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=9), data=st.data())
def test_drop_leaves_what_was_not_sent(sizes: list[int], data: st.DataObject) -> None:
    parts = [bytes([i]) * size for i, size in enumerate(sizes)]
    count = data.draw(st.integers(0, sum(sizes)))
    views = deque(map(memoryview, parts))
    framing.drop(views, count)
    assert b"".join(views) == b"".join(parts)[count:]
    assert all(len(view) for view in views)
