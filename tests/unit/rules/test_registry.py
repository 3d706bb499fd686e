"""Rules by name: what crosses the wire, and what a server makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import msgspec
import numpy as np
import pytest
from tests.suites import each_case

from paramserve.config import RuleSpec
from paramserve.errors import UnknownRule
from paramserve.rules import SGD, Adam, Add, Rule
from paramserve.rules.registry import BUILT_IN, build, spec


@dataclass(frozen=True)
class Imposter:
    """A rule of the user under a built-in name."""

    name: ClassVar[str] = "SGD"
    lr: float = 0.0


@dataclass(frozen=True)
class Mine:
    """As much of a rule as the registry looks at."""

    name: ClassVar[str] = "Mine"
    rates: tuple[float, ...] = (1.0,)
    mode: str = "up"


def test_spec_names_the_rule_and_its_options() -> None:
    assert spec(SGD(lr=1, nesterov=True, momentum=0.9)) == RuleSpec(
        "SGD",
        {
            "lr": 1.0,
            "momentum": 0.9,
            "dampening": 0.0,
            "weight_decay": 0.0,
            "nesterov": True,
            "maximize": False,
        },
    )


@each_case("rule", [Add(), SGD(lr=1), Adam(betas=(0.5, 0.6), decoupled=True)], ids=str)
def test_build_after_the_wire_gives_an_equal_rule(rule: Rule) -> None:
    wire = msgspec.msgpack.encode(spec(rule))
    assert build(msgspec.msgpack.decode(wire, type=RuleSpec)) == rule


def test_build_registered_rule_with_tuple_of_any_length() -> None:
    rule = Mine(rates=tuple(float(i) for i in range(12)), mode="down")
    assert build(spec(cast(Rule, rule)), {"Mine": Mine}) == rule


def test_build_unknown_name_says_which_are_known() -> None:
    with pytest.raises(
        UnknownRule,
        match=r"'Mine'.*Adam, Adamax, Add, .*NAdam, RMSprop, RowAdagrad, SGD and.*one of these",
    ):
        build(RuleSpec("Mine"))


def test_build_registered_rule_replaces_no_built_in_one() -> None:
    assert type(build(RuleSpec("SGD", {"lr": 0.1}), {"SGD": Imposter})) is SGD


@each_case(
    "options",
    [
        {},
        {"lr": -1.0},
        {"lr": "fast"},
        {"lr": 0.1, "speed": 1.0},
        {"lr.0": 0.1},
        {"lr.x": 0.1},
        {"lr": 0.1, "nesterov": True},
    ],
    ids=str,
)
def test_build_wrong_options_name_rule_and_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="SGD does not take"):
        build(RuleSpec("SGD", options))


def test_spec_of_numpy_numbers_is_of_floats() -> None:
    options = spec(SGD(lr=np.float32(0.5), momentum=np.int64(1))).options
    assert options["lr"] == 0.5
    assert all(type(each) in (float, bool) for each in options.values())


@each_case(
    "wrong",
    [SGD, object(), "SGD", Mine(mode=cast(str, None))],
    ids=["class", "object", "text", "field"],
)
def test_spec_of_what_is_no_rule_is_a_type_error(wrong: Any) -> None:
    with pytest.raises(TypeError):
        spec(wrong)


def test_built_in_rules_stand_under_their_names() -> None:
    assert {name: kind.__name__ for name, kind in BUILT_IN.items()} == {
        "Add": "Add",
        "SGD": "SGD",
        "Adam": "Adam",
        "Adagrad": "Adagrad",
        "DelayedNesterov": "DelayedNesterov",
        "RowAdagrad": "RowAdagrad",
        "FTRL": "FTRL",
        **{name: name for name in ("RMSprop", "Adadelta", "Adamax", "NAdam", "Lion", "LAMB")},
    }
