from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from paramserve.consistency.base import APPLY, GroupView, OnPush, Policy, Push
from paramserve.consistency.built_in import Async
from paramserve.consistency.registry import check, check_registered, registered, split
from paramserve.rules import SGD
from paramserve.rules.custom import CustomRule


@dataclass(frozen=True)
class Own(Policy):
    bound: int = 1
    damping: Callable[[int], float] | None = None


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


# --- policies and functions -----------------------------------------------------------------------


def bare(staleness: int) -> float:
    return 1.0


@dataclass
class Thawed(Policy):
    bound: int = 1


class NoDataclass(Own):
    pass


@dataclass(frozen=True)
class ForgetsTheGroup(Policy):
    def on_push(self, push: Push) -> OnPush:  # the very mistake
        return APPLY


@dataclass(frozen=True)
class WantsMore(Policy):
    def on_push(self, push: Push, group: GroupView, more: int) -> OnPush:  # the very mistake
        return APPLY


@dataclass(frozen=True)
class Misspelt(Policy):
    def on_pushed(self, push: Push, group: GroupView) -> OnPush:  # the very mistake
        return APPLY


@dataclass(frozen=True)
class HalfMisspelt(Policy):
    def on_push(self, push: Push, group: GroupView) -> OnPush:
        return self.weigh(push)

    def weigh(self, push: Push) -> OnPush:
        return APPLY

    def on_clocks(self, group: GroupView) -> bool:  # the very mistake
        return True


@dataclass(frozen=True)
class AnswersNothing(Policy):
    def decide(self, push: Push, group: GroupView) -> OnPush:  # the very mistake
        return APPLY


@dataclass(frozen=True)
class Helped(Async):
    def weigh(self, push: Push) -> OnPush:
        return APPLY

    def on_push(self, push: Push, group: GroupView) -> OnPush:
        return self.weigh(push)


def test_policy_with_a_method_beside_its_own_ones_is_taken() -> None:
    assert dict(check_registered([Helped])) == {"Helped": Helped}


def named(name: str, base: type = Policy) -> type:
    return dataclass(frozen=True)(type(name, (base,), {}))


def function(name: str) -> Callable[[int], float]:
    def made(staleness: int) -> float:
        return 1.0

    made.__name__ = name
    return made


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([Thawed], "Thawed has to be a frozen dataclass"),
        ([NoDataclass], "NoDataclass has to be a frozen dataclass"),
        ([ForgetsTheGroup], r"ForgetsTheGroup.on_push has to be a method on_push\(self, push"),
        ([WantsMore], "WantsMore.on_push has to be a method"),
        ([Misspelt], r"Misspelt.on_pushed is called by no server.*: rename it on_push"),
        ([HalfMisspelt], "HalfMisspelt.on_clocks is called by no server.*rename it on_clock"),
        ([AnswersNothing], r"AnswersNothing defines decide and none of on_push, .*ps.Async\(\)"),
        ([lambda staleness: 1.0], "has no name: write it with def"),
        ([named("Async")], "'Async' is the name of a built-in one"),
        ([named("Inverse")], "'Inverse' is the name of a built-in one"),
        ([function("SGD")], "'SGD' is the name of a built-in one"),
        ([named("Own"), named("Own")], "two are called 'Own'"),
        ([named("bare"), bare], "two are called 'bare'"),
        ([Own()], "takes classes derived from ps.Policy and functions"),
        ([SGD], "takes classes derived from ps.Policy and functions"),
        ([max], "takes classes derived from ps.Policy and functions"),
    ],
)
def test_what_cannot_be_registered_is_refused(given: list[Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        check_registered(given)


def test_same_thing_registered_twice_counts_once() -> None:
    assert dict(check_registered([Own, bare, Own], Own(damping=bare))) == {"Own": Own, "bare": bare}


@pytest.mark.parametrize(
    ("rules", "policies", "words"),
    [
        (SGD, (), r"rules= takes a list, as in rules=\[SGD\]"),
        ("SGD", (), r"rules= takes a list, as in rules=\[MyRule\]"),
        ((), Async, r"policies= takes a list, as in policies=\[Async\]"),
    ],
)
def test_what_is_registered_is_a_list(rules: Any, policies: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        check(rules, policies)
