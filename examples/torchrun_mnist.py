"""MNIST started the PyTorch way, by torchrun: rank 0 serves, the other ranks train.

    torchrun --nproc-per-node 3 examples/torchrun_mnist.py

The training function is that of `mnist.py`. On several machines give each process the same
`--token-file`, and certificates (`ps.TLS`) where others can listen on the network.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import datasets
import paramserve as ps
from arguments import count
from mnist import ConvNet, accuracy, testset

TOKEN_S = 60.0
"""How long the other ranks wait for rank 0 to make the token."""


def serve(address: str, token_file: Path, workers: int) -> None:
    """Rank 0: hold the values until all workers have left."""
    options = {"consistency": ps.Async(), "until_done": True}
    ps.serve(address, token_file=token_file, workers=workers, **options)


def train(worker: ps.Worker, folder: Path, steps: int, batch_size: int) -> None:
    """Every other rank; the last one evaluates."""
    data = datasets.load(folder)
    dataset = datasets.tensors(data.train_images, data.train_labels)
    model = ConvNet()
    optimizer = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for images, labels in worker.loader(dataset, batch_size=batch_size, steps=steps):
        optimizer.zero_grad()
        F.nll_loss(model(images), labels).backward()
        optimizer.step()
    reached = accuracy(model.state_dict(), *testset(folder))
    print(f"worker {worker.rank}: {reached:.2%} of the test images", flush=True)


def token_of_this_run(rank: int) -> Path:
    """A token that all ranks of one machine share: rank 0 makes it, only this user can read it."""
    # torchrun is the parent of all ranks of a machine: no other run has this name.
    path = Path(tempfile.gettempdir()) / f"paramserve-{os.getuid()}-{os.getppid()}.token"
    if rank == 0:
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(os.urandom(32).hex())
        return path
    until = time.monotonic() + TOKEN_S
    while not (path.exists() and path.stat().st_size and path.stat().st_uid == os.getuid()):
        if time.monotonic() > until:
            raise SystemExit(f"rank 0 did not make {path} in {TOKEN_S:.0f} s")
        time.sleep(0.05)
    return path


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--port", type=count, default=29600, help="of the server, on MASTER_ADDR")
    add("--token-file", type=Path, help="default: one for this run, on this machine")
    add("--steps", type=count, default=200, help="of each worker")
    add("--batch-size", type=count, default=128)
    add("--data", help="folder with the IDX files, or 'digits'; default: find or fetch MNIST")
    options = parser.parse_args(argv)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world < 2:
        raise SystemExit("rank 0 serves: start at least two processes")
    torch.set_num_threads(1)
    address = f"{os.environ['MASTER_ADDR']}:{options.port}"
    token_file = options.token_file or token_of_this_run(rank)
    if rank == 0:
        try:
            serve(address, token_file, world - 1)
        finally:
            if options.token_file is None:
                token_file.unlink()
        return
    folder = datasets.fetch(options.data)
    with ps.connect(address, rank=rank - 1, workers=world - 1, token_file=token_file) as worker:
        train(worker, folder, options.steps, options.batch_size)


if __name__ == "__main__":
    main()
