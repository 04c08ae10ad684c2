"""DistributedDataParallel over several processes, each of which keeps and updates a part of the optimizer's state.

    torchrun --nproc-per-node 2 examples/train_ddp.py FOLDER [STEPS]

The parts lie in FOLDER/rank0, FOLDER/rank1 and so on. Run it again, with as many processes, and it goes on where it
stopped; a checkpoint (save_checkpoint) can be loaded by any number of them.
"""

import os
import sys

import torch
import torch.distributed as dist

import smartinf

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).to(device)
wrapped = torch.nn.parallel.DistributedDataParallel(model)
optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-3, devices=[sys.argv[1]], resume=True, max_grad_norm=1.0)

torch.manual_seed(dist.get_rank())  # every process has batches of its own
for step in range(int(sys.argv[2]) if len(sys.argv) > 2 else 100):
    x = torch.randn(16, 64, device=device)
    loss = torch.nn.functional.mse_loss(wrapped(x), x.roll(1, dims=1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.all_reduce(loss.detach_())
if dist.get_rank() == 0:
    print(f"loss {loss.item() / dist.get_world_size():.4f}")
optimizer.close()
dist.destroy_process_group()
