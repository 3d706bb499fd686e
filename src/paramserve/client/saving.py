"""What a worker saves for its next incarnation, and finds of an older one.

A save goes out with the next step that ends a clock, in the same message: an incarnation that goes
on behind this step finds it, one that takes the step again does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from paramserve.checkpoint import plain
from paramserve.client.connection import Connection
from paramserve.client.step_parts import StepParts
from paramserve.errors import Overloaded, Timeout
from paramserve.messages import SAVED_BYTES_MAX, SAVED_NAMES_MAX, Saved

OWN = "paramserve."
"""What the names of the library's own saves begin with."""
TRACKED = "tracked "
"""What the names of the states of tracked objects begin with."""
RANDOM = "random"
"""What the random generators of a worker are saved as, with each of its steps."""
BYTES_MAX, NAMES_MAX = SAVED_BYTES_MAX // 2, SAVED_NAMES_MAX // 2
"""Most bytes and names that the program saves, and likewise of the library's own."""
COUNT_BITS = 32
"""Bits of a save's number: how many there were before it in its incarnation."""


class Saving:
    """What one worker has saved. The caller of `due` and `mark_sent` holds the client's lock.

    Args:
        resumed: the clock of each group where this client began.
        register: registers this with the steps, which send it, once something was saved.
    """

    def __init__(
        self,
        connection: Connection,
        resumed: Mapping[str, int],
        register: Callable[[Saving], None],
    ) -> None:
        self._connection = connection
        self._resumed = resumed
        self._register = register
        self._number = connection.incarnation << COUNT_BITS
        self._functions: dict[str, Callable[[], bytes | None]] = {}
        """Functions that are asked at each step, by name."""
        self._parts: Sequence[StepParts] = ()
        """Parts of the step that is about to be sent."""
        self._unsent: dict[str, Saved] = {}
        """Newest value of each name that was saved and that no step has sent."""
        self._delivered: dict[str, Saved] = {}
        self._older: dict[str, bytes] | None = None
        """What older incarnations saved; None: the servers were not asked."""

    def save(self, name: str, value: object) -> None:
        """See `Worker.save`."""
        self._connection.check()
        _check_name(name)
        if name.startswith((OWN, TRACKED)):
            raise ValueError(
                f"names that begin with {OWN!r} or {TRACKED!r} are the library's own, not {name!r}"
            )
        if hasattr(value, "state_dict"):
            raise TypeError(
                f"worker.save({name!r}) got a {type(value).__qualname__}, which cannot be stored "
                f"without pickling. Applied: no. To fix: worker.track({name!r}, ...) sends its "
                "state with each step; or give what its state_dict() gives now"
            )
        with self._connection.lock:
            if callable(value):
                self._ask(name, partial(_packed_result, f"worker.save({name!r})", value))
            else:
                self._take(name, _packed(f"worker.save({name!r})", value))
                self._functions.pop(name, None)
            self._register(self)

    def track(self, name: str, thing: Any) -> None:
        """See `Worker.track`."""
        self._connection.check()
        _check_name(name)
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(thing, method, None)):
                raise TypeError(
                    f"worker.track({name!r}) got a {type(thing).__qualname__}, which has no "
                    f"{method}. Applied: no. To fix: worker.save and worker.saved keep numbers, "
                    "text, arrays and tensors; an object needs both methods, as torch's have them"
                )
        key = TRACKED + name
        with self._connection.lock:
            older = None if key in self._functions else self._of_older().get(key)
        if older is not None:
            thing.load_state_dict(plain.load(older))
        with self._connection.lock:
            self._ask(key, partial(_packed_result, f"worker.track({name!r})", thing.state_dict))
            self._register(self)

    def _ask(self, name: str, function: Callable[[], bytes]) -> None:
        """Ask the program's function at each step, beginning now."""
        self._take(name, function())
        self._functions[name] = function

    def ask(self, name: str, function: Callable[[], bytes | None]) -> None:
        """Ask the library's own function for what is to be kept at each step, as long as there is
        room for it.

        Args:
            function: gives bytes, or None for what it gave before.
        """
        with self._connection.lock:
            self._functions[OWN + name] = function
            self._register(self)

    def stop_asking(self, name: str) -> None:
        """Ask the library's own function no more; what it has given stays."""
        self._functions.pop(OWN + name, None)

    def keep(self, name: str, data: bytes) -> None:
        """Save what the library itself knows; the next step tells it."""
        with self._connection.lock:
            self._take(OWN + name, data)
            self._register(self)

    def latest(self, name: str) -> bytes:
        """What was given to `keep` last, here or by an older incarnation; empty: nothing was."""
        return self.find(OWN + name) or b""

    def asks(self, name: str) -> bool:
        """Whether what the library's own function gives is kept."""
        return OWN + name in self._functions

    def _take(self, name: str, data: bytes) -> None:
        """Keep data of a name for the next step, unless it is what was sent last. What is over the
        limits is refused if the function saves it, and left out if it is this package's own."""
        newest = self._unsent.get(name, self._delivered.get(name))
        if newest is not None and newest.data == data:
            return
        own = name.startswith(OWN)
        sizes = {key: len(each) for key, each in self._of_older().items()}
        sizes |= {key: len(each.data) for key, each in {**self._delivered, **self._unsent}.items()}
        sizes = {key: size for key, size in sizes.items() if key.startswith(OWN) == own}
        sizes[name] = len(data)
        if len(sizes) > NAMES_MAX or sum(sizes.values()) > BYTES_MAX:
            if not own:
                method = "track" if name.startswith(TRACKED) else "save"
                raise Overloaded(
                    f"worker.{method}({name.removeprefix(TRACKED)!r}) of {len(data)} bytes makes "
                    f"{sum(sizes.values())} under {len(sizes)} names: a worker saves at most "
                    f"{BYTES_MAX} under {NAMES_MAX}",
                    applied="no",
                    fix="save what the rest can be made from; an average of the weights of any "
                    "size is a state of a rule (docs/recipes.md#an-average-of-the-weights-ema)",
                )
            self._functions.pop(name, None)
            data = b""
        self._number += 1
        self._unsent[name] = Saved(name, self._number, data)

    @property
    def stepping(self) -> list[str]:
        """Groups whose clocks end with the step, for a function that is asked."""
        return [each.block.group_name for each in self._parts if each.options.tick]

    def due(self, parts: Sequence[StepParts]) -> tuple[Saved, ...]:
        """What the step that is about to be sent tells. Raises what `save` raises."""
        self._parts = parts
        try:
            for name, function in list(self._functions.items()):
                data = function()
                if data is not None:
                    self._take(name, data)
        finally:
            self._parts = ()  # they refer to slots
        return tuple(self._unsent.values())

    def unsent(self) -> tuple[Saved, ...]:
        """Values that were saved after the last step. What functions are asked for stays as it was
        at that step, from where the next incarnation goes on."""
        return tuple(each for each in self._unsent.values() if each.name not in self._functions)

    def mark_sent(self, saved: Iterable[Saved]) -> None:
        """Move data from what is to be sent to what was: a step with it is certain to be sent."""
        for each in saved:
            self._delivered[each.name] = each
            if self._unsent.get(each.name) is each:
                del self._unsent[each.name]

    def find(self, name: str) -> bytes | None:
        """The newest that this incarnation or, before it has saved anything under this name, an
        older one has saved."""
        with self._connection.lock:
            newest = self._unsent.get(name, self._delivered.get(name))
            return newest.data if newest is not None else self._of_older().get(name)

    def older(self, name: str) -> bytes | None:
        """What the library's own function of an older incarnation gave last."""
        with self._connection.lock:
            return self._of_older().get(OWN + name) or None

    def _of_older(self) -> dict[str, bytes]:
        """What older incarnations saved, as of the steps that this one goes on behind."""
        if self._older is None:
            newest: dict[str, Saved] = {}
            again = self._connection.incarnation > 1
            for group, clock in self._resumed.items() if again else ():
                for value in self._reported(group, clock):
                    if value.name not in newest or newest[value.name].number < value.number:
                        newest[value.name] = value
            self._older = {name: each.data for name, each in newest.items()}
        return self._older

    def _reported(self, group: str, clock: int) -> list[Saved]:
        """What each shard has of a group, as of the newest step before a clock."""
        rank, exchange = self._connection.rank, self._connection.exchange
        limit_s = self._connection.timeout_s
        beats = exchange.reports(limit_s, saved=(group, rank, clock))
        if len(beats) < len(exchange.shards):
            raise Timeout(
                f"rank {rank} asked what it had saved: {len(beats)} of "
                f"{len(exchange.shards)} shards answered in {limit_s:.1f} s",
                fix="look at the servers, and ask again",
            )
        return [each for beat in beats for report in beat.groups for each in report.saved]


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise TypeError(f"what is saved has a name, a text that is not empty, not {name!r}")


def _packed(call: str, value: object) -> bytes:
    return plain.dump(value, f"{call}: state")


def _packed_result(call: str, function: Callable[[], object]) -> bytes:
    return _packed(call, function())
