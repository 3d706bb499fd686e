"""The `OnRay` engine: each process is an actor of a Ray cluster, on whichever node has room.

Ray places, starts, watches and kills. Its methods are used for control only: what a process is
told, what it reports, how it ends. Values travel over our own connections. Only the modules of
this package import ray, and they do so when an engine is used first.

`engine` holds the settings and opens fleets; `fleet` is the processes of one run, `naming` what is
published under a name; `process` is one process as the driver sees it; `room` reserves places on
nodes, `actors` is what runs there; `control` calls Ray's control service.
"""

from paramserve.engine.on_ray.engine import OnRay
from paramserve.engine.placing import Needs

__all__ = ["Needs", "OnRay"]
