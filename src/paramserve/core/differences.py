"""In what two descriptions differ, in words for an error: only that, and in one line."""

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
    known: str
    came: str


def of_names(known: Sequence[str], came: Sequence[str]) -> Difference:
    """The names that only one side has, or else the first place where their order differs."""
    only_known = [name for name in known if name not in set(came)]
    only_came = [name for name in came if name not in set(known)]
    if bool(only_known) != bool(only_came) and len(known) != len(came):
        return Difference(
            "the number of names", _counted(known, only_known), _counted(came, only_came)
        )
    if only_known or only_came:
        common = len(known) - len(only_known)
        return Difference("the names", _listed(only_known, common), _listed(only_came, common))
    at = next((i for i, (a, b) in enumerate(zip(known, came, strict=False)) if a != b), None)
    if at is None:
        return Difference("the number of names", str(len(known)), str(len(came)))
    return Difference("the order of names", f"{known[at]!r} at place {at}", repr(came[at]))


def of_pieces(known: Sequence[Piece], came: Sequence[Piece]) -> Difference:
    """The tensors that only one side has, or that stand elsewhere; and those of another shape."""
    sides = {each.name: each for each in came}
    pairs = [(each, sides[each.name]) for each in known if each.name in sides]
    shapes = _of_shapes([(a, b) for a, b in pairs if a.shape != b.shape])
    if [each.name for each in known] == [each.name for each in came]:
        return shapes
    names = of_names([each.name for each in known], [each.name for each in came])
    if not shapes.known:
        return names
    return Difference(
        f"{names.what} and shapes",
        f"{names.known} and {shapes.known}",
        f"{names.came} and {shapes.came}",
    )


def _of_shapes(differing: Sequence[tuple[Piece, Piece]]) -> Difference:
    shown = [(a.name, list(a.shape), list(b.shape)) for a, b in differing[:SHOWN_MAX]]
    more = len(differing) - len(shown)
    tail = f" and {more} more" if more else ""
    return Difference(
        "the shapes",
        ", ".join(f"{name!r} {shape}" for name, shape, _ in shown) + tail,
        ", ".join(f"{name!r} {shape}" for name, _, shape in shown) + tail,
    )


def of_rules(known: RuleSpec | None, came: RuleSpec | None) -> Difference:
    """Two rules, with the options that differ."""
    return Difference("the rule", *_of_calls(known, came, "no rule"))


def of_policies(known: ConsistencySpec | None, came: ConsistencySpec) -> Difference:
    """Two policies, with the options that differ; None is the cluster's."""
    return Difference("the policy", *_of_calls(known, came, "the cluster's policy"))


def of_codecs(what: str, known: CodecSpec | None, came: CodecSpec | None) -> Difference:
    """Two codecs, with the options that differ."""
    return Difference(what, *_of_calls(known, came, "none"))


def of_tables(known: TableSpec | None, came: TableSpec | None) -> Difference:
    """Two tables, by the options that differ."""
    old, new = _of_options(_options_of(known), _options_of(came))
    if known is not None and came is not None and bool(known.labels) != bool(came.labels):
        old, new = (_said(text, side.labels) for text, side in ((old, known), (new, came)))
    return Difference("the options", old, new)


def _said(options: str, labels: int) -> str:
    """Options with labels as a user gives them: their number is a default that no call has."""
    return options.replace(f"labels={labels}", f"labels={labels > 0}")


def _of_calls(
    known: RuleSpec | ConsistencySpec | CodecSpec | None,
    came: RuleSpec | ConsistencySpec | CodecSpec | None,
    nothing: str,
) -> tuple[str, str]:
    if known is None or came is None:
        one = known if known is not None else came
        whole = f"{one.name}({_options(one.options, list(one.options))})" if one is not None else ""
        return (nothing, whole) if known is None else (whole, nothing)
    if known.name != came.name:
        return known.name, came.name
    old, new = _of_options(known.options, came.options)
    return f"{known.name}({old})", f"{came.name}({new})"


def _options_of(table: TableSpec | None) -> dict[str, Any]:
    if table is None:
        return {}
    return {**structs.asdict(table), "options": None, **table.options.options}


def _of_options(known: Mapping[str, Any], came: Mapping[str, Any]) -> tuple[str, str]:
    names = [name for name in {**known, **came} if known.get(name) != came.get(name)]
    return _options(known, names) or "the defaults", _options(came, names) or "the defaults"


def _options(given: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name}={_value(given[name])}" for name in names if name in given)


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _counted(names: Sequence[str], only: Sequence[str]) -> str:
    """How many names one side has, and those that the other one lacks."""
    return f"{len(names)} ({_listed(only, 0)} besides these)" if only else str(len(names))


def _listed(names: Sequence[str], common: int) -> str:
    """Names that one side has, beside those that both have."""
    told = [", ".join(map(repr, names[:SHOWN_MAX]))] if names else []
    if len(names) > SHOWN_MAX:
        told.append(f"{len(names) - SHOWN_MAX} more")
    if common:
        told.append(f"{common} that both have")
    return " and ".join(told)
