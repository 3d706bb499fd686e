"""What `import paramserve` gives: cheap to import, every name documented, errors that travel."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module

import pytest
from tests.suites import each_case

import paramserve
from paramserve import errors
from paramserve.codecs.base import Codec
from paramserve.codecs.sparse import Sparse
from paramserve.consistency.base import Policy
from paramserve.reporters import Reporter
from paramserve.rules.base import RowRule, Rule
from paramserve.rules.built_in import BuiltIn

PUBLIC = [name for name in dir(paramserve) if not name.startswith("_")]
EXPECTED = {
    *("run", "start", "Job", "Result", "Worker", "Cluster", "Client", "Ticket"),
    *("Sync", "Async", "Add", "SGD", "Adam", "Local", "ParamServeError", "Snapshot"),
    *("Deadlines", "Limits", "BoundedStaleness", "DelayCompensated", "Buffered", "LocalSteps"),
    *("ElasticAverage", "Adaptive", "Inverse", "Exponential", "Polynomial", "Policy", "Table"),
    *("TablePush", "Checkpoint", "Restart", "CustomRule", "CustomCodec"),
    *("Adagrad", "RowAdagrad", "FTRL", "Uniform", "Normal", "Constant", "Zeros"),
    *("MinCount", "TTL", "LRU", "pytorch"),
}
CLIENT = {
    *("define", "blocks", "push", "pull", "push_pull", "gradient", "assign", "tick", "clock"),
    *("table", "tables", "push_tables", "prefetch_tables", "set_consistency", "rest", "enter"),
    *("drain", "close", "closed", "timeout_s", "rank"),
}
NAMES_MAX = 85
"""Of `paramserve` itself: what is written in ordinary programs."""
BESIDE = [(module, name) for module, names in paramserve._BESIDE.items() for name in names.split()]
ARGUMENTS_MAX = 15
"""Of `run`, with `train`."""
CONTRACTS = (Rule, RowRule, BuiltIn, Policy, Codec, Sparse, Reporter)
"""A method may be documented where its contract is."""


def test_import_paramserve_loads_no_torch_ray_or_numba() -> None:
    code = "import sys, paramserve; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert loaded.isdisjoint({"torch", "ray", "numba"})


def test_import_paramserve_starts_no_thread_and_writes_nothing() -> None:
    code = "import paramserve, threading; assert threading.active_count() == 1"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_all_lists_every_public_name_once() -> None:
    listed = paramserve.__all__
    assert len(listed) == len(set(listed))
    assert all(hasattr(paramserve, name) for name in listed)
    assert set(listed) >= EXPECTED
    assert len(listed) <= NAMES_MAX


@each_case(("module", "name"), BESIDE)
def test_name_beside_is_imported_from_its_module_alone(module: str, name: str) -> None:
    check_documented(f"{module}.{name}", getattr(import_module(f"paramserve.{module}"), name))
    assert name not in paramserve.__all__
    line = f"from paramserve.{module} import {name}"
    with pytest.raises(AttributeError, match=rf"no attribute '{name}': write `{line}`$"):
        getattr(paramserve, name)


@each_case("begin", [paramserve.run, paramserve.start])
def test_run_has_few_arguments(begin: Callable[..., object]) -> None:
    """What is of an engine or of a checkpoint is an option of theirs."""
    assert len(inspect.signature(begin).parameters) <= ARGUMENTS_MAX


def test_client_has_what_users_call_and_its_parts_have_the_rest() -> None:
    assert {name for name in dir(paramserve.Client) if not name.startswith("_")} == CLIENT


@each_case("name", getattr(paramserve, "__all__", []))
def test_public_name_is_documented(name: str) -> None:
    check_documented(name, getattr(paramserve, name))


def check_documented(name: str, thing: object) -> None:
    if not callable(thing):
        return
    assert written(thing), f"paramserve.{name} has no docstring"
    if not inspect.isclass(thing):
        return
    for member, value in vars(thing).items():
        if not member.startswith("_") and callable(value):
            promised = [getattr(contract, member, None) for contract in CONTRACTS]
            assert any(map(written, [value, *promised])), f"{name}.{member} has no docstring"


def written(thing: object) -> bool:
    """Whether a docstring was written: dataclasses and named tuples invent one."""
    text = thing.__doc__ or ""
    return bool(text.strip()) and not text.startswith(f"{getattr(thing, '__name__', '')}(")


@each_case("kind", sorted(errors.KINDS))
def test_error_survives_pickling(kind: str) -> None:
    error = errors.KINDS[kind]("pull failed: worker 3", applied="unknown", fix="look at worker 5")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert (copy.failed, copy.applied, copy.fix) == (error.failed, error.applied, error.fix)


def test_error_text_says_failed_applied_and_fix() -> None:
    error = errors.ServerGone("push failed: server 1 ended", applied="unknown", fix="start again")
    expected = "push failed: server 1 ended. Applied: unknown. To fix: start again"
    assert str(error) == f"{expected}. More: docs/reference.md#pserrorsservergone"


@each_case("kind", sorted(set(errors.KINDS) - {"ParamServeError"}))
def test_error_is_a_paramserve_error(kind: str) -> None:
    assert issubclass(errors.KINDS[kind], errors.ParamServeError)


def test_unknown_name_is_told_with_the_one_that_is_meant() -> None:
    with pytest.raises(AttributeError, match=r"'Embedding': it is ps\.pytorch\.Embedding$"):
        paramserve.Embedding  # noqa: B018  # the access raises
    with pytest.raises(AttributeError, match=r"'WorkerFailed': it is ps\.errors\.WorkerFailed$"):
        paramserve.WorkerFailed  # noqa: B018
    with pytest.raises(AttributeError) as caught:
        paramserve.Restrat  # noqa: B018
    # By which the interpreter asks "Did you mean: 'Restart'?"
    assert (caught.value.name, caught.value.obj) == ("Restrat", paramserve)


def test_modules_that_are_looked_for_are_those_of_pytorch() -> None:
    assert sorted(paramserve._MODULES) == sorted(paramserve.pytorch.__all__)
