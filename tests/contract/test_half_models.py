"""Models of 16 bits: gradients and values in bfloat16 or float16, and float32 on the servers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.conftest import MakeCluster
from tests.contract.on_wire import payloads_read, runs_sent
from tests.contract.ranks import Ranks
from tests.suites import each_case
from torch import Tensor, nn
from torch.nn import functional as F

import paramserve as ps
from paramserve.client import Client
from paramserve.client.snapshots import Snapshots
from paramserve.codecs import BFloat16, Codec, Float16, Int8
from paramserve.compiling import load_codecs, load_kernels
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, Buffered, DelayCompensated, Sync
from paramserve.core.partition import Block
from paramserve.errors import DefineMismatch, DtypeMismatch, NonFinite
from paramserve.launch.reading import Reader
from paramserve.pytorch import Embedding
from paramserve.rules import SGD, Adam, Add
from paramserve.rules.custom import CustomRule

SIZE = 80_000
"""Elements, which two shards share: 160 KB in 16 bits."""
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
CODECS = {"bfloat16": BFloat16(), "float16": Float16()}
FLOAT = np.dtype(np.float32)


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    load_codecs()
    for half in HALVES:
        for rule in (SGD(0.1), SGD(0.1, momentum=0.9), Adam(), Add()):
            load_kernels(FLOAT, rule, half)


@pytest.fixture(params=HALVES)
def half(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def normal(seed: int, half: str, size: int = SIZE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).to(HALVES[half])


def given(tensor: Tensor) -> Any:
    """A tensor of 16 bits as users of the names give it: numpy has no bfloat16."""
    return tensor if tensor.dtype == torch.bfloat16 else tensor.numpy()


def read(array: Any) -> Tensor:
    """What they get, as a tensor."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    assert array.dtype == np.float16
    return torch.from_numpy(array)


def masters(client: Client, block: Block) -> Tensor:
    return torch.from_numpy(client.dense.fetch(block, 0)[0])


def trained(options: Any, start: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Float32 values after torch's own steps with these gradients."""
    master = nn.Parameter(start.float())
    optimizer = options([master])
    for gradient in gradients:
        master.grad = gradient.float()
        optimizer.step()
    return master.detach()


class Twins:
    """The same tensors twice: "w" and "b" of 16 bits, and of float32 in another group."""

    def __init__(self, clients: Sequence[Client], half: str, rule: Any) -> None:
        self.clients, self.half, self.group = clients, HALVES[half], f"{half} {rule.name}"
        tensors = {"w": normal(0, half), "b": normal(1, half, 100)}
        for client in clients:
            halves, plain = self._named(tensors)
            self.block = client.define(halves, rule=rule, group=self.group)
            self.plain = client.define(plain, rule=rule, group=f"plain {self.group}")

    def _named(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
        """By the names of each kind, of which several twins have their own."""
        halves = {f"{self.group} {name}": given(each) for name, each in tensors.items()}
        plain = {f"plain {self.group} {n}": each.float().numpy() for n, each in tensors.items()}
        return halves, plain

    def push(self, rank: int, gradients: dict[str, Tensor], **options: Any) -> None:
        client = self.clients[rank]
        for each in self._named(gradients):
            ticket = client.push(each, **options)
            if ticket.operation is not None:  # else it waits for its tick
                ticket.result()  # so the pushes of the ranks come in one order to both

    def tick(self) -> None:
        groups = (self.group, f"plain {self.group}")
        tickets = [each.tick(group) for each in self.clients for group in groups]
        for ticket in tickets:
            ticket.result()

    def pull(self, rank: int) -> None:
        for prefix in (self.group, f"plain {self.group}"):
            self.clients[rank].pull([f"{prefix} w", f"{prefix} b"])

    def check(self) -> None:
        """The masters are equal bit by bit, and the values are these rounded."""
        client = self.clients[0]
        found = masters(client, self.block)
        assert torch.isfinite(found).all()
        assert torch.equal(found, masters(client, self.plain))
        names = [f"{self.group} w", f"{self.group} b"]
        values = torch.cat([read(each) for each in client.pull(names).values()])
        assert torch.equal(values, found.to(self.half))


RULES: dict[str, tuple[Any, Any]] = {
    "sgd": (SGD(0.1), partial(torch.optim.SGD, lr=0.1)),
    "momentum": (SGD(0.1, momentum=0.9), partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "adam": (Adam(0.01), partial(torch.optim.Adam, lr=0.01)),
    "rmsprop": (partial(torch.optim.RMSprop, lr=0.01), partial(torch.optim.RMSprop, lr=0.01)),
}


@pytest.mark.parametrize("policy", [Async(), Sync()], ids=["async", "sync"])
def test_masters_are_those_of_float32_and_values_are_these_rounded_once(
    make_cluster: MakeCluster, layout: Any, policy: Policy
) -> None:
    cluster = make_cluster(layout[0], servers=layout[1], workers=1, policy=policy)
    client = cluster.client(0)
    for half, (title, (rule, own)) in itertools.product(HALVES, RULES.items()):
        start, gradients = normal(0, half), [normal(seed, half) for seed in range(1, 8)]
        name = f"{half} {title}"
        twin = f"plain {name}"
        block = client.define(name, given(start), rule=rule, group=name)
        plain = client.define(twin, start.float().numpy(), rule=rule, group=twin)
        assert torch.equal(read(client.pull(name)), start)
        for gradient in gradients:
            found = client.push_pull({name: given(gradient)}, tick=True)[name]
            client.push_pull({twin: gradient.float().numpy()}, tick=True)
        assert torch.equal(masters(client, block), masters(client, plain)), "bit by bit"
        wanted = trained(own, start, gradients)
        torch.testing.assert_close(masters(client, block), wanted, rtol=2e-5, atol=2e-6)
        assert torch.equal(read(found), masters(client, block).to(HALVES[half]))
        assert torch.equal(read(client.pull(name)), read(found))


# --- bytes ----------------------------------------------------------------------------------------


def taken_bytes(client: Client, step: Callable[[], object]) -> int:
    """Of the slots that a step of a client takes."""
    exchange, taken = client.connection.exchange, list[int]()
    own = exchange.take_each

    def watch(sizes: Any) -> Any:
        taken.extend(sizes)
        return own(sizes)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(exchange, "take_each", watch)
        step()
    return sum(taken)


@each_case("kind", ["unix", "tcp"])
def test_slots_and_payloads_have_half_the_bytes(
    make_cluster: MakeCluster, kind: str, half: str
) -> None:
    client = make_cluster(kind, servers=2, workers=1).client(0)
    value = normal(0, half)
    block = client.define("w", given(value), rule=SGD(0.1))
    client.define("plain", value.float().numpy(), rule=SGD(0.1))
    for name, gradient, itemsize in (
        ("w", given(value), 2),
        ("plain", value.float().numpy(), 4),
    ):
        taken = taken_bytes(client, partial(client.push_pull, {name: gradient}))
        assert taken == 2 * itemsize * SIZE, "a gradient, and values"
        came = [payloads_read(client, shard) for shard in range(2)]
        with runs_sent(client) as sent:
            client.push_pull({name: gradient})
        on_wire = itemsize * SIZE if kind == "tcp" else 0
        assert sum(map(sum, sent)) == on_wire
        assert sum(map(sum, came)) == on_wire
    slot = client.dense.gradient_slot(block)
    assert slot.nbytes == 2 * SIZE


# --- sums -----------------------------------------------------------------------------------------


@each_case(("shards", "weights"), [(1, (1.0, 1.0)), (2, (2.0, 3.0))])
def test_sum_over_ranks_is_made_in_float32(
    make_cluster: MakeCluster, half: str, shards: int, weights: tuple[float, float]
) -> None:
    cluster = make_cluster(servers=shards, workers=2, policy=Sync(reduce="sum"))
    twins = Twins([cluster.client(rank) for rank in (0, 1)], half, Add())
    start = masters(twins.clients[0], twins.block)
    total = start.clone()
    for seed in range(3):
        for rank, weight in enumerate(weights):
            gradient = normal(10 * seed + rank, half, SIZE + 100)
            parts = {"w": gradient[:SIZE], "b": gradient[SIZE:]}
            if seed == 2 and rank == 1:
                del parts["b"]
            twins.push(rank, parts, weight=weight)
            total[: sum(map(len, parts.values()))] += weight * torch.cat([*parts.values()]).float()
        twins.tick()
        twins.check()
    found = masters(twins.clients[0], twins.block)
    torch.testing.assert_close(found, total, rtol=1e-5, atol=1e-5)


def test_two_pushes_to_one_clock_are_added(make_cluster: MakeCluster, half: str) -> None:
    client = make_cluster(workers=1, policy=Sync()).client(0)
    block = client.define("w", given(normal(0, half)), rule=Add())
    first, second = normal(1, half), normal(2, half)
    client.push("w", given(first))
    client.push("w", given(second))
    client.tick().result()
    wanted = normal(0, half).float() + (first + second).float()
    assert torch.equal(masters(client, block), wanted)
    large = torch.full((SIZE,), 60_000.0).to(HALVES[half])
    client.push("w", given(large))
    client.push("w", given(large))
    if half == "bfloat16":
        client.tick().result()
    else:
        with pytest.raises(NonFinite, match="'w' on rank 0"):
            client.tick()


@dataclass(frozen=True)
class MovesBy(CustomRule):
    """A user's rule, which takes float32 only."""

    lr: float = 0.1

    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None:
        assert value.dtype == gradient.dtype == np.float32
        value -= self.lr * gradient


POLICIES = {
    "async": Async(),
    "sync": Sync(),
    "buffered": Buffered(3, damping=None),
    "delay": DelayCompensated(),
}


@each_case("policy", POLICIES)
def test_policies_and_rules_do_to_masters_what_they_do_to_float32(
    make_cluster: MakeCluster, policy: str
) -> None:
    cluster = make_cluster(servers=2, workers=2, policy=POLICIES[policy], registers=[MovesBy])
    clients = [cluster.client(rank) for rank in (0, 1)]
    for half, rule in itertools.product(HALVES, (SGD(0.1), Adam(), MovesBy())):
        twins = Twins(clients, half, rule)
        for rank in (0, 1):
            twins.pull(rank)
        for seed in range(6):
            for rank in (0, 1):
                gradient = normal(10 * seed + rank, half, SIZE + 100)
                parts = {"w": gradient[:SIZE], "b": gradient[SIZE:]}
                if seed % 3 == 1:
                    del parts["wb"[rank]]
                twins.push(rank, parts)
            twins.tick()
        twins.check()


def test_values_that_a_corrected_gradient_leaves_are_rounded(
    make_cluster: MakeCluster, half: str
) -> None:
    """What is applied then is float32, and what is read is of 16 bits."""
    cluster = make_cluster(servers=2, workers=2, policy=DelayCompensated(lam=0.5))
    clients = [cluster.client(rank) for rank in (0, 1)]
    for client in clients:
        block = client.define("w", given(normal(0, half)), rule=SGD(0.1))
        plain = client.define("plain", normal(0, half).float().numpy(), rule=SGD(0.1), group="p")
        client.pull("w")
        client.pull("plain")
    for seed in range(1, 5):
        client, gradient = clients[seed % 2], normal(seed, half)
        found = client.push_pull({"w": given(gradient)}, tick=True)["w"]
        client.push_pull({"plain": gradient.float().numpy()}, tick=True)
        kept = masters(client, block)
        assert torch.equal(kept, masters(client, plain))
        assert torch.equal(read(found), kept.to(HALVES[half]))


# --- NaN, Inf and clipping ------------------------------------------------------------------------


@each_case("kind", ["unix", "tcp"])
@each_case("policy", [Async(), Async(on_nonfinite="skip")], ids=["refuse", "skip"])
def test_gradient_that_is_not_finite_is_refused_or_skipped(
    make_cluster: MakeCluster, half: str, policy: Async, kind: str
) -> None:
    client = make_cluster(kind, workers=1, policy=policy).client(0)
    names = {"a": normal(0, half, 8), "w": normal(1, half)}
    block = client.define({name: given(each) for name, each in names.items()}, rule=Add())
    before = masters(client, block)
    for bad in (float("nan"), float("inf"), -float("inf")):
        gradients = {"a": normal(2, half, 8), "w": normal(3, half)}
        gradients["w"][-1] = bad
        wrong = {name: given(each) for name, each in gradients.items()}
        if policy.on_nonfinite == "refuse":
            with pytest.raises(NonFinite, match="'w' on rank 0"):
                client.push(wrong)
        else:
            assert client.push(wrong).result().skipped
        assert torch.equal(masters(client, block), before)


def test_float32_beyond_the_range_of_float16_is_refused(make_cluster: MakeCluster) -> None:
    client = make_cluster(workers=1).client(0)
    client.define("w", np.zeros(4, np.float16), rule=Add())
    client.push("w", np.full(4, 65504.0, np.float32)).result()
    with pytest.raises(NonFinite):
        client.push("w", np.full(4, 65520.0, np.float32))
    client.push("w", np.full(4, 65504.0, np.float32)).result()
    assert (client.pull("w") == 65504.0).all(), "what is larger becomes the largest, and not Inf"


@each_case("policy", [Async(), Sync()], ids=["async", "sync"])
def test_clip_norm_is_that_of_float32(make_cluster: MakeCluster, half: str, policy: Policy) -> None:
    client = make_cluster(servers=2, workers=1, policy=policy).client(0)
    twins = Twins([client], half, Add())
    gradient = normal(3, half, SIZE + 100)
    before = masters(client, twins.block)
    for block in (twins.block, twins.plain):
        slot = client.dense.gradient_slot(block)
        own = gradient.view(torch.int16) if block is twins.block else gradient.float()
        slot[:] = own.numpy().view(slot.dtype)
        push = [ps.client.BlockPush(block, slot)]
        client.dense.step(block.group_name, push, clip_norm=5.0).result()
    found, plain = (masters(client, each) for each in (twins.block, twins.plain))
    torch.testing.assert_close((found - before).norm(), torch.tensor(5.0), rtol=1e-3, atol=0.0)
    if policy == Sync():
        assert torch.equal(found, plain)
    else:  # one worker's gradient is clipped where it lies
        torch.testing.assert_close(found, plain, rtol=2**-7, atol=2**-10)


# --- by name --------------------------------------------------------------------------------------


def test_gradient_that_was_lent_is_pushed_from_its_place(
    make_cluster: MakeCluster, half: str
) -> None:
    client = make_cluster(workers=1).client(0)
    block = client.define("w", given(torch.zeros(6, 8, dtype=HALVES[half])), rule=Add())
    lent, gradient = client.gradient("w"), normal(1, half, 48).reshape(6, 8)
    assert (lent.shape, lent.nbytes) == ((6, 8), 96)
    read(lent)[...] = gradient
    found = client.push_pull({"w": lent})["w"]
    assert torch.equal(read(found), gradient)
    assert torch.equal(masters(client, block).view(6, 8), gradient.float())
    into = np.zeros_like(found)
    client.pull("w", out=into)
    assert torch.equal(read(into), gradient)


def test_float32_values_stay_whole_on_the_servers(make_cluster: MakeCluster, half: str) -> None:
    client = make_cluster(servers=2, workers=1).client(0)
    first = np.random.default_rng(1).normal(size=SIZE).astype(np.float32)
    block = client.define("w", first, rule=Add(), dtype=half)
    assert (client.dense.fetch(block, 0)[0] == first).all()
    assert torch.equal(read(client.pull("w")), torch.from_numpy(first).to(HALVES[half]))
    client.assign("w", 2 * first)
    assert (client.dense.fetch(block, 0)[0] == 2 * first).all()
    own = normal(2, half)
    client.assign("w", given(own))
    assert torch.equal(masters(client, block), own.float())
    client.push("w", first).result()  # rounded on the way
    pushed = torch.from_numpy(first).to(HALVES[half]).float()
    assert torch.equal(masters(client, block), own.float() + pushed)
    with pytest.raises(DtypeMismatch, match=f"'w' is {half}, got int64"):
        client.push("w", np.ones(SIZE, np.int64))


def test_ranks_have_to_give_the_same_dtype(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(workers=2)
    one, other = (cluster.client(rank) for rank in (0, 1))
    one.define("w", np.zeros(4, np.float16), rule=Add())
    for dtype, value in (
        ("float32", np.zeros(4, np.float32)),
        ("bfloat16", torch.zeros(4, dtype=torch.bfloat16)),
    ):
        with pytest.raises(DefineMismatch, match=f"with dtype float16, now {dtype} came"):
            other.define("w", value, rule=Add())
    other.define("w", np.ones(4, np.float16), rule=Add())
    assert (other.pull("w") == 0.0).all()


@each_case("kind", ["unix", "tcp"])
def test_snapshots_have_the_masters(make_cluster: MakeCluster, half: str, kind: str) -> None:
    client = make_cluster(kind, servers=2, workers=1, policy=Sync()).client(0)
    block = client.define("w", given(normal(0, half)), rule=SGD(0.01))
    snapshots = Snapshots(client)
    snapshots.watch("default", every=1)
    client.push_pull({"w": given(normal(1, half))}, tick=True)
    found = snapshots.take("default", 0)
    assert found is not None
    assert torch.equal(torch.from_numpy(found.values["w"]), masters(client, block))
    wanted = trained(partial(torch.optim.SGD, lr=0.01), normal(0, half), [normal(1, half)])
    torch.testing.assert_close(masters(client, block), wanted, rtol=1e-6, atol=1e-7)


# --- codecs on top --------------------------------------------------------------------------------


@each_case(("kind", "codec"), [("unix", Int8()), ("unix", Int8(even_local=True)), ("tcp", Int8())])
def test_codecs_encode_what_float32_would_be(
    make_cluster: MakeCluster, half: str, kind: str, codec: Codec
) -> None:
    client = make_cluster(kind, servers=2, workers=1).client(0)
    start = normal(0, half)
    options: dict[str, Any] = {"rule": SGD(0.1), "push": codec, "pull": codec}
    block = client.define("w", given(start), **options)
    plain = client.define("plain", start.float().numpy(), group="plain", **options)
    for seed in range(1, 4):
        gradient = normal(seed, half)
        found = client.push_pull({"w": given(gradient)})["w"]
        wanted = client.push_pull({"plain": gradient.float().numpy()})["plain"]
    assert torch.equal(read(found), torch.from_numpy(wanted).to(HALVES[half]))
    if kind == "tcp" or codec.even_local:
        assert client.steps.encoder is not None
        left = [client.steps.encoder.residual(each) for each in (block, plain)]
        assert left[0] is not None
        assert np.linalg.norm(left[0]) > 0.01
    # The residuals, of which each draws its own blocks, are the same: so are the masters.
    torch.testing.assert_close(masters(client, block), masters(client, plain), rtol=0, atol=0)


# --- models ---------------------------------------------------------------------------------------


def make_model(half: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1)).to(HALVES[half])


def batch(half: str, rank: int = 0) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(128, 20, generator=torch.Generator().manual_seed(7 + rank))
    wanted = torch.tanh(inputs.sum(1, keepdim=True))
    return inputs.to(HALVES[half]), wanted.to(HALVES[half])


def alone(
    half: str, build: Any, steps: int, batches: Sequence[tuple[Tensor, Tensor]]
) -> tuple[nn.Module, list[Tensor]]:
    """Training with float32 masters as torch does it: the model, and the masters."""
    model = make_model(half)
    kept = [nn.Parameter(param.detach().float()) for param in model.parameters()]
    optimizer = build(kept)
    for _ in range(steps):
        sums = [torch.zeros_like(each) for each in kept]
        for inputs, wanted in batches:
            model.zero_grad()
            F.mse_loss(model(inputs), wanted).backward()
            for total, param in zip(sums, model.parameters(), strict=True):
                assert param.grad is not None
                total += param.grad.float() / len(batches)
        for master, gradient in zip(kept, sums, strict=True):
            master.grad = gradient
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(model.parameters(), kept, strict=True):
                param.copy_(master)
    return model, [each.detach() for each in kept]


BUILDS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.003),
    "radam": partial(torch.optim.RAdam, lr=0.03),
}


@pytest.mark.parametrize(
    ("build", "kind", "ranks"),
    [("sgd", "tcp", 2), ("adamw", "unix", 1), ("adamw", "unix", 2), ("radam", "unix", 2)],
)
def test_model_is_trained_as_torch_does_it_with_masters(
    make_cluster: MakeCluster, half: str, build: str, kind: str, ranks: int
) -> None:
    models = [make_model(half) for _ in range(ranks)]
    steps = 30

    def train(worker: ps.Worker) -> float:
        model = models[worker.rank]
        optimizer = worker.optimizer(model, BUILDS[build](model.parameters()))
        inputs, wanted = batch(half, worker.rank)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), wanted)
            loss.backward()
            optimizer.step()
        return float(loss.detach())

    cluster = make_cluster(kind, servers=2, workers=ranks, policy=Sync())
    losses = Ranks(cluster, train).start(*range(ranks)).end()
    assert max(losses.values()) < 0.4, "1.0 before"
    wanted, kept = alone(half, BUILDS[build], steps, [batch(half, rank) for rank in range(ranks)])
    state = Reader(cluster.client()).read("model")
    ulp = 2.0**-7 if half == "bfloat16" else 2.0**-10
    for (name, param), master in zip(wanted.named_parameters(), kept, strict=True):
        found = torch.from_numpy(state[name])
        assert found.dtype == torch.float32
        # A value that rounds to the other neighbour changes what follows by that much.
        torch.testing.assert_close(found, master, rtol=4 * ulp, atol=2 * ulp)
        for model in models:
            assert torch.equal(model.get_parameter(name), found.to(param.dtype))
    fresh = make_model(half)
    fresh.load_state_dict({name: torch.from_numpy(each) for name, each in state.items()})
    for name, param in fresh.named_parameters():
        assert param.dtype == HALVES[half]
        assert torch.equal(param, models[0].get_parameter(name)), name


def test_small_updates_add_up_where_16_bits_alone_lose_them(make_cluster: MakeCluster) -> None:
    worker = ps.Worker(make_cluster(workers=1).client(0), 1)
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    lone = copy.deepcopy(model)
    optimizer = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    own = torch.optim.SGD(lone.parameters(), lr=1.0)
    for _ in range(512):
        for each in (model, lone):
            each.weight.grad = torch.full((1, 1), 2.0**-10, dtype=torch.bfloat16)
        optimizer.step()
        own.step()
    assert model.weight.item() == 0.5
    assert lone.weight.item() > 0.9


def test_parameters_of_several_dtypes_are_trained_together(make_cluster: MakeCluster) -> None:
    worker = ps.Worker(make_cluster(servers=2, workers=1).client(0), 1)
    model = nn.ModuleDict(
        {
            f"of {str(dtype)[6:]}": nn.Linear(4, 4, dtype=dtype)
            for dtype in (torch.float32, *HALVES.values())
        }
    )
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = worker.optimizer(
        model, torch.optim.SGD(model.parameters(), lr=1.0), overlap=True, clip_norm=1e6
    )
    for _ in range(3):
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.25)
        optimizer.step()
    worker.optimizers.finish()
    for name, param in model.named_parameters():
        assert torch.equal(param, (before[name].float() - 0.75).to(param.dtype)), name


def test_state_dict_of_the_optimizer_has_float32(make_cluster: MakeCluster, half: str) -> None:
    worker = ps.Worker(make_cluster(workers=1).client(0), 1)
    model = make_model(half)
    optimizer = worker.optimizer(model, torch.optim.Adam(model.parameters(), lr=0.01))
    inputs, wanted = batch(half)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), wanted).backward()
        optimizer.step()
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        assert {each.dtype for each in entry.values()} == {torch.float32}
    optimizer.load_state_dict(saved)
    again = optimizer.state_dict()
    for index, entry in saved["state"].items():
        for name, each in entry.items():
            # torch converts what it loads to the dtype of the parameter.
            loaded = each if name == "step" else each.to(HALVES[half]).float()
            assert torch.equal(again["state"][index][name], loaded)


def test_what_is_not_for_16_bits_is_refused(make_cluster: MakeCluster) -> None:
    policy: Any = ps.ElasticAverage(every=2, rho=0.1)
    worker = ps.Worker(make_cluster(workers=1, policy=policy).client(0), 1)
    model = make_model("bfloat16")
    with pytest.raises(TypeError, match=r"with ElasticAverage .* half a step of 16 bits"):
        worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for param in model[0].parameters():
        param.requires_grad_(False)
    model[2].float()
    worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.filterwarnings("ignore:with LocalSteps the worker's own optimizer")
def test_gradients_of_float16_are_not_unscaled(make_cluster: MakeCluster) -> None:
    for policy in (ps.Async(), ps.LocalSteps(every=2)):
        worker = ps.Worker(make_cluster(workers=1, policy=policy).client(0), 1)
        model = make_model("float16")
        optimizer = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        inputs, wanted = batch("float16")
        scaler.scale(F.mse_loss(model(inputs), wanted)).backward()
        told = r"'0\.weight' is float16, and GradScaler does not unscale"
        with pytest.raises(TypeError, match=told):
            scaler.step(optimizer)


def test_rows_of_tables_and_16_bit_layers_are_clipped_by_one_norm(
    make_cluster: MakeCluster, half: str
) -> None:
    worker = ps.Worker(make_cluster(servers=2, workers=1).client(0), 1)
    table = worker.client.table("users", dim=4, rule=SGD(1.0), init=ps.Zeros())
    model = nn.ModuleDict(
        {"users": Embedding(table), "head": nn.Linear(4, 1, bias=False, dtype=HALVES[half])}
    )
    nn.init.zeros_(model["head"].weight)
    optimizer = torch.optim.SGD(model["head"].parameters(), lr=1.0)
    optimizer = worker.optimizer(model, optimizer, clip_norm=1.0)
    rows = model["users"](torch.tensor([3]))
    # Gradients of 2 in each of the row's 4 values and of the layer's: their norm is 32**0.5.
    ((rows * 2.0).sum() + (model["head"].weight.float() * 2.0).sum()).backward()
    optimizer.step()
    clipped = torch.full((1, 4), -2.0 / 32**0.5)
    ulp = 2.0**-7 if half == "bfloat16" else 2.0**-10
    found = model["head"].weight.detach().float()
    torch.testing.assert_close(found, clipped, rtol=ulp, atol=0.0)
    rows = torch.from_numpy(table.pull(np.array([3])))
    torch.testing.assert_close(rows, clipped, rtol=1e-5, atol=0.0)
