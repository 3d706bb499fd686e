"""Which kernels are loaded together, so described that another process finds the same ones."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from msgspec import Struct

from paramserve.codecs import compiled as compiled_codecs
from paramserve.codecs.registry import BUILT_IN as CODECS
from paramserve.codecs.registry import names_in
from paramserve.config import RuleSpec
from paramserve.core.partition import HALVES
from paramserve.core.table.compiled import index_kernels, text_kernels
from paramserve.core.table.compiled import kernels as store_kernels
from paramserve.core.table.routing import routing_kernels
from paramserve.messages import BlockSpec
from paramserve.rules.base import Rule
from paramserve.rules.built_in import BuiltIn
from paramserve.rules.compiled import compiled
from paramserve.rules.registry import BUILT_IN as RULES
from paramserve.rules.registry import build, is_built_in, spec
from paramserve.rules.rows import kernels_of

if TYPE_CHECKING:
    from paramserve.kernel_cache import Kernels

FLOAT = np.dtype(np.float32)
OTHER = "of others"
"""Stands for each codec that is not built in."""
Part = Literal["dense", "half", "table", "routing", "index", "text", "codecs", "row codecs"]


class KernelSet(Struct, frozen=True):
    """Kernels of one use.

    Attributes:
        part: "dense": of blocks of a dtype; "half": of gradients of 16 bits; "table": of the rows
            of a table on a shard; "routing": what spreads keys over shards; "index": what finds
            keys; "text": what makes keys of strings; "codecs" and "row codecs": what encodes and
            decodes tensors, and rows.
        about: the dtype, with the rule's name and states; of codecs, their names.
        rule: a built-in one. None: there is none, or its kernels are not ours.
    """

    part: Part
    about: tuple[str, ...] = ()
    rule: RuleSpec | None = None

    def __str__(self) -> str:
        return " ".join(self.key)

    @property
    def key(self) -> tuple[str, ...]:
        """What is equal where the kernels are: a rule's numbers do not count."""
        return (self.part, *self.about)

    def kernels(self) -> Kernels:
        """The kernels, in the same order in every process. Imports Numba."""
        match self.part:
            case "dense":
                return self._dense(np.dtype(self.about[0]))
            case "half":
                dtype = HALVES[self.about[0]]
                return {**compiled().shared(dtype), **self._of_rule(FLOAT, dtype)}
            case "table":
                rows = kernels_of(None if self.rule is None else build(self.rule))
                routing: Kernels = routing_kernels().KERNELS
                return {**self._dense(FLOAT), **routing, **store_kernels(), **rows}
            case "codecs" | "row codecs":
                return compiled_codecs.kernels_of(self.about, rows=self.part == "row codecs")
        modules = {"routing": routing_kernels, "index": index_kernels, "text": text_kernels}
        kernels: Kernels = modules[self.part]().KERNELS
        return kernels

    def _dense(self, dtype: np.dtype[Any]) -> Kernels:
        return {**compiled().shared(dtype), **self._of_rule(dtype)}

    def _of_rule(self, dtype: np.dtype[Any], pushed: np.dtype[Any] | None = None) -> Kernels:
        rule = None if self.rule is None else build(self.rule)
        return rule.block_kernels(dtype, pushed) if isinstance(rule, BuiltIn) else {}


ROUTING, INDEX, TEXT = KernelSet("routing"), KernelSet("index"), KernelSet("text")
EVERY_CODEC = KernelSet("row codecs", tuple(CODECS))


def dense(dtype: np.dtype[Any], rule: Rule | None) -> KernelSet:
    """What a block needs on a shard, and what clients need for it."""
    return _with_rule("dense", dtype.name, rule)


def half(name: str, rule: Rule | None) -> KernelSet:
    """What takes gradients of 16 bits of one kind, as `BlockSpec.half`."""
    return _with_rule("half", name, rule)


def table(rule: Rule, dtype: str) -> KernelSet:
    """What a table with values of a dtype needs on a shard: of each rule a set of its own, whose
    `rule` is None where that is not built in."""
    about = (dtype, rule.name, *rule.states(rule.hyper()))
    return KernelSet("table", about, spec(rule) if is_built_in(rule) else None)


def codecs_of(block: BlockSpec) -> KernelSet:
    """What the codecs of a block call."""
    codecs = [each for each in (block.push, block.pull) if each is not None]
    # A name that is not built in comes from a peer, and says nothing of kernels.
    compiled_names = compiled_codecs.ON_TENSORS
    names = {
        name if name in compiled_names else OTHER for each in codecs for name in names_in(each)
    }
    return KernelSet("codecs" if block.table is None else "row codecs", tuple(sorted(names)))


def every() -> list[KernelSet]:
    """All that this version can need, for what is built in."""
    sets = [ROUTING, INDEX, TEXT, EVERY_CODEC, KernelSet("table", (FLOAT.name,))]
    for rule in _rules():
        if not rule.whole_rows:
            sets += [dense(dtype, rule) for dtype in compiled().DTYPES]
            sets += [half(name, rule) for name in HALVES]
        if not rule.whole_tensors:
            sets.append(table(rule, FLOAT.name))
    return list({each.key: each for each in sets}.values())


def _rules() -> Iterator[Any]:
    """Each built-in rule, once with each choice of states."""
    for kind in RULES.values():
        parameters = inspect.signature(kind).parameters
        options = {"momentum": (0.0, 0.9), "centered": (False, True)}
        choices = {name: values for name, values in options.items() if name in parameters}
        required = {"lr": 0.1} if "lr" in parameters else {}
        for values in itertools.product(*choices.values()):
            yield kind(**required, **dict(zip(choices, values, strict=True)))


def _with_rule(part: Part, dtype: str, rule: Rule | None) -> KernelSet:
    if rule is None or not is_built_in(rule):
        return KernelSet(part, (dtype,))
    # A rule has other kernels when it keeps other state, as SGD with and without momentum.
    return KernelSet(part, (dtype, rule.name, *rule.states(rule.hyper())), spec(rule))
