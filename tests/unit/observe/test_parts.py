"""Tables of a terminal's width: what does not fit is left out, and named."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable

from rich.console import Console
from tests.suites import each_case

from paramserve.messages import (
    GroupReport,
    LeaseReport,
    Member,
    OwnSpeed,
    SentGradients,
    ServerBeat,
    Status,
    TableReport,
)
from paramserve.observe.cluster import as_table, as_text
from paramserve.observe.parts import Part


def a_cluster() -> Status:
    """With every part, of a real cluster's sizes."""
    stale = tuple((rank, 123_456, 345_678, 17) for rank in range(3))
    clocks = tuple((rank, 123_456) for rank in range(3))
    dense = GroupReport("model", 370_368, clocks, 12, stale, policy="BoundedStaleness")
    part = TableReport(12_345_678, 98_000_000_000, 1, 99_345_678, 12_100_000, 7_000_000)
    keyed = GroupReport("users", 370_368, clocks, 0, stale, policy="Async", table=part)
    return Status(
        1,
        tuple(Member(rank, rank + 4, 2, "restarting") for rank in range(3)),
        tuple(ServerBeat(shard, (dense, keyed), 13, 1_500_000_000) for shard in range(2)),
        (1,),
        (),
        0,
        leases=(LeaseReport("train", ((0, 600_000, 512_000),), 3),),
        expected_servers=2,
        sent=((0, SentGradients("model", 254_000_000, 1_000_000_000, 0.123456)),),
        speeds=((0, OwnSpeed("model", 12.34, 16)),),
    )


def drawn(status: Status, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(as_table("10.0.0.1:5555", status, width))
    return out.getvalue()


def left_out(lines: Iterable[str]) -> list[str]:
    """The lines that name columns, put together where the terminal has folded them."""
    found: list[str] = []
    for line in lines:
        if line.startswith("left out at"):
            found.append(line)
        elif found and found[-1].endswith(", "):
            found[-1] += line
    return found


@each_case("width", [60, 80, 120])
def test_status_fits_and_names_what_it_leaves_out(width: int) -> None:
    text = drawn(a_cluster(), width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text
    assert "..." not in text
    out = {name for each in left_out(lines) for name in each.partition(": ")[2].split(", ")}
    headers = [line.split("┃")[1:-1] for line in lines if "┃" in line]
    shown = {cell.strip() for row in headers for cell in row} - {""}
    whole = as_text("10.0.0.1:5555", a_cluster())
    wide = [re.split(" {2,}", line) for line in whole.splitlines()]
    every = {cell for row in wide if row[0] in HEADS for cell in row}
    assert shown | out == every
    assert bool(out) == (width < 120)
    for name in ("rank", "state", "clocks", "group", "policy", "version", "rows"):
        assert name in shown


HEADS = ("shard", "rank", "group", "table", "loader")
"""First columns of the parts."""


def test_what_has_no_room_at_all_is_folded_and_not_cut() -> None:
    part = Part("", "name", "size", least=("size",))
    part.add_row("x" * 100, "3 MB")
    out = io.StringIO()
    Console(file=out, width=40).print(part.as_table(40))
    assert out.getvalue().count("x") == 100
    assert "left out at 40 columns: size" in out.getvalue()


def test_least_columns_go_one_by_one() -> None:
    part = Part("", "a", "b", "c", least=("c", "b"))
    part.add_row("1" * 10, "2" * 10, "3" * 10)
    assert part.as_lines(34) == part.as_lines()
    assert part.as_lines(33)[:2] == ["a           b", "1111111111  2222222222"]
    assert part.as_lines(33)[2:] == ["left out at 33 columns: c"]
    assert part.as_lines(21)[2:] == ["left out at 21 columns: b, c"]
