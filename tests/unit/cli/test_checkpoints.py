"""The commands around a run's checkpoints."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.needs import needs
from tests.unit.checkpoint import sample

from paramserve.checkpoint.folder import Folder
from paramserve.checkpoint.storage import LocalFolder
from paramserve.cli import cli, main


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["checkpoints", *arguments])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    root.mkdir()
    with Folder(LocalFolder(root)).claimed("run 7f3a") as made:
        first = sample.save(made, 1)
        sample.save(made, 2, first)
    return root


def damage(folder: Path, name: str) -> None:
    path = folder / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_ls_has_a_line_for_each(folder: Path) -> None:
    done = call("ls", str(folder))
    assert done.exit_code == 0
    assert [line.split()[0] for line in done.output.splitlines()] == ["NAME", "step-2", "step-1"]
    assert "run 7f3a" in done.output
    damage(folder, "manifest-2.json")
    done = call("ls", str(folder))
    assert done.exit_code == 1
    assert "manifest-2.json" in done.output
    assert "step-1" in done.output


@pytest.mark.parametrize("width", [40, 80, 120])
def test_ls_fits_the_terminal_and_names_what_it_leaves_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    module = importlib.import_module("paramserve.cli.checkpoints")
    monkeypatch.setattr(module, "_terminal_width", lambda: width)
    lines = call("ls", str(folder)).output.splitlines()
    table = [line for line in lines if not line.startswith("left out at")]
    assert max(map(len, table)) <= width
    out = [line.partition(": ")[2] for line in lines if line not in table]
    assert out == (["SERVERS, RUN"] if width == 40 else [])


def test_show_tells_of_the_newest_or_the_named_one(folder: Path) -> None:
    newest, named = call("show", str(folder)), call("show", str(folder / "step-1"))
    assert newest.output.startswith("step-2, written ")
    assert "group 'model' at clock 2" in newest.output
    assert "table 'users': all rows and 1 increments" in newest.output
    assert "step-1/tables/users.0.safetensors" in newest.output
    assert named.output.startswith("step-1, written ")
    assert main(["checkpoints", "show", str(folder / "step-3")]) == 1
    assert main(["checkpoints", "show", str(folder / "none")]) == 2


def test_verify_names_the_damaged_file(folder: Path) -> None:
    done = call("verify", str(folder))
    assert done.exit_code == 0
    assert done.output.count("is whole") == 2
    damage(folder, "step-2/values/model.safetensors")
    done = call("verify", str(folder))
    assert done.exit_code == 1
    assert "step-1 is whole" in done.output
    assert "the file step-2/values/model.safetensors: bytes" in done.output
    assert "('layer.weight', 'layer.bias')" in done.output
    assert call("verify", str(folder / "step-1")).exit_code == 0


def test_verify_of_an_empty_folder_says_so(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["checkpoints", "verify", str(tmp_path)])
    assert done.exit_code == 1
    assert done.output == f"paramserve: {tmp_path} has no checkpoints\n"


def test_prune_keeps_the_newest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramserve.checkpoint.claims.CLAIM_S", 0.0)
    owner = (folder / "owner.json").read_bytes()
    assert "removed step-1, " in call("prune", str(folder), "--keep", "1").output
    assert (folder / "owner.json").read_bytes() == owner, "whose it is"
    assert call("verify", str(folder)).output.count("is whole") == 1
    with Folder(LocalFolder(folder)).claimed("run 8"):
        assert main(["checkpoints", "prune", str(folder), "--keep", "1"]) == 1


def test_export_to_torch_and_safetensors(folder: Path, tmp_path: Path) -> None:
    torch, _ = needs("torch"), needs("safetensors")
    from safetensors.torch import load_file

    out = tmp_path / "model.pt", tmp_path / "model.safetensors"
    for kind, path in zip(("torch", "safetensors"), out, strict=True):
        done = call("export", str(folder), "--to", kind, "--out", str(path))
        assert done.output == f"paramserve: 3 tensors of step-2 are in {path}\n"
    for state in torch.load(out[0], weights_only=True), load_file(out[1]):
        assert (state["scale"].numpy() == sample.dense(2)[0]).all()
        assert (state["layer.weight"].numpy().ravel() == sample.dense(2)[1][:600]).all()
    arguments = ["checkpoints", "export", str(folder), "--to", "torch", "--out", str(out[0])]
    assert main([*arguments, "--group", "other"]) == 1


def test_what_a_command_cannot_take_is_refused(folder: Path, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out")]
    for arguments, told in (
        (["ls", "memory://a"], "memory:// is of one process"),
        (["show", "s3://"], "it is 's3://', without the name of a folder"),
        (["export", str(folder), "--to", "parquet", "--optimizer", *out], "is of --to torch"),
    ):
        done = call(*arguments)
        assert done.exit_code == 2
        assert told in " ".join(done.output.replace("│", "").split())


def test_export_to_parquet_has_the_rows_of_base_and_increments(
    folder: Path, tmp_path: Path
) -> None:
    parquet = needs("pyarrow.parquet")
    out = tmp_path / "tables"
    done = call("export", str(folder), "--to", "parquet", "--out", str(out))
    assert done.output == f"paramserve: {len(sample.users(2).rows)} rows of 'users' are in " + (
        f"{out / 'users.parquet'}\n"
    )
    found = {row["key"]: row for row in parquet.read_table(out / "users.parquet").to_pylist()}
    assert found.keys() == sample.users(2).rows.keys()
    for key, (value, state, count, _) in sample.users(2).rows.items():
        assert tuple(found[key]["value"]) == value
        assert tuple(found[key]["state"]) == state
        assert found[key]["count"] == count
