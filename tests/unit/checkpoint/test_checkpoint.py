"""What several processes have written, any number of others read."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from tests.disk import Disk
from tests.needs import needs
from tests.suites import each_case
from tests.unit.checkpoint import sample

from paramserve.checkpoint import manifest as naming
from paramserve.checkpoint.folder import Folder
from paramserve.checkpoint.manifest import Cut, Written, table_path, values_path
from paramserve.checkpoint.reader import Checkpoint
from paramserve.checkpoint.rows import ROWS, Column, Section, bounds, in_order, places
from paramserve.checkpoint.storage import LocalFolder
from paramserve.checkpoint.tensors import Tensor, layout
from paramserve.checkpoint.writer import Writer
from paramserve.core.table.hashing import shard_of
from paramserve.errors import CheckpointError
from paramserve.messages import BlockSpec, Piece

ROOT = Path(__file__).parents[3]


@pytest.fixture
def storage(tmp_path: Path) -> LocalFolder:
    made = LocalFolder(tmp_path / "runs" / "a")
    made.make()
    return made


PROCESS = """
import sys
from tests.unit.checkpoint import test_checkpoint
test_checkpoint.{}(*sys.argv[1:])
"""


def write_in_process(root: str, name: str, shard: str) -> None:
    """What a server does, and what it sends to the coordinator then."""
    report = sample.write_server(LocalFolder(root), name, 1, int(shard), full=True)
    sys.stdout.buffer.write(msgspec.msgpack.encode(report))


def load_in_process(root: str, shard: str, shards: str) -> None:
    folder = Folder(LocalFolder(root))
    with Checkpoint(folder.storage, folder.named("step-1")) as saved:
        print(repr(sample.load_server(saved, int(shard), int(shards))))


def processes(function: str, *arguments: tuple[object, ...]) -> list[bytes]:
    """Call a function of this module in processes at the same time; what they print."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS.format(function), *map(str, each)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        for each in arguments
    ]
    printed = [each.communicate()[0] for each in started]
    assert [each.returncode for each in started] == [0] * len(started)
    return printed


def test_two_processes_write_and_three_load(tmp_path: Path) -> None:
    with Folder(LocalFolder(tmp_path)).claimed("run 7f3a") as folder:
        name = folder.begin(1)
        told = processes("write_in_process", (tmp_path, name, 0), (tmp_path, name, 1))
        reports = [msgspec.msgpack.decode(each, type=tuple[Written, ...]) for each in told]
        reports.append(sample.write_cluster(folder.storage, name, 1))
        folder.commit(name, reports, Cut(step=1, shards=2, blocks=sample.blocks(2)))
    loaded = processes("load_in_process", *((tmp_path, shard, 3) for shard in range(3)))
    found = sample.joined([ast.literal_eval(each.decode()) for each in loaded])
    wanted = sample.contents(1)
    assert found == {what: wanted[what] for what in found}


def test_any_number_of_servers_reads_increments_over_a_base() -> None:
    disk = Disk()
    with Folder(disk).claimed("run") as folder:
        made = sample.save(folder, 0)
        for number in range(1, 5):
            made = sample.save(folder, number, made)
            with Checkpoint(disk, made) as saved:
                for shards in (1, 2, 3, 5):
                    assert sample.load(saved, shards) == sample.contents(number)
        assert [len(each) for each in made.layers["users"]] == [2] * 5
        assert folder.prune(keep=1).checkpoints == ("step-3", "step-2", "step-1", "step-0")
        with Checkpoint(disk, folder.named("step-4")) as saved:
            saved.verify()
            assert sample.load(saved) == sample.contents(4)
        made = sample.save(folder, 5)
        assert folder.prune(keep=1).nbytes > 0
        assert [each.name for each in disk.entries("") if each.is_folder] == ["step-5"]


def test_other_tools_read_the_files(storage: LocalFolder, tmp_path: Path) -> None:
    needs("safetensors")
    from safetensors.numpy import load_file

    with Folder(storage).claimed("run") as folder:
        sample.save(folder, 1)
    root = tmp_path / "runs" / "a" / "step-1"
    found = load_file(root / values_path("model"))
    assert {name: each.shape for name, each in found.items()} == {
        "scale": (3,),
        "layer.weight": (30, 20),
        "layer.bias": (20,),
    }
    values = sample.dense(1)
    assert (found["scale"] == values[0]).all()
    assert (found["layer.weight"].ravel() == values[1][:600]).all()
    rows = sample.users(1).rows
    for shard in range(2):
        table = load_file(root / table_path("users", shard))
        for key, value in zip(table["key"].tolist(), table["value"].tolist(), strict=True):
            assert tuple(value) == rows[key][0]
    assert load_file(root / "worker-0.safetensors")["0"].tolist() == list(range(7))


def test_torch_distributed_checkpoint_reads_the_values(
    storage: LocalFolder, tmp_path: Path
) -> None:
    needs("safetensors")
    torch = needs("torch")
    warnings.simplefilter("ignore")  # of loading in one process
    import torch.distributed.checkpoint as dcp

    with Folder(storage).claimed("run") as folder:
        sample.save(folder, 1)
    state = {"layer.weight": torch.zeros(30, 20), "scale": torch.zeros(3, dtype=torch.float64)}
    reader = dcp.HuggingFaceStorageReader(str(tmp_path / "runs" / "a" / "step-1" / "values"))
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert (state["layer.weight"].numpy().ravel() == sample.dense(1)[1][:600]).all()
    assert (state["scale"].numpy() == sample.dense(1)[0]).all()


def test_large_values_lie_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramserve.checkpoint.writer.PART_BYTES", 100)
    monkeypatch.setattr("paramserve.checkpoint.reader.SLICE_BYTES", 300)
    disk = Disk()
    with Folder(disk).claimed("run") as folder:
        made = sample.save(folder, 2, sample.save(folder, 1))
    assert len(made.own(values_path("model")).parts) > 20
    with Checkpoint(disk, made) as saved:
        for shards in (1, 3, 4):
            assert sample.load(saved, shards) == sample.contents(2)


def test_a_share_reads_only_the_parts_that_it_needs() -> None:
    disk = Disk()
    with Folder(disk).claimed("run") as folder:
        made = sample.save(folder, 1)
    path = made.own(values_path("model")).path
    number = disk._at(path)[2]
    assert number is not None
    disk.now.files[number][-1] ^= 1  # of the second writer's range
    with Checkpoint(disk, made) as saved:
        first, second = np.empty(10, np.float32), np.empty(610, np.float32)
        spec = replace(sample.blocks(2)[1], cuts=(0, 10, 620))
        saved.dense(values_path("model"), spec, 0, first)
        assert first.tobytes() == sample.dense(1)[1][:10].tobytes()
        with pytest.raises(CheckpointError, match=r"values/model\.safetensors.*'layer\.weight'"):
            saved.dense(values_path("model"), spec, 1, second)


def test_another_model_is_refused_with_each_difference() -> None:
    disk = Disk()
    with Folder(disk).claimed("run") as folder:
        made = sample.save(folder, 1)
    pieces = (Piece("layer.weight", (20, 30)), Piece("layer.bias", (20,)), Piece("new", (1,)))
    spec = BlockSpec(0, 0, "model", "float64", None, pieces, (0, 621))
    with Checkpoint(disk, made) as saved, pytest.raises(CheckpointError) as refused:
        saved.dense(values_path("model"), spec, 0, np.empty(621))
    told = str(refused.value)
    assert "'layer.weight' was float32[30, 20] and is float64[20, 30] now" in told
    assert "'layer.bias' was float32[20] and is float64[20] now" in told
    assert "'new' is not in it" in told


def test_places_agree_with_the_shards_of_keys() -> None:
    keys = np.random.default_rng(0).integers(-(1 << 63), (1 << 63) - 1, 10_000)
    keys = keys[in_order(keys)]
    for shards in (1, 2, 3, 7, 64):
        for shard in range(shards):
            low, high = bounds(shard, shards)
            inside = keys[(places(keys) >= low) & (places(keys) < high)]
            assert (inside == keys[shard_of(keys, shards) == shard]).all()


def refusals(*calls: Callable[[], object]) -> str:
    """Why the first call that is refused is."""
    for call in calls:
        try:
            call()
        except ValueError as error:
            return str(error)
    return ""


@each_case(
    ("batch", "told"),
    [
        ({"key": [5, 1, 3]}, "columns"),
        ({"key": [1, 2, 3], "value": np.zeros((3, 2), np.float32)}, "order"),
        ({"key": [], "value": np.zeros((0, 2), np.float32)}, "3 rows, and 0 came"),
    ],
)
def test_rows_that_are_not_as_told_are_refused(batch: dict[str, np.ndarray], told: str) -> None:
    batch["key"] = np.array(batch["key"], np.int64)
    if told == "order":
        batch["key"] = batch["key"][in_order(batch["key"])][::-1]
    section = Section(3, {"value": Column("float32", (2,))})
    with Writer(Disk(), "x") as writer:
        file = writer.rows("users", 0, {ROWS: section}, full=True)
        assert told in refusals(lambda: file.write(ROWS, batch), writer.finish)


@each_case(
    ("arrays", "told"),
    [([np.zeros(5)], "float32, not float64"), ([np.zeros(309, np.float32)], "the arrays end")],
)
def test_values_that_are_not_as_told_are_refused(arrays: list[np.ndarray], told: str) -> None:
    with Writer(Disk(), "x") as writer:
        file = writer.dense("values/v.safetensors", [sample.blocks(2)[1]], 0)
        assert told in refusals(lambda: file.write(1, arrays[0]), writer.finish)


def test_commit_refuses_what_is_not_whole() -> None:
    disk = Disk()
    with Folder(disk).claimed("run") as folder:
        name = folder.begin(1)
        report = sample.write_server(disk, name, 1, 1, full=True)
        with pytest.raises(CheckpointError, match=r"model\.safetensors.*was not written whole"):
            folder.commit(name, [report], Cut(step=1, shards=2))
        both = [sample.write_server(disk, name, 1, 0, full=False), report]
        with pytest.raises(CheckpointError, match="only changes of table 'users'"):
            folder.commit(name, both, Cut(step=1, shards=2))


def test_names_of_files_never_meet() -> None:
    names = [
        "",
        "%",
        ".",
        "..",
        "a/b",
        "a%2Fb",
        "A",
        "a",
        "%41",
        "K",
        "k",
        "\N{KELVIN SIGN}",
        "a.b",
        "x" * 300,
        "x" * 299 + "y",
        "ü",
        "-",
    ]
    files = [naming.file_name(each) for each in names]
    assert len({each.lower() for each in files}) == len(names)  # where "A" and "a" are one file
    for each in files:
        assert each not in (".", "..")
        assert "/" not in each
        assert len(each.encode()) < 200


def test_a_tensor_cannot_have_the_name_that_safetensors_keeps() -> None:
    with pytest.raises(ValueError, match="can be called '__metadata__'"):
        layout([Tensor("__metadata__", "float32", (2,))])


def test_writer_tells_its_bytes_and_syncs_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramserve.checkpoint.writer.SYNC_BYTES", 1_000)
    disk = Disk()
    with Writer(disk, "x") as writer:
        for number in range(3):
            writer.write_message(f"shard-{number}.msgpack", bytes(900))
        file = writer.dense("values/v.safetensors", [sample.blocks(1)[1]], 0)
        for values in np.array_split(np.zeros(620, np.float32), 10):
            file.write(1, values)
        assert sum(one.kind == "sync" for one in disk.log) == 2
        written = writer.nbytes
        parts = [part.length for each in writer.finish() for part in each.parts]
    assert written == sum(parts) > 2700 + 2480
