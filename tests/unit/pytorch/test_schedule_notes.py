"""What steps tell of optimizers with very many parameter groups, and who goes on from it."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from paramserve.pytorch.schedules import Schedules


def groups_of(count: int, lr: float) -> list[dict[str, Any]]:
    """As AdamW's groups; each has a rate of its own."""
    common = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False}
    return [{"params": [], **common, "lr": lr + i} for i in range(count)]


def schedules(notes: dict[int, dict[int, bytes]], *, late: bool) -> Schedules:
    client: Any = SimpleNamespace(
        dense=SimpleNamespace(notes=lambda group: notes),
        steps=SimpleNamespace(
            epochs=0,
            run=0,
            missed_by={},
            clocks={"model": 1},
            terms=lambda group: SimpleNamespace(collects=True),
        ),
    )
    return Schedules(client, "model", 0, late=late)


def told(schedule: Schedules, groups: list[dict[str, Any]]) -> bytes:
    schedule.before_step(groups)
    note = schedule.note()
    schedule.count_step()
    schedule.confirm_note()
    return note


def told_by_hand(groups: list[dict[str, Any]]) -> bytes:
    """The note of a step before which the function has set these numbers."""
    writer = schedules({}, late=False)
    assert told(writer, [{**each, "lr": 2 * each["lr"]} for each in groups]) == b""
    return told(writer, groups)


def test_note_of_many_groups_brings_their_numbers() -> None:
    note = told_by_hand(groups_of(4800, 0.25))
    groups = groups_of(4800, 0.5)
    schedules({0: {0: note}}, late=True).start(groups)
    assert groups == groups_of(4800, 0.25)


def test_note_that_is_too_long_is_not_sent_and_warns() -> None:
    with pytest.warns(UserWarning, match=r"'model' has 9000 parameter groups.*hyper-parameters"):
        assert told_by_hand(groups_of(9000, 0.25)) == b""


def test_numbers_that_only_some_groups_have_stay_theirs() -> None:
    def made(lr: float) -> list[dict[str, Any]]:
        return [{"params": [], "lr": lr, "eps": 1.0, "name": "one"}, {"params": [], "lr": lr}]

    note = told_by_hand(made(0.25))
    groups = made(0.5)
    schedules({0: {0: note}}, late=True).start(groups)
    assert groups == made(0.25)


@pytest.mark.parametrize("at", [0, 1])
def test_rate_that_was_set_behind_each_step_is_told_of_where_it_is_not_known(at: int) -> None:
    """At the clock of the note, as of another rank that waits there, it is."""
    writer, groups = schedules({}, late=False), groups_of(1, 0.5)
    for _ in range(4):
        note = told(writer, groups)
        groups[0]["lr"] *= 0.5
    reader, own = schedules({0: {at: note}}, late=True), groups_of(1, 0.5)
    reader.start(own)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reader.before_step(own)
    assert own[0]["lr"] == 0.5**4
    assert ["worker.clock" in str(each.message) for each in caught] == [True] * (at == 0)
