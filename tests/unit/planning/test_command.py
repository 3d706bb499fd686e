"""The command `paramserve plan`, without real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from tests.suites import each_case

from paramserve.cli import cli
from paramserve.codecs import Codec, Delta, Int2, Int4, Int8, Sign, TopK
from paramserve.consistency.base import Policy
from paramserve_plan import calibrate, show
from paramserve_plan.calibrate import Calibration, Compared, Fitted
from paramserve_plan.command import CODED, codec_of

SMALL = ("--workers", "4", "--model-mb", "10", "--step-ms", "50")
SHORT = ("--clocks", "8")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments])


def test_plan_shows_table_arithmetic_and_bars() -> None:
    done = call(*SMALL, *SHORT, "--shards", "1", "--policy", "sync", "--policy", "bounded:1")
    assert done.exit_code == 0, done.output
    for text in ("sync, 4 x 1", "bounded:1, 4 x 1", "4 x 10 MB / 1 = 40 MB", "32 ms", "█", "needs"):
        assert text in done.output


def test_plan_json_has_each_policy_workers_and_shards() -> None:
    counts = ("--workers", "2", "--workers", "3", "--shards", "1", "--shards", "2")
    done = call(*counts, *SHORT, "--policy", "async", "--no-search", "--json")
    found = json.loads(done.output)["predictions"]
    assert [(each["workers"], each["shards"]) for each in found] == [(2, 1), (2, 2), (3, 1), (3, 2)]
    assert {"step_s", "steps_per_s", "staleness", "waiting_share", "limit"} <= set(found[0])


def test_plan_parameters_and_dtype_make_the_size() -> None:
    size = ("--parameters", "1e6", "--dtype", "float16", "--shards", "1", "--no-search")
    done = call("--workers", "2", *size, *SHORT, "--policy", "sync", "--json")
    assert json.loads(done.output)["predictions"][0]["worker_bytes"] == 2e6


def test_plan_codec_and_local_steps_make_the_bytes() -> None:
    asked = ("--workers", "2", "--model-mb", "4", "--shards", "1", "--no-search", *SHORT, "--json")

    def bytes_of(*options: str) -> list[float]:
        done = call(*asked, *options)
        assert done.exit_code == 0, done.output
        return [each["worker_bytes"] for each in json.loads(done.output)["predictions"]]

    assert bytes_of("--policy", "sync", "--codec", "int8,bfloat16") == [2e6]
    assert bytes_of("--policy", "sync", "--codec", "bfloat16") == [4e6], "values are whole"
    one, own = bytes_of("--policy", "sync", "--local-steps", "8", "--codec", "float16,float16")
    assert (one, own) == (2e6, 2.5e5)
    policy = "LocalSteps(4, push=Int8(block=256), pull=BFloat16())"
    assert bytes_of("--policy", policy) == [5e5]
    delta = 4e6 * Int4(256).size(CODED) / (4 * CODED)
    coded = "--codec", "int4:256,delta:int4:256"
    assert bytes_of("--policy", "sync", *coded) == [delta]
    assert bytes_of("--policy", "async", *coded) == [2 * delta], "each pulls at its own time"
    many = ("--workers", "9", "--policy", "async", *coded)
    assert bytes_of(*many)[-1] == 4e6, "whole values take fewer bytes than nine deltas"


@each_case(
    ("arguments", "text"),
    [
        (("--policy", "eventual"), "--policy"),
        (("--codec", "int5"), "--codec"),
        (("--codec", "delta:int8"), "it is for pulls, and not for pushes"),
        (("--codec", "int8,topk:0.1"), "it is for pushes, and not for pulls"),
        (("--codec", "int8,int8,int8"), "one codec of pushes and one of pulls"),
        (("--calibrate", "--codec", "int8"), "leave out --codec"),
        (("--policy", "bounded:-1"), "--policy"),
        (("--policy", "__import__('os').getcwd()"), "--policy"),
        (("--policy", "sync:backup=4", *SMALL), "--policy"),
        (("--model-mb", "1", "--parameters", "1"), "--parameters"),
        (("--straggler", "0.1"), "--straggler"),
        (("--straggler", "2:5"), "straggler_p"),
        (("--slow", "0.5:2"), "--slow"),
        (("--workers", "0"), "--workers"),
        (("--calibrate", "--workers", "4"), "--calibrate"),
        (("--calibrate", "--slow", "1:5", "--no-search"), "leave out --slow, --search/--no-search"),
    ],
)
def test_plan_wrong_option_is_named(arguments: tuple[str, ...], text: str) -> None:
    told = call(*arguments)
    assert told.exit_code == 2, told.output
    assert text in told.output


def test_plan_picture_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    told = call(*SMALL, "--out", str(tmp_path / "plan.png"))
    assert "pip install matplotlib" in str(told.exception)
    assert not list(tmp_path.iterdir())


def test_plan_picture_is_of_all_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[tuple[int, Path]] = []
    monkeypatch.setattr(show, "require_matplotlib", lambda: None)
    monkeypatch.setattr(show, "draw", lambda rows, path: drawn.append((len(rows), path)))
    call(*SMALL, *SHORT, "--shards", "1", "--no-search", "--out", str(tmp_path / "p.svg"))
    assert drawn == [(3, tmp_path / "p.svg")]


def test_plan_calibrate_prints_prediction_and_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def instead(policy: Policy, model_bytes: float, step_s: float) -> Calibration:
        asked.append((policy, model_bytes, step_s))
        last = Compared(4, 2, model_bytes, step_s, 0.030, 0.027, "")
        return Calibration(Fitted(2, 1e-5, 1e-5, 1e-10, 1.0), [last])

    monkeypatch.setattr(calibrate, "calibrate", instead)
    done = call("--calibrate", "--step-ms", "20", "--model-mb", "4")
    assert "Predicted 27 ms, measured 30 ms: -10%, within 30%" in done.output
    assert [each[1:] for each in asked] == [(4e6, 0.02)]


@each_case(
    ("text", "codec"),
    [
        ("int8", Int8()),
        (" int4 ", Int4()),
        ("int2", Int2()),
        ("topk:0.02", TopK(0.02)),
        ("int4:block=32", Int4(block=32)),
        ("Int4(block=32)", Int4(block=32)),
        ("Sign", Sign()),
        ("delta:int4", Delta(Int4())),
        ("delta:int4:256", Delta(Int4(256))),
        ("Delta(Int4(block=256))", Delta(Int4(256))),
    ],
)
def test_codec_is_what_the_text_says(text: str, codec: Codec) -> None:
    assert codec_of(text) == codec


@each_case(
    ("text", "words"),
    [
        ("int5", "unknown name 'int5'; known: BFloat16"),
        ("8", "is no codec; known: bfloat16, float16, int8"),
        ("int4:33", "block of ps.Int4 is a power of two"),
        ("int4(", "never closed"),
        ("delta:int5", "unknown name 'int5'"),
        ("delta:powersgd", "equal bit by bit"),
        ("delta", "missing 1 required positional argument: 'codec'"),
        ("__import__('os')", "is no class|unknown name"),
    ],
)
def test_codec_that_is_none_is_told(text: str, words: str) -> None:
    with pytest.raises(click.BadParameter, match=words):
        codec_of(text)
