"""Models with modules on tables in whole runs: they are the computation of one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.learning.training import part_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paramserve as ps
from paramserve.pytorch import Embedding, EmbeddingBag, from_embedding
from paramserve.pytorch.loader import load

WORKERS = 2
BATCH = 16
STEPS = 12
SEED = 5
LR = 0.5
USERS, TAGS, DIM = 40, 12, 8


class Net(nn.Module):
    """A user, a bag of tags, and dense layers with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.user: nn.Module = nn.Embedding(USERS, DIM)
            self.tags: nn.Module = nn.EmbeddingBag(TAGS, DIM, mode="mean", padding_idx=0)
            self.dense = nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, users: Tensor, tags: Tensor) -> Tensor:
        found = torch.cat([self.user(users), self.tags(tags)], dim=1)
        return self.dense(found).squeeze(1)


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    users = torch.randint(USERS, (600,), generator=generator)
    tags = torch.randint(TAGS, (600, 4), generator=generator)
    return TensorDataset(users, tags, ((users % 3) + (tags > 6).sum(1)).float())


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.dense.parameters(), lr=0.01, eps=1e-6)


def on_tables(worker: ps.Worker) -> Net:
    """The net with its embeddings taken over; the other ranks' first values count for nothing."""
    model = Net()
    if worker.rank:
        for param in model.parameters():
            nn.init.constant_(param, 9.0)
    rule = ps.SGD(lr=LR)
    for name in ("user", "tags"):
        given = getattr(model, name)
        if worker.rank and given.padding_idx is not None:
            nn.init.zeros_(given.weight)
        sync = ps.Sync(reduce="mean")
        module = from_embedding(worker.client, name, given, rule=rule, consistency=sync)
        setattr(model, name, module)
    return model


def trained(worker: ps.Worker, model: Net) -> dict[str, Any]:
    """What rank 0 ends with, on its own side and in the tables."""
    rows = {
        name: getattr(model, name).to_embedding(size).weight.detach().numpy()
        for name, size in (("user", USERS), ("tags", TAGS))
    }
    dense = {name: value.numpy() for name, value in model.dense.state_dict().items()}
    return {"rows": rows, "dense": dense}


def listening() -> Iterator[str]:
    """The addresses that this process listens on with TCP, as the kernel writes them."""
    links = (os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
    inodes = {link[8:-1] for link in _there(links) if link.startswith("socket:[")}
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:  # TCP_LISTEN
                    yield fields[1].partition(":")[0]


def _there(links: Iterator[str]) -> Iterator[str]:
    while True:
        try:
            yield next(links)
        except StopIteration:
            return
        except OSError:
            return


def meet(worker: ps.Worker) -> None:
    """Rank 0, whose store is the group's, comes too early for its patience, and is told so; then
    all make the process group."""
    if worker.rank == 0:
        with pytest.raises(ps.errors.Timeout, match=r"waited 0\.5 s for rank 1 of 2 to call"):
            worker.process_group(timeout_s=0.5)
        assert not dist.is_initialized()
    worker.barrier()
    group = worker.process_group()
    assert worker.process_group() is group
    assert dist.get_backend() == "gloo"
    total = torch.full((3,), float(worker.rank + 1))
    dist.all_reduce(total)
    assert total.tolist() == [1.0 + 2.0] * 3
    assert "GLOO_SOCKET_IFNAME" in os.environ
    assert set(listening()) == {"0100007F"}, "127.0.0.1, of the store or of gloo"


def train(worker: ps.Worker, dense: str) -> dict[str, Any]:
    model = on_tables(worker)
    optimizer = dense_optimizer(model)
    called: nn.Module = model
    if dense == "local":
        meet(worker)
        called = DistributedDataParallel(model)
        with pytest.raises(ValueError, match="would do so again"):
            worker.optimizer(called, optimizer)
    worker.optimizer(called, optimizer, dense=dense)
    for users, tags, targets in worker.loader(dataset(), batch_size=BATCH, steps=STEPS):
        optimizer.zero_grad()
        (called(users, tags) - targets).square().mean().backward()
        optimizer.step()
    return trained(worker, model)


def serial() -> Net:
    """Plain torch in one process, on the joined batches."""
    model = Net()
    rows = [*model.user.parameters(), *model.tags.parameters()]
    optimizers = [torch.optim.SGD(rows, lr=LR), dense_optimizer(model)]
    loaders = [
        load(part_of(rank, WORKERS, SEED), dataset(), batch_size=BATCH, steps=STEPS)
        for rank in range(WORKERS)
    ]
    for ranks in zip(*loaders, strict=True):
        users, tags, targets = (torch.cat(parts) for parts in zip(*ranks, strict=True))
        for each in optimizers:
            each.zero_grad()
        (model(users, tags) - targets).square().mean().backward()
        for each in optimizers:
            each.step()
    return model


@pytest.mark.parametrize("dense", ["servers", "local"])
def test_run_with_tables_equals_torch_on_the_joined_batch(dense: str) -> None:
    result = ps.run(
        train,
        args=(dense,),
        workers=WORKERS,
        servers=2,
        seed=SEED,
        engine=ps.Local(threads_per_worker=1),
        timeout_s=100,
    )
    expected = serial()
    for rank in range(WORKERS):
        found = result.returns[rank]
        for name in ("user", "tags"):
            values = torch.from_numpy(found["rows"][name])
            expected_values = getattr(expected, name).weight
            torch.testing.assert_close(values, expected_values, rtol=1e-4, atol=1e-5)
        for name, value in expected.dense.state_dict().items():
            ours = torch.from_numpy(found["dense"][name])
            torch.testing.assert_close(ours, value, rtol=1e-4, atol=1e-5)
    state = result.state_dict()
    assert state.keys() == {f"dense.{name}" for name in expected.dense.state_dict()}
    for name, value in result.returns[0]["dense"].items():
        assert torch.equal(state[f"dense.{name}"], torch.from_numpy(value))


def train_tables_alone(worker: ps.Worker) -> tuple[float, float, int, int]:
    """Matrix factorisation: no layer but tables, in Async; with a loss scale that is too large."""
    rule, first = ps.SGD(lr=1.0), ps.Normal(std=0.5)
    own = ps.Async()
    users = worker.client.table("users", dim=DIM, rule=rule, init=first, consistency=own)
    tags = worker.client.table("tags", dim=DIM, rule=rule, init=first, consistency=own)
    model = nn.ModuleList([Embedding(users), EmbeddingBag(tags)])
    optimizer = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0), overlap=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)

    def loss_of(who: Tensor, what: Tensor, targets: Tensor) -> Tensor:
        return ((model[0](who) * model[1](what)).sum(1) - targets / 4).square().mean()

    def evaluated() -> float:
        model.eval()
        with torch.no_grad():
            loss = loss_of(*dataset().tensors)
        model.train()
        return float(loss)

    before, created = evaluated(), len(users)
    for batch in worker.loader(dataset(), batch_size=BATCH, steps=150):
        optimizer.zero_grad()
        scaler.scale(loss_of(*batch)).backward()
        scaler.step(optimizer)
        scaler.update()
    return before, evaluated(), created, worker.clock


def test_run_of_tables_alone_learns() -> None:
    result = ps.run(
        train_tables_alone,
        workers=WORKERS,
        servers=2,
        consistency=ps.Sync(),
        seed=SEED,
        engine=ps.Local(threads_per_worker=1),
        timeout_s=100,
    )
    for before, after, _, clock in result.returns.values():
        assert after < 0.5 * before
        assert clock == 150, "steps that the scaler has left out are counted, too"
    assert result.returns[0][2] == 0 or result.returns[1][2] == 0, "reading has created nothing"
    for name in ("users", "tags"):
        assert result.groups[name].policy == "Async"
        assert result.groups[name].steps == 150 * WORKERS


def train_on_defaults(worker: ps.Worker, dies: bool) -> tuple[list[float], bytes]:
    """Its losses, and the rows at the end."""
    users = worker.client.table("users", dim=DIM, rule=ps.Adagrad(lr=0.1), push=ps.Int8())
    model = nn.Sequential(Embedding(users), nn.Linear(DIM, 1))
    optimizer = worker.optimizer(model, torch.optim.Adam(model.parameters(), lr=0.01))
    losses = []
    for who, _, targets in worker.loader(dataset(), batch_size=BATCH, steps=STEPS):
        if dies and (worker.rank, worker.clock, worker.incarnation) == (1, STEPS // 2, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = (model(who).squeeze(1) - targets).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    worker.barrier()
    return losses, users.pull(np.arange(USERS)).tobytes()


@pytest.mark.slow
def test_run_with_a_table_repeats_bit_by_bit_without_a_policy_being_named() -> None:
    """So does one in which a worker dies and is started again."""
    runs = [
        ps.run(
            train_on_defaults,
            args=(dies,),
            workers=WORKERS,
            servers=2,
            seed=SEED,
            engine=ps.Local(threads_per_worker=1),
            timeout_s=100,
            on_worker_death=ps.Restart(),
        )
        for dies in (False, False, True)
    ]
    assert [len(each.restarts) for each in runs] == [0, 0, 1]
    assert runs[0].groups["users"].policy == "Sync"
    first, second, broken = (each.returns for each in runs)
    assert first == second
    assert [broken[rank][1] for rank in range(WORKERS)] == [first[0][1], first[1][1]]
    assert broken[0][0] == first[0][0]
    assert broken[1][0] == first[1][0][STEPS // 2 :]
