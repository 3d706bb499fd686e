"""A cluster as a discrete-event model: the real policies, modelled links, compute and servers.

Each worker computes, sends its gradients to all shards, and goes on when all have answered with
values. A link carries one message after the other in each direction, in the order in which they
reach it, but answers that leave together share it; a message flows through both links at once.
Workers begin with different shards, so that they do not all send to the same one. A server works on
one message after the other.

Under a policy that collects, gradients wait for their clock; with several shards each one tells
the group's lead, which tells all (the two-phase commit of `core.commit`).

Many shards are put together into fewer, equal ones (`bundles_of`): what goes over each link and
what servers work stays the same, so that 10,000 workers take seconds.

What is left out: lost and repeated messages, workers that come or go, what policies do to values.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from paramserve.consistency.base import Admission, Buffer, Drop, Policy, Pull, Push, Wait
from paramserve.consistency.built_in import Sync
from paramserve.consistency.registry import is_built_in
from paramserve.virtual import VirtualClock
from paramserve_plan.prediction import Prediction, staleness_figures
from paramserve_plan.setting import GBPS, Compute, Setting

RECENT = 64
"""Steps whose time `step_s` is the median of."""


class ShardGroupView:
    """A `consistency.base.GroupView`: the policy reads `arrived` by that name."""

    def __init__(self, workers: int) -> None:
        self.clocks: dict[int, int] = dict.fromkeys(range(workers), 0)
        self.slowest = 0
        self.version = 0
        self.buffered = 0
        self.arrived: set[int] = set()
        self.waited_s = 0.0
        self.step_s = 0.0
        self._at = Counter({0: workers})
        """How many workers have finished so many steps."""
        self._recent: deque[float] = deque(maxlen=RECENT)

    def tick(self, rank: int) -> bool:
        """A worker has ended a step; whether the slowest clock has risen."""
        clock = self.clocks[rank]
        self.clocks[rank] = clock + 1
        self._at[clock] -= 1
        self._at[clock + 1] += 1
        if clock != self.slowest or self._at[clock]:
            return False
        del self._at[clock]
        self.slowest += 1  # the one that has ticked is there
        return True

    def arrive(self, rank: int, took_s: float) -> None:
        """A worker's gradients of the clock under way have come, so long after the clock before."""
        self.arrived.add(rank)
        self._recent.append(took_s)

    def commit(self) -> None:
        """The clock under way is decided; all workers go on from it."""
        self.slowest += 1
        self.clocks = dict.fromkeys(self.clocks, self.slowest)
        self.arrived = set()
        self.waited_s = 0.0
        self.step_s = median(self._recent) if self._recent else 0.0


Job = tuple[float, float, Callable[..., None], tuple[Any, ...]]
"""Seconds, seconds of passes over memory, and what to do then."""


class Cores:
    """Cores that some processes share, first come, first served.

    Args:
        contention: passes over memory take so many times longer while another core works.
    """

    def __init__(self, clock: VirtualClock, count: int, contention: float) -> None:
        self.clock = clock
        self._free = count
        self._count = count
        self._contention = contention
        self._waiting: deque[Processor] = deque()

    def want(self, process: Processor) -> None:
        """A process has something to do; it gets a core, now or later."""
        if self._free:
            self._start(process)
        else:
            self._waiting.append(process)

    def _start(self, process: Processor) -> None:
        self._free -= 1
        job = process.jobs.popleft()
        alone = self._free == self._count - 1
        seconds = job[0] + job[1] * (1.0 if alone else self._contention)
        process.busy_s += seconds
        self.clock.after(seconds, self._end, process, job)

    def _end(self, process: Processor, job: Job) -> None:
        self._free += 1
        if process.jobs:
            self._waiting.append(process)
        else:
            process.active = False
        if self._waiting:
            self._start(self._waiting.popleft())
        job[2](*job[3])


class Processor:
    """One process. Without `cores` it has a core of its own."""

    def __init__(self, clock: VirtualClock, cores: Cores | None) -> None:
        self._clock = clock
        self._cores = cores
        self._free_at = 0.0
        self.jobs: deque[Job] = deque()
        self.active = False
        """Whether it has a core or waits for one."""
        self.busy_s = 0.0

    def do(
        self, at_s: float, seconds: float, memory_s: float, action: Callable[..., None], *args: Any
    ) -> None:
        """Work for so long, not before `at_s` and after all earlier work; then `action(*args)`."""
        if self._cores is None:
            self.busy_s += seconds + memory_s
            self._free_at = max(self._free_at, at_s) + seconds + memory_s
            self._clock.at(self._free_at, action, *args)
        else:
            self._clock.at(at_s, self._add, (seconds, memory_s, action, args))

    def _add(self, job: Job) -> None:
        self.jobs.append(job)
        if not self.active and self._cores is not None:
            self.active = True
            self._cores.want(self)


class Worker:
    """A modelled worker: how far it is, and when its link will be free."""

    def __init__(
        self, rank: int, compute: Compute, source: random.Random, cpu: Processor, shards: int
    ) -> None:
        self.rank = rank
        self._compute = compute
        self._source = source
        self._mean_s = compute.mean_of(rank, source)
        self.cpu = cpu
        self.clock = self.next = 0
        """Steps finished, and what that is after the step under way."""
        self.base = [0] * shards
        """Version that it has read of each shard."""
        self.up_at = self.down_at = 0.0
        """When its link will be free, in each direction."""
        self.answers = 0
        self.whole_at = 0.0
        """When the last answer will be here as a whole."""
        self.had_at = self.freed_at = 0.0
        """When the last shard had its gradients; when the last one stopped holding it up."""
        self.skipped = False

    def draw(self) -> float:
        """How long its next step takes: independent of the other workers."""
        return self._compute.draw(self._mean_s, self._source)


class Shard:
    """A modelled shard: what it waits for, and when its link will be free."""

    def __init__(self, number: int, cpu: Processor, workers: int) -> None:
        self.number = number
        self.cpu = cpu
        self.standing = ShardGroupView(workers)
        self.in_at = self.out_at = 0.0
        """When its link will be free, in each direction."""
        self.waiting: list[Worker] = []
        """Workers whose pulls are held."""
        self.steps: dict[int, Worker] = {}
        """Workers by rank whose gradients of the clock under way are here."""
        self.early: list[Worker] = []
        """Workers whose gradients are of a later clock, which this shard does not know yet."""
        self.told = False
        """Whether the lead knows that this shard is ready."""
        self.since = 0.0
        """Start of the clock under way."""
        self.first_at = 0.0


BUNDLES_MIN, BUNDLES_MAX = 2, 16
MESSAGES = 2_000
"""Most messages of one direction and clock: more shards than this allows are put together."""
EVENTS = 250_000
"""About as many are played, a second or two."""
CLOCKS_MIN, CLOCKS_MAX = 6, 400
EVENTS_EACH = 4
"""Events of one worker, shard and step."""
WARM = 0.3
"""This part of the steps does not count: the workers start at the same moment."""
NEVER_S = 1e12


def bundles_of(setting: Setting) -> int:
    """How many shards are modelled."""
    fit = max(BUNDLES_MIN, min(BUNDLES_MAX, MESSAGES // setting.workers))
    return min(setting.shards, fit)


def clocks_of(setting: Setting) -> int:
    """How many steps of each worker are played."""
    events = EVENTS_EACH * setting.workers * bundles_of(setting)
    return max(CLOCKS_MIN, min(CLOCKS_MAX, EVENTS // events))


class Shares(NamedTuple):
    """Shares of the steps after the start, in sums of seconds and counts."""

    since_s: float
    steps: int
    skipped: int
    waiting_s: float
    compute_s: float
    server_s: float


class Model:
    """One play of one setting.

    Args:
        policy: a built-in one is asked only when its answer may have changed; another one is asked
            each time, which takes time with many workers.
        seed: the same one gives the same result.
        clocks: steps of each worker, on average, at least 2; `clocks_of(setting)` if None.
        bundles: shards to model; `bundles_of(setting)` if None.
    """

    def __init__(
        self,
        setting: Setting,
        policy: Policy,
        *,
        seed: int = 0,
        clocks: int | None = None,
        bundles: int | None = None,
    ) -> None:
        policy.check(setting.workers)
        self.setting = setting
        self.policy = policy
        self.clock = VirtualClock()
        costs, network = setting.costs, setting.network
        bundles = bundles if bundles is not None else bundles_of(setting)
        self._each = setting.shards / bundles
        """Shards in a bundle."""
        self._every = int(getattr(policy, "steps_per_clock", 1))
        self._fragments = int(getattr(policy, "fragments", 1))
        """Fragments of the model, of which each exchange has one."""
        self._bytes = setting.model_bytes / bundles / self._fragments
        worker_s = self._bytes / (network.worker_gbps * GBPS)
        server_s = self._bytes / (network.server_gbps * GBPS * self._each)
        self._worker_up_s, self._worker_down_s = (
            worker_s * setting.push_share,
            worker_s * setting.pull_share,
        )
        self._server_in_s, self._server_out_s = (
            server_s * setting.push_share,
            server_s * setting.pull_share,
        )
        self._message_s = costs.message_s * self._each
        """A bundle's servers work side by side: but a worker, and the lead, has all messages."""
        self._pass_s = self._bytes / self._each * costs.byte_s
        self._latency_s = network.latency_s
        # Of a bundle's shards, all but the last one have answered before, unless all wait for a
        # clock's commit.
        self._before_s = 0.0
        if not policy.collects:
            self._before_s = self._worker_down_s * (1.0 - 1.0 / self._each)
        cores = None
        if costs.cores is not None:
            cores = Cores(self.clock, costs.cores, costs.contention)
        self._workers = [
            Worker(
                rank,
                setting.compute,
                random.Random(f"{seed} {rank}"),
                Processor(self.clock, cores),
                bundles,
            )
            for rank in range(setting.workers)
        ]
        self._shards = [
            Shard(number, Processor(self.clock, cores), setting.workers)
            for number in range(bundles)
        ]
        self._built_in = is_built_in(policy)
        self._answers: dict[tuple[int, int], Admission] = {}
        """Admission of a pull by clock and slowest clock, as a built-in policy said."""
        self._ready: dict[int, tuple[frozenset[int], float]] = {}
        """Ranks by shard whose gradients are there, at the lead, and since when it is so."""
        total = clocks if clocks is not None else clocks_of(setting)
        self._last = total * setting.workers
        self._warm = max(1, round(WARM * total)) * setting.workers
        self._steps = self._skipped = 0
        self._waiting_s = self._compute_s = 0.0
        self._staleness: Counter[int] = Counter()
        self._dropped = self._pushed = 0
        self._mark = Shares(0.0, 0, 0, 0.0, 0.0, 0.0)

    def play(self) -> Prediction:
        """Run it, once.

        Raises:
            ValueError: the policy holds all workers for ever.
        """
        for worker in self._workers:
            self._compute(worker)
        self.clock.run(NEVER_S)
        if self._steps < self._last:
            raise ValueError(
                f"{self.policy!r} holds all {self.setting.workers} workers for ever after "
                f"{self._steps} steps"
            )
        return self._prediction(self._mark, self._shares())

    def _prediction(self, then: Shares, now: Shares) -> Prediction:
        """Figures from what was counted between two moments."""
        setting, network = self.setting, self.setting.network
        workers, shards = setting.workers, setting.shards
        count, seconds = now.steps - then.steps, now.since_s - then.since_s
        rounds_s = count / seconds  # exchanges a second of all workers
        round_s = workers / rounds_s
        exchange_bytes = setting.link_bytes / self._fragments
        step_bytes = exchange_bytes / self._every
        # In a short play the computing of the last steps counts, but not all of their exchange.
        compute = min(1.0, (now.compute_s - then.compute_s) / count / round_s)
        waiting = min(1.0 - compute, (now.waiting_s - then.waiting_s) / count / round_s)
        skipped = (now.skipped - then.skipped) / count
        pushed_s = rounds_s * exchange_bytes
        return Prediction(
            workers=workers,
            shards=shards,
            step_s=round_s / self._every,
            steps_per_s=rounds_s * self._every,
            compute_share=compute,
            waiting_share=waiting,
            exchange_share=1.0 - compute - waiting,
            dropped_share=min(1.0, skipped + self._dropped / max(1, self._pushed)),
            staleness=staleness_figures(self._staleness),
            worker_bytes=step_bytes,
            server_bytes=step_bytes * workers / shards,
            worker_link_use=pushed_s / workers / (network.worker_gbps * GBPS),
            server_link_use=pushed_s / shards / (network.server_gbps * GBPS),
            server_use=(now.server_s - then.server_s) / seconds,
            events=self.clock.events,
        )

    def _shares(self) -> Shares:
        busy = max(shard.cpu.busy_s for shard in self._shards)
        return Shares(
            self.clock.now, self._steps, self._skipped, self._waiting_s, self._compute_s, busy
        )

    # --- a worker --------------------------------------------------------------------------------

    def _compute(self, worker: Worker) -> None:
        seconds = sum(worker.draw() for _ in range(self._every))
        self._compute_s += seconds
        messages_s = self._message_s * len(self._shards)
        worker.cpu.do(self.clock.now + seconds, messages_s, 0.0, self._send, worker)

    def _send(self, worker: Worker) -> None:
        worker.answers = 0
        worker.had_at = worker.freed_at = 0.0
        worker.skipped = False
        count = len(self._shards)
        for step in range(count):
            shard = self._shards[(worker.rank + step) % count]
            start = max(worker.up_at, self.clock.now)
            worker.up_at = start + self._worker_up_s
            self.clock.at(
                start + self._latency_s, self._arrive, worker, shard, worker.up_at + self._latency_s
            )

    def _back(self, worker: Worker, shard: Shard, whole_at: float, version: int) -> None:
        """An answer begins to reach its worker."""
        worker.down_at = max(worker.down_at, self.clock.now - self._before_s)
        worker.down_at += self._worker_down_s
        worker.whole_at = max(worker.whole_at, worker.down_at, whole_at)
        worker.base[shard.number] = version
        worker.answers += 1
        if worker.answers == len(self._shards):
            messages_s = self._message_s * len(self._shards)
            worker.cpu.do(worker.whole_at, messages_s, 0.0, self._finish, worker)

    def _finish(self, worker: Worker) -> None:
        self._waiting_s += max(0.0, worker.freed_at - worker.had_at)
        worker.clock = worker.next
        self._skipped += worker.skipped
        self._steps += 1
        if self._steps == self._warm:
            self._mark = self._shares()
            self._staleness.clear()
            self._dropped = self._pushed = 0
        if self._steps == self._last:
            self.clock.stop()
            return
        self._compute(worker)

    # --- a shard ---------------------------------------------------------------------------------

    def _arrive(self, worker: Worker, shard: Shard, whole_at: float) -> None:
        """Gradients begin to reach a server."""
        shard.in_at = max(shard.in_at, self.clock.now) + self._server_in_s
        # Checked for NaN; then, unless they are collected, applied and the new values copied.
        passes = 1 if self.policy.collects else 3 + self.policy.keeps_reads
        message_s = self.setting.costs.message_s
        handle = self._collect if self.policy.collects else self._push
        here_at = max(shard.in_at, whole_at)
        shard.cpu.do(here_at, message_s, passes * self._pass_s, handle, worker, shard)

    def _push(self, worker: Worker, shard: Shard) -> None:
        standing = shard.standing
        staleness = standing.version - worker.base[shard.number]
        decision = self.policy.on_push(Push(worker.rank, worker.clock, staleness), standing)
        self._pushed += 1
        self._staleness[staleness] += 1
        if isinstance(decision, Drop):
            self._dropped += 1
        elif isinstance(decision, Buffer):
            standing.buffered += 1
            if standing.buffered >= decision.size:
                standing.buffered = 0
                standing.version += 1
        else:
            standing.version += 1
        worker.had_at = max(worker.had_at, self.clock.now)
        worker.next = worker.clock + 1
        asking, admitted = [worker], []
        if standing.tick(worker.rank) or not self._built_in:
            asking, shard.waiting = [worker, *shard.waiting], []
        for each in asking:
            if self._admits(standing.clocks[each.rank], each, shard):
                each.freed_at = max(each.freed_at, self.clock.now)
                admitted.append(each)
            else:
                shard.waiting.append(each)
        whole_at = self._take_link(shard, len(admitted))
        for each in admitted:
            self._answer(each, shard, whole_at)

    def _admits(self, clock: int, worker: Worker, shard: Shard) -> bool:
        key = (clock, shard.standing.slowest)
        answer = self._answers.get(key) if self._built_in else None
        if answer is None:
            answer = self.policy.on_pull(Pull(worker.rank, clock), shard.standing)
            self._answers[key] = answer
        return not isinstance(answer, Wait)

    def _take_link(self, shard: Shard, answers: int) -> float:
        """When answers that leave together, and share the link evenly, will have left."""
        shard.out_at = max(shard.out_at, self.clock.now) + answers * self._server_out_s
        return shard.out_at

    def _answer(self, worker: Worker, shard: Shard, left_at: float) -> None:
        now, latency_s = self.clock.now, self._latency_s
        whole_at = max(left_at, now + self._server_out_s) + latency_s
        version = shard.standing.version
        self.clock.at(now + latency_s, self._back, worker, shard, whole_at, version)

    # --- a shard whose policy collects -----------------------------------------------------------

    def _collect(self, worker: Worker, shard: Shard) -> None:
        standing, now = shard.standing, self.clock.now
        if worker.clock > standing.slowest:
            shard.early.append(worker)
            return
        worker.had_at = max(worker.had_at, now)
        if worker.clock < standing.slowest:
            self._skip(worker, shard)
            return
        if not shard.steps:
            shard.first_at = now
        shard.steps[worker.rank] = worker
        if shard.told:
            return
        standing.arrive(worker.rank, now - shard.since)
        self._ask(shard, standing.slowest)

    def _skip(self, worker: Worker, shard: Shard) -> None:
        """Too late: it goes on with the clock under way."""
        worker.skipped = True
        self._reply(worker, shard, self._take_link(shard, 1))

    def _reply(self, worker: Worker, shard: Shard, left_at: float) -> None:
        """Copy the values, and answer; the worker goes on with the clock under way."""
        worker.next = max(worker.next, shard.standing.slowest)
        message_s = self.setting.costs.message_s
        now = self.clock.now
        shard.cpu.do(now, message_s, self._pass_s, self._answer, worker, shard, left_at)

    def _ask(self, shard: Shard, clock: int, due_s: float = 0.0) -> None:
        """Ask the policy whether the clock under way may be decided."""
        standing = shard.standing
        if shard.told or standing.slowest != clock:
            return
        arrived = len(standing.arrived)
        backup = self.policy.backup if self._built_in and isinstance(self.policy, Sync) else None
        if backup is not None and not due_s and 1 < arrived < len(standing.clocks) - backup:
            return  # it would say so, after a look at each worker
        standing.waited_s = max(due_s, self.clock.now - shard.first_at)
        answer = self.policy.on_clock(standing)
        if isinstance(answer, Wait):
            if answer.until_s is not None and answer.until_s > due_s and (due_s or arrived == 1):
                due_at = shard.first_at + answer.until_s
                self.clock.at(due_at, self._ask, shard, clock, answer.until_s)
            return
        shard.told = True
        who = frozenset(standing.arrived)
        if len(self._shards) == 1:
            self._decide(who, self.clock.now)
        else:
            self.clock.after(self._latency_s, self._to_lead, shard, who, self.clock.now)

    def _to_lead(self, shard: Shard, who: frozenset[int], since_s: float) -> None:
        lead = self._shards[0]
        lead.cpu.do(self.clock.now, self._message_s, 0.0, self._gather, shard, who, since_s)

    def _gather(self, shard: Shard, who: frozenset[int], since_s: float) -> None:
        """The lead knows that one more shard is ready."""
        self._ready[shard.number] = who, since_s
        if len(self._ready) < len(self._shards):
            return
        sets = [each[0] for each in self._ready.values()]
        since_s = max(each[1] for each in self._ready.values())
        self._ready = {}
        agreed = frozenset.intersection(*sets)
        messages_s = self._message_s * len(self._shards)
        then_at = self.clock.now
        if any(each != agreed for each in sets):
            then_at += 2 * self._latency_s  # it proposes those that all shards have
        self._shards[0].cpu.do(then_at, messages_s, 0.0, self._decide, agreed, since_s)

    def _decide(self, who: frozenset[int], since_s: float) -> None:
        """The lead tells all shards; each adds the gradients up and updates its values."""
        delay_s = self._latency_s if len(self._shards) > 1 else 0.0
        passes_s = (len(who) + 1) * self._pass_s
        message_s = self.setting.costs.message_s
        for shard in self._shards:
            shard.cpu.do(
                self.clock.now + delay_s, message_s, passes_s, self._commit, shard, who, since_s
            )

    def _commit(self, shard: Shard, who: frozenset[int], since_s: float) -> None:
        standing = shard.standing
        standing.version += bool(who)
        standing.commit()
        self._staleness[0] += len(who)
        steps, shard.steps = shard.steps, {}
        early, shard.early = shard.early, []
        shard.told = False
        shard.since = self.clock.now
        left_at = self._take_link(shard, len(steps))
        for rank, worker in steps.items():
            if rank in who:
                worker.freed_at = max(worker.freed_at, since_s)
            else:
                worker.skipped = True
            self._reply(worker, shard, left_at)
        for worker in early:
            self._collect(worker, shard)
