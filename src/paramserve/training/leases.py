"""A worker's side of leases: what it draws, what its steps have taken, and how fast it computes.

It knows positions of an epoch's order, not samples. Which range comes next is the coordinator's
decision (`core/leases.py`).
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from paramserve.client import timeouts
from paramserve.errors import ParamServeError, Timeout, UnknownName, warn_user
from paramserve.messages import GiveBack, Lease, Leased, LeasePlan, Ok

if TYPE_CHECKING:
    from paramserve.client import Client
    from paramserve.training.optimizers import Optimizers

WAIT_S = 2.0
"""How long one question for samples waits at the coordinator."""
GIVE_BACK_S = 1.0
"""How long a loop that is broken off waits until its rest is given back, and a worker that ends
until it is known how far it came."""
SMOOTHING = 0.3
"""Weight of the newest step in the mean time for a sample: about the last 3 steps count."""

AS_WORKER_SAYS = 0
"""Value of a plan's `batches_per_step` until the first loop begins."""

Mark = tuple[int, int]


class DrawnBatch(NamedTuple):
    """One batch: the positions [start, stop) of an epoch's order. `mark`: once it is done."""

    epoch: int
    start: int
    stop: int
    mark: Mark


class Leases:
    """The leased loaders of one worker, over one of which it iterates at a time.

    Attributes:
        present: whose batches the steps take; None: those of no leased loader.
        made: how many there are.
    """

    def __init__(self, client: Client, optimizers: Optimizers) -> None:
        self.client = client
        self.optimizers = optimizers
        self.present: LeasedWork | None = None
        self.loader_count = 0

    def next_name(self) -> str:
        """Name of one more loader: the same on all ranks that make them in the same order."""
        self.loader_count += 1
        return f"loader-{self.loader_count}"

    @property
    def under_way(self) -> bool:
        """Whether a loop over one is."""
        return self.present is not None and self.present.active

    @property
    def step_samples(self) -> float | None:
        """Samples behind the present step; None: it is not with batches of a leased loader."""
        return self.present.step_samples if self.present is not None else None


class LeasedWork:
    """What one worker does of one loader.

    A step takes the batches that were delivered before it. Where the loader does not say what was
    delivered, it takes the next `plan.batches_per_step` that were drawn.

    Args:
        name: of the loader, the same on all ranks.
        plan: the same on all ranks. `batches_per_step` may be `AS_WORKER_SAYS`.
        reports_delivery: whether `delivered` will be called for each batch.
        has_others: whether steps of a checkpoint are left that no loader accounts for, and were not
            made with leased ones. Asked before the first lease.
        clock: seconds.
    """

    def __init__(
        self,
        leases: Leases,
        name: str,
        plan: LeasePlan,
        *,
        reports_delivery: bool,
        has_others: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.plan = plan
        self.over = False
        """Whether all samples of this turn are in the values."""
        self.active = False
        """Whether a loop is under way."""
        self._leases = leases
        self._optimizers = leases.optimizers
        self._client = leases.client
        self._connection = leases.client.connection
        self._control = leases.client.connection.control
        self._reports_delivery = reports_delivery
        self._has_others = has_others
        self._clock = clock
        self._turn = 0
        self._finishes = False
        """Whether the worker calls `finish` at its end."""
        self._has_iterated = False
        """Whether this turn was iterated over."""
        self._lease = Leased(0)
        """The newest one; its `start` moves on as batches are drawn."""
        self._newest_lease = 0
        self._first = 0
        """First sample of the newest lease."""
        self._pending: deque[DrawnBatch] = deque()
        """Drawn, and in no step yet."""
        self._delivered = 0
        """How many of them the training function has."""
        self._gives_back: tuple[GiveBack, int] | None = None
        """What was given back last, and the number by which it was posted."""
        self._step_mark: Mark | None = None
        """The mark of the last step."""
        self._closed: Mark | None = None
        """Up to where it will have stepped, as it told when it gave back last."""
        self._last_samples = 0
        self._since: tuple[float, float] | None = None
        """When the last step was sent, and how long had been waited until then."""
        self._waited_s = 0.0
        self._sample_s = 0.0
        """Own compute for a sample; 0: unknown."""

    # --- the loop over the batches ------------------------------------------------------------

    def begin(self) -> None:
        """Begin a loop over what is left of this turn or, if that is nothing, over the next one.

        Raises:
            ParamServeError: a loop over another leased loader is under way. Nothing was changed.
        """
        other = self._leases.present
        if other is not None and other is not self:
            if other.active:
                raise ParamServeError(
                    f"rank {self._client.rank} began loader {self.name!r} while it iterates over "
                    f"{other.name!r}: a step cannot take samples of two leased loaders",
                    fix='end the other loop first, or give one of them shards="static"',
                )
            other.settle()
            other.close()
        if self.active:
            self.close()
        self._settle_plan()
        if not self._finishes:
            self._finishes = True
            self._optimizers.finish_by(self.finish)
        self._leases.present = self
        self._client.steps.next_mark = self.next_mark
        self.active = True
        self._since = None
        if self.over or (self._has_iterated and not self.more() and self.over):
            self._next_turn()
        self._has_iterated = True
        self._enter()

    def leave_out(self, turns: int) -> int:
        """Go on to the first of the next turns that is not over; how many are before it.

        Args:
            turns: how many may be left out.
        """
        self._settle_plan()
        for done in range(turns):
            if self.over:
                self._next_turn()
            if self._remaining or self._ask(0.0) or not self.over:
                return done
        return turns

    def _settle_plan(self) -> None:
        if self.plan.batches_per_step == AS_WORKER_SAYS:  # the optimizer has a policy by now
            self.plan = replace(self.plan, batches_per_step=self._optimizers.batches_per_step)

    def _next_turn(self) -> None:
        self._turn += 1
        self.over = False
        self._lease, self._step_mark, self._closed = Leased(0), None, None
        self._pending.clear()
        self._delivered = 0

    def draw(self) -> DrawnBatch | None:
        """The next batch; None: none at this moment, or the worker is to end."""
        if self.over or self.retiring or not (self._remaining or self._ask(0.0)):
            return None
        lease = self._lease  # what is left of it
        stop = min(lease.start + lease.batch, lease.stop)
        batch = DrawnBatch(lease.epoch, lease.start, stop, (lease.lease, stop - self._first))
        self._lease = Leased(0, lease.lease, lease.epoch, stop, lease.stop, lease.batch)
        self._pending.append(batch)
        return batch

    @property
    def batches_expected(self) -> int:
        """Batches of one turn, if all ranks had equal shares: at least 1."""
        plan, workers = self.plan, self._connection.workers
        return plan.steps or -(-plan.epochs * plan.size // (plan.batch * workers))

    @property
    def retiring(self) -> bool:
        """Whether the run wants this worker to end."""
        return self._client.steps.retiring

    @property
    def _remaining(self) -> int:
        return self._lease.stop - self._lease.start

    def more(self) -> bool:
        """Wait until there is more to draw; False: the turn is over, or the worker is to end.

        For a loop that has done all that was drawn, or can do no more of it. Own steps that were
        not exchanged yet are, so that the samples behind them count. Until its next step no worker
        waits for this worker.

        Raises:
            Timeout: the ranks that hold the rest have not gone on for the client's `patience_s`.
            ParamServeError: as `Client.drain` or the exchange, or the coordinator's refusal.
        """
        if self.over:
            return False
        if self._remaining and not self.retiring:
            return True
        self.settle()
        if self._remaining:
            return False
        before_s, waited_s = self._clock(), self._connection.waited_s
        try:
            self._client.drain()
            for group in self._optimizers.groups:
                with contextlib.suppress(UnknownName):  # nothing was defined there
                    self._client.rest(group)
            available = self._await()
            if available:
                self._enter()
            return available
        finally:
            waited_s = self._connection.waited_s - waited_s
            self._waited_s += self._clock() - before_s - waited_s

    def _enter(self) -> None:
        """Take part in the groups again: a step of a clock that is over would be dropped, with its
        samples. The others may have gone on, so the present values are taken, too."""
        was_pending = False
        for group in self._optimizers.groups:
            with contextlib.suppress(UnknownName):
                was_pending = self._client.enter(group) or was_pending
        if was_pending:
            self._optimizers.refresh()

    def _await(self) -> bool:
        patience_s = self._client.steps.waits.patience_s
        holders, changed_s, warned = None, self._clock(), False
        while not self.retiring:
            if self._ask(WAIT_S, idle=True):
                return True
            if self.over:
                return False
            if self._lease.holders != holders:
                holders, changed_s = self._lease.holders, self._clock()
                continue
            waited_s = self._clock() - changed_s
            if waited_s < timeouts.SAY_S and waited_s <= patience_s:
                continue
            who = ", ".join(f"rank {rank} ({samples} samples)" for rank, samples in holders)
            text = f"rank {self._client.rank} waits for the end of loader {self.name!r}: " + (
                f"{who or 'a rank that ended'} has not finished what was leased to it, for "
                f"{waited_s:.0f} s"
            )
            if waited_s > patience_s:
                raise Timeout(
                    text,
                    fix="step with every batch that a leased loader gives, leave its loop with "
                    f"break if you will not, or raise {timeouts.knob_of(True)}",
                )
            if not warned:
                warned = True
                text += f"; it {timeouts.up_to(patience_s, timeouts.knob_of(True))}"
                warn_user(text)
        return False

    def _ask(self, wait_s: float, *, idle: bool = False) -> bool:
        """Ask for a lease; whether there is one."""
        self._give_back_again()
        before_s = self._clock()
        step_mark = self._step_mark if idle else None
        only_existing = not self._newest_lease and self._has_others()
        message = Lease(
            0,
            self.name,
            self.plan,
            self._turn,
            self._newest_lease,
            wait_s,
            self.speed,
            idle,
            step_mark,
            only_existing,
        )
        self._lease = self._control.call(message, Leased, timeout_s=wait_s)
        if not idle:  # else the caller that waits counts it
            self._waited_s += self._clock() - before_s
        self.over = self._lease.over
        self._newest_lease = max(self._newest_lease, self._lease.lease)
        self._first = self._lease.start
        return self._lease.lease > 0

    def settle(self) -> None:
        """Exchange own steps that were not exchanged yet: what was delivered is in them."""
        self._optimizers.settle()

    def pause(self) -> None:
        """Let the loop rest while batches are on their way; it goes on later."""
        self.active = False

    def finish(self) -> None:
        """Say how far the worker came at its end. What the shards say of it might come too late for
        the run's result, if it left its loop before the turn was over.

        Raises:
            ParamServeError: as `Client.drain`. Nothing was said.
        """
        if self.over or self._step_mark is None:
            return
        self._client.drain()
        with contextlib.suppress(ParamServeError):  # the coordinator is gone
            if self._ask(0.0, idle=True):
                self.close()

    def close(self) -> None:
        """The loop has ended: what no step has taken goes to others, but for what is in own steps:
        their next exchange has that. Repeating is safe.

        Also where nothing goes back the coordinator hears of it: once this worker has stepped with
        another loader's samples, it knows by that of the last steps with these."""
        self.active = False
        if self.over:
            return
        in_own_steps = self._in_own_steps
        mark = self._pending[in_own_steps - 1].mark if in_own_steps else self._step_mark
        if self._remaining or len(self._pending) > in_own_steps or mark != self._closed:
            self._closed = mark
            message = GiveBack(0, self.name, self._turn, mark or (0, 0))
            # It is not waited for: an interrupt within a generator that is dropped is lost.
            self._gives_back = message, self._control.post(message)
            if not self._gives_back[1]:
                self._give_back_again()
        self._lease = Leased(0)
        self._pending = deque(islice(self._pending, in_own_steps))
        self._delivered = in_own_steps if self._reports_delivery else 0

    def _give_back_again(self) -> None:
        """Repeat what was given back, if the coordinator has not said that it has it."""
        if self._gives_back is None:
            return
        (message, number), self._gives_back = self._gives_back, None
        if number and self._control.answer(number) is not None:
            return
        # Where the coordinator is gone, or counts this worker as dead, it takes nothing back;
        # what a worker holds goes back when it ends, too.
        with contextlib.suppress(ParamServeError):
            self._control.call(message, Ok, timeout_s=GIVE_BACK_S, slack_s=0.0)

    # --- the steps ----------------------------------------------------------------------------

    def delivered(self) -> None:
        """The training function has got the next batch that was drawn."""
        self._delivered += 1

    @property
    def unfinished(self) -> bool:
        """Whether what was drawn and not stepped with suffices for a step, of the servers or of an
        optimizer that steps by itself."""
        if self._optimizers.own_steps:
            return len(self._pending) > self._in_own_steps
        return len(self._pending) >= self.plan.batches_per_step

    @property
    def _in_own_steps(self) -> int:
        """Batches of the own steps since the last exchange."""
        present = self._delivered if self._reports_delivery else len(self._pending)
        several = self.plan.batches_per_step  # of `every` own steps
        batch_counts = [own.since * several // own.every for own in self._optimizers.own_steps]
        return min(present, max(batch_counts, default=0))

    @property
    def _in_step(self) -> int:
        """Batches of the present step."""
        if self._reports_delivery:
            return self._delivered
        if self._optimizers.own_steps:
            return self._in_own_steps
        return min(self.plan.batches_per_step, len(self._pending))

    @property
    def step_samples(self) -> float | None:
        """Samples behind the present step; None: it is not with batches of this loader."""
        present = [self._pending[i] for i in range(self._in_step)]
        if not present:  # a second optimizer's step with the same batches
            return float(self._last_samples) if self.active and self._last_samples else None
        return float(sum(batch.stop - batch.start for batch in present))

    def next_mark(self) -> Mark | None:
        """A step is sent: what it has taken; None: nothing since the step before."""
        samples, mark = 0, None
        for _ in range(self._in_step):
            batch = self._pending.popleft()
            samples += batch.stop - batch.start
            mark = batch.mark
        self._delivered = 0
        if mark is not None:
            self._step_mark = mark
            self._last_samples = samples
            self._measure(samples)
        return mark

    def _measure(self, samples: int) -> None:
        """Own compute: from step to step, without what was waited for."""
        now, waited_s = self._clock(), self._connection.waited_s + self._waited_s
        if self._since is not None:
            busy_s = now - self._since[0] - (waited_s - self._since[1])
            if busy_s > 0:
                new = busy_s / samples
                old = self._sample_s if self._sample_s else new
                self._sample_s = old + SMOOTHING * (new - old)
        self._since = now, waited_s

    @property
    def speed(self) -> float:
        """Samples per second of own compute; 0: unknown."""
        return 1.0 / self._sample_s if self._sample_s else 0.0
