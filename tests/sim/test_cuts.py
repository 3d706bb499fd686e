"""Cuts of simulated clusters: whole under every policy, while workers die, join and step."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import pytest
from tests.sim.cuts import SimulatedCuts, replay
from tests.sim.policies import POLICIES
from tests.sim.visitors import SimulatedVisits
from tests.sim.workloads.tables import table, table_beside_tensors

from paramserve.consistency.built_in import Async
from paramserve.core import cut as cut_module
from paramserve.core.cut import CutAgreement
from paramserve.core.cut_parts import BlockCopy, ShardCut
from paramserve.core.shard_sessions import Sessions
from paramserve.core.table.cut import RowsCopy
from paramserve.messages import CutAt, CutTo
from paramserve_testing import Faults, Scenario, Violation
from paramserve_testing.simulated import rerun

SEEDS = 8
MANY = 200
FOUND_WITHIN = 40
"""Seeds after which a planted bug has been found."""
EVICTED_BEHIND = 2
VISITS = {"consistency": Async(), "workers": 2, "faults": Faults(slow=0.1)}


@pytest.mark.parametrize("policy", ["async", "bounded-1", "sync", "sync-backup"])
def test_seeds_with_cuts_keep_every_invariant(policy: str) -> None:
    for seed in range(SEEDS):
        replay(seed, consistency=POLICIES[policy])


@pytest.mark.parametrize("policy", ["async", "sync"])
def test_seeds_of_tables_with_cuts_keep_every_invariant(policy: str) -> None:
    for seed in range(SEEDS // 2):
        together = POLICIES[policy].collects
        for workload, second in ((table, None), (table_beside_tensors, Async())):
            options = {"second": second, "others": (), "restarts": False if together else None}
            replay(seed, workload=workload, consistency=POLICIES[policy], **options)


def test_seeds_of_leases_with_cuts_have_the_marks_of_the_same_steps() -> None:
    for seed in range(SEEDS // 2):
        replay(seed, consistency=Async(), others=(), samples=60)


@pytest.mark.parametrize("faults", [Faults(slow=0.1), None])
def test_seeds_with_clients_that_come_and_go_keep_every_invariant(faults: Faults | None) -> None:
    for seed in range(SEEDS // 2):
        rerun(SimulatedVisits, seed, None, consistency=Async(), others=(), faults=faults, workers=2)


def test_seed_where_a_client_says_goodbye_behind_steps_that_a_cut_has_stopped() -> None:
    """The first one waits for what is released with it; none of them is lost on one shard only."""
    options: dict[str, Any] = {"consistency": Async(), "faults": Faults(slow=0.1), "workers": 2}
    rerun(SimulatedVisits, 221, None, others=(), **options)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", ["async", "sync"])
def test_many_seeds_with_clients_that_come_and_go_keep_every_invariant(policy: str) -> None:
    for seed in range(SEEDS, MANY):
        for faults in (Faults(slow=0.1), None):
            options = {"consistency": POLICIES[policy], "faults": faults, "workers": 2}
            rerun(SimulatedVisits, seed, None, others=(), **options)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["async", "bounded-1", "sync"])
def test_many_seeds_with_cuts_keep_every_invariant(policy: str) -> None:
    for seed in range(SEEDS, MANY):
        replay(seed, consistency=POLICIES[policy])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["async", "sync"])
def test_many_seeds_of_tables_beside_tensors_keep_every_invariant(policy: str) -> None:
    together = POLICIES[policy].collects
    for seed in range(SEEDS, MANY):
        options = {"second": POLICIES[policy], "others": ()}
        options["restarts"] = False if together else None
        options["workload"] = table_beside_tensors
        replay(seed, consistency=POLICIES[policy], **options)


def test_cuts_are_taken_while_clients_push() -> None:
    cluster = SimulatedCuts(1, Scenario(consistency=Async(), others=(), servers=3))
    cluster.run()
    cluster.check()
    assert len(cluster.cuts) > 10
    assert len({tuple(cut.parts[0].pushes.items()) for cut in cluster.cuts}) > 5


# --- bugs that a cut could have ------------------------------------------------------------------


def the_lowest_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shard 0 answers with the lowest number of each client."""

    def lowest(number: int, told: list[CutAt], left_out: Set[int]) -> CutTo:
        highest = whole(number, told, left_out)
        least = {
            client: min({c: n for c, n, _ in each.clients}.get(client, 0) for each in told)
            for client, _ in highest.clients
        }
        return CutTo(number, tuple(least.items()), highest.groups)

    whole = cut_module._highest
    monkeypatch.setattr(cut_module, "_highest", lowest)


def a_commit_between_report_and_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that has stopped commits what the lead decides."""

    def every(cuts: CutAgreement, group: int, clock: int) -> bool:
        return True

    monkeypatch.setattr(CutAgreement, "allows_commit", every)


def a_push_between_report_and_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that has told how far its clients have come executes what they send."""
    monkeypatch.setattr(CutAgreement, "allows", lambda cuts, session, seq: True)


def a_copy_after_the_first_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is not copied before it changes."""
    monkeypatch.setattr(BlockCopy, "finish", lambda copy: None)


def a_row_copied_after_its_first_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a table is not copied before it changes."""
    monkeypatch.setattr(RowsCopy, "before", lambda copy, rows: None)


def clients_evicted_by_each_shard_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard remembers the last clients that have ended there, and waits for all others."""
    ended: dict[int, dict[int, int]] = {}
    close, reached = Sessions.close, CutAgreement._reached

    def forget(sessions: Sessions, client: int, answered: bool) -> bool:
        own = ended.setdefault(id(sessions), {})
        if client in sessions.by_client:
            own[client] = sessions.by_client[client].executed
        if len(own) > EVICTED_BEHIND:
            del own[next(iter(own))]
        changed = close(sessions, client, answered)
        sessions.closed.clear()
        sessions.closed.update(own)
        return changed

    def wait(cuts: CutAgreement) -> bool:
        known = cuts._sessions.by_client.keys() | cuts._sessions.closed
        return known >= {each for each, seq in cuts._clients.items() if seq} and reached(cuts)

    monkeypatch.setattr(Sessions, "close", forget)
    monkeypatch.setattr(CutAgreement, "_reached", wait)


def client_outside_the_cut_as_soon_as_it_has_ended_on_a_shard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is still on its way to the others is not waited for."""
    whole = cut_module._highest

    def highest(number: int, told: list[CutAt], left_out: Set[int]) -> CutTo:
        closed = {client for each in told for client in each.closed}
        return whole(number, told, left_out | closed)

    monkeypatch.setattr(cut_module, "_highest", highest)


def clients_with_unequal_ends_kept_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards release only the clients of whom all have the same."""
    all_over = cut_module._over

    def over(told: list[CutAt]) -> set[int]:
        numbers: dict[int, set[int]] = {}
        for each in told:
            for client, seq, _ in each.clients:
                numbers.setdefault(client, set()).add(seq)
        return {client for client in all_over(told) if len(numbers[client]) == 1}

    monkeypatch.setattr(cut_module, "_over", over)


def goodbye_behind_unanswered_requests_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard remembers no client that has ended."""
    close = Sessions.close
    monkeypatch.setattr(Sessions, "close", lambda self, client, answered: close(self, client, True))


def marks_of_after_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is used of the leases is read when the cut is."""
    whole = ShardCut.__init__

    def init(part: Any, shard: int, ask: Any, clients: Any, groups: Any, *others: Any) -> None:
        part.live = groups
        whole(part, shard, ask, clients, groups, *others)

    now = property(
        lambda part: tuple(each.record({}) for each in part.live.values()),
        lambda part, value: None,
    )
    monkeypatch.setattr(ShardCut, "__init__", init)
    monkeypatch.setattr(ShardCut, "groups", now, raising=False)


@pytest.mark.parametrize(
    ("plant", "kind", "options"),
    [
        (the_lowest_number, SimulatedCuts, {"consistency": Async()}),
        (a_commit_between_report_and_cut, SimulatedCuts, {}),
        (a_push_between_report_and_cut, SimulatedCuts, {"consistency": Async()}),
        (a_copy_after_the_first_write, SimulatedCuts, {"consistency": Async()}),
        (a_copy_after_the_first_write, SimulatedCuts, {}),
        (
            a_row_copied_after_its_first_write,
            SimulatedCuts,
            {"consistency": Async(), "workload": table},
        ),
        (marks_of_after_the_cut, SimulatedCuts, {"consistency": Async(), "samples": 60}),
        (clients_evicted_by_each_shard_alone, SimulatedVisits, VISITS),
        (client_outside_the_cut_as_soon_as_it_has_ended_on_a_shard, SimulatedVisits, VISITS),
        (goodbye_behind_unanswered_requests_forgotten, SimulatedVisits, VISITS),
        (clients_with_unequal_ends_kept_for_good, SimulatedVisits, VISITS | {"faults": None}),
    ],
)
def test_bug_of_a_cut_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    kind: type[SimulatedCuts],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    for seed in range(FOUND_WITHIN):
        cluster = kind(seed, Scenario(others=(), **options))
        cluster.run()
        try:
            cluster.check()
        except Violation:
            return
    pytest.fail(f"{plant.__name__} was not found in {FOUND_WITHIN} seeds")
