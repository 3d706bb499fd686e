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
    from paramserve.client.string_keys import keys_of as keys_of
    from paramserve.codecs import BFloat16 as BFloat16
    from paramserve.codecs import CustomCodec as CustomCodec
    from paramserve.codecs import Delta as Delta
    from paramserve.codecs import Feedback as Feedback
    from paramserve.codecs import Float16 as Float16
    from paramserve.codecs import Int2 as Int2
    from paramserve.codecs import Int4 as Int4
    from paramserve.codecs import Int8 as Int8
    from paramserve.codecs import PowerSGD as PowerSGD
    from paramserve.codecs import RandomK as RandomK
    from paramserve.codecs import Sign as Sign
    from paramserve.codecs import TopK as TopK
    from paramserve.config import TLS as TLS
    from paramserve.config import Deadlines as Deadlines
    from paramserve.config import Limits as Limits
    from paramserve.consistency.base import Policy as Policy
    from paramserve.consistency.built_in import Adaptive as Adaptive
    from paramserve.consistency.built_in import Async as Async
    from paramserve.consistency.built_in import AsyncLocalSteps as AsyncLocalSteps
    from paramserve.consistency.built_in import BoundedStaleness as BoundedStaleness
    from paramserve.consistency.built_in import Buffered as Buffered
    from paramserve.consistency.built_in import DelayCompensated as DelayCompensated
    from paramserve.consistency.built_in import ElasticAverage as ElasticAverage
    from paramserve.consistency.built_in import Exponential as Exponential
    from paramserve.consistency.built_in import Inverse as Inverse
    from paramserve.consistency.built_in import LocalSteps as LocalSteps
    from paramserve.consistency.built_in import Polynomial as Polynomial
    from paramserve.consistency.built_in import Sync as Sync
    from paramserve.core.table.options import LRU as LRU
    from paramserve.core.table.options import TTL as TTL
    from paramserve.core.table.options import Constant as Constant
    from paramserve.core.table.options import MinCount as MinCount
    from paramserve.core.table.options import Normal as Normal
    from paramserve.core.table.options import Uniform as Uniform
    from paramserve.core.table.options import Zeros as Zeros
    from paramserve.engine.local import Local as Local
    from paramserve.engine.on_ray import Needs as Needs
    from paramserve.engine.on_ray import OnRay as OnRay
    from paramserve.errors import ParamServeError as ParamServeError
    from paramserve.launch import Job as Job
    from paramserve.launch import run as run
    from paramserve.launch import start as start
    from paramserve.launch.checkpoints import Checkpoint as Checkpoint
    from paramserve.launch.cluster import Cluster as Cluster
    from paramserve.launch.connect import Handle as Handle
    from paramserve.launch.connect import attach as attach
    from paramserve.launch.connect import connect as connect
    from paramserve.launch.connect import from_environment as from_environment
    from paramserve.launch.reading import Snapshot as Snapshot
    from paramserve.launch.result import Restarted as Restarted
    from paramserve.launch.result import Result as Result
    from paramserve.launch.roster import Restart as Restart
    from paramserve.launch.running import SavedCheckpoint as SavedCheckpoint
    from paramserve.launch.serve import serve as serve
    from paramserve.launch.working import work as work
    from paramserve.reporters import CSV as CSV
    from paramserve.reporters import HTML as HTML
    from paramserve.reporters import MLflow as MLflow
    from paramserve.reporters import Prometheus as Prometheus
    from paramserve.reporters import RayMetrics as RayMetrics
    from paramserve.reporters import TensorBoard as TensorBoard
    from paramserve.reporters import WandB as WandB
    from paramserve.rules.adadelta import Adadelta as Adadelta
    from paramserve.rules.adagrad import Adagrad as Adagrad
    from paramserve.rules.adagrad import RowAdagrad as RowAdagrad
    from paramserve.rules.adam import Adam as Adam
    from paramserve.rules.adamax import Adamax as Adamax
    from paramserve.rules.add import Add as Add
    from paramserve.rules.custom import CustomRule as CustomRule
    from paramserve.rules.delayed_nesterov import DelayedNesterov as DelayedNesterov
    from paramserve.rules.ftrl import FTRL as FTRL
    from paramserve.rules.lamb import LAMB as LAMB
    from paramserve.rules.lion import Lion as Lion
    from paramserve.rules.nadam import NAdam as NAdam
    from paramserve.rules.rmsprop import RMSprop as RMSprop
    from paramserve.rules.sgd import SGD as SGD
    from paramserve.worker import Worker as Worker

_NAMES = {
    "launch": "run start Job",
    "launch.result": "Result Restarted",
    "launch.checkpoints": "Checkpoint",
    "launch.running": "SavedCheckpoint",
    "launch.reading": "Snapshot",
    "reporters": "CSV HTML TensorBoard Prometheus RayMetrics WandB MLflow",
    "worker": "Worker",
    "launch.cluster": "Cluster",
    "client": "Client Ticket Table TablePush",
    "client.string_keys": "keys_of",
    "core.table.options": "Uniform Normal Constant Zeros MinCount TTL LRU",
    "consistency.built_in": (
        "Sync Async BoundedStaleness DelayCompensated Buffered LocalSteps "
        "AsyncLocalSteps ElasticAverage "
        "Adaptive Inverse Exponential Polynomial"
    ),
    "consistency.base": "Policy",
    "rules.add": "Add",
    "rules.sgd": "SGD",
    "rules.adam": "Adam",
    "rules.rmsprop": "RMSprop",
    "rules.adadelta": "Adadelta",
    "rules.adamax": "Adamax",
    "rules.nadam": "NAdam",
    "rules.lion": "Lion",
    "rules.lamb": "LAMB",
    "rules.custom": "CustomRule",
    "rules.adagrad": "Adagrad RowAdagrad",
    "rules.delayed_nesterov": "DelayedNesterov",
    "rules.ftrl": "FTRL",
    "codecs": (
        "BFloat16 Float16 Int8 Int4 Int2 Sign TopK RandomK PowerSGD Delta CustomCodec Feedback"
    ),
    "engine.local": "Local",
    "engine.on_ray": "OnRay Needs",
    "launch.roster": "Restart",
    "launch.connect": "Handle attach connect from_environment",
    "launch.working": "work",
    "launch.serve": "serve",
    "config": "TLS Deadlines Limits",
    "errors": "ParamServeError",
}
"""The public names by module. `__all__` has their order."""
_BESIDE = {
    "consistency": "GroupView Push Pull Apply Buffer Drop Admit Wait",
    "rules": "PushInfo",
    "reporters": "Reporter Report RunInfo",
    "observe": "StepRecord Rollback",
    "logs": "JSONFormatter",
}
"""Public names that are imported from their module: for authors of policies, rules and reporters,
and for the types of what a result has."""
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}

_MODULES = ("Embedding", "EmbeddingBag", "from_embedding")
"""Names of `paramserve.pytorch` that are looked for here."""

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
        message = f"module 'paramserve' has no attribute {name!r}"
        if name in _MODULES:
            message += f": it is ps.pytorch.{name}"
        else:
            from paramserve.errors import KINDS

            message += f": it is ps.errors.{name}" if name in KINDS else ""
            for module, names in _BESIDE.items():
                if name in names.split():
                    message += f": write `from paramserve.{module} import {name}`"
        raise AttributeError(message, name=name, obj=import_module(__name__))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
