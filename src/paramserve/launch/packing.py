"""Turns a training function and its arguments into bytes, and says what cannot be turned.

The function travels by value where it is defined in `__main__`, in a notebook or inside another
function, and by name where it lies in a module that a worker can import.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import pickle
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CellType, FunctionType
from typing import Any, NamedTuple

import cloudpickle

from paramserve.config import ConsistencySpec
from paramserve.consistency.base import Policy
from paramserve.consistency.registry import Registered, build, registered, spec
from paramserve.errors import ParamServeError, warn_user
from paramserve.launch.abbreviation import abbreviated

FETCH_S = 600.0
"""How long a value in Ray's object store is waited for: the task that makes it may still run."""
LARGE_BYTES = 100_000_000
"""A larger package gets a warning: every worker has a copy of it."""


SIGNATURE_MAX = 300
"""Characters of a function's signature in an error."""


class WithArguments:
    """A training function of a script, called with the script's arguments in `sys.argv`."""

    def __init__(self, function: Callable[..., Any], argv: Sequence[str]) -> None:
        self.function = function
        self.argv = list(argv)
        self.__qualname__ = _name(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sys.argv = list(self.argv)
        return self.function(*args, **kwargs)


class _HoldsRef(Exception):
    """What is pickled holds a `ray.ObjectRef`, and the workers are not connected to Ray."""


def pack(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    limit_s: float = FETCH_S,
    *,
    on_ray: bool = False,
) -> bytes:
    """(function, args, kwargs) in cloudpickle; arguments that are `ray.ObjectRef` as their values.

    Args:
        limit_s: how long each such value is waited for.
        on_ray: whether the workers can read the other refs: in lists, in what `function` captures.
    Raises:
        TypeError: `function` is none, or cannot be called so, or something cannot be pickled, or
            holds a ref that the workers cannot read; the text names it.
        ParamServeError: Ray did not have a value in time, or the task that makes it failed; the
            text names the argument.
    """
    if not callable(function):
        raise TypeError(f"the training function must be callable, got {function!r}")
    _check_plain(function)
    _check_call(function, args, kwargs)
    args = [_fetched(f"argument {i}", each, limit_s) for i, each in enumerate(args)]
    kwargs = {n: _fetched(f"argument {n!r}", each, limit_s) for n, each in kwargs.items()}
    _check_data([(f"argument {i}", each) for i, each in enumerate(args)])
    _check_data([(f"argument {name!r}", each) for name, each in kwargs.items()])
    try:
        packed = _dumps((function, tuple(args), dict(kwargs)), on_ray)
    except Exception as error:
        culprits = [
            f"{where} ({type(value).__name__}: {why})"
            for where, value in _parts(function, args, kwargs)
            if (why := _why_not(value, on_ray)) is not None
        ]
        if not culprits and _why_not((function, tuple(args), dict(kwargs)), on_ray) is None:
            raise  # not for what travels: a signal's handler raised
        what = "; ".join(culprits) if culprits else str(error)
        fix = "Make it inside the training function, or pass what it is made from"
        if isinstance(error, _HoldsRef):
            fix = (
                "Only workers of ps.OnRay() can read a ref: pass it as an argument of its own, in "
                "args= or kwargs=, where its value arrives, or give the value by ray.get(ref)"
            )
        raise TypeError(
            f"{_name(function)} cannot be sent to the workers: {what}. {fix}"
        ) from error
    if len(packed) > LARGE_BYTES:
        sizes = {w: len(_dumps(v, on_ray)) for w, v in _parts(function, args, kwargs)}
        largest = max(sizes, key=sizes.__getitem__, default=_name(function))
        warn_user(
            f"{_name(function)} takes {len(packed) / 1e6:.0f} MB to each worker, most of it "
            f"{largest}: load such data inside the training function"
        )
    return packed


def _fetched(where: str, value: Any, limit_s: float) -> Any:
    """An argument, or what it refers to in Ray's object store, as for a task of Ray."""
    if _is_ref(value):
        ray = sys.modules["ray"]
        try:
            return ray.get(value, timeout=limit_s)
        except ray.exceptions.GetTimeoutError as error:
            raise ParamServeError(
                f"{where} is {value!r}, and Ray did not have its value within {limit_s:g} s",
                applied="no",
                fix="look by `ray status` whether the task that makes it has room, or wait for it "
                "by ray.get and give the value",
            ) from error
        except ray.exceptions.RayError as error:
            raise ParamServeError(
                f"{where} is {value!r}, and Ray has no value for it: {error}",
                applied="no",
                fix="correct the task that makes it, and submit it again",
            ) from error
    return value


def _check_data(arguments: Iterable[tuple[str, Any]]) -> None:
    """Refuse a `ray.data.Dataset`: each worker would execute the whole of that plan, in an order of
    its own. Ray is not imported."""
    plans = getattr(sys.modules.get("ray.data"), "Dataset", ())
    for where, value in arguments:
        if isinstance(value, plans):
            raise TypeError(
                f"{where} is a ray.data.{type(value).__name__}, which is a plan and not the data: "
                "each worker would execute the whole of it. Pass a small one as a data frame, "
                "dataset.to_pandas(); write a large one where all nodes can read it, as with "
                "dataset.write_parquet(path), and let each worker read its part"
            )


def _is_ref(value: Any) -> bool:
    """Whether it is a `ray.ObjectRef`; without importing Ray."""
    return isinstance(value, getattr(sys.modules.get("ray"), "ObjectRef", ()))


def _dumps(value: Any, on_ray: bool) -> bytes:
    """Pickle with cloudpickle, but a `ray.ObjectRef` as Ray does.

    cloudpickle's copy of it has no owner, and reading that waits for ever.

    Raises:
        _HoldsRef: there is one, and not `on_ray`.
    """

    def reduced(part: Any) -> Any:
        if not _is_ref(part):
            return plain(part)
        if not on_ray:
            raise _HoldsRef(f"it holds {part!r}")
        return pickle.loads, (sys.modules["ray"].cloudpickle.dumps(part),)

    with io.BytesIO() as file:
        pickler: Any = cloudpickle.Pickler(file)
        plain, pickler.reducer_override = pickler.reducer_override, reduced
        pickler.dump(value)
        return file.getvalue()


def _check_plain(function: Callable[..., Any]) -> None:
    """Refuse a function whose call would only make a coroutine or a generator.

    Raises:
        TypeError: it is one.
    """
    name, called = _name(function), _unwrapped(function)
    for each in (called, type(called).__call__):
        if inspect.iscoroutinefunction(each):
            raise TypeError(
                f"{name} is an async function, and a worker calls it without awaiting it: make it "
                "a plain def that calls asyncio.run(...)"
            )
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            raise TypeError(
                f"{name} has a yield, so that a call of it runs nothing: make it a plain def that "
                "returns its result"
            )


def _check_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Refuse a call that the function's own signature does not take. One that says nothing of
    itself, or that passes on what it is given (`functools.wraps`), is not judged.

    Raises:
        TypeError: it takes no worker, or other arguments.
    """
    called = function.function if isinstance(function, WithArguments) else function
    if hasattr(called, "__signature__"):  # what it says, not what it takes
        return
    try:
        signature = inspect.signature(called, follow_wrapped=False)
    except (TypeError, ValueError, NameError):  # there is none, or its annotations have no values
        return
    try:
        signature.bind("worker", *args, **kwargs)
    except TypeError as error:
        name = getattr(called, "__name__", _name(called))
        arguments = [*map(abbreviated, args), *(f"{n}={abbreviated(v)}" for n, v in kwargs.items())]
        fix = "args= and kwargs= have what it takes behind the worker"
        if not signature.parameters:
            fix = f"let it take the worker first: def {name}(worker)"
        raise TypeError(
            f"a worker cannot call {name}({', '.join(['worker', *arguments])}): {error}. It is "
            f"{name}{textwrap.shorten(str(signature), SIGNATURE_MAX)}{_place(called)}. Applied: "
            f"no. To fix: {fix}"
        ) from error


def _place(called: Any) -> str:
    """Definition of a function, as " at file:line"; empty where that is not known."""
    if isinstance(called, functools.partial):
        called = _unwrapped(called)
    if inspect.isclass(called):
        called = called.__init__
    elif not inspect.isroutine(called):
        called = type(called).__call__
    code = getattr(getattr(called, "__func__", called), "__code__", None)
    return f" at {code.co_filename}:{code.co_firstlineno}" if code is not None else ""


class ForServers(NamedTuple):
    """What servers are started with: their policy, and the code that they may run."""

    consistency: ConsistencySpec
    code: bytes
    """Classes and functions in cloudpickle; empty for none."""


def for_servers(
    consistency: Policy,
    workers: int,
    *,
    rules: Sequence[Callable[..., Any]],
) -> ForServers:
    """Check a policy and what is registered, and make them ready to travel.

    The policy's own class, and the class of a rule or a function in its fields, need not be
    registered.

    Args:
        workers: how many there will be; 0: not known.
    Raises:
        TypeError: `consistency` is no policy, one of the others cannot be registered or cannot be
            pickled; the text says which and why.
        ValueError: the policy cannot work with this many workers, or with its options.
    """
    described, registry = checked(consistency, workers, rules)
    return ForServers(described, _pack(registry.things))


def checked(
    consistency: Policy,
    workers: int,
    rules: Sequence[Callable[..., Any]],
) -> tuple[ConsistencySpec, Registered]:
    """A policy as it travels, and all that servers may run with it; raises as `for_servers`."""
    described = spec(consistency)
    registry = registered(rules, consistency)
    build(described, registry.all)
    if workers:
        consistency.check(workers)
    return described, registry


def _pack(things: Sequence[Any]) -> bytes:
    if not things:
        return b""
    try:
        packed: bytes = cloudpickle.dumps(things)
    except Exception as error:
        names = ", ".join(each.__qualname__ for each in things)
        raise TypeError(f"{names} cannot be sent to the servers: {error}") from error
    return packed


def imports(function: Callable[..., Any]) -> tuple[str, ...]:
    """What a training function will import that takes seconds, as far as its module shows it:
    torch, if this process has it and the function's module names it."""
    called = _unwrapped(function)
    plain = inspect.unwrap(getattr(called, "__func__", called))
    if not inspect.isfunction(plain) or "torch" not in sys.modules:
        return ()
    named = "torch" in plain.__code__.co_names
    objects = [*plain.__globals__.values(), *(cell.cell_contents for cell in _full_cells(plain))]
    owners = (each.__name__ if inspect.ismodule(each) else _module(each) for each in objects)
    return ("torch",) if named or any(each.split(".")[0] == "torch" for each in owners) else ()


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """What is called in the end."""
    while isinstance(function, WithArguments | functools.partial):
        function = function.function if isinstance(function, WithArguments) else function.func
    return function


def _full_cells(function: FunctionType) -> Iterator[CellType]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # empty
            _ = cell.cell_contents
            yield cell


def _module(thing: Any) -> str:
    owner = thing if isinstance(thing, type) or inspect.isroutine(thing) else type(thing)
    module = getattr(owner, "__module__", "")
    return module if isinstance(module, str) else ""


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _parts(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """What travels along with the function, each with a name for a message."""
    yield from ((f"argument {i}", value) for i, value in enumerate(args))
    yield from ((f"argument {name!r}", value) for name, value in kwargs.items())
    owner = getattr(function, "__self__", None)
    if owner is not None:
        yield "the object that the method belongs to", owner
    if isinstance(function, WithArguments):
        function = function.function
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if inspect.isfunction(plain):
        names = plain.__code__.co_varnames[: plain.__code__.co_argcount]
        last = zip(reversed(names), reversed(plain.__defaults__ or ()), strict=False)
        defaults = {**dict(last), **(plain.__kwdefaults__ or {})}
        yield from ((f"the default value of {name!r}", value) for name, value in defaults.items())
        captured = inspect.getclosurevars(plain)
        yield from ((f"captured {name!r}", value) for name, value in captured.nonlocals.items())
        if plain.__module__ == "__main__" or "<locals>" in plain.__qualname__:
            yield from ((f"global {name!r}", value) for name, value in captured.globals.items())


def _why_not(value: Any, on_ray: bool) -> str | None:
    try:
        _dumps(value, on_ray)
    except Exception as error:
        return str(error)
    return None
