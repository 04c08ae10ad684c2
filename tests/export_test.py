"""An exported folder in the hands of transformers: the same logits, the same bytes from text.

Usage: export_test.py SMARTINF LOGITS_OF_EXPORT
"""
import json
import pathlib
import subprocess
import sys
import unittest

LOGITS = str(pathlib.Path(sys.argv.pop(2)).resolve())

from train_runs import SMARTINF, TrainCase

try:
    import numpy
    import torch
    import transformers
except ImportError as missing:
    print(f"skipped: {missing}; scripts/setup.sh installs what is missing")
    sys.exit(77)

TEXT = "def value(index):\n    return 'täst ☃ 𝄞' # \t\x00\x7f\n"


class Export(TrainCase):
    def logits(self, folder, kind):
        tokens = numpy.frombuffer(self.corpus.read_bytes()[:32], numpy.uint8).astype(numpy.int64)
        tokens.tofile(self.folder / "tokens")
        subprocess.run([LOGITS, str(folder), kind, str(self.folder / "tokens"),
                        str(self.folder / "logits")], check=True)
        here = numpy.fromfile(self.folder / "logits", numpy.float32).reshape(32, -1)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32 if kind == "f32" else torch.bfloat16)
        self.assertIsInstance(model, transformers.LlamaForCausalLM)
        with torch.no_grad():
            there = model(torch.from_numpy(tokens)[None]).logits[0].float().numpy()
        return here, there

    def test_the_same_logits(self):
        for tied in ("true", "false"):
            run = "tied_" + tied
            self.train(self.recipe(steps=30), run, "--model.tied_head", tied)
            with self.subTest(tied=tied, type="f32"):
                here, there = self.logits(self.export(run, run + "_f32", "--type", "f32"), "f32")
                self.assertGreater(numpy.abs(there).max(), 0.5, "the model has learnt something")
                self.assertLess(numpy.abs(here - there).max(), 1e-5 * numpy.abs(there).max())
            with self.subTest(tied=tied, type="bf16"):
                # Both round to bf16 after every operation, in other places: some eight roundings of
                # 2^-9 each on the way through two layers.
                here, there = self.logits(self.export(run, run + "_bf16"), "bf16")
                self.assertLess(numpy.abs(here - there).max(), 0.03 * numpy.abs(there).max())

    def test_a_run_that_was_moved(self):
        self.train(self.recipe(steps=2), "a")
        before = (self.export("a", "before") / "model.safetensors").read_bytes()
        (self.folder / "a").rename(self.folder / "moved")
        after = (self.export("moved", "after") / "model.safetensors").read_bytes()
        self.assertEqual(after, before)

    def test_a_failed_export_leaves_nothing(self):
        self.train(self.recipe(steps=2), "a")
        out = self.folder / "out"
        damaged = max((self.folder / "a" / "state").rglob("*"), key=lambda f: f.stat().st_size)
        bytes_before = damaged.read_bytes()
        damaged.write_bytes(bytes(len(bytes_before)))
        failed = subprocess.run([SMARTINF, "export", str(self.folder / "a"), "--out", str(out)],
                                capture_output=True, text=True)
        self.assertEqual(failed.returncode, 1, failed.stdout + failed.stderr)
        self.assertEqual([p.name for p in self.folder.glob("out*")], [])
        damaged.write_bytes(bytes_before)
        # One that was killed left its folder: the next starts over.
        (self.folder / "out.partial").mkdir()
        (self.folder / "out.partial" / ".smartinf-export").touch()
        out.mkdir()
        self.assertTrue((self.export("a", "out") / "model.safetensors").exists())
        self.assertFalse((self.folder / "out.partial").exists())

    def test_shards_are_the_same_weights(self):
        self.train(self.recipe(steps=3), "a")
        whole = self.export("a", "whole")
        parts = self.export("a", "parts", "--shard-size", "100KB")
        index = json.loads((parts / "model.safetensors.index.json").read_text())
        self.assertGreater(len(set(index["weight_map"].values())), 2)
        from_whole = transformers.AutoModelForCausalLM.from_pretrained(whole).state_dict()
        from_parts = transformers.AutoModelForCausalLM.from_pretrained(parts).state_dict()
        self.assertEqual(from_whole.keys(), from_parts.keys())
        for name, weight in from_whole.items():
            self.assertTrue(torch.equal(weight, from_parts[name]), name)

    def test_tokens_are_the_bytes_of_the_text(self):
        self.train(self.recipe(steps=1), "a")
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.export("a", "out"))
        self.assertEqual(tokenizer(TEXT)["input_ids"], list(TEXT.encode()))
        self.assertEqual(tokenizer.decode(list(TEXT.encode())), TEXT)
        self.assertEqual(tokenizer("a<|endoftext|>b")["input_ids"], [97, 255, 98])
        self.assertEqual(tokenizer.eos_token_id, 255)


if __name__ == "__main__":
    unittest.main()
