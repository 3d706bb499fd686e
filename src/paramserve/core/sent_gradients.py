"""What workers told of gradients sent and values read encoded, by rank and group."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from paramserve.messages import SentGradients

BYTES_MAX = (1 << 63) - 1
"""Told of one rank and group at most: larger sums could not be encoded in a status."""


Bytes = tuple[int, int, int, int]
"""Of gradients as sent and as they were, of values as they came and as they are."""


class _Told(NamedTuple):
    """Of one rank and group: by which client, what that told last, and what the rank's clients
    before it told."""

    client: int
    last: SentGradients
    before: Bytes


def _bytes(told: SentGradients) -> Bytes:
    return told.sent_bytes, told.plain_bytes, told.read_bytes, told.read_plain_bytes


def _sum(told: _Told) -> Bytes:
    both = zip(told.before, _bytes(told.last), strict=True)
    sent, plain, read, read_plain = (min(before + last, BYTES_MAX) for before, last in both)
    return sent, plain, read, read_plain


class SentByRank:
    """Adds up what the incarnations of each rank tell."""

    def __init__(self) -> None:
        self._told: dict[tuple[int, str], _Told] = {}

    def heard(self, rank: int, client: int, told: Iterable[SentGradients]) -> None:
        """A client of a rank tells what it has sent since it came. What cannot be is left out: it
        comes from a peer."""
        for each in told:
            if not all(0 <= count <= BYTES_MAX for count in _bytes(each)):
                continue
            if not 0.0 <= each.residual_norm < math.inf:
                continue
            key = rank, each.group
            known = self._told.get(key, _Told(client, each, (0, 0, 0, 0)))
            if client < known.client:  # an incarnation that has ended
                continue
            before = _sum(known) if client > known.client else known.before
            self._told[key] = _Told(client, each, before)

    def report(self) -> tuple[tuple[int, SentGradients], ...]:
        """By rank and group: the bytes of all incarnations, and the residual of the last one."""
        found = []
        for (rank, group), each in sorted(self._told.items()):
            sent, plain, *read = _sum(each)
            told = SentGradients(group, sent, plain, each.last.residual_norm, *read)
            found.append((rank, told))
        return tuple(found)
