"""Fine-tunes a model that is larger than memory with Trainer (docs/streamed-models.md).

    python examples/streamed_trainer.py MODEL TEXT OUTPUT DEVICE... [--memory-budget 24GB] [--lora]

MODEL is a folder or a name that from_pretrained() takes, TEXT a text file, every DEVICE a folder on a drive of its own.
The result stands in OUTPUT/final.
"""

import argparse
import pathlib

import torch
import transformers

import smartinf
import smartinf.hf

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("text", type=pathlib.Path)
parser.add_argument("output")
parser.add_argument("devices", nargs="+")
parser.add_argument("--memory-budget")
parser.add_argument("--keep", help="bytes of weights that stay in memory; default: as many as fit")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--lora", action="store_true", help="train adapters over the frozen model")
options = parser.parse_args()

model = smartinf.from_pretrained(
    options.model,
    devices=options.devices,
    memory_budget=options.memory_budget,
    keep=options.keep,
    dtype=torch.bfloat16,
)
model.gradient_checkpointing_enable({"use_reentrant": False})
if options.lora:
    import peft

    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))

tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
tokens = tokenizer(options.text.read_text())["input_ids"]
windows = [tokens[i : i + 128] for i in range(0, len(tokens) - 128, 128)]


class LayerwiseTrainer(smartinf.hf.StreamedTrainer, transformers.Trainer):
    """Micro batches go through the model together, block by block."""


args = transformers.TrainingArguments(
    options.output,
    max_steps=options.steps,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=2,
    learning_rate=1e-4,
    max_grad_norm=1.0,
    logging_steps=10,
    save_strategy="no",
    report_to=[],
)
trainer = LayerwiseTrainer(
    model,
    args,
    train_dataset=[{"input_ids": w, "labels": w} for w in windows],
)
smartinf.hf.attach(trainer)
trainer.train()
model.save_pretrained(f"{options.output}/final")
