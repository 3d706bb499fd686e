"""Sync means sync: each page's program that trains under it trains the same when it runs again."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from tests.api import test_tutorial
from tests.api.test_docs import PAGES, ROOT, each_alone, programs
from tests.needs import needs

from paramserve.consistency.registry import BUILT_IN

RECORD = f"""
import sys
sys.path.append({str(ROOT)!r})
from tests.api.recorder import record
record()
"""
COMMAND = """
import runpy, sys
sys.argv = {!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
TIMES = {"time.time", "time.monotonic", "time.perf_counter"}
"""A program that calls one of them trains for so many seconds, and not for so many steps."""
COLLECTING = {f"ps.{name}" for name, kind in BUILT_IN.items() if getattr(kind, "collects", False)}
LINE = re.compile(r"^# trained under Sync: (.*)$", re.MULTILINE)
"""What `tests.api.recorder` prints."""


def sync_programs(page: Path) -> list[str]:
    """The programs of a page that train under Sync; those of the tutorial as its commands run
    them."""
    if page not in test_tutorial.PAGES:
        return [code for code in programs(page) if trains_in_sync(code)]
    blocks = [*test_tutorial.blocks(page)]
    files = {test_tutorial.named(code): code for language, code in blocks if language == "python"}
    shell = "\n".join(code for language, code in blocks if language == "sh")
    commands = [line.split() for line in re.findall(r"^python (\w+\.py.*)$", shell, re.MULTILINE)]
    return [COMMAND.format(words) for words in commands if trains_in_sync(files[words[0]])]


def trains_in_sync(code: str) -> bool:
    """Whether a program starts a run without a policy, or builds a policy each of whose clocks has
    the gradients of all ranks."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    calls = [(ast.unparse(node.func), {word.arg for word in node.keywords}) for node in nodes]
    if any(name in TIMES for name, _ in calls):
        return False
    by_default = any(
        name in ("ps.run", "ps.start") and "consistency" not in options for name, options in calls
    )
    return by_default or any(
        name in COLLECTING and not options & {"backup", "timeout_s"} for name, options in calls
    )


TRAINS = {page: codes for page in PAGES if (codes := sync_programs(page))}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", TRAINS, ids=lambda page: page.stem)
def test_sync_programs_of_a_page_train_the_same_again(page: Path, tmp_path: Path) -> None:
    """Each value and row, bit by bit, with one seed."""
    needs("pyarrow")
    if any("OnRay" in code for code in TRAINS[page]):
        needs("ray")
    first, second = (digests(tmp_path / name, TRAINS[page]) for name in ("first", "second"))
    assert any(first), f"no run under Sync on {page.name}"
    assert first == second


def digests(folder: Path, codes: list[str]) -> list[list[dict[str, str]]]:
    """Of what each run of each program has trained, in a reader's folder."""
    folder.mkdir()
    for page in test_tutorial.PAGES:
        for language, code in test_tutorial.blocks(page):
            if language == "python":
                (folder / test_tutorial.named(code)).write_text(code)
    _, *outputs = each_alone(folder, [RECORD, *codes])
    return [[json.loads(line) for line in LINE.findall(output)] for output in outputs]


def test_policies_that_leave_ranks_out_and_times_are_no_sync_programs() -> None:
    assert trains_in_sync("ps.run(train, workers=2)")
    assert trains_in_sync("for each in (ps.Sync(), ps.Async()): ps.run(train, consistency=each)")
    assert not trains_in_sync("ps.run(train, consistency=ps.Async())")
    assert not trains_in_sync("ps.start(train, consistency=ps.Sync(backup=1))")
    assert not trains_in_sync("begin = time.monotonic()\nps.run(train)")
    assert not trains_in_sync("with ps.Cluster() as cluster: cluster.client()")
