"""The examples with tables learn as well as one process with torch's own modules does."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.suites import each_case

import click_stream
import flights
import knowledge_graph
import larger_than_worker
import movielens
import table_data
from paramserve.errors import ParamServeError

FETCHING_S = 400
"""Fetching may try each source to its end first."""

Printed = pytest.CaptureFixture[str]


def fetched(fetch: Callable[[], Path]) -> Path:
    """A data set's folder, from the user's cache or fetched into it."""
    try:
        return fetch()
    except ParamServeError as error:
        pytest.skip(f"THE EXAMPLES WITH TABLES ARE NOT CHECKED HERE: {error}")


def told(pattern: str, capsys: Printed) -> list[float]:
    """The numbers that a pattern finds in what was printed."""
    output = capsys.readouterr().out
    found = re.search(pattern, output, re.DOTALL)
    assert found is not None, output
    return [float(each.replace(",", "")) for each in found.groups()]


@pytest.mark.slow
@pytest.mark.timeout(FETCHING_S)
@pytest.mark.parametrize(
    ("options", "band"),
    [("--model mf", 0.01), ("--model dlrm --units 64 --epochs 2 --servers 2", 0.02)],
)
def test_movielens_two_workers_reach_the_serial_error(
    options: str, band: float, capsys: Printed
) -> None:
    folder = fetched(table_data.fetch_movielens)
    assert movielens.main([*options.split(), "--serial", "--data", str(folder)]) == 0
    pattern = r"one process, nn\.Embedding \W+ ([\d.]+) .* 2 workers, tables \W+ ([\d.]+) "
    alone, together = told(pattern, capsys)
    assert together <= 0.95
    assert abs(together - alone) <= band


@pytest.mark.slow
@pytest.mark.timeout(FETCHING_S)
def test_flights_two_workers_reach_the_serial_area(capsys: Printed) -> None:
    folder = fetched(table_data.fetch_flights)
    options = f"--flights 80000 --servers 2 --serial --data {folder}"
    assert flights.main(options.split()) == 0
    pattern = r"72,000 flights to train on, 8,000 held out.*AUC ([\d.]+).*AUC ([\d.]+)"
    alone, together = told(pattern, capsys)
    assert together >= 0.64  # guessing gives 0.5
    assert abs(together - alone) <= 0.015


@pytest.mark.slow
@pytest.mark.timeout(FETCHING_S)
def test_knowledge_graph_two_workers_reach_the_serial_rank(capsys: Printed) -> None:
    folder = fetched(table_data.fetch_umls)
    options = f"--epochs 5 --servers 2 --serial --data {folder}"
    assert knowledge_graph.main(options.split()) == 0
    alone, together = told(r"MRR ([\d.]+).*MRR ([\d.]+)", capsys)
    assert together >= 0.75
    assert abs(together - alone) <= 0.03


def test_reciprocal_rank_leaves_out_other_right_answers() -> None:
    facts = np.array([[0, 0, 1], [0, 0, 2], [0, 0, 3]])
    graph = table_data.Triples(facts[1:2], facts[2:], facts[:1], ["a", "b", "c", "d", "e"], ["r"])
    asked = torch.tensor([[[1.0, 3.0, 9.0, 9.0, 5.0]], [[5.0, 3.0, 3.0, 1.0, 1.0]]])

    class Knows(torch.nn.Module):
        def forward(self, questions: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
            assert questions.tolist() == [[0, 0], [1, 1]]
            return asked[:, 0].gather(1, answers)

    # (a, r, ?): b is behind e; c and d are right as well. (b, back, ?): a comes first.
    assert knowledge_graph.reciprocal_rank(Knows(), graph) == pytest.approx((1 / 2 + 1) / 2)
    asked[0, 0, 4] = 3.0  # as good as the right one
    assert knowledge_graph.reciprocal_rank(Knows(), graph) == pytest.approx((1 / 1.5 + 1) / 2)


# --- the stream of clicks -----------------------------------------------------------------------


def test_stream_is_in_criteos_shape_and_the_same_each_time() -> None:
    first, second = (list(itertools.islice(click_stream.stream(3, 1, 64), 3)) for _ in range(2))
    for batch, again in zip(first, second, strict=True):
        assert batch.numbers.shape == (64, 13)
        assert batch.keys.shape == (64, 26)
        assert (batch.keys >= 0).all()
        assert set(batch.clicked.tolist()) == {0.0, 1.0}
        assert all(torch.equal(one, two) for one, two in zip(batch, again, strict=True))
    other = next(click_stream.stream(3, 0, 64))
    assert not torch.equal(other.keys, first[0].keys)


def test_stream_has_keys_by_zipfs_law_and_new_ones_all_the_time() -> None:
    ranks = click_stream.zipf(np.random.default_rng(0).random(200_000))
    assert ranks.min() == 1
    often = np.bincount(ranks[ranks < 100])
    # By the integral of the law, a rank r has the share of [r, r + 1).
    share = (1.0 - 2.0**-0.05) / (1.0 - click_stream.VOCABULARY**-0.05)
    assert often[1] / len(ranks) == pytest.approx(share, rel=0.03)
    assert often[1] / often[10] == pytest.approx((1 - 2**-0.05) / (10**-0.05 - 11**-0.05), rel=0.1)
    known: set[int] = set()
    for number, batch in enumerate(itertools.islice(click_stream.stream(0, 0, 256), 40)):
        fresh = set(batch.keys.flatten().tolist()) - known
        known |= fresh
        assert len(fresh) > 1000, number
    newest = batch.keys[:, 0]  # the most frequent key of a field where what is new is popular
    assert int(newest.mode().values) not in set(click_stream_start())


def click_stream_start() -> list[int]:
    """Keys of the first batch's first field."""
    return next(click_stream.stream(0, 0, 4096)).keys[:, 0].tolist()


@pytest.mark.slow
@pytest.mark.timeout(FETCHING_S)
def test_click_stream_memory_stays_flat_with_admission_and_eviction(
    tmp_path: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = click_stream.policies(15)
    assert list(chosen) == ["every key kept", "TTL(15)", "MinCount(3)", "MinCount(3), TTL(15)"]
    first, *_, last = chosen
    two = {name: chosen[name] for name in (first, last)}
    monkeypatch.setattr(click_stream, "policies", lambda clocks: two)
    options = "--steps 96 --batch-size 64 --every 8 --servers 2"
    assert click_stream.main([*options.split(), "--out", str(tmp_path)]) == 0
    (folder,) = tmp_path.iterdir()
    assert (folder / "click_stream.png").stat().st_size > 10_000
    kept, few = json.loads((folder / "curves.json").read_text()).values()
    rows = [point["rows"] for point in kept]
    assert rows == sorted(rows)
    assert rows[-1] > 1.5 * rows[5]  # twice as long; the other worker may be ahead or behind
    assert few[-1]["rows"] < 1.4 * few[5]["rows"]
    assert few[-1]["rows"] < 0.1 * rows[-1]
    assert few[-1]["megabytes"] < 0.7 * kept[-1]["megabytes"]
    assert all(points[-1]["auc"] > 0.55 for points in (kept, few))
    assert "Synthetic click stream" in capsys.readouterr().out


# --- a worker with little memory ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(FETCHING_S)
def test_worker_with_a_limit_trains_a_table_four_times_as_large(capsys: Printed) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    assert larger_than_worker.main(["--limit-mb", "768", "--servers", "2"]) == 0
    assert resource.getrlimit(resource.RLIMIT_AS) == before  # the worker's own
    pattern = r"limit 768 MB of address space,\s+at most\s+([\d,]+)\s+MB taken;\s+([\d.]+)%"
    taken, right = told(pattern + r".*table: [\d,]+ rows, ", capsys)
    assert taken <= 768
    assert right > 99.9


def test_goals_are_the_bits_of_the_keys() -> None:
    rows = larger_than_worker.goals(np.array([0, -1, 1], np.int64))
    assert rows.dtype == np.float32
    assert (rows > 0).sum(1).tolist() == [0, 64, 1]
    assert set(np.unique(rows)) == {-0.5, 0.5}


def test_limit_that_does_not_hold_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: None)
    with pytest.raises(ParamServeError, match="may take 1 MB, its limit, once more"):
        larger_than_worker.limit(1)


class Asked(Exception):
    """Carries the options with which a table was asked for."""


class AsksForTables:
    """A worker whose client goes no further than to the first table."""

    seed = 7

    @property
    def client(self) -> AsksForTables:
        return self

    def process_group(self) -> None:
        return None

    def table(self, name: str, **options: Any) -> None:
        raise Asked(options)


@each_case("example", [movielens, flights, knowledge_graph, click_stream])
def test_tables_are_asked_for_with_the_seed_of_the_run(example: Any) -> None:
    nothing: dict[str, Any] = {}
    with pytest.raises(Asked) as asked:
        example.train(AsksForTables(), nothing, example.parse([]))
    assert asked.value.args[0]["seed"] == AsksForTables.seed


def test_speed_is_of_all_samples_from_the_first_begin_to_the_last_end() -> None:
    outcomes = [movielens.Outcome(1.0, 4.0, 30, 0.9), movielens.Outcome(2.0, 6.0, 20, 0.9)]
    assert movielens.speed(outcomes) == 10.0


@each_case(
    "parse",
    [movielens.parse, flights.parse, knowledge_graph.parse, click_stream.parse],
)
def test_counts_below_one_are_refused(
    parse: Callable[[list[str]], argparse.Namespace], capsys: Printed
) -> None:
    with pytest.raises(SystemExit):
        parse(["--workers", "0"])
    assert "must be at least 1" in capsys.readouterr().err
