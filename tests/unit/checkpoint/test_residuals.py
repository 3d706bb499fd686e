"""Files of what workers left out of their gradients: servers write them, any number reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from msgspec import structs
from tests.disk import Disk

from paramserve.checkpoint.folder import Folder
from paramserve.checkpoint.manifest import (
    Cut,
    Manifest,
    Written,
    residual_path,
    residual_rank,
    without_lost_residuals,
)
from paramserve.checkpoint.residuals import ResidualFiles, SavedResiduals
from paramserve.checkpoint.writer import Writer
from paramserve.config import RuleSpec
from paramserve.errors import CheckpointDamaged, ProtocolError
from paramserve.messages import BlockSpec, KeepResidual, Piece

SERVERS, SIZE = 2, 100
PIECES = (Piece("w", (30, 3)), Piece("b", (10,)))
BLOCK = BlockSpec(4, 1, "Model", "float32", RuleSpec("sgd"), PIECES, (0, 60, SIZE))
RANKS = {11: 0, 12: 1, 13: 2}
"""By client."""


def residual(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=SIZE).astype(np.float32)


def message(start: int, count: int) -> KeepResidual:
    return KeepResidual(1, BLOCK.block, start, count)


def send(files: ResidualFiles, client: int, low: int, high: int, most: int = 25) -> None:
    values = residual(RANKS[client])
    for start in range(low, high, most):
        part = values[start : min(start + most, high)]
        assert files.check(client, message(start, part.size))
        files.write(client, message(start, part.size), part)


def saved(disk: Disk, missing: Sequence[tuple[int, int]] = ()) -> Manifest:
    """A checkpoint with the residuals of all ranks.

    Args:
        missing: (client, shard) that sends only its first piece there.
    """
    folder = Folder(disk)
    with folder.claimed("run"):
        name = folder.begin(7)
        reports = list[tuple[Written, ...]]()
        for shard in range(SERVERS):
            with Writer(disk, name) as writer:
                files = ResidualFiles(writer, shard, RANKS.items(), [BLOCK])
                for client in RANKS:
                    low, high = BLOCK.cuts[shard : shard + 2]
                    send(files, client, low, low + 25 if (client, shard) in missing else high)
                files.lose(files.clients)
                reports.append(writer.finish())
        whole, lost = without_lost_residuals(reports)
        cut = Cut(step=7, shards=SERVERS, workers=len(RANKS), lost_residuals=lost)
        return folder.commit(name, whole, cut)


def read(found: SavedResiduals, rank: int) -> np.ndarray | None:
    parts = [found.read(BLOCK.block, rank, start, 20).values for start in range(0, SIZE, 20)]
    if any(part is None for part in parts):
        assert all(part is None for part in parts)
        return None
    return np.concatenate([part for part in parts if part is not None])


@pytest.mark.parametrize("workers", [3, 4])
def test_each_rank_gets_its_own_bit_by_bit(workers: int) -> None:
    disk = Disk()
    with SavedResiduals(disk, saved(disk), [BLOCK], workers) as found:
        assert found.unclaimed() == {(1, rank) for rank in range(3)}
        for rank in range(3):
            own = read(found, rank)
            assert own is not None
            assert own.tobytes() == residual(rank).tobytes()
        assert read(found, 3) is None
        assert found.read(BLOCK.block, 0, 0, 1).lost == ()


def test_rank_0_takes_over_those_that_the_run_goes_on_without() -> None:
    disk = Disk()
    with SavedResiduals(disk, saved(disk), [BLOCK], 1) as found:
        assert found.unclaimed() == {(1, 0)}
        own = read(found, 0)
        assert own is not None
        np.testing.assert_allclose(own, sum(residual(rank) for rank in range(3)), atol=1e-6)


def test_residual_that_did_not_come_whole_to_all_servers_is_left_out_and_told() -> None:
    disk = Disk()
    made = saved(disk, missing=[(12, 1)])
    assert made.cut.lost_residuals == (1,)
    assert {residual_rank(each.path) for each in made.files} == {0, 2}
    with SavedResiduals(disk, made, [BLOCK], 3) as found:
        assert read(found, 1) is None
        assert found.lost(BLOCK.block) == (1,)
        assert read(found, 2) is not None


def test_path_tells_the_rank() -> None:
    assert residual_rank("step-1/" + residual_path("a.b", 3, 12)) == 12
    assert residual_rank(residual_path("Model", 0, 0)) == 0
    for other in ("values/model.safetensors", "step-1/values/a.1.safetensors", "residuals/x"):
        assert residual_rank(other) is None


OTHERS: Mapping[str, BlockSpec] = {
    "shape": structs.replace(BLOCK, pieces=(Piece("w", (30, 3)), Piece("b", (2, 5)))),
    "name": structs.replace(BLOCK, pieces=(Piece("w", (30, 3)), Piece("c", (10,)))),
    "dtype": structs.replace(BLOCK, dtype="float64"),
}


@pytest.mark.parametrize("spec", OTHERS.values(), ids=OTHERS)
def test_residual_of_other_tensors_is_refused_whole(spec: BlockSpec) -> None:
    disk = Disk()
    made = saved(disk)
    with pytest.raises(CheckpointDamaged, match=r"residuals/.*has the tensors .*'w' float32"):
        SavedResiduals(disk, made, [spec], 3)


def changed(disk: Disk, made: Manifest, change: slice, data: bytes) -> None:
    """Change the file of rank 1 behind the manifest's back."""
    path = f"{made.name}/{residual_path('Model', BLOCK.block, 1)}"
    _, _, number = disk._at(path)
    content = disk.now.files[number or 0]
    content[change] = data


def test_file_that_is_too_short_is_refused_when_a_server_starts() -> None:
    disk = Disk()
    made = saved(disk)
    changed(disk, made, slice(-1, None), b"")
    with pytest.raises(CheckpointDamaged, match=r"residuals/.*1.safetensors: it has \d+ bytes"):
        SavedResiduals(disk, made, [BLOCK], 3)


def test_damaged_elements_are_refused_when_they_are_read() -> None:
    disk = Disk()
    made = saved(disk)
    changed(disk, made, slice(-4, None), b"\0\0\0\1")
    with SavedResiduals(disk, made, [BLOCK], 3) as found:
        assert read(found, 0) is not None
        with pytest.raises(CheckpointDamaged, match=r"residuals/.*'b'"):
            read(found, 1)


def test_residual_with_nan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.residual", lambda rank: np.full(SIZE, np.nan, np.float32))
    disk = Disk()
    with (
        SavedResiduals(disk, saved(disk), [BLOCK], 3) as found,
        pytest.raises(CheckpointDamaged, match="NaN or Inf"),
    ):
        found.read(BLOCK.block, 0, 0, 5)


def test_pieces_come_in_order_and_each_counts_once() -> None:
    with Writer(Disk(), "step-1") as writer:
        files = ResidualFiles(writer, 1, {11: 0}.items(), [BLOCK])
        values = residual(0)[60:80]
        assert files.check(11, message(60, 20))
        files.write(11, message(60, 20), values)
        assert not files.check(11, message(60, 20)), "it came again"
        for start, count in ((81, 5), (80, 21), (80, 0), (80, -1), (80, -2)):
            with pytest.raises(ProtocolError, match="the next are 80 to 100"):
                files.check(11, message(start, count))
        assert not files.check(12, message(60, 20)), "another client"
        assert files.clients == {11}
        files.write(11, message(80, 20), residual(0)[80:])
        assert files.clients == frozenset()


def test_server_without_elements_of_a_block_writes_only_what_begins_its_file() -> None:
    spec = structs.replace(BLOCK, cuts=(0, 0, SIZE))
    for shard, awaited in ((0, {11}), (1, {11})):
        with Writer(Disk(), "step-1") as writer:
            files = ResidualFiles(writer, shard, {11: 0}.items(), [spec])
            assert files.clients == awaited
            if shard == 0:
                files.write(11, message(0, 0), np.empty(0, np.float32))
                assert files.clients == frozenset()
                (written,) = writer.finish()
                assert sum(each.length for each in written.parts) < written.size
    three = structs.replace(BLOCK, cuts=(0, SIZE, SIZE, SIZE))
    with Writer(Disk(), "step-1") as writer:
        assert ResidualFiles(writer, 1, {11: 0}.items(), [three]).clients == frozenset()
