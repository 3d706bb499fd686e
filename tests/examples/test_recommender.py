"""The recommender from a CSV file: its split and figures, and that it beats popularity."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from tests.needs import needs

import recommender_csv
from recommender_csv import Split, figures, read, write_sample


def test_split_holds_out_the_last_item_of_each_user(tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    lines = ["item,time,user", "b,10,u", "a,9,u", "a,100,v", "c,3,v", "c,1,u", "d,5,w", "a,6,w"]
    path.write_text("\n".join(lines), "utf-8-sig")  # as spreadsheets write it
    split = read(path)
    assert [*zip(split.users, split.items, strict=True)] == [
        ("u", "c"), ("v", "c"), ("w", "d"), ("u", "a"),
    ]  # fmt: skip
    assert split.held_out == {"v": "a", "w": "a"}, "b, the last of u, is in no other line"
    assert split.seen == {"u": {"a", "c"}, "v": {"c"}, "w": {"d"}}


def test_file_without_a_column_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_text("user,item\nu,a\n")
    with pytest.raises(SystemExit, match="has no column time"):
        read(path)


def test_figures_rank_the_held_out_item_among_those_not_seen() -> None:
    items = [f"i{number:02d}" for number in range(20)]
    split = Split(["u", "u", "v"], ["i00", "i01", "i00"], {"u": "i03", "v": "i15"})
    scores = np.array([np.arange(20, 0, -1)] * 2, np.float32)  # i00 first
    # Of u the third, i02 is before it; of v the fifteenth.
    assert figures(split, items, scores) == (0.5, pytest.approx(1 / math.log2(3) / 2))


def test_sample_is_the_same_each_time(tmp_path: Path) -> None:
    for name in ("one", "other"):
        write_sample(tmp_path / name, readers=20, seed=3)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_recommender_beats_popularity_and_names_neighbours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs("pyarrow")
    options = f"--readers 300 --epochs 8 --out {tmp_path / 'trained'}"
    assert recommender_csv.main(options.split()) == 0
    output = capsys.readouterr().out
    told = re.findall(r"hit rate@10 ([\d.]+), NDCG@10 ([\d.]+)", output)
    (hits, gain), (model_hits, model_gain) = (map(float, each) for each in told)
    assert model_hits > 1.2 * hits
    assert model_gain > 1.2 * gain
    asked, *near = re.findall(r"^(?:nearest to '|  )(\w+): The", output, re.MULTILINE)
    assert len(near) == 5
    assert near.count(asked) >= 3  # of eight kinds
    assert {each.name for each in (tmp_path / "trained").iterdir()} == {
        "users.parquet", "items.parquet",
    }  # fmt: skip
