"""What policies cost: calls under each, the server's work for a push, the simulator's speed."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

import paramserve as ps
from benchmarks.ours import InPlace
from benchmarks.processes import cpu_s, server_pids
from benchmarks.workloads import Gate, Span, fresh, medians, per_second
from paramserve.config import Limits
from paramserve.core.events import ClientHere, Effects, FromShard, Requested
from paramserve.core.request_memory import Memory
from paramserve.core.shard import Shard
from paramserve.messages import BlockSpec, Define, Gradient, Piece, ReadTarget, Step
from paramserve.rules.registry import spec as rule_spec

FAR = 1_000_000
"""A bound that no worker comes near: none has to wait, and nothing is dropped."""
RULE = ps.SGD(lr=1e-6, momentum=0.9)
"""Rule of all groups alike: with momentum, so that lowering it costs what it costs."""

NO_WAITS: Mapping[str, Any] = MappingProxyType(
    {
        "Async()": ps.Async(),
        "Async(damping=Inverse)": ps.Async(damping=ps.Inverse(0.1)),
        "Async(momentum=corrected)": ps.Async(momentum="corrected"),
        "Async(drop_after)": ps.Async(drop_after=FAR),
        "BoundedStaleness": ps.BoundedStaleness(FAR),
        "DelayCompensated": ps.DelayCompensated(0.04),
        "Buffered(4)": ps.Buffered(4),
        "ElasticAverage": ps.ElasticAverage(rho=1.0),
    }
)
"""Policies under which no worker waits for another one, however many there are."""
ALONE: Mapping[str, Any] = MappingProxyType(
    {
        "Sync()": ps.Sync(),
        "Sync(timeout_s)": ps.Sync(timeout_s=60.0),
        "LocalSteps": ps.LocalSteps(every=1, outer=RULE),
    }
)
"""Policies under which a single worker has no other to wait for."""
BASE = "Async()"
START_S = 180.0
"""64 processes that import numba take a while on two cores."""
LOOK_S = 0.1


@dataclass(frozen=True)
class Policies:
    """8 KB of float32 on one server, one group for each policy, in one run and in turn.

    Each worker of the crowd sleeps between its pushes, the longer the more workers there are, so
    that a server gets as many pushes a second from one as from all.
    """

    bytes: int = 8_192
    calls: int = 4_000
    workers: int = 4
    rounds: int = 20
    """In which the workers go through all policies."""
    round_calls: int = 100
    crowd: tuple[int, ...] = (1, 16, 64)
    crowd_pushes: int = 3_200
    """Pushes of all workers together; a multiple of each number of workers."""
    push_every_s: float = 0.002
    steps: int = 12_800
    """That a bare shard is given, of all sessions together."""
    seeds: int = 30
    """Seeds of the simulator."""
    block: int = field(default=10, kw_only=True)
    """Calls of one policy in a row, with a single worker."""

    @property
    def size(self) -> int:
        return self.bytes // 4


def alone(load: Policies, scratch: Path) -> dict[str, float]:
    """Median seconds of a call of a single worker, by policy."""
    result = ps.run(_alone_worker, args=(load,), consistency=ps.Async())
    figures: dict[str, float] = result.returns[0]
    return figures


def _alone_worker(worker: ps.Worker, load: Policies) -> dict[str, float]:
    calls = _calls(worker, load, {**NO_WAITS, **ALONE})
    prepared = {name: call.fill for name, call in calls.items()}
    return medians(calls, load.calls, before=prepared, block=load.block)


class OneClock(InPlace):
    """One call in place that also ends the worker's clock."""

    def __call__(self) -> None:
        self._client.push_pull({self._name: self._gradient}, tick=True, copy=False)


def _calls(worker: ps.Worker, load: Policies, policies: Mapping[str, Any]) -> dict[str, OneClock]:
    """A `push_pull` for each policy, of a parameter in a group that goes by it."""
    client, zeros = worker.client, np.zeros(load.size, np.float32)
    for number, policy in enumerate(policies.values()):
        client.define(f"w{number}", zeros, rule=RULE, group=f"g{number}", consistency=policy)
    return {name: OneClock(client, f"w{number}") for number, name in enumerate(policies)}


def together(load: Policies, scratch: Path) -> dict[str, float]:
    """Calls a second of several workers at once, by policy: the median over the rounds."""
    result = ps.run(
        _together_worker, args=(load, scratch), workers=load.workers, consistency=ps.Async()
    )
    figures = {}
    count = load.workers * load.round_calls
    for name in NO_WAITS:
        by_round = zip(*(found[name] for found in result.returns.values()), strict=True)
        figures[name] = float(np.median([per_second(spans, count) for spans in by_round]))
    return figures


def _together_worker(worker: ps.Worker, load: Policies, scratch: Path) -> dict[str, list[Span]]:
    calls, gate = _calls(worker, load, NO_WAITS), Gate(scratch, load.workers)
    found: dict[str, list[Span]] = {name: [] for name in calls}
    for number in range(-1, load.rounds):  # the first round is not counted
        for place, (name, call) in enumerate(calls.items()):
            gate.meet(f"{number}.{place}")
            began = time.monotonic()
            for _ in range(load.round_calls):
                call.whole()
            if number >= 0:
                found[name].append((began, time.monotonic()))
    return found


# --- the server's work for a push ----------------------------------------------------------------


class QuietGate(Gate):
    """For many that wait long: it looks seldom, so that workers that still start get on."""

    def meet(self, name: str) -> None:
        place = self._folder / name
        place.mkdir(exist_ok=True)
        (place / str(os.getpid())).touch()
        deadline = time.monotonic() + START_S
        while len(os.listdir(place)) < self._parties:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(os.listdir(place))} of {self._parties} came to {name}")
            time.sleep(LOOK_S)


def crowd(load: Policies, scratch: Path) -> dict[str, float]:
    """Seconds of the server process's own time for each push, by number of workers that sleep."""
    figures = {}
    for count in load.crowd:
        folder = fresh(scratch, f"crowd{count}")
        result = ps.run(
            _sleeper,
            args=(load, folder),
            workers=count,
            consistency=ps.Async(),
            engine=ps.Local(deadlines=ps.Deadlines(start_s=START_S)),
        )
        figures[f"{count}"] = result.returns[0]
    return figures


def _sleeper(worker: ps.Worker, load: Policies, scratch: Path) -> float:
    """Server's time for a push, on rank 0. No worker pulls between the two readings of it."""
    client, count = worker.client, worker.workers
    client.define("w", np.zeros(load.size, np.float32), rule=RULE)
    call, gate = OneClock(client, "w"), QuietGate(scratch, count)
    call.whole()
    gate.meet("begin")
    (pid,) = server_pids()
    period_s = load.push_every_s * count
    gate.meet("read")
    before = cpu_s(pid)
    time.sleep(period_s * worker.rank / count)  # they come one after the other
    for _ in range(load.crowd_pushes // count):
        call.whole()
        time.sleep(period_s)
    gate.meet("end")
    return (cpu_s(pid) - before) / (load.crowd_pushes // count * count)


def bare(load: Policies, scratch: Path) -> dict[str, float]:
    """Seconds of `Shard.step` for each push, with no input or output, by policy and sessions."""
    figures = {}
    for name, policy in (("Async()", ps.Async()), ("Sync()", ps.Sync())):
        for count in load.crowd:
            shard = BareShard(load, policy, count)
            shard.round()
            rounds = load.steps // count
            began = time.process_time()
            for _ in range(rounds):
                shard.round()
            figures[f"{name} {count}"] = (time.process_time() - began) / (rounds * count)
    return figures


class BareShard:
    """A shard whose sessions push in turn; every message is handed over at once."""

    def __init__(self, load: Policies, policy: Any, sessions: int) -> None:
        self._shard = Shard(0, 1, sessions, policy, limits=Limits(), resend_s=60.0)
        self._clock = 0
        self._arena = np.zeros(2 * load.bytes, np.uint8)
        self._memory = Memory({1: self._arena})
        self._gradient = Gradient(0, 1, 0)
        self._place = ReadTarget(0, 1, load.bytes)
        self._answered = 0
        for rank in range(sessions):
            self._happen(ClientHere(rank + 1, 1, rank, 4))
        self._sequence = [1] * sessions
        piece = (Piece("w", (load.size,)),)
        spec = BlockSpec(0, 0, "g", "float32", rule_spec(RULE), piece, (0, load.size))
        self._happen(Requested(1, Define(1, spec, 1, 1, 0), self._memory))
        self._sequence[0] += 1

    def round(self) -> None:
        """One push and pull of each session.

        Raises:
            AssertionError: not every one was answered.
        """
        expected = self._answered + len(self._sequence)
        for rank, number in enumerate(self._sequence):
            step = Step(number, 0, self._clock, True, (self._gradient,), (self._place,))
            self._happen(Requested(rank + 1, step, self._memory))
            self._sequence[rank] = number + 1
        self._clock += 1
        assert self._answered == expected, f"{self._answered} answers, expected {expected}"

    def _happen(self, event: Any) -> None:
        effects: Effects = self._shard.step(event, 0.0)
        self._answered += len(effects.replies)
        for _, message in effects.peers:
            self._happen(FromShard(message))


# --- the simulator -------------------------------------------------------------------------------


def simulator(load: Policies, scratch: Path) -> dict[str, float]:
    """Events a second of whole simulated runs with faults, by the process's own time."""
    _simulate(0)  # compiles what is compiled
    events, began = 0, time.process_time()
    for seed in range(load.seeds):
        events += _simulate(seed)
    return {"events_per_s": events / (time.process_time() - began)}


def _simulate(seed: int) -> int:
    from paramserve_testing import SimulatedCluster  # workers load this module, and need none

    cluster = SimulatedCluster(seed)
    cluster.run()
    return cluster.clock.events
