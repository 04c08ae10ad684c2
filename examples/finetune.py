"""Full fine-tuning of a model whose optimizer state would not fit into memory (docs/finetune.md).

    python examples/finetune.py MODEL TEXT OUTPUT DEVICE... [--resume]

MODEL is a folder or a name that from_pretrained() takes, TEXT a text file, every DEVICE a folder on a drive
of its own. The result stands in OUTPUT/final.
"""

import argparse
import os
import pathlib

import torch
import transformers

import smartinf.hf

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("text", type=pathlib.Path)
parser.add_argument("output")
parser.add_argument("devices", nargs="+")
parser.add_argument("--resume", action="store_true", help="from the last checkpoint in OUTPUT")
parser.add_argument("--new", action="store_true", help="discard the state that the devices hold")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--save-steps", type=int, default=250)
parser.add_argument("--sequence", type=int, default=2048)
parser.add_argument("--accumulation", type=int, default=32)
parser.add_argument("--gradient-budget", default=None, help='memory for gradients, e.g. "2GB"; the rest waits on the drives')
options = parser.parse_args()

# The weights are bf16 in memory; their f32 masters are on the devices.
model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
tokens = torch.tensor(tokenizer(options.text.read_text()).input_ids)
windows = [{"input_ids": w, "labels": w} for w in tokens.unfold(0, options.sequence, options.sequence)]

args = transformers.TrainingArguments(
    output_dir=options.output,
    max_steps=options.steps,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=options.accumulation,
    gradient_checkpointing=True,
    learning_rate=1e-5,
    lr_scheduler_type="cosine",
    warmup_steps=options.steps // 20,
    adam_beta2=0.95,
    weight_decay=0.1,
    max_grad_norm=1.0,
    bf16=False,  # autocast would only make f32 copies of the logits
    logging_steps=1,
    save_steps=options.save_steps,
    save_total_limit=1,
    report_to=[],
)
trainer = transformers.Trainer(
    model=model,
    args=args,
    train_dataset=windows,
    processing_class=tokenizer,
    data_collator=transformers.default_data_collator,  # windows have one length; nothing is padded
)
smartinf.hf.attach(
    trainer,
    devices=options.devices,
    resume=False if options.new else None,
    release_gradients=True,
    gradient_budget=options.gradient_budget,
)
trainer.train(resume_from_checkpoint=options.resume)
trainer.save_model(os.path.join(options.output, "final"))
