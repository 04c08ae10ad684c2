"""Gradients leave while backward runs: no more than one of them is held beside the devices' copy.

    python examples/release_gradients.py FOLDER

Each micro batch's gradients are added up in host memory; the last one of a step sends them off.
"""

import sys

import torch

import smartinf

MICRO_BATCHES = 4

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
optimizer = smartinf.AdamW(
    model.parameters(),
    lr=1e-3,
    devices=[sys.argv[1]],
    resume=True,
    release_gradients=True,
    accumulation_steps=MICRO_BATCHES,
    max_grad_norm=1.0,  # clip_grad_norm_ would find no gradients
)
for step in range(20):
    for _ in range(MICRO_BATCHES):
        x = torch.randn(32, 64)
        (torch.nn.functional.mse_loss(model(x), x.roll(1, dims=1)) / MICRO_BATCHES).backward()
        assert all(p.grad is None for p in model.parameters())
    optimizer.step()
print(f"gradient norm {optimizer.grad_norm:.4f}")
