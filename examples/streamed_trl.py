"""TRL's trainers over a model that is larger than memory (docs/streamed-models.md).

    python examples/streamed_trl.py MODEL OUTPUT DEVICE... [--dpo] [--steps 4]

MODEL is a folder or a name that from_pretrained() takes. Fine-tunes the whole model on a few conversations; with --dpo
adapters over the frozen model, which is its own reference.
"""

import argparse

import datasets
import peft
import torch
import transformers
import trl

import smartinf
import smartinf.hf

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("output")
parser.add_argument("devices", nargs="+")
parser.add_argument("--dpo", action="store_true")
parser.add_argument("--keep", help="bytes of weights that stay in memory; default: as many as fit")
parser.add_argument("--steps", type=int, default=4)
options = parser.parse_args()

model = smartinf.from_pretrained(options.model, devices=options.devices, keep=options.keep, dtype=torch.bfloat16)
tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
common = {
    "max_steps": options.steps,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-4,
    "max_grad_norm": 1.0,
    "max_length": 64,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": not torch.accelerator.is_available(),
}
if options.dpo:
    rows = [{"prompt": f"{n} and one?", "chosen": f" {n + 1}", "rejected": f" {n}"} for n in range(16)]
    args = trl.DPOConfig(options.output, gradient_checkpointing=False, **common)
    trainer = trl.DPOTrainer(
        model,
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
else:
    rows = [{"text": f"{n} and one are {n + 1}."} for n in range(16)]
    args = trl.SFTConfig(options.output, gradient_checkpointing=True, **common)
    trainer = trl.SFTTrainer(
        model,
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
smartinf.hf.attach(trainer)
trainer.train()
trainer.save_model(f"{options.output}/final")
