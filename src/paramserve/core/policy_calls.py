"""Asking a policy. What a user's policy raises, or answers wrongly, becomes `PolicyFailed`."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any, TypeVar

from paramserve.consistency.base import (
    Admission,
    Admit,
    Apply,
    Buffer,
    Drop,
    GroupView,
    OnPush,
    Policy,
    Pull,
    Push,
    Wait,
)
from paramserve.core.policy_epochs import PolicyEpoch
from paramserve.core.user_rules import where
from paramserve.errors import PolicyFailed

T = TypeVar("T")


def on_push(epoch: PolicyEpoch, push: Push, group: GroupView) -> OnPush:
    """What to do with a gradient.

    Raises:
        PolicyFailed: the policy raised, or gave no such answer. Nothing was applied.
    """
    if not epoch.guarded:
        return epoch.policy.on_push(push, group)
    answer: Any = _call(epoch, "on_push", lambda: epoch.policy.on_push(push, group))
    match answer:
        case Apply():
            numbers: tuple[Any, ...] = tuple(answer)
        case Buffer():
            numbers = (answer.weight,)
            if type(answer.size) is not int or answer.size < 1:
                raise _wrong(epoch, "on_push", answer, "a size that is an int of at least 1")
        case Drop():
            numbers = ()
        case _:
            raise _wrong(epoch, "on_push", answer, "Apply, Buffer or Drop")
    if not all(_good(each) for each in numbers):
        raise _wrong(epoch, "on_push", answer, "numbers that are finite and not negative")
    decision: OnPush = answer
    return decision


def on_pull(epoch: PolicyEpoch, pull: Pull, group: GroupView) -> Admission:
    """Whether a worker may read.

    Raises:
        PolicyFailed: the policy raised, or gave no such answer.
    """
    if not epoch.guarded:
        return epoch.policy.on_pull(pull, group)
    return _admission(epoch, "on_pull", lambda: epoch.policy.on_pull(pull, group))


def on_clock(epoch: PolicyEpoch, group: GroupView) -> Admission:
    """Whether a clock may be decided.

    Raises:
        PolicyFailed: the policy raised, or gave no such answer.
    """
    if not epoch.guarded:
        return epoch.policy.on_clock(group)
    return _admission(epoch, "on_clock", lambda: epoch.policy.on_clock(group))


def on_membership(epoch: PolicyEpoch, group: GroupView) -> bool:
    """Whether to apply what is in the buffer. A policy that fails here loses no gradient: yes."""
    try:
        return bool(epoch.policy.on_membership(group))
    except Exception:
        if not epoch.guarded:
            raise
        return True


def scale(epoch: PolicyEpoch, weight: float) -> float:
    """What the sum of a clock's gradients is multiplied by.

    Raises:
        PolicyFailed: the policy raised, or gave no finite number.
    """
    if not epoch.guarded:
        return epoch.policy.scale(weight)
    answer: Any = _call(epoch, "scale", lambda: epoch.policy.scale(weight))
    if not _good(answer):
        raise _wrong(epoch, "scale", answer, "a number that is finite and not negative")
    return float(answer)


def check(policy: Policy, workers: int) -> None:
    """Whether a policy can work with this many workers.

    Raises:
        ValueError: it cannot. PolicyFailed: it raised something else.
    """
    try:
        policy.check(workers)
    except ValueError:
        raise
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}{where(error)}"
        raise PolicyFailed(f"check of {policy!r} failed: {text}", fix=_FIX) from None


def _admission(epoch: PolicyEpoch, hook: str, call: Callable[[], Any]) -> Admission:
    answer = _call(epoch, hook, call)
    if not isinstance(answer, Admit | Wait):
        raise _wrong(epoch, hook, answer, "Admit or Wait")
    if isinstance(answer, Wait):
        ranks: Any = answer.workers
        named = isinstance(ranks, tuple) and all(type(rank) is int for rank in ranks)
        if not named or not (answer.until_s is None or _good(answer.until_s)):
            expected = "Wait with a tuple of ranks, and until_s None or a number"
            raise _wrong(epoch, hook, answer, expected)
    return answer


def _good(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and isfinite(value)
        and value >= 0
    )


def _call(epoch: PolicyEpoch, hook: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}{where(error)}"
        raise PolicyFailed(f"{hook} of {epoch.policy!r} failed: {text}", fix=_FIX) from None


def _wrong(epoch: PolicyEpoch, hook: str, answer: Any, expected: str) -> PolicyFailed:
    text = f"{hook} of {epoch.policy!r} answered {answer!r}, expected {expected}"
    return PolicyFailed(text, fix=_FIX)


_FIX = "correct the policy, and start the servers with the corrected one"
