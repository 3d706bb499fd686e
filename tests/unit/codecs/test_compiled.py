"""Which kernels a codec needs: what is loaded for one is all that it calls."""

from __future__ import annotations

import subprocess
import sys

from paramserve.codecs.compiled import ON_KEYS, ON_TENSORS, kernels_of
from paramserve.codecs.registry import BUILT_IN

ONE_AFTER_ANOTHER = """
import numpy as np
import paramserve as ps
from paramserve.codecs.compiled import codec_kernels
from paramserve.codecs.registry import spec
from paramserve.codecs.rows import FOR_ROWS, RowCodec
from paramserve.compiling import codecs_loaded, load_codecs
from paramserve.config import RuleSpec
from paramserve.codecs.keys import ONCE, keys_bytes, read_keys, write_keys
from paramserve.messages import BlockSpec, TableSpec

def block_of(codec, table):
    return BlockSpec(0, 0, "g", "float32", None, (), (0, 0), push=spec(codec), table=table)

def loaded():
    return {k.__name__ for k, types in codec_kernels().KERNELS.items() if types in k.overloads}

values, dim = np.linspace(-1, 1, 512).astype(np.float32), 8
codecs = [ps.BFloat16(), ps.Float16(), ps.Int8(), ps.Int4(), ps.Int2(), ps.Sign(), ps.TopK(0.1),
          ps.TopK(0.1, index="plain"), ps.RandomK(0.1), ps.TopK(0.1) | ps.Int8()]
for codec in codecs:
    block = block_of(codec, None)
    load_codecs(block)
    assert codecs_loaded(block)
    data, out = np.zeros(codec.size(512) + 7 & -8, np.uint8), np.empty(512, np.float32)
    codec.decode(data[: codec.encode(values, data, 3)], out)
for codec in codecs:
    if type(codec) in FOR_ROWS:
        load_codecs(block_of(codec, TableSpec(dim, "float32", 0, RuleSpec("options"))))
        rows = RowCodec(codec, dim, random=True)
        data = np.zeros(rows.size(64) + 7 & -8, np.uint8)
        rows.encode(values, data, 3)
        rows.decode(data[: rows.size(64)], np.empty(512, np.float32))
keys = np.arange(64) * 3
data = np.zeros(keys_bytes(keys, ONCE), np.uint8)
write_keys(keys, data, ONCE)
assert (read_keys(data, 64, ONCE) == keys).all()
print(len(loaded()), len(codec_kernels().KERNELS))
"""


def names_of(*codecs: str, rows: bool = False) -> set[str]:
    return {each.__name__ for each in kernels_of(codecs, rows=rows)}


def test_every_built_in_codec_says_what_it_calls() -> None:
    assert {*ON_TENSORS} == {*BUILT_IN, "Chain"}


def test_chain_needs_what_its_codecs_need() -> None:
    assert names_of("Chain", "TopK", "Int8") == {*ON_TENSORS["TopK"], *ON_TENSORS["Int8"]}


def test_rows_need_loops_of_their_own_and_those_of_keys() -> None:
    own = {"to_int8", "from_int8", "rows_to_int8", "rows_from_int8"}
    assert names_of("Int8", rows=True) == {*own, *ON_KEYS}


def test_codec_of_a_user_may_call_every_other() -> None:
    assert {"to_int8", "from_int2", "draw_places"} < names_of("Mine")


def test_block_without_codecs_needs_none() -> None:
    assert names_of(rows=True) == set()


def test_codecs_run_with_only_their_own_kernels_loaded() -> None:
    """In a process of their own: what a call has to compile is not among those."""
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_ANOTHER], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    loaded, every = map(int, done.stdout.split())
    assert loaded == every
