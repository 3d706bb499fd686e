"""What a user's rule sees, and which classes can be registered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.suites import each_case

from paramserve.rules import SGD, Array, PushInfo, Rule, Run
from paramserve.rules.custom import CustomRule
from paramserve.rules.registry import build, check_registered, described_by, spec

PUSH = PushInfo(3, 7, 9, 2, 4.0, 0.5)


@dataclass(frozen=True)
class Seen(CustomRule):
    """Adds the gradient, and notes what it was given."""

    lr: float = 1.0
    up: bool = True
    mode: str = "plain"
    rates: tuple[float, ...] = (1.0, 2.0)

    state_names: ClassVar[tuple[str, ...]] = ("total", "ones")
    calls: ClassVar[list[Any]] = []

    def init(self, name: str, size: int, dtype: Any) -> Array:
        return np.full(size, 1.0 if name == "ones" else 0.0, dtype)

    def update(
        self, value: Array, gradient: Array, state: Mapping[str, Array], push: PushInfo
    ) -> None:
        self.calls.append((self, value.shape, gradient.copy(), push))
        state["total"][...] += gradient
        value += self.lr * gradient if self.up else -self.lr * gradient


@dataclass(frozen=True)
class Whole(Seen):
    whole_tensors: ClassVar[bool] = True


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    Seen.calls.clear()


def test_rule_satisfies_the_protocol_and_is_described_by_its_fields() -> None:
    rule: Rule = Seen(lr=0.5)
    assert isinstance(rule, Rule)
    assert (Seen.name, Seen.hyper_names, rule.hyper()) == ("Seen", ("lr", "up"), (0.5, 1.0))
    assert build(spec(rule), {"Seen": Seen}) == rule
    assert [each.tolist() for each in rule.init_state(2, np.dtype("f4"))] == [[0, 0], [1, 1]]


def test_update_has_this_pushs_values_and_the_scaled_gradient() -> None:
    value, state = np.zeros(5), Seen().init_state(5, np.dtype(float))
    runs = [Run(0, 2, 0), Run(3, 5, 4)]
    Seen().apply(value, np.arange(5.0), state, (10.0, 0.0), runs, PUSH)
    assert value.tolist() == [0, -5, 0, -15, -20]
    assert state[0].tolist() == [0, 0.5, 0, 1.5, 2]
    (rule, shape, gradient, push), second = Seen.calls
    assert (rule.lr, rule.up, rule.mode, shape, gradient.tolist()) == (
        10.0, False, "plain", (2,), [0, 0.5],
    )  # fmt: skip
    assert type(rule.up) is bool
    assert push == PUSH._replace(scale=1.0)
    assert second[2].tolist() == [1.5, 2.0]


def test_whole_tensors_come_in_their_shape() -> None:
    value = np.zeros(6)
    runs = [Run(0, 1, 0, ()), Run(1, 5, 0, (2, 2)), Run(5, 6, 0)]
    Whole().apply(value, np.ones(6), Whole().init_state(6, value.dtype), (1.0, 1.0), runs, PUSH)
    assert [call[1] for call in Seen.calls] == [(), (2, 2), (1,)]
    assert value.tolist() == [0.5] * 6


def test_state_is_written_into_its_arrays_and_the_gradient_is_read_only() -> None:
    @dataclass(frozen=True)
    class Writes(CustomRule):
        state_names: ClassVar[tuple[str, ...]] = ("m", "n")

        def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None:
            with pytest.raises(ValueError, match="read-only"):
                gradient *= 2
            with pytest.raises(KeyError, match="o"):
                state["o"] = gradient
            with pytest.raises(ValueError, match="broadcast"):
                state["m"] = np.ones(7)
            state["m"] += gradient
            state["n"] = gradient * 3

    m, n = np.ones(3), np.ones(3)
    Writes().apply(np.zeros(3), np.ones(3), (m, n), (), [Run(0, 2, 0)], PUSH._replace(scale=1.0))
    assert (m.tolist(), n.tolist()) == ([2, 2, 1], [3, 3, 1])


@dataclass(frozen=True)
class Rebinds(CustomRule):
    """The very mistake."""

    lr: float = 1.0

    def update(self, value: Array, gradient: Array, state: Any, push: PushInfo) -> None:
        value = value - self.lr * gradient


@dataclass(frozen=True)
class Views(Rebinds):
    def update(self, value: Array, gradient: Array, state: Any, push: PushInfo) -> None:
        value = value.reshape(-1)
        value -= self.lr * gradient


@dataclass(frozen=True)
class Fills(Rebinds):
    def update(self, value: Array, gradient: Array, state: Any, push: PushInfo) -> None:
        value = value[:]
        value[...] = value - self.lr * gradient


@dataclass(frozen=True)
class RebindsWithMomentum(Rebinds):
    state_names: ClassVar[tuple[str, ...]] = ("mean",)

    def update(self, value: Array, gradient: Array, state: Any, push: PushInfo) -> None:
        state["mean"] = 0.5 * state["mean"] + gradient
        value = value - self.lr * state["mean"]


@dataclass(frozen=True)
class RebindsAfterItsState(RebindsWithMomentum):
    """What is written into is the state, from the value."""

    def update(self, value: Array, gradient: Array, state: Any, push: PushInfo) -> None:
        state["mean"] += value + gradient
        state["mean"][0 if push.clock else 1] = value.sum()
        state["mean"][...] = value
        value = value - self.lr * gradient


@dataclass(frozen=True)
class DecaysElsewhere(Rebinds):
    """What is written into is the new array."""

    def update(self, value: Array, gradient: Array, state: Any, push: PushInfo) -> None:
        value = value * 0.9
        value -= self.lr * gradient
        value[0] = 1.0


def apply(rule: CustomRule, gradient: Array, lr: float = 1.0) -> list[float]:
    value = np.zeros(gradient.size)
    state = rule.init_state(value.size, value.dtype)
    rule.apply(value, gradient, state, (lr,), [Run(0, value.size, 0)], PUSH)
    return value.tolist()


@pytest.mark.parametrize(
    "rule",
    [Rebinds(), RebindsWithMomentum(), RebindsAfterItsState(), DecaysElsewhere()],
    ids=lambda each: each.name,
)
def test_update_that_assigns_to_the_name_is_refused_with_what_to_write(rule: CustomRule) -> None:
    with pytest.raises(ValueError, match=r"not changed the value.*in place: value -= \.\.\."):
        apply(rule, np.ones(2))
    assert apply(rule, np.zeros(2)) == [0, 0], "there is nothing to change"


def test_update_that_changes_nothing_for_a_reason_is_taken() -> None:
    assert apply(Views(), np.ones(2)) == apply(Fills(), np.ones(2)) == [-0.5, -0.5]
    assert apply(Rebinds(), np.ones(2), lr=0.0) == [0, 0], "a schedule may begin at 0"


WRITES = [
    "value[...] = value - gradient",
    "value[:] = value - gradient",
    "value[0 if push.clock else 1] = gradient[0]",
    "value[np.abs(gradient) > 1] *= 0.5",
    "value.reshape(-1)[:] -= gradient",
    "value.flat = gradient",
    "value -= gradient",
    "value **= 2",
    "(value, state)[0][...] = gradient",
    "(value if push.clock else gradient)[...] = gradient",
]


@pytest.mark.parametrize("rebinds", ["value = value[:]", "value = value.reshape(-1)"])
def test_update_that_writes_into_the_value_in_any_way_may_change_nothing(rebinds: str) -> None:
    """No wait for a clock of 100 is refused, however the array is written to then."""
    for write in WRITES:
        names: dict[str, Any] = {"np": np}
        body = f"{rebinds}\n    if push.clock > 100:\n        {write}"
        exec(f"def update(self, value, gradient, state, push):\n    {body}", names)
        rule = dataclass(frozen=True)(type("Writes", (Rebinds,), {"update": names["update"]}))
        assert apply(rule(), np.ones(2)) == [0, 0], write


def test_check_refuses_what_the_class_refuses() -> None:
    @dataclass(frozen=True)
    class Positive(CustomRule):
        lr: float = 1.0

        def __post_init__(self) -> None:
            if self.lr <= 0:
                raise ValueError("lr must be above 0")

        def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None:
            value -= self.lr * gradient

    for wrong in ((-1.0,), (float("nan"),), (), (1.0, 2.0)):
        with pytest.raises(ValueError):
            Positive().check(wrong)
    Positive().check((2.0,))


def made(**members: Any) -> Any:
    """A frozen dataclass derived from CustomRule with these members."""
    members.setdefault("update", lambda self, value, gradient, state, push: None)
    return dataclass(frozen=True)(type("Made", (CustomRule,), members))


@dataclass(frozen=True)
class HalfAProtocol:
    name: ClassVar[str] = "HalfAProtocol"


class NoDataclass(CustomRule):
    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None: ...


@dataclass
class Thawed(CustomRule):
    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None: ...


@dataclass(frozen=True)
class NoUpdate(CustomRule):
    lr: float = 1.0


@dataclass(frozen=True)
class BadField(CustomRule):
    window: int = 3

    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None: ...


@dataclass(frozen=True)
class ListField(CustomRule):
    rates: list[float] = field(default_factory=list)

    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None: ...


@each_case(
    ("classes", "text"),
    [
        ([Seen()], "takes classes"),
        (["Seen"], "takes classes"),
        ([NoDataclass], r"@dataclass\(frozen=True\)"),
        ([Thawed], r"@dataclass\(frozen=True\)"),
        ([NoUpdate], r"define update\(self, value, gradient, state, push\)"),
        ([made(update=lambda self, value, gradient: None)], r"update\(self, value, gradient,"),
        ([made(update=lambda self, a, b, c, d, e: None)], r"update\(self, value, gradient,"),
        ([made(init=lambda self: None)], r"init\(self, name, size, dtype\)"),
        ([made(name="SGD")], "name of a built-in rule: rename"),
        ([made(name="torch")], "name of a built-in rule: rename"),
        ([made(name="no name")], "Python name"),
        ([made(state_names="m")], "tuple of texts"),
        ([made(state_names=("m", "m"))], "twice"),
        ([Seen, Seen], "two rules are called 'Seen'"),
        ([BadField], "window is int: fields are float, bool, str"),
        ([ListField], r"rates is list\[float\]: fields are"),
        ([HalfAProtocol], "derive it from ps.CustomRule"),
    ],
)
def test_register_wrong_class_says_what_to_do(classes: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        check_registered(classes)


def test_register_gives_the_classes_by_name() -> None:
    assert dict(check_registered([Seen, Whole])) == {"Seen": Seen, "Whole": Whole}
    assert dict(check_registered(())) == {}


def test_described_by_passes_unknown_rules_and_refuses_an_imposter() -> None:
    assert described_by(Seen()).name == "Seen"
    assert described_by(SGD(0.1)).name == "SGD"
    with pytest.raises(TypeError, match="name of a built-in rule"):
        described_by(made(name="SGD")())
