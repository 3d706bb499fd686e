"""Runs and served clusters in hostile surroundings: another user without a home, a root file system
that is read-only, a full disk, few descriptors, a terminal that is lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests.faults.leftovers import folders
from tests.faults.servers import new_token

import paramserve as ps

OTHER_USER = 65534
SIZE = 100_000
"""Of the tensor: 800 KB, which a full disk has no room for."""
LIMIT_S = 120.0
SLOW = pytest.mark.slow
SCRIPT = f"""
import sys
import time
from pathlib import Path

import numpy as np

import paramserve as ps


def train(worker, folder, steps):
    worker.client.define("w", np.zeros({SIZE}), rule=ps.Add())
    for step in range(steps):
        worker.client.push("w", np.ones({SIZE}))
        worker.client.tick().result()
        worker.log(loss=step)
        if step == 2:
            Path(folder, "trains").touch()
            time.sleep(0.05 if steps > 9 else 0.0)
    return "trained"


if __name__ == "__main__":
    folder, steps = sys.argv[1], int(sys.argv[2])
    kept, csv = folder + "/kept", ps.CSV(folder + "/loss.csv")
    result = ps.run(
        train, args=(folder, steps), workers=1, checkpoint=kept, report_to=[csv], show="none"
    )
    print(result.returns)
"""
ON_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def in_mounts(commands: str) -> Callable[[Path], list[str]]:
    """What begins a command that sees other mounts; `commands` find the work folder in $0."""
    return lambda folder: ["unshare", "-m", "sh", "-c", f'{commands} && exec "$@"', str(folder)]


@dataclass(frozen=True)
class Surroundings:
    """What a program is started in.

    Attributes:
        begin: the command line before its own, given its folder.
        user: that it runs as; None: this one.
        fails: the words with which a run fails; empty: it trains.
        saves: whether it can write its checkpoint.
    """

    begin: Callable[[Path], Sequence[str]]
    user: int | None = None
    fails: str = ""
    saves: bool = True


CAPABILITIES = "+dac_read_search"  # Python and this tree may lie in root's home
HOSTILE = {
    "other user": Surroundings(
        lambda folder: [
            *("setpriv", f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups"),
            *(f"--inh-caps={CAPABILITIES}", f"--ambient-caps={CAPABILITIES}"),
            *("env", "-i", "PATH=/usr/bin:/bin", f"TMPDIR={tempfile.gettempdir()}"),
        ],
        user=OTHER_USER,
    ),
    "read-only root": Surroundings(
        in_mounts('cd "$TMPDIR" && mount --bind . . && mount -o remount,ro,bind / && cd "$TMPDIR"')
    ),
    "full disk": Surroundings(in_mounts('mount -t tmpfs -o size=64k none "$0"/kept'), saves=False),
    "few descriptors": Surroundings(
        lambda folder: ["sh", "-c", 'ulimit -n 20; exec "$0" "$@"'], fails="Too many open files"
    ),
}


def begin(name: str, folder: Path) -> list[str]:
    """The command line that makes the surroundings; skips the test where they cannot be made."""
    command = [*HOSTILE[name].begin(folder)]
    if command[0] != "sh" and os.geteuid() != 0:
        pytest.skip(f"needs root, and runs as user {os.geteuid()}")
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs the command {command[0]} (util-linux)")
    probe = subprocess.run([*command, "/bin/true"], capture_output=True, text=True)
    if probe.returncode != 0:
        pytest.skip(f"this machine lets no process have such surroundings: {probe.stderr}")
    return command


@pytest.fixture
def work() -> Path:
    """A folder for what a program writes, in the temporary folder of this test."""
    folder = Path(tempfile.gettempdir()) / "work"
    (folder / "kept").mkdir(parents=True)
    (folder / "script.py").write_text(SCRIPT)
    new_token(folder / "token")
    return folder


def give(user: int | None, folder: Path) -> None:
    if user is not None:
        for path in (folder.parent, folder, *folder.rglob("*")):
            os.chown(path, user, user)


def saved(folder: Path) -> list[str]:
    return sorted(each.name for each in (folder / "kept").glob("manifest-*"))


@pytest.mark.parametrize(
    "name",
    ["other user", "full disk", "few descriptors", pytest.param("read-only root", marks=SLOW)],
)
def test_run_in_hostile_surroundings_trains_or_says_why_not(name: str, work: Path) -> None:
    hostile = HOSTILE[name]
    command = begin(name, work)
    give(hostile.user, work)
    done = subprocess.run(
        [*command, sys.executable, str(work / "script.py"), str(work), "5"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if hostile.fails:
        assert done.returncode == 1
        assert hostile.fails in done.stderr.splitlines()[-1]
        assert not (work / "loss.csv").exists(), "a run that did not begin has written nothing"
    else:
        assert (done.returncode, done.stdout) == (0, "{0: 'trained'}\n"), done.stderr
        assert len((work / "loss.csv").read_text().splitlines()) == 6
        assert ("No space left on device" in done.stderr) != hostile.saves
        assert bool(saved(work)) == hostile.saves
    assert folders() == set()


def push(address: str, token: str) -> None:
    with ps.connect(address, rank=0, workers=1, token_file=token) as worker:
        worker.client.define("w", np.zeros(SIZE), rule=ps.Add())
        worker.client.push("w", np.ones(SIZE))
        worker.client.tick().result()
        assert worker.client.pull("w").sum() == SIZE


SERVE = [
    *(sys.executable, "-c", "import sys; from paramserve.cli import main; sys.exit(main())"),
    *("serve", "--bind", "127.0.0.1:0", "--workers", "1", "--checkpoint-every", "600"),
]


def serving(folder: Path) -> list[str]:
    return [*SERVE, "--token-file", f"{folder}/token", "--checkpoint", f"{folder}/kept"]


@SLOW
@pytest.mark.parametrize("name", ["other user", "read-only root", "full disk"])
def test_served_cluster_in_hostile_surroundings_serves_and_ends_in_order(
    name: str, work: Path, tmp_path: Path
) -> None:
    hostile = HOSTILE[name]
    token = shutil.copy(work / "token", tmp_path / "token")
    command = begin(name, work)
    give(hostile.user, work)
    with subprocess.Popen(
        [*command, *serving(work)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().rpartition(" ")[2].strip()
            push(address, token)
            process.terminate()
            _, errors = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert process.returncode == (0 if hostile.saves else 1), errors
    assert ("No space left on device" in errors) != hostile.saves
    assert bool(saved(work)) == hostile.saves
    assert folders() == set()


@SLOW
def test_server_without_descriptors_says_so_once_and_serves_when_it_has_some(work: Path) -> None:
    command = ["sh", "-c", 'ulimit -n 40; exec "$0" "$@"', *serving(work)]
    with (
        contextlib.ExitStack() as stack,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            address = process.stdout.readline().rpartition(" ")[2].strip()
            host, _, port = address.rpartition(":")
            for _ in range(60):
                stack.enter_context(socket.create_connection((host, int(port)), 10))
            time.sleep(0.5)  # several tries to accept
            stack.close()
            push(address, str(work / "token"))
            process.terminate()
            _, errors = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert errors.count("cannot accept at tcp:") == 1


@contextlib.contextmanager
def on_terminal(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process with a terminal of its own, and the terminal's other end."""
    other_end, terminal = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", ON_TERMINAL, *command],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    try:
        yield process, other_end
    finally:
        process.kill()
        process.wait()


def test_run_that_loses_its_terminal_has_its_last_checkpoint(work: Path) -> None:
    command = [sys.executable, str(work / "script.py"), str(work), "100000"]
    with on_terminal(command) as (process, terminal):
        until = time.monotonic() + LIMIT_S
        while not (work / "trains").exists():
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        os.close(terminal)
        assert process.wait(LIMIT_S) != 0
    assert saved(work) == ["manifest-1.json"]
    assert folders() == set()


def test_server_that_loses_its_terminal_has_its_last_checkpoint(work: Path) -> None:
    with on_terminal(serving(work)) as (process, terminal):
        with os.fdopen(os.dup(terminal), "rb", buffering=0) as lines:
            text = b""
            while b"serving at " not in text or not text.endswith(b"\n"):
                text += lines.read(4096)
        address = text.split(b"paramserve: serving at ")[1].split()[0].decode()
        push(address, str(work / "token"))
        os.close(terminal)
        process.wait(LIMIT_S)
    assert saved(work) == ["manifest-1.json"]
