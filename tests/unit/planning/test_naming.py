"""Short names of policies."""

from __future__ import annotations

import pytest

from paramserve.planning.naming import in_python


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("sync", "Sync()"),
        ("sync:sum", "Sync(reduce='sum')"),
        ("sync:backup=1,timeout_s=0.5", "Sync(backup=1, timeout_s=0.5)"),
        (" bounded:4 ", "BoundedStaleness(bound=4)"),
        ("buffered:8,damping=None", "Buffered(size=8, damping=None)"),
        ("async:damping=Inverse(0.1)", "Async(damping=Inverse(0.1))"),
        ("local:every=4", "LocalSteps(every=4)"),
        ("Async()", "Async()"),
        ("eventual:3", "eventual:3"),
    ],
)
def test_in_python_writes_the_long_form(short: str, long: str) -> None:
    assert in_python(short) == long


@pytest.mark.parametrize("text", ["sync:1,2", "bounded:4)+(1", "bounded:4 5", "bounded:)"])
def test_in_python_refuses_what_are_no_options(text: str) -> None:
    with pytest.raises(ValueError, match="stands a value"):
        in_python(text)
