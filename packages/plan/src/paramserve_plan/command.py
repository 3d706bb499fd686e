"""The command `paramserve plan`: predict a cluster, or calibrate and check on this machine."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from paramserve.cli.policies import evaluate, policy_of
from paramserve.codecs.base import Codec
from paramserve.codecs.delta import Delta
from paramserve.codecs.registry import BUILT_IN as CODECS
from paramserve.consistency.base import Policy
from paramserve.core.user_codecs import why_not_pulled, why_not_pushed

if TYPE_CHECKING:
    from paramserve_plan.setting import Setting
    from paramserve_plan.show import Row

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
MODEL_MB = 100.0
CODED = 1 << 20
"""Values by which a codec's share is told."""
POLICIES = ("sync", "async", "bounded:4")
CALIBRATION_MB = 8.0
CALIBRATION_STEP_MS = 20.0


class Factor(click.ParamType):  # type: ignore[type-arg]  # click 8.1's has none
    """Two numbers with a colon between, as in 0.1:5."""

    def __init__(self, first: str) -> None:
        self.name = f"{first}:factor"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[float, float]:
        if isinstance(value, tuple):
            return value
        first, _, factor = str(value).partition(":")
        try:
            return float(first), float(factor)
        except ValueError:
            self.fail(f"{value!r} is not {self.name.upper()}, as in 0.1:5", param, ctx)


POSITIVE = click.FloatRange(min=0, min_open=True)
COUNT = click.IntRange(min=1)


NOT_CALIBRATED = frozenset(
    (
        *("workers", "shards", "out", "search", "seed", "clocks", "spread", "jitter"),
        *("straggler", "slow", "link_gbps", "worker_link_gbps", "latency_us"),
        *("codec", "local_steps"),
    )
)
"""Options that `--calibrate` has no use for."""


class Play(NamedTuple):
    """How it is to be played."""

    seed: int
    clocks: int | None
    search: bool


@click.command()
@click.option("--workers", type=COUNT, multiple=True, help="May be repeated. [default: 100]")
@click.option(
    "--shards",
    type=COUNT,
    multiple=True,
    help="May be repeated. [default: as many as are needed]",
)
@click.option("--model-mb", type=POSITIVE, help="Decimal megabytes. [default: 100]")
@click.option("--parameters", type=POSITIVE, help="Instead of --model-mb, as in 7e9.")
@click.option("--dtype", type=click.Choice(list(ITEM_BYTES)), default="float32", show_default=True)
@click.option("--step-ms", type=click.FloatRange(min=0), help="A worker's compute. [default: 100]")
@click.option(
    "--spread",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Of the workers' speeds: standard deviation over mean.",
)
@click.option(
    "--jitter", type=click.FloatRange(min=0), default=0.0, help="The same, of single steps."
)
@click.option("--straggler", type=Factor("probability"), help="Of single steps, as in 0.1:5.")
@click.option("--slow", type=Factor("count"), help="So many workers are always so slow: 1:5.")
@click.option("--link-gbps", type=POSITIVE, default=10.0, show_default=True)
@click.option("--worker-link-gbps", type=POSITIVE, help="If it differs from the servers'.")
@click.option("--latency-us", type=click.FloatRange(min=0), default=50.0, show_default=True)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="POLICY",
    help="sync, async, bounded:4, sync:backup=1, buffered:8, 'Async(damping=Inverse(0.1))'; may "
    "be repeated. [default: sync, async, bounded:4]",
)
@click.option(
    "--codec",
    metavar="PUSH[,PULL]",
    help="int8; int4,bfloat16; int4,delta:int4; topk:0.01; 'Int4(block=32)': what encodes "
    "gradients, and values.",
)
@click.option("--local-steps", type=COUNT, help="As --policy local:COUNT.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--clocks",
    type=click.IntRange(min=2),
    help="Steps of each worker to play. [default: as many as take a second or two]",
)
@click.option("--search/--no-search", default=True, help="For the number of shards needed.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.png")
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
@click.option(
    "--calibrate",
    is_flag=True,
    help="Measure this machine, predict 4 workers and 2 shards on it, run them, compare.",
)
def plan(
    workers: tuple[int, ...],
    shards: tuple[int, ...],
    policies: tuple[str, ...],
    calibrate: bool,
    out: Path | None,
    as_json: bool,
    search: bool,
    seed: int,
    clocks: int | None,
    **options: Any,
) -> None:
    """Predict step time, waiting, staleness and links of a cluster, from 1 to 10,000 workers.

    A model plays the real consistency policies with a network and compute as told.
    """
    if options["model_mb"] is not None and options["parameters"] is not None:
        raise click.UsageError("give --model-mb or --parameters, not both")
    if options["local_steps"] is not None:
        policies += (f"local:{options['local_steps']}",)
    chosen = {
        text: policy_of(text, option="--policy")
        for text in policies or (POLICIES[:1] if calibrate else POLICIES)
    }
    if calibrate:
        _refuse_beside_calibrate()
        _calibrate(chosen, as_json, options)
        return
    if out is not None:
        from paramserve_plan.show import require_matplotlib

        require_matplotlib()  # before anything takes time
    rows: list[Row] = []
    for count in workers or (100,):
        setting = _setting(count, options)
        for text, policy in chosen.items():
            encoded = _encoded(setting, policy, options["codec"])
            rows += _rows(text, policy, encoded, shards, Play(seed, clocks, search))
    _print(rows, as_json)
    if out is not None:
        from paramserve_plan.show import draw

        draw(rows, out)
        click.echo(f"paramserve: wrote {out}", err=as_json)


def _refuse_beside_calibrate() -> None:
    """Refuse options that would do nothing."""
    context = click.get_current_context()
    given = [
        "/".join([*each.opts, *each.secondary_opts])
        for each in context.command.params
        if each.name in NOT_CALIBRATED
        and context.get_parameter_source(each.name) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(
            f"--calibrate plays 4 even workers and 2 shards of this machine, as it measures them, "
            f"and draws no picture: leave out {', '.join(given)}"
        )


def _setting(workers: int, options: dict[str, Any]) -> Setting:
    from paramserve_plan import setting as of

    straggler = options["straggler"] or (0.0, 1.0)
    slow = options["slow"] or (0.0, 1.0)
    if slow[0] != int(slow[0]):
        raise click.BadParameter("COUNT is a whole number", param_hint="--slow")
    step_ms = options["step_ms"] if options["step_ms"] is not None else 100.0
    try:
        compute = of.Compute(
            step_ms / 1e3,
            options["spread"],
            options["jitter"],
            straggler[0],
            straggler[1],
            int(slow[0]),
            slow[1],
        )
        own = options["worker_link_gbps"]
        link = options["link_gbps"]
        network = of.Network(own if own is not None else link, link, options["latency_us"] / 1e6)
        return of.Setting(workers, 1, _model_bytes(options, MODEL_MB), network, compute)
    except ValueError as wrong:
        raise click.UsageError(str(wrong)) from None


def _encoded(setting: Setting, policy: Policy, codecs: str | None) -> Setting:
    """What codecs leave of the bytes: those of the option, else those of the policy."""
    push, pull = getattr(policy, "push", None), getattr(policy, "pull", None)
    if codecs is not None:
        given = [codec_of(each) for each in _split(codecs)]
        if len(given) > 2:
            raise click.UsageError("--codec takes one codec of pushes and one of pulls")
        push, pull = given[0], given[1] if len(given) > 1 else None
    for codec, why_not in ((push, why_not_pushed), (pull, why_not_pulled)):
        why = why_not(codec) if codec is not None else None
        if why is not None:
            raise click.UsageError(why)
    pulled = _share(pull)
    if isinstance(pull, Delta) and not policy.collects:
        # Each worker pulls at its own time, and needs what all the others have added.
        pulled = min(1.0, setting.workers * pulled)
    return replace(setting, push_share=_share(push), pull_share=pulled)


def codec_of(text: str, *, option: str = "--codec") -> Codec:
    """The codec that an option names: int8, topk:0.01, delta:int4, or as in Python,
    'Int4(block=32)'.

    Raises:
        click.BadParameter: it is none.
    """
    name, _, value = text.strip().partition(":")
    if name == Delta.__name__.lower() and value:
        inner = codec_of(value, option=option)
        try:
            return Delta(inner)
        except (TypeError, ValueError) as error:
            raise click.BadParameter(f"{text!r}: {error}", param_hint=option) from error
    by_short_name = {each.lower(): each for each in CODECS}
    written = f"{by_short_name[name]}({value})" if name in by_short_name else text
    try:
        found = evaluate(ast.parse(written, mode="eval").body, CODECS)
        found = found() if isinstance(found, type) else found
    except (SyntaxError, ValueError, TypeError) as error:
        raise click.BadParameter(f"{text!r}: {error}", param_hint=option) from error
    if not isinstance(found, Codec):
        known = ", ".join(by_short_name)
        raise click.BadParameter(f"{text!r} is no codec; known: {known}", param_hint=option)
    return found


def _split(text: str) -> list[str]:
    """Split at commas that are not within brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _share(codec: Codec | None) -> float:
    """What a codec leaves of float32; at most, where that depends on the values."""
    return 1.0 if codec is None else codec.size(CODED) / (4 * CODED)


def _model_bytes(options: dict[str, Any], default_mb: float) -> float:
    parameters, model_mb = options["parameters"], options["model_mb"]
    if parameters is not None:
        return float(parameters * ITEM_BYTES[options["dtype"]])
    return float((model_mb if model_mb is not None else default_mb) * 1e6)


def _rows(
    text: str, policy: Policy, setting: Setting, shards: tuple[int, ...], play: Play
) -> list[Row]:
    from paramserve_plan.model import Model
    from paramserve_plan.shards import sweep
    from paramserve_plan.show import Row

    try:
        found = sweep(setting, policy, seed=play.seed) if play.search or not shards else None
        made: list[Row] = []
        for count in shards or (found.best if found is not None else 1,):
            asked = replace(setting, shards=count)
            prediction = Model(asked, policy, seed=play.seed, clocks=play.clocks).play()
            made.append(Row(text, asked, prediction, found if not made else None))
    except ValueError as wrong:  # the policy does not go with so many workers
        raise click.BadParameter(f"{text}: {wrong}", param_hint="--policy") from None
    return made


def _print(rows: list[Row], as_json: bool) -> None:
    from rich.console import Console

    from paramserve_plan.show import show

    if as_json:
        click.echo(json.dumps({"predictions": [row.as_dict() for row in rows]}, indent=2))
    else:
        show(rows, Console())


def _calibrate(chosen: dict[str, Policy], as_json: bool, options: dict[str, Any]) -> None:
    from rich.console import Console

    from paramserve_plan.calibrate import calibrate, show_calibration

    step_ms = options["step_ms"] if options["step_ms"] is not None else CALIBRATION_STEP_MS
    model_bytes = _model_bytes(options, CALIBRATION_MB)
    found = {text: calibrate(policy, model_bytes, step_ms / 1e3) for text, policy in chosen.items()}
    if as_json:
        data = {text: each.as_dict() for text, each in found.items()}
        click.echo(json.dumps({"calibrated": data}, indent=2))
        return
    for text, each in found.items():
        show_calibration(text, each, Console())
