"""Every policy trains MNIST with real processes: two workers, two servers, one pace.

Those that other files of this folder train are left out.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import compare_sync_async as compare
import racing
from paramserve.errors import ParamServeError

STEPS = 200
"""Of each worker at most; a run ends soon after it has seen the target."""
TARGET = 0.75
"""On every tenth test image. Guessing gives 0.1."""
TRAINED = {"sync", "async", "local", "elastic"}
"""In `test_mnist_example` and `test_local_algorithms`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real MNIST as arrays, from the user's cache or fetched into it; of the test images a tenth:
    evaluating all of them took longer than training."""
    path = tmp_path_factory.mktemp("mnist")
    try:
        racing.prepare(None, path)
    except ParamServeError as error:
        pytest.skip(f"TRAINING UNDER EVERY POLICY IS NOT CHECKED HERE: {error}")
    for test in path.glob("test-*.npy"):
        np.save(test, np.load(test)[::10])
    return path


@pytest.mark.slow
@pytest.mark.timeout(700)  # 9 s; fetching may try each source to its end first
@pytest.mark.parametrize(
    "entrant",
    [each for each in compare.entrants() if not each.dynamic and each.name not in TRAINED],
    ids=lambda each: each.name,
)
def test_policy_trains_mnist(
    entrant: racing.Entrant, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, less in (("LOOK_S", 0.25), ("AFTER_S", 0.5), ("POINTS", 5), ("LOOKED_AT", 1)):
        monkeypatch.setattr(racing, name, less)
    course = racing.Course(
        data=folder,
        pace=racing.Pace("even", 0),
        workers=2,
        servers=2,
        steps=STEPS,
        lr=0.01,
        target=TARGET,
    )
    done = racing.race(entrant, course, seed=0)
    best = max(point.accuracy for point in done.curve)
    assert done.seconds is not None, f"{best:.3f} after {sum(done.samples.values()):,} samples"
    assert all(done.samples[rank] > 0 for rank in range(2)), "a rank did nothing"
