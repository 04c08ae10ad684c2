"""Twenty lines of PyTorch, one of them changed: the optimizer's state lives in a folder.

    python examples/train_one_line.py FOLDER [STEPS]

Run it again and it goes on where it stopped.
"""

import sys

import torch

import smartinf

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))

# optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer = smartinf.AdamW(model.parameters(), lr=1e-3, devices=[sys.argv[1]], resume=True)

for step in range(int(sys.argv[2]) if len(sys.argv) > 2 else 100):
    x = torch.randn(32, 64)
    loss = torch.nn.functional.mse_loss(model(x), x.roll(1, dims=1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")
