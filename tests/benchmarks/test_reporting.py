"""The benchmark of reporters runs from end to end. Nothing here judges speed."""

from __future__ import annotations

import pytest

from benchmarks import reporting


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_all_reporters_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert reporting.main(["--tiny"]) == 0
    told = capsys.readouterr().out
    assert "a scrape of 64 workers" in told
