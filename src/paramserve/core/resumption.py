"""Where a worker goes on that was started again, or later than the others: read from reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paramserve.messages import GroupReport


class Resumption(NamedTuple):
    """Where a worker that was started again, or later than the others, goes on in one group."""

    clock: int
    repeated: int
    """Steps from there on that some shard has had from an older incarnation."""


def clocks_to_resume(reports: Sequence[Sequence[GroupReport]], rank: int) -> dict[str, Resumption]:
    """Clocks that a new incarnation takes over, or a new worker begins with, by group.

    In Sync the last step of an older one is in its clock if every shard has it, decided or not:
    nothing more of an older incarnation is taken once a newer one has connected. Else it is in no
    clock yet, and is sent again to all. In Async a step that only some shards had is repeated.

    Args:
        reports: of every shard, after the worker has connected to all of them.
        rank: of the worker.
    """
    by_name: dict[str, list[GroupReport]] = {}
    for shard in reports:
        for report in shard:
            by_name.setdefault(report.name, []).append(report)
    resumptions = {}
    for name, parts in by_name.items():
        clocks = [dict(part.clocks).get(rank, part.clock) for part in parts]
        clocks += [0] * (len(reports) - len(parts))  # its define is on the way to these
        if not any(part.collects for part in parts):
            whole = all(rank in dict(part.clocks) for part in parts)
            resumptions[name] = Resumption(min(clocks), max(clocks) - min(clocks) if whole else 0)
            continue
        waiting = {dict(part.held).get(rank) for part in parts}
        everywhere = min(clocks) == max(clocks) and len(waiting) == 1 and None not in waiting
        resumptions[name] = Resumption(max(clocks) + (everywhere and len(parts) == len(reports)), 0)
    return resumptions


def not_joined(reports: Sequence[Sequence[GroupReport]], rank: int) -> frozenset[str]:
    """Groups that some shard does not know a rank as a member of. Where the lead's decision is on
    its way, joining once more waits for it and changes nothing.

    Args:
        reports: as for `clocks_to_resume`.
        rank: of the worker.
    """
    every = [report for shard in reports for report in shard]
    return frozenset(report.name for report in every if rank not in dict(report.clocks))
