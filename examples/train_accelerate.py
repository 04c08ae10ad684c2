"""A loop of one's own with Accelerate, over several processes.

    torchrun --nproc-per-node 2 examples/train_accelerate.py FOLDER STATE [STEPS]
    accelerate launch --use_fsdp --fsdp_version 2 --fsdp_offload_params false examples/train_accelerate.py FOLDER STATE

The first line uses DistributedDataParallel. The second, for GPUs, divides the model among the processes (FSDP2). Each
process keeps and updates a part of the optimizer's state below FOLDER. The state of training is saved in STATE, and
when STATE is there training goes on from it.
"""

import os
import sys

import accelerate
import torch

import smartinf
import smartinf.hf

folder, saved = sys.argv[1:3]
accelerator = accelerate.Accelerator(cpu=not torch.cuda.is_available())
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
if accelerator.is_fsdp2:  # the optimizer comes after the model has been divided
    model = accelerate.utils.fsdp2_prepare_model(accelerator, model)
optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-3, devices=[folder])
loader = torch.utils.data.DataLoader(torch.randn(1024, 64), batch_size=16)

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
smartinf.hf.register(accelerator, optimizer)
if os.path.exists(saved):
    accelerator.load_state(saved)

steps = int(sys.argv[3]) if len(sys.argv) > 3 else 100
while steps > 0:
    for x in loader:
        loss = torch.nn.functional.mse_loss(model(x), x.roll(1, dims=1))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps -= 1
        if steps == 0:
            break
accelerator.save_state(saved)
loss = accelerator.reduce(loss.detach(), "mean")
accelerator.print(f"loss {loss.item():.4f}")
accelerator.end_training()
