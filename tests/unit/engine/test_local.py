"""Settings of `Local`."""

from __future__ import annotations

from typing import Any

import pytest
from tests.suites import each_case

from paramserve.engine.local import Local


@each_case(
    ("settings", "error", "text"),
    [
        ({"threads_per_worker": 0}, ValueError, "threads_per_worker must be at least 1, not 0"),
        ({"threads_per_worker": -1}, ValueError, "threads_per_worker must be at least 1"),
        ({"threads_per_worker": 2.0}, TypeError, "threads_per_worker must be an int, not 2.0"),
        ({"threads_per_worker": True}, TypeError, "threads_per_worker must be an int, not True"),
        ({"show_rank": "no"}, TypeError, "show_rank must be True or False, not 'no'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        Local(**settings)
