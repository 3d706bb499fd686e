"""The tests of a conformance suite as one test, for suites that run over many subjects."""

from __future__ import annotations


def passes(suite: object) -> None:
    """Run every test of a suite, in an instance of its own, as pytest does."""
    for name in dir(suite):
        if name.startswith("test_"):
            alone = type(suite)()
            vars(alone).update(vars(suite))
            try:
                getattr(alone, name)()
            except BaseException as error:
                error.add_note(f"in {name} of {type(suite).__name__}")
                raise
