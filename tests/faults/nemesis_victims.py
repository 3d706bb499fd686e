"""A run that counts, in a driver of its own, so that all of its processes can be disturbed.

    python -m tests.faults.nemesis_victims FOLDER

The folder has `config.json` and the board. The last line that the driver prints tells how the run
ended. Each worker adds ones to its own row of a tensor that lies on all servers, and keeps on the
board how many additions it has sent and how many were answered: what is there at the end must be
that, also for a worker that was killed.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

import paramserve as ps

SENT, ANSWERED, TO_LOG, LOGGED, STOP = range(5)
"""Columns of the board; the rows are ranks."""
WIDTH = 513
"""Width of a row: no multiple of what a server works on at once."""
NAMES_PER_RECORD = 100
STEP_S = 0.005
"""Seconds of a worker between two steps: a disturbed run need not take all cores."""
POLICIES = {
    "async": ps.Async(),
    "sync": ps.Sync(reduce="sum"),
    "bounded": ps.BoundedStaleness(bound=4),
}
DEATHS: dict[str, Any] = {"continue": "continue", "restart": ps.Restart(9)}
DEADLINES = ps.Deadlines(heartbeat_s=0.25, stall_s=4.0, reconnect_s=3.0)


class Config(msgspec.Struct, frozen=True):
    """What is run; the names are keys of the tables above."""

    workers: int
    servers: int
    policy: str
    deaths: str


class Outcome(msgspec.Struct, frozen=True):
    """How the run ended, as its driver saw it."""

    error: str = ""
    """The class of what was raised; empty: nothing."""
    text: str = ""
    values: list[list[float]] | None = None
    """What each worker's row holds, smallest and largest; None: it is not known."""
    failures: dict[str, str] = {}
    """Failures of workers without which the run went on, by rank."""
    restarts: int = 0
    records: int = 0
    """Log records that were kept or counted as dropped."""


class Alarm(Exception):
    """What the driver's handler of SIGALRM raises."""


def board_of(folder: Path, workers: int) -> npt.NDArray[np.int64]:
    """The board, which all processes share."""
    path = folder / "board"
    if not path.exists():
        path.write_bytes(bytes(8 * workers * (STOP + 1)))
    return np.memmap(path, np.int64, "r+", shape=(workers, STOP + 1))


def count(worker: ps.Worker, folder: str, workers: int) -> None:
    """Add ones until the board says stop."""
    mine = board_of(Path(folder), workers)[worker.rank]
    client = worker.client
    client.define("w", np.zeros((workers, WIDTH), np.float32), rule=ps.Add())
    ones = np.zeros((workers, WIDTH), np.float32)
    ones[worker.rank] = 1.0
    record = {f"measured quantity number {n}": float(n) for n in range(NAMES_PER_RECORD)}
    while not mine[STOP]:
        mine[SENT] += 1
        client.push_pull({"w": ones}, tick=True)
        mine[ANSWERED] += 1
        time.sleep(STEP_S)
        while mine[LOGGED] < mine[TO_LOG]:
            worker.log(**record)
            mine[LOGGED] += 1


def outcome_of(result: ps.Result, error: BaseException | None = None) -> Outcome:
    """What there is to be told of a run."""
    state = result.values.get("default", {}).get("w")
    return Outcome(
        error=type(error).__name__ if error is not None else "",
        values=[[float(row.min()), float(row.max())] for row in state]
        if state is not None
        else None,
        failures={str(rank): str(failure) for rank, failure in result.failures.items()},
        restarts=len(result.restarts),
        records=len(result.metrics) + result.dropped_records,
    )


def drive(folder: Path, config: Config) -> Outcome:
    """Run it to its end, whichever that is."""
    try:
        with ps.start(
            count,
            args=(str(folder), config.workers),
            workers=config.workers,
            servers=config.servers,
            consistency=POLICIES[config.policy],
            on_worker_death=DEATHS[config.deaths],
            engine=ps.Local(deadlines=DEADLINES),
        ) as job:
            (folder / "handle.new").write_bytes(job.handle().encode())
            (folder / "handle.new").rename(folder / "handle")
            try:
                return outcome_of(job.wait())
            except (KeyboardInterrupt, Alarm) as error:
                job.stop()
                return outcome_of(job.wait(), error)
    except (ps.ParamServeError, KeyboardInterrupt, Alarm) as error:
        return Outcome(type(error).__name__, str(error))


def main() -> None:
    """Entry of the driver."""

    def alarm(number: int, frame: FrameType | None) -> NoReturn:
        raise Alarm

    signal.signal(signal.SIGALRM, alarm)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = Path(sys.argv[1])
    config = msgspec.json.decode((folder / "config.json").read_bytes(), type=Config)
    (folder / "began").touch()
    print(msgspec.json.encode(drive(folder, config)).decode(), flush=True)


if __name__ == "__main__":
    from tests.faults import nemesis_victims  # what workers import by name

    nemesis_victims.main()
