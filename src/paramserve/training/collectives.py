"""A worker's barriers and reduced values; `core.collectives` decides when one ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paramserve.client import timeouts
from paramserve.client.connection import Connection
from paramserve.client.steps import Steps
from paramserve.core.collectives import BARRIER, COMBINE, RANK0, call_of
from paramserve.errors import Timeout, warn_user
from paramserve.messages import AllReduce, AllReduced, Missing
from paramserve.training.position import Position

Array = npt.NDArray[Any]

ASK_S = 2.0
"""How long one question waits at the coordinator."""


class Packed(NamedTuple):
    """A value as it travels, and what makes the result of the user's kind again."""

    array: Array
    restore: Callable[[Array], Any]
    number: bool = False
    """Whether it is one number, of Python or of numpy."""


NOTHING = Packed(np.zeros(0), lambda result: None)
"""The value of a barrier."""


class Collectives:
    """The collectives of one worker, one after the other.

    Attributes:
        arrays: whether a value of more than one element was reduced, as a gradient is.
    """

    def __init__(self, connection: Connection, steps: Steps, position: Position) -> None:
        self._connection = connection
        self._steps = steps
        self._position = position
        self.arrays = False

    def barrier(self, timeout_s: float | None) -> None:
        """See `Worker.barrier`."""
        self._call(BARRIER, NOTHING, timeout_s)

    def all_reduce(self, value: Any, op: str, timeout_s: float | None) -> Any:
        """See `Worker.all_reduce`."""
        if op not in (RANK0, *COMBINE):
            raise ValueError(f"op must be one of {', '.join((*COMBINE, RANK0))}, not {op!r}")
        packed = pack(value, op)
        self.arrays = self.arrays or packed.array.size > 1
        reply = self._call(op, packed, timeout_s)
        result = np.frombuffer(reply.value, reply.dtype).reshape(packed.array.shape)
        return packed.restore(result.copy())

    def least(self, number: int, parts: int) -> int:
        """The smallest of all ranks' numbers for this loader over parts of their own, or what they
        have agreed on before this rank came; see `AllReduce.parts`."""
        reply = self._call("min", pack(number, "min"), None, parts)
        return int(np.frombuffer(reply.value, reply.dtype)[0])

    def _call(self, op: str, packed: Packed, timeout_s: float | None, parts: int = 0) -> AllReduced:
        self._connection.check()
        place, array = self._position.place, packed.array
        what = call_of(op)
        value = array.tobytes()
        began, waited_s, warned = self._steps.now(), 0.0, False
        clocks: dict[int, int] = {}
        limit_s = timeout_s if timeout_s is not None else self._steps.waits.timeout_s
        while True:
            wait_s = min(ASK_S, max(limit_s - waited_s, 0.0))
            last = waited_s + wait_s >= limit_s
            message = AllReduce(
                0,
                op,
                array.dtype.name,
                array.shape,
                value,
                self._position.last_call,
                place.steps,
                wait_s,
                last,
                packed.number,
                parts,
                place.exact,
                place.epoch,
                place.inner,
                place.ticks,
                place.in_pass,
                place.begins,
            )
            reply = self._connection.control.call(message, AllReduced, timeout_s=wait_s)
            if reply.ended:
                self._position.last_call = reply.number
                if reply.missing and op not in (BARRIER, RANK0):
                    self._warn_without(what, reply.missing)
                return reply
            waited_s = self._steps.now() - began
            for each in reply.missing:
                clocks.setdefault(each.rank, each.clock)
            if timeout_s is None:
                busy = all(each.state == "live" for each in reply.missing)
                limit_s = self._steps.waits.patience_s if busy else self._steps.waits.timeout_s
            knob = "timeout_s=..." if timeout_s is not None else timeouts.knob_of(busy)
            if waited_s >= limit_s:
                raise self._timed_out(what, _ranks(reply.missing, clocks), waited_s, knob)
            if waited_s >= timeouts.SAY_S and not warned:
                warned = True
                warn_user(
                    f"rank {self._connection.rank} has waited {waited_s:.0f} s in {what} for "
                    f"{_ranks(reply.missing, clocks)}; it {timeouts.up_to(limit_s, knob)}"
                )

    def _warn_without(self, what: str, missing: Sequence[Missing]) -> None:
        ranks = timeouts.ranks([each.rank for each in missing])
        warn_user(
            f"{what} ended without {ranks}, which was started again: the result lacks its value. "
            'Where the value of rank 0 decides, op="rank0" waits for it'
        )

    def _timed_out(self, what: str, ranks: str, waited_s: float, knob: str) -> Timeout:
        return Timeout(
            f"{what} timed out: rank {self._connection.rank} waited {waited_s:.1f} s for {ranks} "
            f"of {self._connection.workers} workers",
            fix=f"make this call at the same point on all ranks, or raise {knob}",
        )


def _ranks(missing: Sequence[Missing], clocks: Mapping[int, int]) -> str:
    """The ranks that are waited for, and what they have done.

    Args:
        clocks: where each was when it was asked for first.
    """
    names = [_rank(each, clocks[each.rank]) for each in missing[: timeouts.RANKS_SHOWN_MAX]]
    more = len(missing) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "") or "the coordinator"


def _rank(each: Missing, clock: int) -> str:
    facts = [each.state] if each.state != "live" else []
    if each.group and each.state != "expected":
        gone_on = f", {clock} when the wait began" if clock != each.clock else ""
        facts.append(f"at clock {each.clock} of group {each.group!r}{gone_on}")
    return f"rank {each.rank}" + (f" ({', '.join(facts)})" if facts else "")


def pack(value: Any, op: str) -> Packed:
    """A number, array or tensor as it travels: in float64, float32 or int64.

    Raises:
        TypeError: it is something else. ValueError: an int does not fit into 64 bits.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _pack_tensor(value, op)
    if isinstance(value, np.ndarray | np.generic):
        array = _plain(np.asarray(value), op)
        kind = array.dtype if op == "mean" and value.dtype.kind != "f" else value.dtype
        kind = np.dtype(np.int64) if kind.kind == "b" else kind

        def restore(result: Array) -> Any:
            return result.astype(kind if result.dtype == array.dtype else result.dtype)[()]

        return Packed(array, restore, isinstance(value, np.generic))
    if isinstance(value, int | float):
        try:
            plain = _plain(np.asarray(value, float if isinstance(value, float) else np.int64), op)
        except OverflowError:
            raise ValueError(f"worker.all_reduce takes ints of 64 bits, not {value}") from None
        return Packed(plain, lambda result: result.item(), number=True)
    raise TypeError(
        f"worker.all_reduce takes a number, an array or a tensor, not {type(value).__name__}"
    )


def _pack_tensor(value: Any, op: str) -> Packed:
    torch = sys.modules["torch"]
    if value.is_complex() or value.layout is not torch.strided:
        raise TypeError(
            f"worker.all_reduce takes dense tensors of real numbers, not {value.dtype} of layout "
            f"{value.layout}"
        )
    kind = value.dtype if value.dtype is not torch.bool else torch.int64
    if op == "mean" and not value.is_floating_point():
        kind = torch.get_default_dtype()
    tensor = value.detach().cpu()
    if value.is_floating_point() and value.dtype is not torch.float64:
        tensor = tensor.float()  # numpy has no bfloat16

    def restore(result: Array) -> Any:
        return torch.from_numpy(result).to(device=value.device, dtype=kind)

    return Packed(_plain(tensor.numpy(), op), restore)


def _plain(array: Array, op: str) -> Array:
    """The array in a dtype that travels; a mean is of floats."""
    kind = array.dtype.kind
    if kind not in "fiub":
        raise TypeError(f"worker.all_reduce takes real numbers, not an array of {array.dtype}")
    dtype: type[np.generic]
    if kind == "f":
        dtype = np.float64 if array.dtype.itemsize > 4 else np.float32
    else:
        dtype = np.float64 if op == "mean" else np.int64
    return np.ascontiguousarray(array, dtype).reshape(array.shape)
