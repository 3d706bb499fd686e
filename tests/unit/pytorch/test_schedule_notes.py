"""What steps tell of optimizers with very many parameter groups, and who goes on from it."""

from __future__ import annotations

import sys
import threading
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paramserve.pytorch.schedules import Schedules

RANDOM = bytes(10_000)
"""About as long as where the generators of a process are."""


def groups_of(count: int, lr: float) -> list[dict[str, Any]]:
    """As AdamW's groups; each has a rate of its own."""
    common = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False}
    return [{"params": [], **common, "lr": lr + i} for i in range(count)]


def schedules(notes: dict[int, dict[int, bytes]], *, late: bool, draws: Any = None) -> Schedules:
    client: Any = SimpleNamespace(
        clock=lambda group: 1,
        dense=SimpleNamespace(notes=lambda group: notes),
        steps=SimpleNamespace(terms=lambda group: SimpleNamespace(collects=True)),
    )
    return Schedules(client, "model", 0, late=late, draws=draws)


def told(schedule: Schedules, groups: list[dict[str, Any]]) -> bytes:
    schedule.before_step(groups)
    note = schedule.note()
    schedule.made()
    schedule.sent()
    return note


def test_note_of_many_groups_brings_their_numbers_and_the_random_generators() -> None:
    note = told(schedules({}, late=False, draws=lambda: (1, RANDOM)), groups_of(1000, 0.25))
    other, groups = schedules({0: {0: note}}, late=True), groups_of(1000, 0.5)
    other.start(groups)
    assert groups == groups_of(1000, 0.25)
    assert other.drawn() == (1, RANDOM)


def test_note_without_place_for_the_random_generators_warns_once_and_brings_the_numbers() -> None:
    writer = schedules({}, late=False, draws=lambda: (1, RANDOM))
    with pytest.warns(UserWarning, match=r"'model' has 4800 parameter groups.*random numbers"):
        note = told(writer, groups_of(4800, 0.25))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert told(writer, groups_of(4800, 0.125))
    other, groups = schedules({0: {0: note}}, late=True), groups_of(4800, 0.5)
    other.start(groups)
    assert groups == groups_of(4800, 0.25)
    assert not other.drawn()[1]


def test_note_that_is_too_long_in_any_case_is_not_sent_and_warns() -> None:
    writer = schedules({}, late=False, draws=lambda: (1, RANDOM))
    with pytest.warns(UserWarning, match=r"'model' has 9000 parameter groups.*hyper-parameters"):
        assert told(writer, groups_of(9000, 0.25)) == b""


def test_numbers_that_only_some_groups_have_stay_theirs() -> None:
    def made(lr: float) -> list[dict[str, Any]]:
        return [{"params": [], "lr": lr, "eps": 1.0, "name": "one"}, {"params": [], "lr": lr}]

    note = told(schedules({}, late=False, draws=lambda: (1, RANDOM)), made(0.25))
    groups = made(0.5)
    schedules({0: {0: note}}, late=True).start(groups)
    assert groups == made(0.25)


def test_search_for_schedulers_leaves_other_threads_alone() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
    errors: list[BaseException] = []
    ended = threading.Event()

    def make_tuples() -> None:
        try:
            while not ended.is_set():
                tuple(number for number in range(100))
        except SystemError as error:  # another thread held on to one that was not complete
            errors.append(error)

    thread = threading.Thread(target=make_tuples)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(5):
            writer = schedules({}, late=False)
            writer.before_step(optimizer.param_groups)
            assert b"StepLR" in writer.note()
            del writer
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        thread.join()
    assert not errors
    del scheduler
