"""What of a table has changed since a checkpoint, compared with sets."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.suites import each_case

from paramserve.core.table import changes
from paramserve.core.table.changes import RowChanges


def begun() -> RowChanges:
    made = RowChanges()
    made.cut(1)
    made.end_checkpoint(1, committed=True)
    return made


def rows_of(flags: np.ndarray) -> list[int]:
    return np.flatnonzero(flags).tolist()


@each_case("what", ["before", "on_use"])
def test_no_row_number_is_left_out(what: str) -> None:
    for last in (0, 1, changes.SMALL - 1, changes.SMALL, 2 * changes.SMALL + 2):
        made = begun()
        for row in range(last + 1):
            getattr(made, what)(np.array([row, -1] if what == "on_use" else [row]))
        found = made.cut(2)
        assert rows_of(found.rows if what == "before" else found.used) == list(range(last + 1))


def test_all_changes_are_in_the_next_checkpoint_that_is_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(changes, "SMALL", 4)
    for seed in range(20):
        check_changes(seed)


def check_changes(seed: int) -> None:
    chosen = random.Random(seed)
    made, checkpoint, rows, used, top = begun(), 1, set[int](), set[int](), 1
    for _ in range(200):
        top += chosen.randrange(3)
        some = [chosen.randrange(top) for _ in range(chosen.randrange(1, 5))]
        if chosen.random() < 0.5:
            made.before(np.array(some))
            rows |= set(some)
        else:
            made.on_use(np.array([*some, -1]))
            used |= set(some)
        if chosen.random() < 0.2:
            checkpoint += 1
            found = made.cut(checkpoint)
            assert (set(rows_of(found.rows)), set(rows_of(found.used))) == (rows, used), seed
            committed = chosen.random() < 0.5
            made.end_checkpoint(checkpoint, committed=committed)
            if committed:
                rows, used = set(), set()
