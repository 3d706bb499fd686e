"""What a user sees of a run on a terminal, of 80 and of 120 columns."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

WIDTHS = (80, 120)
LINES = 24
SEEN_S = 60.0
PROGRAM = """
import time

import torch

import paramserve as ps


def train(worker: ps.Worker) -> None:
    model = torch.nn.Linear(8, 1)
    optimizer = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))
    data = torch.utils.data.TensorDataset(torch.ones(4000, 8))
    for (x,) in worker.loader(data, batch_size=2, epochs=100):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        worker.log(loss=loss)
        time.sleep(0.05)


if __name__ == "__main__":
    ps.run(train, workers=2, consistency=ps.Async())
"""


class Terminals:
    """Terminals of a tmux server of its own."""

    def __init__(self, tmux: str, socket: Path) -> None:
        self._tmux = [tmux, "-S", str(socket), "-f", "/dev/null"]

    def _call(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._tmux, *arguments], capture_output=True, text=True, timeout=20, check=True
        )
        return done.stdout

    def start(self, name: str, columns: int, command: str) -> None:
        size = ["-x", str(columns), "-y", str(LINES)]
        self._call("new-session", "-d", "-s", name, *size, command)

    def screen(self, name: str) -> list[str]:
        return [line.rstrip() for line in self._call("capture-pane", "-p", "-t", name).splitlines()]

    def interrupt(self, name: str) -> None:
        self._call("send-keys", "-t", name, "C-c")

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True, timeout=20)


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    tmux = shutil.which("tmux")
    if tmux is None:
        pytest.skip("THE LIVE VIEW IS NOT LOOKED AT: tmux is not installed")
    made = Terminals(tmux, tmp_path / "tmux")
    yield made
    made.close()


@pytest.mark.slow
def test_table_fits_the_terminal_and_stays_behind_ctrl_c(
    terminals: Terminals, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = shlex.join([sys.executable, str(program)])
    for width in WIDTHS:
        terminals.start(
            f"of-{width}", width, f"trap : INT; {command}; echo status $?; sleep {SEEN_S}"
        )
    for width in WIDTHS:
        lines = until(terminals, f"of-{width}", "left")
        assert max(map(len, lines)) <= width
        assert not any("…" in line for line in lines), lines
        text = "\n".join(lines)
        for part in (" worker ", " server ", "steps/s", "waits", "running", "━", "2/2 workers"):
            assert part in text, text
        assert len([line for line in lines if line.startswith("         ━")]) == 1, "one, redrawn"
    for width in WIDTHS:
        terminals.interrupt(f"of-{width}")
    for width in WIDTHS:
        lines = until(terminals, f"of-{width}", "status ")
        assert any(line.startswith(" server") for line in lines), "the last state stays"
        assert "KeyboardInterrupt" in "\n".join(lines)


def until(terminals: Terminals, name: str, text: str) -> list[str]:
    """The screen of a terminal as soon as it has a text."""
    ends = time.monotonic() + SEEN_S
    while time.monotonic() < ends:
        lines = terminals.screen(name)
        if any(text in line for line in lines):
            return lines
        time.sleep(0.2)
    raise AssertionError(f"no {text!r} on\n" + "\n".join(lines))
