"""Differences between two descriptions, in words for an error: only those, and in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import structs

from paramserve.config import CodecSpec, ConsistencySpec, RuleSpec
from paramserve.messages import Piece, TableSpec

SHOWN_MAX = 3
"""Names in one list."""


class Difference(NamedTuple):
    """What differs, how it is known, and what came now."""

    what: str
    existing: str
    incoming: str


def of_names(existing: Sequence[str], incoming: Sequence[str]) -> Difference:
    """The names that only one side has, or else the first place where their order differs."""
    only_old = [name for name in existing if name not in set(incoming)]
    only_new = [name for name in incoming if name not in set(existing)]
    if bool(only_old) != bool(only_new) and len(existing) != len(incoming):
        return Difference(
            "the number of names",
            _counted(existing, only_old),
            _counted(incoming, only_new),
        )
    if only_old or only_new:
        common = len(existing) - len(only_old)
        return Difference("the names", _listed(only_old, common), _listed(only_new, common))
    at = next((i for i, (a, b) in enumerate(zip(existing, incoming, strict=False)) if a != b), None)
    if at is None:
        return Difference("the number of names", str(len(existing)), str(len(incoming)))
    return Difference("the order of names", f"{existing[at]!r} at place {at}", repr(incoming[at]))


def of_pieces(existing: Sequence[Piece], incoming: Sequence[Piece]) -> Difference:
    """The tensors that only one side has, or that stand elsewhere; and those of another shape."""
    sides = {each.name: each for each in incoming}
    pairs = [(each, sides[each.name]) for each in existing if each.name in sides]
    shapes = _of_shapes([(a, b) for a, b in pairs if a.shape != b.shape])
    if [each.name for each in existing] == [each.name for each in incoming]:
        return shapes
    names = of_names([each.name for each in existing], [each.name for each in incoming])
    if not shapes.existing:
        return names
    return Difference(
        f"{names.what} and shapes",
        f"{names.existing} and {shapes.existing}",
        f"{names.incoming} and {shapes.incoming}",
    )


def _of_shapes(differing: Sequence[tuple[Piece, Piece]]) -> Difference:
    examples = [(a.name, list(a.shape), list(b.shape)) for a, b in differing[:SHOWN_MAX]]
    more = len(differing) - len(examples)
    tail = f" and {more} more" if more else ""
    return Difference(
        "the shapes",
        ", ".join(f"{name!r} {shape}" for name, shape, _ in examples) + tail,
        ", ".join(f"{name!r} {shape}" for name, _, shape in examples) + tail,
    )


def of_rules(existing: RuleSpec | None, incoming: RuleSpec | None) -> Difference:
    """Two rules, with the options that differ."""
    return Difference("the rule", *_of_calls(existing, incoming, "no rule"))


def of_policies(existing: ConsistencySpec | None, incoming: ConsistencySpec) -> Difference:
    """Two policies, with the options that differ; None is the cluster's."""
    return Difference("the policy", *_of_calls(existing, incoming, "the cluster's policy"))


def of_codecs(what: str, existing: CodecSpec | None, incoming: CodecSpec | None) -> Difference:
    """Two codecs, with the options that differ."""
    return Difference(what, *_of_calls(existing, incoming, "none"))


def of_tables(existing: TableSpec | None, incoming: TableSpec | None) -> Difference:
    """Two tables, by the options that differ."""
    old, new = _of_options(_options_of(existing), _options_of(incoming))
    if (
        existing is not None
        and incoming is not None
        and bool(existing.labels) != bool(incoming.labels)
    ):
        old, new = (
            _with_labels(text, side.labels) for text, side in ((old, existing), (new, incoming))
        )
    return Difference("the options", old, new)


def _with_labels(options: str, labels: int) -> str:
    """Options with labels as a user gives them: their number is a default that no call has."""
    return options.replace(f"labels={labels}", f"labels={labels > 0}")


def _of_calls(
    existing: RuleSpec | ConsistencySpec | CodecSpec | None,
    incoming: RuleSpec | ConsistencySpec | CodecSpec | None,
    nothing: str,
) -> tuple[str, str]:
    if existing is None or incoming is None:
        one = existing if existing is not None else incoming
        whole = f"{one.name}({_options(one.options, list(one.options))})" if one is not None else ""
        return (nothing, whole) if existing is None else (whole, nothing)
    if existing.name != incoming.name:
        return existing.name, incoming.name
    old, new = _of_options(existing.options, incoming.options)
    return f"{existing.name}({old})", f"{incoming.name}({new})"


def _options_of(table: TableSpec | None) -> dict[str, Any]:
    if table is None:
        return {}
    return {**structs.asdict(table), "options": None, **table.options.options}


def _of_options(existing: Mapping[str, Any], incoming: Mapping[str, Any]) -> tuple[str, str]:
    names = [name for name in {**existing, **incoming} if existing.get(name) != incoming.get(name)]
    return _options(existing, names) or "the defaults", _options(incoming, names) or "the defaults"


def _options(values: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name}={_value(values[name])}" for name in names if name in values)


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _counted(names: Sequence[str], only: Sequence[str]) -> str:
    """How many names one side has, and those that the other one lacks."""
    return f"{len(names)} ({_listed(only, 0)} besides these)" if only else str(len(names))


def _listed(names: Sequence[str], common: int) -> str:
    """Names that one side has, beside those that both have."""
    parts = [", ".join(map(repr, names[:SHOWN_MAX]))] if names else []
    if len(names) > SHOWN_MAX:
        parts.append(f"{len(names) - SHOWN_MAX} more")
    if common:
        parts.append(f"{common} that both have")
    return " and ".join(parts)
