"""A client's arenas stay below twice what it needs at once, for slots of any sizes in any order."""

from __future__ import annotations

from collections.abc import Callable
from math import sin
from random import Random

from tests.suites import each_case
from tests.unit.client.fakes import Links

from paramserve.client.exchange import FIRST_ARENA_BYTES, Exchange, Slot
from paramserve.config import NO_CREDENTIALS, ConsistencySpec, Deadlines, Limits
from paramserve.messages import Joined
from paramserve.transport.arena import Arena

TAKES = 10_000
KB = 1 << 10

Amount = Callable[[Random, int], int]
"""Of the take of a number."""


class Memory:
    """The arenas that an exchange has, and the most that they were."""

    def __init__(self) -> None:
        self._arenas: list[Arena] = []

    def allocate(self, nbytes: int, number: int) -> Arena:
        self._arenas.append(Arena.private(nbytes, number))
        return self._arenas[-1]

    @property
    def nbytes(self) -> int:
        self._arenas = [arena for arena in self._arenas if arena.memory.size]
        return sum(arena.nbytes for arena in self._arenas)


def exchange_with(memory: Memory) -> Exchange:
    joined = Joined(1, 5, 0, 1, 0, (("unix:0",),), ConsistencySpec("Async"))
    deadlines = Deadlines(start_s=1.0, reconnect_s=0.1, request_s=1.0)
    return Exchange(
        joined, -1, NO_CREDENTIALS, Limits(), deadlines, Links(), allocate=memory.allocate
    )


def spread(least: int, most: int) -> Amount:
    """As often between 1 and 2 as between 100 and 200."""
    return lambda random, at: int(least * (most / least) ** random.random())


SIZES: dict[str, tuple[Amount, Amount]] = {
    "spread, 16 at once": (spread(64, 4096 * KB), lambda random, at: 16),
    "spread, 64 at once": (spread(64, 1024 * KB), lambda random, at: 64),
    "even": (lambda random, at: random.randint(1, 1024 * KB), lambda random, at: 16),
    "two sizes": (lambda random, at: random.choice([640, 6144 * KB]), lambda random, at: 12),
    "growing": (lambda random, at: 1000 + 200 * at, lambda random, at: 3),
    "growing again": (lambda random, at: 1000 + 20_000 * (at % 500), lambda random, at: 4),
    "more and fewer": (spread(KB, 1024 * KB), lambda random, at: 1 + int(60 * sin(at / 300) ** 2)),
}
"""By name: the size of a slot, and how many are taken at once."""


@each_case("case", SIZES)
def test_arenas_of_random_slots_stay_below_twice_what_is_in_use_at_once(case: str) -> None:
    size, at_once = SIZES[case]
    random, memory = Random(1), Memory()
    exchange = exchange_with(memory)
    taken: list[tuple[Slot, int]] = []
    needed = most = 0
    for at in range(TAKES):
        while len(taken) >= at_once(random, at):
            slot, nbytes = taken.pop(random.randrange(len(taken)))
            exchange.give_back([slot])
            needed -= nbytes
        nbytes = size(random, at)
        taken.append((exchange.take(nbytes), nbytes))
        needed += nbytes
        most = max(most, needed)
        assert memory.nbytes < 2 * most + FIRST_ARENA_BYTES
    exchange.close()


def test_arenas_of_a_large_need_go_back_when_it_is_over() -> None:
    random, memory = Random(2), Memory()
    exchange = exchange_with(memory)
    large = [exchange.take(random.randint(1, 1024 * KB)) for _ in range(100)]
    exchange.give_back(large)
    for _ in range(TAKES):
        exchange.give_back([exchange.take(random.randint(1, 64 * KB))])
    assert memory.nbytes < 2 * 64 * KB + 2 * FIRST_ARENA_BYTES
    exchange.close()
