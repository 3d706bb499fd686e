"""Simulated links with a bandwidth: how long transfers take that share them."""

from __future__ import annotations

from functools import partial

import pytest
from tests.sim.workloads.bandwidth import SharedLinks

from paramserve.virtual import VirtualClock

RATE = 100.0
"""Bytes a second of each link."""


class Sent:
    """Links, and when each of what was sent over them was through."""

    def __init__(self, scale: float = 1.0) -> None:
        self.clock = VirtualClock()
        self.links = SharedLinks(self.clock, lambda place: RATE, scale)
        self.at: dict[str, float] = {}

    def send(self, name: str, source: str, target: str, header: int, payload: int = 0) -> None:
        self.links.carry((source, target), header, payload, partial(self.through, name))

    def through(self, name: str) -> None:
        self.at[name] = self.clock.now

    def run(self) -> dict[str, float]:
        self.clock.run(1000.0)
        return self.at


def test_transfer_alone_takes_its_bytes_over_the_bandwidth() -> None:
    sent = Sent(scale=10.0)
    sent.send("one", "a", "b", 100, 40)
    assert sent.run() == pytest.approx({"one": 5.0})
    assert sent.links.carried["a", "b"] == 500


def test_transfers_to_one_place_share_its_link_and_the_rest_speeds_up() -> None:
    sent = Sent()
    sent.send("small", "a", "c", 100)
    sent.send("large", "b", "c", 300)
    # At half the rate the small one takes 2 s, in which the large one has sent 100 of 300.
    assert sent.run() == pytest.approx({"small": 2.0, "large": 4.0})


def test_transfers_of_other_places_and_of_the_other_direction_do_not_share() -> None:
    sent = Sent()
    sent.send("there", "a", "b", 100)
    sent.send("back", "b", "a", 100)
    sent.send("others", "c", "d", 100)
    assert sent.run() == pytest.approx({"there": 1.0, "back": 1.0, "others": 1.0})


def test_transfer_that_comes_later_shares_what_is_left() -> None:
    sent = Sent()
    sent.send("first", "a", "b", 200)
    sent.clock.after(1.0, sent.send, "second", "a", "c", 50)
    assert sent.run() == pytest.approx({"second": 2.0, "first": 2.5})


def test_transfer_of_no_bytes_is_through_at_once() -> None:
    sent = Sent()
    sent.send("end", "a", "b", 0)
    assert sent.run() == pytest.approx({"end": 0.0})
