"""Checkpoints by torch: the same bytes, of one process that trains with Adam."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.workloads import Saving


def _model(load: Saving) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    model = torch.nn.Linear(load.total_bytes // 4 // 1000, 1000, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def torch_save(load: Saving, scratch: Path) -> dict[str, float]:
    """`torch.save` and a sync: training stands still for all of it."""
    model, optimizer = _model(load)
    began = time.perf_counter()
    with open(scratch / "model.pt", "wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    return {"pause": seconds, "seconds": seconds}


def async_save(load: Saving, scratch: Path) -> dict[str, float]:
    """`torch.distributed.checkpoint.async_save`: training stands still while it copies. The second
    one counts, which finds its threads and its memory."""
    model, optimizer = _model(load)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    pause = seconds = 0.0
    for number in range(2):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        began = time.perf_counter()
        done = dcp.async_save(state, checkpoint_id=scratch / f"dcp{number}")
        pause = time.perf_counter() - began
        done.result()
        seconds = time.perf_counter() - began
    torch.distributed.destroy_process_group()
    return {"pause": pause, "seconds": seconds}
