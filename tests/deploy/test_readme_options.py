"""Options that the pages recommend are ones that `paramserve serve` takes."""

from __future__ import annotations

import re
from pathlib import Path

from tests.suites import each_case

from paramserve.launch.serve import _deadlines

ROOT = Path(__file__).parents[2]


@each_case("page", ["deploy/README.md", "docs/deployment.md"])
def test_restart_that_a_page_recommends_is_accepted(page: str) -> None:
    found = re.findall(r"--restart (\d+)", (ROOT / page).read_text())
    assert found
    for seconds in found:
        assert _deadlines(None, float(seconds)).restart_s == float(seconds)
