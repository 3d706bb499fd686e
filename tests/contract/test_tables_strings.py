"""Tables take strings where they take keys, and keep them where they were told to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.conftest import MakeCluster
from tests.needs import needs
from tests.suites import each_case
from torch.utils.data import DataLoader

import paramserve as ps
from paramserve.client import labels
from paramserve.client.table import Table
from paramserve.core.table.options import TableOptions
from paramserve.pytorch.batches import ahead
from paramserve.pytorch.embedding import Embedding

pytestmark = pytest.mark.usefixtures("tables_ready")

NAMES = ["anna", "bo", "Zoë", "bo"]
DIM = 3


def users(client: Any, **options: Any) -> Table:
    made: Table = client.table("users", dim=DIM, rule=ps.SGD(lr=1.0), init=ps.Zeros(), **options)
    return made


def test_strings_are_the_keys_that_keys_of_gives(make_cluster: MakeCluster) -> None:
    client = make_cluster(servers=2).client()
    table, keys = users(client), ps.keys_of(NAMES)
    table.push(NAMES, np.ones((4, DIM), np.float32)).result()
    assert table.pull(keys)[:, 0].tolist() == [-1.0, -2.0, -1.0, -2.0]
    assert sorted(table.keys()) == sorted(set(keys.tolist()))
    table.put(["cy"], [[5.0] * DIM])
    assert table.pull("cy").tolist() == [5.0] * DIM
    table.prefetch(np.array(NAMES))
    client.push_tables([ps.TablePush(table, [["cy"], ["bo"]], np.ones((2, 1, DIM)))]).result()
    assert table.pull(NAMES)[:, 0].tolist() == [-1.0, -2.0, -1.0, -2.0], "as they were prefetched"
    assert table.pull([["cy", "bo"]])[0, :, 0].tolist() == [4.0, -3.0]
    assert table.pull(["nobody"]).tolist() == [[0.0] * DIM]
    assert len(table) == 4
    for wrong in (["a", None], [1, "a"]):
        with pytest.raises(TypeError, match="keys of table 'users'"):
            table.pull(wrong)


def test_arrow_data_may_have_strings_as_keys(make_cluster: MakeCluster) -> None:
    pa = needs("pyarrow")
    table = users(make_cluster().client())
    source = pa.table({"key": NAMES[:3], "value": [[float(i)] * DIM for i in range(3)]})
    assert table.from_arrow(source) == 3
    assert table.pull(NAMES[:3])[:, 0].tolist() == [0.0, 1.0, 2.0]
    assert table.from_arrow(needs("pandas").DataFrame({"key": ["bo"], "value": [[7.0] * DIM]})) == 1
    assert table.pull("bo").tolist() == [7.0] * DIM


# --- labels --------------------------------------------------------------------------------------


def use(table: Table, names: Sequence[str]) -> None:
    """Push gradients of 0 to the rows of these names."""
    table.push(names, np.zeros((len(names), table.dim), np.float32)).result()


def test_labels_are_kept_by_every_client_and_read_by_others(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(servers=2)
    first, second = cluster.client(), cluster.client()
    table, other = users(first, labels=True), users(second, labels=True)
    use(table, ["anna", "bo"])
    other.push(np.array(["cy", "bo"]), np.ones((2, DIM))).result()
    long = "é" * 60
    table.put([long, "日本"], np.ones((2, DIM)))
    keys = ps.keys_of(["cy", "anna", "bo", long, "日本", "nobody"])
    expected = ["cy", "anna", "bo", "é" * 48, "日本", ""]
    for reader in (table, other, cluster.client().table("users")):
        assert reader.labels(keys) == expected
    assert [each.name for each in first.tables()] == ["users"]
    assert table.labels([]) == []
    assert table.labels("anna") == ["anna"]


def test_labels_of_deleted_rows_go_and_come_again(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labels, "LOOK_KEYS", 4)
    cluster = make_cluster(servers=2)
    table, other = (users(cluster.client(), labels=True) for _ in range(2))
    use(table, NAMES), use(other, NAMES)
    assert table.contains([["anna", "cy"]]).tolist() == [[True, False]]
    assert table.delete(["anna", "cy", "anna"]) == 1
    keys = table.keys_of(["bo"]).tolist() + ps.keys_of(["anna"]).tolist()
    assert other.labels(keys) == ["bo", ""]
    assert table.contains("anna").tolist() is False
    use(table, ["anna"])
    assert other.labels(keys) == ["bo", "anna"]
    table.delete(keys)
    for _ in range(3):  # a client that did not delete it notices before long
        use(other, NAMES)
    assert table.labels(keys) == ["bo", "anna"]


def test_reads_leave_no_label(make_cluster: MakeCluster) -> None:
    client = make_cluster().client()
    table = users(client, labels=True)
    table.pull(["anna"])
    table.prefetch(["bo"])
    assert len(client.table("users (labels)")) == 0
    assert table.keys_of(["cy"]).tolist() == ps.keys_of(["cy"]).tolist()
    assert table.labels(["anna", "bo", "cy"]) == ["", "", "cy"]


def test_modules_take_strings_as_loaders_hand_them_out(make_cluster: MakeCluster) -> None:
    client = make_cluster().client()
    table = users(client, labels=True)
    model = Embedding(table)

    def rows_of(names: list[str]) -> int:
        """How many rows a loop over a `DataLoader` of strings reads ahead and then."""
        loader = DataLoader(names, batch_size=2)
        read = ahead(loader, client, lambda batch: {model: batch}, lambda batch: batch)
        return sum(len(model(batch)) for batch in read)

    assert rows_of(["anna", "bo", "bo", "cy"]) == 4
    model.eval()
    assert rows_of(["dan", "eve"]) == 2
    assert table.labels(["anna", "bo", "cy", "dan", "eve"]) == ["anna", "bo", "cy", "", ""]


def test_label_is_sent_once(make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    client = make_cluster().client()
    table, sent = users(client, labels=True), []
    put = Table.put
    monkeypatch.setattr(Table, "put", lambda *given: (sent.append(given[1].size), put(*given))[1])
    monkeypatch.setattr(labels, "PUT_ROWS", 64)
    many = [f"user_{number}" for number in range(100)]
    for _ in range(3):
        use(table, [*many, "user_7"])
    use(table, ["user_3", "anna"])
    assert sent == [64, 36, 1]
    monkeypatch.setattr(labels, "SENT_MAX", 102)
    use(table, ["bo", "cy"])  # too many to remember
    use(table, ["anna", "bo"])
    assert sent == [64, 36, 1, 2, 1]
    assert table.labels(many) == many


def test_labels_are_bounded(make_cluster: MakeCluster) -> None:
    client = make_cluster().client()
    table = users(client, labels=2)
    for name in ("a", "b", "c"):
        use(table, [name])
    assert table.labels(["a", "b", "c"]) == ["", "b", "c"]
    least = client.table("least", 4, rule=ps.SGD(lr=1.0), evict=ps.LRU(rows=1), labels=True)
    use(least, ["a"]), use(least, ["b"])
    assert least.labels(["a", "b"]) == ["", "b"]
    for wrong, error in ((0, ValueError), ("yes", TypeError), (None, TypeError)):
        with pytest.raises(error, match="labels"):
            client.table("wrong", 4, rule=ps.SGD(lr=1.0), labels=wrong)


@each_case("dim", [labels.DIM, 4])
def test_table_with_a_name_like_labels_is_the_users_own(
    make_cluster: MakeCluster, dim: int
) -> None:
    cluster = make_cluster()
    client = cluster.client()
    item = client.table("item", 4, rule=ps.SGD(lr=1.0))
    own = client.table("item.labels", dim, rule=ps.SGD(lr=1.0), init=ps.Zeros())
    own.push(["a"], np.ones((1, dim))).result()
    use(item, ["a"])
    assert own.pull(["a"]).tolist() == [[-1.0] * dim]
    assert [table.name for table in client.tables()] == ["item", "item.labels"]
    with pytest.raises(ValueError, match="keeps no labels"):
        item.labels(["a"])
    with pytest.raises(ps.errors.DefineMismatch, match="labels=False, now labels=True came"):
        cluster.client().table("item", 4, rule=ps.SGD(lr=1.0), labels=True)
    assert len(client.directory.tables()) == 2, "a refused define leaves no labels behind"


def test_name_of_labels_cannot_be_defined(make_cluster: MakeCluster) -> None:
    client = make_cluster().client()
    with pytest.raises(ValueError, match=r"ends with ' \(labels\)'.*Applied: no"):
        client.table("item (labels)", 4, rule=ps.SGD(lr=1.0))
    with pytest.raises(ValueError, match=r"ends with ' \(labels\)'.*Applied: no"):
        client.define("w", np.ones(2, np.float32), group="item (labels)")


@each_case("bound", ["labels", "evict", "max_bytes"])
def test_labels_of_keys_in_use_stay(make_cluster: MakeCluster, bound: str) -> None:
    most = 160
    options: dict[str, Any] = {"labels": most}
    if bound == "evict":
        options = {"labels": True, "evict": ps.LRU(most)}
    elif bound == "max_bytes":
        options = {"labels": True, "evict": ps.LRU(), "max_bytes": 100_000}
    cluster = make_cluster()
    table, other = (users(cluster.client(), **options) for _ in range(2))
    hot = [f"hot_{number}" for number in range(8)]
    for turn in range(120):
        new = [f"user_{turn}_{number}" for number in range(8)]
        use(table, [*hot[:4], *new])
        use(other, [*hot[4:], hot[0], *new[:3]])
        assert table.labels(hot) == hot
    kept = cluster.client().table("users (labels)").reports()[0]
    assert kept.evicted > 100, "else this tests nothing"


def test_labels_of_keys_that_get_no_row_are_bounded(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert labels.labels_at_most(True, TableOptions(ps.Zeros())) == 10_000_000
    monkeypatch.setattr(labels, "LABELS_MAX", 20)
    client = make_cluster(servers=2).client()
    table = users(client, labels=True, admit=ps.MinCount(5))
    for first in range(0, 200, 10):
        names = [f"user_{number}" for number in range(first, first + 10)]
        table.push(names, np.ones((10, DIM))).result()
    assert len(table) == 0
    assert len(client.table("users (labels)")) <= 20
    assert table.labels(names) == names


def test_table_without_labels_says_how_to_have_them(make_cluster: MakeCluster) -> None:
    with pytest.raises(ValueError, match=r"keeps no labels.*labels=True"):
        users(make_cluster().client()).labels([1])


def test_first_use_that_stumbles_says_what_to_do(make_cluster: MakeCluster) -> None:
    client = make_cluster(servers=2).client()
    named = users(client, labels=True)
    with pytest.warns(UserWarning, match=r"integers without one, such as 7:.*\"user\": str.*zeros"):
        named.pull([7, 8])
    assert len(named) == 0
    named.pull([9])  # told once
    named.pull(["anna"])
    other = users(make_cluster().client(), labels=True)
    other.push(ps.keys_of(["anna"]), np.ones((1, DIM))).result()  # hashes need no label
    other.pull([7])
    with pytest.raises(
        TypeError, match=r"To fix: .*integer array.*\"item\": str}\).*no leading zeros"
    ):
        named.keys_of([7])
    for keys in ({"anna"}, {"anna": 1}.keys()):
        with pytest.raises(TypeError, match=r"came as (set|dict_keys).*list\(keys\)"):
            named.pull(keys)
    with pytest.raises(ps.errors.NonFinite, match=r"key -?\d+ \('anna'\) of table 'users'"):
        named.push(["anna"], np.full((1, DIM), np.nan))
    with pytest.raises(ps.errors.UnknownName, match=r"no table 'user'; the tables: 'users'\."):
        client.table("user")
    with pytest.raises(TypeError, match=r"rule=ps.Adagrad\(...\), and not a name: rule='adagrad'"):
        client.table("items", 4, rule="adagrad")


def test_labels_go_to_parquet_and_back(make_cluster: MakeCluster, tmp_path: Path) -> None:
    pq = needs("pyarrow.parquet")
    client = make_cluster(servers=2).client()
    table = users(client, labels=True)
    use(table, ["anna", "bo"])
    table.put([7], np.ones((1, DIM)))
    path = str(tmp_path / "users.parquet")
    table.to_parquet(path, state=True)
    read = pq.read_table(path)
    assert set(read["label"].to_pylist()) == {"anna", "bo", ""}
    assert dict(zip(read["label"].to_pylist(), read["key"].to_pylist(), strict=True))[""] == 7
    again = users(make_cluster(servers=1).client(), labels=True)
    assert again.from_parquet(path) == 3
    assert again.labels([*ps.keys_of(["bo", "anna"]), 7]) == ["bo", "anna", ""]
    without = users(make_cluster().client())
    for load in (lambda: without.from_parquet(path), lambda: without.from_arrow(read)):
        with pytest.raises(ps.errors.DefineMismatch, match=r"has labels.*labels=True") as refused:
            load()
        assert refused.value.applied == "no"
    assert len(without) == 0
    assert without.from_arrow(read.drop_columns(["label"])) == 3
    assert without.to_arrow().column_names == ["key", "value"]
    named = users(make_cluster().client(), labels=True)
    named.from_arrow(read.select(["value", "label"]).rename_columns(["value", "key"]))
    assert named.labels(ps.keys_of(["bo", "anna"])) == ["bo", "anna"]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=100)))
def test_labels_come_back_whole_or_cut_between_characters(texts: list[str]) -> None:
    for text, found in zip(texts, labels.decoded(labels.encoded(texts)), strict=True):
        assert text.startswith(found)
        assert found == text or labels.BYTES_MAX - 4 < len(found.encode()) <= labels.BYTES_MAX
