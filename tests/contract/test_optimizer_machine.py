"""An adopted optimizer does what plain torch does, or says why not, in any order of calls.

Deaths of workers and of servers are not among the calls: here is one process.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.contract.conftest import MakeCluster
from tests.contract.optimizer_pair import (
    SHAPES,
    SPARE,
    Harnesses,
    Pair,
    Side,
    assert_close,
    pairs,
    raise_first,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import paramserve as ps
from paramserve.pytorch import hyper

SHORT = settings(
    max_examples=9,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
LONG = settings(SHORT, max_examples=400, stateful_step_count=40, derandomize=False)
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "dampening": 0.25, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.5, "nesterov": True, "maximize": True}),
    ("Adam", {}),
    ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
    ("AdamW", {"weight_decay": 0.1}),
    ("Adagrad", {"initial_accumulator_value": 0.1}),
    ("RMSprop", {"momentum": 0.9}),
    ("NAdam", {"weight_decay": 0.1}),
    ("Adamax", {}),
    ("Adadelta", {}),
    ("RAdam", {}),
    ("ASGD", {"t0": 2}),
    ("Rprop", {}),
    ("Adafactor", {}),
]
OPTIONS: dict[str, list[Any]] = {
    "lr": [0.0, 0.01, 0.1],
    "weight_decay": [0.0, 0.2],
    "momentum": [0.0, 0.5, 0.9],
    "betas": [(0.9, 0.999), (0.8, 0.95)],
    "eps": [1e-8, 1e-4],
    "maximize": [False, True],
    "nesterov": [False],
}
BAD: dict[str, tuple[Any, str]] = {
    "lr": (-1.0, "(?i)lr|learning rate"),
    "differentiable": (True, "differentiable"),
    "betas": ((0.9, 1.5), "beta"),
}
"""What is refused at the next step, and what the error says."""
FORMS = [
    StateDictOptions(strict=False),
    StateDictOptions(strict=False, flatten_optimizer_state_dict=True),
]
seeds = st.integers(0, 999)
names = st.sampled_from([*SHAPES])
some = st.sets(names, max_size=3)


class OptimizerMachine(RuleBasedStateMachine):
    """Does to both what hypothesis draws."""

    def __init__(self, make_pair: Callable[..., Pair]) -> None:
        super().__init__()
        self.make_pair = make_pair

    @initialize(
        ranks=st.sampled_from([1, 1, 2]),
        asynchronous=st.booleans(),
        overlap=st.sampled_from([False, False, True]),
        kind=st.sampled_from(KINDS),
    )
    def start(
        self, ranks: int, asynchronous: bool, overlap: bool, kind: tuple[str, dict[str, Any]]
    ) -> None:
        policy = ps.Async() if asynchronous and ranks == 1 else ps.Sync()
        self.pair = self.make_pair(ranks, policy, overlap=overlap)
        self.adopt(kind)

    def adopt(self, kind: tuple[str, dict[str, Any]]) -> None:
        self.kind, options = kind
        build = getattr(torch.optim, self.kind)
        self.pair.start(lambda groups: build(groups, lr=0.05, **options))
        self.options = options
        self.steps = 0
        self.spare = 0
        self.warned = False
        self.saved: list[tuple[Any, ...]] = []

    def teardown(self) -> None:
        if hasattr(self, "pair") and self.pair.whole:
            self.pair.finish()

    def step(self, do: Callable[[Side], Any], refused: str = "") -> None:
        self.pair.step(do, refused)
        self.steps += not refused

    @property
    def group_count(self) -> int:
        return len(self.pair.plain.optimizer.param_groups)

    # --- steps -----------------------------------------------------------------------------------

    @rule(seed=seeds, without=some)
    def step_once(self, seed: int, without: set[str]) -> None:
        self.pair.set_gradients(seed, without)
        self.step(lambda side: side.optimizer.step())

    @rule(seed=seeds, to_none=st.booleans())
    def accumulate(self, seed: int, to_none: bool) -> None:
        def twice(side: Side) -> None:
            kept = {name: param.grad for name, param in side.params.items()}
            side.optimizer.zero_grad(set_to_none=to_none)
            for name, gradient in kept.items():
                param = side.params[name]
                if gradient is not None:
                    param.grad = gradient.clone() if param.grad is None else param.grad + gradient
                    param.grad += gradient
            side.optimizer.step()

        self.pair.set_gradients(seed, set())
        self.step(twice)

    @rule(seed=seeds, without=some)
    def step_with_closure(self, seed: int, without: set[str]) -> None:
        self.pair.set_gradients(seed, without)

        def step(side: Side) -> None:
            assert side.optimizer.step(lambda: torch.tensor(float(seed))) == float(seed)

        self.step(step)

    @precondition(lambda self: len(self.pair.served) == 1)
    @rule(seed=seeds, without=some, norm=st.sampled_from([0.5, 100.0]))
    def step_clipped(self, seed: int, without: set[str], norm: float) -> None:
        self.pair.set_gradients(seed, without)

        def step(side: Side) -> None:
            torch.nn.utils.clip_grad_norm_(side.model.parameters(), norm)
            side.optimizer.step()

        self.step(step)

    @rule(seed=seeds, bad=names, value=st.sampled_from([float("nan"), float("inf")]))
    def step_with_nan(self, seed: int, bad: str, value: float) -> None:
        """Refused under Sync and Async; with overlap at the step after, which is not drawn."""
        self.pair.set_gradients(seed, set())
        spoilt = [side.params[bad] for side in self.pair.served]
        trained = {name for group in self.pair.plain.grouped() for name in group}
        if self.pair.overlap or bad not in trained or not spoilt[0].requires_grad:
            return
        for param in spoilt:
            param.grad.fill_(value)
        self.step(lambda side: side.optimizer.step(), refused="NaN or Inf")

    @rule(seed=seeds, inf=st.booleans(), unscales=st.booleans())
    def step_scaled(self, seed: int, inf: bool, unscales: bool) -> None:
        self.pair.set_gradients(seed, set())
        trained = {name for group in self.pair.plain.grouped() for name in group}
        usable = [n for n in sorted(trained) if self.pair.plain.params[n].requires_grad]
        if not usable:
            return

        def step(side: Side) -> None:
            side.scaler.scale(torch.ones(()))
            for param in side.params.values():
                if param.grad is not None:
                    param.grad *= side.scaler.get_scale()
            if inf:
                side.params[usable[0]].grad.fill_(float("inf"))
            if unscales:
                side.scaler.unscale_(side.optimizer)
            side.scaler.step(side.optimizer)
            side.scaler.update()

        self.count_left_out(inf)
        self.step(step)

    @precondition(lambda self: self.group_count)
    @rule(seed=seeds)
    def step_scaled_and_refused(self, seed: int) -> None:
        """The next one must not find this one's scale."""
        groups = [side.optimizer.param_groups[0] for side in self.pair.served]
        before = [group["lr"] for group in groups]
        self.pair.set_gradients(seed, {*SHAPES} - {*self.pair.plain.grouped()[0]})
        if all(param.grad is None for param in self.pair.plain.params.values()):
            return
        for group in groups:
            group["lr"] = -1.0

        def step(side: Side) -> None:
            side.scaler.scale(torch.ones(()))
            side.scaler.step(side.optimizer)

        self.step(step, refused="(?i)lr|learning rate")
        for group, kept in zip(groups, before, strict=True):
            group["lr"] = kept

    def count_left_out(self, inf: bool) -> None:
        """torch does not call `step` of an optimizer for what its scaler leaves out; ours sends
        that it did, and a fused one of torch's calls it too."""
        if inf:
            for side in self.pair.served:
                side.calls -= 1

    # --- options ---------------------------------------------------------------------------------

    @precondition(lambda self: self.group_count)
    @rule(data=st.data(), option=st.sampled_from([*OPTIONS]))
    def set_option(self, data: st.DataObject, option: str) -> None:
        index = data.draw(st.integers(0, self.group_count - 1))
        group = self.pair.plain.optimizer.param_groups[index]
        value = data.draw(st.sampled_from(OPTIONS[option]))
        if option not in group or isinstance(group[option], tuple) != isinstance(value, tuple):
            return
        if option == "eps" and group[option] is None:
            return
        if option == "momentum" and (
            (value and not self.options.get("momentum")) or group.get("nesterov")
        ):
            return
        if option == "momentum" and group.get("dampening"):
            return  # documented: the servers know no parameter that was stepped without momentum
        if option == "nesterov" and isinstance(group[option], bool) is False:
            return
        if option == "lr" and not value and self.kind in ("ASGD", "Rprop", "RAdam"):
            return

        def change(side: Side) -> None:
            side.optimizer.param_groups[index][option] = value

        self.pair.each(change)

    @precondition(lambda self: self.kind in ("SGD", "Adam", "AdamW") and self.group_count)
    @rule(value=st.sampled_from([0.01, 0.2]))
    def fill_tensor_rate(self, value: float) -> None:
        def change(side: Side) -> None:
            group = side.optimizer.param_groups[0]
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = torch.tensor(value)

        self.pair.each(change)

    @precondition(lambda self: self.group_count)
    @rule(seed=seeds, option=st.sampled_from([*BAD]))
    def set_bad_option(self, seed: int, option: str) -> None:
        value, text = BAD[option]
        groups = [side.optimizer.param_groups[0] for side in self.pair.served]
        params = self.pair.plain.optimizer.param_groups[0]["params"]
        if option not in groups[0] or not any(param.requires_grad for param in params):
            return  # what has nothing to step is not read
        before = [group[option] for group in groups]
        for group in groups:
            group[option] = value
        self.pair.set_gradients(seed, set())
        self.step(lambda side: side.optimizer.step(), refused=text)
        for group, kept in zip(groups, before, strict=True):
            group[option] = kept

    @precondition(lambda self: self.group_count)
    @rule(which=st.sampled_from(["step", "lambda", "exponential"]))
    def schedule(self, which: str) -> None:
        def build(side: Side) -> None:
            kinds = torch.optim.lr_scheduler
            for group in side.optimizer.param_groups:
                group.pop("initial_lr", None)
            side.scheduler = {
                "step": lambda: kinds.StepLR(side.optimizer, 2, 0.5),
                "lambda": lambda: kinds.LambdaLR(side.optimizer, lambda n: 1 / (n + 1)),
                "exponential": lambda: kinds.ExponentialLR(side.optimizer, 0.9),
            }[which]()

        self.pair.each(build)

    @precondition(lambda self: self.pair.plain.scheduler is not None and self.steps)
    @rule(reloads=st.booleans())
    def scheduler_step(self, reloads: bool) -> None:
        def step(side: Side) -> None:
            side.scheduler.step()
            if reloads:
                side.scheduler.load_state_dict(side.scheduler.state_dict())

        if len(self.pair.plain.scheduler.base_lrs) == self.group_count:
            self.pair.each(step)

    # --- parameters ------------------------------------------------------------------------------

    @rule(name=names, trains=st.booleans())
    def freeze(self, name: str, trains: bool) -> None:
        self.pair.each(lambda side: side.params[name].requires_grad_(trains))

    @precondition(lambda self: self.spare < len(SPARE) and self.kind != "Adagrad")
    @rule(lr=st.sampled_from([0.02, 0.2]))
    def add_group(self, lr: float) -> None:
        """Not of torch's Adagrad, whose next step would raise KeyError there."""

        def add(side: Side) -> None:
            params = [side.params[name] for name in SPARE[self.spare]]
            side.optimizer.add_param_group({"params": params, "lr": lr})

        raise_first(self.pair.on_ranks(lambda rank: add(self.pair.served[rank])))
        add(self.pair.plain)
        self.spare += 1
        self.pair.outstanding = False

    @precondition(lambda self: any(self.pair.plain.grouped()))
    @rule(data=st.data())
    def remove_parameter(self, data: st.DataObject) -> None:
        grouped = self.pair.plain.grouped()
        at = data.draw(
            st.sampled_from([(i, j) for i, group in enumerate(grouped) for j in range(len(group))])
        )

        def remove(side: Side) -> None:
            group = side.optimizer.param_groups[at[0]]
            side.removed.append((group, at[1], group["params"].pop(at[1])))

        self.pair.each(remove)

    @precondition(lambda self: self.pair.plain.removed)
    @rule()
    def put_back(self) -> None:
        def put(side: Side) -> None:
            group, place, param = side.removed.pop()
            group["params"].insert(place, param)

        self.pair.each(put)

    @rule()
    def reverse_groups(self) -> None:
        self.pair.each(lambda side: side.optimizer.param_groups.reverse())

    @precondition(lambda self: self.group_count)
    @rule(seed=seeds)
    def append_unknown(self, seed: int) -> None:
        """Refused, since the servers do not have it."""
        unknown = torch.nn.Parameter(torch.ones(2))
        lists = [side.optimizer.param_groups[0]["params"] for side in self.pair.served]
        for each in lists:
            each.append(unknown)
        self.pair.set_gradients(seed, set())
        self.step(lambda side: side.optimizer.step(), refused="add_param_group")
        for each in lists:
            del each[-1]

    @rule(seed=seeds, name=names, counted=st.booleans())
    def write(self, seed: int, name: str, counted: bool) -> None:
        """The values live on the servers: the step replaces what was written, with a warning."""
        trained = {each for group in self.pair.plain.grouped() for each in group}
        if name not in trained or self.pair.plain.removed:
            return
        if not self.pair.plain.params[name].requires_grad:
            return  # the servers may not have it
        if self.pair.overlap and not self.pair.outstanding:
            return  # this step installs nothing
        for side in self.pair.served:
            target = side.params[name]
            (target.detach() if counted else target.data).add_(1.0)
        self.pair.set_gradients(seed, set())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.step(lambda side: side.optimizer.step())
        told = [str(each.message) for each in caught if "changed outside" in str(each.message)]
        assert len(told) == (0 if self.warned else len(self.pair.served)), told
        self.warned = True

    # --- state -----------------------------------------------------------------------------------

    def form(self) -> list[list[str]]:
        return self.pair.plain.grouped()

    @precondition(lambda self: not self.pair.plain.removed and self.group_count)
    @rule()
    def save(self) -> None:
        states = copy.deepcopy(self.pair.compare_states())
        self.saved.append((self.form(), states))

    @precondition(lambda self: self.saved and not self.pair.plain.removed)
    @rule(data=st.data(), crosses=st.booleans())
    def load(self, data: st.DataObject, crosses: bool) -> None:
        form, states = data.draw(st.sampled_from(self.saved))
        if form != self.form():
            return
        for side, state in zip(self.pair.sides(), states, strict=True):
            side.optimizer.load_state_dict(copy.deepcopy(states[-1] if crosses else state))
        self.pair.compare_states()

    @precondition(lambda self: not self.pair.plain.removed and self.group_count)
    @rule(options=st.sampled_from(FORMS), loads=st.booleans())
    def checkpoint(self, options: StateDictOptions, loads: bool) -> None:
        """As `torch.distributed.checkpoint` does; it takes no two groups with other names."""
        wanted = self.pair.compare_states()[-1]
        side = self.pair.served[0]
        self.pair.each(lambda each: each.optimizer.zero_grad())
        calls = [each.calls for each in self.pair.sides()]
        found = get_optimizer_state_dict(side.model, side.optimizer, options=FORMS[0])
        ordered = [name for group in self.form() for name in group]
        if wanted["state"]:
            by_name = {ordered[index]: entry for index, entry in wanted["state"].items()}
            assert_close(found["state"], by_name, "checkpoint")
        frozen = not all(param.requires_grad for param in self.pair.plain.params.values())
        # torch's functions leave a frozen parameter out: torch's Adagrad then has no state of it,
        # with which its next step would raise KeyError. The servers begin it anew.
        if loads and wanted["state"] and not (frozen and self.kind == "Adagrad"):
            for each in self.pair.sides():
                state = get_optimizer_state_dict(each.model, each.optimizer, options=options)
                set_optimizer_state_dict(each.model, each.optimizer, state, options=options)
        for each, called in zip(self.pair.sides(), calls, strict=True):
            each.calls = called  # torch makes a step there, with its hooks; it sends nothing
        self.pair.compare_states()

    @rule(kind=st.sampled_from(KINDS))
    def next_phase(self, kind: tuple[str, dict[str, Any]]) -> None:
        """Another optimizer goes on; the one before is refused."""
        before = [side.optimizer for side in self.pair.served]
        self.pair.compare_states() if not self.pair.plain.removed else None
        self.pair.each(lambda side: [p.requires_grad_() for p in side.model.parameters()])
        self.adopt(kind)
        for optimizer in before:
            with pytest.raises(RuntimeError, match="steps no more"):
                optimizer.step()


IGNORED = ("ignore:.*lr_scheduler.step", "ignore:.*initial_lr", "ignore:To get the last learning")


@pytest.mark.timeout(600)  # for making a failure small, which hypothesis ends after 300 s
@pytest.mark.filterwarnings(*IGNORED)
def test_optimizer_does_what_torch_does(make_cluster: MakeCluster) -> None:
    with pairs(Harnesses(make_cluster)) as make_pair:
        run_state_machine_as_test(lambda: OptimizerMachine(make_pair), settings=SHORT)


@pytest.mark.filterwarnings(*IGNORED)
def test_buffers_of_zeros_come_back_with_dampening(make_cluster: MakeCluster) -> None:
    with pairs(Harnesses(make_cluster)) as make_pair:
        machine = OptimizerMachine(make_pair)
        machine.start(1, False, False, ("SGD", {"momentum": 0.9, "dampening": 0.25}))
        machine.accumulate(seed=0, to_none=False)  # zeroes the gradients that it adds again
        machine.save()
        for side, state in zip(machine.pair.sides(), machine.saved[0][1], strict=True):
            side.optimizer.load_state_dict(copy.deepcopy(state))
        machine.step_once(seed=3, without=set())
        machine.teardown()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings(*IGNORED)
def test_optimizer_does_what_torch_does_for_long(make_cluster: MakeCluster) -> None:
    with pairs(Harnesses(make_cluster)) as make_pair:
        run_state_machine_as_test(lambda: OptimizerMachine(make_pair), settings=LONG)


@pytest.mark.filterwarnings(*IGNORED)
def test_machine_finds_a_rate_that_is_not_read_anew(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is worth nothing if it finds nothing."""
    monkeypatch.setattr(hyper.HyperReader, "rule", lambda self, group: self.defined)
    once = settings(SHORT, phases=[Phase.generate], report_multiple_bugs=False)
    with pairs(Harnesses(make_cluster)) as make_pair, pytest.raises(AssertionError):
        run_state_machine_as_test(lambda: OptimizerMachine(make_pair), settings=once)
