"""What travels to workers, and what is said of things that cannot."""

from __future__ import annotations

import functools
import pickle
import sys
import threading
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from tests.suites import each_case

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


class Alarm(Exception):
    """What a handler of signals raises."""


class Rings:
    """A signal comes while it is pickled for the first time."""

    rung = False

    def __reduce__(self) -> tuple[type[Rings], tuple[()]]:
        if not self.rung:
            self.rung = True
            raise Alarm
        return Rings, ()


def test_pack_does_not_take_a_signal_for_something_that_cannot_be_pickled() -> None:
    def train(worker: object, rings: Rings) -> None: ...

    with pytest.raises(Alarm):
        pack(train, [Rings()], {})


def test_pack_names_an_argument_that_cannot_be_pickled() -> None:
    def train(worker: object, *args: object, key: object) -> None: ...

    with pytest.raises(TypeError, match=r"argument 1 \(lock.*argument 'key' \(lock"):
        pack(train, (0, threading.Lock()), {"key": threading.Lock()})


def test_pack_names_a_default_value_that_cannot_be_pickled() -> None:
    def train(worker: object, guard: Any = threading.Lock()) -> None: ...  # noqa: B008  # the mistake

    with pytest.raises(TypeError, match=r"the default value of 'guard' \(lock"):
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
    told = for_servers(Async(damping=halves), 2, rules=[Own, OwnRule])
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
        told = for_servers(Outer(), 2, rules=rules)
        assert [kind.__name__ for kind in cloudpickle.loads(told.code)] == ["OwnRule", "Outer"]


def test_servers_get_no_code_for_what_is_built_in() -> None:
    assert for_servers(Sync(), 2, rules=()).code == b""


def test_class_of_a_function_travels_by_value() -> None:
    @dataclass(frozen=True)
    class Local(Policy): ...

    told = for_servers(Local(), 2, rules=())
    assert [each.__name__ for each in cloudpickle.loads(told.code)] == ["Local"]


def test_rule_that_servers_cannot_be_started_with_is_refused() -> None:
    rules: Any = [3]
    with pytest.raises(TypeError, match="rules="):
        for_servers(Sync(), 2, rules=rules)


def test_policy_is_asked_about_the_number_of_workers_if_that_is_known() -> None:
    for workers in (0, 3):
        for_servers(Own(), workers, rules=())
    with pytest.raises(ValueError, match="too many"):
        for_servers(Own(), 4, rules=())


def test_policy_that_cannot_be_pickled_is_named() -> None:
    guard = threading.Lock()

    @dataclass(frozen=True)
    class Guarded(Policy):
        def check(self, workers: int) -> None:
            guard.locked()

    with pytest.raises(TypeError, match=r"Guarded cannot be sent to the servers"):
        for_servers(Guarded(), 2, rules=())


def uses_torch() -> object:
    import torch

    return torch


@each_case(
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


@each_case(
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


def steps(worker: object, epochs: int, *, lr: float = 0.1) -> None: ...


def alone() -> None: ...


class Trains:
    def __init__(self, worker: object) -> None: ...

    def __call__(self, worker: object, epochs: int) -> None: ...


HERE = r"test_packing\.py:\d+"


@each_case(
    ("function", "args", "kwargs", "words"),
    [
        (
            steps,
            (),
            {},
            rf"call steps\(worker\): missing .* 'epochs'. It is steps.* at .*{HERE}\. ",
        ),
        (steps, (3, 0.5), {}, rf"call steps\(worker, 3, 0.5\): too many positional.* at .*{HERE}"),
        (steps, (3,), {"lt": 1}, rf"\(worker, 3, lt=1\): got an unexpected .*'lt'.* at .*{HERE}"),
        (steps, (3,), {"worker": 1}, "multiple values for argument 'worker'"),
        (alone, (), {}, rf"too many.* at .*{HERE}.* take the worker first: def alone\(worker\)"),
        (lambda: None, (), {}, rf"call <lambda>\(worker\).* at .*{HERE}"),
        (functools.partial(steps, lr=1), (), {}, rf"missing .*'epochs'.* at .*{HERE}"),
        (WithArguments(steps, ["x.py"]), (), {}, rf"call steps\(worker\): missing.* at .*{HERE}"),
        (Trains(None), (), {}, rf"missing .*'epochs'.* at .*{HERE}"),
        (Trains, (3,), {}, rf"call Trains\(worker, 3\): too many.* at .*{HERE}"),
        (Trains(None).__call__, (), {}, rf"missing .*'epochs'.* at .*{HERE}"),
    ],
)
def test_pack_refuses_arguments_that_the_function_does_not_take(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        pack(function, args, kwargs)


def test_pack_does_not_judge_a_function_that_says_what_another_takes() -> None:
    @functools.wraps(steps)
    def with_epochs(worker: object) -> None:
        steps(worker, 3)

    for function, args in (
        (with_epochs, ()),
        (max, (1,)),
        (functools.partial(steps, epochs=3), ()),
    ):
        pack(function, args, {})


@pytest.fixture
def ref(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An `ObjectRef` of a fake of Ray."""
    ray: Any = ModuleType("ray")
    ray.ObjectRef = type("ObjectRef", (), {"__repr__": lambda self: "ObjectRef(7)"})
    ray.get = lambda ref, timeout: 7
    ray.cloudpickle = SimpleNamespace(dumps=lambda ref: pickle.dumps("pickled by Ray"))
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray.ObjectRef()


def test_pack_fetches_arguments_that_lie_in_the_object_store(ref: Any) -> None:
    assert unpack(pack(max, (1, ref), {"key": ref}))[1:] == ((1, 7), {"key": 7})


def test_pack_refuses_a_dataset_of_ray_that_each_worker_would_execute(
    ref: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data: Any = ModuleType("ray.data")
    data.Dataset = type("Dataset", (), {})
    monkeypatch.setitem(sys.modules, "ray.data", data)
    read = type("MaterializedDataset", (data.Dataset,), {})()
    for args, kwargs in (([1, read], {}), ([], {"rows": read})):
        where = "argument 1" if args else "argument 'rows'"
        with pytest.raises(TypeError, match=rf"{where} is a ray\.data\.Materialized.*to_pandas"):
            pack(lambda *args, **kwargs: None, args, kwargs, on_ray=True)
    monkeypatch.setattr(sys.modules["ray"], "get", lambda ref, timeout: read)
    with pytest.raises(TypeError, match=r"argument 0 is a ray\.data"):
        pack(max, (ref, 1), {}, on_ray=True)


def test_pack_refuses_refs_that_workers_without_ray_cannot_read(ref: Any) -> None:
    def train(worker: object, parts: Any, whole: Any = ref, by: Any = None) -> Any:
        return ref

    with pytest.raises(TypeError) as refused:
        pack(train, ([1, ref], ref), {"by": {"name": ref}})
    told = str(refused.value)
    for where in (
        "argument 0 (list: it holds ObjectRef(7))",
        "argument 'by' (dict",
        "the default value of 'whole' (ObjectRef",
        "captured 'ref' (ObjectRef",
        "as an argument of its own, in args= or kwargs=",
    ):
        assert where in told
    assert "argument 1" not in told, "it arrives as its value"


def test_pack_leaves_refs_to_workers_on_ray_as_ray_pickles_them(ref: Any) -> None:
    def train(worker: object, *args: object) -> Any:
        return ref

    function, args, _ = unpack(pack(train, ([1, ref], ref), {}, on_ray=True))
    assert (function(None), args) == ("pickled by Ray", ([1, "pickled by Ray"], 7))


@each_case(("failed", "told"), [(False, "within 0.5 s"), (True, "bad sample 17")])
def test_pack_names_the_argument_whose_value_ray_does_not_have(
    monkeypatch: pytest.MonkeyPatch, failed: bool, told: str
) -> None:
    class RayError(Exception):
        """Ray's, as of a task that raised."""

    class NotYet(RayError):
        """Ray's `GetTimeoutError`."""

    def get(_: object, timeout: float) -> None:
        raise RayError("bad sample 17") if failed else NotYet(timeout)

    ray = ModuleType("ray")
    ray.ObjectRef = type("ObjectRef", (), {})  # type: ignore[attr-defined]  # a fake
    kinds = SimpleNamespace(GetTimeoutError=NotYet, RayError=RayError)
    ray.exceptions = kinds  # type: ignore[attr-defined]  # a fake
    ray.get = get  # type: ignore[attr-defined]  # a fake
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(ParamServeError, match=rf"argument 'key' is .*{told}. Applied: no"):
        pack(max, (1,), {"key": ray.ObjectRef()}, 0.5)
