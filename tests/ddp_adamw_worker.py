"""One rank of a training by torch alone and AdamW, in replicas or in two stages; for ranks_beside_ddp_test.py.

Usage: ddp_adamw_worker.py MODEL_FOLDER TOKENS STEPS LR ddp|stages: prints each step's loss of all ranks. TOKENS: a file of
eight sequences of 32 bytes and one byte more; every step is over all of them. ddp: DistributedDataParallel, an equal part on
each rank. stages: Schedule1F1B of torch.distributed.pipelining with four micro batches.
"""
import pathlib
import sys

import torch
import torch.distributed as dist
import transformers
from torch.nn.parallel import DistributedDataParallel


def loss_of(logits, targets):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class FirstStage(torch.nn.Module):
    """Of a model of transformers, the embedding and the first layer."""

    def __init__(self, whole):
        super().__init__()
        self.model = whole.model
        self.model.layers = self.model.layers[:1]
        self.model.norm = torch.nn.Identity()

    def forward(self, tokens):
        return self.model(tokens, use_cache=False).last_hidden_state


class SecondStage(torch.nn.Module):
    def __init__(self, whole):
        super().__init__()
        self.model, self.head = whole.model, whole.lm_head
        self.model.layers = self.model.layers[1:]
        self.model.embed_tokens = None

    def forward(self, hidden):
        return self.head(self.model(inputs_embeds=hidden, use_cache=False).last_hidden_state)


def main(folder, tokens, steps, lr, how):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    text = torch.frombuffer(bytearray(pathlib.Path(tokens).read_bytes()), dtype=torch.uint8).long()
    rows = torch.stack([text[32 * i:32 * i + 33] for i in range(8)])
    if how == "ddp":
        rows = rows[rank * 8 // world:(rank + 1) * 8 // world]
        model = DistributedDataParallel(whole)
    else:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # takes long
        model = (FirstStage if rank == 0 else SecondStage)(whole)
        stage = PipelineStage(model, rank, world, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 4, loss_fn=loss_of)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=lr,
                                  betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        if how == "ddp":
            loss = loss_of(model(rows[:, :-1]).logits, rows[:, 1:])
            loss.backward()
            mean = loss.detach() / world
        else:
            losses = [torch.zeros(())]
            if rank == 0:
                schedule.step(rows[:, :-1])
            else:
                losses = []
                schedule.step(target=rows[:, 1:], losses=losses)
            mean = torch.stack(losses).mean().detach()
        optimizer.step()
        dist.all_reduce(mean)
        if rank == 0:
            print(mean.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
