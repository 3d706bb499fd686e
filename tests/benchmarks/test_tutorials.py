"""The tutorials' plain programs compute the right thing, and the page tells of every pair."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from benchmarks.table import Row
from benchmarks.tutorials.lines import code_lines
from tests import programs
from tests.needs import needs
from tests.suites import each_case

import datasets
from benchmarks import bench_tutorials
from paramserve.errors import ParamServeError

ROOT = programs.ROOT
SOURCE = '''\
"""A module."""

import ray


@ray.remote
class Server:
    """A docstring
    of two lines."""

    text = """a value
    of two lines"""

    def get(self):  # a comment beside code

        # a comment
        print(
            "not counted",
        )
        self.console.print("not counted")
        return self.text


def drive(steps):
    def begin():
        return start(steps)

    if steps:
        job = start(
            steps,
        )
    return job
'''


@pytest.fixture
def alone(tmp_path: Path) -> dict[str, str]:
    return programs.alone(tmp_path)


def run(program: str, options: str, environment: dict[str, str]) -> str:
    module = f"benchmarks.tutorials.{program}"
    return programs.run([sys.executable, "-m", module, *options.split()], environment)


@each_case(
    ("name", "lines"),
    [
        ("Server", 6),  # decorator, class, text in two lines, def, return
        ("Server.get", 2),
        ("drive", 8),
        ("drive.begin", 2),
        ("drive.begin:start", 1),
    ],
)
def test_lines_of_a_part_are_those_with_code(name: str, lines: int) -> None:
    assert code_lines(SOURCE, [name]) == lines


def test_lines_of_parts_inside_each_other_count_once() -> None:
    assert code_lines(SOURCE, ["Server", "Server.get", "drive"]) == 14


def test_lines_of_a_call_are_those_of_its_innermost_statement() -> None:
    without = SOURCE.replace("return start(steps)", "return steps")
    assert code_lines(without, ["drive:start"]) == 3


@each_case("name", ["absent", "Server.absent", "drive:absent", "drive:start"])
def test_lines_of_an_absent_or_ambiguous_part_is_an_error(name: str) -> None:
    with pytest.raises(LookupError, match=name):
        code_lines(SOURCE, [name])


def test_page_has_the_lines_of_every_pair() -> None:
    page = bench_tutorials.PAGE.read_text()
    between = page.split(bench_tutorials.START)[1].split(bench_tutorials.END)[0]
    rows = re.findall(r"^\| `(\S+)` \| [\w ]+, `(\S+)` \| (\d+) \| (\d+) \|", between, re.M)
    assert rows == [
        (pair.ours.path, pair.plain.path, str(pair.ours.lines()), str(pair.plain.lines()))
        for pair in bench_tutorials.PAIRS
    ]


def test_write_replaces_what_is_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    start, end = bench_tutorials.START, bench_tutorials.END
    page.write_text(f"before\n{start}\nold\n{end}\nafter\n")
    samples = {"ours": [30.0, 10.0, 20.0], "on_ray": [15.0], "ray": [10.0], "rpc": [5.0]}
    rows = [Row("tutorial, MNIST, sync: steps over 2 workers", "a second", "more", samples)]
    bench_tutorials.write(page, bench_tutorials.tables(rows, 3))
    text = page.read_text()
    assert "old" not in text
    assert text.startswith(f"before\n{start}\n| tutorial |")
    assert "| MNIST, sync: steps | 20.0 | 15.0 | 10.0 | 5 | 2 | 1.5 | 4 |" in text
    assert text.endswith(f".\n{end}\nafter\n")


def test_write_page_without_marks_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks\n")
    with pytest.raises(ValueError, match="has no <!-- tutorials"):
        bench_tutorials.write(page, "")
    assert page.read_text() == "no marks\n"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_vector_in_plain_ray_counts_every_push(alone: dict[str, str]) -> None:
    needs("ray")
    output = run("vector_ray", "--steps 15 --pause-s 0.01", alone)
    ends = re.findall(r"at the end: \[(.*)\]", output)
    assert [[float(one) for one in end.split()] for end in ends] == [[30.0] * 10] * 2
    assert len(re.findall(r"\d pushes per second", output)) == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sharded_in_plain_ray_counts_every_push(alone: dict[str, str]) -> None:
    needs("ray")
    output = run("sharded_ray", "--megabytes 1 --steps 2 --servers 3 --sync", alone)
    assert re.search(r"^1 MB, sync, 3 servers, 2 workers: [\d.]+ updates per second$", output)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", ["mnist_ray", "mnist_rpc"])
def test_mnist_in_plain_ray_and_rpc_learns_the_digits(program: str, alone: dict[str, str]) -> None:
    if program == "mnist_ray":
        needs("ray")
    output = run(program, "--steps 60 --data digits", alone)
    reached = dict(re.findall(r"(\w+): ([\d.]+)% of the test images, [\d,]+ steps", output))
    assert set(reached) == {"sync", "async"}
    assert all(float(share) > 40.0 for share in reached.values())  # ten classes: chance is 10%


@pytest.mark.slow
@pytest.mark.timeout(400)  # fetching may try each source to its end first
def test_language_model_in_plain_ray_is_better_than_unigrams(alone: dict[str, str]) -> None:
    needs("ray")
    try:
        folder = datasets.fetch_plays()
    except ParamServeError as error:
        pytest.skip(f"THE LANGUAGE MODEL IS NOT CHECKED HERE: {error}")
    small = "--words 60000 --vocabulary 500 --embedding 32 --hidden 64 --lr 0.005 --steps 200"
    output = run("language_model_ray", f"{small} --data {folder}", alone)
    ended = re.search(r"perplexity: ([\d.]+); of the unigram model: ([\d.]+); [\d.]+ steps", output)
    assert ended is not None, output
    reached, unigram = map(float, ended.groups())
    assert reached < 0.75 * unigram


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bench_tutorials_tiny_measures_every_contestant(tmp_path: Path) -> None:
    needs("ray")
    assert bench_tutorials.main(["--tiny", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "bench.json").read_text())
    found = {row["workload"]: row["medians"] for row in record["rows"] if row["medians"]}
    tiny = ("vector_1", "sharded_async", "mnist_async", "language")  # the rest is more of the same
    names = [bench_tutorials.WORKLOADS[name].format(megabytes=1) for name in tiny]
    assert list(found) == [f"tutorial, {name} over 2 workers" for name in names]
    for workload, medians in found.items():
        assert set(medians) == {"ours", "on_ray", "ray"} | (
            {"rpc"} if "MNIST" in workload else set()
        )
        assert all(value > 0 for value in medians.values())
