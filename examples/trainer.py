"""Hugging Face's Trainer with state on storage: a small Llama on the text of this folder.

    python examples/trainer.py DEVICE_FOLDER OUTPUT_FOLDER [--resume]
"""

import pathlib
import sys

import torch
import transformers

import smartinf.hf

text = b"".join(path.read_bytes() for path in sorted(pathlib.Path(__file__).parent.glob("*.py")))
tokens = torch.tensor(list(text))
windows = [{"input_ids": w, "labels": w} for w in tokens.unfold(0, 64, 32)]

torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)
args = transformers.TrainingArguments(
    output_dir=sys.argv[2], max_steps=20, save_steps=10, learning_rate=3e-3, report_to=[], use_cpu=True
)
trainer = transformers.Trainer(
    model=transformers.LlamaForCausalLM(config),
    args=args,
    train_dataset=windows,
)
smartinf.hf.attach(trainer, devices=[sys.argv[1]])
trainer.train(resume_from_checkpoint="--resume" in sys.argv)
