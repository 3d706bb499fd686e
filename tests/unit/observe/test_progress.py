"""Progress lines."""

from __future__ import annotations

from paramserve.errors import ServerGone
from paramserve.observe import Progress
from paramserve.observe.checkpoints import CheckpointStatus, Rollback
from paramserve.observe.progress import INDENT, fold
from paramserve.observe.status import GroupStatus, RunStatus, SentStatus, Staleness, TableStatus


def at(seconds: float, steps: int, state: str = "running", **metrics: float) -> RunStatus:
    group = GroupStatus(steps, steps // 2, steps, 0, Staleness(steps, 0.75, 3))
    return RunStatus(state, seconds, {0: "running", 1: "running"}, {"model": group}, metrics)


def test_line_tells_speed_loss_and_staleness() -> None:
    progress = Progress()
    progress.line(at(1.0, 100))
    line = progress.line(at(2.0, 400, loss=0.25))
    assert "2/2 workers" in line
    assert "300 steps/s" in line
    assert "loss 0.25" in line
    assert "staleness 0.8 (max 3)" in line


def test_line_of_80_columns_has_metrics_and_speed() -> None:
    progress = Progress()
    progress.line(at(75.0, 40_000))
    line = progress.line(at(76.0, 41_234, loss=0.02517))
    for part in ("loss 0.02517", "41,234 steps", "1,234 steps/s"):
        assert part in line[:80]
    assert line.endswith("  staleness 0.8 (max 3)")


def test_line_that_a_terminal_has_no_room_for_goes_on_in_the_next_with_whole_parts() -> None:
    logged = dict.fromkeys(("loss", "accuracy", "lr", "val_loss", "val_accuracy"), 0.123456)
    line = Progress().line(at(76.0, 41_234, **logged))
    assert fold(line, 500) == [line]
    folded = fold(line, 80)
    assert max(map(len, folded)) <= 80
    assert "  ".join(part.removeprefix(INDENT) for part in folded) == line
    assert "val_accuracy 0.1235" in folded[1]
    assert len(fold(line, 1)) == line.count("  ") - line[:6].count("  ") + 1, "never within a part"


def test_line_tells_skipped_and_dropped_before_staleness() -> None:
    group = GroupStatus(9, 3, 9, 7, Staleness(9, 0.5, 2), "Async", "", {}, {2: 5})
    line = Progress().line(RunStatus("running", 1.0, {}, {"m": group}, {}))
    assert line.endswith("7 skipped  5 dropped  staleness 0.5 (max 2)")


def test_line_tells_how_much_was_sent_of_what_there_was() -> None:
    first = SentStatus(6_000_000, 24_000_000, 0.5, 500_000, 12_000_000)
    sent = {0: first, 1: SentStatus(6_300_000, 24_000_000, 0.25)}
    group = GroupStatus(9, 3, 9, 0, Staleness(9, 0.5, 2), sent_by_rank=sent)
    line = Progress().line(RunStatus("running", 1.0, {}, {"m": group}, {}))
    assert line.endswith("sent 12.3 MB of 48.0 MB  read 500.0 KB of 12.0 MB  staleness 0.5 (max 2)")


def test_line_speed_is_that_of_the_last_seconds() -> None:
    progress = Progress()
    for second in range(10):
        progress.line(at(float(second), second * 1000))
    for second in range(10, 20):
        line = progress.line(at(float(second), 9000 + (second - 9) * 10))
    assert " 10 steps/s" in line


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


def test_line_speed_is_absent_until_it_is_known() -> None:
    assert "steps/s" not in Progress().line(at(1.0, 100))


def test_line_before_the_first_step_tells_the_state() -> None:
    status = RunStatus("starting", 0.1, {0: "starting"}, {}, {})
    assert "starting" in Progress().line(status)


def test_line_tells_what_was_skipped() -> None:
    group = GroupStatus(4, 2, 4, 1234, Staleness(4, 0.0, 0))
    assert "1,234 skipped" in Progress().line(RunStatus("running", 1.0, {}, {"m": group}, {}))


STALE = {rank: Staleness(5, rank / 2, rank) for rank in range(3)}
UNDER_ASYNC = GroupStatus(
    9, 3, 9, 0, Staleness(9, 0.5, 2), "Async", "Sync from clock 7", STALE, {2: 1000, 3: 1}, 4
)


def test_line_tells_policy_dropped_and_buffered() -> None:
    line = Progress().line(RunStatus("running", 1.0, {}, {"m": UNDER_ASYNC}, {}))
    assert "m (Async): 9 steps" in line
    for part in ("1,001 dropped", "4 buffered", "Sync from clock 7"):
        assert part in line


def test_line_tells_rows_and_memory_of_a_table() -> None:
    table = TableStatus(1_234_567, 310_000_000, 1_300_000, 65_433, 0)
    group = GroupStatus(9, 3, 9, 0, Staleness(9, 0.5, 2), "Async", table=table)
    line = Progress().line(RunStatus("running", 1.0, {}, {"users": group}, {}))
    assert "users (Async): 9 steps" in line
    assert "9 steps  1,234,567 rows (310.0 MB)  65,433 evicted  staleness" in line


def test_by_worker_tells_staleness_and_drops_of_each() -> None:
    told = Progress().by_worker(RunStatus("running", 1.0, {}, {"m": UNDER_ASYNC}, {}))
    expected = "0: 0.0 (max 0), 1: 0.5 (max 1), 2: 1.0 (max 2) 1,000 dropped, 3: - 1 dropped"
    assert told == "m, staleness by worker: " + expected


def test_by_worker_of_many_says_how_many_more() -> None:
    stale = {rank: Staleness(1, 1.0, 1) for rank in range(20)}
    group = GroupStatus(1, 1, 20, 0, Staleness(20, 1.0, 1), staleness_by_rank=stale)
    told = Progress().by_worker(RunStatus("running", 1.0, {}, {"m": group}, {}))
    assert "15: 1.0" in told
    assert "16: " not in told
    assert told.endswith("and 4 more")


def test_by_worker_without_staleness_says_nothing() -> None:
    stale = {rank: Staleness(5, 0.0, 0) for rank in range(3)}
    group = GroupStatus(5, 5, 15, 0, Staleness(15, 0.0, 0), "Sync", staleness_by_rank=stale)
    assert Progress().by_worker(RunStatus("running", 1.0, {}, {"m": group}, {})) == ""
