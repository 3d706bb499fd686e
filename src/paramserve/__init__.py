"""The parameter server for PyTorch: servers hold a model's parameters, workers train it.

    import paramserve as ps

    result = ps.run(train, workers=4, servers=2, consistency=ps.Async())

Everything here is loaded when it is first used: importing this package costs next to nothing and
imports neither torch nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paramserve import errors as errors
    from paramserve import pytorch as pytorch
    from paramserve.client import Client as Client
    from paramserve.client import Table as Table
    from paramserve.client import TablePush as TablePush
    from paramserve.client import Ticket as Ticket
    from paramserve.cluster import Cluster as Cluster
    from paramserve.config import TLS as TLS
    from paramserve.config import Deadlines as Deadlines
    from paramserve.config import Limits as Limits
    from paramserve.core.consistency import Adaptive as Adaptive
    from paramserve.core.consistency import Async as Async
    from paramserve.core.consistency import BoundedStaleness as BoundedStaleness
    from paramserve.core.consistency import Buffered as Buffered
    from paramserve.core.consistency import DelayCompensated as DelayCompensated
    from paramserve.core.consistency import ElasticAverage as ElasticAverage
    from paramserve.core.consistency import LocalSteps as LocalSteps
    from paramserve.core.consistency import Sync as Sync
    from paramserve.core.damping import Exponential as Exponential
    from paramserve.core.damping import Inverse as Inverse
    from paramserve.core.damping import Polynomial as Polynomial
    from paramserve.core.decisions import Admit as Admit
    from paramserve.core.decisions import Apply as Apply
    from paramserve.core.decisions import Buffer as Buffer
    from paramserve.core.decisions import Drop as Drop
    from paramserve.core.decisions import Policy as Policy
    from paramserve.core.decisions import Pull as Pull
    from paramserve.core.decisions import Push as Push
    from paramserve.core.decisions import Standing as Standing
    from paramserve.core.decisions import Wait as Wait
    from paramserve.core.keyed.options import LRU as LRU
    from paramserve.core.keyed.options import TTL as TTL
    from paramserve.core.keyed.options import Constant as Constant
    from paramserve.core.keyed.options import MinCount as MinCount
    from paramserve.core.keyed.options import Normal as Normal
    from paramserve.core.keyed.options import Uniform as Uniform
    from paramserve.core.keyed.options import Zeros as Zeros
    from paramserve.engine.local import Local as Local
    from paramserve.engine.on_ray import Needs as Needs
    from paramserve.engine.on_ray import OnRay as OnRay
    from paramserve.errors import ParamServeError as ParamServeError
    from paramserve.job import Job as Job
    from paramserve.job import run as run
    from paramserve.job import start as start
    from paramserve.job.reading import Snapshot as Snapshot
    from paramserve.job.result import Restarted as Restarted
    from paramserve.job.result import Result as Result
    from paramserve.job.roster import Restart as Restart
    from paramserve.joining import Handle as Handle
    from paramserve.joining import attach as attach
    from paramserve.joining import connect as connect
    from paramserve.joining import from_environment as from_environment
    from paramserve.rules.adagrad import Adagrad as Adagrad
    from paramserve.rules.adagrad import RowAdagrad as RowAdagrad
    from paramserve.rules.adam import Adam as Adam
    from paramserve.rules.add import Add as Add
    from paramserve.rules.base import PushInfo as PushInfo
    from paramserve.rules.custom import CustomRule as CustomRule
    from paramserve.rules.ftrl import FTRL as FTRL
    from paramserve.rules.sgd import SGD as SGD
    from paramserve.serving import serve as serve
    from paramserve.worker import Worker as Worker

_WHERE = {
    "run": "job",
    "start": "job",
    "Job": "job",
    "Result": "job.result",
    "Snapshot": "job.reading",
    "Worker": "worker",
    "Cluster": "cluster",
    "Client": "client",
    "Ticket": "client",
    "Table": "client",
    "TablePush": "client",
    "Uniform": "core.keyed.options",
    "Normal": "core.keyed.options",
    "Constant": "core.keyed.options",
    "Zeros": "core.keyed.options",
    "MinCount": "core.keyed.options",
    "TTL": "core.keyed.options",
    "LRU": "core.keyed.options",
    "Sync": "core.consistency",
    "Async": "core.consistency",
    "BoundedStaleness": "core.consistency",
    "DelayCompensated": "core.consistency",
    "Buffered": "core.consistency",
    "LocalSteps": "core.consistency",
    "ElasticAverage": "core.consistency",
    "Adaptive": "core.consistency",
    "Inverse": "core.damping",
    "Exponential": "core.damping",
    "Polynomial": "core.damping",
    "Policy": "core.decisions",
    "Standing": "core.decisions",
    "Push": "core.decisions",
    "Pull": "core.decisions",
    "Apply": "core.decisions",
    "Buffer": "core.decisions",
    "Drop": "core.decisions",
    "Admit": "core.decisions",
    "Wait": "core.decisions",
    "Add": "rules.add",
    "SGD": "rules.sgd",
    "Adam": "rules.adam",
    "CustomRule": "rules.custom",
    "Adagrad": "rules.adagrad",
    "RowAdagrad": "rules.adagrad",
    "FTRL": "rules.ftrl",
    "PushInfo": "rules.base",
    "Local": "engine.local",
    "OnRay": "engine.on_ray",
    "Needs": "engine.on_ray",
    "Restart": "job.roster",
    "Restarted": "job.result",
    "Handle": "joining",
    "attach": "joining",
    "connect": "joining",
    "from_environment": "joining",
    "serve": "serving",
    "TLS": "config",
    "Deadlines": "config",
    "Limits": "config",
    "ParamServeError": "errors",
}

__all__ = [*_WHERE, "errors", "pytorch"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("paramserve")
    elif name in ("errors", "pytorch"):
        value = import_module(f"paramserve.{name}")
    elif name in _WHERE:
        value = getattr(import_module(f"paramserve.{_WHERE[name]}"), name)
    else:
        raise AttributeError(f"module 'paramserve' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
