"""Kill a server in the middle of a run: it goes on from its last checkpoint, by itself.

The values at the end are those of a run that lost no server, bit by bit: it trains in Sync, and the
steps behind the checkpoint are made again.

    python examples/resume.py
    python examples/resume.py --data digits --steps 100
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import datasets
import paramserve as ps
from arguments import count
from ending import exit_code
from mnist import ConvNet, accuracy, testset
from paramserve.observe import watch


def train(worker: ps.Worker, folder: Path, steps: int) -> None:
    """What each worker does; when it goes on from a checkpoint, the loader leaves out what was
    trained on."""
    data = datasets.load(folder)
    dataset = datasets.tensors(data.train_images, data.train_labels)
    model = ConvNet()
    optimizer = worker.optimizer(model, torch.optim.Adam(model.parameters(), lr=0.002))
    for images, labels in worker.loader(dataset, batch_size=64, steps=steps):
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        worker.log(loss=loss)


def kill_a_server() -> None:
    """End server 0 of this process's run, as the system short of memory would."""
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        if name_of(pid) == "paramserve server 0" and os.getpid() in ancestors(pid):
            os.kill(pid, signal.SIGKILL)


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[-2].decode()
    except (OSError, IndexError):  # it has ended
        return ""


def ancestors(pid: int) -> list[int]:
    """Ancestors of a process: its parent, and so on."""
    found = []
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
        found.append(pid)
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--steps", type=count, default=1000)
    add("--workers", type=count, default=2)
    add("--servers", type=count, default=2)
    add("--data", help="folder with the IDX files, or 'digits'; default: find or fetch MNIST")
    return parser.parse_args(argv)


@exit_code
def main(argv: list[str] | None = None) -> None:
    """Train with a killed server and without, and compare."""
    options = parse(argv)
    torch.set_num_threads(1)
    folder = datasets.fetch(options.data)

    def start(checkpoint: Path | None = None) -> ps.Job:
        return ps.start(
            train,
            args=(folder, options.steps),
            workers=options.workers,
            servers=options.servers,
            seed=0,
            checkpoint=checkpoint,
        )

    with tempfile.TemporaryDirectory() as runs:
        job = start(Path(runs, "mnist"))
        with watch(job):
            while not any(
                group.clock > options.steps // 4 for group in job.status().trained.values()
            ):
                time.sleep(0.01)
            print(job.checkpoint())
            time.sleep(1.5)
            kill_a_server()
            result = job.wait()
        for rollback in result.rollbacks:
            print(f"went on after {rollback.seconds:.1f} s: {rollback.line()}")
    whole = start().wait()
    print(f"accuracy: {accuracy(result.state_dict(), *testset(folder)):.1%}")
    same = all(
        torch.equal(value, whole.state_dict()[n]) for n, value in result.state_dict().items()
    )
    print(f"the values are {'' if same else 'not '}those of a run that lost no server")
    if not (same and result.rollbacks):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
