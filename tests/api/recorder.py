"""Prints what the runs of a program have trained under Sync: one line for each run.

A line has digests of all tensors and tables, and what the ranks returned. Left out are runs whose
policy may decide a clock without the gradients of some ranks, and runs that have trained nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import paramserve as ps

MARK = "# trained under Sync: "
SEED = 0


def record() -> None:
    """Record all runs of this process from here on. Each gets a seed, unless the program gives one,
    and writes its tables."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    ps.run, ps.start = _recorder(ps.run), _recorder(ps.start)


def _recorder(begin: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(begin)
    def begin_and_record(train: Callable[..., Any], **options: Any) -> Any:
        policy = options.get("consistency") or ps.Sync()
        options = {"seed": SEED} | options
        options["checkpoint"] = _with_tables(options.get("checkpoint"))
        run = begin(train, **options)
        if isinstance(run, ps.Result):
            _show(policy, run)
        else:
            wait = run.wait
            run.wait = functools.cache(lambda: _show(policy, wait()))
        return run

    return begin_and_record


def _with_tables(option: Any) -> ps.Checkpoint:
    """The program's own, which also writes tables."""
    folder = tempfile.mkdtemp()
    if option is None:
        return ps.Checkpoint(save_tables=folder)
    own = option if isinstance(option, ps.Checkpoint) else ps.Checkpoint(option)
    return own if own.save_tables is not None else dataclasses.replace(own, save_tables=folder)


def _show(policy: ps.Policy, result: ps.Result) -> ps.Result:
    updates = any(group.version for group in result.groups.values())
    if policy.collects and not policy.partial and updates:
        print(MARK + json.dumps(dict(_digests(result))), flush=True)
    return result


def _digests(result: ps.Result) -> Iterator[tuple[str, str]]:
    yield "returns", repr(sorted(result.returns.items()))
    for group, state in result.values.items():
        for name, value in state.items():
            yield f"{group}: {name}", _digest(np.ascontiguousarray(value))
    for table, path in result.table_files.items():
        rows = pq.read_table(path).replace_schema_metadata(None).sort_by("key").combine_chunks()
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, rows.schema) as writer:
            writer.write_table(rows)
        yield f"table {table}", _digest(stream.getvalue())


def _digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
