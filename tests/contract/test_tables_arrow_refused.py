"""Arrow data that do not fit a table: what is said, and what was applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.contract.arrow_tables import DIM, frame, lists, nan_at, table_of, train
from tests.contract.conftest import MakeCluster
from tests.needs import needs

import paramserve as ps
from paramserve.client import arrow
from paramserve.errors import DtypeMismatch, NonFinite, ParamServeError, ShapeMismatch, TableFull

pa = needs("pyarrow")


def with_null_in_row() -> Any:
    return pa.array([[1.0] * DIM, [1.0] * (DIM - 1) + [None]], pa.list_(pa.float32(), DIM))


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no key": (lambda: frame().drop_columns(["key"]), ValueError, "column 'key' is not there"),
    "no value": (lambda: frame().select(["key"]), ValueError, "'value' is not there"),
    "two": (lambda: frame().append_column("key", frame()["key"]), ValueError, "'key' is 2 times"),
    "dim": (lambda: frame(values=lists(np.ones((2, 4)))), ShapeMismatch, "4 elements.* dim is 5"),
    "lengths": (
        lambda: frame(values=pa.array([[1.0] * DIM, [1.0]])), ShapeMismatch, "a row of 1 elements"
    ),
    "float keys": (
        lambda: frame(pa.array([1.0, 2.0])), DtypeMismatch, "'key'.* is double, not integers"
    ),
    "text keys": (lambda: frame(pa.array(["a", "b"])), DtypeMismatch, "'key'.* is string"),
    "large key": (
        lambda: frame(pa.array([1, 2**63], pa.uint64())), DtypeMismatch, "holds 9223372036854775808"
    ),
    "integers": (
        lambda: frame(values=lists(np.ones((2, DIM), np.int32))), DtypeMismatch, "'value'.* int32"
    ),
    "no lists": (lambda: frame(values=pa.array([1.0, 2.0])), DtypeMismatch, "'value'.* is double"),
    "null key": (lambda: frame(pa.array([1, None])), DtypeMismatch, "'key'.* holds 1 nulls"),
    "null row": (
        lambda: frame(values=pa.array([None, [1.0] * DIM], pa.list_(pa.float32(), DIM))),
        DtypeMismatch,
        "'value'.* holds 1 nulls",
    ),
    "null in row": (
        lambda: frame(values=with_null_in_row()), DtypeMismatch, "'value'.* rows with 1 nulls"
    ),
    "NaN": (lambda: frame([7, 8], nan_at(1)), NonFinite, "row of key 8 holds nan"),
    "Inf": (lambda: frame(values=lists(np.full((2, DIM), 1e39))), NonFinite, "key 1 holds inf"),
    "count alone": (
        lambda: frame(count=pa.array([1, 2])), ValueError, "columns state, count.* there are count"
    ),
    "width": (
        lambda: frame(count=pa.array([1, 2]), state=lists(np.ones((2, DIM)))),
        ShapeMismatch,
        "'state'.* has 5 elements.* width of the rule's state is 10",
    ),
    "negative count": (
        lambda: frame(count=pa.array([1, -2]), state=lists(np.ones((2, 2 * DIM)))),
        DtypeMismatch,
        "'count'.* holds -2",
    ),
    "NaN in state": (
        lambda: frame(count=pa.array([1, 2]), state=lists(np.full((2, 2 * DIM), np.nan))),
        NonFinite,
        "state of key 1 holds NaN",
    ),
    "format": (
        lambda: frame().replace_schema_metadata({"paramserve": '{"format": 2}'}),
        ValueError,
        "reads format 1",
    ),
    "a number": (lambda: 7, TypeError, "not int"),
    "a dict": (lambda: {"key": [1]}, TypeError, "element 0 of the iterable is str"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_import_of_what_does_not_fit_is_refused_and_nothing_applied(
    make_cluster: MakeCluster, name: str
) -> None:
    table = table_of(make_cluster())
    make, error, text = REFUSED[name]
    with pytest.raises(error, match=text) as refused:
        table.from_arrow(make())
    if isinstance(refused.value, ParamServeError):
        assert refused.value.applied == "no"
    assert len(table) == 0


def test_import_of_values_beyond_16_bits_is_refused(make_cluster: MakeCluster) -> None:
    table = table_of(make_cluster(), dtype="float16")
    with pytest.raises(NonFinite, match=r"key 1 holds 65520\.0, which is no finite float16"):
        table.from_arrow(frame(values=lists(np.full((2, DIM), 65520.0))))
    table.from_arrow(frame(values=lists(np.full((2, DIM), 65519.0))))
    assert (table.pull([1, 2]) == 65504.0).all()


def test_import_of_another_rules_state_is_refused_and_its_values_are_taken(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster()
    table = table_of(cluster)
    train(table)
    table.to_parquet(tmp_path / "users.parquet", state=True)
    other = table.client.table("other", dim=DIM, rule=ps.FTRL(alpha=0.1))
    with pytest.raises(ValueError, match="the state is that of the rule Adam"):
        other.from_parquet(tmp_path / "users.parquet")
    assert len(other) == 0
    assert other.from_parquet(tmp_path / "users.parquet", state=False) == len(table)
    keys = table.keys()
    assert (other.pull(keys, create=False) == table.pull(keys)).all()


def test_import_with_state_that_is_not_there_is_refused(make_cluster: MakeCluster) -> None:
    table = table_of(make_cluster())
    with pytest.raises(ValueError, match="of these columns there are none"):
        table.from_arrow(frame(), state=True)
    assert len(table) == 0


def test_import_of_a_stream_that_breaks_says_what_was_put(make_cluster: MakeCluster) -> None:
    table = table_of(make_cluster(servers=2))
    batches = frame([7, 8]).to_batches() + frame([9, 10], nan_at(0)).to_batches()
    with pytest.raises(NonFinite, match=r"key 9 holds nan.*; the 2 rows before") as refused:
        table.from_arrow(iter(batches))
    assert refused.value.applied == "yes"
    assert sorted(table.keys()) == [7, 8]
    other = frame([11], pa.array([[1.0]])).to_batches()
    with pytest.raises(DtypeMismatch, match=r"'value'.* list<.*>, and was .* before; the 2 rows"):
        table.from_arrow(frame([7, 8]).to_batches() + other)


def test_import_of_a_table_that_is_bad_at_its_end_applies_nothing(
    make_cluster: MakeCluster,
) -> None:
    table = table_of(make_cluster(servers=2))
    source = pa.concat_tables([frame([7, 8]), frame([9, 10], nan_at(0))])
    with pytest.raises(NonFinite, match="key 9 holds nan") as refused:
        table.from_arrow(source)
    assert refused.value.applied == "no"
    assert len(table) == 0


def test_import_of_an_iterator_that_raises_notes_what_was_put(make_cluster: MakeCluster) -> None:
    table = table_of(make_cluster())

    def broken() -> Iterator[Any]:
        yield from frame([7, 8]).to_batches()
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone") as raised:
        table.from_arrow(broken())
    assert raised.value.__notes__ == ["paramserve: 2 rows had been put into Table('users', dim=5)"]


def test_import_into_a_full_table_says_so(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow, "ROWS_MAX", 100)
    table = table_of(make_cluster(), max_bytes=1 << 20)
    with pytest.raises(TableFull, match=r"rows before these have been put") as refused:
        table.from_arrow(frame(range(100_000)))
    assert refused.value.applied == "yes"
    assert f"the {len(table)} rows" in str(refused.value)
