"""How Ray is imported, and calls of its control service that hold nobody up for long.

The service may hang with its node, and a process may leave the cluster at any time: neither is an
error here. Who needs to know sees it elsewhere.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from paramserve.errors import ParamServeError

RAY_OLDEST = (2, 49)
"""The first whose placement groups have label selectors for bundles."""
CONTROL_S = 1.0
"""How long a call to Ray's own control service may hold up the one who makes it."""
LOOK_S = 0.25
"""How often a wait looks up: for Ctrl-C, and for ends that another thread has seen."""
RETRY_S = 0.1
"""Between calls to a process that Ray cannot reach and does not count as dead."""


def import_ray() -> ModuleType:
    """The module ray.

    Raises:
        ParamServeError: it is not installed, or too old.
    """
    try:
        import ray
    except ImportError as error:
        raise ParamServeError(
            f"ps.OnRay needs Ray, which cannot be imported ({error})",
            fix="pip install 'paramserve[ray]'",
        ) from error
    if tuple(int(part) for part in ray.__version__.split(".")[:2]) < RAY_OLDEST:
        oldest = ".".join(map(str, RAY_OLDEST))
        raise ParamServeError(
            f"ps.OnRay needs Ray {oldest} or newer, and this is {ray.__version__}",
            fix="pip install --upgrade 'paramserve[ray]', here and on every node",
        )
    return ray


def bounded(call: Callable[[], object]) -> None:
    """Make a call to Ray's control service, which may hang with its node, and wait a while."""

    def run() -> None:
        with contextlib.suppress(Exception):  # it is gone: that is seen elsewhere
            call()

    thread = threading.Thread(target=run, name="paramserve-ray", daemon=True)
    thread.start()
    thread.join(CONTROL_S)


def kill_actor(actor: Any) -> None:
    """End an actor at once, unless this process has left the cluster: then it is gone."""
    import ray

    if ray.is_initialized():
        bounded(lambda: ray.kill(actor, no_restart=True))
