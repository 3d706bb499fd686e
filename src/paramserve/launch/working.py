"""A training function as a worker of a served cluster, over the cluster's losses."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from paramserve import seeding
from paramserve.config import TLS, Deadlines, Limits
from paramserve.errors import (
    CoordinatorGone,
    ParamServeError,
    ServerGone,
    Timeout,
)
from paramserve.launch.connect import connect, described_by
from paramserve.launch.life import SAME_MAX
from paramserve.logs import write_line
from paramserve.transport.redial import Redial
from paramserve.worker import Worker

T = TypeVar("T")

BACK_S = 600.0
"""How long a cluster that was lost is waited for, unless told."""
RETRY_S = 0.5
"""Seconds between two attempts to join a cluster that is on its way out, or not up."""
ATTEMPT_S = 10.0
"""Seconds for one attempt: it may have met a cluster that is ending, whose servers are gone."""


def work(
    train: Callable[..., T],
    address: str | None = None,
    *,
    rank: int | None = None,
    workers: int | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    token_file: str | os.PathLike[str] | None = None,
    tls: TLS | None = None,
    seed: int = 0,
    timeout_s: float | None = None,
    back_s: float = BACK_S,
    deadlines: Deadlines | None = None,
    limits: Limits | None = None,
) -> T:
    """Run a training function as a worker of a cluster of `paramserve serve`, in this process.

    Where the cluster writes checkpoints (`serve --checkpoint`) and is lost, this waits until it is
    back, and calls `train` again with a new worker, which goes on at the checkpoint's clock: as a
    run with `checkpoint=` does.

    Example:
        ps.work(train, "ps0.example:5555", rank=3, workers=8, token_file="token")

    Args:
        train: as of `ps.run`: called as `train(worker, *args, **kwargs)`.
        address: of the first server: `host:port`, or `unix:<path>`. None: of the environment, with
            rank, workers, token and certificates, as `ps.from_environment` reads them.
        rank, workers, token_file, tls, timeout_s, deadlines, limits: as `ps.connect`.
        seed: of random, numpy and torch, set before each call, and of the loader's order; the same
            number on all ranks.
        back_s: how long a cluster that was lost is waited for.
    Returns:
        what `train` has returned.
    Raises:
        ServerGone, CoordinatorGone: the cluster was lost and writes no checkpoints; or went back to
            the same checkpoint `SAME_MAX` times in a row; or did not come back in time: then with a
            note that says so. What was pushed after the newest checkpoint is lost.
        ValueError, ConnectTimeout, NotAuthenticated, RankTaken, ParamServeError: as `ps.connect`.
        What `train` raises.
    """
    if not back_s >= 0:
        raise ValueError(f"back_s must be a number of seconds of at least 0, not {back_s!r}")
    place = _place(address, rank=rank, workers=workers, token_file=token_file, tls=tls)
    options = {"deadlines": deadlines, "limits": limits}
    place |= {name: settings for name, settings in options.items() if settings is not None}

    def join(wait_s: float | None) -> Worker:
        return connect(**place, seed=seed, timeout_s=wait_s)

    worker, times = join(timeout_s), 1
    while True:
        began, keeps = dict(worker.client.steps.clocks), worker.client.connection.keeps
        seeding.seed_everything(seeding.rank_seed(seed, worker.rank))
        try:
            with worker:
                return train(worker, *args, **(kwargs or {}))
        except (ServerGone, CoordinatorGone) as lost:
            if not keeps:
                raise
            if times > SAME_MAX:
                lost.add_note(f"it went back to the same checkpoint {SAME_MAX} times in a row")
                raise
            worker = _joined_again(join, worker.rank, lost, back_s)
        times = times + 1 if worker.client.steps.clocks == began else 1


def _place(address: str | None, **own: Any) -> dict[str, Any]:
    """The arguments of `connect` that say where, and as which rank."""
    if address is not None:
        return {"address": address, **own}
    if any(each is not None for each in own.values()):
        raise ValueError(
            "rank, workers, token_file and tls are for an address: give it, or set all of them in "
            "the environment"
        )
    return described_by(os.environ)


def _joined_again(
    join: Callable[[float | None], Worker], rank: int, cause: ParamServeError, back_s: float
) -> Worker:
    """The worker of a cluster that has come back."""
    write_line(
        f"rank {rank} lost the cluster: {cause.failed}. It waits up to {back_s:.0f} s until the "
        "cluster is back, and begins again at its checkpoint"
    )
    redial, silent = Redial(time.monotonic() + back_s, RETRY_S, ATTEMPT_S), True
    while True:
        try:
            worker = join(redial.limit_s(time.monotonic()))
        except (ServerGone, CoordinatorGone, Timeout) as error:
            now = time.monotonic()
            again_at = redial.next_at(now)
            if again_at is None:
                cause.add_note(
                    f"the cluster did not come back for {back_s:.0f} s (back_s=); at last: "
                    f"{error.failed}"
                )
                raise cause from None
            if silent and isinstance(error, Timeout):
                silent = False
                write_line(f"rank {rank} still waits for the cluster: {error.failed}")
            time.sleep(again_at - now)
            continue
        write_line(f"rank {rank} is back, and goes on at clock {worker.clock}")
        return worker
