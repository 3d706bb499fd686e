from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from tests.suites import each_case

from paramserve.codecs import Codec as BuiltInCodec
from paramserve.codecs import CustomCodec
from paramserve.consistency.base import APPLY, Admission, GroupView, OnPush, Policy, Pull, Push
from paramserve.consistency.built_in import Async, BoundedStaleness
from paramserve.consistency.registry import registered
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


@dataclass(frozen=True)
class Codec(CustomCodec):
    def size(self, count: int) -> int:
        return count

    def encode(self, values: Any, out: Any, seed: int) -> int:
        return 0

    def decode(self, data: Any, out: Any) -> None: ...


def halves(staleness: int) -> float:
    return 0.5


def test_registered_tells_rules_from_policies_and_functions() -> None:
    found = registered([halves, Codec, Rule, Own])
    assert (dict(found.rules), dict(found.policies)) == (
        {"Rule": Rule},
        {"halves": halves, "Own": Own},
    )
    assert found.all == {"Rule": Rule, "halves": halves, "Own": Own}
    assert found.codecs == {"Codec": Codec}
    assert registered(found.things) == found


def test_codecs_that_can_be_none_are_refused() -> None:
    @dataclass(frozen=True)
    class Lacking(CustomCodec):
        def size(self, count: int) -> int:
            return count

    class Thawed(Codec):
        pass

    @dataclass(frozen=True)
    class Fewer(Codec):
        def encode(self, values: Any) -> int:  # type: ignore[override]
            return 0

    class Unregistrable(BuiltInCodec): ...

    built_in = dataclass(frozen=True)(type("TopK", (Codec,), {}))
    twice = dataclass(frozen=True)(type("Codec", (Codec,), {}))
    for given, told in (
        ([Unregistrable], "rules= takes classes that derive from ps.CustomCodec"),
        ([Lacking], "rules=: .*Lacking has no encode, decode: define each"),
        ([Thawed], "Thawed has to be a frozen dataclass"),
        ([Fewer], "Fewer.encode has to be a method encode"),
        ([built_in], "'TopK' is the name of a built-in codec"),
        ([Codec, twice], "two codecs are called 'Codec'"),
    ):
        with pytest.raises(TypeError, match=told):
            registered(given)


def test_registered_adds_the_class_and_the_functions_of_the_policy() -> None:
    assert dict(registered((), Own()).all) == {"Own": Own}
    assert dict(registered((), Async(damping=halves)).all) == {"halves": halves}
    assert dict(registered((), Async()).all) == {}


def test_registered_adds_the_class_of_a_rule_in_the_policy() -> None:
    @dataclass(frozen=True)
    class Outer(Policy):
        outer: Any
        built_in: Any

    assert dict(registered((), Outer(Rule(), SGD(lr=0.1))).rules) == {"Rule": Rule}


def test_same_thing_registered_twice_counts_once() -> None:
    things = [Own, Rule, Codec, halves]
    found = registered([*things, *things], Own(damping=halves))
    assert found == registered(things)


def test_rule_and_policy_of_one_name_are_refused() -> None:
    with pytest.raises(TypeError, match="rules=: 'Own' is the name of a rule and of a policy"):
        registered([Own, Namesake])


@each_case("wrong", [3, "Own", max, Own(), Rule(), Codec()])
def test_what_is_neither_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"rules= takes classes of rules, policies and codecs, and"):
        registered([wrong])


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


class Mixin:
    def on_pushed(self, push: Push, group: GroupView) -> OnPush:  # the very mistake
        return APPLY


@dataclass(frozen=True)
class MixedMisspelt(Mixin, Policy):
    pass


@dataclass(frozen=True)
class Scaled(BoundedStaleness):
    def scaled(self, x: float) -> float:
        return x

    rescale = scales = checked = scaled

    def on_pulls(self) -> int:
        """A helper: `on_pull` is inherited."""
        return 1

    def on_late(self) -> int:
        return 2


@dataclass(frozen=True)
class UsesItsOwn(Policy):
    def on_pushed(self, push: Push) -> OnPush:
        return APPLY

    def on_pull(self, pull: Pull, group: GroupView) -> Admission:
        assert all(self.on_pushed(each) for each in ())
        return super().on_pull(pull, group)


@dataclass(frozen=True)
class Helped(Async):
    def weigh(self, push: Push) -> OnPush:
        return APPLY

    def on_push(self, push: Push, group: GroupView) -> OnPush:
        return self.weigh(push)


@each_case("kind", [Helped, Scaled, UsesItsOwn])
def test_policy_with_methods_beside_its_own_ones_is_taken(kind: type[Policy]) -> None:
    with warnings.catch_warnings(action="error"):
        assert dict(registered([kind]).policies) == {kind.__name__: kind}


def test_policy_with_methods_that_no_server_calls_warns() -> None:
    with pytest.warns(UserWarning, match="AnswersNothing defines decide and none of on_push, .*"):
        registered([AnswersNothing])


def named(name: str, base: type = Policy) -> type:
    return dataclass(frozen=True)(type(name, (base,), {}))


def function(name: str) -> Callable[[int], float]:
    def made(staleness: int) -> float:
        return 1.0

    made.__name__ = name
    return made


@each_case(
    ("given", "words"),
    [
        ([Thawed], "Thawed has to be a frozen dataclass"),
        ([NoDataclass], "NoDataclass has to be a frozen dataclass"),
        ([ForgetsTheGroup], r"ForgetsTheGroup.on_push has to be a method on_push\(self, push"),
        ([WantsMore], "WantsMore.on_push has to be a method"),
        ([Misspelt], r"Misspelt.on_pushed is called by no server.*: rename it on_push"),
        ([HalfMisspelt], "HalfMisspelt.on_clocks is called by no server.*rename it on_clock"),
        ([MixedMisspelt], "MixedMisspelt.on_pushed is called by no server.*rename it on_push"),
        ([lambda staleness: 1.0], "has no name: write it with def"),
        ([named("Async")], "'Async' is the name of a built-in one"),
        ([named("Inverse")], "'Inverse' is the name of a built-in one"),
        ([function("SGD")], "'SGD' is the name of a built-in one"),
        ([named("Own"), named("Own")], "two are called 'Own'"),
        ([named("bare"), bare], "two are called 'bare'"),
        ([SGD], "'SGD' is the name of a built-in rule"),
        ([int], "int has to be a frozen dataclass"),
    ],
)
def test_what_cannot_be_registered_is_refused(given: list[Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        registered(given)


@each_case(
    ("rules", "words"),
    [
        (Own, r"rules= takes a list, as in rules=\[Own\]"),
        (halves, r"rules= takes a list, as in rules=\[halves\]"),
        ("SGD", r"rules= takes a list, as in rules=\[MyRule\]"),
    ],
)
def test_what_is_registered_is_a_list(rules: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        registered(rules)
