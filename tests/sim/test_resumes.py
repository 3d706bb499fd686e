"""Whole clusters are lost in simulations, and go on from the last checkpoint that was committed."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tests.disk import Disk, _DiskFile
from tests.sim.resumes import (
    CASES,
    SimulatedResumes,
    resumed,
)
from tests.unit.core.test_lease_records import (
    finished_grants_are_forgotten,
    marks_of_after_the_cut,
)

from paramserve.consistency.built_in import Async
from paramserve.core import leases
from paramserve.core.cut_parts import BlockCopy
from paramserve.core.group_state import GroupState
from paramserve.core.shard import Shard
from paramserve.core.shard_sessions import Sessions, ShardSession
from paramserve.messages import Step
from paramserve_testing import Violation

SEEDS = 4
FOUND_WITHIN = 40
"""Seeds after which a planted bug has been found."""


@pytest.mark.parametrize("case", CASES)
def test_clusters_that_are_lost_go_on_from_a_checkpoint(case: str) -> None:
    runs = [resumed(seed, **CASES[case]) for seed in range(SEEDS)]
    assert any(each.fell_to is not None for each in runs)
    # A shard that was not told that a checkpoint is there writes all rows, and the others their
    # changes: that one is given up.
    assert max(each.failed for each in runs) <= ("table" in case)


def test_seed_whose_shards_had_different_numbers_of_gradients_in_their_buffers() -> None:
    """They go on as three: shard 0, whose records the others take, had none."""
    assert resumed(70014, **CASES["buffered, then bounded"]).fell_to is not None


def test_same_seed_gives_the_same_run() -> None:
    runs = (resumed(seed, consistency=Async()) for seed in range(2 * SEEDS))
    first = next(each for each in runs if each.fell_to is not None)
    again = resumed(first.seed, consistency=Async())
    assert (first.trace(), first.kept) == (again.trace(), again.kept)


# --- a storage that fails ------------------------------------------------------------------------


class NeverLost(SimulatedResumes):
    crash_s = 1e9


def failing(which: Callable[[int], bool], error: OSError) -> type[SimulatedResumes]:
    """A cluster whose disk fails at these calls, as soon as it runs."""

    class Failing(NeverLost):
        fail = staticmethod(lambda number, method: error if which(number) else None)

    return Failing


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EIO, "broken"), OSError(errno.ENOSPC, "full"), OSError()],
    ids=["broken", "full", "short"],
)
def test_call_of_the_storage_that_fails_ends_one_checkpoint_at_most(error: OSError) -> None:
    clean = resumed(3, NeverLost, consistency=Async())
    assert len(clean.committed) > 3
    lost = 0
    for number in range(clean.calls_before + 1, clean.disk.calls, clean.disk.calls // 8):
        run = resumed(3, failing(lambda each, n=number: each == n, error), consistency=Async())
        lost += run.failed
        assert run.failed <= 1
    assert lost == 0 if error.errno is None else lost > 2


def test_storage_that_fails_for_ever_does_not_stop_the_training() -> None:
    before = resumed(3, NeverLost, consistency=Async()).calls_before
    full = OSError(errno.ENOSPC, "full")
    run = resumed(3, failing(lambda each: each > before, full), consistency=Async())
    assert run.committed == []
    assert run.failed > 3


# --- bugs that a checkpoint could have -----------------------------------------------------------


def files_not_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest is there before the data are safe."""
    monkeypatch.setattr(_DiskFile, "sync", lambda file: None)


def folders_not_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are safe, and their names are not."""
    monkeypatch.setattr(Disk, "sync_folder", lambda disk, path: None)


def values_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is not copied before its first write after the cut."""
    monkeypatch.setattr(BlockCopy, "finish", lambda copy: None)


def leases_of_before_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was used between the beginning of the checkpoint and the cut is given out again."""
    monkeypatch.setattr(leases, "_uses", lambda holdings, marks_of: [])


def calls_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut does not say which calls are not over."""
    monkeypatch.setattr(Sessions, "unfinished", lambda sessions, clients: {})


def always_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that was ahead stays so."""

    def begin_part(shard: Shard, session: ShardSession, step: Step) -> None:
        shard.sessions.begin_part(session, step)

    monkeypatch.setattr(GroupState, "has_step", lambda state, rank, step: True)
    monkeypatch.setattr(Shard, "_begin_part", begin_part)


def ahead_in_another_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a call that are to come count as there, and those that are there do not."""

    def others(sessions: Sessions, clients: Mapping[int, int]) -> dict[int, dict[int, int]]:
        return {1 - group: ranks for group, ranks in begun(sessions, clients).items()}

    begun = Sessions.unfinished
    monkeypatch.setattr(Sessions, "unfinished", others)


def samples_of_a_call_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any rank may get what another one has begun a call with."""
    monkeypatch.setattr(leases.Marks, "begun", leases.Marks.lowest)


@pytest.mark.parametrize(
    ("plant", "options"),
    [
        (files_not_synced, {"consistency": Async()}),
        (folders_not_synced, {"consistency": Async()}),
        (values_of_now, {"consistency": Async()}),
        (marks_of_after_the_cut, {"consistency": Async(), "samples": 60}),
        (leases_of_before_the_cut, {"consistency": Async(), "samples": 60}),
        (finished_grants_are_forgotten, {"consistency": Async(), "samples": 60}),
    ],
)
def test_bug_of_a_checkpoint_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    find(options)


def find(options: dict[str, Any]) -> None:
    for seed in range(FOUND_WITHIN):
        try:
            resumed(seed, **options)
        except Violation:
            return
    pytest.fail(f"it was not found in {FOUND_WITHIN} seeds")


@pytest.mark.parametrize(
    ("plant", "case"),
    [
        (calls_forgotten, "batches of a table beside Sync"),
        (always_ahead, "batches of a table beside Sync"),
        (ahead_in_another_group, "batches of a table beside Sync"),
        (samples_of_a_call_are_free, "samples of a table beside Sync"),
    ],
)
def test_bug_of_a_call_that_is_not_over_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one server every third checkpoint that is gone on from has such a call; with more, few
    have."""
    plant(monkeypatch)
    find({**CASES[case], "servers": 1})
