"""What a worker keeps of its steps, and the figure that is made of it."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import pytest

from paramserve.messages import Record
from paramserve.observe import history
from paramserve.observe.history import History, StepRecord
from paramserve.observe.plots import figure_of


def record(clock: int) -> StepRecord:
    return StepRecord(clock, clock, clock % 3, 0.001, False)


def test_history_keeps_evenly_spaced_steps_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "KEPT_MAX", 8)
    for steps in (0, 1, 7, 8, 9, 16, 17, 100, 1000):
        kept = History()
        for clock in range(1, steps + 1):
            kept.add(record(clock))
        clocks = [each.clock for each in kept.records()]
        assert len(clocks) <= 9
        assert kept.last == (record(steps) if steps else None)
        if steps <= 8:
            assert clocks == list(range(1, steps + 1))
            continue
        assert len(clocks) >= 5
        assert (clocks[0], clocks[-1]) == (1, steps)
        gaps = {later - earlier for earlier, later in pairwise(clocks[:-1])}
        assert len(gaps) == 1


METRICS = [Record(0.0, rank, clock, {"loss": 1.0 / clock}) for rank in (0, 1) for clock in (1, 2)]
STEPS = {"model": {rank: [record(1), record(2)] for rank in (0, 1)}}


def test_plot_without_matplotlib_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("matplotlib", "matplotlib.pyplot"):  # another test may have imported both
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        figure_of(METRICS, STEPS)


def test_plot_has_metrics_and_staleness_of_each_rank() -> None:
    pyplot: Any = pytest.importorskip("matplotlib.pyplot")
    figure = figure_of(METRICS, STEPS)
    assert [axis.get_ylabel() for axis in figure.axes] == ["loss", "staleness of model"]
    assert [line.get_label() for line in figure.axes[1].lines] == ["rank 0", "rank 1"]
    assert figure.axes[1].lines[0].get_xydata().tolist() == [[1, 1], [2, 2]]
    pyplot.close(figure)
    with pytest.raises(ValueError, match="nothing to plot"):
        figure_of([], {})
