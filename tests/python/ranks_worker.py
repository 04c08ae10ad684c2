"""One rank of test_ranks.py, started by torchrun: trains and leaves weights and losses behind.

Usage: ranks_worker.py DEVICES FIRST_STEP LAST_STEP CHECKPOINT_TO_LOAD|- FOLDER_FOR_RESULTS [kill]
"""

import os
import signal
import sys

import torch
import torch.distributed as dist

import smartinf

GLOBAL_BATCH = 8


def main(devices, first, last, load, results, kill=None):
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world > 1 else 0
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(20, 301), torch.nn.Tanh(), torch.nn.Linear(301, 20))
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
    optimizer = smartinf.AdamW(
        model.named_parameters(), lr=1e-2, max_grad_norm=0.05, devices=[devices]
    )
    if load != "-":
        optimizer.load_checkpoint(load)
    for step in range(int(first), int(last)):
        x = torch.randn(GLOBAL_BATCH, 20, generator=torch.Generator().manual_seed(step))
        share = x[rank * GLOBAL_BATCH // world : (rank + 1) * GLOBAL_BATCH // world]
        optimizer.zero_grad()
        wrapped(share).pow(2).mean().backward()
        if kill and step + 1 == int(last) and rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if step == 2:
            optimizer.save_checkpoint(os.path.join(results, f"checkpoint-{world}"))
    state = optimizer.full_state_dict()
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": state}, os.path.join(results, f"w{world}.pt"))
    optimizer.close()
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
