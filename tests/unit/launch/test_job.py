"""`start` and `Cluster` check everything before they start anything."""

from __future__ import annotations

import dataclasses
import re
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import cloudpickle
import msgspec
import numpy as np
import pytest
import torch
from tests.needs import needs
from tests.suites import each_case
from tests.unit.launch.puppets import Puppets

import paramserve as ps
from paramserve.config import ConsistencySpec, CoordinatorConfig, ServerConfig
from paramserve.engine.base import Fleet, Process, Role
from paramserve.errors import ParamServeError, UnknownName, WorkerFailed
from paramserve.launch.entries import COORDINATOR, Entry, Key
from paramserve.launch.plan import Plan
from paramserve.launch.running import Job
from paramserve.machine import cores
from paramserve.messages import GroupReport, LeaseReport, ServerBeat, Status, TableReport
from paramserve.worker import ExtraState, Resumed, WorkerConfig


class NeverOpens:
    """An engine that must not be used."""

    reads_refs = False
    threads_per_worker: int | None = None
    deadlines: ps.Deadlines | None = None
    limits: ps.Limits | None = None

    def open(self) -> Fleet:
        raise AssertionError("something was started")


def train(worker: ps.Worker, *args: object, **kwargs: object) -> None: ...


@each_case("option", ["workers", "servers"])
def test_start_counts_must_be_positive_ints(option: str) -> None:
    wrong: list[Any] = [0, -1, 2.0, True]
    for value in wrong:
        error = ValueError if type(value) is int else TypeError
        with pytest.raises(error, match=option):
            ps.start(train, engine=NeverOpens(), **{option: value})


@each_case(
    ("options", "error", "text"),
    [
        ({"consistency": "async"}, TypeError, "consistency must be"),
        ({"consistency": ps.Async}, TypeError, "consistency must be"),
        ({"consistency": ps.Async}, TypeError, r"not the class Async.*call it: ps\.Async\(\)"),
        ({"consistency": ps.Sync(backup=1)}, ValueError, "below the number of workers, 1"),
        ({"rules": [3]}, TypeError, "rules= takes classes"),
        ({"on_worker_death": "ignore"}, ValueError, "on_worker_death must be"),
        ({"timeout_s": 0}, ValueError, "timeout_s must be"),
        ({"timeout_s": float("nan")}, ValueError, "timeout_s must be"),
        ({"seed": -1}, ValueError, "seed must be"),
        ({"seed": 1.5}, ValueError, "seed must be"),
        ({"engine": "local"}, TypeError, "engine must be"),
        ({"engine": ps.Local}, TypeError, r"call it: ps\.Local\(\)"),
        ({"worker": 2}, TypeError, "unexpected keyword argument 'worker'"),
        ({"args": 3}, TypeError, r"^args must be a tuple or list.* not 3: write args=\(3,\)$"),
        ({"args": "abc"}, TypeError, r"not 'abc': write args=\('abc',\)$"),
        ({"args": None}, TypeError, "not None: leave it out for none$"),
        ({"args": {"lr": 1}}, TypeError, "args must be"),
        ({"args": np.ones(3)}, TypeError, r"args must be.* not ndarray\(shape=\(3,\)\)"),
        ({"kwargs": 3}, TypeError, r"^kwargs must be a dict .* not 3$"),
        ({"kwargs": [("lr", 1)]}, TypeError, "kwargs must be a dict"),
        ({"kwargs": {3: 1}}, TypeError, "kwargs goes by the names of parameters, and 3 is none"),
        ({"args": (threading.Lock(),)}, TypeError, "argument 0"),
        ({"kwargs": {"guard": threading.Lock()}}, TypeError, "argument 'guard'"),
    ],
)
def test_start_wrong_argument_is_named(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        ps.start(train, **{"engine": NeverOpens(), **options})


@each_case(
    ("path", "error"), [(7, TypeError), ("file", FileExistsError), ("file/x", NotADirectoryError)]
)
def test_start_save_tables_that_is_no_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Any, error: type[Exception]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    needs("pyarrow")
    told = "save_tables must be" if path == 7 else "save_tables cannot write to .*file.*To fix: "
    with pytest.raises(error, match=told):
        ps.start(train, engine=NeverOpens(), checkpoint=ps.Checkpoint(save_tables=path))


def test_start_save_tables_without_pyarrow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    checkpoint = ps.Checkpoint(save_tables=tmp_path / "tables")
    with pytest.raises(ps.ParamServeError, match=r"pip install 'paramserve\[arrow\]'"):
        ps.start(train, engine=NeverOpens(), checkpoint=checkpoint)
    assert list(tmp_path.iterdir()) == []


@each_case("begin", [ps.run, ps.start])
def test_arguments_behind_the_function_are_told_where_they_go(begin: Any) -> None:
    with pytest.raises(TypeError, match=rf"^ps.{begin.__name__} takes .* write args=\(3,\)$"):
        begin(train, 3, engine=NeverOpens())
    with pytest.raises(TypeError, match=r"write args=\(3, 'x'\)$"):
        begin(train, 3, "x")
    with pytest.raises(TypeError, match="'train'"):
        begin()


@each_case(
    ("begin", "name", "text"),
    [
        (ps.run, "worker", r"ps\.run got an unexpected .* 'worker': did you mean workers\?$"),
        (ps.start, "consistancy", "did you mean consistency"),
        (ps.start, "show", r"ps\.start got .* 'show': .*observe\.watch\(job\)"),
        (ps.run, "epochs", r"training function write kwargs=\{'epochs': \.\.\.\}"),
    ],
)
def test_unknown_option_is_told_what_to_write(begin: Any, name: str, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        begin(train, engine=NeverOpens(), **{name: 3})


def serve(**options: Any) -> None:
    ps.serve("127.0.0.1:0", token_file="missing", **options)


BEGINS: dict[str, Callable[..., object]] = {
    "run": partial(ps.run, train),
    "start": partial(ps.start, train),
    "Cluster": ps.Cluster,
    "serve": serve,
}


@each_case(
    ("name", "written", "called"),
    [
        (name, written, called)
        for name, written, all_called in (
            ("policies", "rules=[MyPolicy]", "run start Cluster serve"),
            ("codecs", "rules=[MyCodec]", "run start Cluster serve"),
            (
                "on_server_death",
                "checkpoint=ps.Checkpoint(path, on_server_death=...)",
                "run start",
            ),
            ("deadlines", "engine=ps.Local(deadlines=...), or ps.OnRay(...)", "run start Cluster"),
            ("limits", "engine=ps.Local(limits=...), or ps.OnRay(...)", "run start Cluster"),
            *(
                (name, f"checkpoint=ps.Checkpoint({name}=...)", "run start")
                for name in ("load_state", "load_tables", "save_tables")
            ),
            ("show_rank", "engine=ps.Local(show_rank=...)", "run start"),
            (
                "threads_per_worker",
                "engine=ps.Local(threads_per_worker=...), or ps.OnRay(...)",
                "run start",
            ),
            ("worker_weight", "worker.factor = ... in the training function", "run start"),
        )
        for called in all_called.split()
    ],
)
def test_option_that_has_moved_is_told_its_new_place(name: str, written: str, called: str) -> None:
    told = f"ps.{called} got an unexpected keyword argument {name!r}: write {written}"
    with pytest.raises(TypeError, match=f"^{re.escape(told)}$"):
        BEGINS[called](**{name: 3})


def test_unknown_option_of_a_cluster_is_told_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"^ps\.Cluster got .* 'rule': did you mean rules\?$"):
        ps.Cluster(rule=[])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^ps\.Cluster got an unexpected .* 'show'$"):
        ps.Cluster(show="table")  # type: ignore[call-arg]


def test_run_takes_what_start_takes() -> None:
    with pytest.raises(ValueError, match="workers"):
        ps.run(train, workers=0, engine=NeverOpens())
    with pytest.raises(ValueError, match=r"show is .* not 'bar'"):
        ps.run(train, show="bar", engine=NeverOpens())  # type: ignore[arg-type]


@each_case(
    ("options", "error", "text"),
    [
        ({"servers": 0}, ValueError, "servers"),
        ({"workers": -1}, ValueError, "workers"),
        ({"consistency": "sync"}, TypeError, "consistency"),
        ({"consistency": ps.Sync(backup=2), "workers": 2}, ValueError, "number of workers, 2"),
        ({"rules": ["Async"]}, TypeError, "rules= takes classes"),
        ({"engine": ps.Local}, TypeError, "engine"),
    ],
)
def test_cluster_wrong_argument_is_named(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        ps.Cluster(**{"engine": NeverOpens(), **options})


SETTINGS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"deadlines": 5.0}, TypeError, r"deadlines must be ps.Deadlines\(...\), not 5.0"),
    ({"deadlines": ps.Limits()}, TypeError, "deadlines must be"),
    ({"limits": ps.Deadlines()}, TypeError, r"limits must be ps.Limits"),
    ({"limits": {"clients_max": 3}}, TypeError, "limits must be"),
    ({"deadlines": ps.Deadlines(stall_s="long")}, TypeError, "stall_s must be a number"),
    ({"limits": ps.Limits(clients_max=1.5)}, TypeError, "clients_max must be an int"),
    ({"limits": ps.Limits(clients_max=True)}, TypeError, "clients_max must be an int"),
    ({"limits": ps.Limits(clients_max=0)}, ValueError, "clients_max must be above 0"),
    ({"limits": ps.Limits(poll_s_max=-1e-3)}, ValueError, "poll_s_max must be at least 0"),
    ({"deadlines": ps.Deadlines(stop_s=float("nan"))}, ValueError, "stop_s must be above 0"),
    ({"deadlines": ps.Deadlines(start_s=float("inf"))}, ValueError, "start_s must be .* finite"),
    ({"deadlines": ps.Deadlines(stall_s=1)}, ValueError, "heartbeat_s must be below stall_s"),
]


@each_case("make", [ps.Local, ps.OnRay])
def test_deadlines_and_limits_that_are_wrong_are_named(make: Callable[..., object]) -> None:
    for options, error, text in SETTINGS:
        with pytest.raises(error, match=text):
            make(**options)


@each_case("begin", [ps.Cluster, lambda **options: ps.start(train, **options)])
def test_wrong_deadlines_and_limits_of_an_own_engine_are_named(
    begin: Callable[..., object],
) -> None:
    for options, error, text in SETTINGS:
        engine = NeverOpens()
        vars(engine).update(options)
        with pytest.raises(error, match=text):
            begin(engine=engine)


class Full(Exception):
    """All processes of a run were asked for."""


class KeepsRoles:
    """An engine that starts nothing, and gives up once `count` processes were asked for."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.roles: list[Role] = []

    reads_refs = False
    threads_per_worker: int | None = None
    deadlines: ps.Deadlines | None = None
    limits: ps.Limits | None = None
    shares_host = True
    tls = None

    def open(self, roles: Sequence[str] = (), environment: Mapping[str, str] = {}) -> Fleet:
        return self  # a fake: it has no events

    def launch(self, role: Role) -> Process:
        self.roles.append(role)
        if len(self.roles) == self.count:
            raise Full
        return object()  # never used

    def close(self) -> None: ...


KINDS = {"coordinator": CoordinatorConfig, "server 0": ServerConfig, "worker 0": WorkerConfig}


@each_case(
    ("begin", "count"),
    [(lambda **options: ps.run(train, **options), 3), (ps.Cluster, 2)],
    ids=["run", "cluster"],
)
def test_deadlines_and_limits_reach_every_process(begin: Callable[..., object], count: int) -> None:
    deadlines, limits = ps.Deadlines(stall_s=77), ps.Limits(clients_max=7, poll_s_max=0.0)
    engine = KeepsRoles(count)
    engine.deadlines, engine.limits = deadlines, limits
    with pytest.raises(Full):
        begin(engine=engine)
    assert [role.name for role in engine.roles] == list(KINDS)[:count]
    for role in engine.roles:
        config: Any = msgspec.msgpack.decode(role.payload, type=KINDS[role.name])
        assert (config.deadlines, config.limits) == (deadlines, limits)


def test_lines_of_each_process_are_labelled() -> None:
    engine = KeepsRoles(4)
    with pytest.raises(Full):
        ps.start(train, workers=2, engine=engine)
    labels = [role.label for role in engine.roles]
    assert labels == ["[coordinator] ", "[server 0] ", "[rank 0] ", "[rank 1] "]


@each_case(("threads", "expected"), [(3, 3), (None, max(1, cores() // 2))])
def test_threads_of_the_engine_are_those_of_its_workers(threads: int | None, expected: int) -> None:
    engine = KeepsRoles(4)
    engine.threads_per_worker = threads
    with pytest.raises(Full):
        ps.start(train, workers=2, engine=engine)
    found = [role.environment["OMP_NUM_THREADS"] for role in engine.roles]
    assert found == ["1", "1", str(expected), str(expected)]


def interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def test_run_interrupted_before_anything_has_started_has_no_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Puppets, "open", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"none of its processes is left.*None") as caught:
        ps.run(train, engine=Puppets())
    assert caught.value.result is None  # type: ignore[attr-defined]  # ours


def test_run_interrupted_again_while_it_stops_has_ended_without_a_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted_once(job: Job) -> None:
        if not stops:
            stops.append(job)
            job._supervisor.abandon()
            raise KeyboardInterrupt("again")
        stop(job)

    stops: list[Job] = []
    stop = Job.stop
    monkeypatch.setattr(Job, "__enter__", interrupted)
    monkeypatch.setattr(Job, "stop", interrupted_once)
    engine = Puppets()
    with pytest.raises(KeyboardInterrupt, match="again") as caught:
        ps.run(train, engine=engine)
    assert caught.value.result is None  # type: ignore[attr-defined]  # ours
    assert engine.closed.is_set()


def launched(servers: int = 1) -> Job:
    """A job without workers, whose processes are never heard of."""
    plan = Plan(servers=servers, workers=0, consistency=ConsistencySpec("Async"))
    job = Job(plan, Puppets(), seed=3)
    job.launch()
    return job


def test_value_that_cannot_be_unpickled_here_costs_no_other_one() -> None:
    job = launched()
    for number, body in enumerate((cloudpickle.dumps("first"), b"broken", cloudpickle.dumps("l"))):
        rank = Key("worker", number)
        job._supervisor.roster.entries[rank] = Entry(rank, returned=body)
    job._supervisor.attempt.readout.values = {"default": {"w": np.ones(1)}}
    job.stop()
    for _ in range(2):
        with pytest.raises(WorkerFailed, match="what worker 1 returned cannot be unp") as caught:
            job.wait()
        assert caught.value.result is not None
        assert caught.value.result.returns == {0: "first", 2: "l"}
        assert len(caught.value.__notes__) == 1, "that there is a result"
        assert caught.value.result.state_dict("default")["w"].tolist() == [1.0]
    assert job.state_dict("default")["w"].tolist() == [1.0]


def test_result_says_how_many_records_are_missing() -> None:
    job = launched()
    job._supervisor.overview.dropped_records = 7
    job.stop()
    assert job.wait().dropped_records == 7


def test_result_shows_what_functions_returned_in_a_short_line() -> None:
    returns = {rank: {"weights": torch.ones(1000), "text": "x" * 1000} for rank in range(100)}
    job = launched(servers=0)
    job.stop()
    shown = repr(dataclasses.replace(job.wait(), returns=returns))
    assert "returns={0: {'text': 'xxx" in shown
    assert "'weights': Tensor(shape=(1000,))}, 1: {" in shown
    assert len(shown) < 2000


def test_result_tells_staleness_and_drops_by_worker_and_policy() -> None:
    job = launched()
    told = ((0, 6, 3, 2), (1, 5, 0, 0))
    report = GroupReport("m", 12, ((0, 6),), 1, told, policy="Async", dropped=((1, 4),))
    job._supervisor.attempt.readout.beats = [ServerBeat(0, (report,))]
    shared = (LeaseReport("train", ((0, 600, 512), (1, 100, 96)), repeated=3),)
    job._supervisor.overview.status = Status(1, (), (), (), (), 0, leases=shared)
    job.stop()
    result = job.wait()
    assert result.dropped == {1: 4}
    assert result.groups["m"].policy == "Async"
    assert result.groups["m"].staleness_by_rank == result.staleness
    assert result.staleness[0].mean == 0.5
    assert (result.samples, result.repeated_samples) == ({0: 512, 1: 96}, 3)


@each_case(
    ("policy", "version", "skipped", "staleness", "dropped", "words"),
    [
        ("Own", 0, 0, (), ((0, 4), (2, 3)), "of rank 0, rank 2 to group 'm' .* Own dropped all 7"),
        ("Async", 9, 0, ((0, 9, 0, 0),), ((0, 4), (1, 5)), "of rank 1 to .* Async dropped all 5"),
        ("Sync", 0, 6, (), (), "group 'm' was not trained: 6 steps were left out, .* NaN or Inf"),
        ("Sync", 9, 0, ((0, 9, 0, 0),), ((1, 5),), None),  # what backup= is for
        ("Async", 9, 6, ((0, 9, 0, 0), (1, 1, 0, 0)), ((0, 4), (1, 5), (-1, 2)), None),
        ("Async", 0, 0, (), (), None),
    ],
)
def test_result_of_gradients_that_were_all_left_out_warns_once(
    policy: str, version: int, skipped: int, staleness: Any, dropped: Any, words: str | None
) -> None:
    job = launched()
    report = GroupReport("m", version, (), skipped, staleness, policy=policy, dropped=dropped)
    job._supervisor.attempt.readout.beats = [ServerBeat(0, (report,))]
    job.stop()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert job.wait() is job.wait()
    assert len(caught) == (words is not None)
    for told in caught:
        assert re.search(words or "", str(told.message))
        assert told.filename == __file__


def test_result_tells_how_large_tables_were() -> None:
    names = ("users", "users (labels)")
    job = launched(servers=2)
    job._supervisor.attempt.readout.beats = [
        ServerBeat(n, tuple(GroupReport(name, 4, (), 0, (), table=of) for name in names))
        for n, of in enumerate([TableReport(10, 99, 1, 12), TableReport(11, 99, 1, 12)])
    ]
    job._supervisor.attempt.readout.values = {"model": {}}
    job.stop()
    result = job.wait()
    assert {name: (each.rows, each.created) for name, each in result.tables.items()} == {
        "users": (21, 24)
    }
    assert "rows={'users': 21}" in repr(result)
    assert [*result.groups] == [*names], "with labels, which are no table of the user's"
    with pytest.raises(UnknownName, match="'users' is a table"):
        result.state_dict("users")
    with pytest.raises(UnknownName, match="no group 'model2'"):
        next(iter(job.snapshots(name="model2")))


def test_snapshots_of_a_stopped_run_that_has_a_table_only_name_what_is_missing() -> None:
    job = launched()
    table = GroupReport("users", 4, (), 0, (), table=TableReport(10, 99, 1, 12))
    job._supervisor.attempt.readout.beats, job._supervisor.attempt.readout.values = (
        [ServerBeat(0, (table,))],
        {},
    )
    job.stop()
    with pytest.raises(UnknownName, match="no group 'model'; its groups: 'users'"):
        next(iter(job.snapshots()))


def test_restart_that_may_take_longer_than_the_others_wait_is_named() -> None:
    engine = ps.Local(deadlines=ps.Deadlines(restart_s=120))
    with pytest.raises(ValueError, match="restart_s must be below request_s"):
        ps.start(train, on_worker_death=ps.Restart(), engine=engine)


def test_result_restart_has_the_clock_of_its_own_successor() -> None:
    job = launched()
    job.stop()
    rank = Key("worker", 1)
    there = msgspec.msgpack.encode(Resumed(2, 5, 1))
    died = [Entry(rank, status=-9), Entry(rank, status=3, restarts=1)]
    job._supervisor.restarts = died
    job._supervisor.roster.entries[rank] = Entry(rank, restarts=2, resumed=there)
    first, second = job.wait().restarts
    assert (first.clock, first.repeated) == (None, 0)  # its successor ended before it joined
    assert (second.clock, second.repeated) == (5, 1)
    assert "exited with code 3" in str(second.error)
    long = first._replace(error=ParamServeError("it raised\n\nTraceback", fix="look"))
    told = "Restarted(rank=1, error=ParamServeError('it raised'), clock=None, repeated=0)"
    assert repr(long) == told
    assert repr([long]) == f"[{told}]"


def test_result_state_of_an_unfrozen_layer_is_what_the_servers_hold() -> None:
    job = launched()
    told = {"frozen": np.zeros(1), "unfrozen": np.zeros(1)}
    for number in range(2):
        body = msgspec.msgpack.encode(ExtraState("model", cloudpickle.dumps(told)))
        event: Any = SimpleNamespace(kind="extra state", body=body)
        job._supervisor._take(COORDINATOR, event)
        assert len(job._supervisor.reports) == 0, f"report {number} replaces the one before"
    job._supervisor.attempt.readout.values = {"model": {"unfrozen": np.ones(1)}}
    job.stop()
    state = job.wait().state_dict()
    assert {name: float(value[0]) for name, value in state.items()} == {
        "frozen": 0.0,
        "unfrozen": 1.0,
    }


def test_extra_state_is_unpickled_once_for_all_snapshots() -> None:
    job = launched()
    told = job._supervisor.extra_states
    told["model"] = cloudpickle.dumps({"frozen": np.zeros(1), "_extra_state": {"scale": [1.0]}})
    first, second = job._extra_state("model"), job._extra_state("model")
    assert first["frozen"] is second["frozen"]
    first["_extra_state"]["scale"].append(2.0)
    assert second["_extra_state"] == job._extra_state("model")["_extra_state"] == {"scale": [1.0]}
    told["model"] = cloudpickle.dumps({})
    assert job._extra_state("model") == job._extra_state("other") == {}
    job.stop()
