from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async
from paramserve.consistency.registered import check, registered, split
from paramserve.rules.custom import CustomRule


@dataclass(frozen=True)
class Own(Policy):
    bound: int = 1


@dataclass(frozen=True)
class Rule(CustomRule):
    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None: ...


@dataclass(frozen=True)
class Namesake(Rule):
    name: ClassVar[str] = "Own"


def halves(staleness: int) -> float:
    return 0.5


def test_registered_tells_rules_from_policies_and_functions() -> None:
    found = registered([halves, Rule, Own])
    assert (dict(found.rules), dict(found.policies)) == (
        {"Rule": Rule},
        {"halves": halves, "Own": Own},
    )
    assert found.all == {"Rule": Rule, "halves": halves, "Own": Own}


def test_split_checks_nothing() -> None:
    assert split([3, Own, Rule]) == ([3, Rule], [Own])


def test_check_adds_the_class_and_the_functions_of_the_policy() -> None:
    assert dict(check((), (), Own()).policies) == {"Own": Own}
    assert dict(check((), (), Async(damping=halves)).policies) == {"halves": halves}
    assert dict(check((), [Own, halves], Own()).policies) == {"Own": Own, "halves": halves}
    assert dict(check((), (), Async()).all) == {}


def test_rule_and_policy_of_one_name_are_refused() -> None:
    with pytest.raises(TypeError, match="'Own' is the name of a rule"):
        check([Namesake], [Own])


@pytest.mark.parametrize("wrong", [3, "Own", int, Own()])
def test_what_is_neither_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="rules="):
        registered([wrong])
    with pytest.raises(TypeError, match="policies= takes classes"):
        check((), [wrong])
