"""Tables with codecs over one and two shards: what travels, what arrives, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.contract.conftest import MakeCluster
from tests.contract.on_wire import runs_sent
from tests.contract.table_model import server_of
from tests.contract.test_tables_links import PATIENT, Cuts
from tests.suites import each_case
from tests.unit.codecs import reference

from paramserve.checkpoint.folder import Folder
from paramserve.checkpoint.storage import LocalFolder
from paramserve.client import Client, Table
from paramserve.client.rows import TablePush
from paramserve.codecs import BFloat16, Codec, Float16, Int2, Int4, Int8, Sign, TopK
from paramserve.codecs.registry import spec
from paramserve.compiling import load_codecs
from paramserve.config import CheckpointPlan
from paramserve.consistency.built_in import Async, Sync
from paramserve.core.table.encoded import RowCodecs
from paramserve.core.table.options import LRU, MinCount, Normal, Zeros
from paramserve.errors import (
    CodecMismatch,
    DefineMismatch,
    NonFinite,
    ParamServeError,
    ShapeMismatch,
)
from paramserve.launch.reading import Reader
from paramserve.messages import Gradient, Keys, ReadTarget, Step, encode
from paramserve.rules import SGD, Adagrad, Add
from paramserve.worker import Worker

pytestmark = pytest.mark.usefixtures("tables_ready")

Floats = npt.NDArray[np.float32]

DIM = 20
PUSHES: list[Codec] = [BFloat16(), Float16(100.0), Int8(), Int8(8), Int4(), Int2(), Sign(8)]
PULLS: list[Codec] = [BFloat16(), Float16(), Int8(rounding="stochastic"), Int4(8), Int2(8), Sign()]
KEYS = np.array([7, -3, 2**63 - 1, -(2**63), 0, 1, 130, 2**40, -1, 5000])


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    load_codecs()


def users(client: Client, name: str = "users", **options: Any) -> Table:
    return client.table(name, **{"dim": DIM, "rule": Add(), "init": Zeros(), **options})


def normal(seed: int, rows: int, dim: int = DIM) -> Floats:
    draw = np.random.default_rng(seed)
    sizes = 10.0 ** draw.uniform(-2, 2, (rows, 1))
    return np.asarray(draw.normal(size=(rows, dim)) * sizes, np.float32)


def by_reference(codec: Codec, row: Floats) -> Floats:
    """What is decoded of a row that is rounded to the nearest, written a second time."""
    data, size = reference.encoded(codec, row), row.size
    if isinstance(codec, BFloat16):
        bits = np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    if isinstance(codec, Float16):
        return np.asarray(np.frombuffer(data, "<f2").astype(np.float32) / np.float32(codec.scale))
    if isinstance(codec, Int2):
        return two_bits(codec, data, size)
    assert isinstance(codec, Int8 | Int4 | Sign)
    blocks = math.ceil(size / codec.block)
    scales = np.repeat(np.frombuffer(data[: 4 * blocks], "<f4"), codec.block)[:size]
    rest = np.frombuffer(data[4 * blocks :], np.uint8)
    if isinstance(codec, Int8):
        return np.asarray(rest.view(np.int8).astype(np.float32) * scales)
    if isinstance(codec, Sign):
        signs = np.unpackbits(rest, bitorder="little")[:size]
        return np.asarray(np.where(signs, -scales, scales))
    nibbles = np.stack([rest & 15, rest >> 4], axis=1).reshape(-1)[:size].astype(np.int8)
    return np.asarray((((nibbles ^ 8) - 8).astype(np.float32)) * scales)


def two_bits(codec: Int2, data: bytes, size: int) -> Floats:
    """What `reference.int2` stands for."""
    count = math.ceil(size / codec.block)
    halves = np.frombuffer(data[: 4 * count], "<u2").astype(np.uint32) << np.uint32(16)
    levels, found = halves.view(np.float32).reshape(count, 2), []
    for place in range(size):
        code = data[4 * count + place // 4] >> 2 * (place % 4)
        level = levels[place // codec.block, code % 2]
        found.append(-level if code & 2 else level)
    return np.array(found, np.float32)


def rows_by_reference(codec: Codec, rows: Floats) -> Floats:
    return np.array([by_reference(codec, row) for row in rows])


def drawn(codec: Codec) -> bool:
    return isinstance(codec, Int8 | Int4 | Int2)


def levels(codec: Int8 | Int4 | Int2, rows: Floats) -> Floats:
    """How large one level is, for each value; of two bits at most so large."""
    most, found = {Int8: 127, Int4: 7, Int2: 0.5}[type(codec)], np.empty_like(rows)
    for row, into in zip(rows, found, strict=True):
        for at in range(0, row.size, codec.block):
            part = np.s_[at : at + codec.block]
            into[part] = np.abs(row[part]).max() / most
    return found


def gap_bytes(keys: list[int], least: int) -> int:
    """Of keys in a frame."""
    rising, before, nbytes = sorted(key % 2**64 for key in keys), 0, 0
    for number, key in enumerate(rising):
        gap, before = key - before - (least if number else 0), key
        nbytes += max(1, math.ceil(gap.bit_length() / 7))
    return min(nbytes, 8 * len(keys))


# --- what arrives -----------------------------------------------------------------------------


@each_case("servers", [1, 2])
def test_gradients_arrive_as_they_are_decoded(make_cluster: MakeCluster, servers: int) -> None:
    client, gradients = make_cluster("tcp", servers=servers).client(), normal(1, KEYS.size)
    for number, codec in enumerate(PUSHES):
        table = users(client, name=f"users{number}", push=codec)
        table.push(KEYS, gradients).result()
        found = table.pull(KEYS)
        assert sorted(table.keys()) == sorted(KEYS)
        if not drawn(codec):
            np.testing.assert_allclose(found, rows_by_reference(codec, gradients), rtol=1e-6)
            continue
        level = levels(codec, gradients)  # type: ignore[arg-type]
        assert (np.abs(found - gradients) <= level * (1 + 1e-5)).all(), codec
        if isinstance(codec, Int2):
            are_drawn_levels(found, gradients)
            continue
        nearest = rows_by_reference(codec, gradients)
        whole = (found - nearest) / level
        np.testing.assert_allclose(whole, np.rint(whole), atol=1e-3)
        assert (np.abs(whole) > 0.5).any(), f"some are rounded away from the nearest: {codec}"


def are_drawn_levels(found: Floats, rows: Floats) -> None:
    """Whether each size is the mean one of its row or the largest, to within bfloat16, and the one
    that is further away at times."""
    low, high = np.abs(rows).mean(axis=1)[:, None], np.abs(rows).max(axis=1)[:, None]
    to_low, to_high = np.abs(np.abs(found) / low - 1), np.abs(np.abs(found) / high - 1)
    assert (np.minimum(to_low, to_high) < 1 / 128).all()
    outer = np.abs(rows) > (low + high) / 2
    assert ((to_high < 1 / 128) != outer).any()


@each_case("servers", [1, 2])
def test_rows_come_rounded_to_the_nearest(make_cluster: MakeCluster, servers: int) -> None:
    cluster = make_cluster("tcp", servers=servers)
    client, other = cluster.client(), cluster.client()
    for number, codec in enumerate(PULLS):
        table = users(client, name=f"users{number}", pull=codec)
        assert_rounded(table, codec, Reader(other).table(f"users{number}"))


def assert_rounded(table: Table, codec: Codec, handle: Any) -> None:
    values = normal(2, KEYS.size)
    table.put(KEYS, values)
    wanted = rows_by_reference(codec, values)
    np.testing.assert_allclose(table.pull(KEYS), wanted, rtol=1e-6)
    several = np.array([3, 3, 0, 9, 3])  # some of them, some twice, in another order
    np.testing.assert_array_equal(table.pull(KEYS[several]), table.pull(KEYS)[several])
    table.prefetch(KEYS[::-1])
    np.testing.assert_array_equal(table.pull(KEYS), table.pull(KEYS[::-1])[::-1])
    # What is no pull of a worker is exact.
    parts = list(table.scan())
    order = np.argsort(np.concatenate([part.keys for part in parts]))
    scanned = np.concatenate([part.values for part in parts])[order]
    np.testing.assert_array_equal(scanned, values[np.argsort(KEYS)])
    table.cache_rows(100)
    for _ in range(2):
        table.pull(KEYS)
        table.prefetch(KEYS)
        np.testing.assert_array_equal(table.pull(KEYS, exact=True), values)
    np.testing.assert_array_equal(handle.pull(KEYS), values)
    handle.prefetch(KEYS)
    np.testing.assert_array_equal(handle.pull(KEYS), values)


@pytest.mark.parametrize("codec", [Int8(), Int4()], ids=repr)
def test_sums_of_many_pushes_are_right_in_the_mean(make_cluster: MakeCluster, codec: Codec) -> None:
    """Without a residual: 1,000 pushes of 10 rows each, so 10,000 draws of a gradient."""
    client = make_cluster("tcp", servers=2).client()
    table, gradient = users(client, push=codec), normal(3, 1)[0]
    keys, pushes = np.arange(10), 1000
    for _ in range(pushes):
        table.push(keys, np.tile(gradient, (10, 1)))
    client.drain()
    found = table.pull(keys).astype(np.float64)
    level = levels(codec, gradient[None])[0].astype(np.float64)  # type: ignore[arg-type]
    part = np.abs(gradient / level) % 1.0
    error = level * np.sqrt(part * (1 - part) / (10 * pushes))
    mean = found.mean(axis=0) / pushes
    assert (np.abs(mean - gradient) <= 4 * error + np.abs(gradient) * 1e-4 + level * 1e-3).all()
    spread = (found / pushes).std(axis=0)
    assert (spread[part > 0.1] > 0).all(), "each row and push has its own draw"


def test_same_run_draws_the_same(make_cluster: MakeCluster) -> None:
    """Also with pulls in between, and the keys in another order; another rank draws anew."""

    def values_of(rank: int, order: int, pulls: bool) -> Any:
        client = make_cluster("tcp", servers=2, workers=2, policy=Async()).client(rank=rank)
        table, gradients = users(client, push=Int4()), normal(4, KEYS.size)
        for _ in range(3):
            if pulls:
                table.pull(KEYS)
            table.push(KEYS[::order], gradients[::order]).result()
        return table.pull(KEYS)

    first = values_of(0, 1, False)
    np.testing.assert_array_equal(values_of(0, -1, True), first)
    assert (values_of(1, 1, False) != first).any()


@each_case("policy", [Async(), Sync()], ids=["async", "sync"])
def test_two_ranks_push_to_the_same_rows(make_cluster: MakeCluster, policy: Any) -> None:
    cluster = make_cluster("tcp", servers=2, workers=2, policy=policy)
    clients = [cluster.client(rank=rank) for rank in range(2)]
    tables = [users(each, push=BFloat16(), pull=Float16(), consistency=policy) for each in clients]
    given_rows = [normal(seed, KEYS.size) for seed in range(2)]
    tickets = []
    for table, gradients in zip(tables, given_rows, strict=True):
        push = TablePush(table, KEYS, gradients)
        tickets.append(table.client.push_tables([push]))
    for ticket in tickets:
        ticket.result()
    exact = sum(rows_by_reference(BFloat16(), rows) for rows in given_rows)
    if isinstance(policy, Sync):
        exact = exact / 2
    exact = np.asarray(exact, np.float32)
    for table in tables:
        np.testing.assert_allclose(
            table.pull(KEYS), rows_by_reference(Float16(), exact), rtol=1e-3, atol=1e-5
        )


def test_cached_copies_are_the_rows_that_came(make_cluster: MakeCluster) -> None:
    client = make_cluster("tcp", servers=2).client()
    table, values = users(client, push=Int8(), pull=Int8()).cache_rows(100), normal(5, KEYS.size)
    table.put(KEYS, values)
    first = table.pull(KEYS)
    assert (first != values).any()
    np.testing.assert_array_equal(table.pull(KEYS), first)
    assert table.cache_report()[1:3] == (KEYS.size, KEYS.size)
    table.push(KEYS[:3], np.ones((3, DIM), np.float32)).result()
    after = table.pull(KEYS)
    np.testing.assert_array_equal(after[3:], first[3:])
    np.testing.assert_allclose(after[:3], first[:3] + 1.0, atol=2 * np.abs(values).max() / 127)


def test_rows_go_on_over_the_next_connection(make_cluster: MakeCluster) -> None:
    """What is sent again is the same, and is applied once."""
    cluster = make_cluster("tcp", servers=2)
    client = cluster.client(deadlines=PATIENT)
    options: dict[str, Any] = {"push": Int8(), "pull": BFloat16()}
    table, keys = users(client, **options), np.arange(-100, 100)
    with Cuts(cluster, client):
        for number in range(30):
            table.push(keys, np.ones((keys.size, DIM), np.float32))
            if number % 10 == 0:
                np.testing.assert_array_equal(table.pull(keys), float(number + 1))
        client.drain()
    np.testing.assert_array_equal(table.pull(keys), 30.0)


@each_case("error", [KeyboardInterrupt, MemoryError])
def test_push_whose_encoding_ends_early_is_not_sent(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Of two tables, the second one's: nothing of either is applied, and no memory stays taken."""
    client = make_cluster("tcp", servers=2).client()
    tables = [client.table(n, dim=DIM, rule=Add(), init=Zeros(), push=Int8()) for n in "ab"]
    pushes = [TablePush(table, KEYS, np.ones((KEYS.size, DIM))) for table in tables]
    client.push_tables(pushes).result()
    exchange, calls = client.connection.exchange, []
    free, own = exchange._pool.in_use, RowCodecs.write_gradient

    def ends(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 4:
            raise error
        own(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(RowCodecs, "write_gradient", ends)
        with pytest.raises(error):
            client.push_tables(pushes)
    assert exchange._pool.in_use == free
    client.push_tables(pushes).result()
    for table in tables:
        np.testing.assert_allclose(table.pull(KEYS), 2.0)


@each_case("servers", [1, 3])
def test_checkpoint_has_whole_rows_and_the_codecs(
    make_cluster: MakeCluster, tmp_path: Path, servers: int
) -> None:
    codecs: dict[str, Any] = {"push": Int8(), "pull": Int4(8)}
    folder = str(tmp_path)
    plan = CheckpointPlan(folder=folder, run="test")
    cluster = make_cluster("tcp", servers=2, workers=1, policy=Async(), checkpoints=plan)
    table = users(cluster.client(rank=0), **codecs)
    table.push(KEYS, normal(1, KEYS.size)).result()
    exact, rounded = table.pull(KEYS, exact=True), table.pull(KEYS)
    cluster.checkpoint()
    made = Folder(LocalFolder(tmp_path)).manifests()[0][0].name
    plan = CheckpointPlan(resume_folder=folder, resume=made)
    resumed = make_cluster("tcp", servers=servers, workers=1, policy=Async(), checkpoints=plan)
    client = resumed.client(rank=0)
    with pytest.raises(CodecMismatch, match=r"is in the checkpoint with the codec of pushes Int8"):
        users(client)
    again = users(client, **codecs)
    assert again.block.spec.push == spec(Int8())
    np.testing.assert_array_equal(again.pull(KEYS, exact=True), exact)
    np.testing.assert_array_equal(again.pull(KEYS), rounded)
    again.push(KEYS, normal(2, KEYS.size)).result()
    moved = again.pull(KEYS, exact=True) - exact - normal(2, KEYS.size)
    assert (np.abs(moved) <= levels(Int8(), normal(2, KEYS.size)) + 1e-4).all()


@each_case("policy", [Async(), Sync()], ids=["async", "sync"])
def test_tables_with_options_of_their_own(make_cluster: MakeCluster, policy: Any) -> None:
    """Rows that are kept in 16 bits, admitted at their second push, and of which some go."""
    client = make_cluster("tcp", servers=2, workers=1, policy=policy).client(rank=0)
    table = users(
        client,
        push=BFloat16(),
        pull=BFloat16(),
        dtype="bfloat16",
        admit=MinCount(2),
        evict=LRU(rows=8),
        consistency=policy,
        labels=True,
    )
    names = [f"user {number}" for number in range(6)]
    for _ in range(3):
        client.push_tables([TablePush(table, table.keys_of(names), np.ones((6, DIM)))]).result()
    np.testing.assert_array_equal(table.pull(names), 2.0)
    assert table.labels(table.keys_of(names)) == names
    for first in range(0, 60, 2):
        for _ in range(2):
            keys = [first, first + 1]
            client.push_tables([TablePush(table, keys, np.ones((2, DIM)))]).result()
    assert len(table) <= 16
    np.testing.assert_array_equal(table.pull([58, 59, 3])[:, 0], [1.0, 1.0, 0.0])


# --- what travels -----------------------------------------------------------------------------


@each_case("servers", [1, 2])
def test_bytes_of_a_push_and_a_pull_are_those_that_are_derived(
    make_cluster: MakeCluster, servers: int
) -> None:
    """A head of 8 bytes, a scale and a byte for each value in each row, padded to 8; the keys."""
    client = make_cluster("tcp", servers=servers).client()
    table, dim = client.table("t", dim=9, rule=Add(), push=Int8(8), pull=Int4()), 9
    keys = np.concatenate([np.arange(0, 3000, 3), KEYS])
    distinct: list[list[int]] = [[] for _ in range(servers)]
    for key in sorted(set(keys.tolist())):
        distinct[server_of(key % 2**64, servers)].append(key)
    with runs_sent(client) as sent:
        table.push(keys, normal(6, keys.size, dim)).result()
    values = [len(each) * (2 * 4 + dim) for each in distinct]
    wanted = [
        [8 + math.ceil(size / 8) * 8 + gap_bytes(each, 1)]
        for size, each in zip(values, distinct, strict=True)
    ]
    assert sent == wanted
    with runs_sent(client) as sent:
        table.pull(keys)
    assert sent == [[8 + gap_bytes(each, 0)] for each in distinct]
    block = table.block
    assert block.row_codecs is not None
    assert block.row_codecs.pull.size(100) == 100 * (4 + 5)
    encoder = client._keyed.encoder
    assert encoder.sent_bytes == sum(each for (each,) in wanted)
    assert encoder.plain_bytes == sum(map(len, distinct)) * (8 + 4 * dim)


@each_case("codecs", [{"push": Int8()}, {"pull": Int8()}, {}], ids=str)
def test_each_codec_alone(make_cluster: MakeCluster, codecs: dict[str, Any]) -> None:
    """Keys are coded with either; without one all travels as it is."""
    client = make_cluster("tcp").client()
    table, keys = users(client, **codecs), np.arange(100)
    with runs_sent(client) as sent:
        table.push(keys, normal(7, 100)).result()
        table.pull(keys)
    row = 4 + DIM if "push" in codecs else 4 * DIM
    assert sent == (
        [[8 + 100 * row + 100], [8 + 100]] if codecs else [[832 + 400 * DIM], [832 + 448]]
    )


def test_table_without_codecs_loads_none(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RowCodecs, "__init__", None)
    table = users(make_cluster("tcp", servers=2).client())
    table.push(KEYS, normal(8, KEYS.size)).result()
    np.testing.assert_array_equal(table.pull(KEYS), normal(8, KEYS.size))


def test_same_host_encodes_nothing_unless_told(make_cluster: MakeCluster) -> None:
    client = make_cluster(servers=2).client()
    gradients = normal(9, KEYS.size)
    plain = users(client, push=Int4(), pull=BFloat16())
    plain.push(KEYS, gradients).result()
    np.testing.assert_array_equal(plain.pull(KEYS), gradients)
    even = client.table(
        "even",
        dim=DIM,
        rule=Add(),
        init=Zeros(),
        push=Sign(8, even_local=True),
        pull=Int4(even_local=True),
    )
    even.push(KEYS, gradients).result()
    arrived = rows_by_reference(Sign(8), gradients)
    np.testing.assert_allclose(even.pull(KEYS, exact=True), arrived, rtol=1e-6)
    np.testing.assert_allclose(even.pull(KEYS), rows_by_reference(Int4(), arrived), rtol=1e-5)
    client.reads.exact = True
    np.testing.assert_allclose(even.pull(KEYS), arrived, rtol=1e-6)


# --- what is refused --------------------------------------------------------------------------


def test_ranks_have_to_give_the_same_codecs(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(workers=2)
    one, other = (cluster.client(rank=rank) for rank in range(2))
    users(one, push=Int8())
    told = r"'users' in group 'users' is defined with the codec of pushes Int8\(block=256\), now"
    with pytest.raises(CodecMismatch, match=told + r" Int8\(block=512\) came"):
        users(other, push=Int8(512))
    with pytest.raises(CodecMismatch, match=r"with the codec of pulls none, now BFloat16"):
        users(other, push=Int8(), pull=BFloat16())
    with pytest.raises(CodecMismatch, match=r"the codec of pushes Int8.*now none came"):
        users(other)
    with pytest.raises(DefineMismatch, match="dim"):
        users(other, dim=3, push=Int8())
    users(other, push=Int8())
    assert other.table("users").block.row_codecs is not None


def test_codecs_that_are_not_for_rows_are_refused(make_cluster: MakeCluster) -> None:
    client = make_cluster().client()
    for options in ({"push": TopK(0.1)}, {"pull": TopK(0.1)}):
        with pytest.raises(ParamServeError, match=r"ps\.Int2 and ps\.Sign are") as raised:
            users(client, **options)
        assert "Applied: no" in str(raised.value)
    with pytest.raises(TypeError, match="push takes a codec"):
        users(client, push="int8")
    with pytest.raises(TypeError, match=r"write pull=ps.BFloat16\(\)"):
        users(client, pull=BFloat16)
    users(client, push=Int8(), pull=BFloat16())  # the name is free


@each_case("policy", [Async(), Async(on_nonfinite="skip")], ids=["refuse", "skip"])
def test_gradient_that_is_not_finite_is_refused_or_skipped(
    make_cluster: MakeCluster, policy: Any
) -> None:
    table = users(make_cluster("tcp", servers=2).client(), push=Int8(), consistency=policy)
    table.push(KEYS, np.ones((KEYS.size, DIM), np.float32)).result()
    wrong = normal(1, KEYS.size)
    wrong[3, 4] = np.nan
    if policy.on_nonfinite == "refuse":
        with pytest.raises(NonFinite, match=f"key {KEYS[3]} of table 'users'"):
            table.push(KEYS, wrong)
    else:
        table.push(KEYS, wrong).result()
    np.testing.assert_array_equal(table.pull(KEYS), 1.0)


class Peer:
    """A client that is not ours: it sends steps with bytes of its own."""

    def __init__(self, client: Client, table: Table) -> None:
        self._client = client
        self._table = table
        self._slot = client.connection.exchange.take(1 << 12)

    def step(self, data: bytes, *, nbytes: int = 0, asked: int = -1) -> Any:
        """A step that pushes some bytes, or reads keys in them, and what it is answered with."""
        block, slot = self._table.block, self._slot
        exchange: Any = self._client.connection.exchange
        codecs = block.row_codecs
        at, end = (slot.arena, slot.offset), slot.offset + (1 << 11)
        slot.bytes.fill(0)
        slot.bytes[: len(data)] = np.frombuffer(data, np.uint8)
        push = (Gradient(block.id, *at, None, None, 0, nbytes),) if asked < 0 else ()
        keys = Keys(asked, *at, asked)
        room = 0 if codecs is None else min(max(codecs.pull.size(asked), 1), 1 << 60)
        pull = (ReadTarget(block.id, slot.arena, end, keys, room),) if asked >= 0 else ()

        def frame(shard: Any, messages: Sequence[Any]) -> Any:
            return encode(messages[0]), [(*at, 1 << 11)]

        exchange._frame = frame
        try:
            return self._client.steps.finish(
                "push", [Step(0, block.group, 0, False, push, pull)], None, []
            )
        finally:
            del exchange._frame


def pushed(table: Table, keys: Any, gradients: Floats) -> bytearray:
    codecs = table.block.row_codecs
    assert codecs is not None
    out = np.empty(-(-codecs.gradient_bytes(keys) // 8), np.uint64).view(np.uint8)
    out = out[: codecs.gradient_bytes(keys)]
    codecs.write_gradient(keys, gradients, out, 7)
    return bytearray(out.tobytes())


def test_malformed_gradients_are_refused_whole(make_cluster: MakeCluster) -> None:
    client = make_cluster("tcp").client()
    table = users(client, push=Int8())
    keys, rows = np.array([1, 5, 9]), np.ones((3, DIM), np.float32)
    table.push(keys, rows).result()
    good, peer = pushed(table, keys, rows), Peer(client, table)
    assert len(good) == 8 + 72 + 3
    bad: dict[str, tuple[bytes, int]] = {
        "no head": (bytes(good), 7),
        "more than there are": (bytes(good), 1 << 40),
        "all that there are": (bytes(good), 1 << 63),
        "one byte less": (bytes(good), len(good) - 1),
        "one byte more": (bytes(good), len(good) + 1),
    }
    for name, at, value in (
        ("more rows", 0, 4),
        ("fewer rows", 0, 2),
        ("very many rows", 3, 255),
        ("more bytes of keys", 4, 4),
        ("NaN as a scale", 8, np.array(np.nan, "<f4").tobytes()),
        ("a negative scale", 11, 0xBF),
        ("Inf as a scale", 16, np.array(np.inf, "<f4").tobytes()),
        ("keys that pass 64 bits", 81, b"\xff\xff"),
    ):
        changed = bytearray(good)
        data = value if isinstance(value, bytes) else bytes([value])
        changed[at : at + len(data)] = data
        bad[name] = bytes(changed), len(good)
    eight = bytearray(pushed(table, np.array([2**62 + 1, -(2**62), -9]), rows))
    swapped = eight[:-24] + eight[-16:-8] + eight[-24:-16] + eight[-8:]
    repeated = eight[:-24] + eight[-24:-16] * 2 + eight[-8:]
    assert len(eight) == 8 + 72 + 24
    bad["falling keys"] = bytes(swapped), len(eight)
    bad["repeated keys"] = bytes(repeated), len(eight)
    for name, (payload, nbytes) in bad.items():
        with pytest.raises(ShapeMismatch, match="'users'") as raised:
            peer.step(payload, nbytes=nbytes)
        assert "Applied: no" in str(raised.value), name
    np.testing.assert_array_equal(table.pull(keys), 1.0)
    assert len(table) == 3
    peer.step(bytes(good), nbytes=len(good))
    np.testing.assert_array_equal(table.pull(keys), 2.0)


def test_encoded_gradients_of_a_table_without_codecs_are_refused(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("tcp")
    client = cluster.client()
    plain = users(client)
    other = client.table("other", dim=DIM, rule=Add(), push=Int8())
    good = pushed(other, np.array([1, 5, 9]), np.ones((3, DIM), np.float32))
    with pytest.raises(ShapeMismatch, match="'users'"):
        Peer(client, plain).step(bytes(good), nbytes=len(good))
    assert len(plain) == 0


def test_malformed_reads_are_refused(make_cluster: MakeCluster) -> None:
    client = make_cluster("tcp").client()
    table = users(client, pull=Int8())
    codecs, peer = table.block.row_codecs, Peer(client, table)
    assert codecs is not None
    good = asked_for(codecs, [1, 1, 9])
    assert len(good) == 8 + 3
    for payload, asked in (
        (b"", 3),
        (good, 2),
        (good, 4),
        (good, 1 << 62),
        (good[:4] + b"\x02" + good[5:], 3),
        (b"\x39" + good[1:], 3),
        (good[:8] + b"\x80\x00\x01", 3),
    ):
        with pytest.raises(ShapeMismatch, match="'users'"):
            peer.step(payload, asked=asked)
    assert len(table) == 0


def test_server_survives_random_rows(make_cluster: MakeCluster) -> None:
    """Random bytes, and good ones with some changed: refused, or rows that are rows."""
    client = make_cluster("tcp").client()
    table = users(client, push=Int4(8), pull=Int8())
    peer, codecs = Peer(client, table), table.block.row_codecs
    keys, rows = np.array([1, 5, 900, 2**50]), normal(1, 4)
    assert codecs is not None
    pushes = bytes(pushed(table, keys, rows))
    asks = asked_for(codecs, keys)
    changes = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4)
    refused = 0

    @settings(
        max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(st.none() | st.binary(max_size=120), changes, st.booleans(), st.integers(-2, 2))
    def run(data: bytes | None, changed: list[tuple[int, int]], push: bool, more: int) -> None:
        nonlocal refused
        payload = bytearray(data if data is not None else pushes if push else asks)
        for at, value in changed:
            if at < len(payload):
                payload[at] = value
        wrong: ParamServeError | None = None
        try:
            if push:
                peer.step(bytes(payload), nbytes=len(payload) + more)
            else:
                peer.step(bytes(payload), asked=4 + more)
        except (ShapeMismatch, NonFinite) as error:
            wrong = error
        assert wrong is None or wrong.applied == "no"
        refused += wrong is not None
        assert np.isfinite(table.pull([1, 2])).all()

    run()
    assert refused > 20


def asked_for(codecs: RowCodecs, keys: Any) -> bytes:
    out = np.empty(codecs.request_bytes(np.asarray(keys)), np.uint8)
    codecs.write_request(np.asarray(keys), out)
    return out.tobytes()


# --- learning ---------------------------------------------------------------------------------


def test_recommender_learns_with_codecs_about_as_well(make_cluster: MakeCluster) -> None:
    """Matrix factorisation of ratings that factors of 4 made, with Adagrad, over two servers."""
    draw = np.random.default_rng(0)
    true = [draw.normal(size=(count, 4)) / 2 for count in (60, 40)]
    who, what = draw.integers(0, 60, 4000), draw.integers(0, 40, 4000)
    rating = (true[0][who] * true[1][what]).sum(1) + 0.05 * draw.normal(size=4000)

    def loss_with(**codecs: Any) -> float:
        client = make_cluster("tcp", servers=2).client()
        tables = [
            client.table(
                name, dim=8, rule=Adagrad(lr=0.2), init=Normal(std=0.3), seed=seed, **codecs
            )
            for seed, name in enumerate(("users", "films"))
        ]
        losses = []
        for epoch in range(8):
            for at in range(0, 4000, 200):
                part = np.s_[at : at + 200]
                rows = [
                    table.pull(ids[part]) for table, ids in zip(tables, (who, what), strict=True)
                ]
                error = (rows[0] * rows[1]).sum(1) - rating[part]
                if epoch == 7:
                    losses.append(float((error**2).mean()))
                client.push_tables(
                    [
                        TablePush(tables[0], who[part], error[:, None] * rows[1]),
                        TablePush(tables[1], what[part], error[:, None] * rows[0]),
                    ]
                )
            client.drain()
        return float(np.mean(losses))

    plain = loss_with()
    assert plain < 0.1 * rating.var()
    for push in (Int8(), Int4(), BFloat16()):
        assert loss_with(push=push, pull=BFloat16()) < 1.1 * plain + 0.001, push


def test_module_trains_on_a_table_with_codecs(make_cluster: MakeCluster) -> None:
    torch = pytest.importorskip("torch")
    from paramserve.pytorch import Embedding

    client = make_cluster("tcp", servers=2, workers=1, policy=Async()).client(rank=0)
    table = client.table("users", dim=8, rule=SGD(0.02), push=Int8(), pull=BFloat16())
    module, ids = Embedding(table), torch.arange(50)
    own = torch.optim.SGD(module.parameters(), lr=1.0)
    optimizer = Worker(client, seed=0).optimizer(module, own)
    target, losses = torch.linspace(-1, 1, 50), []
    for _ in range(40):
        optimizer.zero_grad()
        loss = ((module(ids).sum(1) - target) ** 2).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]
    rows, exact = table.pull(np.arange(50)), table.pull(np.arange(50), exact=True)
    np.testing.assert_array_equal(rows, rows_by_reference(BFloat16(), exact))
    assert (rows != exact).any()
    np.testing.assert_array_equal(module.to_embedding(50).weight.detach().numpy(), exact)
