"""Two language models that teach each other while they learn (deep mutual learning): one optimizer, one commit.

    python examples/co_distillation.py DEVICE OUT [STEPS]

DEVICE is a folder on a drive; OUT gets both models, as transformers loads them. Run it again with more steps, also after a
kill: it goes on where it stopped, and both models are of the same step. To use models of your own, replace the two
configurations by AutoModelForCausalLM.from_pretrained() of two folders that share a tokenizer.
"""

import pathlib
import sys

import torch
from torch.nn.functional import kl_div
from transformers import LlamaConfig, LlamaForCausalLM

import smartinf

device, out = sys.argv[1], pathlib.Path(sys.argv[2])
steps = int(sys.argv[3]) if len(sys.argv) > 3 else 100

torch.manual_seed(0)
shape = {"vocab_size": 256, "num_attention_heads": 4, "max_position_embeddings": 128}
student = LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, **shape))
peer = LlamaForCausalLM(LlamaConfig(hidden_size=96, intermediate_size=192, num_hidden_layers=3, **shape))

optimizer = smartinf.AdamW(
    [
        {"params": student.named_parameters(prefix="student"), "lr": 2e-3},
        {"params": peer.named_parameters(prefix="peer"), "lr": 1e-3},
    ],
    devices=[device], max_grad_norm=1.0, resume=True,
)  # fmt: skip
text = torch.frombuffer(bytearray(pathlib.Path(__file__).read_bytes()), dtype=torch.uint8).long()


def opinion(own, other):
    """KL divergence of a model's next tokens from the other's."""
    logits, target = own.flatten(0, 1), other.detach().flatten(0, 1)
    return kl_div(logits.log_softmax(-1), target.log_softmax(-1), log_target=True, reduction="batchmean")


begin = optimizer.updates
if begin:
    print(f"goes on from step {begin}")
for step in range(begin, steps):
    generator = torch.Generator().manual_seed(step)  # a step has the same batch whenever it is made
    starts = torch.randint(0, len(text) - 64, (8,), generator=generator)
    ids = torch.stack([text[start : start + 64] for start in starts])
    mine, theirs = student(ids, labels=ids), peer(ids, labels=ids)
    (mine.loss + opinion(mine.logits, theirs.logits)).backward()
    # The peer learns in every second step. A parameter without a gradient is neither read nor written.
    if step % 2 == 0:
        (theirs.loss + opinion(theirs.logits, mine.logits)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step == steps - 1:
        print(f"student of step {step}: loss {mine.loss.item():.4f}")
student.save_pretrained(out / "student")
peer.save_pretrained(out / "peer")
optimizer.close()
