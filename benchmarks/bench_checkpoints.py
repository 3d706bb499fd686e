"""What do checkpoints cost while a run trains, and how soon does it go on from one?"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import harness
from benchmarks.table import Bar, Row, figure
from benchmarks.workloads import Saving

TINY = Saving(
    total_bytes=1_000_000,
    paused_bytes=1_000_000,
    seconds=6.0,
    every_s=0.5,
    file_bytes=4_000_000,
    rows=20_000,
    batch=5_000,
    steps_killed=20,
)
MODULE = "benchmarks.ours_checkpoints"
RIVALS = "benchmarks.rival_checkpoints"


def measure(contest: harness.Contest, tiny: bool) -> list[Row]:
    """Training beside checkpoints, files beside plain ones, a table, and a death."""
    load = TINY if tiny else Saving()
    return [
        *_training(contest, load),
        *_pauses(contest, load),
        *_files(contest, load),
        *_table(contest, load),
        *_recovery(contest, load),
    ]


def _training(contest: harness.Contest, load: Saving) -> list[Row]:
    contestants = {
        "ours": f"{MODULE}:training",
        "torch.save": f"{RIVALS}:torch_save",
        "async_save": f"{RIVALS}:async_save",
    }
    found = contest.run("checkpoints while training", contestants, load)
    size = f"{load.total_bytes / 1e6:g} MB and Adam"
    rivals = "; ".join(
        f"{name} of the same bytes: {_figure(found, name, 'pause')} s still, "
        f"{_figure(found, name, 'seconds')} s in all"
        for name in ("torch.save", "async_save")
    )
    samples = found.samples("slowed").get("ours", [])
    return [
        Row(
            f"training slowed by a checkpoint every {load.every_s:g} s, {size}",
            "%",
            "less",
            {"ours": [100 * each for each in samples]},
            (Bar("most", 5.0),),
            f"Steps a second without: {_figure(found, 'ours', 'without_per_s')}. {rivals}.",
        ),
        Row(
            f"training slowed by a checkpoint every 60 s, {size}",
            "%",
            "less",
            {"ours": [100 * each * load.every_s / 60 for each in samples]},
            (Bar("most", 1.0),),
            f"From the row before: each costs as much, and comes {60 / load.every_s:g} times less.",
        ),
    ]


def _pauses(contest: harness.Contest, load: Saving) -> list[Row]:
    found = contest.run("longest pause", {"ours": f"{MODULE}:pauses"}, load)
    size = f"{3 * load.paused_bytes / 1e6:.0f} MB of values and state"
    rows = []
    for name, most in (("async", 15.0), ("sync", None)):
        step = found.median("ours", f"{name}_step")
        rows.append(
            Row(
                f"longest pause of a worker beside checkpoints, {size}, {name}",
                "ms",
                "less",
                {"ours": [1e3 * each for each in found.samples(f"{name}_pause").get("ours", [])]},
                (Bar("most", most if most is not None else 1e3 * (step or 0.0)),),
                "The longest step beyond the median one, of "
                f"{_figure(found, 'ours', f'{name}_step', 1e3)} ms; without checkpoints "
                f"{_figure(found, 'ours', f'{name}_plain_pause', 1e3)} ms.",
            )
        )
    rows.append(
        Row(
            f"server memory beyond the least during checkpoints, {size}, async",
            "MB",
            "less",
            found.samples("async_grown_mb"),
            (Bar("most", 3 * load.paused_bytes / 1e6 * 1.05),),
        )
    )
    return rows


def _files(contest: harness.Contest, load: Saving) -> list[Row]:
    found = contest.run("files", {"ours": f"{MODULE}:files"}, load)
    rows = []
    for what, ours, floor in (
        ("writing", "write_per_s", "floor_write_per_s"),
        ("loading", "load_per_s", "floor_read_per_s"),
    ):
        samples = {
            "ours": found.samples(ours).get("ours", []),
            "floor": found.samples(floor).get("ours", []),
        }
        rows.append(
            Row(
                f"{what} a checkpoint of {load.file_bytes / 1e9:g} GB",
                "MB/s",
                "more",
                samples,
                (Bar("share", 0.6, "floor", "a plain file"),),
                "Floor: a file of 8 MiB blocks, "
                + ("with fsync." if what == "writing" else "which is not in memory."),
            )
        )
    return rows


def _table(contest: harness.Contest, load: Saving) -> list[Row]:
    found = contest.run("table", {"ours": f"{MODULE}:table"}, load)
    what = f"table of {load.rows / 1e6:g} M rows of {load.dim}, {load.touched:.0%} touched"
    return [
        Row(
            f"{what}: bytes of the increment",
            "times those rows",
            "less",
            found.samples("bytes"),
            (Bar("most", 1.2),),
        ),
        Row(
            f"{what}: time of the increment",
            "of a full one's",
            "less",
            found.samples("share"),
            (Bar("most", 0.05),),
            f"A full one: {_figure(found, 'ours', 'full_s')} s.",
        ),
        Row(
            f"{what}: longest pull of 100 rows meanwhile",
            "ms",
            "less",
            found.samples("pause_ms"),
            (Bar("most", 50.0),),
            f"The shard executed nothing for {_figure(found, 'ours', 'shard_pause_ms')} ms.",
        ),
    ]


def _recovery(contest: harness.Contest, load: Saving) -> list[Row]:
    found = contest.run("recovery", {"ours": f"{MODULE}:recovery"}, load)
    return [
        Row(
            f"MNIST: a server killed to the next push, checkpoint {load.seconds / 2:g} s old",
            "s",
            "less",
            found.samples("seconds"),
            (Bar("most", 3.0),),
        )
    ]


def _figure(found: harness.Measured, label: str, name: str, times: float = 1.0) -> str:
    value = found.median(label, name)
    return figure(value * times) if value is not None else "not measured"


def main(argv: Sequence[str] | None = None) -> int:
    return harness.main(argv, __doc__, [measure])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
