"""What an error tells of two descriptions that differ: the difference, in a user's words."""

from __future__ import annotations

from tests.suites import each_case

from paramserve.config import ConsistencySpec, RuleSpec
from paramserve.core import differences
from paramserve.core.differences import Difference
from paramserve.messages import Piece, TableSpec

A, B, C = Piece("a", (3,)), Piece("b", (2, 2)), Piece("c", ())


def pieces(*names: str) -> tuple[Piece, ...]:
    return tuple(Piece(name, (1,)) for name in names)


@each_case(
    ("known", "came", "told"),
    [
        ((A, B), (A, Piece("b", (4,))), ("the shapes", "'b' [2, 2]", "'b' [4]")),
        ((A, B), (A, C), ("the names", "'b' and 1 that both have", "'c' and 1 that both have")),
        ((A,), (A, B), ("the number of names", "1", "2 ('b' besides these)")),
        ((A, B), (B,), ("the number of names", "2 ('a' besides these)", "1")),
        (
            (A, B),
            (Piece("a", (4,)), C),
            (
                "the names and shapes",
                "'b' and 1 that both have and 'a' [3]",
                "'c' and 1 that both have and 'a' [4]",
            ),
        ),
        ((A, B), (B, A), ("the order of names", "'a' at place 0", "'b'")),
        ((A,), (A, A), ("the number of names", "1", "2")),
        (
            pieces(*"uvwxyz"),
            (A,),
            ("the names", "'u', 'v', 'w' and 3 more", "'a'"),
        ),
    ],
)
def test_tensors(
    known: tuple[Piece, ...], came: tuple[Piece, ...], told: tuple[str, str, str]
) -> None:
    assert differences.of_pieces(known, came) == Difference(*told)


def test_rules_by_the_options_that_differ() -> None:
    slow, fast = (RuleSpec("SGD", {"lr": lr, "momentum": 0.9}) for lr in (0.1, 0.2))
    assert differences.of_rules(slow, fast)[1:] == ("SGD(lr=0.1)", "SGD(lr=0.2)")
    assert differences.of_rules(None, RuleSpec("Adam"))[1:] == ("no rule", "Adam()")


def test_policies_and_tables_by_the_options_that_differ() -> None:
    mean = ConsistencySpec("Sync", {"reduce": "mean", "backup": 0})
    total = ConsistencySpec("Sync", {"reduce": "sum", "backup": 0})
    assert differences.of_policies(mean, total)[1:] == ("Sync(reduce='mean')", "Sync(reduce='sum')")
    assert differences.of_policies(None, total)[1:] == (
        "the cluster's policy",
        "Sync(reduce='sum', backup=0)",
    )
    small = TableSpec(8, "float32", 0, RuleSpec("TableOptions", {"init": "Zeros"}))
    large = TableSpec(16, "float32", 0, RuleSpec("TableOptions", {"init": "Normal", "ttl": "TTL"}))
    found = differences.of_tables(small, large)
    assert found[1:] == ("dim=8, init='Zeros'", "dim=16, init='Normal', ttl='TTL'")
