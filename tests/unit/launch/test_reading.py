"""State dicts and snapshots, put together from what a client reads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from paramserve.client import GroupSnapshot
from paramserve.config import LOOSE, RuleSpec
from paramserve.core.partition import Block
from paramserve.errors import ParamServeError, UnknownName
from paramserve.launch import reading
from paramserve.launch.reading import Reader, Watching, as_state_dict, with_aliases
from paramserve.messages import BlockSpec, Link, Piece


def block(
    number: int,
    group: str,
    aliases: dict[str, str] | None = None,
    links: tuple[Link, ...] = (),
    rule: RuleSpec | None = None,
    **shapes: tuple[int, ...],
) -> Block:
    pieces = tuple(Piece(name, shape) for name, shape in shapes.items())
    size = sum(int(np.prod(shape)) for shape in shapes.values())
    tied = aliases if aliases is not None else {}
    spec = BlockSpec(number, number, group, "float32", rule, pieces, (0, size), aliases=tied)
    return Block(structs.replace(spec, links=links))


class WritesItsName:
    """A table whose file holds its name."""

    def __init__(self, name: str, fails: bool = False, rows: int = 1) -> None:
        self.name = name
        self.fails = fails
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def to_parquet(self, path: str, *, state: bool) -> int:
        if self.fails:
            raise OSError(28, "No space left on device")
        assert state
        return Path(path).write_text(self.name)


class HoldsValues:
    """A client of servers that hold the given blocks, filled with their number."""

    def __init__(self, *blocks: Block, versions: tuple[int, ...] = ()) -> None:
        self.held = list(blocks)
        self.dense = self
        self.reads = SimpleNamespace(exact=False)
        self.connection = SimpleNamespace(id=1)
        self.versions = list(versions)
        self.watched: list[tuple[str, int, int]] = []
        self.held_tables: list[WritesItsName] = []
        self.cuts = 0

    def blocks(self) -> list[Block]:
        return list(self.held)

    def tables(self) -> list[WritesItsName]:
        return list(self.held_tables)

    @contextmanager
    def cut(self, blocks: Iterable[Block]) -> Iterator[int]:
        self.cuts += 1
        yield self.cuts

    def fetch(self, wanted: Block, field: int, *, cut: int) -> tuple[Any, tuple[int, ...]]:
        assert (field, cut) == (0, self.cuts)
        return np.arange(wanted.size, dtype=np.float32) + 100 * wanted.id, ()

    def watch(self, group: str, every: int, keep: int) -> bool:
        self.watched.append((group, every, keep))
        return True

    def take(self, group: str, after: int) -> GroupSnapshot | None:
        found = [version for version in self.versions if version > after]
        if not found:
            return None
        return GroupSnapshot(found[0], {"w": np.full(2, float(found[0]))}, dropped=0)


@pytest.fixture(autouse=True)
def _snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "Snapshots", lambda client: client)


def watching_at(*seconds: float, group: str = "model") -> Watching:
    """One that finds these times, one for each question to the servers."""
    return Watching(group, every=10, keep=4, seconds=iter(seconds).__next__)


def reader(client: HoldsValues) -> Reader:
    return Reader(client)


@pytest.fixture
def torch_not_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    yield
    monkeypatch.undo()


def test_read_puts_the_blocks_of_a_group_together_with_its_buffers() -> None:
    client = HoldsValues(
        block(1, "model", {"tied": "bias", "gone": "nothing"}, weight=(2, 3), bias=(2,)),
        block(2, "model", scale=()),
        block(3, "model.buffers", mean=(2,)),
        block(4, "other", w=(1,)),
    )
    state = reader(client).read("model")
    assert {name: array.shape for name, array in state.items()} == {
        "weight": (2, 3),
        "bias": (2,),
        "scale": (),
        "mean": (2,),
        "tied": (2,),
    }
    assert state["weight"].tolist() == [[100, 101, 102], [103, 104, 105]]
    assert state["bias"].tolist() == [106, 107]
    assert state["tied"] is state["bias"]


def test_snapshots_have_values_without_a_rule_in_the_models_own_dtypes() -> None:
    plain = block(1, "model", w=(2,)), block(2, "model.buffers", m=(1,))
    dtypes = {"w": "float16"}, {"m": "bfloat16"}
    own, others = (
        Block(structs.replace(each.spec, dtypes=kinds))
        for each, kinds in zip(plain, dtypes, strict=True)
    )
    values = {"w": np.ones(2, np.float32)}
    groups = {"model": [own], "model.buffers": [others]}
    state = reader(HoldsValues(own, others)).with_others("model", values, groups)
    assert {name: each.dtype for name, each in state.items()} == {"w": np.float16, "m": np.uint16}
    assert state["m"] == 0x4348, "the bits of 200"
    alone = reader(HoldsValues(own)).with_others("model", values, {"model": [own]})
    assert alone["w"].dtype == np.float16


def of_two_optimizers() -> list[Block]:
    """One model: "model" trains a, "head" b and, since later, c; "last" has taken over b."""
    sgd = RuleSpec("sgd")
    there, back = Link("model", "head", {"b": "w", "tied": "w"}), Link("head", "model", {"a": "a"})
    return [
        block(1, "model.buffers", b=(1,), c=(1,)),
        block(2, "model", rule=sgd, a=(1,)),
        block(3, "head", links=(there, back), rule=sgd, w=(1,)),
        block(4, "head", links=(Link("model", "head", {"c": "c"}),), rule=sgd, c=(1,)),
        block(5, "last", links=(Link("model", "last", {"b": "v"}),), rule=sgd, v=(1,)),
        block(6, "other", rule=sgd, b=(1,)),
    ]


def test_read_takes_what_another_optimizer_trains_from_its_group() -> None:
    client = HoldsValues(*of_two_optimizers())
    values = reader(client).read_all()
    assert {name: float(each[0]) for name, each in values["model"].items()} == {
        "a": 200,
        "b": 500,
        "tied": 300,
        "c": 400,
    }
    assert {name: float(each[0]) for name, each in values["head"].items()} == {
        "a": 200,
        "w": 300,
        "c": 400,
    }
    assert values["other"].keys() == {"b"}
    assert client.cuts == 1, "all are of one moment"


def test_watching_takes_what_another_optimizer_trains_from_its_group() -> None:
    blocks = [each for each in of_two_optimizers() if each.id not in (2, 6)]
    client = HoldsValues(*blocks, block(2, "model", rule=RuleSpec("sgd"), w=(2,)), versions=(10,))
    taken = watching_at(0.0).take(lambda: client)
    assert taken is not None
    assert {name: float(each[0]) for name, each in taken.state.items()} == {
        "w": 10,
        "b": 500,
        "tied": 300,
        "c": 400,
    }


def test_parameters_that_the_model_has_not_are_in_no_state_dict() -> None:
    client = HoldsValues(block(1, "model", w=(1,), **{LOOSE + "0.2": (1,)}), versions=(10,))
    assert reader(client).state_dict("model").keys() == {"w"}
    assert reader(client).read("model").keys() == {"w", LOOSE + "0.2"}


def test_read_all_has_no_group_of_its_own_for_buffers() -> None:
    client = HoldsValues(block(1, "model", w=(1,)), block(2, "model.buffers", mean=(1,)))
    values = reader(client).read_all()
    assert {name: set(state) for name, state in values.items()} == {"model": {"w", "mean"}}


def test_read_of_an_unknown_group_is_empty() -> None:
    assert reader(HoldsValues(block(1, "model", w=(1,)))).read("other") == {}


def test_watching_waits_until_the_group_is_defined() -> None:
    client = HoldsValues(versions=(10,))
    watching = watching_at(1.0, 2.5)
    assert watching.take(lambda: client) is None
    assert client.watched == []
    client.held.append(block(1, "model", w=(2,)))
    first = watching.take(lambda: client)
    assert client.watched == [("model", 10, 4)]
    assert first is not None
    assert (first.version, first.seconds) == (10, 0.0)


def test_watching_gives_each_version_once_and_counts_seconds_from_the_definition() -> None:
    client = HoldsValues(block(1, "model", w=(2,)), versions=(10, 20))
    watching = watching_at(1.0, 1.5, 2.0)
    taken = [watching.take(lambda: client) for _ in range(3)]
    assert [each and (each.version, each.seconds) for each in taken] == [
        (10, 0.0),
        (20, 0.5),
        None,
    ]


def test_watching_state_has_buffers_and_tied_tensors() -> None:
    client = HoldsValues(
        block(1, "model", {"v": "w"}, w=(2,)),
        block(2, "model.buffers", {"average": "mean"}, mean=(1,)),
        versions=(10,),
    )
    taken = watching_at(0.0).take(lambda: client)
    assert taken is not None
    assert {name: array.tolist() for name, array in taken.state.items()} == {
        "w": [10.0, 10.0],
        "v": [10.0, 10.0],
        "mean": [200.0],
        "average": [200.0],
    }


def test_watching_state_is_what_a_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("torch")
    fake.from_numpy = lambda array: SimpleNamespace(array=array)
    monkeypatch.setitem(sys.modules, "torch", fake)
    client = HoldsValues(block(1, "model", w=(2,)), versions=(10,))
    taken = watching_at(0.0).take(lambda: client)
    assert taken is not None
    assert taken.state["w"].array.tolist() == [10.0, 10.0]


def test_watching_drained_before_the_end_gives_the_rest_afterwards() -> None:
    client = HoldsValues(block(1, "model", w=(2,)), versions=(10, 20, 30))
    watching = watching_at(0.0, 1.0, 1.5, 2.0)
    watching.take(lambda: client)
    watching.drain()
    watching.forget()
    rest = [watching.take_kept() for _ in range(3)]
    assert [each and (each.version, each.seconds) for each in rest] == [(20, 1.0), (30, 1.5), None]


def test_watching_seconds_never_go_back_where_the_end_waited_for_a_reader() -> None:
    client = HoldsValues(block(1, "model", w=(2,)), versions=(10, 20, 30))
    ended = threading.Event()
    now = [0.0]

    def take_snapshot(group: str, after: int) -> GroupSnapshot | None:
        if after == 10 and not ended.is_set():  # the run ends while this question is under way
            ended.set()
            threads.append(threading.Thread(target=watching.drain, args=()))
            threads[-1].start()
        now[0] += 1.0
        return ask(group, after)

    threads: list[threading.Thread] = []
    watching = Watching("model", every=10, keep=4, seconds=lambda: now[0])
    first = watching.take(lambda: client)
    ask, client.take = client.take, take_snapshot  # type: ignore[method-assign]  # wrapped
    second = watching.take(lambda: client)
    threads[0].join(10.0)
    third = watching.take_kept()
    found = [each and each.seconds for each in (first, second, third)]
    assert found == [0.0, 0.0, 1.0]


def test_watching_that_was_never_read_keeps_nothing() -> None:
    watching = watching_at()
    watching.drain()
    assert watching.take_kept() is None


def test_watching_a_name_that_no_group_has_warns_once_and_is_an_error_at_the_end() -> None:
    client = HoldsValues()
    client.held_tables = [WritesItsName("users")]
    watching = watching_at(0.0, 5.0, 9.0, 14.0, 15.0, 99.0, group="modle")
    for _ in range(2):
        assert watching.take(lambda: client) is None
    client.held.append(block(1, "model", w=(2,)))
    assert watching.take(lambda: client) is None, "10 s after the first group, not before"
    told = "'modle' have waited 14 s.* groups: 'model', 'users'.*name='model'"
    with pytest.warns(UserWarning, match=told):
        assert watching.take(lambda: client) is None
    assert watching.take(lambda: client) is None, "and not again"
    assert "no group 'modle'; its groups: 'model', 'users'" in str(watching.unknown())
    client.held.append(block(2, "modle", w=(2,)))
    assert watching.take(lambda: client) is None
    assert watching.unknown() is None


def test_watching_while_nothing_is_defined_says_nothing() -> None:
    watching = watching_at(0.0, 99.0)
    assert [watching.take(HoldsValues) for _ in range(2)] == [None, None]
    assert watching.unknown() is None


def test_watching_a_table_is_refused_and_does_not_spoil_the_end() -> None:
    client = HoldsValues(block(1, "model", w=(2,)))
    client.held_tables = [WritesItsName("users")]
    watching = watching_at(0.0, group="users")
    with pytest.raises(ValueError, match=r"'users' is a table.* read it with job.table\('users'\)"):
        watching.take(lambda: client)
    watching.drain()
    assert client.watched == []


def test_save_tables_gives_each_a_file_of_its_own(tmp_path: Path) -> None:
    client = HoldsValues()
    names = ["users", "a/b", "a%2Fb", "..", "naïve one"]
    client.held_tables = [WritesItsName(name) for name in names]
    files = reader(client).save_tables(str(tmp_path))
    assert list(files) == names
    assert [Path(path).read_text() for path in files.values()] == names
    assert {Path(path).parent for path in files.values()} == {tmp_path}
    assert files["users"] == str(tmp_path / "users.parquet")


def test_save_tables_without_rows_leaves_files_of_before(tmp_path: Path) -> None:
    (tmp_path / "users.parquet").write_text("before")
    client = HoldsValues()
    client.held_tables = [WritesItsName("users", rows=0), WritesItsName("words", rows=0)]
    with pytest.warns(UserWarning, match=r"'users' has no rows: .*users\.parquet stays"):
        files = reader(client).save_tables(str(tmp_path))
    assert [*files] == ["words"]
    assert (tmp_path / "users.parquet").read_text() == "before"


def test_save_tables_that_fails_says_which_and_what_was_written(tmp_path: Path) -> None:
    client = HoldsValues()
    client.held_tables = [WritesItsName("users"), WritesItsName("words", fails=True)]
    expected = r"table 'words' was not written to .*words.parquet: .*No space.* written were: users"
    with pytest.raises(ParamServeError, match=expected):
        reader(client).save_tables(str(tmp_path))


@pytest.mark.usefixtures("torch_not_imported")
def test_state_dict_without_torch_is_arrays() -> None:
    array = np.ones(2)
    assert as_state_dict({"model": {"w": array}}, "model", ())["w"] is array


def test_state_dict_with_torch_is_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("torch")
    fake.from_numpy = lambda array: SimpleNamespace(array=array)
    monkeypatch.setitem(sys.modules, "torch", fake)
    array = np.ones(2)
    assert as_state_dict({"model": {"w": array}}, "model", ())["w"].array is array


def test_state_dict_of_an_unknown_group_names_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"no group 'model'; its groups: 'default', 'lm'"):
        as_state_dict({"default": {}, "lm": {}}, "model", ())
    with pytest.raises(UnknownName, match=r"and no other.*worker\.optimizer\("):
        as_state_dict({}, "model", ())


def test_reading_before_anything_is_defined_says_to_wait() -> None:
    client = HoldsValues()
    not_yet = r"is not there yet: the workers have called none of worker\.optimizer.*To fix: wait"
    with pytest.raises(UnknownName, match=f"group 'model' {not_yet}"):
        reader(client).state_dict("model")

    def table(name: str) -> None:
        raise UnknownName("there is no table 'users'; the tables: none", fix="define it")

    client.table = table
    with pytest.raises(UnknownName, match=f"table 'users' {not_yet}"):
        reader(client).table("users")
    client.held_tables.append(WritesItsName("words"))
    with pytest.raises(UnknownName, match="no table 'users'"):
        reader(client).table("users")


def test_state_dict_of_a_table_says_how_to_read_it() -> None:
    with pytest.raises(UnknownName, match=r"'users' is a table.*job\.table\(name\).*save_tables="):
        as_state_dict({"model": {}}, "users", ["users"])


def test_with_aliases_keeps_the_order_of_names() -> None:
    state = {"a": np.ones(1), "b": np.zeros(1)}
    assert list(with_aliases(state, [block(1, "model", {"c": "a"})])) == ["a", "b", "c"]
