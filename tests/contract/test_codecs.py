"""Gradients and values that are encoded on their way: what arrives, what is left out, and when."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.on_wire import runs_sent
from tests.suites import each_case

import paramserve as ps
from paramserve.client import Client
from paramserve.client.names import as_tensors
from paramserve.codecs import (
    BFloat16,
    Codec,
    Feedback,
    Float16,
    Int2,
    Int4,
    Int8,
    PowerSGD,
    RandomK,
    Sign,
    TopK,
)
from paramserve.codecs.registry import spec
from paramserve.compiling import load_codecs
from paramserve.consistency.built_in import Async, Buffered, Sync
from paramserve.core.partition import Block
from paramserve.errors import CodecMismatch, NonFinite, ParamServeError, ShapeMismatch
from paramserve.messages import Gradient, Piece, PlaceBlock, SentGradients, Step
from paramserve.rules import SGD, Add
from paramserve.rules.registry import described_by
from paramserve.worker import Worker

SIZE = 40_000
"""float32 elements, which two shards share."""
CODECS = [BFloat16(), Float16(), Int8(), Int8(rounding="stochastic"), Int4(), Sign(), TopK(0.05)]
CODECS += [RandomK(0.1), TopK(0.05) | Int4(), RandomK(0.2) | Int8(), Int2()]


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    load_codecs()


def normal(seed: int, size: int = SIZE) -> Any:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def rounded(codec: Codec, values: Any) -> Any:
    """What is decoded of values."""
    out = np.empty(-(-codec.size(values.size) // 8), np.uint64).view(np.uint8)
    written = codec.encode(values, out[: codec.size(values.size)], 0)
    found = np.empty_like(values)
    codec.decode(out[:written], found)
    return found


def halves(block: Block, values: Any) -> list[Any]:
    """By shard."""
    return [values[low:high] for low, high in map(block.range, range(len(block.spec.cuts) - 1))]


def residual(client: Client, block: Block) -> Any:
    assert client.steps.encoder is not None
    return client.steps.encoder.residual(block)


def sum_of(gradients: Sequence[Any]) -> Any:
    return np.sum(np.array(gradients, np.float64), axis=0)


@pytest.mark.parametrize("policy", [Async(), Sync(reduce="sum")], ids=["async", "sync"])
def test_what_arrives_and_what_is_left_out_are_the_gradients(
    make_cluster: MakeCluster, policy: Any
) -> None:
    client = make_cluster("tcp", servers=2, workers=1, policy=policy).client(rank=0)
    given, plain, sent = [normal(seed) for seed in range(6)], 0, 0
    for number, codec in enumerate(CODECS):
        name, zeros = f"w{number}", np.zeros(SIZE, np.float32)
        block = client.define(name, zeros, rule=Add(), push=codec, group=name)
        for gradient in given:
            client.push_pull({name: gradient}, tick=True)
        left = residual(client, block)
        assert (left is None) == (not codec.feedback), codec
        if codec.feedback:
            assert np.linalg.norm(left) > 0.01, codec
            wanted = sum_of(given) - left
            np.testing.assert_allclose(client.pull(name), wanted, atol=3e-5, err_msg=str(codec))
        elif isinstance(codec, BFloat16 | Float16):
            whole = [np.concatenate([rounded(codec, p) for p in halves(block, g)]) for g in given]
            np.testing.assert_allclose(client.pull(name), sum_of(whole), atol=1e-5)
        encoder = client.steps.encoder
        assert encoder is not None
        assert encoder.plain_bytes - plain == 6 * 4 * SIZE
        most = 6 * sum(codec.size(part.size) for part in halves(block, given[0]))
        now = encoder.sent_bytes - sent
        assert now == most if codec.fixed else now <= most
        plain, sent = encoder.plain_bytes, encoder.sent_bytes


def test_bytes_on_the_socket_are_those_of_the_codec(make_cluster: MakeCluster) -> None:
    sent = {}
    for codec in (None, Int8()):
        cluster = make_cluster("tcp", servers=1, workers=1)
        client = cluster.client(rank=0)
        client.define("w", np.zeros(SIZE, np.float32), rule=Add(), push=codec)
        with runs_sent(client) as runs:
            client.push("w", normal(1)).result()
        sent[codec is None] = runs
    assert sent == {True: [[4 * SIZE]], False: [[Int8().size(SIZE)]]}


def test_same_host_sends_nothing_encoded_unless_told(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(servers=2, workers=1)
    client = cluster.client(rank=0)
    plain = client.define("w", np.zeros(SIZE, np.float32), rule=Add(), push=Int4(), pull=BFloat16())
    even = client.define(
        "v",
        np.zeros(SIZE, np.float32),
        rule=Add(),
        push=Int4(even_local=True),
        pull=BFloat16(even_local=True),
    )
    gradient = normal(1)
    for name in ("w", "v"):
        client.push(name, gradient)
    np.testing.assert_array_equal(client.pull("w"), gradient)
    assert residual(client, plain) is None
    (whole, _), left = client.dense.fetch(even, 0), residual(client, even)
    np.testing.assert_allclose(whole, gradient - left, atol=1e-6)
    np.testing.assert_array_equal(client.pull("v"), rounded(BFloat16(), whole))


def test_what_was_left_out_while_a_link_was_down_goes_with_the_next_whole_gradient(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("unix", servers=2, workers=1, policy=Async(drop_after=0))
    client = cluster.client(rank=0)
    names = {name: np.zeros(SIZE, np.float32) for name in "ab"}
    block = client.define(names, rule=Add(), push=TopK(0.1))
    given = [{name: normal(10 * seed + n) for n, name in enumerate("ab")} for seed in range(4)]
    assert client.steps.encoder is not None
    exchange = client.connection.exchange
    client.pull()
    exchange.shared = False  # as after a link broke, until it is made anew
    client.push_pull(given[0], tick=True)
    exchange.shared = True
    left = residual(client, block)
    assert np.linalg.norm(left) > 1.0
    plain, whole = client.steps.encoder.plain_bytes, client.push(given[1])
    dropped = client.push(given[2])  # it was computed from what is older than the push before it
    assert not whole.result().skipped
    assert dropped.result().skipped
    assert residual(client, block) is None
    client.pull()
    client.push({"b": given[3]["b"]}).result()
    assert client.steps.encoder.plain_bytes == plain
    for name, wanted in (("a", given[:2]), ("b", [*given[:2], given[3]])):
        np.testing.assert_allclose(client.pull(name), sum_of([g[name] for g in wanted]), atol=1e-5)


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_what_was_left_out_goes_with_the_next_whole_gradient_of_16_bits(
    make_cluster: MakeCluster, half: str
) -> None:
    cluster = make_cluster("unix", servers=2, workers=1, policy=Async())
    client = cluster.client(rank=0)
    zeros = np.zeros(SIZE, np.float32)
    block = client.define("w", zeros, rule=Add(), push=TopK(0.1), dtype=half)
    exchange = client.connection.exchange
    exchange.shared = False
    client.push("w", normal(1)).result()
    exchange.shared = True
    left = residual(client, block)
    assert np.linalg.norm(left) > 1.0
    client.push("w", normal(2)).result()
    assert residual(client, block) is None
    whole = client.dense.fetch(block, 0)[0]
    np.testing.assert_allclose(whole, sum_of([normal(1), normal(2)]), atol=0.05)
    assert np.abs(whole - sum_of([normal(1), normal(2)]) + left).max() > 0.5, "it has what was left"


@each_case("servers", [1, 2])
def test_values_come_rounded_where_they_are_pulled(make_cluster: MakeCluster, servers: int) -> None:
    cluster = make_cluster("tcp", servers=servers, workers=1)
    client = cluster.client(rank=0)
    start = normal(1)
    for codec in (BFloat16(), Float16(), Int8(), Int4(block=64)):
        name = codec.name
        block = client.define(name, start, rule=SGD(1.0), group=name, pull=codec)
        wanted = np.concatenate([rounded(codec, part) for part in halves(block, start)])
        np.testing.assert_array_equal(client.pull(name), wanted)
        found = client.push_pull({name: np.zeros(SIZE, np.float32)})[name]
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(client.dense.fetch(block, 0)[0], start)


def test_push_that_is_not_applied_changes_no_residual(make_cluster: MakeCluster) -> None:
    """Dropped by age, and skipped for another rank's NaN."""
    cluster = make_cluster("tcp", servers=2, workers=2, policy=Async(drop_after=0))
    clients = [cluster.client(rank=rank) for rank in range(2)]
    blocks = [
        client.define("w", np.zeros(SIZE, np.float32), rule=Add(), push=Int4())
        for client in clients
    ]
    one, other = clients
    for client in clients:
        client.pull("w")
    first, second = normal(1), normal(2)
    one.push_pull({"w": first}, tick=True)
    other.push_pull({"w": second}, tick=True)  # of a version that is gone
    assert not residual(other, blocks[1]).any()
    third = normal(3)
    other.push_pull({"w": third}, tick=True)
    left = residual(one, blocks[0]).astype(np.float64) + residual(other, blocks[1])
    np.testing.assert_allclose(one.pull("w"), sum_of([first, third]) - left, atol=1e-5)


def test_several_on_their_way_and_one_of_them_dropped(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("tcp", servers=2, workers=2, policy=Async(drop_after=1))
    clients = [cluster.client(rank=rank) for rank in range(2)]
    blocks = [
        client.define("w", np.zeros(SIZE, np.float32), rule=Add(), push=TopK(0.1))
        for client in clients
    ]
    for client in clients:
        client.pull("w")
    given = [normal(seed) for seed in range(4)]
    tickets = [clients[0].push("w", gradient) for gradient in given]
    dropped = [ticket.result().skipped for ticket in tickets]
    applied = [g for g, gone in zip(given, dropped, strict=True) if not gone]
    assert 0 < len(applied) < 4
    left = residual(clients[0], blocks[0])
    np.testing.assert_allclose(clients[1].pull("w"), sum_of(applied) - left, atol=1e-5)


@each_case("breaks", ["encode", "submit"])
def test_push_that_is_interrupted_before_it_is_sent_changes_nothing(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    """In the middle of the second block's encoding, or when all is encoded."""
    cluster = make_cluster("tcp", servers=2, workers=1)
    client = cluster.client(rank=0)
    blocks = [
        client.define(name, np.zeros(SIZE, np.float32), rule=Add(), push=Int4()) for name in "ab"
    ]
    exchange = client.connection.exchange
    given = {name: normal(seed) for seed, name in enumerate("ab")}
    client.push(given).result()
    before, free = [residual(client, block) for block in blocks], exchange._pool.in_use
    own, calls = Int4.encode, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if breaks == "submit" or len(calls) == 3:
            raise KeyboardInterrupt
        return own(*arguments)

    with monkeypatch.context() as patched:
        if breaks == "encode":
            patched.setattr(Int4, "encode", interrupted)
        else:
            patched.setattr(exchange, "submit_together", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.push(given)
    assert calls
    assert exchange._pool.in_use == free, "the slots are back"
    for block, left in zip(blocks, before, strict=True):
        np.testing.assert_array_equal(residual(client, block), left)
    client.push(given).result()
    for block, name in zip(blocks, "ab", strict=True):
        wanted = 2.0 * given[name] - residual(client, block)
        np.testing.assert_allclose(client.pull(name), wanted, atol=1e-5)


def test_gradients_in_a_buffer_count_as_applied(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("tcp", servers=2, workers=1, policy=Buffered(2, damping=None))
    client = cluster.client(rank=0)
    block = client.define("w", np.zeros(SIZE, np.float32), rule=Add(), push=Int8())
    given = [normal(seed) for seed in range(4)]
    for gradient in given:
        client.push_pull({"w": gradient}, tick=True)
    wanted = (sum_of(given) - residual(client, block)) / 2
    np.testing.assert_allclose(client.pull("w"), wanted, atol=1e-5)


def test_tensors_without_a_gradient_keep_their_residual(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("tcp", servers=2, workers=1)
    client = cluster.client(rank=0)
    names = {name: np.zeros(SIZE, np.float32) for name in ("a", "b")}
    block = client.define(names, rule=Add(), push=Sign())
    both = {name: normal(seed) for seed, name in enumerate(names)}
    client.push(both).result()
    before = residual(client, block)
    again = normal(7)
    client.push("b", again).result()
    after = residual(client, block)
    np.testing.assert_array_equal(after[:SIZE], before[:SIZE])
    assert (after[SIZE:] != before[SIZE:]).all()
    np.testing.assert_allclose(client.pull("a"), both["a"] - after[:SIZE], atol=1e-6)
    np.testing.assert_allclose(
        client.pull("b"), sum_of([both["b"], again]) - after[SIZE:], atol=1e-5
    )


def test_gradient_that_is_not_finite_is_refused_or_skipped(make_cluster: MakeCluster) -> None:
    for policy in (Async(), Async(on_nonfinite="skip")):
        cluster = make_cluster("tcp", servers=2, workers=1, policy=policy)
        client = cluster.client(rank=0)
        block = client.define("w", np.zeros(SIZE, np.float32), rule=Add(), push=Int8())
        client.push("w", normal(1)).result()
        before, left = client.pull("w"), residual(client, block)
        wrong = normal(2)
        wrong[3] = np.nan
        if policy.on_nonfinite == "refuse":
            with pytest.raises(NonFinite, match="'w' on rank 0"):
                client.push("w", wrong)
        else:
            client.push("w", wrong).result()
        np.testing.assert_array_equal(client.pull("w"), before)
        np.testing.assert_array_equal(residual(client, block), left)


def test_residual_that_is_too_large_is_let_go(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("tcp", workers=1)
    client = cluster.client(rank=0)
    block = client.define("w", np.zeros(16, np.float32), rule=Add(), push=TopK(0.1))
    huge = np.full(16, 3e38, np.float32)
    client.push("w", huge).result()
    client.push("w", -client.pull("w")).result()  # no overflow of the values themselves
    client.push("w", huge / 4).result()
    assert np.isfinite(client.pull("w")).all()
    assert np.isfinite(residual(client, block)).all()


def test_ranks_have_to_give_the_same_codecs(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(workers=2)
    one, other = (cluster.client(rank=rank) for rank in range(2))
    value = np.zeros(4, np.float32)
    one.define("w", value, rule=Add(), push=Int8())
    told = r"'w' in group 'default' is defined with the codec of pushes Int8\(block=256\), now Int8"
    with pytest.raises(CodecMismatch, match=told + r"\(block=512\) came"):
        other.define("w", value, rule=Add(), push=Int8(512))
    with pytest.raises(CodecMismatch, match=r"the codec of pulls none, now BFloat16\(.* came"):
        other.define("w", value, rule=Add(), push=Int8(), pull=BFloat16())
    with pytest.raises(CodecMismatch, match=r"with the codec of pushes Int8.*now none came"):
        other.define("w", value, rule=Add())
    other.define("w", value, rule=Add(), push=Int8())
    less = Int8(feedback=Feedback(decay=0.5))
    one.define("v", value, rule=Add(), push=less)
    told = r"pushes Int8\(feedback_decay=0.5\), now Int8\(feedback_decay=0.25\) came"
    with pytest.raises(CodecMismatch, match=told):
        other.define("v", value, rule=Add(), push=Int8(feedback=Feedback(decay=0.25)))
    other.define("v", value, rule=Add(), push=less)


CANNOT: list[tuple[Any, dict[str, Any], str]] = [
    (np.zeros(4), {"push": Int8()}, "a codec encodes float32, and 'w' is float64"),
    (np.zeros(4, np.float32), {"push": Int8(), "rule": None}, "'w' has none"),
    (np.zeros(4, np.int64), {"pull": BFloat16(), "rule": None}, "'w' is int64"),
    (np.zeros(4, np.float32), {"pull": TopK()}, "leaves values out: it is for pushes"),
    (np.zeros(4, np.float32), {"pull": RandomK() | Int8()}, "ps.RandomK | ps.Int8 leaves"),
    (np.zeros((9, 9), np.float32), {"pull": PowerSGD(1)}, "ps.PowerSGD leaves values out"),
]


def test_tensors_that_cannot_be_encoded_are_named(
    make_cluster: MakeCluster,
) -> None:
    client = make_cluster(workers=1).client(rank=0)
    for value, options, told in CANNOT:
        with pytest.raises(ParamServeError, match=told):
            client.define("w", value, **{"rule": Add(), **options})
    with pytest.raises(TypeError, match="pull takes a codec"):
        client.define("w", value, rule=Add(), pull="bf16")  # type: ignore[arg-type]
    client.define("w", np.zeros(4, np.float32), rule=Add())


def test_encoded_gradient_of_another_length_is_refused(make_cluster: MakeCluster) -> None:
    """A client that is not ours says so much lies there."""
    client = make_cluster("unix", workers=1).client(rank=0)
    with_codec = client.define("w", np.zeros(32, np.float32), rule=Add(), push=Int8(32))
    assert Int8(32).size(32) == 36
    without = client.define("v", np.zeros(32, np.float32), rule=Add())
    for block, nbytes in itertools.product((with_codec, without), (1, 63, 65, 1 << 40, -8)):
        slot = client.connection.exchange.take(128)
        header = Gradient(block.id, slot.arena, slot.offset, None, None, 0, nbytes)
        step = Step(0, block.group, 0, False, (header,), ())
        with pytest.raises(ShapeMismatch, match="an encoded gradient came for block"):
            client.steps.finish("push", [step], None, [slot])
    assert not client.pull("w").any()


def test_codecs_are_public() -> None:
    for codec in (BFloat16, Float16, Int8, Int4, Int2, Sign, TopK, RandomK, PowerSGD):
        assert getattr(ps, codec.__name__) is codec
    assert spec(ps.TopK(0.2)).options["ratio"] == 0.2


@pytest.mark.parametrize("policy", [Async(), Sync()], ids=["async", "sync"])
def test_model_that_is_trained_with_codecs(
    make_cluster: MakeCluster, policy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """It learns about as fast; the worker has rounded values, and the servers whole ones."""

    def told() -> list[str]:
        return [line for line in capsys.readouterr().err.splitlines() if "group 'model'" in line]

    plain = loss_with(make_cluster, policy)
    assert not told()
    for push in (BFloat16(), Int8(), Int4(), TopK(0.05)):
        found = loss_with(make_cluster, policy, push=push, pull=BFloat16())
        assert found < 1.1 * plain + 0.005, push
        (line,) = told()
        assert line.startswith(f"paramserve: group 'model' pushes ps.{push.name} (")
        assert line.endswith("and pulls ps.BFloat16 (50% of the bytes)")
    by_name = {"*.weight": TopK(0.05) | Int4(), "2.*": None, "*": Int8()}
    found = loss_with(make_cluster, policy, push=by_name, pull={"0.*": BFloat16()})
    assert found < 1.1 * plain + 0.005
    (line,) = told()
    assert "pushes ps.TopK | ps.Int4 and ps.Int8 (at most " in line
    assert "pulls ps.BFloat16 (5" in line, "but for one layer"
    told = r"matches no parameter of the optimizer; it has '0.weight"
    with pytest.raises(ValueError, match=told):
        loss_with(make_cluster, policy, push={"3.*": Int8()})
    with pytest.raises(TypeError, match="push takes a codec"):
        loss_with(make_cluster, policy, push="int8")
    for other in ({"consistency": ps.ElasticAverage(0.5)}, {"dense": "local"}):
        with pytest.raises(ValueError, match="no such thing is sent: leave them out"):
            loss_with(make_cluster, policy, push=Int8(), **other)
    with pytest.raises(TypeError, match="push takes a codec"):
        ps.LocalSteps(push="int4")  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["policy", "optimizer"])
def test_model_that_is_trained_with_local_steps_and_codecs(
    make_cluster: MakeCluster, where: str
) -> None:
    """What own steps have changed is encoded, and what was left out of it comes with the next."""
    outer = ps.SGD(lr=1.0)
    plain = loss_with(make_cluster, ps.LocalSteps(every=5, outer=outer))
    for push in (Int4(), TopK(0.1)):
        codecs: dict[str, Any] = {"push": push, "pull": BFloat16()}
        policy = ps.LocalSteps(every=5, outer=outer, **(codecs if where == "policy" else {}))
        found = loss_with(make_cluster, policy, **(codecs if where == "optimizer" else {}))
        assert found < 1.1 * plain + 0.005, push


def loss_with(make_cluster: MakeCluster, policy: Any, **options: Any) -> float:
    """The last loss of a small model that one worker trains over TCP."""
    torch = pytest.importorskip("torch")
    cluster = make_cluster("tcp", servers=2, workers=1, policy=policy)
    worker = Worker(cluster.client(rank=0), seed=1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 200), torch.nn.Tanh(), torch.nn.Linear(200, 1))
    own = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = worker.optimizer(model, own, **options)
    inputs = torch.randn(256, 20)
    wanted = torch.tanh(inputs.sum(1, keepdim=True))
    for _ in range(150):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), wanted)
        loss.backward()
        optimizer.step()
    block, *more = worker.client.blocks()
    if block.spec.pull is not None and not more:
        values = model[0].weight.detach().numpy().reshape(-1)
        np.testing.assert_array_equal(rounded(BFloat16(), values), values)
        whole = worker.client.dense.fetch(block, 0)[0]
        assert (rounded(BFloat16(), whole) != whole).any()
    codec = block.push_codec
    if codec is not None and codec.feedback:
        assert np.abs(residual(worker.client, block)).max() > 0.0
    return float(loss.detach())


def test_patterns_make_blocks_and_all_ranks_have_to_give_the_same(
    make_cluster: MakeCluster,
) -> None:
    torch = pytest.importorskip("torch")

    def step(client: Client, **codecs: Any) -> None:
        worker = Worker(client, seed=1)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(20, 200), torch.nn.Linear(200, 1))
        own = torch.optim.SGD(
            [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.1}],
            lr=0.05,
        )
        optimizer = worker.optimizer(model, own, **codecs)
        model(torch.ones(3, 20)).sum().backward()
        optimizer.step()

    codecs: dict[str, Any] = {
        "push": {"*.weight": Int4(), "1.*": Int8()},
        "pull": {"0.weight": BFloat16()},
    }
    cluster = make_cluster("tcp", servers=2, workers=3, policy=Async())
    clients = [cluster.client(rank=rank) for rank in range(3)]
    for client in clients[:2]:
        step(client, **codecs)
        blocks = client.blocks()
        names = {tuple(p.name for p in b.pieces): (b.push_codec, b.pull_codec) for b in blocks}
        assert names == {
            ("0.weight",): (Int4(), BFloat16()),
            ("0.bias",): (None, None),
            ("1.weight",): (Int4(), None),
            ("1.bias",): (Int8(), None),
        }
    with pytest.raises(CodecMismatch, match=r"with the codec of pushes Int4\(.*\), now none came"):
        step(clients[2], push={"1.*": Int4()}, pull=codecs["pull"])


@each_case(
    ("kind", "policy"), [("tcp", Sync(reduce="sum")), ("unix", Async())], ids=["tcp", "unix"]
)
def test_matrices_are_whole_on_one_server_and_sent_as_thin_ones(
    make_cluster: MakeCluster, kind: str, policy: Any
) -> None:
    """On the same host with a codec that encodes there, too: parts of arenas begin with tensors."""
    cluster = make_cluster(kind, servers=3, workers=1, policy=policy)
    client = cluster.client(rank=0)
    shapes = {"a": (300, 71), "b": (3,), "c": (0, 5), "d": (260, 83), "e": (2, 60, 100), "f": (1,)}
    start = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    codec = PowerSGD(2, even_local=kind != "tcp")
    block = client.define(start, rule=Add(), push=codec)
    assert set(block.spec.cuts) <= set(block.starts)
    assert len(set(block.spec.cuts)) == 4
    given = [normal(seed, block.size) for seed in range(5)]
    for gradient in given:
        named = zip(shapes.items(), block.starts, strict=False)
        pushed = {n: gradient[at : at + int(np.prod(s))].reshape(s) for (n, s), at in named}
        client.push_pull(pushed, tick=True)
    left = residual(client, block)
    found = np.concatenate([each.reshape(-1) for each in client.pull(list(shapes)).values()])
    np.testing.assert_allclose(found, sum_of(given) - left, atol=1e-4)
    thin = 4 * (2 * (300 + 71) + 3 + 2 * (260 + 83) + 12000 + 1)  # "e" would not become smaller
    assert client.steps.encoder is not None
    assert client.steps.encoder.sent_bytes == 5 * thin
    assert (left[block.starts[1] : block.starts[2]] == 0).all()
    assert np.linalg.norm(left[: block.starts[1]]) > 1


def test_tensor_that_is_cut_is_refused_for_a_codec_of_whole_ones(make_cluster: MakeCluster) -> None:
    """A client that is not ours does not say that they have to be whole."""
    client = make_cluster(servers=2, workers=1).client(rank=0)

    value = np.zeros((200, 200), np.float32)
    described = spec(PowerSGD(1))
    call = PlaceBlock(
        0, "g", "float32", described_by(Add()), (Piece("w", (200, 200)),), True, 5.0, push=described
    )
    block, attempt = client.directory._place(call)
    with pytest.raises(ShapeMismatch, match="its rule or codec needs whole tensors"):
        client.directory._define(block, attempt, 5.0, as_tensors("w", value))
    client.define("w", value, rule=Add(), group="g", push=PowerSGD(1))


def _trains(worker: Worker) -> int:
    size = 5000
    client = worker.client
    codec = Sign(even_local=True)
    client.define("w", np.zeros(size, np.float32), rule=Add(), group="model", push=codec)
    client.define("v", np.zeros(size, np.float32), rule=Add(), group="plain")
    steps = 3 + 2 * worker.rank
    for number in range(steps):
        for name in "wv":
            client.push(name, normal(number, size))
    client.pull("w")
    return steps


def test_result_of_a_run_tells_bytes_as_sent_and_as_they_were_and_what_is_left_out() -> None:
    result = ps.run(_trains, workers=2, consistency=ps.Async(), show="none")
    sent = result.groups["model"].sent_by_rank
    assert {rank: each.plain_bytes for rank, each in sent.items()} == {
        rank: 4 * 5000 * steps for rank, steps in result.returns.items()
    }
    assert {rank: each.sent_bytes for rank, each in sent.items()} == {
        rank: Sign().size(5000) * steps for rank, steps in result.returns.items()
    }
    assert all(1.0 < each.residual_norm < 1000.0 for each in sent.values())
    group = result.groups["model"]
    assert group.sent_bytes / group.plain_bytes == pytest.approx(0.035, abs=0.001)
    assert result.groups["plain"].sent_by_rank == {}


def test_client_tells_bytes_of_values_as_they_came_and_as_they_are(
    make_cluster: MakeCluster,
) -> None:
    client, size = make_cluster("tcp", servers=2, workers=1).client(rank=0), 5000
    for group, pull in (("half", BFloat16()), ("changes", ps.Delta(Int8())), ("plain", None)):
        value = np.zeros(size, np.float32)
        client.define(group, value, rule=Add(), group=group, pull=pull)
    for _ in range(3):
        for group in ("half", "changes", "plain"):
            client.push_pull({group: normal(0, size)})
    told = {each.group: each for each in client.steps.sent_gradients()}
    assert told.keys() == {"half", "changes"}
    assert told["half"] == SentGradients("half", 0, 0, 0.0, 3 * 2 * size, 3 * 4 * size)
    assert told["changes"].read_plain_bytes == 3 * 4 * size
    assert 2 * size < told["changes"].read_bytes < 3 * 4 * size, "the first is whole"


RESUMED_AT, STEPS = 4, 9


def _steps_on(worker: Worker, codec: Codec, stop: int) -> int:
    client, size = worker.client, 3000
    client.define("w", np.zeros(size, np.float32), rule=SGD(0.1), group="model", push=codec)
    for step in range(worker.clock, stop):
        values = client.pull("w")
        gradient = normal(10 * step + worker.rank, size) + values
        client.push_pull({"w": gradient}, tick=True)
    return worker.clock


def test_run_that_goes_on_ends_as_an_unbroken_one_where_nothing_is_kept_of_what_is_left_out(
    tmp_path: Path,
) -> None:
    codec = Int8(rounding="stochastic", even_local=True, feedback=False)

    def run(stop: int, **options: Any) -> Any:
        result = ps.run(_steps_on, args=(codec, stop), workers=2, show="none", **options)
        assert set(result.returns.values()) == {stop}
        return result.values["model"]["w"]

    unbroken = run(STEPS)
    folder = str(tmp_path / "run")
    run(RESUMED_AT, checkpoint=folder)
    np.testing.assert_array_equal(run(STEPS, checkpoint=folder, resume=True), unbroken)
