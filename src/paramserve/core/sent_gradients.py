"""What workers told the coordinator of gradients sent and of values read encoded, by rank and
group."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from paramserve.messages import SentGradients

BYTES_MAX = (1 << 63) - 1
"""Told of one rank and group at most: larger sums could not be encoded in a status."""


Bytes = tuple[int, int, int, int]
"""Bytes of gradients as sent and plain, of values as they arrived and plain."""


class _Report(NamedTuple):
    """Report of one rank and group: its client, the last figures, and those of clients before."""

    client: int
    last: SentGradients
    before: Bytes


def _bytes(of: SentGradients) -> Bytes:
    return (
        of.sent_bytes,
        of.plain_bytes,
        of.read_bytes,
        of.read_plain_bytes,
    )


def _sum(report: _Report) -> Bytes:
    both = zip(report.before, _bytes(report.last), strict=True)
    sent_bytes, plain, read, read_plain = (min(before + last, BYTES_MAX) for before, last in both)
    return sent_bytes, plain, read, read_plain


class SentByRank:
    """Adds up what the incarnations of each rank tell."""

    def __init__(self) -> None:
        self._reports: dict[tuple[int, str], _Report] = {}

    def on_report(self, rank: int, client: int, gradients: Iterable[SentGradients]) -> None:
        """A client of a rank tells what it has sent since it came. What cannot be is left out: it
        comes from a peer."""
        for each in gradients:
            if not all(0 <= count <= BYTES_MAX for count in _bytes(each)):
                continue
            if not 0.0 <= each.residual_norm < math.inf:
                continue
            key = rank, each.group
            before_it = self._reports.get(key, _Report(client, each, (0, 0, 0, 0)))
            if client < before_it.client:  # an incarnation that has ended
                continue
            before = _sum(before_it) if client > before_it.client else before_it.before
            self._reports[key] = _Report(client, each, before)

    def report(self) -> tuple[tuple[int, SentGradients], ...]:
        """For `Status`: bytes of all incarnations and the residual of the last one, by rank and
        group."""
        reports = []
        for (rank, group), each in sorted(self._reports.items()):
            sent_bytes, plain, *read = _sum(each)
            total = SentGradients(group, sent_bytes, plain, each.last.residual_norm, *read)
            reports.append((rank, total))
        return tuple(reports)
