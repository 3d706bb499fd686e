"""What servers wrote goes to other tools and back: plain torch, safetensors,
`torch.distributed.checkpoint`, Parquet."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tests.needs import needs
from torch import nn

import paramserve as ps
from paramserve.cli import cli

STEPS, MORE = 7, 5
ROWS, DIM = 20, 4


def small_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.BatchNorm1d(30), nn.Linear(30, 70), nn.Tanh(), nn.Linear(70, 1))


def stepped(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    first: int,
    last: int,
    worker: ps.Worker | None = None,
) -> None:
    """Train on the data of these steps; the rate is halved on the way."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
    if worker is not None:
        worker.track("schedule", scheduler)
    for step in range(last):
        if step >= first:
            inputs = torch.randn(16, 30, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of steps of the schedule that make up for others
            scheduler.step()


def train(worker: ps.Worker, steps: int) -> dict[str, Any]:
    """All ranks train on the same; the optimizer's state at the end."""
    model = small_model()
    optimizer = worker.optimizer(model, torch.optim.Adam(model.parameters(), lr=0.01))
    own = ps.Async()
    rows = worker.client.table("users", dim=DIM, rule=ps.Adagrad(lr=0.1), consistency=own)
    for step in range(worker.clock, steps):
        keys = np.arange(step, ROWS)
        rows.push(keys, np.full((keys.size, DIM), 0.1 * (1 + worker.rank), np.float32))
    stepped(model, optimizer, worker.clock, steps, worker)
    return optimizer.state_dict()


def go_on(worker: ps.Worker, kept: dict[str, Any], first: int, last: int) -> Any:
    """From a state that torch has; the rows that the table begins with, too."""
    model = small_model()
    model.load_state_dict(kept["model"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer.load_state_dict(kept["optimizer"])
    for group in optimizer.param_groups:
        group["lr"] = 0.01  # the schedule begins with it
    optimizer = worker.optimizer(model, optimizer)
    stepped(model, optimizer, first, last)
    table = worker.client.table("users", dim=DIM, rule=ps.Adagrad(lr=0.1))
    return table.pull(np.arange(ROWS))


def export(path: Path, kind: str, out: Path, *more: str) -> None:
    arguments = ["checkpoints", "export", str(path), "--to", kind, "--out", str(out), *more]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ps.Result]:
    """The checkpoint at the end of a run on two servers."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    result = ps.run(train, args=(STEPS,), workers=2, servers=2, checkpoint=folder)
    assert result.checkpoints is not None
    return Path(result.checkpoints.path), result


@pytest.mark.slow
def test_optimizer_goes_to_torch_and_back(run: tuple[Path, ps.Result], tmp_path: Path) -> None:
    """State and values are exported bit by bit; torch's steps differ from the servers' as float32
    rounds."""
    parquet = needs("pyarrow.parquet")
    path, result = run
    file, tables = tmp_path / "both.pt", tmp_path / "tables"
    export(path, "torch", file, "--optimizer")
    kept = torch.load(file)
    told = result.returns[0]
    assert kept["optimizer"]["param_groups"] == told["param_groups"]
    assert kept["optimizer"]["param_groups"][0]["lr"] == 0.005
    for index, entry in told["state"].items():
        for name, value in entry.items():
            assert kept["optimizer"]["state"][index][name].equal(value), name
    for name, value in result.state_dict().items():
        assert kept["model"][name].equal(torch.as_tensor(value)), name

    plain, last = small_model(), STEPS + MORE
    plain.load_state_dict(kept["model"])
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    optimizer.load_state_dict(kept["optimizer"])
    optimizer.param_groups[0]["lr"] = 0.01
    stepped(plain, optimizer, STEPS, last)
    on = ps.run(train, args=(last,), workers=2, servers=3, resume=path)
    same(plain.state_dict(), on.state_dict())

    export(path, "parquet", tables)
    both = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}
    arguments = (both, last, last + MORE)
    back = ps.run(
        go_on, args=arguments, workers=2, servers=2, checkpoint=ps.Checkpoint(load_tables=tables)
    )
    optimizer.param_groups[0]["lr"] = 0.01
    stepped(plain, optimizer, last, last + MORE)
    same(plain.state_dict(), back.state_dict())
    table = parquet.read_table(tables / "users.parquet").to_pylist()
    rows = {row["key"]: row["value"] for row in table}
    assert rows.keys() == set(range(ROWS))
    np.testing.assert_array_equal(back.returns[0], [rows[key] for key in range(ROWS)])
    assert np.unique(back.returns[0]).size > 2


def same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, torch.as_tensor(other[name]), rtol=1e-5, atol=1e-6)


def test_values_are_read_by_safetensors_and_by_torch_distributed(
    run: tuple[Path, ps.Result],
) -> None:
    needs("safetensors")
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    path, result = run
    wanted = {name: torch.as_tensor(value) for name, value in result.state_dict().items()}
    trained = {name for name, _ in small_model().named_parameters()}
    values = load_file(path / "values" / "model.safetensors")
    assert values.keys() == trained
    state = small_model().state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of loading in one process
        reader = dcp.HuggingFaceStorageReader(str(path / "values"))
        dcp.load(state, storage_reader=reader, no_dist=True)
    for name in wanted:
        assert state[name].equal(wanted[name]), name
        assert name not in trained or values[name].equal(wanted[name]), name


@pytest.mark.slow
def test_state_that_only_workers_have_is_not_exported(tmp_path: Path) -> None:
    settings = {"workers": 1, "checkpoint": tmp_path / "runs"}
    ps.run(train, args=(2,), consistency=ps.LocalSteps(every=1), **settings)
    out = ["--to", "torch", "--optimizer", "--out", str(tmp_path / "both.pt")]
    done = CliRunner().invoke(cli, ["checkpoints", "export", str(tmp_path / "runs"), *out])
    assert done.exit_code == 1
    assert "under LocalSteps each worker makes its own steps" in str(done.exception)
    assert not (tmp_path / "both.pt").exists()
