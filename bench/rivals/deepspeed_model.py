#!/usr/bin/env python3
"""The rival of bench/streamed_model.py: the same model and batches with DeepSpeed ZeRO-3, parameters and
optimizer state on a drive (ZeRO-Infinity), on the CPU.

    build/rivals/deepspeed/bin/python bench/rivals/deepspeed_model.py WORK [--steps 4]

WORK/model is what bench/streamed_model.py has made there. Prints a JSON line. Set up by bench/rivals/setup_deepspeed.sh.
"""

import argparse
import json
import os
import resource
import time

for key, value in {
    "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "RANK": "0", "WORLD_SIZE": "1",
    "LOCAL_RANK": "0", "ACCELERATE_USE_CPU": "true",
}.items():  # fmt: skip
    os.environ.setdefault(key, value)

import deepspeed  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import transformers.integrations  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("work")
parser.add_argument("--sequence", type=int, default=512)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--buffers", type=int, default=40, help="of 70 million parameters each")
parser.add_argument("--params", choices=["nvme", "cpu", "none"], default="nvme")
args = parser.parse_args()

swap = os.path.join(args.work, "deepspeed")
os.makedirs(swap, exist_ok=True)
config = {
    "train_micro_batch_size_per_gpu": args.batch,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "sub_group_size": 20_000_000,
        "stage3_param_persistence_threshold": 100_000,
        "stage3_max_live_parameters": 200_000_000,
        "stage3_prefetch_bucket_size": 60_000_000,
        "offload_optimizer": {"device": "nvme", "nvme_path": swap, "pin_memory": False, "buffer_count": 14,
                              "pipeline_read": False, "pipeline_write": False},
    },
    "aio": {"block_size": 1 << 20, "queue_depth": 16, "single_submit": False, "overlap_events": True},
}  # fmt: skip
if args.params != "none":
    place = {"device": args.params, "pin_memory": False}
    if args.params == "nvme":
        place |= {"nvme_path": swap, "buffer_count": args.buffers, "buffer_size": 70_000_000, "max_in_cpu": 0}
    config["zero_optimization"]["offload_param"] = place

imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
deepspeed.init_distributed(dist_backend="gloo")
keep = transformers.integrations.HfDeepSpeedConfig(config)  # from_pretrained partitions as it loads
model = transformers.AutoModelForCausalLM.from_pretrained(os.path.join(args.work, "model"), dtype=torch.bfloat16)
model.gradient_checkpointing_enable()
engine, *_ = deepspeed.initialize(model=model, config=config)
generator = torch.Generator().manual_seed(2)
rows = torch.randint(model.config.vocab_size, (args.batch * args.steps, args.sequence), generator=generator)
losses, steps = [], []
for batch in rows.split(args.batch):
    began = time.monotonic()
    loss = engine(input_ids=batch, labels=batch).loss
    engine.backward(loss)
    engine.step()
    steps.append(round(time.monotonic() - began, 2))
    losses.append(loss.item())
print(
    json.dumps(
        {
            "way": f"deepspeed, parameters {args.params}",
            "peak_mib": {"imports": imported, "trained": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10},
            "losses": losses,
            "steps": steps,
        }
    )
)
