"""Seeds of a worker's global generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from paramserve.seeding import rank_seed, seed_everything

FAKE_TORCH = """
seeds = []
def manual_seed(seed):
    seeds.append(seed)
"""


@pytest.fixture(autouse=True)
def _restores_generators() -> Iterator[None]:
    python, legacy, finders = random.getstate(), np.random.get_state(), list(sys.meta_path)
    yield
    random.setstate(python)
    np.random.set_state(legacy)
    sys.meta_path[:] = finders


@pytest.fixture
def torch_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", sys)  # so that it is taken out again afterwards
    del sys.modules["torch"]


def test_rank_seeds_differ_by_rank_and_by_seed() -> None:
    seeds = {rank_seed(seed, rank) for seed in range(10) for rank in range(10)}
    assert len(seeds) == 100


def test_seed_repeats_python_and_numpy() -> None:
    seed_everything(2**63 + 5)
    first = random.random(), np.random.rand()
    seed_everything(2**63 + 5)
    assert (random.random(), np.random.rand()) == first


@pytest.mark.usefixtures("torch_not_imported")
def test_torch_imported_later_is_seeded_once() -> None:
    finders = len(sys.meta_path)
    seed_everything(17)
    assert "torch" not in sys.modules
    import torch

    assert torch.seeds == [17]
    assert len(sys.meta_path) == finders
    assert "_SeedingLoader" not in type(torch.__loader__).__name__


@pytest.mark.usefixtures("torch_not_imported")
def test_torch_imported_before_is_seeded_at_once() -> None:
    import torch

    finders = len(sys.meta_path)
    seed_everything(17)
    assert torch.seeds == [17]
    assert len(sys.meta_path) == finders
