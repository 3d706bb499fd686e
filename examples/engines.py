"""The engines that an example's `--engine` can name."""

from __future__ import annotations

from typing import Any

import paramserve as ps

ENGINES = ("local", "ray")


def engine_of(name: str) -> Any:
    """The engine of this name: processes on this machine, or a Ray cluster.

    Raises:
        ValueError: there is no such engine.
    """
    if name == "local":
        return ps.Local()
    if name == "ray":
        from paramserve import OnRay

        return OnRay()
    raise ValueError(f"there is no engine {name!r}; there are {', '.join(ENGINES)}")
