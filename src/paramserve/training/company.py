"""Whether the others go on: asked by a rank that was started again right behind an epoch.

What the ranks agree on behind an epoch, as to stop early, its program does not hear again: its loop
begins with the next epoch. Where all others have returned at the very step at which it is, they
have stopped, and it has nothing to train on its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paramserve.client.client import Client

WAIT_S = 30.0
"""Seconds for what the others do behind that epoch, as an evaluation."""
POLL_S = 0.05


def all_have_stopped(client: Client, clocks: Mapping[str, int], epoch: int) -> bool:
    """Whether all other ranks have ended their loop at these clocks, by group, behind this epoch.

    Waits up to `WAIT_S` until that is so, or one of them goes on. Others that were started again,
    as all ranks of a run that goes on from a checkpoint, may ask the same: they count as going on.
    """
    connection, until = client.connection, time.monotonic() + WAIT_S
    while True:
        others = [each for each in connection.members() if each.rank != client.rank]
        if not others or any(each.incarnation > 1 for each in others):
            return False
        beats = connection.reports()
        reports = [each for beat in beats for each in beat.groups if each.name in clocks]
        positions = {(r.name, *at) for r in reports for at in (*r.clocks, *r.left)}
        arrived = {rank for report in reports for rank, _ in report.held}
        expected = [(group, each.rank, at) for each in others for group, at in clocks.items()]
        if any(each.rank in arrived for each in others) or not positions.issuperset(expected):
            return False
        if all(each.state == "left" for each in others):
            return True
        live = {each.rank for each in others if each.state in ("live", "retiring")}
        if not live or time.monotonic() >= until:
            return False
        collective = connection.open_collective(live)
        if collective is not None and collective.epoch > epoch:
            return collective.epoch == epoch + 1  # else they wait in the next one
        if collective is not None:
            connection.pass_by(collective)  # it would leave that call out in any case
        time.sleep(POLL_S)
