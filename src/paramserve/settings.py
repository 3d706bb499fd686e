"""Checks of the settings that users give: deadlines and limits."""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec

from paramserve.config import Deadlines, Limits

Settings = TypeVar("Settings", Deadlines, Limits)


def check_settings(name: str, value: Settings | None, kind: type[Settings]) -> Settings:
    """The settings, or the defaults for None.

    Raises:
        TypeError: it is of another type, or one of its numbers is.
        ValueError: a number is not above 0, not finite, or a heartbeat would come too late.
    """
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be ps.{kind.__name__}(...), not {value!r}")
    for field in msgspec.structs.fields(kind):
        number = getattr(value, field.name)
        allowed = int if field.type is int else (int, float)
        if isinstance(number, bool) or not isinstance(number, allowed):
            what = "an int" if field.type is int else "a number"
            raise TypeError(f"{name}: {field.name} must be {what}, not {number!r}")
        if not 0 < number < math.inf:
            raise ValueError(f"{name}: {field.name} must be above 0 and finite, not {number}")
    if isinstance(value, Deadlines) and not value.heartbeat_s < value.stall_s:
        raise ValueError(
            f"{name}: heartbeat_s must be below stall_s, not {value.heartbeat_s} and "
            f"{value.stall_s}: every process would count as dead"
        )
    return value


def check_restart(deadlines: Deadlines) -> None:
    """For runs that restart workers.

    Raises:
        ValueError: the others would not wait as long as a restart may take.
    """
    if not deadlines.restart_s < deadlines.request_s:
        raise ValueError(
            f"deadlines: restart_s must be below request_s, not {deadlines.restart_s} and "
            f"{deadlines.request_s}: the others' pushes would time out before the worker is back"
        )
