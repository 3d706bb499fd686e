"""Settings of `OnRay`, and what it says without a usable Ray. Ray is not imported here."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from paramserve.engine.on_ray import Needs, OnRay
from paramserve.errors import ParamServeError


def test_engine_without_ray_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    engine = OnRay()
    for use in (engine.open, lambda: engine.find("x"), lambda: engine.publish("x", b"")):
        with pytest.raises(ParamServeError, match=r"pip install 'paramserve\[ray\]'"):
            use()


def test_engine_with_an_old_ray_says_which_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("ray")
    old.__version__ = "2.9.3"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", old)
    with pytest.raises(ParamServeError, match=r"needs Ray 2\.\d+ or newer, and this is 2\.9\.3"):
        OnRay().open()


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"servers": "apart"}, ValueError, "servers must be one of pack, spread, not 'apart'"),
        ({"workers": "pack"}, ValueError, "workers must be one of beside, apart, anywhere"),
        ({"server": {"num_cpus": 1}}, TypeError, r"server must be ps\.Needs"),
        ({"place_s": 0}, ValueError, "place_s must be more than 0"),
        ({"place_s": "1"}, TypeError, "place_s must be a number"),
        ({"address": "somewhere"}, ValueError, "must be 'auto' or 'host:port'"),
        ({"address": 6379}, TypeError, "address must be a str or None"),
        ({"address": "ray://head:10001"}, ValueError, "ray job submit"),
        (
            {
                "servers": "spread",
                "server": Needs(label_selector={"zone": "a"}),
                "worker": Needs(label_selector={"zone": "b"}),
            },
            ValueError,
            "use workers='apart' or 'anywhere'",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        OnRay(**settings)
