"""Seeds of a worker's global generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paramserve import seeding
from paramserve.seeding import rank_seed, restore, seed_everything, state

FAKE_TORCH = """
seeds = []
def manual_seed(seed):
    seeds.append(seed)
"""


@pytest.fixture(autouse=True)
def _restores_generators() -> Iterator[None]:
    python, legacy, finders = random.getstate(), np.random.get_state(), list(sys.meta_path)
    generator = np.random.get_bit_generator()
    yield
    random.setstate(python)
    np.random.set_bit_generator(generator)
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


@pytest.mark.parametrize("kind", ["MT19937", "Philox"])
def test_seed_repeats_python_and_numpy(kind: str) -> None:
    np.random.set_bit_generator(getattr(np.random, kind)(3))
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


def drawn() -> tuple[float, list[float], list[int]]:
    return random.random(), np.random.normal(size=3).tolist(), np.random.randint(9, size=3).tolist()


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_generators_go_on_where_they_were(kind: str) -> None:
    np.random.set_bit_generator(getattr(np.random, kind)(3))
    drawn()
    saved = state()
    expected = drawn()
    restore(saved)
    assert drawn() == expected
    np.random.set_bit_generator(np.random.MT19937(5))  # a new process has numpy's own
    restore(saved)
    assert drawn() == expected
    assert np.random.get_bit_generator().state["bit_generator"] == kind


class Mine(np.random.PCG64):
    """A generator whose state tells nothing that can be stored."""

    @property
    def state(self) -> Any:
        return {"bit_generator": "Mine", "state": object()}


def test_a_generator_of_the_users_own_is_left_out_with_one_warning() -> None:
    seeding._left_out.cache_clear()
    random.seed(1)
    np.random.set_bit_generator(Mine(3))
    with pytest.warns(UserWarning, match=r"numpy's global generator.*builtins\.object") as told:
        packed = [state() for _ in range(3)]
    assert len(told) == 1
    expected = random.random()
    restore(packed[0])
    assert random.random() == expected


def test_a_state_that_no_generator_takes_is_left_out_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeding._left_out.cache_clear()
    other = {"bit_generator": "Mine", "state": 3}
    with monkeypatch.context() as patched:
        patched.setattr(np.random, "get_state", lambda legacy: other)
        saved = state()
    np.random.seed(4)
    expected = np.random.random()
    np.random.seed(4)
    with pytest.warns(UserWarning, match="numpy has no generator 'Mine'") as told:
        [restore(saved) for _ in range(2)]
    assert len(told) == 1
    assert np.random.random() == expected
