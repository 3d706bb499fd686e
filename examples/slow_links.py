"""Train a small transformer on text over slow links, in several ways, and draw what each costs.

Each worker and the server is a host of its own: a network namespace whose link is shaped to a rate.
All ways train the same model on the same text; the curves show the loss of rank 0's model on text
that no worker sees, over seconds and over bytes.

    sudo .venv/bin/python examples/slow_links.py --mbit 100 --seconds 120

Needs root and the commands `ip` and `tc` (Linux, iproute2). The text is what Python's own manual
says of the language, which every Python has, or `--text`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import paramserve as ps

SUBNET = "10.78.0"
PORT = 5555
LENGTH = 64
"""Characters in a piece of text."""
HELD_OUT = 0.05
"""Share of the text, at its end."""
PIECES = 48
"""Held-out pieces in each evaluation."""
OUTER = ps.SGD(lr=0.7, momentum=0.9, nesterov=True)


class Way(NamedTuple):
    """One way to train: the policy, the codecs and own steps between two exchanges."""

    policy: ps.Policy
    push: Any = None
    pull: Any = None
    every: int = 1


def ways(every: int, workers: int) -> dict[str, Way]:
    """Ways by name; the first two are what the others are compared with."""
    delayed = ps.DelayedNesterov(lr=0.7, momentum=0.9, pushes=workers)
    local = {"push": ps.Int4(), "pull": ps.BFloat16()}
    deltas = {"push": ps.Int4(), "pull": ps.Delta(ps.Int4())}
    streams = {"fragments": 5, "delay": max(1, every // 10), "merge": 0.5}
    return {
        "float32 each step": Way(ps.Sync()),
        "bfloat16 each step": Way(ps.Sync(), ps.BFloat16(), ps.BFloat16()),
        "int8 each step": Way(ps.Sync(), ps.Int8(), ps.Int8(block=64)),
        "local steps, int4": Way(ps.LocalSteps(every, OUTER, **local), every=every),
        "local steps, int4 both ways": Way(ps.LocalSteps(every, OUTER, **deltas), every=every),
        "in fragments, int4": Way(
            ps.LocalSteps(every, OUTER, **streams, **local), every=every // streams["fragments"]
        ),
        "asynchronous, int4": Way(ps.AsyncLocalSteps(every, delayed, **local), every=every),
    }


# --- the model and its text -----------------------------------------------------------------------


class Transformer(nn.Module):
    """Scores for the character that follows each: [batch, length] to [batch, length, letters]."""

    def __init__(self, letters: int, width: int, layers: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.places = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.scores = nn.Linear(width, letters)
        self.register_buffer("future", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        found = self.letters(text) + self.places.weight[: text.shape[1]]
        return self.scores(self.layers(found, mask=self.future, is_causal=True))


def read_text(path: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The text as numbers of its letters."""
    if path:
        text = Path(path).read_text()
    else:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    return np.array([letters[letter] for letter in text], np.int64)


def pieces(text: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces of text that begin at these places, and for each letter the one that follows it."""
    whole = torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])
    return whole[:, :-1], whole[:, 1:]


# --- what each worker does ------------------------------------------------------------------------


def link_bytes() -> int:
    """Sent and received by this host so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            found = counts.split()
            return int(found[0]) + int(found[8])
    return 0


def train(worker: ps.Worker, options: argparse.Namespace) -> None:
    """Train until the time is over; rank 0 writes a line of JSON at each evaluation."""
    torch.set_num_threads(1)
    way = ways(options.every, options.workers)[options.way]
    text = torch.from_numpy(read_text(options.text))
    held_out = text[-round(HELD_OUT * len(text)) :]
    text = text[: -len(held_out)]
    spread = torch.linspace(0, len(held_out) - LENGTH - 2, PIECES).long()
    model = Transformer(int(text.max()) + 1, options.width, options.layers)
    own = torch.optim.AdamW(model.parameters(), lr=options.lr)
    optimizer = worker.optimizer(model, own, push=way.push, pull=way.pull)
    draw = torch.Generator().manual_seed(worker.rank)
    evaluated_s, steps, began, before = 0.0, 0, time.monotonic(), link_bytes()
    asked = max(options.evaluate_every // way.every, 1) * way.every
    while (seconds := time.monotonic() - began - evaluated_s) < options.seconds:
        if worker.rank == 0 and steps % asked == 0:
            now, sent = time.monotonic(), link_bytes() - before
            with torch.inference_mode():
                inputs, targets = pieces(held_out, spread)
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()
            told = {"seconds": seconds, "bytes": sent, "steps": steps, "loss": loss}
            with Path(options.out).open("a") as file:
                print(json.dumps(told), file=file)
            evaluated_s += time.monotonic() - now
        starts = torch.randint(len(text) - LENGTH - 1, (options.batch,), generator=draw)
        inputs, targets = pieces(text, starts)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        steps += 1


# --- hosts with slow links ------------------------------------------------------------------------


def run(*command: str) -> None:
    """Run a command; an error shows what it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def missing() -> str:
    """Why no hosts can be made here; empty: they can."""
    if os.geteuid() != 0:
        return "hosts with slow links are network namespaces, which need root: start it with sudo"
    absent = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"install iproute2: it has {' and '.join(absent)}" if absent else ""


@contextlib.contextmanager
def hosts(count: int, mbit: float) -> Iterator[list[str]]:
    """Namespaces on one bridge, each with a link of this rate; host n has the address n + 1."""
    prefix = f"slow-{secrets.token_hex(3)}"
    hub, names = f"{prefix}-hub", [f"{prefix}-{number}" for number in range(count)]
    made: list[str] = []
    try:
        run("ip", "netns", "add", hub)
        made.append(hub)
        run("ip", "-n", hub, "link", "add", "name", "br0", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "dev", "br0", "up")
        for number, name in enumerate(names):
            run("ip", "netns", "add", name)
            made.append(name)
            run("ip", "-n", name, "link", "set", "dev", "lo", "up")
            port = f"port{number}"
            ends = ("type", "veth", "peer", "name", port, "netns", hub)
            run("ip", "-n", name, "link", "add", "name", "eth0", *ends)
            run("ip", "-n", hub, "link", "set", "dev", port, "master", "br0", "up")
            run("ip", "-n", name, "addr", "add", f"{SUBNET}.{number + 1}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "dev", "eth0", "up")
            shape = ("tbf", "rate", f"{mbit:g}mbit", "burst", "64kb", "latency", "400ms")
            for where, device in ((name, "eth0"), (hub, port)):
                run("tc", "-n", where, "qdisc", "add", "dev", device, "root", *shape)
        yield names
    finally:
        for name in made:
            run("ip", "netns", "del", name)


def play(name: str, options: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """Train in one way; rank 0's lines."""
    out, token = folder / f"{name.replace(' ', '-')}.jsonl", folder / "token"
    given = {**vars(options), "way": name, "out": str(out), "token": str(token)}
    address = f"{SUBNET}.1:{PORT}"
    with hosts(options.workers + 1, options.mbit) as names:
        children = []
        try:
            for number, host in enumerate(names):
                role = {**given, "address": address, "rank": number - 1}
                command = ["ip", "netns", "exec", host, sys.executable, __file__]
                children.append(subprocess.Popen([*command, "--role", json.dumps(role)]))
            server, *workers = children
            failed = [child.wait() for child in workers]
            if any(failed) or server.wait(60.0):
                raise RuntimeError(f"{name}: a process failed; what it said stands above")
        finally:
            for child in children:
                child.kill()
                child.wait()
    return [json.loads(line) for line in out.read_text().splitlines()]


def as_role(given: dict[str, Any]) -> None:
    """What a process on a host does: rank -1 serves."""
    options = argparse.Namespace(**given)
    if options.rank >= 0:
        ps.work(
            train,
            options.address,
            rank=options.rank,
            workers=options.workers,
            args=(options,),
            token_file=options.token,
        )
        return
    way = ways(options.every, options.workers)[options.way]
    ps.serve(
        options.address,
        token_file=options.token,
        workers=options.workers,
        consistency=way.policy,
        until_done=True,
    )


# --- what comes out -------------------------------------------------------------------------------


def first_below(curve: Sequence[dict[str, float]], loss: float) -> dict[str, float] | None:
    """The first evaluation of at most this loss."""
    return next((point for point in curve if point["loss"] <= loss), None)


def table(curves: dict[str, list[dict[str, float]]], goal: float) -> Table:
    found = Table(title=f"until the held-out loss is {goal:.2f}", title_justify="left")
    found.add_column("way")
    for column in ("steps", "seconds", "MB", "MB a step", "last loss"):
        found.add_column(column, justify="right")
    for name, curve in curves.items():
        at, last = first_below(curve, goal), curve[-1]
        reached = ["-"] * 3
        if at is not None:
            reached = [f"{at['steps']}", f"{at['seconds']:.1f}", f"{at['bytes'] / 1e6:.1f}"]
        each = last["bytes"] / 1e6 / max(last["steps"], 1)
        found.add_row(name, *reached, f"{each:.3f}", f"{last['loss']:.3f}")
    return found


def draw(curves: dict[str, list[dict[str, float]]], path: Path, title: str) -> None:
    """Loss over seconds and over bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for name, curve in curves.items():
        losses = [point["loss"] for point in curve]
        left.plot([point["seconds"] for point in curve], losses, label=name)
        right.plot([point["bytes"] / 1e6 + 0.01 for point in curve], losses, label=name)
    left.set(xlabel="seconds", ylabel="loss on text that no worker sees", title=title)
    right.set(xlabel="MB over one worker's link", xscale="log")
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, default=100.0, help="of each link (default 100)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each way (default 120)")
    parser.add_argument("--every", type=int, default=50, help="own steps of an exchange")
    parser.add_argument("--ways", default="", help="some of them, by a part of their names, a,b")
    parser.add_argument("--goal", type=float, default=2.4, help="the loss to reach")
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--evaluate-every", type=int, default=5, help="steps")
    parser.add_argument("--text", default="", help="a file; else Python's manual")
    parser.add_argument(
        "--out", type=Path, default=Path("slow_links"), help="folder of the picture"
    )
    parser.add_argument("--role", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.role is not None:
        as_role(options.role)
        return 0
    console = Console()
    if why := missing():
        console.print(f"[red]{why}[/]")
        return 1
    wanted = [part.strip() for part in options.ways.split(",") if part.strip()]
    names = [
        name
        for name in ways(options.every, options.workers)
        if not wanted or any(part in name for part in wanted)
    ]
    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder) / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        given = argparse.Namespace(**{key: v for key, v in vars(options).items() if key != "role"})
        given.out = ""
        for name in names:
            console.print(f"{name}: {options.seconds:g} s ...")
            curves[name] = play(name, given, Path(folder))
    console.print(table(curves, options.goal))
    options.out.mkdir(parents=True, exist_ok=True)
    title = f"{options.workers} workers, links of {options.mbit:g} Mbit/s"
    draw(curves, options.out / "slow_links.png", title)
    (options.out / "slow_links.json").write_text(json.dumps(curves))
    console.print(f"the picture is {options.out / 'slow_links.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
