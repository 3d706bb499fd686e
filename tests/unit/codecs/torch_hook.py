"""What torch's PowerSGD hook makes of one gradient, in one process with gloo.

It starts from the matrix that the codec draws. Arguments: the rank, and the folder of `found.npz`.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks


def main(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    torch.manual_seed(0)
    plain = torch.nn.Linear(60, 40, bias=False)
    inputs, wanted = torch.randn(64, 60), torch.randn(64, 40)
    torch.nn.functional.mse_loss(plain(inputs), wanted).backward()
    gradient = plain.weight.grad.numpy().reshape(-1).copy()
    model = torch.nn.parallel.DistributedDataParallel(plain)
    state = hooks.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=2, use_error_feedback=False
    )
    model.register_comm_hook(state, hooks.powerSGD_hook)
    drawn = np.random.default_rng((11, 0)).standard_normal((60, rank), np.float32)
    state.p_memory_dict[0] = torch.empty(40 * rank)
    state.q_memory_dict[0] = torch.from_numpy(drawn).reshape(-1)
    for _ in range(3):  # the first two are not compressed
        plain.weight.grad = None
        torch.nn.functional.mse_loss(model(inputs), wanted).backward()
        if state.iter < 2:
            np.testing.assert_allclose(plain.weight.grad.numpy().reshape(-1), gradient)
            state.q_memory_dict[0] = torch.from_numpy(drawn.copy()).reshape(-1)
    hooked = plain.weight.grad.numpy().reshape(-1)
    np.savez(f"{folder}/found.npz", gradient=gradient, hooked=hooked)


if __name__ == "__main__":
    if dist.is_available() and dist.is_gloo_available():
        main(int(sys.argv[1]), sys.argv[2])
    else:
        print("no gloo")
    sys.stdout.flush()
    os._exit(0)  # what torch's threads do at the end is not looked at
