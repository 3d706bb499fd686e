"""The tests of a conformance suite as one test, for suites that run over many subjects."""

from __future__ import annotations

import pytest


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
            # pytest.raises raises `Failed`, which is no `Exception`; so does the limit of the
            # time, behind which the rest would run without one.
            failed = isinstance(error, Exception | pytest.fail.Exception)
            if not failed or str(error).startswith("Timeout"):
                raise
            failures.append(error)
    if failures:
        raise BaseExceptionGroup(f"{len(failures)} tests of {kind.__name__} failed", failures)
