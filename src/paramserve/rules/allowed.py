"""What a hyper-parameter may be, and the check of a whole hyper tuple."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from paramserve.rules.base import Hyper


class Allowed(NamedTuple):
    """The values that one hyper-parameter may have."""

    words: str
    test: Callable[[float], bool]


FINITE = Allowed("a finite number", math.isfinite)
NOT_NEGATIVE = Allowed("a finite number of at least 0", lambda x: 0.0 <= x < math.inf)
FRACTION = Allowed("at least 0 and below 1", lambda x: 0.0 <= x < 1.0)
FLAG = Allowed("True or False", lambda x: x in (0.0, 1.0))


def check_hyper(rule: str, allowed: Mapping[str, Allowed], hyper: Hyper) -> None:
    """Check a hyper tuple against what each of its values may be, in order.

    Raises:
        ValueError: a value is out of its range, or there are too many or too few.
    """
    if len(hyper) != len(allowed):
        names = ", ".join(allowed) if allowed else "none"
        raise ValueError(f"{rule} takes {len(allowed)} hyper-parameters ({names}), not {hyper}")
    for (name, (words, test)), value in zip(allowed.items(), hyper, strict=True):
        if not test(value):
            raise ValueError(f"{name} of {rule} must be {words}, not {value}")
