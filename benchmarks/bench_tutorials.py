"""Are the tutorials' programs shorter and faster here than in plain Ray and plain torch RPC?

`--write` puts the two tables into docs/examples.md; with `--rounds 0` only that of the lines.

    python -m benchmarks.bench_tutorials --rounds 2 --write
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks import harness
from benchmarks.table import Bar, Row, figure, machine
from benchmarks.tutorials.lines import code_lines

if TYPE_CHECKING:
    from benchmarks.tutorials.contestants import Load

PAGE = harness.ROOT / "docs" / "examples.md"
START, END = "<!-- tutorials:start -->", "<!-- tutorials:end -->"
THESE = "benchmarks.tutorials.contestants"
CONTESTANTS = {
    "ours": f"{THESE}:local",
    "on_ray": f"{THESE}:on_ray",
    "ray": f"{THESE}:plain_ray",
    "rpc": f"{THESE}:plain_rpc",
}
NEED_RAY = ("on_ray", "ray")
PLAIN = {"ray": "plain Ray", "rpc": "plain RPC"}
SPEEDS = {"ours": "ours, Local", "on_ray": "ours, on Ray", **PLAIN}
RATIOS = {
    ("ours", "ray"): "Local / plain Ray",
    ("on_ray", "ray"): "on Ray / plain Ray",
    ("ours", "rpc"): "Local / plain RPC",
}


class Program(NamedTuple):
    """A file below the root, and the parts of it that are counted."""

    path: str
    parts: tuple[str, ...]

    also: Program | None = None
    """Another file that it uses."""

    def lines(self) -> int:
        own = code_lines((harness.ROOT / self.path).read_text(), self.parts)
        return own + (self.also.lines() if self.also is not None else 0)


@dataclass(frozen=True)
class Pair:
    """Two programs that do the same; `rival` names what the plain one is written in."""

    name: str
    ours: Program
    plain: Program
    rival: str


VECTOR = Program("examples/vector.py", ("train", "run"))
MEETING = Program("examples/meeting.py", ("meet",))
SHARDED = Program("examples/sharded_100mb.py", ("train", "step", "measure:ps.run"), MEETING)
MNIST = Program("examples/mnist.py", ("train", "run.start"))
LANGUAGE = Program("examples/language_model.py", ("train", "learn:ps.start"))
RIVALS = "benchmarks/tutorials"
PAIRS = (
    Pair(
        "vector",
        VECTOR,
        Program(f"{RIVALS}/vector_ray.py", ("Server", "train", "pull", "start", "run")),
        "ray",
    ),
    Pair(
        "sharded_100mb",
        SHARDED,
        Program(
            f"{RIVALS}/sharded_ray.py", ("Server", "Worker", "start", "train_async", "train_sync")
        ),
        "ray",
    ),
    Pair(
        "mnist",
        MNIST,
        Program(
            f"{RIVALS}/mnist_ray.py", ("Server", "Worker", "start", "train_sync", "train_async")
        ),
        "ray",
    ),
    Pair(
        "mnist",
        MNIST,
        Program(f"{RIVALS}/mnist_rpc.py", ("Server", "train", "join", "work", "members", "run")),
        "rpc",
    ),
    Pair(
        "language_model",
        LANGUAGE,
        Program(f"{RIVALS}/language_model_ray.py", ("Server", "Worker", "start", "train")),
        "ray",
    ),
)
WORKLOADS = {
    "vector_1": "vector of ten, 1 server: pushes",
    "vector_2": "vector of ten, 2 servers: pushes",
    "sharded_async": "{megabytes} MB, 2 servers, async: updates",
    "sharded_sync": "{megabytes} MB, 2 servers, sync: updates",
    "mnist_sync": "MNIST ConvNet, sync: steps",
    "mnist_async": "MNIST ConvNet, async: steps",
    "language": "language model, async: steps",
}
"""Workload of each of the contestants' figures; each with two workers, counted over both."""


def measure(contest: harness.Contest, tiny: bool) -> list[Row]:
    """Everything of all tutorials, by our two engines and in plain Ray and RPC."""
    load = _load(tiny)
    there = importlib.util.find_spec("ray") is not None
    contestants = {
        label: target for label, target in CONTESTANTS.items() if there or label not in NEED_RAY
    }
    found = contest.run("tutorials", contestants, load)
    rows = []
    for name, text in WORKLOADS.items():
        samples = found.samples(name)
        rivals = [rival for rival in PLAIN if rival in samples]
        ours_on_ray = found.median("on_ray", name)
        rows.append(
            Row(
                f"tutorial, {text.format(megabytes=load.megabytes)} over 2 workers",
                "a second",
                "more",
                samples,
                tuple(Bar("times", 1, rival) for rival in rivals),
                "" if ours_on_ray is None else f"ours on Ray: {figure(ours_on_ray)}.",
            )
        )
    return rows


def _load(tiny: bool) -> Load:
    import datasets
    from benchmarks.tutorials.contestants import Load

    digits = datasets.fetch("digits")
    if not tiny:
        return Load(digits)
    return Load(
        digits,
        policies=("async",),
        vector_steps=50,
        vector_servers=(1,),
        warm_steps=5,
        megabytes=1,
        sharded_steps=2,
        mnist_steps=10,
        language_steps=3,
        sizes=(100, 8, 16),
        words=2_000,
    )


def tables(rows: Sequence[Row], rounds: int) -> str:
    """What stands between the marks of the page: the lines, and the speeds if there are any."""
    lines = [
        "| tutorial | compared with | lines, ours | lines, plain | plain / ours |",
        "|---|---|---|---|---|",
    ]
    for pair in PAIRS:
        ours, plain = pair.ours.lines(), pair.plain.lines()
        where = f"{PLAIN[pair.rival]}, `{pair.plain.path}`"
        lines.append(f"| `{pair.ours.path}` | {where} | {ours} | {plain} | {plain / ours:.1f} |")
    measured = [row for row in rows if row.samples]
    if measured:
        lines += ["", *_speeds(measured), "", _about(rounds)]
    return "\n".join(lines) + "\n"


def _speeds(rows: Sequence[Row]) -> list[str]:
    heads = ["a second, over two workers", *SPEEDS.values(), *RATIOS.values()]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        speeds = [row.median(label) for label in SPEEDS]
        ratios = [_ratio(row, *pair) for pair in RATIOS]
        name = row.workload.removeprefix("tutorial, ").removesuffix(" over 2 workers")
        cells = [figure(one) if one is not None else "" for one in speeds + ratios]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return lines


def _ratio(row: Row, ours: str, plain: str) -> float | None:
    over, under = row.median(ours), row.median(plain)
    return over / under if over is not None and under is not None else None


def _about(rounds: int) -> str:
    found = machine()
    return (
        f"Medians of {rounds} rounds, contestants in turn in clean processes, one thread for each "
        f"process, all of the same niceness; {found['cores']} cores, Python {found['python']}, "
        f"torch {found['torch']}, ray {found['ray']}."
    )


def write(page: Path, text: str) -> None:
    """Replace what is between the marks.

    Raises:
        ValueError: the page does not have both marks.
    """
    before, start, rest = page.read_text().partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"{page} has no {START} ... {END}")
    page.write_text(f"{before}{START}\n{text}{END}{after}")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    writes = "--write" in arguments
    arguments = [one for one in arguments if one != "--write"]
    chosen = harness.options(arguments, __doc__)
    if writes and chosen.tiny:
        raise SystemExit("--write is for the page: tiny sizes say nothing about speed")
    rows: list[Row] = []

    def kept(contest: harness.Contest, tiny: bool) -> list[Row]:
        rows.extend(measure(contest, tiny))
        return rows

    status = harness.main(arguments, __doc__, [kept])
    if writes and status == 0:
        write(PAGE, tables(rows, chosen.rounds if chosen.rounds is not None else 3))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
