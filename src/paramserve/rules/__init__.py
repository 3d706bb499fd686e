"""Update rules: how a gradient changes a value. Pure maths, with kernels that load at first use."""

from __future__ import annotations

from paramserve.rules.adam import Adam
from paramserve.rules.add import Add
from paramserve.rules.base import Array, Hyper, PushInfo, Rule, Run
from paramserve.rules.sgd import SGD

__all__ = ["Add", "SGD", "Adam", "Rule", "Run", "PushInfo", "Hyper", "Array"]
