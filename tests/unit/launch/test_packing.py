"""What travels to workers, and what is said of things that cannot."""

from __future__ import annotations

import functools
import sys
import threading
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, Sync
from paramserve.consistency.registry import registered
from paramserve.errors import ParamServeError
from paramserve.launch import packing
from paramserve.launch.packing import WithArguments, for_servers, pack
from paramserve.rules.base import Rule
from paramserve.rules.custom import CustomRule


def unpack(packed: bytes) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    found: tuple[Any, tuple[Any, ...], dict[str, Any]] = cloudpickle.loads(packed)
    return found


def test_pack_brings_function_and_arguments() -> None:
    offset = 5

    def train(worker: int, a: int, *, b: int) -> int:
        return worker + offset + a + b

    function, args, kwargs = unpack(pack(train, [1], {"b": 2}))
    assert function(10, *args, **kwargs) == 18


def test_pack_names_a_captured_variable_that_cannot_be_pickled() -> None:
    guard = threading.Lock()

    def train(worker: object) -> bool:
        return guard.locked()

    with pytest.raises(TypeError, match=r"train cannot be sent.*captured 'guard' \(lock"):
        pack(train, (), {})


def test_pack_names_an_argument_that_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match=r"argument 1 \(lock.*argument 'key' \(lock"):
        pack(print, (0, threading.Lock()), {"key": threading.Lock()})


def test_pack_names_a_default_value_that_cannot_be_pickled() -> None:
    def train(worker: object, guard: Any = threading.Lock()) -> None: ...  # noqa: B008  # the mistake

    with pytest.raises(TypeError, match="a default value"):
        pack(train, (), {})


def test_pack_names_a_methods_object() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.guard = threading.Lock()

        def train(self, worker: object) -> None: ...

    with pytest.raises(TypeError, match="the object that the method belongs to"):
        pack(Trainer().train, (), {})


def test_pack_refuses_what_is_not_callable() -> None:
    with pytest.raises(TypeError, match="must be callable"):
        pack("train", (), {})  # the mistake under test


def test_pack_large_closure_warns_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LARGE_BYTES", 1000)
    images = bytes(5000)

    def train(worker: object) -> int:
        return len(images)

    with pytest.warns(UserWarning, match=r"train takes .* captured 'images'"):
        pack(train, (), {})


def test_with_arguments_sets_argv_where_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pytest"])

    def train(worker: object) -> list[str]:
        return list(sys.argv)

    function, _, _ = unpack(pack(WithArguments(train, ["script.py", "--fast"]), (), {}))
    assert sys.argv == ["pytest"]
    assert function(None) == ["script.py", "--fast"]


# --- for the servers ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Own(Policy):
    bound: int = 1

    def check(self, workers: int) -> None:
        if workers > 3:
            raise ValueError("too many")


@dataclass(frozen=True)
class OwnRule(CustomRule):
    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None: ...


def halves(staleness: int) -> float:
    return 0.5


def test_servers_get_rules_policies_and_what_the_policy_needs_in_one_package() -> None:
    told = for_servers(Async(damping=halves), 2, rules=[OwnRule], policies=[Own])
    assert registered(cloudpickle.loads(told.code)).all == {
        "OwnRule": OwnRule,
        "Own": Own,
        "halves": halves,
    }
    assert told.consistency.options["damping"] == "halves"


def test_servers_get_the_rule_that_a_policy_has() -> None:
    @dataclass(frozen=True)
    class Outer(Policy):
        outer: Rule = OwnRule()

    for rules in ((), [OwnRule]):
        told = for_servers(Outer(), 2, rules=rules, policies=())
        assert [kind.__name__ for kind in cloudpickle.loads(told.code)] == ["OwnRule", "Outer"]


def test_servers_get_no_code_for_what_is_built_in() -> None:
    assert for_servers(Sync(), 2, rules=(), policies=()).code == b""


def test_class_of_a_function_travels_by_value() -> None:
    @dataclass(frozen=True)
    class Local(Policy): ...

    told = for_servers(Local(), 2, rules=(), policies=())
    assert [each.__name__ for each in cloudpickle.loads(told.code)] == ["Local"]


@pytest.mark.parametrize(
    ("policy", "options", "error", "words"),
    [
        (Sync(backup=2), {}, ValueError, "backup of Sync must be below the number of workers, 2"),
        ("sync", {}, TypeError, "consistency must be"),
        (Own, {}, TypeError, "consistency must be"),
        (Sync(), {"policies": [3]}, TypeError, "policies= takes"),
        (Sync(), {"rules": [3]}, TypeError, "rules="),
    ],
)
def test_what_servers_cannot_be_started_with_is_refused(
    policy: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        for_servers(policy, 2, **({"rules": (), "policies": ()} | options))


def test_policy_is_asked_about_the_number_of_workers_if_that_is_known() -> None:
    for workers in (0, 3):
        for_servers(Own(), workers, rules=(), policies=())
    with pytest.raises(ValueError, match="too many"):
        for_servers(Own(), 4, rules=(), policies=())


def test_policy_that_cannot_be_pickled_is_named() -> None:
    guard = threading.Lock()

    @dataclass(frozen=True)
    class Guarded(Policy):
        def check(self, workers: int) -> None:
            guard.locked()

    with pytest.raises(TypeError, match=r"Guarded cannot be sent to the servers"):
        for_servers(Guarded(), 2, rules=(), policies=())


def uses_torch() -> object:
    import torch

    return torch


@pytest.mark.parametrize(
    ("function", "expected"),
    [(uses_torch, ("torch",)), (functools.partial(uses_torch), ("torch",)), (len, ()), (dict, ())],
)
def test_imports_are_those_that_the_function_shows(
    function: Any, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch", ModuleType("torch")))
    assert packing.imports(function) == expected
    monkeypatch.delitem(sys.modules, "torch")
    assert packing.imports(function) == ()


async def awaits(worker: Any) -> None:
    """What no worker awaits."""


def yields(worker: Any) -> Any:
    yield worker


class Awaits:
    async def __call__(self, worker: Any) -> None:
        """What no worker awaits."""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (awaits, r"awaits is an async function.* plain def that calls asyncio.run"),
        (functools.partial(awaits), "is an async function"),
        (WithArguments(awaits, ["x"]), "is an async function"),
        (Awaits(), "is an async function"),
        (yields, "yields has a yield"),
    ],
)
def test_pack_refuses_a_function_whose_call_runs_nothing(function: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        pack(function, (), {})


def test_pack_fetches_arguments_that_lie_in_the_object_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = ModuleType("ray")
    ray.ObjectRef = type("ObjectRef", (), {"value": 7})  # type: ignore[attr-defined]  # a fake
    ray.get = lambda ref, timeout: ref.value  # type: ignore[attr-defined]  # a fake
    monkeypatch.setitem(sys.modules, "ray", ray)
    ref = ray.ObjectRef()
    assert unpack(pack(max, (1, ref), {"key": ref}))[1:] == ((1, 7), {"key": 7})


def test_pack_names_the_argument_whose_value_ray_does_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NotYet(Exception):
        """Ray's `GetTimeoutError`."""

    def get(_: object, timeout: float) -> None:
        raise NotYet(timeout)

    ray = ModuleType("ray")
    ray.ObjectRef = type("ObjectRef", (), {})  # type: ignore[attr-defined]  # a fake
    ray.exceptions = SimpleNamespace(GetTimeoutError=NotYet)  # type: ignore[attr-defined]  # a fake
    ray.get = get  # type: ignore[attr-defined]  # a fake
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(ParamServeError, match=r"argument 'key' is .* within 0.5 s. Applied: no"):
        pack(max, (1,), {"key": ray.ObjectRef()}, 0.5)
