"""Gives a run's room back when the process that reserved it is killed.

Ray removes a placement group when its creator and the creator's whole job have ended. The groups of
a run that a task or an actor starts would outlive it until the driver ends. So a detached actor,
which needs no CPU, follows such a creator: the result of a call that never returns belongs to the
creator, and Ray reports its loss.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from paramserve.engine.on_ray.control import kill_actor
from paramserve.engine.on_ray.process import await_actor, remote

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

logger = logging.getLogger("paramserve")

FOLLOW_S = 60.0
"""A creator that has ended before it could be followed sends nothing: the actor ends after this."""


class Keeper:
    """The actor. Its methods are coroutines: they run beside each other."""

    def __init__(self) -> None:
        self._groups: list[PlacementGroup] = []
        self._followed = asyncio.Event()
        self._over = asyncio.Event()

    async def live(self) -> None:
        """Return when the actor ends: the caller owns this result as long as it lives."""
        await self._over.wait()

    async def until_followed(self) -> None:
        """Return when the creator is followed."""
        await self._followed.wait()

    async def expect(self) -> None:
        """End unless a creator is followed soon."""
        try:
            await asyncio.wait_for(self._followed.wait(), FOLLOW_S)
        except TimeoutError:
            await self._end()

    async def follow(self, results: list[Any]) -> None:
        """Wait for the end of the owner of this result, then give its room back and end."""
        import ray

        self._followed.set()
        with contextlib.suppress(ray.exceptions.RayError):  # its owner has ended
            await results[0]
        await self._end()

    async def keep(self, group: PlacementGroup) -> None:
        """Remove this group, too, when the creator has ended."""
        self._groups.append(group)

    async def _end(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        try:
            for group in self._groups:
                try:
                    await asyncio.to_thread(remove_placement_group, group)
                except Exception:  # the others' room is given back all the same
                    logger.exception("cannot remove placement group %s", group.id.hex())
        finally:
            self._over.set()
            await asyncio.sleep(0)  # `live` returns: Ray waits for the calls under way
            ray.actor.exit_actor()  # type: ignore[no-untyped-call]  # of Ray


class RoomKeeper:
    """The actor as its creator sees it.

    Args:
        actor: None: the creator is a driver, after which Ray itself gives everything back.
        life: a result of the actor's that belongs to this process: losing it tells the actor of
            this process's end.
    """

    def __init__(self, actor: Any, life: Any) -> None:
        self._actor = actor
        self._life = life

    @classmethod
    def of_this_process(cls, namespace: str, place_s: float) -> RoomKeeper:
        """A keeper for what this process reserves.

        Raises:
            CannotPlace: the actor was not up after `place_s`. Nothing is left in the cluster.
            ParamServeError: it has died. Nothing is left in the cluster.
        """
        import ray

        if ray.get_runtime_context().worker.mode != ray.WORKER_MODE:
            return cls(None, None)
        actor_class = remote(Keeper, {}).options(
            name=f"paramserve-room:{uuid4().hex}",
            namespace=namespace,
            lifetime="detached",
            num_cpus=0,
        )
        actor = actor_class.remote()
        actor.expect.remote()
        life = actor.live.remote()
        actor.follow.remote([life])
        what = "process that gives this run's room back"
        await_actor(actor, actor.until_followed.remote(), place_s, what)
        return cls(actor, life)

    def keep(self, group: PlacementGroup) -> None:
        """Have this group removed when the present process has ended."""
        if self._actor is not None:
            self._actor.keep.remote(group)

    def close(self) -> None:
        """End the actor; the groups stay, and are the caller's to remove."""
        if self._actor is not None:
            kill_actor(self._actor)
