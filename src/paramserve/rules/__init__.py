"""Update rules: how a gradient changes a value. Pure maths, with kernels that load at first use."""

from __future__ import annotations

from paramserve.rules.adadelta import Adadelta as Adadelta
from paramserve.rules.adagrad import Adagrad as Adagrad
from paramserve.rules.adagrad import RowAdagrad as RowAdagrad
from paramserve.rules.adam import Adam as Adam
from paramserve.rules.adamax import Adamax as Adamax
from paramserve.rules.add import Add as Add
from paramserve.rules.base import Array as Array
from paramserve.rules.base import Hyper as Hyper
from paramserve.rules.base import PushInfo as PushInfo
from paramserve.rules.base import RowRule as RowRule
from paramserve.rules.base import Rule as Rule
from paramserve.rules.base import Run as Run
from paramserve.rules.delayed_nesterov import DelayedNesterov as DelayedNesterov
from paramserve.rules.ftrl import FTRL as FTRL
from paramserve.rules.lamb import LAMB as LAMB
from paramserve.rules.lion import Lion as Lion
from paramserve.rules.nadam import NAdam as NAdam
from paramserve.rules.rmsprop import RMSprop as RMSprop
from paramserve.rules.sgd import SGD as SGD
