"""Many small tests as one: the cases of a subject, or a conformance suite that runs over many
subjects. To collect a test, to set it up and to report it costs more than most cases need."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

Test = Callable[..., None]


def each_case(
    names: str | Sequence[str],
    cases: Iterable[Any],
    *,
    ids: Iterable[str] | Callable[[Any], Any] | None = None,
) -> Callable[[Test], Test]:
    """Run all cases in one test, with the arguments of `pytest.mark.parametrize`.

    For cases of a few milliseconds. Every case runs, and each that fails is named in a note. Cases
    share their fixtures, but for `monkeypatch`, `tmp_path`, `capsys` and `caplog`, of which each
    has its own: no other fixture of the test may have put something there for it.
    """
    names = [each.strip() for each in names.split(",")] if isinstance(names, str) else list(names)
    rows = list(_rows(names, cases, ids))
    if not rows:
        raise ValueError("no cases: the test could not fail")

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(*args: Any, **fixtures: Any) -> None:
            failures: list[BaseException] = []
            for number, (name, values) in enumerate(rows):
                try:
                    with _own(fixtures, number) as own:
                        test(*args, **own, **values)
                except BaseException as error:
                    error.add_note(f"in case {number}: {name()}")
                    _keep(error, failures)
            if len(failures) == 1:
                raise failures[0]
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(rows)} cases failed", failures)

        signature = inspect.signature(test)
        fixtures = [each for each in signature.parameters.values() if each.name not in names]
        run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return run

    return decorate


def _rows(
    names: Sequence[str], cases: Iterable[Any], ids: Any
) -> Iterator[tuple[Callable[[], str], dict[str, Any]]]:
    """Yield the name and the values of each case."""
    texts = iter(()) if ids is None or callable(ids) else iter(ids)
    text_of = ids if callable(ids) else lambda value: None
    for case in cases:
        text = next(texts, None)
        if isinstance(case, type(pytest.param())):
            if case.marks:
                raise ValueError(f"a case with marks needs a test of its own: {case}")
            text, values = case.id or text, case.values
        else:
            values = (case,) if len(names) == 1 else tuple(case)
        by_name = dict(zip(names, values, strict=True))

        def name(text: Any = text, by_name: dict[str, Any] = by_name) -> str:
            shown = (text_of(value) or f"{name}={value!r}" for name, value in by_name.items())
            return str(text or ", ".join(shown))[:400]

        yield name, by_name


@contextlib.contextmanager
def _own(fixtures: Mapping[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """The fixtures of a case: what others before it patched, wrote, printed or logged is gone."""
    own = dict(fixtures)
    with pytest.MonkeyPatch.context() as patch:
        if "monkeypatch" in own:
            own["monkeypatch"] = patch
        if "tmp_path" in own:
            own["tmp_path"] /= str(number)
            own["tmp_path"].mkdir()
        if "capsys" in own:
            own["capsys"].readouterr()
        if "caplog" in own:
            own["caplog"].clear()
        yield own


def passes(suite: object) -> None:
    """Run every test of a suite, in an instance of its own, as pytest does.

    Raises:
        ExceptionGroup: each test that failed; the others have run, too.
        BaseException: what ends pytest or skips a test, at once.
    """
    kind = type(suite)
    failures: list[BaseException] = []
    for name in (each for each in dir(suite) if each.startswith("test_")):
        alone = kind()
        vars(alone).update(vars(suite))
        try:
            getattr(alone, name)()
        except BaseException as error:
            error.add_note(f"in {name} of {kind.__name__}")
            _keep(error, failures)
    if failures:
        raise BaseExceptionGroup(f"{len(failures)} tests of {kind.__name__} failed", failures)


def _keep(error: BaseException, failures: list[BaseException]) -> None:
    """Put a failure to the others, and raise what is none.

    `pytest.raises` raises `Failed`, which is no `Exception`; so does the limit of the time, behind
    which the rest would run without one.
    """
    failed = isinstance(error, Exception | pytest.fail.Exception | BaseExceptionGroup)
    if not failed or str(error).startswith("Timeout"):
        raise error
    failures.append(error)
