"""What workers told of the gradients that they sent encoded, by rank and group."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from paramserve.messages import SentGradients

BYTES_MAX = (1 << 63) - 1
"""Told of one rank and group at most: larger sums could not be encoded in a status."""


class _Told(NamedTuple):
    """Of one rank and group: by which client, what that told last, and the bytes, sent and as they
    were, that the rank's clients before it told."""

    client: int
    last: SentGradients
    sent_before: int
    plain_before: int


class SentByRank:
    """Adds up what the incarnations of each rank tell."""

    def __init__(self) -> None:
        self._told: dict[tuple[int, str], _Told] = {}

    def heard(self, rank: int, client: int, told: Iterable[SentGradients]) -> None:
        """A client of a rank tells what it has sent since it came. What cannot be is left out: it
        comes from a peer."""
        for each in told:
            if min(each.sent_bytes, each.plain_bytes) < 0 or not each.residual_norm >= 0.0:
                continue
            if not math.isfinite(each.residual_norm):
                continue
            if max(each.sent_bytes, each.plain_bytes) > BYTES_MAX:
                continue
            key = rank, each.group
            before = self._told.get(key, _Told(client, each, 0, 0))
            if client < before.client:  # an incarnation that has ended
                continue
            sent, plain = before.sent_before, before.plain_before
            if client > before.client:
                sent, plain = sent + before.last.sent_bytes, plain + before.last.plain_bytes
            self._told[key] = _Told(client, each, sent, plain)

    def report(self) -> tuple[tuple[int, SentGradients], ...]:
        """By rank and group: the bytes of all incarnations, and the residual of the last one."""
        return tuple(
            (
                rank,
                SentGradients(
                    group,
                    min(each.sent_before + each.last.sent_bytes, BYTES_MAX),
                    min(each.plain_before + each.last.plain_bytes, BYTES_MAX),
                    each.last.residual_norm,
                ),
            )
            for (rank, group), each in sorted(self._told.items())
        )
