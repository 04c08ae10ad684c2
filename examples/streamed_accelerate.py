"""A loop of one's own with Accelerate over a model that is larger than memory (docs/streamed-models.md).

    python examples/streamed_accelerate.py MODEL TEXT OUTPUT DEVICE...

MODEL is a folder or a name that from_pretrained() takes, TEXT a text file. A checkpoint is written to OUTPUT/state after
half of the steps, and the result to OUTPUT/final.
"""

import argparse
import pathlib

import accelerate
import torch
import transformers

import smartinf
import smartinf.hf

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("text", type=pathlib.Path)
parser.add_argument("output")
parser.add_argument("devices", nargs="+")
parser.add_argument("--keep", help="bytes of weights that stay in memory; default: as many as fit")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--accumulation", type=int, default=2)
options = parser.parse_args()

model = smartinf.from_pretrained(options.model, devices=options.devices, keep=options.keep, dtype=torch.bfloat16)
model.gradient_checkpointing_enable({"use_reentrant": False})
optimizer = smartinf.AdamW(
    model.named_parameters(), lr=1e-4, max_grad_norm=1.0, accumulation_steps=options.accumulation
)
tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
tokens = torch.tensor(tokenizer(options.text.read_text())["input_ids"])
loader = torch.utils.data.DataLoader(tokens[: len(tokens) // 64 * 64].view(-1, 64), batch_size=1)

accelerator = accelerate.Accelerator()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
smartinf.hf.register(accelerator, optimizer)

batches = iter(loader)
for step in range(options.steps):
    together = [{"input_ids": b, "labels": b} for b in (next(batches) for _ in range(options.accumulation))]
    # All micro batches of a step pass through the model together, block by block.
    losses = smartinf.forward_backward(model, together)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1} loss {sum(losses).item():.4f}")
    if step + 1 == options.steps // 2:
        accelerator.save_state(f"{options.output}/state")
model.save_pretrained(f"{options.output}/final")
