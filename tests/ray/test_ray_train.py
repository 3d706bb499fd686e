"""examples/train_with_ray_train.py, as a user starts it: a Ray of its own, two workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.needs import needs

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ray_train_example_reaches_a_small_loss_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    needs("ray.train")
    import torch

    command = [sys.executable, "train_with_ray_train.py", "--num-cpus", "8"]
    arguments = ["--steps", "150", "--checkpoint-every", "60", "--storage", str(tmp_path / "run")]
    ended = subprocess.run(
        [*command, *arguments],
        cwd=EXAMPLES,
        env=alone(tmp_path),
        capture_output=True,
        text=True,
        timeout=580,
    )
    told = ended.stdout + ended.stderr
    assert ended.returncode == 0, told
    loss = re.search(r"^loss (\S+) after 150 steps of each worker$", ended.stdout, re.MULTILINE)
    assert loss is not None, told
    # Targets have variance 16 to begin with; two workers make 300 updates at learning rate 0.05.
    assert float(loss[1]) < 1e-3
    checkpoint = re.search(r"^checkpoint: (.+)$", ended.stdout, re.MULTILINE)
    assert checkpoint is not None, told
    state = torch.load(Path(checkpoint[1]) / "model.pt")
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "weight": (1, 16),
        "bias": (1,),
    }
    # One for every call of `report`: 60, 120 and 150.
    assert len(list(Path(checkpoint[1]).parent.glob("*/model.pt"))) == 3


def alone(folder: Path) -> dict[str, str]:
    """An environment in which Ray finds no other cluster, and asks no host on the network."""
    home = folder / "home"
    home.mkdir()
    (home / "ray_bootstrap_config.yaml").write_text("{}")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {
        **kept,
        "HOME": str(home),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
        "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9/",
    }
