"""Policies as they are written in a command line."""

from __future__ import annotations

from dataclasses import dataclass

import click
import pytest

from paramserve.cli.policies import in_python, policy_of
from paramserve.codecs import Int4
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import (
    Adaptive,
    Async,
    BoundedStaleness,
    Inverse,
    LocalSteps,
    Sync,
)
from paramserve.rules import SGD


@dataclass(frozen=True)
class Own(Policy):
    bound: int = 1


def halves(staleness: int) -> float:
    return 0.5


POLICIES: list[tuple[str, Policy]] = [
    ("sync", Sync()),
    ("sync:mean", Sync(reduce="mean")),
    ("sync:sum", Sync(reduce="sum")),
    ("async", Async()),
    ("Async", Async()),
    ("BoundedStaleness(4)", BoundedStaleness(4)),
    ("bounded:4", BoundedStaleness(4)),
    (
        "Sync(backup=1, timeout_s=Adaptive(factor=3.0))",
        Sync("mean", "refuse", 1, Adaptive(3.0)),
    ),
    (
        "Async(damping=Inverse(0.2), drop_after=None)",
        Async(damping=Inverse(0.2), drop_after=None),
    ),
    ("Async(damping=halves)", Async(damping=halves)),
    ("LocalSteps(every=3, outer=SGD(lr=1.0))", LocalSteps(every=3, outer=SGD(lr=1.0))),
    ("LocalSteps(every=9, push=Int4(block=32))", LocalSteps(every=9, push=Int4(32))),
    ("Own(bound=7)", Own(7)),
]


def test_policy_is_what_the_text_says() -> None:
    for text, policy in POLICIES:
        assert policy_of(text, [Own, halves]) == policy


REFUSED = [
    ("eventual", "no policy is called 'eventual'; known: sync, async, .*BoundedStaleness"),
    ("fast:3", "no policy is called 'fast'; known: sync"),
    ("bouded:4", "no policy is called 'bouded'; did you mean bounded"),
    ("Own(1)", "no policy is called 'Own'; import your own with --rules module:Own; known"),
    ("Asinc()", "no policy is called 'Asinc'; did you mean Async"),
    ("Async(damping=Inverted(1))", "unknown name 'Inverted'"),
    ("BoundedStaleness", "missing 1 required"),
    ("SGD(0.1)", "no policy is called 'SGD'"),
    ("BoundedStaleness(-1)", "bound of BoundedStaleness must be at least 0"),
    ("BoundedStaleness()", "missing 1 required"),
    ("BoundedStaleness(**{'bound': 1})", "unexpected keyword"),
    ("Async(damping=lambda s: 1.0)", "malformed node"),
    ("__import__('os').system('true')", "no policy is called '__import__'"),
    ("Inverse(0.1)(3)", "no policy is called 'Inverse'"),
    ("Async(damping=Inverse(0.1)(3))", "is no class"),
    ("(", "never closed"),
    ("", "invalid syntax"),
]


def test_text_that_is_no_policy_is_refused_and_nothing_else_is_run() -> None:
    for text, words in REFUSED:
        with pytest.raises(click.BadParameter, match=words) as error:
            policy_of(text)
        assert error.value.param_hint == "--consistency"


def test_option_without_rules_beside_it_does_not_advise_them() -> None:
    with pytest.raises(click.BadParameter, match="no policy is called 'Own'; known"):
        policy_of("Own(1)", option="--policy")


LONG = [
    ("sync", "Sync()"),
    ("sync:sum", "Sync(reduce='sum')"),
    ("sync:backup=1,timeout_s=0.5", "Sync(backup=1, timeout_s=0.5)"),
    (" bounded:4 ", "BoundedStaleness(bound=4)"),
    ("buffered:8,damping=None", "Buffered(size=8, damping=None)"),
    ("async:damping=Inverse(0.1)", "Async(damping=Inverse(0.1))"),
    ("local:every=4", "LocalSteps(every=4)"),
    ("Async()", "Async()"),
    ("eventual:3", "eventual:3"),
]


def test_in_python_writes_the_long_form() -> None:
    for short, long in LONG:
        assert in_python(short) == long


def test_in_python_refuses_what_are_no_options() -> None:
    for text in ("sync:1,2", "bounded:4)+(1", "bounded:4 5", "bounded:)"):
        with pytest.raises(ValueError, match="stands a value"):
            in_python(text)
