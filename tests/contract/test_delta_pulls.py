"""Values that are pulled as what has changed: what readers have, and in which bytes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.on_wire import payloads_read, runs_sent
from tests.contract.role_cluster import RoleCluster, in_threads
from tests.suites import each_case

import paramserve as ps
from paramserve.checkpoint.folder import Folder
from paramserve.checkpoint.storage import LocalFolder
from paramserve.client import Client
from paramserve.client.encoding import in_words
from paramserve.codecs import BFloat16, Codec, Delta, Int2, Int4, Int8, PowerSGD, Sign, TopK
from paramserve.compiling import load_codecs
from paramserve.config import CheckpointPlan
from paramserve.consistency.built_in import Async, Sync
from paramserve.core.block import ShardBlock
from paramserve.core.delta_stream import HEAD_BYTES, LENGTH_BYTES, Position
from paramserve.core.partition import Block
from paramserve.errors import CodecMismatch, ParamServeError, ProtocolError, ShapeMismatch
from paramserve.messages import ReadTarget, Step
from paramserve.rules import Add
from paramserve.worker import Worker

SIZE = 40_000
"""float32 elements, which two shards share."""
INT4 = Delta(Int4())


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    load_codecs()


def normal(seed: int, size: int = SIZE) -> Any:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def define(client: Client, codec: Codec = INT4, size: int = SIZE, **options: Any) -> Block:
    return client.define("w", normal(0, size), rule=Add(), pull=codec, **options)


def held(cluster: RoleCluster, block: Block, shard: int) -> ShardBlock:
    found = cluster.servers[shard].role.shard.blocks[block.id]
    assert isinstance(found, ShardBlock)
    return found


def told(cluster: RoleCluster, block: Block) -> Any:
    """The reference on the servers, [block.size]."""
    streams = [held(cluster, block, shard).stream for shard in range(len(cluster.servers))]
    return np.concatenate([s._reference for s in streams if s is not None])


def whole(client: Client, block: Block) -> Any:
    """What the servers have."""
    return client.dense.fetch(block, 0)[0]


def readers(client: Client, block: Block) -> list[Any]:
    return [client.connection.exchange.decoder._readers.get((block.id, s)) for s in range(2)]


def saying(said: Position) -> Any:
    """In place of `DeltaReader.position`."""
    return property(lambda _: said)


def padded(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


@each_case("codec", [Int4(), Int2(), Int8(), Sign(), TopK(0.1), TopK(0.1) | Int4()], ids=repr)
def test_readers_follow_and_those_who_come_late_begin_whole(
    make_cluster: MakeCluster, codec: Codec
) -> None:
    cluster = make_cluster("tcp", servers=2, workers=1)
    writer, early = cluster.client(rank=0), cluster.client()
    block = define(writer, Delta(codec))
    np.testing.assert_array_equal(early.pull("w"), normal(0))
    for seed in range(1, 6):
        found = writer.push_pull({"w": normal(seed)}, tick=True)["w"]
        np.testing.assert_array_equal(found, told(cluster, block))
        if seed % 2:
            np.testing.assert_array_equal(early.pull("w"), told(cluster, block))
            assert readers(early, block)[0].position == readers(writer, block)[0].position
    late = cluster.client()
    np.testing.assert_array_equal(late.pull("w"), told(cluster, block))
    np.testing.assert_array_equal(early.pull("w"), told(cluster, block))
    exact = whole(late, block)
    np.testing.assert_array_equal(
        exact, sum((normal(seed) for seed in range(1, 6)), normal(0)).astype(np.float32)
    )
    assert np.abs(exact - told(cluster, block)).max() > 0.0


@each_case("policy", [Sync(reduce="sum"), Async()], ids=["sync", "async"])
def test_workers_have_the_same_values_of_a_version(make_cluster: MakeCluster, policy: Any) -> None:
    cluster = make_cluster("tcp", servers=2, workers=3, policy=policy)
    clients = [cluster.client(rank=rank) for rank in range(3)]
    blocks = [define(client) for client in clients]
    for seed in range(4):
        found: dict[int, Any] = {}

        def step(rank: int, seed: int = seed, found: dict[int, Any] = found) -> None:
            gradient = normal(10 * seed + rank)
            pulled = clients[rank].push_pull({"w": gradient}, tick=True)["w"]
            found[rank] = np.array(pulled)

        in_threads(*(lambda rank=rank: step(rank) for rank in range(3)))
        if isinstance(policy, Sync):
            for each in found.values():
                np.testing.assert_array_equal(each, told(cluster, blocks[0]))
    last = [np.array(client.pull("w")) for client in clients]
    for each in last:
        np.testing.assert_array_equal(each, told(cluster, blocks[0]))
    number = held(cluster, blocks[0], 0).stream.position.number  # type: ignore[union-attr]
    assert number == 3 if isinstance(policy, Sync) else number <= 11, "the first read begins it"


def test_bytes_are_those_of_the_deltas(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("tcp", servers=1, workers=1)
    client, other = cluster.client(rank=0), cluster.client()
    define(client)
    came = payloads_read(client)
    client.pull("w")
    client.pull("w")
    client.push_pull({"w": normal(1)})
    for seed in range(3):
        client.push("w", normal(seed)).result()
        other.pull("w")
    client.pull("w")
    delta = LENGTH_BYTES + padded(Int4().size(SIZE), 8)
    assert came == [
        HEAD_BYTES + 4 * SIZE,  # nothing was there
        HEAD_BYTES,  # nothing has changed
        HEAD_BYTES + delta,
        HEAD_BYTES + 3 * delta,
    ]


@each_case("codec", [BFloat16(), Int8(), Delta(Int4())], ids=repr)
@each_case("policy", [Sync(), Async()], ids=["sync", "async"])
def test_values_of_a_version_are_encoded_once(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, codec: Codec, policy: Any
) -> None:
    """However many workers read them; and one copy is kept."""
    cluster = make_cluster("tcp", servers=1, workers=3, policy=policy)
    clients = [cluster.client(rank=rank) for rank in range(3)]
    blocks = [define(client, codec) for client in clients]
    kind, calls = type(codec.codec if isinstance(codec, Delta) else codec), []
    encode = kind.encode

    def counted(*given: Any) -> int:
        calls.append(given)
        return encode(*given)

    monkeypatch.setattr(kind, "encode", counted)
    for client in clients:
        client.pull("w")
        client.pull("w")
    first = 0 if isinstance(codec, Delta) else 1
    assert len(calls) == first
    if isinstance(policy, Sync):
        for _ in range(2):
            in_threads(*(lambda c=c: c.push_pull({"w": normal(1)}, tick=True) for c in clients))
        assert len(calls) == first + 2
    clients[0].assign("w", normal(5))
    before = len(calls)
    for client in clients:
        found = np.array(client.pull("w"))
        assert np.abs(found - normal(5)).mean() < 0.3, "the encoded copy is of values before"
    assert len(calls) == before + 1
    kept = held(cluster, blocks[0], 0)
    assert kept._encoded_values() is kept._encoded_values()


def test_same_host_has_whole_values_unless_told(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(servers=2, workers=1)
    client = cluster.client(rank=0)
    plain = define(client)
    even = client.define("v", normal(0), rule=Add(), pull=Delta(Int4(), even_local=True))
    half = client.define(
        "h", normal(0), rule=Add(), pull=Delta(Int4(even_local=True)), dtype="float16"
    )
    for seed in range(1, 4):
        found = client.push_pull({name: normal(seed) for name in "wvh"})
        np.testing.assert_array_equal(found["w"], whole(client, plain))
        np.testing.assert_array_equal(found["v"], told(cluster, even))
        np.testing.assert_array_equal(found["h"], told(cluster, half).astype(np.float16))
    assert held(cluster, plain, 0).stream._reference is None  # type: ignore[union-attr]
    assert (found["v"] != found["w"]).any()


def test_models_of_16_bits_have_rounded_references(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("tcp", servers=2, workers=1)
    client = cluster.client(rank=0)
    block = define(client, dtype="float16")
    for seed in range(1, 4):
        found = client.push_pull({"w": normal(seed)})["w"]
        np.testing.assert_array_equal(found, told(cluster, block).astype(np.float16))


def test_blocks_beside_others_and_on_one_of_two_servers(make_cluster: MakeCluster) -> None:
    """Parts of known size come first, whatever the order; a shard without elements sends none."""
    cluster = make_cluster("tcp", servers=2, workers=1)
    client = cluster.client(rank=0)
    codecs: dict[str, Codec | None] = {"a": INT4, "b": None, "c": INT4, "d": BFloat16(), "e": INT4}
    sizes = dict(zip(codecs, (50, SIZE, SIZE, 70, SIZE + 3), strict=True))
    blocks = {
        name: client.define(name, normal(0, sizes[name]), rule=Add(), pull=codec)
        for name, codec in codecs.items()
    }
    for seed in range(1, 4):
        given = {name: normal(seed, size) for name, size in sizes.items()}
        found = client.push_pull(given)
        for name, codec in codecs.items():
            if codec is INT4:
                np.testing.assert_array_equal(found[name], told(cluster, blocks[name]))
            np.testing.assert_allclose(found[name], whole(client, blocks[name]), atol=0.5)
    np.testing.assert_array_equal(found["b"], whole(client, blocks["b"]))
    small = {shard: held(cluster, blocks["a"], shard).stream for shard in range(2)}
    assert sum(stream is None for stream in small.values()) == 1


def test_connections_that_break_lose_nothing(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("tcp", servers=2, workers=1)
    client = cluster.client(rank=0)
    block = define(client)
    for seed in range(1, 13):
        ticket = client.push("w", normal(seed))
        if seed % 3 == 0:
            cluster.cut(client, seed % 2)
        np.testing.assert_array_equal(client.pull("w"), told(cluster, block))
        ticket.result()
    assert readers(client, block)[0].position.number == 11, "it never had to begin anew"


def test_servers_that_go_on_from_a_checkpoint_begin_anew(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    """With the whole values: no checkpoint has a reference. A reader that has followed the servers
    from before gets all, though it has as high a number of what they had told."""
    plan = CheckpointPlan(folder=str(tmp_path), run="test")
    cluster = make_cluster("tcp", servers=2, workers=1, checkpoints=plan)
    client = cluster.client(rank=0)
    block = define(client)
    for seed in range(1, 4):
        client.push_pull({"w": normal(seed)}, tick=True)
    before, values = np.array(client.pull("w")), whole(client, block)
    assert 4 * SIZE < cluster.checkpoint().nbytes < 1.5 * 4 * SIZE
    made = Folder(LocalFolder(tmp_path)).manifests()[0][0]
    plan = CheckpointPlan(resume_folder=str(tmp_path), resume=made.name)
    resumed = make_cluster("tcp", servers=2, workers=1, checkpoints=plan)
    again = resumed.client(rank=0)
    block = define(again)
    follower = client.connection.exchange.decoder._readers
    again.connection.exchange.decoder._readers |= follower
    followed = {shard: reader.position for (_, shard), reader in follower.items()}
    found = np.array(again.pull("w"))
    np.testing.assert_array_equal(found, values)
    assert (found != before).any()
    for seed in range(4, 7):
        found = again.push_pull({"w": normal(seed)}, tick=True)["w"]
        np.testing.assert_array_equal(found, told(resumed, block))
    for shard in range(2):
        stream = held(resumed, block, shard).stream
        assert stream is not None
        assert stream.position.stream != followed[shard].stream


@each_case("where", ["decode", "keep"])
def test_read_that_is_interrupted_comes_again(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Before what came is decoded, or when one shard's part is kept already."""
    cluster = make_cluster("tcp", servers=2, workers=1, policy=Sync())
    client = cluster.client(rank=0)
    block = define(client)
    client.push_pull({"w": normal(1)}, tick=True)
    decoder = client.connection.exchange.decoder
    own, calls = decoder._decode, list[Any]()

    def interrupted(*given: Any) -> None:
        calls.append(given)
        if where == "keep" or len(calls) > 1:
            own(*given)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(decoder, "_decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.push_pull({"w": normal(2)}, tick=True)
    for seed in range(3, 5):
        found = client.push_pull({"w": normal(seed)}, tick=True)["w"]
        np.testing.assert_array_equal(found, told(cluster, block))
    assert np.abs(found - whole(client, block)).max() < 0.5
    assert len(calls) > 2


def test_answer_that_no_reader_can_use_ends_the_exchange(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster("tcp", servers=1, workers=1)
    client = cluster.client(rank=0)
    block = define(client)
    client.pull("w")
    (stream,) = (held(cluster, block, 0).stream,)
    assert stream is not None
    before = client.connection.exchange.decoder._readers[block.id, 0]._has
    stream._number += 5
    stream._deltas.extend([np.zeros(Int4().size(SIZE), np.uint8)] * 5)
    client.push("w", normal(1)).result()
    own = stream.answer

    def cut(*given: Any) -> Any:
        data = own(*given).copy()
        data[HEAD_BYTES : HEAD_BYTES + LENGTH_BYTES] = 0xFF
        return data

    monkeypatch.setattr(stream, "answer", cut)
    with pytest.raises(ProtocolError, match=r"cannot decode: .* bytes") as caught:
        client.pull("w")
    assert "ps.Delta(ps.Int4)" in str(caught.value)
    assert client.connection.exchange.decoder._readers[block.id, 0]._has is before


@each_case("has", [(1 << 40, -1), (-3, 0), (None, 1)], ids=["number", "stream", "new"])
def test_what_no_reader_can_have_is_refused(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, has: tuple[Any, int]
) -> None:
    cluster = make_cluster("tcp", servers=1, workers=1)
    client = cluster.client(rank=0)
    block = define(client)
    client.pull("w")
    (reader,) = readers(client, block)[:1]
    stream, number = reader.position
    said = Position(stream if has[0] is None else has[0], number + has[1])
    with monkeypatch.context() as patched:
        patched.setattr(type(reader), "position", saying(said))
        with pytest.raises(ShapeMismatch, match="what its client cannot have") as caught:
            client.push_pull({"w": normal(1)})
        assert caught.value.applied == "no"
    np.testing.assert_array_equal(client.pull("w"), normal(0))


def test_whatever_a_client_says_that_it_has_the_servers_go_on(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused, or gets what leads from there to the values."""
    cluster = make_cluster("tcp", servers=1, workers=1)
    client = cluster.client(rank=0)
    block = define(client)
    client.pull("w")
    random, seen = Random(1), Counter[str]()
    (reader,) = readers(client, block)[:1]
    for seed in range(80):
        client.push("w", normal(seed)).result()
        stream, number = (int(each) for each in reader.position)
        streams = (stream, stream, stream, 0, stream + 1, -stream, (1 << 63) - 1, -(1 << 63))
        numbers = (number, number - 1, 0, number + 1, -1, (1 << 63) - 1, -(1 << 63))
        said = Position(random.choice(streams), random.choice(numbers))
        with monkeypatch.context() as patched:
            patched.setattr(type(reader), "position", saying(said))
            try:
                found = np.array(client.pull("w"))
            except ShapeMismatch:
                seen["refused"] += 1
                continue
        seen["answered"] += 1
        np.testing.assert_array_equal(found, told(cluster, block))
    assert min(seen["refused"], seen["answered"]) > 20, seen
    assert cluster.serving.errors == []


@each_case(("offset", "room"), [(-64, 0), (1 << 40, 0), (0, -1), (0, 1 << 40)])
def test_read_that_has_no_room_for_whole_values_is_refused(
    make_cluster: MakeCluster, offset: int, room: int
) -> None:
    cluster = make_cluster("tcp", servers=1, workers=1)
    client = cluster.client(rank=0)
    block = define(client)
    slot = client.connection.exchange.take(8 * SIZE)
    at, room = slot.offset + offset - 64 * (offset < 0), HEAD_BYTES + 4 * SIZE + room
    step = Step(0, block.group, 0, False, (), (ReadTarget(block.id, slot.arena, at, None, room),))
    if offset < 0:
        step.pull = (ReadTarget(block.id, slot.arena, -64, None, room),)
    with pytest.raises(ShapeMismatch, match=f"{HEAD_BYTES + 4 * SIZE} bytes are not in {room}"):
        client.steps.finish("pull", [step], None, [slot])
    np.testing.assert_array_equal(client.pull("w"), normal(0))


def test_delta_is_for_pulls_of_tensors(make_cluster: MakeCluster) -> None:
    client = make_cluster("unix", workers=2, policy=Async()).client(rank=0)
    zeros = np.zeros(8, np.float32)
    with pytest.raises(ParamServeError, match="it is for pulls, and not for pushes"):
        client.define("a", zeros, rule=Add(), push=INT4)
    with pytest.raises(ParamServeError, match="is not for rows of a table"):
        client.table("t", dim=4, rule=Add(), pull=INT4)
    with pytest.raises(ParamServeError, match="a codec encodes float32"):
        client.define("b", zeros.astype(np.float64), rule=Add(), pull=INT4)
    client.define("c", zeros, rule=Add(), pull=INT4)
    assert ps.Delta is Delta


@each_case("other", [Delta(Int4(128)), Delta(Int8()), Int4()], ids=repr)
def test_ranks_have_to_give_the_same_delta(make_cluster: MakeCluster, other: Codec) -> None:
    cluster = make_cluster("unix", workers=2)
    define(cluster.client(rank=0))
    with pytest.raises(CodecMismatch, match="the codec of pulls"):
        define(cluster.client(rank=1), other)


@each_case(
    ("make", "told"),
    [
        (lambda: Delta(PowerSGD()), "equal bit by bit"),
        (lambda: Delta(Delta(Int4())), "equal bit by bit"),
        (lambda: Delta(Int4), r"ps.Delta\(ps.Int4\(\)\)"),  # type: ignore[arg-type]
        (lambda: Delta("int4"), "takes the codec of its deltas"),  # type: ignore[arg-type]
        (lambda: TopK(0.1) | Delta(Int4()), "ends no chain"),
        (lambda: Delta(Int4()) | Int8(), "cannot begin a chain"),
    ],
)
def test_what_cannot_encode_deltas_is_refused(make: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        make()


# --- own steps ------------------------------------------------------------------------------------


class Learners:
    """Workers of one model, each with data of its own, in turns or all at once."""

    def __init__(self, cluster: RoleCluster, workers: int, **codecs: Any) -> None:
        import torch

        self.torch, self.cluster = torch, cluster
        self.clients = [cluster.client(rank=rank) for rank in range(workers)]
        self.models: list[Any] = []
        self.optimizers: list[Any] = []
        drawn = torch.Generator().manual_seed(5)
        self.inputs = [torch.randn(128, 20, generator=drawn) for _ in range(workers)]
        torch.manual_seed(0)
        first = self._model()
        for client in self.clients:
            model = self._model()
            model.load_state_dict(first.state_dict())
            own = torch.optim.SGD(model.parameters(), lr=0.05)
            self.optimizers.append(Worker(client, seed=1).optimizer(model, own, **codecs))
            self.models.append(model)

    def _model(self) -> Any:
        nn = self.torch.nn
        return nn.Sequential(nn.Linear(20, 200), nn.Tanh(), nn.Linear(200, 1))

    def train(self, rank: int, steps: int) -> None:
        model, optimizer = self.models[rank], self.optimizers[rank]
        for _ in range(steps):
            optimizer.zero_grad()
            self._loss(model, self.inputs[rank]).backward()
            optimizer.step()

    def train_all(self, steps: int) -> None:
        ranks = range(len(self.models))
        in_threads(*(lambda rank=rank: self.train(rank, steps) for rank in ranks))

    def loss(self) -> float:
        """Of the servers' values, on all data."""
        (block,) = self.clients[0].blocks()
        values = self.clients[0].dense.fetch(block, 0)[0]
        model = self._model()
        self.torch.nn.utils.vector_to_parameters(
            self.torch.from_numpy(np.array(values)), model.parameters()
        )
        with self.torch.no_grad():
            return float(self._loss(model, self.torch.cat(self.inputs)))

    def _loss(self, model: Any, inputs: Any) -> Any:
        wanted = self.torch.tanh(inputs.sum(1, keepdim=True))
        return self.torch.nn.functional.mse_loss(model(inputs), wanted)


def test_own_steps_reach_the_loss_of_whole_pulls(make_cluster: MakeCluster) -> None:
    """Within 1%, with pushes and pulls of 4 bits."""
    pytest.importorskip("torch")
    losses: dict[str, float] = {}
    kinds = {"whole": None, "deltas": Delta(Int4(256)), "values": Int4(256)}
    for name, pull in kinds.items():
        policy = ps.LocalSteps(every=5, push=Int4(256), pull=pull)
        learners = Learners(make_cluster("tcp", servers=2, workers=2, policy=policy), 2)
        learners.train_all(200)
        losses[name] = learners.loss()
        if name == "deltas":
            (block,) = learners.clients[0].blocks()
            reference = told(learners.cluster, block)
            for model in learners.models:
                params = learners.torch.nn.utils.parameters_to_vector(model.parameters())
                np.testing.assert_array_equal(params.detach().numpy(), reference)
    assert losses["deltas"] == pytest.approx(losses["whole"], rel=0.01)
    assert losses["values"] > 1.2 * losses["whole"], "the test tells good values from bad ones"


def test_what_deltas_do_to_the_bytes_is_told(make_cluster: MakeCluster) -> None:
    block = define(make_cluster("tcp", workers=1).client(rank=0), Delta(Int4(256)))
    wanted = "group 'w' pulls ps.Delta(ps.Int4) (12.9% of the bytes for each delta)"
    assert in_words("w", [block], local=False) == wanted


def test_own_steps_without_waiting_follow_the_deltas(make_cluster: MakeCluster) -> None:
    pytest.importorskip("torch")
    policy = ps.AsyncLocalSteps(3, ps.SGD(lr=1.0), pull=Delta(Int4()))
    learners = Learners(make_cluster("tcp", servers=2, workers=3, policy=policy), 3)
    (block,) = learners.clients[0].blocks()
    for rank in (0, 0, 1, 0, 2, 1, 1, 0, 2, 2, 1, 0):
        learners.train(rank, 3)
        params = learners.torch.nn.utils.parameters_to_vector(learners.models[rank].parameters())
        np.testing.assert_array_equal(params.detach().numpy(), told(learners.cluster, block))


@pytest.mark.parametrize(
    ("back", "least", "most"), [(Int4(block=256), 3_870, 3_880), (Int2(block=256), 5_110, 5_120)]
)
def test_bytes_of_500_own_steps_in_4_bits_against_float32_every_step(
    back: Int4 | Int2, least: int, most: int, make_cluster: MakeCluster
) -> None:
    """Both ways, all payloads: 8 bytes of float32 each step, and in 500 steps 1/2 + 4/256 there and
    as many back, or 1/4 + 4/256."""
    size, every = 1 << 20, 500
    codec, sent = Int4(block=256), dict[str, int]()
    kinds: dict[str, Any] = {"float32": {}, "4 bits": {"push": codec, "pull": Delta(back)}}
    for name, codecs in kinds.items():
        cluster = make_cluster("tcp", servers=1, workers=1)
        client = cluster.client(rank=0)
        client.define("w", normal(0, size), rule=Add(), **codecs)
        client.pull("w")
        came = payloads_read(client)
        with runs_sent(client) as gone:
            client.push_pull({"w": normal(1, size)}, tick=True)
        sent[name] = sum(came) + sum(map(sum, gone))
        if name == "4 bits":
            encoder = client.steps.encoder
            assert encoder is not None
            assert encoder.sent_bytes == codec.size(size) == size // 2 + 4 * size // 256
            assert gone == [[codec.size(size)]]
            assert came == [HEAD_BYTES + LENGTH_BYTES + padded(back.size(size), 8)]
    assert sent["float32"] == 8 * size
    times = every * sent["float32"] / sent["4 bits"]
    assert least < times < most, times
