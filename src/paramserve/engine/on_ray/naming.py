"""What is published under a name: a named actor keeps it while its creator lives."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from paramserve.engine.on_ray.control import RETRY_S, kill_actor
from paramserve.engine.on_ray.process import await_actor, remote
from paramserve.errors import NameTaken

NAME_S = 5.0
"""Ray needs moments to notice that the owner of a name is dead."""


class Published:
    """Something that has a name as long as its creator lives."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def data(self) -> bytes:
        return self._data


def publish(name: str, data: bytes, namespace: str, place_s: float) -> Any:
    """Start the actor that keeps `data` under this name.

    Raises:
        NameTaken: a living process has published this name.
        CannotPlace: the actor was not up after `place_s`. Nothing is left in the cluster.
        ParamServeError: it has died. Nothing is left in the cluster.
    """
    actor = _take(name, data, namespace)
    what = f"process that keeps the name {name!r}"
    await_actor(actor, actor.data.remote(), place_s, what)
    return actor


def find(name: str, namespace: str) -> bytes | None:
    """What a living process has published under this name; None: nothing."""
    import ray

    try:
        actor: Any = ray.get_actor(f"paramserve:{name}", namespace=namespace)
        data: bytes = ray.get(actor.data.remote(), timeout=NAME_S)
    except (ValueError, ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return None
    return data


def withdraw(actor: Any, leave: Callable[[], None]) -> None:
    """End the actor that keeps a name, then leave the cluster. May be repeated."""
    kill_actor(actor)
    leave()


def _take(name: str, data: bytes, namespace: str) -> Any:
    """An actor of this name, which may not be up yet."""
    deadline = time.monotonic() + NAME_S
    actor = remote(Published, {}).options(
        name=f"paramserve:{name}", namespace=namespace, num_cpus=0
    )
    while True:
        try:
            return actor.remote(data)
        except ValueError as error:  # the name is taken
            if find(name, namespace) is not None or time.monotonic() > deadline:
                raise NameTaken(
                    f"a living cluster in Ray's namespace {namespace!r} is named {name!r}",
                    fix=f"choose another name, or join that one with ps.attach({name!r}, "
                    "engine=...)",
                ) from error
            time.sleep(RETRY_S)
