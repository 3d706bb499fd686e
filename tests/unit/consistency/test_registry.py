"""Policies by name: what is registered, what is refused, what a peer may send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import pytest
from tests.suites import each_case

from paramserve.codecs import BFloat16, Int4
from paramserve.config import ConsistencySpec
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import (
    Adaptive,
    Async,
    AsyncLocalSteps,
    Buffered,
    Exponential,
    Inverse,
    LocalSteps,
    Sync,
)
from paramserve.consistency.registry import build, is_built_in, spec, terms
from paramserve.errors import UnknownCodec, UnknownRule
from paramserve.rules import Adam
from paramserve.rules.custom import CustomRule


@dataclass(frozen=True)
class Own(Policy):
    """Has one of each thing that a field may be."""

    collects: ClassVar[bool] = True
    whole: int = 1
    real: float = 0.5
    text: str = "Inverse"
    flag: bool = False
    damping: Callable[[int], float] | None = None
    outer: Any = field(default=None)


@dataclass(frozen=True)
class OwnRule(CustomRule):
    speed: float = 1.0

    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None: ...


def halves(staleness: int) -> float:
    return 0.5


def travelled(policy: Policy) -> ConsistencySpec:
    """The spec of a policy, as the other side decodes it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(spec(policy)), type=ConsistencySpec)


def test_policy_with_an_unknown_codec_is_refused_as_that() -> None:
    told = ConsistencySpec("LocalSteps", {"every": 2, "push": "Morse"}, True)
    with pytest.raises(UnknownCodec, match="no codec is called 'Morse'"):
        build(told)
    told = ConsistencySpec("LocalSteps", {"every": 2, "push": "Int8", "push.block": 3}, True)
    with pytest.raises(ValueError, match="a power of two"):
        build(told)


# --- on the wire ----------------------------------------------------------------------------------


@each_case(
    "policy",
    [
        Own(whole=3, real=2.0, text="Sync", flag=True),
        Own(damping=Exponential(0.3)),
        Own(damping=halves),
        Sync(timeout_s=Adaptive(factor=3.0)),
        LocalSteps(every=7, outer=Adam(lr=0.3)),
        LocalSteps(every=7, push=Int4(rounding="stochastic"), pull=BFloat16(even_local=True)),
        AsyncLocalSteps(6, Adam(lr=0.3), fragments=3, delay=1, merge=0.5, scale_steps=True),
    ],
)
def test_policy_is_the_same_after_it_has_travelled(policy: Policy) -> None:
    known = {"Own": Own, "halves": halves, "OwnRule": OwnRule}
    assert build(travelled(policy), known) == policy


def test_integers_stay_integers() -> None:
    made = build(travelled(Buffered(size=3)))
    assert isinstance(made, Buffered)
    assert type(made.size) is int


def test_terms_say_what_clients_without_the_class_need() -> None:
    assert terms(travelled(Own())) == (True, True, None)
    assert terms(travelled(Async(on_nonfinite="skip"))) == (
        False,
        False,
        Async(on_nonfinite="skip"),
    )


@each_case(
    ("policy", "mine"),
    [
        (Sync(), True),
        (Async(damping=Inverse()), True),
        (Async(damping=halves), False),
        (Own(), False),
    ],
)
def test_policy_with_a_users_code_is_not_built_in(policy: Policy, mine: bool) -> None:
    assert is_built_in(policy) is mine


@each_case(
    "described",
    [
        ConsistencySpec("Async", {"damping": "eval"}),
        ConsistencySpec("Async", {"damping": "os.system"}),
        ConsistencySpec("SGD", {"lr": 0.1}),
        ConsistencySpec("halves"),
        ConsistencySpec("OwnRule"),
        ConsistencySpec(""),
    ],
)
def test_peer_cannot_name_what_is_not_registered_as_that(described: ConsistencySpec) -> None:
    with pytest.raises(UnknownRule):
        build(described, {"halves": halves, "OwnRule": OwnRule})


@each_case(
    "described",
    [
        ConsistencySpec("Async", {"drop_after": -1}),
        ConsistencySpec("Async", {"speed": 1}),
        ConsistencySpec("Async", {"damping": "SGD", "damping.lr": 0.1}),
        ConsistencySpec("Async", {"damping": 3}),
        ConsistencySpec("Sync", {"timeout_s": "Adaptive", "timeout_s.factor": -1.0}),
        ConsistencySpec("Buffered"),
    ],
)
def test_peer_cannot_make_what_the_class_refuses(described: ConsistencySpec) -> None:
    with pytest.raises((ValueError, TypeError)):
        build(described)
