"""What runs on the nodes, and how Ray is told of it.

A worker finds these classes by the name of this module, so each is on its top level.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from paramserve.engine.hosting import Host


class Actor(Host):
    """A process of a run."""

    def __init__(self, name: str) -> None:
        import ray

        node = ray.get_runtime_context().get_node_id()
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # ray's
        super().__init__(name, address, node)


class Published:
    """Something that has a name as long as its creator lives."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def data(self) -> bytes:
        return self._data


@functools.cache
def _class(kind: type, groups: tuple[tuple[str, int], ...]) -> Any:
    import ray

    # Nothing is ever repeated by Ray: what was told once must not be told twice.
    options: Any = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": dict(groups)}
    return ray.remote(**options)(kind)


def remote(kind: type, groups: Mapping[str, int]) -> Any:
    """The actor class; each is exported to the cluster once."""
    return _class(kind, tuple(groups.items()))
