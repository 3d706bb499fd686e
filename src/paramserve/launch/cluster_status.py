"""How a served cluster stands, for its reporters: what its coordinator was told last."""

from __future__ import annotations

import threading

from paramserve.config import Credentials, Deadlines, Limits
from paramserve.launch.overview import Overview
from paramserve.observe.checkpoints import checkpoint_status
from paramserve.observe.status import RunStatus, of_cluster
from paramserve.reporters import Feed

STATUS_S = 5.0
"""Seconds for one answer of the coordinator."""


class ClusterStatus:
    """Asks a cluster's coordinator, over a line of its own, and passes on what workers log."""

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        limits: Limits,
        deadlines: Deadlines,
        feed: Feed,
    ) -> None:
        self._overview = Overview((address,), credentials, limits, deadlines, served=True)
        self._overview.followers.append(feed.extend)
        self._lock = threading.Lock()

    def status(self) -> RunStatus:
        """How the cluster stands, as of the servers' last heartbeats.

        Raises:
            ParamServeError: the coordinator is gone, or does not answer.
        """
        with self._lock:
            latest = self._overview.fresh(STATUS_S)
            saved = latest.checkpoints
            checkpoints = checkpoint_status(saved) if saved is not None and saved.folder else None
            return of_cluster(latest, self._overview.latest, checkpoints, self._overview.logged)

    def close(self) -> None:
        with self._lock:
            self._overview.close()
