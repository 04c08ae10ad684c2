"""One rank of a training by torch alone, DistributedDataParallel and AdamW; for ranks_beside_ddp_test.py.

Usage: ddp_adamw_worker.py MODEL_FOLDER TOKENS STEPS LR: prints each step's loss of all ranks. TOKENS: a file of eight
sequences of 32 bytes and one byte more; every step is over all of them, an equal part on each rank.
"""
import pathlib
import sys

import torch
import torch.distributed as dist
import transformers
from torch.nn.parallel import DistributedDataParallel


def main(folder, tokens, steps, lr):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    model = DistributedDataParallel(whole)
    matrices = [p for p in whole.parameters() if p.ndim > 1]
    others = [p for p in whole.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=lr,
                                  betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01)
    text = torch.frombuffer(bytearray(pathlib.Path(tokens).read_bytes()), dtype=torch.uint8).long()
    rows = torch.stack([text[32 * i:32 * i + 33] for i in range(8)])[rank * 8 // world:(rank + 1) * 8 // world]
    for _ in range(steps):
        logits = model(rows[:, :-1]).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(mean.item() / world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
