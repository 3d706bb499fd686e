"""Tables take strings where they take keys, and keep them where they were told to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.needs import needs

import paramserve as ps
from paramserve.client.table import Table

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
    assert table.pull(["nobody"], create=False).tolist() == [[0.0] * DIM]
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
