"""Fine-tuning of models from folders: streamed, resumed on other devices, and on documents with masks,
beside transformers and PEFT.

Usage: fine_tune_test.py SMARTINF
"""
import json
import os
import pathlib
import re
import subprocess
import sys
import unittest

from rank_processes import Ranks
from small_models import COMMON, CONFIGS, WIDE_HEADS, FineTuneCase, make, make_tokenizer, read
from train_runs import ALL, SMARTINF

import safetensors.torch
import torch
import transformers


class FineTune(FineTuneCase):
    def same_export(self, run, other):
        here, there = read(self.export(run, run + "_out")), read(self.export(other, other + "_of_" + run))
        self.assertEqual(sorted(here), sorted(there))
        for name, tensor in there.items():
            self.assertTrue(torch.equal(here[name], tensor), name)

    @unittest.skipUnless(ALL, "scripts/nightly.sh runs it")
    def test_streamed_and_resident_have_the_same_bits(self):
        few = dict(num_hidden_layers=10, hidden_size=256, intermediate_size=512, vocab_size=256)
        # What is read from files needs larger slots.
        large = dict(COMMON, hidden_size=512, intermediate_size=2048, num_hidden_layers=14, vocab_size=256)
        cases = {"qwen3": (CONFIGS["qwen3"].__class__(**dict(WIDE_HEADS, **few)), ()),
                 "mixtral": (CONFIGS["mixtral"].__class__(**dict(COMMON, **few), num_local_experts=4), ()),
                 "adapters": (CONFIGS["llama"].__class__(**large), ("--lora.rank", "4"))}
        for name, (config, flags) in cases.items():
            with self.subTest(case=name):
                make(config, self.folder / name, torch.bfloat16)
                flags += ("--train.micro_batch", "1", "--train.accumulation", "3", "--engine.subgroup_elements",
                          "65536", "--train.lr", "1e-2")
                self.fine_tune(self.folder / name, "whole_" + name, *flags, steps=3)
                told = self.fine_tune(self.folder / name, "none", *flags, "--memory.host", "50MiB", code=1)
                least = int(re.search(r"needs (\d+) MiB", told).group(1))
                less = (*flags, "--memory.host", f"{least + 6}MiB")
                plan = subprocess.run(self.command(str(self.folder / "bf16_3.toml"), "none", [*less, "--print-plan"]),
                                      capture_output=True, text=True, check=True).stdout
                self.assertIn("the others come from the devices", plan)
                self.fine_tune(self.folder / name, "less_" + name, *less, steps=3)
                self.assertEqual(self.losses("less_" + name), self.losses("whole_" + name))
                self.same_export("less_" + name, "whole_" + name)

    def test_adapters_keep_to_the_planned_memory(self):
        """Backward drops most of what a deep model makes, and the small tensors between would hold a heap together."""
        config = transformers.LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=40,
                                          num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
        make(config, self.folder / "deep")
        recipe = self.recipe(steps=1)
        text = pathlib.Path(recipe).read_text()
        pathlib.Path(recipe).write_text(f'[model]\nfrom = "{self.folder / "deep"}"\n\n' + text[text.index("[data]"):])
        flags = ["--lora.rank", "8", "--memory.activations", "keep", "--data.sequence", "256", "--train.micro_batch", "2",
                 "--train.accumulation", "4", "--train.precision", "f32", "--train.warmup_steps", "0",
                 "--device.0.path", str(self.folder / "device"), "--device.0.bandwidth", "1"]
        told = subprocess.run(self.command(recipe, "run", flags), capture_output=True, text=True, check=True).stdout
        planned = re.search(r"memory: (\d+) MiB of the host's memory are planned", told)
        used = re.search(r"memory: at most (\d+) MiB of this process", told)
        self.assertLess(int(used.group(1)), int(planned.group(1)))

    def test_a_run_says_what_it_trains_and_on_what(self):
        config = CONFIGS["llama"].__class__(**dict(COMMON, vocab_size=256))
        whole = sum(p.numel() for p in make(config, self.folder / "model").parameters())
        recipe = pathlib.Path(self.recipe(steps=1))
        text = recipe.read_text()
        recipe.write_text(f'[model]\nfrom = "{self.folder / "model"}"\n\n' + text[text.index("[data]"):])
        flags = ["--lora.rank", "4", "--lora.targets", "q_proj", "--train.warmup_steps", "10", "--train.validate_at_start"]
        told = subprocess.run(self.command(str(recipe), "run", flags), capture_output=True, text=True, check=True).stdout
        trained = config.num_hidden_layers * 4 * 2 * config.hidden_size
        self.assertIn(f"{trained * 1e-6:.2f} of {whole * 1e-6:.2f} million parameters", told)
        self.assertIn("lr: the warm-up has 10 steps and the run 1, so lr comes to", told)
        self.assertRegex(told, r"data: \d+ bytes for training, \d+ for validation")
        self.assertIn("step 0: validation loss", told)
        kept = (self.folder / "run/recipe.toml").read_text()
        self.assertIn(f'from = "{self.folder / "model"}"', kept)
        self.assertNotRegex(kept, r"(?m)^(layers|width|heads) =")

    def test_resumed_in_the_middle_of_an_epoch_on_other_devices(self):
        make(CONFIGS["qwen3"].__class__(**dict(WIDE_HEADS, vocab_size=256, hidden_size=128)), self.folder / "model",
             torch.bfloat16)
        self.corpus.write_bytes(self.corpus.read_bytes()[:32 * 64 + 1])  # 57 sequences without those held out
        flags = ("--train.schedule", "constant", "--train.lr", "1e-3", "--train.validate_every", "6",
                 "--engine.subgroup_elements", "65536")
        self.fine_tune(self.folder / "model", "whole", *flags, steps=12)
        two = self.devices("parts", 2)
        self.fine_tune(self.folder / "model", "parts", *flags, *two, steps=5)
        moved = [str(self.folder / f"moved{i}") for i in range(3)]
        done = subprocess.run([SMARTINF, "reshard", "--from", *two[1::2], "--to", *moved], capture_output=True,
                              text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        (self.folder / "model").rename(self.folder / "away")
        three = [word for i, path in enumerate(moved) for word in (f"--device.{i}.path", path)]
        told = self.fine_tune(self.folder / "model", "parts", *flags, *three, steps=12, code=1)
        run = re.search(r"--take-over (\w{8})", told).group(1)
        self.fine_tune(self.folder / "model", "parts", *flags, *three, "--take-over", run, steps=12)
        self.assertEqual(self.losses("parts"), self.losses("whole"))
        self.same_export("parts", "whole")

    def write_documents(self):
        """Documents with a mask; and the same packed, as transformers take them."""
        draw = torch.Generator().manual_seed(4)
        text = torch.frombuffer(bytearray(self.corpus.read_bytes()), dtype=torch.uint8)
        lengths = torch.randint(4, 20, (18,), generator=draw).tolist()
        mask = (torch.rand(sum(lengths), generator=draw) < 0.6).to(torch.uint8)
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        safetensors.torch.save_file(
            {"tokens": text[:sum(lengths)], "document_starts": torch.tensor(starts), "loss_mask": mask},
            self.folder / "documents.safetensors", {"token_file": "1", "vocabulary": "256"})
        rows, used = [], 32
        for start, length in zip(starts, lengths, strict=True):
            if used + length - 1 > 32:
                rows.append({"tokens": torch.zeros(32, dtype=torch.long), "targets": torch.full((32,), -100),
                             "positions": torch.zeros(32, dtype=torch.long), "document": -1 - torch.arange(32)})
                used = 0
            places, row = slice(used, used + length - 1), rows[-1]
            row["tokens"][places] = text[start:start + length - 1].long()
            targets = text[start + 1:start + length].long()
            row["targets"][places] = torch.where(mask[start + 1:start + length] == 1, targets, -100)
            row["positions"][places] = torch.arange(length - 1)
            row["document"][places] = len(rows) * 100 + start
            used += length - 1
        packed = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        same = packed["document"][:, :, None] == packed["document"][:, None, :]
        seen = (same & torch.ones(32, 32, dtype=torch.bool).tril())[:, None]
        return packed["tokens"], packed["targets"], {
            "position_ids": packed["positions"],
            "attention_mask": torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)}

    def on_documents(self, folder, run, *flags, steps):
        """Every step over all windows, whose number the first start says."""
        flags = (*self.SAME_BATCH, "--data.paths", str(self.folder / "documents.safetensors"),
                 "--train.micro_batch", "1", *flags)
        recipe = pathlib.Path(self.recipe(steps=1))
        self.fine_tune(folder, "count_" + run, *flags, "--train.lr", "1e-30")
        told = subprocess.run(self.command(str(recipe), "count_" + run, flags), capture_output=True, text=True,
                              check=True).stdout
        windows = re.search(r"18 documents or pieces of them in (\d+) windows", told)[1]
        self.assertLess(int(windows), 12)
        self.fine_tune(folder, run, *flags, "--train.accumulation", windows, steps=steps)

    def test_documents_with_masks_go_as_with_transformers(self):
        inputs, targets, options = self.write_documents()
        for name in ("qwen3", "mixtral"):
            with self.subTest(model=name):
                config = CONFIGS[name].__class__.from_dict(dict(CONFIGS[name].to_dict(), vocab_size=256))
                model = make(config, self.folder / name)
                self.on_documents(self.folder / name, "run_" + name, "--train.lr", "1e-3", steps=20)
                self.same_curves("run_" + name, self.curve(model, 20, 1e-3, inputs, targets, **options))

    def test_stages_train_adapters_on_documents_as_one_process_does(self):
        self.write_documents()
        make(CONFIGS["llama"].__class__(**dict(COMMON, vocab_size=256, tie_word_embeddings=True)), self.folder / "model",
             torch.bfloat16)
        flags = ["--lora.rank", "4", "--data.paths", str(self.folder / "documents.safetensors"), "--train.micro_batch",
                 "1", "--train.accumulation", "4", "--data.validation_share", "0", "--train.lr", "1e-2"]
        self.fine_tune(self.folder / "model", "one", *flags, steps=4)
        recipe = next(self.folder.glob("*_4.toml"))
        for tied in ("fold", "sync") if ALL else ("fold",):
            stages = [*flags, "--train.warmup_steps", "1", "--train.lr_floor", "1", "--ranks.pipeline", "2", "--ranks.tied",
                      tied, *self.even_devices(tied, 2)]
            with Ranks(self.command(str(recipe), tied, stages), 2) as ranks:
                self.assertEqual(ranks.wait(100), [0, 0], ranks.err(0) + ranks.err(1))
            self.assertEqual(self.losses(tied), self.losses("one"))
            self.same_export(tied, "one")

    def test_a_start_with_other_data_has_other_tokens_or_is_refused(self):
        folder = self.folder / "model"
        make(CONFIGS["llama"].__class__(**dict(COMMON, vocab_size=300)), folder)
        tokenizer = make_tokenizer(folder, self.corpus)

        def write(name, *words):
            lines = [json.dumps({"messages": [{"role": "user", "content": "if"},
                                              {"role": "assistant", "content": f"{word} " * 9}]}) for word in words]
            (self.folder / name).write_text("\n".join(lines * 12))
            return ("--data.paths", str(self.folder / name))

        def text(name="training"):
            held = safetensors.torch.load_file(self.folder / "run/data" / f"{name}.safetensors")
            return tokenizer.decode(held["tokens"].tolist())
        python = {"SMARTINF_PYTHON": sys.executable}
        # What refuses the start is said before tokens are made for it.
        weights = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(weights[:-1])
        self.assertIn("model.safetensors", self.fine_tune(folder, "run", *write("a", "else"), env=python, code=1))
        self.assertFalse((self.folder / "run/data").exists())
        (folder / "model.safetensors").write_bytes(weights)
        # In /proc/sys nobody makes a folder, root included.
        for run, why in (("/proc/sys/run", ""), (self.folder / "a/run", "Not a directory")):
            told = self.fine_tune(folder, run, *write("a", "else"), env=python, code=1)
            self.assertRegex(told.splitlines()[-1], f"train.run: cannot write in the folder: .*{why}")
            self.assertNotIn("making tokens", told)
        # Starts that are refused, and plans, leave tokens that the next one looks at.
        self.fine_tune(folder, "run", *write("a", "else"), "--memory.host", "1MiB", env=python, code=1)
        self.assertIn("else", text())
        other = write("b", "value")
        os.utime(self.folder / "b", (1e9, 1e9))
        self.fine_tune(folder, "run", *other, "--print-plan", env=python)
        self.assertNotIn("else", text())
        self.fine_tune(folder, "run", *other, env=python)
        kept = (self.folder / "run/data/training.safetensors").read_bytes()
        told = self.fine_tune(folder, "run", *write("a", "else"), env=python, steps=2, code=1)
        self.assertRegex(told.splitlines()[-1], "data.paths: what is named, .* makes other tokens than .*training.safetensors")
        self.assertEqual((self.folder / "run/data/training.safetensors").read_bytes(), kept)
        # What is only evaluated may change.
        sets = [f"b = {self.folder / 'b'}", f"a = {self.folder / 'a'}"]
        self.fine_tune(folder, "run", *other, "--data.evaluation", sets[1], env=python, steps=2)
        self.assertIn("else", text("evaluation-1"))
        self.fine_tune(folder, "run", *other, "--data.evaluation", ",".join(sets), env=python, steps=3)
        self.assertNotIn("else", text("evaluation-1"))
        self.assertEqual([step for step, _ in self.losses("run")], [1, 2, 3])
        (self.folder / "bad").write_text('{"messages": []}')
        told = self.fine_tune(folder, "new", "--data.paths", str(self.folder / "bad"), env=python, code=1)
        self.assertRegex(told.splitlines()[-1], "bad:1: messages is not a list of messages")

    def test_adapters_on_documents_with_masks_go_as_with_peft(self):
        try:
            import peft
        except ImportError:
            self.skipTest("peft is not installed")
        inputs, targets, options = self.write_documents()
        make(CONFIGS["qwen3"].__class__(**dict(WIDE_HEADS, vocab_size=256)), self.folder / "model")
        lora = ("--lora.rank", "4", "--lora.alpha", "12")
        self.on_documents(self.folder / "model", "first", *lora, "--train.lr", "1e-30", steps=1)
        base = transformers.AutoModelForCausalLM.from_pretrained(self.folder / "model", attn_implementation="eager")
        model = peft.PeftModel.from_pretrained(base, self.export("first", "adapters"), is_trainable=True)
        self.on_documents(self.folder / "model", "run", *lora, "--train.lr", "1e-2", steps=20)
        self.same_curves("run", self.curve(model, 20, 1e-2, inputs, targets, **options))


if __name__ == "__main__":
    unittest.main()
