"""A model divided among processes by fully_shard (FSDP2), each of which updates its own rows on its own devices.

    torchrun --nproc-per-node 2 examples/train_fsdp2.py FOLDER CHECKPOINT [STEPS]

Run it again, with as many processes, and it goes on where it stopped. torch.distributed.checkpoint writes CHECKPOINT at
the end. When FOLDER is empty training begins from there, with any number of processes.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import smartinf

folder, checkpoint = sys.argv[1:3]
cuda = torch.cuda.is_available()
dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).to(device)
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)

# The optimizer comes after fully_shard.
begins = not os.path.exists(folder)
dist.barrier()
optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-3, devices=[folder], resume=True, max_grad_norm=1.0)
if begins and os.path.exists(checkpoint):
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)

torch.manual_seed(dist.get_rank())  # every process has batches of its own
for step in range(int(sys.argv[3]) if len(sys.argv) > 3 else 100):
    x = torch.randn(16, 64, device=device)
    loss = torch.nn.functional.mse_loss(model(x), x.roll(1, dims=1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weights, state = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": state}, checkpoint_id=checkpoint)
dist.all_reduce(loss.detach_())
if dist.get_rank() == 0:
    print(f"loss {loss.item() / dist.get_world_size():.4f}")
optimizer.close()
dist.destroy_process_group()
