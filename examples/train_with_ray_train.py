"""Ray Train starts the workers; a parameter server on the same Ray cluster updates the model.

The driver starts the server before the training and hands its handle to the training function.
There a worker joins by its rank, and the rest is as anywhere. `ray.train.torch.prepare_model` is
not called: it would average gradients between the workers, which the server does already.

    pip install 'paramserve[train,torch]'
    python examples/train_with_ray_train.py --workers 2
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import TensorDataset

import paramserve as ps
from arguments import count


def examples() -> TensorDataset:
    """A linear map of 16 numbers to one: the loss can go to zero."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4096, 16, generator=generator)
    return TensorDataset(inputs, inputs @ torch.randn(16, 1, generator=generator))


def train_loop_per_worker(config: dict[str, Any]) -> None:
    """What Ray Train calls in each worker."""
    rank = ray.train.get_context().get_world_rank()
    with config["handle"].connect(rank=rank) as worker:
        model = nn.Linear(16, 1)
        optimizer = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.05))
        batches = worker.loader(examples(), batch_size=64, steps=config["steps"])
        for step, (inputs, targets) in enumerate(batches, start=1):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()  # push gradients, pull values
            worker.log(loss=loss)
            # Only here: `report` returns when all workers have called it. Called at every step it
            # would let each of them wait for the slowest, and there would be no Async left.
            if step % config["checkpoint_every"] == 0 or step == config["steps"]:
                report(model, rank, {"step": step, "loss": loss.item()})


def report(model: nn.Module, rank: int, metrics: dict[str, float]) -> None:
    """All ranks call this at the same step; rank 0's values become the checkpoint."""
    if rank > 0:
        ray.train.report(metrics)
        return
    with TemporaryDirectory() as folder:
        torch.save(model.state_dict(), Path(folder) / "model.pt")
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def train(options: argparse.Namespace) -> ray.train.Result:
    """The driver: servers that outlive the workers, then workers by Ray Train."""
    with ps.Cluster(
        servers=options.servers,
        workers=options.workers,
        engine=ps.OnRay(),
        consistency=ps.Async(),
    ) as cluster:
        trainer = TorchTrainer(
            train_loop_per_worker,
            train_loop_config={
                "handle": cluster.handle(),  # holds the cluster's secret, and shows it nowhere
                "steps": options.steps,
                "checkpoint_every": options.checkpoint_every,
            },
            scaling_config=ray.train.ScalingConfig(num_workers=options.workers),
            run_config=ray.train.RunConfig(storage_path=str(options.storage.resolve())),
        )
        return trainer.fit()


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--workers", type=count, default=2)
    add("--servers", type=count, default=1)
    add("--steps", type=count, default=200, help="of each worker (default 200)")
    add("--checkpoint-every", type=count, default=100, metavar="STEPS", help="default 100")
    add("--storage", type=Path, default=Path("runs/ray_train"), help="seen by all nodes")
    add("--num-cpus", type=count, help="start a Ray here that counts so many")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.num_cpus is None:
        ray.init()  # the cluster in RAY_ADDRESS, or one that runs here, or a new one
    else:
        ray.init(address="local", num_cpus=options.num_cpus)
    try:
        result = train(options)
    except ps.ParamServeError as error:
        print(error)
        return 1
    finally:
        ray.shutdown()
    if result.checkpoint is None or not math.isfinite(result.metrics["loss"]):
        raise AssertionError(f"no checkpoint, or no finite loss: {result}")
    print(f"loss {result.metrics['loss']:.2e} after {result.metrics['step']} steps of each worker")
    print(f"checkpoint: {result.checkpoint.path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
