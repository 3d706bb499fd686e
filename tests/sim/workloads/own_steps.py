"""Simulated workers that make own steps and exchange what these have changed.

The order of what a worker does is that of `paramserve.pytorch.local.LocalStepping`: which fragment
it exchanges at which clock, when it waits for the values, what it exchanges at its end. Its own
steps take virtual time and compute nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paramserve.consistency.built_in import AsyncLocalSteps, LocalSteps
from paramserve.core.partition import Block
from paramserve.errors import ParamServeError
from paramserve_testing.history import Call
from paramserve_testing.scripts import WorkerScript

if TYPE_CHECKING:
    from paramserve_testing.client import SimulatedClient

SPOILED = 0.15
"""Share of the exchanges that hold NaN."""
SETTLES_S = 1e-4
"""What a worker does between two calls where it makes no own step takes this long."""


class OwnSteps(WorkerScript):
    """Makes own steps, exchanges a fragment after each so many, and goes on from its values.

    The policy is `LocalSteps` or `AsyncLocalSteps`, from the beginning to the end. A worker begins
    by reading all values. One of `Scenario.steps` is one exchange.

    Attributes:
        since: own steps since its last exchange.
        behind: by fragment, own steps since that was exchanged last.
    """

    def __init__(self, client: SimulatedClient) -> None:
        super().__init__(client)
        policy = self.cluster.scenario.consistency
        assert isinstance(policy, LocalSteps | AsyncLocalSteps)
        self._every = policy.steps_per_clock
        self._fragments, self._delay = 1, 0
        if isinstance(policy, LocalSteps):
            self._fragments, self._delay = policy.fragments, policy.delay
        self.since = 0
        self.behind = [0] * self._fragments
        self._making = 0
        """Own steps that it is making."""
        self._read_all = False
        """Whether it has begun to read all values."""
        self._awaits = False
        """Whether an exchange's values are on their way."""

    # --- own steps ----------------------------------------------------------------------

    @property
    def step_s(self) -> float:
        """How long one own step takes."""
        raise NotImplementedError

    def fragment(self, number: int) -> list[Any]:
        """The blocks of a fragment."""
        raise NotImplementedError

    def steps_until(self, goal: int) -> int:
        """How many own steps it makes now, of those until the goal."""
        return goal - self.since

    def pause_s(self) -> float:
        if not self._read_all or self.client.left <= 0:
            return SETTLES_S
        waits_at = self._delay if self._awaits else 0
        goal = waits_at if self.since < waits_at else self._every
        self._making = max(0, self.steps_until(goal))
        return max(self._making * self.step_s, SETTLES_S)

    def next(self) -> bool:
        made, self._making = self._making, 0
        self.since += made
        self.behind = [each + made for each in self.behind]
        if not self._read_all:
            self._read_all = self.step(pull=self.every)
        elif self._awaits and (self.since >= self._delay or self.client.left <= 0):
            pass  # its values come first: `_exchanged` goes on
        elif self.client.left <= 0:
            self._settle()
        elif self.since >= self._every:
            self._exchange()
        else:
            self.client.go_on()
        return False

    # --- exchanges ----------------------------------------------------------------------

    def _exchange(self) -> None:
        self.client.left -= 1
        if self._send([self.client.clock % self._fragments]) and self._delay:
            self.client.go_on()

    def _settle(self) -> None:
        """Exchange all that own steps have changed since."""
        changed = [number for number, steps in enumerate(self.behind) if steps]
        if changed:
            self._send(changed)

    def _send(self, fragments: list[int]) -> bool:
        chosen = [block for each in fragments for block in self.fragment(each)]
        self._awaits = True
        sent = self.step(chosen, chosen, tick=True, spoiled=self._spoils(), then=self._exchanged)
        if sent:
            self.since = 0
            self.behind = [0 if n in fragments else each for n, each in enumerate(self.behind)]
        else:
            self._awaits = False
        return sent

    def _spoils(self) -> bool:
        """Whether what it exchanges holds NaN; only where the policy leaves that out."""
        if self.cluster.scenario.consistency.on_nonfinite == "refuse":
            return False
        return self.cluster.random.random() < SPOILED

    def _exchanged(self, call: Call, error: ParamServeError | None) -> None:
        self._awaits = False
        self.client.answered(call, error)

    def fragment_of(self, block: Block) -> int:
        """Which fragment a block is of."""
        return next(n for n in range(self._fragments) if block in self.fragment(n))
