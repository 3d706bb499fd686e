"""Ways that are cut hold what streams carry and lose what shards tell; slow ones take longer."""

from __future__ import annotations

from random import Random

import pytest
from tests.suites import each_case

from paramserve.virtual import VirtualClock
from paramserve_testing.network import (
    FAR,
    NEAR,
    Faults,
    Frame,
    Network,
    Rates,
    Stream,
    client_rates,
    peer_rates,
)


class Records:
    """An end of a stream that writes down what comes, and when."""

    def __init__(self, place: str, clock: VirtualClock) -> None:
        self.place = place
        self.clock = clock
        self.came: list[tuple[float, bytes]] = []
        self.ended_at: float | None = None

    def received(self, stream: Stream, frame: Frame) -> None:
        self.came.append((self.clock.now, frame.header))

    def lost(self, stream: Stream) -> None:
        self.ended_at = self.clock.now


class Wire:
    def __init__(self, faults: Faults | None = None) -> None:
        self.clock = VirtualClock()
        plain = Faults(delay_s=0.001)
        self.network = Network(self.clock, Random(1), faults if faults is not None else plain)
        self.near = Records("worker 0", self.clock)
        self.far = Records("shard 1", self.clock)
        self.stream = self.network.open(self.near, self.far, "a stream")

    def frames(self, side: int, *numbers: int) -> None:
        for number in numbers:
            self.stream.send(side, Frame(bytes([number])))


@pytest.fixture
def wire() -> Wire:
    return Wire()


def headers(end: Records) -> list[int]:
    return [header[0] for _, header in end.came]


def test_cut_way_holds_frames_in_order_until_it_is_mended(wire: Wire) -> None:
    wire.network.cut("worker 0", "shard 1", 0.5)
    wire.frames(NEAR, 1, 2, 3)
    wire.frames(FAR, 4)
    wire.clock.run(0.499)
    assert (wire.near.came, wire.far.came) == ([], [])
    wire.clock.run(0.6)
    assert (headers(wire.far), headers(wire.near)) == ([1, 2, 3], [4])
    assert all(at >= 0.5 for at, _ in wire.far.came)


def test_cut_in_one_direction_lets_the_other_through(wire: Wire) -> None:
    wire.network.cut("shard 1", "worker 0", 0.5, both=False)
    wire.frames(NEAR, 1)
    wire.frames(FAR, 2)
    wire.clock.run(0.1)
    assert (headers(wire.far), headers(wire.near)) == ([1], [])


def test_cut_elsewhere_changes_nothing(wire: Wire) -> None:
    wire.network.cut("worker 1", "shard 1", 0.5)
    wire.frames(NEAR, 1)
    wire.clock.run(0.1)
    assert headers(wire.far) == [1]


def test_cut_again_lasts_until_the_later_end(wire: Wire) -> None:
    wire.network.cut("worker 0", "shard 1", 0.5)
    wire.network.cut("worker 0", "shard 1", 0.1)
    wire.frames(NEAR, 1)
    wire.clock.run(0.3)
    assert headers(wire.far) == []
    wire.clock.run(0.6)
    assert headers(wire.far) == [1]


def test_end_of_a_stream_waits_behind_what_is_held(wire: Wire) -> None:
    wire.network.cut("worker 0", "shard 1", 0.5)
    wire.frames(NEAR, 1)
    wire.stream.close(NEAR)
    wire.clock.run(0.4)
    assert wire.far.ended_at is None
    wire.clock.run(0.6)
    assert headers(wire.far) == [1]
    assert wire.far.ended_at is not None
    assert wire.far.ended_at >= wire.far.came[0][0]


def test_healing_mends_every_way_and_ends_slowness(wire: Wire) -> None:
    wire.network.cut("worker 0", "shard 1", 100.0)
    wire.network.slow("worker 0", "shard 1", 1000.0, 100.0)
    wire.frames(NEAR, 1)
    wire.network.heal()
    wire.clock.run(0.01)
    assert headers(wire.far) == [1]
    assert wire.network.faults == wire.network.faults.healed()


def test_slow_way_takes_factor_times_as_long_for_its_time(wire: Wire) -> None:
    plain = [wire.network.delay_s(("worker 0", "shard 1")) for _ in range(50)]
    wire.network.slow("shard 1", "worker 0", 100.0, 1.0)
    slowed = [wire.network.delay_s(("worker 0", "shard 1")) for _ in range(50)]
    assert max(plain) <= 0.002 < sum(slowed) / 50 <= 0.2
    wire.clock.run(1.5)
    assert wire.network.delay_s(("worker 0", "shard 1")) <= 0.002


@each_case(("rates", "broken"), [(client_rates, False), (peer_rates, True), (None, False)])
def test_each_kind_of_stream_has_its_own_rate_of_loss(rates: Rates | None, broken: bool) -> None:
    wire = Wire(Faults(peer_lose=1.0))
    wire.stream = wire.network.open(wire.near, wire.far, "another", rates)
    wire.frames(NEAR, 1)
    wire.clock.run(1.0)
    assert (headers(wire.far), wire.stream.broken) == ([] if broken else [1], broken)


def test_frame_that_no_fault_hits_arrives(wire: Wire) -> None:
    wire.network.faults = Faults(cut=1.0)
    wire.stream.put(NEAR, Frame(b"\x01"))
    wire.clock.run(1.0)
    assert headers(wire.far) == [1]


def test_faults_show_only_what_differs_and_read_back() -> None:
    assert repr(Faults()) == "Faults()"
    faults = Faults(delay_s=0.5, change=0.25)
    assert repr(faults) == "Faults(delay_s=0.5, change=0.25)"
    assert eval(repr(faults)) == faults


def test_faults_drawn_have_every_kind_in_some_seeds_and_not_in_others() -> None:
    drawn = [Faults.drawn(Random(seed)) for seed in range(60)]
    rates = {"slow", "cut", "lose", "duplicate", "peer_lose", "peer_duplicate", "kill", "freeze"}
    rates |= {"partition", "sluggish", "change", "join", "leave", "stall", "reset"}
    for name in rates:
        assert {getattr(each, name) > 0 for each in drawn} == {True, False}, name
    plain = Faults()
    assert all(getattr(plain, name) == 0 for name in rates)


def test_clock_stops_at_its_limit_of_events() -> None:
    clock = VirtualClock()

    def again() -> None:
        clock.after(0.0, again)

    again()
    clock.events_max = 50
    clock.run(1.0)
    assert clock.events == 50
