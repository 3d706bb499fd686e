"""Update rules: how a gradient changes a value. Pure maths, with kernels that load at first use."""

from __future__ import annotations

from paramserve.rules.adagrad import Adagrad, RowAdagrad
from paramserve.rules.adam import Adam
from paramserve.rules.add import Add
from paramserve.rules.base import Array, Hyper, PushInfo, RowRule, Rule, Run
from paramserve.rules.ftrl import FTRL
from paramserve.rules.sgd import SGD

__all__ = [
    "Add",
    "SGD",
    "Adam",
    "Adagrad",
    "RowAdagrad",
    "FTRL",
    "Rule",
    "RowRule",
    "Run",
    "PushInfo",
    "Hyper",
    "Array",
]
