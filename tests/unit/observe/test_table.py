"""A run as a table that is redrawn."""

from __future__ import annotations

import io
import itertools
import re
from dataclasses import replace

from rich.console import Console

from paramserve.observe.checkpoints import CheckpointStatus
from paramserve.observe.status import (
    GroupStatus,
    RunStatus,
    ServerLoad,
    Staleness,
    WorkerLoad,
)
from paramserve.observe.table import LiveTable, in_time


def status(
    seconds: float = 4.0,
    workers: int = 2,
    servers: int = 1,
    *,
    steps: int = 100,
    looped: float = 0.25,
    waited_s: float = 1.0,
    encoded_s: float = 0.0,
) -> RunStatus:
    ranks = range(workers)
    group = GroupStatus(
        steps,
        steps,
        steps * workers,
        0,
        Staleness(steps, 0.5, 2),
        "Async",
        staleness_by_rank={rank: Staleness(steps, 0.5, 2) for rank in ranks},
        steps_by_rank=dict.fromkeys(ranks, steps),
    )
    load = WorkerLoad(seconds, waited_s, encoded_s, 310_000_000, looped)
    server = ServerLoad(1_200_000, 0, steps * workers, 3, workers, 95_000_000)
    return RunStatus(
        "running",
        seconds,
        dict.fromkeys(ranks, "running"),
        {"model": group},
        {"loss": 0.25},
        loads=dict.fromkeys(ranks, load),
        servers=dict.fromkeys(range(servers), server),
        logged={rank: {"lr": 0.1, "loss": 0.125 * (rank + 1)} for rank in ranks},
    )


def drawn(*told: RunStatus, width: int = 80, height: int = 24) -> list[str]:
    """The lines of the last one, after those before it were drawn."""
    table = LiveTable()
    for each in told:
        page = Console(file=io.StringIO(), width=width, height=height)
        page.print(table.draw(each, width, height))
    assert isinstance(page.file, io.StringIO)
    return page.file.getvalue().splitlines()


def row(lines: list[str], begins: str) -> list[str]:
    found = [re.split(r"\s{2,}", line.strip()) for line in lines]
    return next(cells for cells in found if cells[0] == begins)


def test_rows_tell_of_each_worker() -> None:
    lines = drawn(status(4.0), status(6.0, steps=150, waited_s=1.5))
    assert row(lines, "worker") == [
        *("worker", "state", "steps", "steps/s", "loss", "staleness", "waits", "memory")
    ]
    first = row(lines, "0")
    assert first == ["0", "running", "150", "25.0", "0.125", "0.5 (max 2)", "25%", "310.0 MB"]
    assert row(lines, "1")[4] == "0.25"


def test_name_that_looks_like_markup_is_shown_as_it_is() -> None:
    told = replace(status(), logged={0: {"[/red]top": 0.5}})
    assert row(drawn(told), "worker")[4] == "[/red]top"


def test_rows_tell_of_each_server() -> None:
    lines = drawn(status(4.0), status(6.0, steps=150))
    at = lines.index(next(line for line in lines if line.strip().startswith("server")))
    assert lines[at].split() == ["server", "values", "tables", "pushes/s", "waiting", "memory"]
    assert row(lines[at:], "0") == ["0", "1.2 MB", "0 B", "50", "3", "95.0 MB"]


def test_bar_tells_the_part_that_is_done_and_the_time_left() -> None:
    lines = drawn(status(4.0, looped=0.25), status(6.0, looped=0.5))
    bar = next(line for line in lines if "left" in line)
    assert " 50% " in bar
    assert bar.rstrip().endswith("about 4 s left")


def test_bar_is_that_of_the_slowest_worker_and_absent_if_one_is_not_known() -> None:
    told = status(4.0)
    slow = replace(told.loads[1], looped=0.125)
    bar = next(line for line in drawn(replace(told, loads={**told.loads, 1: slow})) if "%" in line)
    assert "12%" in bar
    unknown = replace(told.loads[1], looped=0.0)
    assert not any("━" in each for each in drawn(replace(told, loads={0: unknown})))


def test_codec_has_a_column_where_a_worker_encodes() -> None:
    lines = drawn(status(4.0, encoded_s=0.5), status(6.0, encoded_s=0.75), width=100)
    assert "codec" in row(lines, "worker")
    assert row(lines, "0")[-2] == "12%"


def test_rows_fit_the_terminal() -> None:
    for width, encoded_s in itertools.product((80, 120), (0.0, 0.5)):
        whole = status(4.0, steps=12_345_678, encoded_s=encoded_s)
        died = replace(whole, workers={0: "retiring", 1: "dead"})
        for lines in (drawn(whole, width=width), drawn(died, width=width)):
            assert max(map(len, lines)) <= width
            assert not any("…" in line for line in lines)


def test_worker_that_died_keeps_its_row_without_a_speed() -> None:
    before, after = status(4.0), status(6.0, steps=150)
    after = replace(after, workers={0: "dead", 1: "running"}, loads={1: after.loads[1]})
    cells = row(drawn(before, after), "0")
    assert cells == ["0", "dead", "150", "-", "0.125", "0.5 (max 2)", "-", "-"]


def test_more_workers_than_lines_are_counted_and_the_dead_shown_first() -> None:
    told = status(4.0, workers=64, servers=8)
    told = replace(told, workers={**told.workers, 63: "dead"})
    lines = drawn(told, height=24)
    assert len(lines) <= 24
    assert row(lines, "63")[1] == "dead"
    more = next(line for line in lines if "more workers" in line)
    shown = sum(bool(re.match(r" \d+ +(running|dead)", line)) for line in lines)
    assert f"and {64 - shown} more workers" in more


def test_words_of_many_groups_take_lines_from_the_workers() -> None:
    told = status(4.0, workers=64, servers=8)
    groups = {f"group {n}": told.groups["model"] for n in range(4)}
    lines = drawn(replace(told, groups=groups), height=30)
    assert len(lines) <= 30
    assert sum("more" in line for line in lines) == 1


def test_time_left_is_that_of_the_present_loop() -> None:
    at = ((1.0, 0.01), (60.0, 0.9), (64.0, 0.05), (66.0, 0.1))
    bar = next(line for line in drawn(*(status(s, looped=d) for s, d in at)) if "left" in line)
    assert "about 36 s left" in bar


def test_checkpoint_is_told_below() -> None:
    told = CheckpointStatus("runs/a/step-9", {"model": 9}, 3.2, 2_000_000, 0.004)
    lines = drawn(replace(status(), checkpoints=told))
    assert "checkpoint 3 s old (2.0 MB, pause 4 ms)" in lines[-1]


def test_run_that_begins_has_its_workers() -> None:
    lines = drawn(RunStatus("starting", 0.1, {0: "starting"}, {}, {}))
    assert row(lines, "0")[:3] == ["0", "starting", "-"]


def test_time_left_is_for_people() -> None:
    assert [in_time(s) for s in (42.4, 420.0, 11_100.0)] == ["42 s", "7 min", "3 h 05 min"]
