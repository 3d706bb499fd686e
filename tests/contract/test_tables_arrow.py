"""Tables to Arrow and Parquet and back: what is written, and what is taken over."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.contract.arrow_tables import DIM, KEYS, frame, lists, nan_at, rows_of, table_of, train
from tests.contract.conftest import MakeCluster
from tests.needs import needs
from tests.suites import each_case

import paramserve as ps
from paramserve.client import arrow
from paramserve.errors import DtypeMismatch, NonFinite, ParamServeError, ShapeMismatch, TableFull

pytestmark = pytest.mark.usefixtures("tables_ready")

pa = needs("pyarrow")
pq = needs("pyarrow.parquet")


# --- what is written -----------------------------------------------------------------------------


def test_parquet_file_holds_rows_and_says_what_they_are(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    table = table_of(make_cluster(servers=2), seed=3)
    train(table)
    path = tmp_path / "users.parquet"
    assert table.to_parquet(path) == len(table)
    read = pq.read_table(path)
    assert read.schema.field("key").type == pa.int64()
    assert read.schema.field("value").type == pa.list_(pa.float32(), DIM)
    assert read.column_names == ["key", "value"]
    keys = read["key"].to_numpy()
    assert sorted(keys) == sorted(table.keys())
    values = np.array(read["value"].to_pylist(), np.float32)
    assert values.tobytes() == table.pull(keys).tobytes()
    told = json.loads(read.schema.metadata[b"paramserve"])
    assert {name: told[name] for name in ("format", "table", "dim", "dtype", "seed")} == {
        "format": 1, "table": "users", "dim": DIM, "dtype": "float32", "seed": 3,
    }  # fmt: skip
    assert (told["rule"]["name"], told["rule"]["options"]["lr"]) == ("Adam", 0.1)
    assert [each.name for each in tmp_path.iterdir()] == ["users.parquet"]


def test_parquet_file_is_read_by_pandas(make_cluster: MakeCluster, tmp_path: Path) -> None:
    pandas = needs("pandas")
    table = table_of(make_cluster())
    train(table)
    table.to_parquet(tmp_path / "users.parquet")
    read = pandas.read_parquet(tmp_path / "users.parquet")
    found = table.pull(read["key"].to_numpy())
    assert np.stack(read["value"].to_list()).tobytes() == found.tobytes()
    assert table.from_arrow(read.assign(value=read["value"] * 2)) == len(read)  # frames stream
    assert (table.pull(read["key"].to_numpy()) == 2 * found).all()


@pytest.mark.parametrize("rule", [ps.Adam(lr=0.1), ps.RowAdagrad(lr=0.1), ps.SGD(lr=0.1)], ids=repr)
def test_to_arrow_with_state_has_its_width_and_the_counts(
    make_cluster: MakeCluster, rule: Any
) -> None:
    table = table_of(make_cluster(servers=2), rule=rule, dtype="bfloat16")
    train(table)
    read = table.to_arrow(state=True)
    width = {"Adam": 2 * DIM, "RowAdagrad": 1, "SGD": 0}[rule.name]
    assert read.column_names == ["key", "value", *["state"] * (width > 0), "count"]
    assert width == 0 or read.schema.field("state").type == pa.list_(pa.float32(), width)
    assert read.schema.field("count").type == pa.uint32()
    found = rows_of(table)
    assert len(read) == len(found)
    for row in read.to_pylist():
        state = np.array(row.get("state", []), np.float32).tobytes()
        values = np.array(row["value"], np.float32).tobytes()
        assert (values, state, row["count"]) == found[row["key"]]


def test_last_use_goes_to_a_file_and_on_from_where_it_was(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    """Also where the clock begins at 0 again, and the rows in the file are in no order."""
    options: dict[str, Any] = {"evict": ps.TTL(4), "rule": ps.Adagrad(lr=0.1)}

    def day(servers: int) -> ps.Table:
        made: ps.Table = (
            make_cluster(servers=servers, workers=1).client(0).table("users", 5, **options)
        )
        return made

    def tick(table: ps.Table, clocks: int) -> None:
        for _ in range(clocks):
            table.client.tick("users").result()

    def keys(table: ps.Table) -> list[int]:
        return np.flatnonzero(table.contains(range(4))).tolist()

    first, path = day(2), tmp_path / "users.parquet"
    for key in (3, 1, 2, 0):
        first.push([key], np.ones((1, 5), np.float32)).result()
        tick(first, 2)
    first.to_parquet(path, state=True)
    read = first.to_arrow(state=True)
    assert read.column_names == ["key", "value", "state", "count", "idle_clocks"]
    idle = dict(zip(read["key"].to_pylist(), read["idle_clocks"].to_pylist(), strict=True))
    assert idle == {0: 2, 2: 4, 1: 6, 3: 8}, "of all that no request has removed yet"
    second = day(3)
    second.from_parquet(path)
    assert keys(second) == [0, 2]
    tick(second, 1)
    assert keys(second) == [0]
    second.put([0], np.ones((1, 5), np.float32), idle=[3])
    tick(second, 1)
    assert keys(second) == [0]
    tick(second, 1)
    assert keys(second) == []
    third = day(1)
    third.from_arrow(read.drop_columns(["idle_clocks"]))
    assert keys(third) == [0, 1, 2, 3], "as of files of before: they are used now"
    plain = make_cluster().client().table("plain", 5, rule=options["rule"])
    plain.from_arrow(read)
    assert "idle_clocks" not in plain.to_arrow(state=True).column_names
    for wrong in ([1.0], [1, 2]):
        with pytest.raises(ps.errors.ShapeMismatch, match="idle"):
            third.put([0], np.ones((1, 5), np.float32), idle=wrong)
    with pytest.raises(ValueError, match="below 0"):
        third.put([0], np.ones((1, 5), np.float32), idle=[-1])


def test_export_of_an_empty_table_is_taken_back(make_cluster: MakeCluster, tmp_path: Path) -> None:
    table = table_of(make_cluster(servers=2))
    assert table.to_parquet(tmp_path / "none.parquet", state=True) == 0
    assert table.to_arrow(state=True).num_rows == 0
    assert table.from_parquet(tmp_path / "none.parquet", state=True) == 0
    assert table.from_arrow([]) == 0
    assert len(table) == 0


def test_export_and_import_go_by_parts(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow, "PART_BYTES", 40 * (8 + 4 * 3 * DIM + 4))
    table = table_of(make_cluster(servers=2))
    table.put(np.arange(1000), np.random.default_rng(0).random((1000, DIM), np.float32))
    path = tmp_path / "users.parquet"
    assert table.to_parquet(path, state=True) == 1000
    assert 24 < pq.ParquetFile(path).num_row_groups <= 28
    before = rows_of(table)
    other = table_of(make_cluster(servers=3))
    sizes: list[int] = []
    put_rows = other.client._keyed.put

    def counted(block: Any, records: Any, timeout_s: float | None) -> None:
        sizes.append(records.keys.size)
        put_rows(block, records, timeout_s)

    monkeypatch.setattr(other.client._keyed, "put", counted)
    assert other.from_parquet(path) == other.from_arrow(table.to_arrow(state=True)) == 1000
    assert max(sizes) == 40
    assert rows_of(other) == before


# --- taken over ----------------------------------------------------------------------------------


@each_case("dtype", ["float32", "bfloat16", "float16"])
def test_import_with_state_goes_on_training_bit_by_bit_on_other_servers(
    make_cluster: MakeCluster, tmp_path: Path, dtype: str
) -> None:
    table = table_of(make_cluster("tcp", servers=2), dtype=dtype)
    train(table, seed=1)
    table.to_parquet(tmp_path / "users.parquet", state=True)
    other = table_of(make_cluster("unix", servers=3), dtype=dtype)
    assert other.from_parquet(tmp_path / "users.parquet") == len(table) == len(other)
    assert rows_of(other) == rows_of(table)
    more = np.append(KEYS, 99)
    train(table, more, seed=2)
    train(other, more, seed=2)
    assert rows_of(other) == rows_of(table)


def test_import_without_state_leaves_that_of_rows_which_are_there(
    make_cluster: MakeCluster,
) -> None:
    table = table_of(make_cluster())
    train(table)
    before = rows_of(table)
    whole = table.to_arrow(state=True)
    table.from_arrow(frame(KEYS))
    after = rows_of(table)
    assert {key: row[1:] for key, row in after.items()} == {
        key: row[1:] for key, row in before.items()
    }
    assert {row[0] for row in after.values()} == {np.ones(DIM, np.float32).tobytes()}
    table.from_arrow(whole)
    assert rows_of(table) == before


def one_batch_after_the_other(table: Any) -> Iterator[Any]:
    yield from table.to_batches(max_chunksize=3)


SOURCES: dict[str, Callable[[Any], Any]] = {
    "table": lambda table: table,
    "reader": lambda table: table.to_reader(max_chunksize=2),
    "iterator": one_batch_after_the_other,
    "list": lambda table: table.to_batches(),
    "batch": lambda table: table.combine_chunks().to_batches()[0],
    "slices": lambda table: table.slice(0, 3).to_batches() + table.slice(3).to_batches(),
    "order": lambda table: table.select(["count", "value", "state", "key"]),
    "more columns": lambda table: table.append_column("name", pa.nulls(len(table))),
}


def test_import_takes_every_kind_of_source(make_cluster: MakeCluster) -> None:
    table = table_of(make_cluster(servers=2))
    train(table)
    before, read = rows_of(table), table.to_arrow(state=True)
    for name, given in SOURCES.items():
        table.from_arrow(frame(KEYS))
        assert table.from_arrow(given(read)) == len(read), name
        assert rows_of(table) == before, name


@each_case(
    ("keys", "floats", "wide"),
    [
        (pa.int8(), "float16", "fixed"),
        (pa.uint64(), "float32", "list"),
        (pa.int32(), "float64", "large"),
    ],
    ids=str,
)
def test_import_converts_integers_floats_and_lists(
    make_cluster: MakeCluster, keys: Any, floats: str, wide: str
) -> None:
    table = table_of(make_cluster())
    rows = np.arange(3 * DIM).reshape(3, DIM).astype(floats)
    kind = {"list": pa.list_, "large": pa.large_list}.get(wide)
    values = lists(rows) if kind is None else lists(rows).cast(kind(pa.from_numpy_dtype(floats)))
    source = frame(pa.array([3, 4, 5], keys), values).slice(1)
    assert table.from_arrow(source) == 2
    assert (table.pull([4, 5]) == rows[1:]).all()
    assert table.keys().tolist() == [4, 5]


def test_import_of_equal_keys_the_last_counts(make_cluster: MakeCluster) -> None:
    table = table_of(make_cluster())
    rows = np.arange(4 * DIM, dtype=np.float32).reshape(4, DIM)
    table.from_arrow(frame([1, 2, 1, 1], lists(rows)).to_batches(max_chunksize=2))
    assert (table.pull([2, 1]) == rows[[1, 3]]).all()


# --- files ---------------------------------------------------------------------------------------


def test_export_that_fails_leaves_the_file_as_it_was(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of(make_cluster(servers=2))
    train(table)
    path = tmp_path / "users.parquet"
    table.to_parquet(path)
    before = path.read_bytes()
    scan = table.scan

    def breaks(*args: Any, **kwargs: Any) -> Iterator[Any]:
        yield next(scan(*args, **kwargs))
        raise RuntimeError("the line is cut")

    monkeypatch.setattr(table, "scan", breaks)
    with pytest.raises(RuntimeError, match="the line is cut"):
        table.to_parquet(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(RuntimeError):
        table.to_parquet(tmp_path / "new.parquet")
    assert list(tmp_path.iterdir()) == [path]


def test_export_takes_the_name_of_a_file_only_when_it_is_complete(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of(make_cluster())
    train(table)
    path = tmp_path / "users.parquet"
    path.write_bytes(b"old")
    scan, during = table.scan, []

    def looked_at(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for each in scan(*args, **kwargs):
            during.append(path.read_bytes())
            yield each

    monkeypatch.setattr(table, "scan", looked_at)
    link = tmp_path / "link.parquet"
    link.symlink_to(path)
    table.to_parquet(link)
    assert during == [b"old"]
    assert link.is_symlink()
    assert pq.read_table(path).num_rows == len(table)


def test_export_to_a_place_that_is_none_is_refused(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    table = table_of(make_cluster())
    with pytest.raises(IsADirectoryError):
        table.to_parquet(tmp_path)
    none = rf"^{tmp_path}/none.*No such file or directory.*Applied: no. To fix: "
    with pytest.raises(FileNotFoundError, match=none) as refused:
        table.to_parquet(tmp_path / "none" / "users.parquet")
    assert refused.value.errno == errno.ENOENT
    with pytest.raises(FileNotFoundError, match=none):
        table.from_parquet(tmp_path / "none.parquet")
    (tmp_path / "text").write_text("no parquet file")
    with pytest.raises(ValueError, match=rf"{tmp_path}/text is no Parquet file.*To fix: "):
        table.from_parquet(tmp_path / "text")


def test_export_without_pyarrow_names_the_extra(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of(make_cluster())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    calls: list[Callable[[], Any]] = [
        table.to_arrow,
        lambda: table.to_parquet(tmp_path / "users.parquet"),
        lambda: table.from_arrow([]),
        lambda: table.from_parquet(tmp_path / "users.parquet"),
    ]
    for call in calls:
        with pytest.raises(ParamServeError, match=r"pip install 'paramserve\[arrow\]'"):
            call()
    assert list(tmp_path.iterdir()) == []


FLAT = """
import resource, sys
import numpy as np
import paramserve as ps

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

path, dim, part, parts = sys.argv[1], 128, 10_000, 30
with ps.Cluster(servers=2) as cluster:
    client = cluster.client()
    table = client.table("users", dim=dim, rule=ps.SGD(lr=0.1))
    other = client.table("others", dim=dim, rule=ps.SGD(lr=0.1))
    random = np.random.default_rng(0)
    table.put(np.arange(part), random.random((part, dim), np.float32))
    table.to_parquet(path, state=True)
    other.from_parquet(path)
    before = peak()
    for number in range(1, parts):
        keys = np.arange(number * part, (number + 1) * part)
        table.put(keys, random.random((part, dim), np.float32))
    filled = peak()
    assert table.to_parquet(path, state=True) == part * parts
    exported = peak()
    assert other.from_parquet(path) == part * parts == len(other)
    keys = random.integers(0, part * parts, 1000)
    assert np.array_equal(other.pull(keys), table.pull(keys))
    print(before, filled - before, exported - before, peak() - before)
"""


@pytest.mark.slow
def test_export_and_import_of_a_large_table_need_flat_memory(tmp_path: Path) -> None:
    """In a process of its own, whose largest resident memory, in MB, is looked at."""
    path = tmp_path / "users.parquet"
    arguments = [sys.executable, "-c", FLAT, str(path)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    _, _, exported, imported = map(int, done.stdout.split())
    assert path.stat().st_size > 140 << 20
    assert exported < 80, done.stdout
    assert imported < 80, done.stdout


# --- refused --------------------------------------------------------------------------------------


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
    "boolean keys": (lambda: frame(pa.array([True, False])), DtypeMismatch, "'key'.* is bool"),
    "null text key": (lambda: frame(pa.array(["a", None])), DtypeMismatch, "'key'.* holds 1 nulls"),
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


def test_import_of_what_does_not_fit_is_refused_and_nothing_applied(
    make_cluster: MakeCluster,
) -> None:
    table = table_of(make_cluster())
    for name, (make, error, text) in REFUSED.items():
        with pytest.raises(error, match=text) as refused:
            table.from_arrow(make())
        if isinstance(refused.value, ParamServeError):
            assert refused.value.applied == "no", name
        assert len(table) == 0, name


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
    assert (other.pull(keys) == table.pull(keys)).all()


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
