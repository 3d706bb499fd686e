"""Servers write their parts of a checkpoint while clients push, and others go on from it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from click.testing import CliRunner
from msgspec import structs
from safetensors.numpy import load_file
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import RoleCluster, in_threads
from tests.needs import needs
from tests.suites import each_case

from paramserve.checkpoint.folder import Folder
from paramserve.checkpoint.manifest import Manifest, values_path
from paramserve.checkpoint.reader import Checkpoint
from paramserve.checkpoint.storage import LocalFolder
from paramserve.cli import cli
from paramserve.client import Client
from paramserve.config import CheckpointPlan, ServerConfig
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, BoundedStaleness, Buffered, LocalSteps, Sync
from paramserve.consistency.registry import registered
from paramserve.consistency.registry import spec as policy_spec
from paramserve.core.cut_parts import TableCopy
from paramserve.core.stepping import flush
from paramserve.core.table.block import KeyedBlock
from paramserve.core.table.options import LRU, TTL, MinCount
from paramserve.core.table.store import clocks_of
from paramserve.errors import (
    CheckpointDamaged,
    CheckpointError,
    DefineMismatch,
    PullTimeout,
    UnknownRule,
)
from paramserve.rules import SGD, Adagrad, Adam, Add
from paramserve.rules.custom import CustomRule
from paramserve.server import new_shard

LARGE = 40_000
"""float64 elements that are split over the shards."""


@dataclass(frozen=True)
class Centered(CustomRule):
    """Moves each tensor by its gradient less the gradient's mean."""

    whole_tensors: ClassVar[bool] = True

    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None:
        value -= gradient - gradient.mean()


@dataclass(frozen=True)
class Patient(Async):
    """A policy of the user's own."""


def writes(folder: Path) -> CheckpointPlan:
    """Of clusters that write checkpoints when they are asked for them."""
    return CheckpointPlan(folder=str(folder), run="test")


def resumes(folder: Path, made: Manifest) -> CheckpointPlan:
    """Of clusters that go on from one, and write none."""
    return CheckpointPlan(resume_folder=str(folder), resume=made.name)


def newest(folder: Path) -> Manifest:
    return Folder(LocalFolder(folder)).manifests()[0][0]


def taken(cluster: RoleCluster) -> Manifest:
    """A checkpoint of now."""
    cluster.checkpoint()
    return newest(Path(cluster.plan.folder))


def arrays(cluster: RoleCluster) -> dict[str, np.ndarray]:
    """Values and states of all blocks, each as one array over all shards; and their counts."""
    found = dict[str, np.ndarray]()
    for server in cluster.servers:
        for number, block in server.role.shard.blocks.items():
            if isinstance(block, KeyedBlock):
                continue
            for field in range(1 + len(block.state)):
                name = f"{number}.{field}"
                own = np.copy(block.field(field))
                found[name] = np.concatenate((found.get(name, own[:0]), own))
            found[f"{number}.counts"] = np.array(block.counts)
    return found


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert values.tobytes() == other[name].tobytes(), name


@each_case("servers", [1, 2, 3, 5])
def test_servers_of_any_number_go_on_from_a_checkpoint(
    make_cluster: MakeCluster, tmp_path: Path, servers: int
) -> None:
    cluster = make_cluster(servers=2, checkpoints=writes(tmp_path), registers=[Centered])
    client = cluster.client()
    start = np.random.default_rng(0).normal(size=LARGE)
    client.define({"w": start, "b": np.zeros(3)}, rule=Adam(lr=0.1), group="model")
    client.define("n", np.arange(9), group="model.buffers")
    client.define("v", start[:50].astype(np.float32), rule=SGD(0.1, momentum=0.9), group="other")
    whole = {f"c{i}": start[i : 5_000 + 1_000 * i] for i in range(5)}
    client.define(whole, rule=Centered(), group="whole")
    client.push(whole)
    for _ in range(3):
        client.push({"w": start, "b": np.ones(3)})
    client.push("b", np.ones(3))
    client.push("v", np.ones(50, np.float32))
    client.pull("v")
    made = taken(cluster)
    before, state = arrays(cluster), client.pull()
    plan = resumes(tmp_path, made)
    resumed = make_cluster(servers=servers, checkpoints=plan, registers=[Centered])
    same(arrays(resumed), before)
    groups = [server.role.shard.groups[0].state for server in resumed.servers]
    assert {group.version for group in groups} == {4}
    with Checkpoint(LocalFolder(tmp_path), made) as saved:
        saved.verify()
        assert (saved.tensor(values_path("model"), "w") == state["w"]).all()


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
def test_masters_of_16_bit_parameters_go_on_from_a_checkpoint(
    make_cluster: MakeCluster, tmp_path: Path, servers: int
) -> None:
    start = np.random.default_rng(0).normal(size=LARGE)

    def define(cluster: RoleCluster) -> Client:
        client = cluster.client()
        half = start.astype(np.float16)
        client.define({"w": half, "b": np.zeros(3, np.float16)}, rule=Adam(lr=0.1), group="model")
        options = {"rule": SGD(0.1, momentum=0.9), "group": "other", "dtype": "bfloat16"}
        client.define("v", start.astype(np.float32), **options)  # type: ignore[arg-type]
        whole = {f"c{i}": half[i : 5_000 + 1_001 * i] for i in range(5)}
        client.define(whole, rule=Centered(), group="whole")
        return client

    def push(client: Client, seed: int) -> None:
        chosen = np.random.default_rng(seed)
        for names in (["w", "b"], ["v"], [f"c{i}" for i in range(5)]):
            shapes = {name: value.shape for name, value in client.pull(names).items()}
            gradients = {n: chosen.normal(size=s).astype(np.float32) for n, s in shapes.items()}
            client.push(gradients).result()

    cluster = make_cluster(servers=2, checkpoints=writes(tmp_path), registers=[Centered])
    client = define(cluster)
    for seed in range(3):
        push(client, seed)
    made = taken(cluster)
    plan = resumes(tmp_path, made)
    resumed = make_cluster(servers=servers, checkpoints=plan, registers=[Centered])
    same(arrays(resumed), arrays(cluster))
    with Checkpoint(LocalFolder(tmp_path), made) as saved:
        values = saved.tensor(values_path("model"), "w")
    assert values.dtype == np.float32
    assert (values.astype(np.float16) != values).any(), "they are not rounded"
    assert (values.astype(np.float16) == client.pull("w")).all()
    again = define(resumed)
    for each in (client, again):
        push(each, 7)
    same(arrays(resumed), arrays(cluster))
    with pytest.raises(DefineMismatch, match="is in the checkpoint with dtype bfloat16, now float"):
        again.define("v", start.astype(np.float32), rule=SGD(0.1, momentum=0.9), group="other")


def test_checkpoint_has_the_same_pushes_on_all_shards(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster(servers=2, checkpoints=writes(tmp_path))
    reader, pushers = cluster.client(), [cluster.client() for _ in range(2)]
    reader.define({"w": np.zeros(LARGE), "b": np.zeros(3)}, rule=Add())
    over, seen = threading.Event(), list[set[float]]()
    for client in pushers:
        client.blocks()

    def push(client: object) -> None:
        ones = {"w": np.ones(LARGE), "b": np.ones(3)}
        while not over.is_set():
            client.push(ones)  # type: ignore[attr-defined]

    def take() -> None:
        try:
            for _ in range(8):
                told = cluster.checkpoint()
                assert 0.0 < told.pause_s < 1.0
                with Checkpoint(LocalFolder(tmp_path), newest(tmp_path)) as saved:
                    path = values_path("default")
                    values = [saved.tensor(path, name) for name in ("w", "b")]
                    seen.append({*np.unique(values[0]), *np.unique(values[1])})
        finally:
            over.set()

    in_threads(*(lambda each=each: push(each) for each in pushers), take)
    assert [len(each) for each in seen] == [1] * len(seen)
    assert min(seen[0]) < min(seen[-1])
    assert not any(server.role.shard.cuts.parts_here for server in cluster.servers)


# --- tables --------------------------------------------------------------------------------------

TABLES: dict[str, dict[str, Any]] = {
    "plain": {"rule": Adagrad(lr=0.1)},
    "half": {"rule": SGD(0.1), "dtype": "bfloat16"},
    "lru": {"rule": Adam(lr=0.1), "evict": LRU(rows=60)},
    "ttl": {"rule": Adagrad(lr=0.1), "evict": TTL(clocks=2)},
    "admit": {"rule": SGD(0.1), "admit": MinCount(2)},
}
DIM = 4


def train(client: Client, number: int) -> None:
    """Push and read rows, as the n-th part of a training."""
    chosen = np.random.default_rng(number)
    for name in TABLES:
        table = client.table(name, dim=DIM, **TABLES[name])
        for _ in range(3):
            ids = np.unique(chosen.integers(0, 200, 30))
            table.push(ids, chosen.normal(size=(ids.size, DIM)).astype(np.float32))
            table.pull(chosen.integers(0, 200, 10))
            table.delete(chosen.integers(0, 200, 8))
        client.tick(group=name)
    client.pull(["w"])


def rows(cluster: RoleCluster) -> dict[str, Any]:
    """By table: all rows as they lie in memory, with the clock of their last use; the keys that
    wait for admission; what its shards count; and the order of use on each shard."""
    found: dict[str, Any] = {}
    for server in cluster.servers:
        for block in server.role.shard.blocks.values():
            if not isinstance(block, KeyedBlock):
                continue
            store, name = block.store, block.spec.group_name
            keys, numbers, _ = store.scan(0, 1 << 20)
            clocks = dict[int, int]()
            if store.orders_use:
                uses = store.uses(numbers)
                oldest = np.argsort(uses)
                at = clocks_of(uses[oldest])
                clocks = dict(zip(keys[oldest].tolist(), at.tolist(), strict=True))
            found[f"{name} in order on {server.role.shard.number}"] = list(clocks)
            mine = found.setdefault(name, {})
            raw = np.empty((numbers.size, store.layout.words), np.float32)
            store.raw(numbers, raw)
            for key, row in zip(keys.tolist(), raw, strict=True):
                mine[key] = row.tobytes(), clocks.get(key)
            counted = found.setdefault(f"{name} counted", {})
            waiting = store.candidates()
            for some, counts in waiting.entries() if waiting is not None else ():
                counted |= {int(k): int(n) for k, n in zip(some, counts, strict=True) if n}
            report = block.report()
            went = (report.evicted, report.deleted)
            told = np.array([report.created, *went, report.unadmitted])
            found[f"{name} told"] = [*(found.get(f"{name} told", 0) + told)]
    return found


def check_increments(make_cluster: MakeCluster, tmp_path: Path, servers: int) -> None:
    """Train tables on two servers with four checkpoints, and go on from the last one."""
    cluster = make_cluster(servers=2, workers=1, checkpoints=writes(tmp_path))
    client = cluster.client(rank=0)
    client.define("w", np.zeros(3), rule=Add())
    for number in range(4):
        train(client, number)
        made = taken(cluster)
    assert len(made.layers["plain"]) == 4
    sizes = [sum(made.file(path).size for path in layer) for layer in made.layers["plain"]]
    assert sizes[0] < sum(sizes[1:])
    assert all(made.layers[name] for name in TABLES)
    before = rows(cluster)
    if "ttl" in TABLES and "admit" in TABLES:
        assert len(before["ttl"]) < len(before["plain"]), "rows have gone"
        assert before["admit counted"]
    resumed = make_cluster(servers=servers, workers=1, checkpoints=resumes(tmp_path, made))
    after = rows(resumed)
    for name, each in before.items():
        if "in order" not in name or servers == 2:
            assert after[name] == each, name


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
def test_tables_go_on_from_increments(
    make_cluster: MakeCluster, tmp_path: Path, servers: int
) -> None:
    check_increments(make_cluster, tmp_path, servers)


def nothing(*arguments: Any) -> None:
    """In place of what an increment needs."""


@each_case(
    ("lacks", "stub", "table"),
    [
        ("core.table.changes.RowChanges.before", nothing, "half"),
        ("core.table.changes.RowChanges.on_remove", nothing, "ttl"),
        ("core.table.changes.RowChanges.on_remove", nothing, "half"),
        ("checkpoint.shard_reader.LoadedTable.uses", nothing, "lru"),
        ("checkpoint.shard_reader.LoadedTable.candidates", None, "admit"),
    ],
)
def test_what_an_increment_lacks_shows(
    make_cluster: MakeCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lacks: str,
    stub: Any,
    table: str,
) -> None:
    monkeypatch.setattr(f"paramserve.{lacks}", stub)
    monkeypatch.setattr(f"{__name__}.TABLES", {"plain": TABLES["plain"], table: TABLES[table]})
    with pytest.raises((AssertionError, KeyError)):
        check_increments(make_cluster, tmp_path, 2)


@each_case("servers", [1, 2, 3])
def test_gradients_in_a_buffer_go_on(
    make_cluster: MakeCluster, tmp_path: Path, servers: int
) -> None:
    """What both a cluster and one that goes on from its checkpoint come to, is the same."""

    def define(cluster: RoleCluster) -> tuple[Client, Any]:
        client = cluster.client(rank=0)
        start = np.random.default_rng(0).normal(size=LARGE)
        policy = Buffered(4, damping=None)
        client.define({"w": start, "b": np.ones(3)}, rule=SGD(0.1), group="model")
        return client, client.table("rows", dim=DIM, rule=SGD(0.1), consistency=policy)

    def push(client: Client, table: Any, number: int) -> None:
        chosen = np.random.default_rng(number)
        client.push({"w": chosen.normal(size=LARGE)} if number % 3 else {"b": np.ones(3)})
        ids = np.unique(chosen.integers(0, 50, 20))
        table.push(ids, chosen.normal(size=(ids.size, DIM)).astype(np.float32))

    options: dict[str, Any] = {"policy": Buffered(5, damping=None), "workers": 1}
    cluster = make_cluster(servers=2, checkpoints=writes(tmp_path), **options)
    client, table = define(cluster)
    for number in range(7):
        push(client, table, number)
    client.pull()
    made = taken(cluster)
    resumed = make_cluster(servers=servers, checkpoints=resumes(tmp_path, made), **options)
    shards = [server.role.shard for server in (*cluster.servers, *resumed.servers)]
    buffered = [[each.state.buffered for each in shard.groups.values()] for shard in shards]
    assert buffered == [[2, 3]] * len(shards)
    for shard in shards:
        for machine in shard.groups.values():
            cluster.on_server(partial(flush, machine.state))
    same(arrays(resumed), arrays(cluster))
    assert rows(resumed)["rows"] == rows(cluster)["rows"]


# --- other policies ------------------------------------------------------------------------------


def policies_at(clients: list[Client], cluster: RoleCluster, clock: int) -> dict[str, Any]:
    """By group, by what all clients and shards go at a clock."""
    found: dict[str, Any] = {}
    for server in cluster.servers:
        for machine in server.role.shard.groups.values():
            state = machine.state
            policy = state.at(clock).policy
            terms = {client.steps._terms.at(state.id, clock).policy for client in clients}
            assert terms == {policy}
            assert found.setdefault(state.name, policy) == policy
    return found


def started(cluster: RoleCluster, ranks: int = 2, first: int = 0) -> list[Client]:
    """Clients with all groups: a table and another go by the cluster's policy, two have their own.

    Args:
        ranks, first: the ranks `first` to `ranks - 1`.
    """
    clients = [cluster.client(rank=rank) for rank in range(first, ranks)]
    for client in clients:
        client.define({"w": np.zeros(LARGE), "b": np.zeros(3)}, rule=Add())
        client.define("o", np.zeros(3), rule=Add(), group="own", consistency=Async())
        client.define("s", np.zeros(3), rule=Add(), group="set")
        client.table("rows", dim=DIM, rule=SGD(0.1))
    return clients


def stepped(client: Client) -> Any:
    """The ticket of a step that adds 1 to "b"."""
    client.push("b", np.ones(3))
    return client.tick()


@each_case("servers", [1, 2, 3])
def test_cluster_goes_on_under_another_policy(
    make_cluster: MakeCluster, tmp_path: Path, servers: int
) -> None:
    """Workers are at clocks 1 and 3 of the checkpoint: nothing is collected before clock 3."""
    plan = writes(tmp_path)
    cluster = make_cluster(servers=2, workers=2, policy=Async(), checkpoints=plan)
    clients = started(cluster)
    clients[0].set_consistency("set", BoundedStaleness(5))
    for rank in (0, 1, 1, 1):
        stepped(clients[rank])
    for client in clients:
        client.drain()
    (again := tmp_path / "again").mkdir()
    plan = structs.replace(resumes(tmp_path, taken(cluster)), folder=str(again), run="test")
    sums = Sync(reduce="sum")
    cluster = make_cluster(servers=servers, workers=2, policy=sums, checkpoints=plan)
    clients = started(cluster)
    after = {"default": sums, "own": Async(), "set": BoundedStaleness(5), "rows": sums}
    then = {**dict.fromkeys(after, Async()), "rows": sums}
    assert policies_at(clients, cluster, 2) == then, "as they were, but where no step was made"
    assert policies_at(clients, cluster, 99) == after
    for _ in range(2):
        stepped(clients[0]).result()
    first = stepped(clients[0])
    assert (clients[1].pull("b") == 6.0).all(), "it waits for the other one"
    stepped(clients[1]).result()
    first.result()
    assert (clients[0].pull("b") == 8.0).all()
    plan = resumes(again, taken(cluster))
    cluster = make_cluster(servers=2, workers=2, policy=Async(), checkpoints=plan)
    clients = started(cluster)
    assert policies_at(clients, cluster, 99) == {**after, "default": Async(), "rows": Async()}
    assert policies_at(clients, cluster, 3)["default"] == sums
    stepped(clients[0]).result()
    assert (clients[1].pull("b") == 9.0).all()


@each_case("servers", [1, 2, 3])
@each_case("policy", [Sync(reduce="sum"), BoundedStaleness(0)])
def test_ranks_that_had_ended_and_new_ones_are_waited_for(
    make_cluster: MakeCluster, tmp_path: Path, servers: int, policy: Policy
) -> None:
    """Rank 1 ends before the checkpoint, and rank 2 comes only with the cluster that goes on."""
    cluster = make_cluster(servers=2, workers=2, policy=policy, checkpoints=writes(tmp_path))
    clients = started(cluster)
    for ticket in [stepped(client) for client in clients]:
        ticket.result()
    clients[1].close()
    stepped(clients[0]).result()
    plan = resumes(tmp_path, taken(cluster))
    cluster = make_cluster(servers=servers, workers=3, policy=policy, checkpoints=plan)
    clients = started(cluster, 2)
    sent = [stepped(client) for client in clients]
    if policy.collects:
        assert not any(ticket.done() for ticket in sent)
    else:
        with pytest.raises(PullTimeout, match=r"worker 2 \(at clock 2\)"):
            clients[0].pull("b", timeout_s=0.3)
    clients.append(started(cluster, 3, first=2)[0])
    assert clients[2].clock() == 2
    for ticket in [*sent, stepped(clients[2])]:
        ticket.result()
    assert (clients[2].pull("b") == 3.0 + 3.0).all()


def test_policy_that_workers_step_otherwise_under_is_refused(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster(workers=1, policy=Async(), checkpoints=writes(tmp_path))
    cluster.client(rank=0).define("w", np.zeros(4), rule=Add())
    config = config_of(cluster, resumes(tmp_path, taken(cluster)))
    config = structs.replace(config, consistency=policy_spec(LocalSteps(every=8)))
    with pytest.raises(CheckpointError, match="'default' is Async, the run's LocalSteps: the wor"):
        new_shard(config)


# --- what cannot be gone on from -----------------------------------------------------------------


def test_lost_cut_is_told_and_the_next_checkpoint_is_written(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(workers=1, checkpoints=writes(tmp_path))
    client = cluster.client(rank=0)
    table = client.table("plain", dim=DIM, **TABLES["plain"])
    ids = np.arange(50)
    table.push(ids, np.ones((50, DIM), np.float32)).result()
    monkeypatch.setattr("paramserve.core.table.cut.COPIED_BYTES_MAX", 0)
    whole = TableCopy.rows_to_copy

    def late(copy: TableCopy) -> Any:
        table.push(ids, np.ones((50, DIM), np.float32)).result()
        return whole(copy)

    monkeypatch.setattr(TableCopy, "rows_to_copy", late)
    with pytest.raises(CheckpointError, match="of a table's rows changed before they were read"):
        cluster.checkpoint()
    monkeypatch.undo()
    table.push(ids, np.ones((50, DIM), np.float32)).result()
    assert taken(cluster).layers.keys() == {"plain"}
    assert not cluster.servers[0].role.shard.cuts.parts_here


def test_damaged_part_is_refused_by_its_name(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(checkpoints=writes(tmp_path))
    client = cluster.client()
    client.define("w", np.arange(9.0), rule=Add(), group="model")
    made = taken(cluster)
    path = tmp_path / made.own(values_path("model")).path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match=r"values/model\.safetensors.*'w'"):
        new_shard(config_of(cluster, resumes(tmp_path, made)))
    with pytest.raises(CheckpointError, match="has no checkpoint 'step-77'; it has step-0"):
        new_shard(config_of(cluster, CheckpointPlan(resume_folder=str(tmp_path), resume="step-77")))


def test_policy_and_rule_that_are_not_registered_are_refused(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    plan = writes(tmp_path)
    own = [Centered, Patient]
    cluster = make_cluster(registers=own, policy=Patient(), workers=1, checkpoints=plan)
    client = cluster.client(rank=0)
    client.define("w", np.arange(9.0), rule=Centered(), group="model")
    made = taken(cluster)
    config = config_of(cluster, resumes(tmp_path, made))
    config = structs.replace(config, consistency=policy_spec(Async()))
    with pytest.raises(UnknownRule, match="Patient"):
        new_shard(config, registered([Centered]))
    with pytest.raises(UnknownRule, match="Centered"):
        new_shard(config, registered([Patient]))
    new_shard(config, registered(own))


def keeps(*names: str) -> type[CustomRule]:
    """A rule of the user's with these states; all of its versions have one name."""

    @dataclass(frozen=True)
    class Mine(CustomRule):
        state_names: ClassVar[tuple[str, ...]] = names

        def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None:
            for each in state.values():
                each += 1.0

    return Mine


def as_wide(width: int) -> type[CustomRule]:
    """A rule of the user's whose state has this width."""

    @dataclass(frozen=True)
    class Rows(CustomRule):
        state_names: ClassVar[tuple[str, ...]] = ("norm",)
        whole_rows: ClassVar[bool] = True

        def row_states(self, dim: int) -> tuple[int, ...]:
            return (width,)

        def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None:
            value -= gradient

    return Rows


@each_case("names", [("v", "m"), ("m",), ("m", "v", "x"), ()])
def test_rule_that_keeps_other_states_is_refused(
    make_cluster: MakeCluster, tmp_path: Path, names: tuple[str, ...]
) -> None:
    before, rows = keeps("m", "v"), as_wide(1)
    cluster = make_cluster(registers=[before, rows], workers=1, checkpoints=writes(tmp_path))
    client = cluster.client(rank=0)
    client.define("w", np.zeros(4), rule=before())
    for name, rule in (("users", before()), ("items", rows())):
        client.table(name, dim=DIM, rule=rule).push(np.arange(3), np.ones((3, DIM), np.float32))
    config = config_of(cluster, resumes(tmp_path, taken(cluster)))
    now = f"the states {', '.join(names)}" if names else "no state"
    with pytest.raises(CheckpointError, match="another rule than the checkpoint's") as refused:
        new_shard(config, registered([keeps(*names), as_wide(2)]))
    told = refused.value.failed
    assert f"Mine of 'w' in 'default' kept the states m, v, now {now};" in told
    assert "Mine of table 'users' kept the states m (4 a row), v (4 a row), now" in told
    assert "Rows of table 'items' kept the states norm (1 a row), now the states norm (2" in told
    assert refused.value.applied == "no"
    new_shard(config, registered([before, rows]))


def config_of(cluster: RoleCluster, plan: CheckpointPlan) -> ServerConfig:
    return structs.replace(cluster.config(0), checkpoints=plan)


# --- tools ---------------------------------------------------------------------------------------


def test_tools_read_what_servers_have_written(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = tmp_path / "a", tmp_path / "out"
    plan = structs.replace(writes(folder), full_every=2)
    cluster = make_cluster(servers=2, workers=1, checkpoints=plan)
    client = cluster.client(rank=0)
    weights = np.random.default_rng(1).normal(size=(200, 100)).astype(np.float32)
    client.define({"w": weights, "b": np.zeros(3, np.float32)}, rule=Adam(), group="model")
    tables = {"plain": client.table("plain", dim=DIM, **TABLES["plain"])}
    tables["half"] = client.table("half", dim=DIM, **TABLES["half"])
    tables["ttl"] = client.table("ttl", dim=DIM, **TABLES["ttl"])
    words = client.table("words", dim=2, rule=SGD(lr=1.0), labels=True)
    client.table("no rows", dim=2, rule=Adagrad(lr=0.1))
    for number in range(2):
        words.push([f"word {number}", "both"], np.ones((2, 2), np.float32))
        words.put([number], np.ones((1, 2), np.float32))
        for table in tables.values():
            ids = np.arange(number * 10, number * 10 + 20)
            table.push(ids, np.random.default_rng(number).normal(size=(20, DIM)))
        client.tick(group="ttl")
        client.push("w", weights)
        client.pull(["w"])
        made = taken(cluster)
    assert len(made.layers["half"]) == 2, "an increment"
    run = CliRunner().invoke
    shown = run(cli, ["checkpoints", "show", str(folder)])
    assert "table 'half': all rows and 1 increments" in shown.output
    assert run(cli, ["checkpoints", "verify", str(folder)]).exit_code == 0
    exported = ["checkpoints", "export", str(folder), "--out"]
    done = run(cli, [*exported, str(out), "--to", "safetensors"])
    assert done.exit_code == 0, done.output
    read = load_file(out)
    assert (read["w"] == client.pull("w")).all()
    parquet = needs("pyarrow.parquet")
    monkeypatch.setattr("paramserve.launch.exporting.SLICE_BYTES", 200)
    assert run(cli, [*exported, str(tmp_path / "t"), "--to", "parquet"]).exit_code == 0
    for table in client.tables():
        path = tmp_path / f"{table.name}.parquet"
        table.to_parquet(path, state=True)
        told, wanted = (
            parquet.read_table(each).sort_by("key") for each in (tmp_path / "t" / path.name, path)
        )
        assert told.equals(wanted, check_metadata=True), table.name
    idle = parquet.read_table(tmp_path / "t" / "ttl.parquet").column("idle_clocks").to_pylist()
    assert sorted(idle) == [1] * 20 + [2] * 10
    labels = parquet.read_table(tmp_path / "t" / "words.parquet").column("label").to_pylist()
    assert sorted(labels) == ["", "", "both", "word 0", "word 1"]
