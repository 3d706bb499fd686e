"""Progress lines."""

from __future__ import annotations

from dataclasses import replace

from paramserve.errors import ServerGone
from paramserve.observe import Progress
from paramserve.observe.checkpoints import CheckpointStatus, Rollback
from paramserve.observe.progress import INDENT, fold
from paramserve.observe.status import GroupStatus, RunStatus, SentStatus, Staleness, TableStatus


def at(seconds: float, steps: int, state: str = "running", **metrics: float) -> RunStatus:
    group = GroupStatus(steps, steps // 2, steps, 0, Staleness(steps, 0.75, 3))
    return RunStatus(state, seconds, {0: "running", 1: "running"}, {"model": group}, metrics)


STALE = {rank: Staleness(5, rank / 2, rank) for rank in range(3)}
UNDER_ASYNC = GroupStatus(
    9, 3, 9, 0, Staleness(9, 0.5, 2), "Async", "Sync from clock 7", STALE, {2: 1000, 3: 1}, 4
)


def test_lines_are_these() -> None:
    """What was logged and the speed come first, where 80 columns have room; staleness last."""
    sent = {
        0: SentStatus(6_000_000, 24_000_000, 0.5, 500_000, 12_000_000),
        1: SentStatus(6_300_000, 24_000_000, 0.25),
    }
    group = replace(UNDER_ASYNC, steps=41_234, skipped=1234, sent_by_rank=sent)
    table = TableStatus(1_234_567, 310_000_000, 1_300_000, 65_433, 0)
    keyed = GroupStatus(9, 3, 9, 0, Staleness(9, 0.5, 2), "Sync", table=table)
    workers, progress = {0: "running", 1: "running"}, Progress()
    first = RunStatus("starting", 0.1, {0: "starting"}, {}, {})
    assert progress.line(first) == "   0.1 s  0/1 workers  starting"
    assert progress.line(at(75.0, 40_000)) == (
        "  75.0 s  2/2 workers  model: 40,000 steps  staleness 0.8 (max 3)"
    )
    now = RunStatus("running", 76.0, workers, {"model": group, "users": keyed}, {"loss": 0.02517})
    assert progress.line(now) == (
        "  76.0 s  2/2 workers  loss 0.02517  model (Async): 41,234 steps  1,234 steps/s  "
        "1,234 skipped  1,001 dropped  4 buffered  sent 12.3 MB of 48.0 MB  "
        "read 500.0 KB of 12.0 MB  Sync from clock 7  staleness 0.5 (max 2)  "
        "users (Sync): 9 steps  1,234,567 rows (310.0 MB)  65,433 evicted  staleness 0.5 (max 2)"
    )
    by_worker = "0: 0.0 (max 0), 1: 0.5 (max 1), 2: 1.0 (max 2) 1,000 dropped, 3: - 1 dropped"
    assert progress.by_worker(now) == "model, staleness by worker: " + by_worker
    many = replace(group, staleness_by_rank=dict.fromkeys(range(20), STALE[2]), dropped_by_rank={})
    said = progress.by_worker(RunStatus("running", 1.0, workers, {"model": many}, {}))
    assert said.endswith("15: 1.0 (max 2), and 4 more")
    fresh = replace(UNDER_ASYNC, staleness_by_rank={0: STALE[0]}, dropped_by_rank={})
    assert progress.by_worker(RunStatus("running", 1.0, workers, {"model": fresh}, {})) == ""


def test_line_that_a_terminal_has_no_room_for_goes_on_in_the_next_with_whole_parts() -> None:
    logged = dict.fromkeys(("loss", "accuracy", "lr", "val_loss", "val_accuracy"), 0.123456)
    line = Progress().line(at(76.0, 41_234, **logged))
    assert fold(line, 500) == [line]
    folded = fold(line, 80)
    assert max(map(len, folded)) <= 80
    assert "  ".join(part.removeprefix(INDENT) for part in folded) == line
    assert "val_accuracy 0.1235" in folded[1]
    assert len(fold(line, 1)) == line.count("  ") - line[:6].count("  ") + 1, "never within a part"


def test_line_speed_counts_anew_from_a_checkpoint() -> None:
    progress = Progress()
    for second, steps in enumerate([0, 400, 800]):
        progress.line(at(float(second), steps))
    assert "steps/s" not in progress.line(at(3.0, 600))
    assert " 50 steps/s" in progress.line(at(5.0, 700))


def test_checkpoints_have_a_line_of_their_own() -> None:
    gone = ServerGone("server 1 was killed by SIGKILL", fix="none")
    back = Rollback(gone, "runs/a/step-9", {"model": 12}, {"model": 9}, 3, 1.5)
    told = CheckpointStatus("runs/a/step-9", {"model": 9}, 3.2, 2_000_000, 0.004)
    status = RunStatus("running", 1.0, {}, {}, {}, told, [back, back])
    assert Progress().checkpoints(at(1.0, 100)) == ""
    line = "checkpoint 3 s old (2.0 MB, pause 4 ms)  went back 2 times"
    assert Progress().checkpoints(status) == line


def test_line_at_the_end_tells_the_speed_of_the_whole_run() -> None:
    progress = Progress()
    for second, steps in enumerate([0, 100, 100, 400]):
        line = progress.line(at(float(second), steps))
    line = progress.line(at(9.0, 400, "finished"))  # what came after the last step is left out
    assert " 150 steps/s" in line
