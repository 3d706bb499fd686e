"""Users' own codecs on real servers: what they may do, and that nothing they do harms a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.suites import each_case

from paramserve.codecs import Codec, CustomCodec, Int8, TopK
from paramserve.compiling import load_codecs
from paramserve.consistency.built_in import Async, Sync
from paramserve.errors import CodecFailed, ParamServeError, UnknownCodec
from paramserve.rules import Add

SIZE = 40_000
"""float32 elements, which two shards share."""
BAD = 13.0


@dataclass(frozen=True)
class Steps(CustomCodec):
    """Whole multiples of a step, in a byte each."""

    step: float = 0.05

    def size(self, count: int) -> int:
        return count

    def encode(self, values: Any, out: Any, seed: int) -> int:
        out[:] = np.clip(np.rint(values / self.step), -127, 127).astype(np.int8).view(np.uint8)
        return int(values.size)

    def decode(self, data: Any, out: Any) -> None:
        if data.size != out.size:
            raise ValueError("another length")
        out[:] = data.view(np.int8) * np.float32(self.step)


@dataclass(frozen=True)
class Fails(CustomCodec):
    """float32 as they are, until a value of 13 comes; then it does what no codec may do."""

    how: str = "raise"
    feedback: bool = field(default=False, kw_only=True)

    def size(self, count: int) -> int:
        return 4 * count

    def encode(self, values: Any, out: Any, seed: int) -> Any:
        out.view(np.float32)[:] = values
        if BAD not in values:
            return out.size
        match self.how:
            case "encode raises":
                raise KeyError("thirteen")
            case "encode returns nothing":
                return None
            case "encode returns too many":
                return out.size + 1
            case "encode writes to the values":
                values[0] = 0
        return out.size

    def decode(self, data: Any, out: Any) -> Any:
        out[:] = data.view(np.float32)
        if BAD not in out:
            return None
        match self.how:
            case "decode raises":
                raise KeyError("thirteen")
            case "decode exits":
                raise SystemExit(1)
            case "decode leaves NaN":
                out[-1] = np.nan
            case "decode leaves Inf":
                out[0] = np.inf
            case "decode resizes":
                out.resize(3, refcheck=False)
            case "decode writes to the bytes":
                data[0] = 1
            case "decode returns":
                return out
        return None


@dataclass(frozen=True)
class Packed(CustomCodec):
    """As many bytes as there are values above 0, and those."""

    fixed: ClassVar[bool] = False

    def size(self, count: int) -> int:
        return 5 * count + 1

    def encode(self, values: Any, out: Any, seed: int) -> int:
        (places,) = np.nonzero(values > 0)
        out[0] = 0
        out[1 : 1 + values.size] = values > 0
        end = 1 + values.size + 4 * places.size
        out[1 + values.size : end] = values[places].view(np.uint8)
        return int(end)

    def decode(self, data: Any, out: Any) -> None:
        out[data[1 : 1 + out.size] == 1] = np.frombuffer(data[1 + out.size :].tobytes(), np.float32)


@dataclass(frozen=True)
class SaysNonsense(CustomCodec):
    said: str = "-1"

    def size(self, count: int) -> Any:
        return {"-1": -1, "0": 0, "text": "4", "none": None}[self.said]

    def encode(self, values: Any, out: Any, seed: int) -> int:
        return 0

    def decode(self, data: Any, out: Any) -> None: ...


@dataclass(frozen=True)
class Int8Again(CustomCodec):
    def size(self, count: int) -> int:
        return count

    def encode(self, values: Any, out: Any, seed: int) -> int:
        return int(values.size)

    def decode(self, data: Any, out: Any) -> None: ...


@dataclass(frozen=True)
class Means(CustomCodec):
    """One value for each tensor: its mean. `shapes` says how long each is, as text."""

    shapes: str = ""
    fails: bool = False

    whole_tensors: ClassVar[bool] = True

    def bound(self, shapes: Any) -> Any:
        if self.fails:
            return None
        return Means(",".join(str(int(np.prod(shape))) for shape in shapes))

    @property
    def lengths(self) -> list[int]:
        return [int(each) for each in self.shapes.split(",") if each]

    def size(self, count: int) -> int:
        return 4 * len(self.lengths)

    def encode(self, values: Any, out: Any, seed: int) -> int:
        parts = np.split(values, np.cumsum(self.lengths)[:-1]) if self.lengths else []
        out.view(np.float32)[:] = [part.mean() for part in parts]
        return int(out.size)

    def decode(self, data: Any, out: Any) -> None:
        out[:] = np.repeat(data.view(np.float32), self.lengths)


ALL = (Steps, Fails, Packed, SaysNonsense, Means)


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    load_codecs()


def normal(seed: int) -> Any:
    return np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)


@each_case("policy", [Async(), Sync(reduce="sum")], ids=["async", "sync"])
def test_own_codec_encodes_with_feedback(make_cluster: MakeCluster, policy: Any) -> None:
    cluster = make_cluster("tcp", servers=2, workers=1, policy=policy, registers=ALL)
    client, given = cluster.client(rank=0), [normal(seed) for seed in range(4)]
    for codec in (Steps(), Packed(), TopK(0.2) | Steps(0.1)):
        name, zeros = codec.name, np.zeros(SIZE, np.float32)
        block = client.define(name, zeros, rule=Add(), push=codec, group=name)
        for gradient in given:
            client.push_pull({name: gradient}, tick=True)
        assert client.steps.encoder is not None
        left = client.steps.encoder.residual(block)
        assert left is not None
        assert np.linalg.norm(left) > 0.01
        np.testing.assert_allclose(client.pull(name), np.sum(given, 0) - left, atol=3e-5)


def test_own_codec_of_whole_tensors_is_told_their_shapes(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("tcp", servers=2, workers=1, registers=ALL)
    client = cluster.client(rank=0)
    start = {name: np.zeros((130 + at, 130), np.float32) for at, name in enumerate("abc")}
    codec = Means(feedback=False)
    block = client.define(start, rule=Add(), push=codec)
    assert block.spec.cuts[1] in block.starts[1:3]
    given = {name: normal(1)[: value.size].reshape(value.shape) for name, value in start.items()}
    client.push(given).result()
    for name, found in client.pull(list(start)).items():
        np.testing.assert_allclose(found, given[name].mean(), atol=1e-6)
    with pytest.raises(ParamServeError, match="Means looks at whole tensors: it is for pushes"):
        client.define("v", start["a"], rule=Add(), pull=codec)
    with pytest.raises(CodecFailed, match=r"Means failed in bound: .* returned NoneType"):
        client.define("v", start["a"], rule=Add(), push=Means(fails=True))


def test_own_codec_of_pulls(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("tcp", servers=2, workers=1, registers=ALL)
    client, start = cluster.client(rank=0), normal(1)
    client.define("w", start, rule=Add(), pull=Steps(0.1))
    np.testing.assert_allclose(client.pull("w"), np.rint(start * 10) / 10, atol=1e-6)
    with pytest.raises(ParamServeError, match=r"Packed takes more or fewer bytes .* for pushes"):
        client.define("v", start, rule=Add(), pull=Packed())


FAILS = [
    ("encode raises", "in encode: KeyError: 'thirteen'.*test_custom_codecs.py"),
    ("encode returns nothing", "in encode: ValueError: encode returned None"),
    ("encode returns too many", "in encode: ValueError: encode returned"),
    ("encode writes to the values", "in encode: ValueError: .*read-only"),
    ("decode raises", "in decode: KeyError: 'thirteen'.*test_custom_codecs.py"),
    ("decode exits", "in decode: SystemExit: 1"),
    ("decode leaves NaN", "in decode: ValueError: decode left NaN or Inf"),
    ("decode leaves Inf", "in decode: ValueError: decode left NaN or Inf"),
    ("decode resizes", "in decode: ValueError: .*resize"),
    ("decode writes to the bytes", "in decode: ValueError: .*read-only"),
    ("decode returns", "in decode: TypeError: decode returned ndarray"),
]


@each_case("policy", [Async(), Sync(reduce="sum")], ids=["async", "sync"])
def test_push_whose_codec_fails_is_refused_whole(make_cluster: MakeCluster, policy: Any) -> None:
    cluster = make_cluster("tcp", servers=1, workers=1, policy=policy, registers=ALL)
    client, first, bad = cluster.client(rank=0), normal(1), normal(2)
    bad[7] = BAD
    for how, told in FAILS:
        zeros = np.zeros(SIZE, np.float32)
        client.define(how, zeros, rule=Add(), push=Fails(how), group=how)
        client.push_pull({how: first}, tick=True)
        with pytest.raises(CodecFailed, match=f"codec Fails failed {told}") as caught:
            client.push_pull({how: bad}, tick=True)
        assert caught.value.applied == "no", how
        np.testing.assert_array_equal(client.pull(how), first)
        client.push_pull({how: first}, tick=True)
        np.testing.assert_array_equal(client.pull(how), 2 * first)
        assert cluster.serving.errors == [], how


@each_case("how", ["encode raises", "encode returns nothing"])
def test_pull_whose_codec_fails_on_a_server_says_what_was_applied(
    make_cluster: MakeCluster, how: str
) -> None:
    cluster = make_cluster("tcp", servers=1, workers=1, registers=ALL)
    client = cluster.client(rank=0)
    client.define("w", np.zeros(SIZE, np.float32), rule=Add(), pull=Fails(how))
    gradient = normal(1)
    gradient[3] = BAD
    with pytest.raises(CodecFailed, match="codec Fails failed in encode") as caught:
        client.push_pull({"w": gradient})
    assert caught.value.applied == "yes"
    (block,) = client.blocks()
    np.testing.assert_array_equal(client.dense.fetch(block, 0)[0], gradient)
    client.push("w", -gradient).result()
    assert not client.pull("w").any()
    assert cluster.serving.errors == []


def test_values_that_cannot_be_decoded_end_the_connection_with_the_reason(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for codec, told in (
        (Fails("decode raises"), "codec Fails failed in decode: KeyError"),
        (Int8(), "shard 0 sent values that ps.Int8 cannot decode: a scale of ps.Int8 is"),
    ):
        cluster = make_cluster("tcp", servers=1, workers=1, registers=ALL)
        client, start = cluster.client(rank=0), normal(1)
        start[5] = BAD
        client.define("w", start, rule=Add(), pull=codec)

        def wrong(self: Int8, values: Any, out: Any, seed: int) -> int:
            out[:] = 0xFF
            return int(out.size)

        monkeypatch.setattr(Int8, "encode", wrong)
        with pytest.raises(ParamServeError, match=told):
            client.pull("w")
        assert cluster.serving.errors == []


def test_size_that_is_none_is_refused(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("tcp", servers=1, workers=1, registers=ALL)
    client, zeros = cluster.client(rank=0), np.zeros(4, np.float32)
    for said in ("-1", "0", "text", "none"):
        codec, push, pull = SaysNonsense(said), f"push {said}", f"pull {said}"
        client.define(push, zeros, rule=Add(), push=codec, group=push)
        wrong = r"SaysNonsense failed in size: .*size\(4\) returned"
        with pytest.raises(CodecFailed, match=wrong):
            client.push(push, np.ones(4, np.float32))
        assert not client.pull(push).any()
        client.define(pull, zeros, rule=Add(), pull=codec, group=pull)
        with pytest.raises(CodecFailed, match=r"size\(4\) returned"):
            client.pull(pull)
    assert cluster.serving.errors == []


def test_codec_that_servers_were_not_started_with_is_refused(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("tcp", servers=2, workers=2, registers=[Fails])
    client, value = cluster.client(rank=0), np.zeros(SIZE, np.float32)
    for codec in (Steps(), TopK(0.1) | Steps()):
        with pytest.raises(UnknownCodec, match=r"'Steps'.*known are .*Fails.*rules=\[Steps\]"):
            client.define("w", value, rule=Add(), push=codec)
        with pytest.raises(UnknownCodec, match="'Steps'"):
            client.define("w", value, rule=Add(), pull=Steps())
    client.define("w", value, rule=Add(), push=Int8())
    assert not client.pull("w").any()


def test_client_that_does_not_know_the_codec_is_told_to_define(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("tcp", servers=2, workers=2, registers=ALL)
    one, other = (cluster.client(rank=rank) for rank in range(2))
    value = np.zeros(SIZE, np.float32)
    one.define("w", value, rule=Add(), push=Steps(), pull=Steps())
    one.push("w", normal(1)).result()
    for _ in range(2):
        with pytest.raises(UnknownCodec, match=r"'Steps'.* define the parameters with it"):
            other.push("w", normal(2))
        with pytest.raises(UnknownCodec, match="'Steps'"):
            other.pull("w")
    (block,) = other.blocks()
    np.testing.assert_allclose(other.dense.fetch(block, 0)[0], normal(1), atol=0.03)
    other.define("w", value, rule=Add(), push=Steps(), pull=Steps())
    other.push("w", normal(2)).result()
    np.testing.assert_array_equal(other.pull("w"), one.pull("w"))


def test_what_can_be_no_codec_of_a_user_is_refused(make_cluster: MakeCluster) -> None:
    @dataclass(frozen=True)
    class Bare(Codec):
        def size(self, count: int) -> int:
            return count

        def encode(self, values: Any, out: Any, seed: int) -> int:
            return 0

        def decode(self, data: Any, out: Any) -> None: ...

    @dataclass(frozen=True)
    class Listed(Steps):
        levels: tuple[int, ...] = (1, 2)

    renamed = type("Int8", (Int8Again,), {})
    renamed = dataclass(frozen=True)(renamed)
    client = make_cluster(workers=1, registers=ALL).client(rank=0)
    for codec, told in (
        (Bare(), "push= takes classes that derive from ps.CustomCodec"),
        (Listed(), r"levels of Listed has to be a number, bool or str .* not \(1, 2\)"),
        (renamed(), "'Int8' is the name of a built-in codec: rename the class"),
        (Steps, r"push takes an object: write push=Steps\(\)"),
    ):
        with pytest.raises(TypeError, match=told):
            client.define("w", np.zeros(4, np.float32), rule=Add(), push=codec)  # type: ignore[arg-type]
