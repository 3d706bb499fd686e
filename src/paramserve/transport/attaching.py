"""Arenas that a client shares later than its first ones, over connections made for that alone."""

from __future__ import annotations

from paramserve.config import Limits
from paramserve.errors import Overloaded
from paramserve.transport.connection import Connection


def take_arenas(main: Connection, brought: Connection, limits: Limits) -> None:
    """Move the arenas that one connection brought along to the client's main connection.

    Raises:
        Overloaded: the client would have too many, or too much mapped. Nothing was moved.
    """
    both = {**main.arenas, **brought.arenas}
    total = sum(arena.nbytes for arena in both.values())
    if total > limits.arena_bytes_max or len(both) > limits.arenas_max:
        raise Overloaded(
            f"client {main.hello.client} would have {len(both)} arenas of {total} bytes mapped, "
            f"arenas_max is {limits.arenas_max}, arena_bytes_max {limits.arena_bytes_max}",
            fix="use smaller blocks or fewer outstanding steps, or raise the limit",
        )
    main.arenas.update(brought.arenas)
