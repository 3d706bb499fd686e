"""What `load_state=` and `load_tables=` take, and what they refuse before anything is started."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from tests.needs import needs
from tests.suites import each_case

from paramserve.client.arrow import schema_of
from paramserve.core.table.options import TableOptions, Zeros
from paramserve.launch import Result, reading, warm_start
from paramserve.launch.warm_start import find_tables, pack_state
from paramserve.messages import BlockSpec, TableSpec
from paramserve.rules import Add
from paramserve.rules.registry import described_by


def packed(given: Any) -> Any:
    return cloudpickle.loads(pack_state(given))


def test_nothing_is_nothing() -> None:
    assert pack_state(None) == b""


def test_state_dict_is_for_the_first_optimizer() -> None:
    model = torch.nn.Linear(2, 1)
    found = packed(model.state_dict())
    assert list(found) == [""]
    assert torch.equal(found[""]["weight"], model.weight)
    assert not found[""]["weight"].requires_grad


def test_states_by_name_keep_their_names_and_arrays() -> None:
    found = packed({"actor": {"w": np.ones(2)}, "critic": {"w": np.zeros(2)}})
    assert found["actor"]["w"].tolist() == [1.0, 1.0]
    assert found["critic"]["w"].tolist() == [0.0, 0.0]


def test_extra_state_may_be_anything() -> None:
    state = {"0.weight": np.ones(1), "0._extra_state": {"scale": [1.0]}}
    assert packed(state)[""]["0._extra_state"] == {"scale": [1.0]}


def result_with(values: dict[str, Any]) -> Result:
    return Result({}, [], 0, {}, {}, [], 1.0, 0, False, values)


def test_result_gives_the_values_of_each_optimizer_by_its_name() -> None:
    mark = {"users is taken over": np.ones(1, np.int64)}
    found = packed(result_with({"actor": {"w": np.ones(2)}, "users.mark": mark}))
    assert list(found) == ["actor"]
    assert found["actor"]["w"].tolist() == [1.0, 1.0]
    half = {"w": np.ones(2, np.uint16)}  # the bits of bfloat16
    assert list(packed(result_with({"half": half, "users.mark": mark}))) == ["half"]
    with pytest.raises(ValueError, match="the result in load_state has no values"):
        pack_state(result_with({"users.mark": mark}))


def test_result_gives_no_values_that_no_optimizer_stepped() -> None:
    both = result_with({"model": {"w": np.ones(2)}, "default": {"mine": np.ones(2)}})
    assert list(packed(dataclasses.replace(both, steps={"model": {0: []}}))) == ["model"]


def test_file_of_torch_save_is_read(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    assert packed(tmp_path / "w.pt")[""]["w"].tolist() == [1.0, 1.0]
    assert packed(str(tmp_path / "w.pt"))[""]["w"].tolist() == [1.0, 1.0]


@each_case(
    ("given", "error", "text"),
    [
        (7, TypeError, r"load_state must be a state dict, .* not int"),
        (torch.nn.Linear(1, 1), TypeError, "as model.state_dict.* not Linear"),
        ({}, ValueError, "load_state is empty"),
        ({"w": torch.ones(1), "epoch": 3}, TypeError, "int under 'epoch'"),
        ({3: torch.ones(1)}, TypeError, "the key 3"),
        (
            {"model": {"w": torch.ones(1)}, "epoch": 3},
            TypeError,
            r"the dict 'model' beside 'epoch'.*load_state=checkpoint\['model'\]",
        ),
        (
            {"model": {"w": torch.ones(1)}, "optimizer": {"param_groups": []}},
            TypeError,
            "for the optimizer 'optimizer', has list under 'param_groups'",
        ),
        ("missing.pt", FileNotFoundError, "missing.pt"),
    ],
)
def test_what_is_no_state_is_refused(given: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        pack_state(given)


class Touches:
    """Pickled, it makes a file where it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def bytes_of(write: Callable[[Any, Any], None], content: Any) -> bytes:
    file = io.BytesIO()
    write(content, file)
    return file.getvalue()


STATE = bytes_of(torch.save, {"w": torch.ones(2)})


@each_case(
    ("content", "found"),
    [
        (b"", "an empty file"),
        (b"hello", "a file that begins with b'hello'"),
        (b"a,b\n1,2\n", "a file that begins with"),
        (STATE[: len(STATE) // 2], "a zip archive that is cut off or of another kind"),
        (pickle.dumps({"w": 1}), "a pickle that is cut off, or that another program"),
        (
            bytes_of(torch.save, torch.nn.Linear(1, 1)),
            r"an object that needs torch.nn\S+Linear, such as a ",
        ),
        (b"\x93NUMPY\x01\x00v\x00", "an array of numpy.save"),
        (b'\x40\0\0\0\0\0\0\0{"w":{"dtype"', "a safetensors file"),
        (None, "an object that needs getattr"),
    ],
)
def test_file_with_something_else_is_refused_and_runs_nothing(
    tmp_path: Path, content: bytes | None, found: str
) -> None:
    path = tmp_path / "state.pt"
    own = pickle.dumps(Touches(str(tmp_path / "ran")), 2)
    path.write_bytes(own if content is None else content)
    told = rf"the file .*state.pt' in load_state is not what torch.*Found: {found}.*To fix: "
    with pytest.raises(ValueError, match=told):
        pack_state(path)
    assert not (tmp_path / "ran").exists()


def test_state_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "STATE_BYTES_MAX", 1000)
    with pytest.raises(ValueError, match="load the model in the training function"):
        pack_state({"w": np.ones(1000)})


# --- tables --------------------------------------------------------------------------------------


def table_file(path: Path, **columns: Any) -> str:
    pa = needs("pyarrow")
    found = columns if columns else {"key": [1], "value": [[1.0, 2.0]]}
    needs("pyarrow.parquet").write_table(pa.table(found), path)
    return str(path)


def test_tables_of_a_folder_go_by_the_names_of_files(tmp_path: Path) -> None:
    for name in ("users", "a%2Fb", "a%252Fb"):
        table_file(tmp_path / f"{name}.parquet")
    (tmp_path / "notes.txt").write_text("")
    found = find_tables(tmp_path)
    assert set(found) == {"users", "a/b", "a%2Fb"}
    assert found["a/b"] == str(tmp_path / "a%2Fb.parquet")
    assert find_tables({"words": tmp_path / "users.parquet"}) == {
        "words": str(tmp_path / "users.parquet")
    }
    assert find_tables(None) == {}


@each_case("letter", ["u", "/", "ü", "\U0001f600"])
def test_table_with_the_longest_name_has_a_file_and_is_found(tmp_path: Path, letter: str) -> None:
    names = [letter * 512, letter * 511 + "x", letter * 60]
    for name in names:
        pa = needs("pyarrow")
        table = TableSpec(2, "float32", 0, TableOptions(Zeros()).to_spec())
        block = BlockSpec(
            1, 1, name, "float32", described_by(Add(), rows=True), (), (), None, table
        )
        rows = pa.table({"key": [1], "value": [[1.0, 2.0]]})
        rows = rows.replace_schema_metadata(schema_of(block, -1).metadata)
        needs("pyarrow.parquet").write_table(rows, tmp_path / reading.table_file(name))
    assert find_tables(tmp_path).keys() == set(names)


@each_case(
    ("given", "error", "text"),
    [
        (7, TypeError, "load_tables must be the folder"),
        ({"users": 7}, TypeError, "load_tables must be"),
        ({7: "users.parquet"}, TypeError, "the names of tables, and 7"),
        ("missing", FileNotFoundError, "^load_tables=.missing. cannot be read.*To fix: "),
        ({"users": "missing.parquet"}, FileNotFoundError, "missing.parquet cannot be read.*To fix"),
        ("empty", ValueError, r"no table: no file \*.parquet is in 'empty'"),
        ({}, ValueError, "no table"),
        ({"users": "text.parquet"}, ValueError, "text.parquet is no Parquet file"),
        ({"users": "other.parquet"}, ValueError, "no column 'key'; columns: name"),
    ],
)
def test_what_is_no_table_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Any, error: type[Exception], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.parquet").write_text("key,value\n")
    table_file(tmp_path / "other.parquet", name=["x"])
    with pytest.raises(error, match=text):
        find_tables(given)
