"""Whether waits poll, on machines whose wake-ups cost little or much."""

from __future__ import annotations

import pytest
from tests.suites import each_case

from paramserve.core.polling import (
    CROWDED,
    CROWDED_MAX,
    LEAVE_AFTER,
    LEAVE_AFTER_MAX,
    LONG_WAIT,
    PROBE_EVERY,
    SMALL_STEP_S,
    AdaptivePolling,
)


class Party:
    """One side of a connection: it waits, works, and sends."""

    def __init__(self, wake_s: float, work_s: float, polling: AdaptivePolling) -> None:
        self.wake_s, self.work_s, self.polling = wake_s, work_s, polling
        self.waiting_since = 0.0
        self.polls_until = 0.0
        self.polled = 0.0
        """Seconds."""
        self.woken = 0

    def wait(self, now: float) -> None:
        self.waiting_since = now
        self.polls_until = now + self.polling.budget_s

    def hears(self, now: float) -> float:
        """Something came: when it has noticed, and has done its work."""
        polls = now <= self.polls_until
        self.polled += min(now, self.polls_until) - self.waiting_since
        self.woken += not polls
        noticed = now if polls else now + self.wake_s
        self.polling.waited(noticed - self.waiting_since, polled=polls)
        return noticed + self.work_s


def exchange(client: Party, server: Party, steps: int, pause_s: float = 0.0) -> float:
    """Steps of a client at a server; seconds that they took."""
    now = client.waiting_since
    server.wait(now)
    for _ in range(steps):
        client.wait(now)
        now = server.hears(now)
        server.wait(now)
        now = client.hears(now) + pause_s
    return now


def pair(wake_s: float, work_s: float) -> tuple[Party, Party]:
    one, other = (Party(wake_s, work_s, AdaptivePolling(wake_s, 1e-3)) for _ in range(2))
    return one, other


@each_case("wake_s", [20e-6, 60e-6, 150e-6, 300e-6])
@each_case("work_s", [10e-6, 50e-6, 90e-6])
def test_both_sides_of_a_tight_loop_end_polling(wake_s: float, work_s: float) -> None:
    client, server = pair(wake_s, work_s)
    for each in (client, server):  # as after long waits
        for _ in range(100):
            each.polling.waited(1.0, polled=False)
    exchange(client, server, 3 * PROBE_EVERY)
    client.woken = server.woken = 0
    exchange(client, server, 1000)
    assert client.woken == 0
    assert server.woken == 0


def test_one_long_wait_leaves_a_tight_loop_polling() -> None:
    client, server = pair(100e-6, 50e-6)
    exchange(client, server, 100)
    client.polling.waited(10.0, polled=False)
    assert client.polling.budget_s == client.polling.limit_s


def test_a_worker_that_computes_hardly_polls() -> None:
    client, server = pair(100e-6, 30e-6)
    took_s = exchange(client, server, 2000, pause_s=5e-3)
    assert server.polled < 0.01 * took_s


def test_waits_for_slow_ranks_hardly_poll() -> None:
    polling = AdaptivePolling(100e-6, 1e-3)
    polled_s = 0.0
    for _ in range(1000):
        polled_s += polling.budget_s
        polling.waited(2e-3, polled=False)
    assert polled_s < 0.01 * 1000 * 2e-3


def test_a_wait_that_is_long_now_and_then_costs_few_polls() -> None:
    """One of eight answers is quick: polling is no use, and is taken up for a moment only."""
    polling = AdaptivePolling(100e-6, 1e-3)
    polled_s = took_s = 0.0
    for step in range(8000):
        wait_s = 50e-6 if step % 8 == 0 else 5e-3
        budget_s = polling.budget_s
        polled_s += min(budget_s, wait_s)
        took_s += wait_s
        polling.waited(wait_s, polled=wait_s < budget_s)
    assert polled_s < 0.03 * took_s


def test_the_limit_is_two_wake_ups_and_a_small_step() -> None:
    limit_s = AdaptivePolling(100e-6, 1e-3).limit_s
    assert limit_s == pytest.approx(200e-6 + SMALL_STEP_S)
    assert AdaptivePolling(100e-6, 1e-3, tcp=True).limit_s > limit_s
    assert AdaptivePolling(100e-6, 50e-6).limit_s == 50e-6
    assert AdaptivePolling(100e-6, 0.0).limit_s == 0.0
    assert AdaptivePolling(0.0, 1e-3).limit_s == 0.0, "a simulation has no wake-ups"


def test_without_a_limit_no_wait_polls() -> None:
    polling = AdaptivePolling(100e-6, 0.0)
    for _ in range(10 * PROBE_EVERY):
        assert polling.budget_s == 0.0
        polling.waited(LONG_WAIT * 1e-6, polled=False)


def leaves(polling: AdaptivePolling, shared: list[bool]) -> list[int]:
    """After which of these waits it goes to another core; all end while they poll."""
    found = []
    for number, each in enumerate(shared, start=1):
        polling.waited(20e-6, polled=True, shared=each)
        if polling.leaves:
            found.append(number)
    return found


def test_a_shared_core_is_left_soon_and_then_ever_more_seldom() -> None:
    polling = AdaptivePolling(100e-6, 1e-3)
    first = LEAVE_AFTER
    assert leaves(polling, [True] * 7 * first) == [first, 3 * first, 7 * first]
    leaves(polling, [True] * 4 * LEAVE_AFTER_MAX)
    times = leaves(polling, [True] * 3 * LEAVE_AFTER_MAX)
    assert len(times) == 3, "it is tried again for ever"


def test_a_core_of_its_own_is_not_left() -> None:
    polling = AdaptivePolling(100e-6, 1e-3)
    assert leaves(polling, [False] * 1000) == []
    assert leaves(polling, [True, False] * 1000) == [], "interrupts take the core for a moment, too"


def test_a_core_that_was_found_is_left_soon_when_it_is_shared_again() -> None:
    polling = AdaptivePolling(100e-6, 1e-3)
    leaves(polling, [True] * 100 * LEAVE_AFTER)
    leaves(polling, [False] * 200 * LEAVE_AFTER)
    assert leaves(polling, [True] * 2 * LEAVE_AFTER)[0] <= 2 * LEAVE_AFTER


def test_waits_that_sleep_say_nothing_about_the_core() -> None:
    polling = AdaptivePolling(100e-6, 1e-3)
    for _ in range(10 * LEAVE_AFTER):
        polling.waited(1.0, polled=False, shared=True)
        assert not polling.leaves


def test_where_the_cores_are_taken_waits_sleep_ever_longer_until_they_are_free() -> None:
    polling = AdaptivePolling(100e-6, 1e-3)
    slept: list[int] = []
    for _ in range(12):
        polling.waited(3e-3, polled=False, shared=True, late=True)
        slept += [0]
        while not polling.budget_s:
            slept[-1] += 1
            polling.waited(50e-6, polled=False)
    assert slept[0] == CROWDED
    assert slept == sorted(slept)
    assert slept[-1] == CROWDED_MAX
    for _ in range(2 * CROWDED_MAX):
        polling.waited(50e-6, polled=True)
        assert polling.budget_s == polling.limit_s
    polling.waited(3e-3, polled=False, late=True)
    slept = [0]
    while not polling.budget_s:
        slept[0] += 1
        polling.waited(50e-6, polled=False)
    assert slept[0] == CROWDED
