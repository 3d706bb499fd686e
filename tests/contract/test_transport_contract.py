"""One suite over all transports: AF_UNIX with arenas, TCP with token, TLS."""

from __future__ import annotations

import contextlib
import gc
import os
import struct
import threading
import time
import warnings

import msgspec
import numpy as np
import pytest
from tests.contract.echo_host import (
    ARENA_BYTES,
    ECHO_BYTES,
    STREAMS,
    WAIT_S,
    Host,
    MakeHost,
    assert_ends,
    open_fds,
    ping,
    read_parts,
    receive,
    refusal_before_the_end,
    send_parts,
)
from tests.contract.role_cluster import wait_until
from tests.suites import each_case

from paramserve.config import Limits
from paramserve.errors import (
    ClientClosed,
    ProtocolError,
    WorkerFenced,
)
from paramserve.messages import Hello, Refused
from paramserve.transport.arena import Arena
from paramserve.transport.framing import prelude
from paramserve.transport.link import Link


@pytest.fixture(params=STREAMS)
def host(request: pytest.FixtureRequest, make_host: MakeHost) -> Host:
    return make_host(request.param)


def test_frame_comes_back(host: Host) -> None:
    link = host.connect(Hello("client", client=5, incarnation=2, rank=3))
    ping(link)
    assert link.payload_bytes == 0
    hello = host.handler.opened_by[0]
    assert (hello.role, hello.client, hello.incarnation, hello.rank) == ("client", 5, 2, 3)
    link.close()
    link.close()
    host.handler.wait(lambda: host.handler.closed_by == [5])


def test_receive_without_a_frame_returns_none(host: Host) -> None:
    link = host.connect()
    assert link.receive(0) is None
    assert link.receive(0.01) is None
    ping(link)
    link.close()


def test_many_frames_in_flight_come_back_in_order(host: Host) -> None:
    link = host.connect()
    expected = [b"%d" % i * (i % 50 + 1) for i in range(2000)]
    for header in expected:
        link.send(header)
    assert [receive(link) for _ in expected] == expected
    link.close()


@each_case("sizes", [(1,), (63, 64, 65), (3_000_001, 0, 5), (20_000_000,), (1,) * 3000])
def test_runs_come_back_whole(host: Host, sizes: tuple[int, ...]) -> None:
    link = host.connect()
    random = np.random.default_rng(0)
    parts = [random.integers(0, 256, size, np.uint8) for size in sizes]
    for header in (b"one", b"two"):
        send_parts(link, header, parts)
    for header in (b"one", b"two"):
        assert receive(link) == header
        assert link.payload_bytes == sum(sizes)
        found = read_parts(link, sizes)
        assert all(np.array_equal(a, b) for a, b in zip(parts, found, strict=True))
    ping(link)
    link.close()


def test_payload_can_be_skipped(host: Host) -> None:
    link = host.connect()
    send_parts(link, b"one", [np.ones(3_000_000, np.uint8)])
    link.send(b"two")
    assert receive(link) == b"one"
    link.skip_payload()
    assert receive(link) == b"two"
    link.close()


def test_payload_must_be_read_before_the_next_frame(host: Host) -> None:
    link = host.connect()
    send_parts(link, b"one", [np.ones(100, np.uint8)])
    receive(link)
    with pytest.raises(RuntimeError, match="read or skip"):
        link.receive(0)
    assert read_parts(link, [100])[0].all()
    ping(link)
    link.close()


def test_memory_may_change_after_send_returns(host: Host) -> None:
    link = host.connect()
    send_parts(link, b"x", [np.full(1_000_000, 1, np.uint8)])
    link.arenas[1].fill(2)
    receive(link)
    assert (read_parts(link, [1_000_000])[0] == 1).all()
    link.close()


BAD_RUNS = {
    "no such arena": ([(2, 0, 1)], 1, "offset 0 of arena 2, which has 0 bytes"),
    "behind its end": ([(1, ECHO_BYTES, 1)], 1, f"which has {ECHO_BYTES} bytes"),
    "over its end": ([(1, ECHO_BYTES - 1, 2)], 2, f"which has {ECHO_BYTES} bytes"),
    "far behind": ([(1, (1 << 64) - 1, 1)], 1, f"which has {ECHO_BYTES} bytes"),
    "too many bytes": ([(1, 0, 3)], 2, "do not name the 2 bytes"),
    "too few bytes": ([(1, 0, 3)], 4, "do not name the 4 bytes"),
    "second one bad": ([(1, 0, 1), (1, ECHO_BYTES, 1)], 2, f"which has {ECHO_BYTES} bytes"),
    "none": ([], 1, "do not name the 1 bytes"),
}


@each_case("kind", STREAMS)
def test_runs_that_are_none_are_cut_off_before_a_byte_is_taken(
    make_host: MakeHost, kind: str
) -> None:
    host = make_host(kind)
    other = host.connect(Hello("client", client=2))
    for runs, payload_bytes, words in BAD_RUNS.values():
        sock = host.known(client=3)
        table = b"".join(struct.pack("<QQQ", *run) for run in runs)
        header = b"over" + table + struct.pack("<I", len(runs))
        sock.sendall(prelude(len(header), payload_bytes) + header)
        assert words in refusal_before_the_end(sock).failed
    sock = host.known(client=3)
    sock.sendall(prelude(8, 1) + b"over" + struct.pack("<I", 1 << 31))
    assert "do not name the 1 bytes" in refusal_before_the_end(sock).failed
    sock = host.known(client=3)
    sock.sendall(prelude(3, 1) + b"ove")
    assert "do not name the 1 bytes" in refusal_before_the_end(sock).failed
    assert host.handler.headers == []
    ping(other)
    other.close()


@each_case("kind", STREAMS)
def test_payload_that_never_ends_holds_up_only_its_own_connection(
    make_host: MakeHost, kind: str
) -> None:
    host = make_host(kind)
    other = host.connect(Hello("client", client=2))
    sock = host.known()
    header = b"over" + struct.pack("<QQQI", 1, 0, 1_000_000, 1)
    sock.sendall(prelude(len(header), 1_000_000) + header + bytes(500_000))
    ping(other)
    sock.close()
    host.handler.wait(lambda: host.handler.closed_by == [1])
    assert host.handler.headers == [b"ping"]
    other.close()


def test_what_is_sent_while_opening_arrives_first(host: Host) -> None:
    link = host.connect(Hello("client", rank=77))
    assert receive(link) == b"sent while opening"
    assert read_parts(link, [3])[0].tolist() == [0, 1, 2]
    link.close()


def test_handlers_refusal_is_raised_by_connect(host: Host) -> None:
    before = open_fds()
    with pytest.raises(WorkerFenced, match="takes no servers"):
        host.connect(Hello("server"))
    wait_until(lambda: open_fds() <= before)  # an earlier test's may end here
    assert (host.handler.opened_by, host.handler.closed_by) == ([], [])


def test_arenas_are_shared_where_memory_can_be(host: Host) -> None:
    arenas = [Arena.create(ARENA_BYTES, number) for number in (1, 2)]
    arenas[0].memory[:] = 21
    link = host.connect(arenas=arenas)
    assert link.shared is host.shares_memory
    if link.shared:
        link.send(b"double 1")
        assert receive(link) == b"doubled"
        assert (arenas[0].memory == 42).all()
    else:
        assert host.handler.opened_by[0].arenas == ()
    link.close()
    for arena in arenas:
        arena.close()


def test_one_more_arena_can_be_attached(host: Host) -> None:
    first, second = Arena.create(ARENA_BYTES, 1), Arena.create(2 * ARENA_BYTES, 2)
    link = host.connect(Hello("client", client=4, incarnation=6), arenas=[first])
    if not host.shares_memory:
        with pytest.raises(ValueError, match="shares no memory"):
            link.attach(second, timeout_s=WAIT_S)
    else:
        link.attach(second, timeout_s=WAIT_S)
        hello = host.handler.opened_by[1]
        assert (hello.role, hello.client, hello.incarnation) == ("attach", 4, 6)
        assert hello.arenas == ((2, 2 * ARENA_BYTES),)
        host.handler.wait(lambda: host.handler.closed_by == [4])
    ping(link)
    link.close()
    first.close()
    second.close()


def test_client_can_come_back(host: Host) -> None:
    for attempt in range(5):
        link = host.connect(Hello("client", client=attempt))
        ping(link)
        link.close()
    host.handler.wait(lambda: sorted(host.handler.closed_by) == list(range(5)))


def test_several_clients_do_not_disturb_each_other(host: Host) -> None:
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            link = host.connect(Hello("client", client=number))
            data = np.full(100_000, number, np.uint8)
            for i in range(50):
                ping(link, b"%d %d" % (number, i))
                send_parts(link, b"payload", [data])
                assert receive(link) == b"payload"
                assert (read_parts(link, [100_000])[0] == number).all()
            link.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert failures == []
    host.handler.wait(lambda: len(host.handler.closed_by) == 6)


def test_header_over_the_limit_is_not_sent(make_host: MakeHost, host: Host) -> None:
    limits = Limits(header_bytes_max=1000)
    link = host.connect(limits=limits)
    with pytest.raises(ProtocolError, match="1001 bytes was not sent, the limit is 1000"):
        link.send(bytes(1001))
    ping(link, bytes(1000))
    link.close()


@each_case("kind", STREAMS)
def test_payload_over_the_limit_is_cut_off_with_a_reason(make_host: MakeHost, kind: str) -> None:
    host = make_host(kind, Limits(payload_bytes_max=1024))
    link, other = host.connect(), host.connect(Hello("client", client=2))
    send_parts(link, b"just", [np.zeros(1024, np.uint8)])
    receive(link)
    link.skip_payload()
    send_parts(link, b"over", [np.zeros(1025, np.uint8)])
    with contextlib.suppress(ConnectionResetError):
        reason = msgspec.msgpack.decode(receive(link), type=Refused)
        assert "1025 bytes, the limit is 1024" in reason.failed
    assert_ends(link)
    assert not any(each.startswith(b"over") for each in host.handler.headers)
    ping(other)
    other.close()


def test_header_that_is_not_valid_is_cut_off_with_a_reason(host: Host) -> None:
    link, other = host.connect(), host.connect(Hello("client", client=2))
    link.send(b"decode \xc1\xc1garbage")
    (reason,) = assert_ends(link)
    refused = msgspec.msgpack.decode(reason, type=Refused)
    assert (refused.seq, refused.kind, refused.applied) == (0, "ProtocolError", "no")
    host.handler.wait(lambda: host.handler.closed_by == [1])
    ping(other)
    other.close()


def test_connection_closed_by_the_handler_ends_the_link(host: Host) -> None:
    link = host.connect()
    link.send(b"leave")
    assert assert_ends(link) == []
    host.handler.wait(lambda: host.handler.closed_by == [1])


@each_case("kind", STREAMS)
def test_reader_that_leaves_more_than_it_can_have_asked_for_is_cut_off_and_others_are_served(
    make_host: MakeHost, kind: str
) -> None:
    limits = Limits(send_buffer_bytes_max=1 << 16, outstanding_max=50)
    host = make_host(kind, limits)
    slow, other = host.connect(), host.connect(Hello("client", client=2))
    slow.send(b"flood 1000000")
    host.handler.wait(lambda: host.handler.closed_by == [1])
    ping(other)
    assert len(assert_ends(slow)) < 100
    other.close()


@each_case("kind", STREAMS)
def test_reply_over_the_send_buffer_reaches_a_peer_that_reads(
    make_host: MakeHost, kind: str
) -> None:
    host = make_host(kind, Limits(send_buffer_bytes_max=1 << 16))
    link = host.connect()
    send_parts(link, b"big", [np.zeros(10_000_000, np.uint8)])
    assert receive(link) == b"big"
    link.skip_payload()
    ping(link)
    link.close()


@each_case("kind", STREAMS)
def test_link_that_was_broken_off_is_of_no_use_and_stays_open_if_it_is_to(
    make_host: MakeHost, kind: str
) -> None:
    host = make_host(kind)
    kept, ended, other = (host.connect(Hello("client", client=number)) for number in (1, 2, 3))
    assert isinstance(kept, Link)
    assert isinstance(ended, Link)
    kept.keep_open()
    for link in (kept, ended):
        ping(link)
        link._break_off()
        for use in (lambda link=link: link.send(b"x"), lambda link=link: link.receive(0)):
            with pytest.raises(ConnectionError, match="was broken off"):
                use()
        assert link.fileno() == -1
    host.handler.wait(lambda: host.handler.closed_by == [2])
    ping(other)
    assert host.handler.closed_by == [2]
    kept.close()
    host.handler.wait(lambda: host.handler.closed_by == [2, 1])
    other.close()


def test_listener_that_closes_ends_its_connections(host: Host) -> None:
    link = host.connect()
    ping(link)
    host.close()
    assert assert_ends(link) == []


def test_use_after_close_is_client_closed(host: Host) -> None:
    link = host.connect()
    link.close()
    for use in (lambda: link.send(b"x"), lambda: link.receive(0)):
        with pytest.raises(ClientClosed, match="was closed here"):
            use()


def test_close_wakes_a_thread_that_receives(host: Host) -> None:
    link = host.connect()
    seen: list[BaseException] = []
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        try:
            link.receive(6 * WAIT_S)
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    waiting.wait(WAIT_S)
    time.sleep(0.02)
    link.close()
    thread.join(WAIT_S)
    assert [type(error) for error in seen] == [ClientClosed]


def test_forked_child_is_told_to_connect_anew_and_the_parent_goes_on(host: Host) -> None:
    link = host.connect()
    descriptor = link.fileno()
    ping(link)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork beside threads
        child = os.fork()
    if not child:
        status = 1
        with contextlib.suppress(BaseException):
            status = child_is_kept_out(link, descriptor)
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ping(link)
    assert host.handler.closed_by == []
    link.close()


def child_is_kept_out(link: Link, descriptor: int) -> int:
    for status, use in ((2, lambda: link.send(b"x")), (3, lambda: link.receive(0))):
        try:
            use()
            return status
        except ClientClosed as error:
            if "connect anew in the child" not in str(error):
                return 4
    with contextlib.suppress(OSError):
        os.fstat(descriptor)
        return 5
    link.close()
    return 0


def test_closed_connections_leave_no_descriptor(host: Host) -> None:
    host.connect().close()
    host.handler.wait(lambda: len(host.handler.closed_by) == 1)
    gc.collect()
    before = open_fds()
    for number in range(10):
        arenas = [Arena.create(ARENA_BYTES, n) for n in (1, 2)]
        link = host.connect(Hello("client", client=number), arenas=arenas)
        ping(link)
        if link.shared:
            more = Arena.create(ARENA_BYTES, 3)
            link.attach(more, timeout_s=WAIT_S)
            more.close()
            del more
        if number % 2:
            link.send(b"decode garbage")
            assert_ends(link)
        link.close()
        for arena in arenas:
            arena.close()
    del link, arenas, arena

    def back() -> bool:
        gc.collect()
        return open_fds() == before

    wait_until(back)
