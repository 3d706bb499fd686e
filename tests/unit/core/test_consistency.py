from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core.rig import Bounded

from paramserve.config import PolicySpec
from paramserve.core.consistency import Async, Consistency, Decision, Sync, build, spec
from paramserve.errors import UnknownRule

POLICIES = [
    Sync(),
    Sync(reduce="sum", on_nonfinite="skip"),
    Async(),
    Async(on_nonfinite="skip"),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_build_gives_the_policy_that_spec_describes(policy: Sync | Async) -> None:
    assert build(spec(policy)) == policy
    assert isinstance(policy, Consistency)


@pytest.mark.parametrize("kind", [Sync, Async])
def test_unknown_on_nonfinite_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="on_nonfinite"):
        kind(on_nonfinite="ignore")


def test_sync_unknown_reduce_is_refused() -> None:
    with pytest.raises(ValueError, match="reduce"):
        Sync(reduce="max")  # type: ignore[arg-type]


def test_sync_collects_and_lets_nobody_read_ahead() -> None:
    assert Sync().on_push(3) is Decision.COLLECT
    assert Sync().on_pull(3) == 3
    assert Sync(reduce="mean").scale(4.0) == 0.25
    assert Sync(reduce="sum").scale(4.0) == 1.0


def test_async_applies_and_never_waits() -> None:
    assert Async().on_push(3) is Decision.APPLY
    assert Async().on_pull(3) == 0
    assert Async().scale(4.0) == 1.0


@pytest.mark.parametrize("wrong", ["sync", None, Sync, Bounded(1)])
def test_spec_of_something_else_is_a_type_error(wrong: Any) -> None:
    with pytest.raises(TypeError, match="Sync, Async"):
        spec(wrong)


def test_build_unknown_name_is_refused() -> None:
    with pytest.raises(UnknownRule, match="Sometimes"):
        build(PolicySpec("Sometimes"))
