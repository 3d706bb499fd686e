"""Grafana's dashboard asks for metrics that there are, in PromQL that parses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from tests.suites import each_case

from paramserve.observe.metrics import FAMILIES

FILE = Path(__file__).parents[2] / "deploy" / "grafana.json"
EXPOSED = {f"{each.name}_total" if each.kind == "counter" else each.name for each in FAMILIES}


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(FILE.read_text())["panels"]
    return found


EXPRESSIONS = [target["expr"] for panel in panels() for target in panel["targets"]]


@each_case("expression", EXPRESSIONS)
def test_expression_parses_and_names_metrics_that_there_are(expression: str) -> None:
    plain = expression.replace("$__rate_interval", "1m").replace("$job", ".*")
    promql_parser.parse(plain)
    named = set(re.findall(r"paramserve_\w+", plain))
    assert named
    assert named <= EXPOSED


def test_panels_have_places_of_their_own_and_tell_what_they_show() -> None:
    places = [(each["gridPos"]["x"], each["gridPos"]["y"]) for each in panels()]
    assert len({*places}) == len(places)
    assert len({each["id"] for each in panels()}) == len(places)
    assert all(each["title"] for each in panels())


def test_what_does_not_parse_is_found() -> None:
    with pytest.raises(ValueError):
        promql_parser.parse("sum by (group) (rate(paramserve_steps_total{)")
