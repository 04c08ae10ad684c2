"""An exported folder in the hands of transformers: the same logits, the same bytes from text.

Usage: export_test.py SMARTINF OUTPUTS_OF_FOLDER
"""
import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import unittest

OUTPUTS = str(pathlib.Path(sys.argv.pop(2)).resolve())

from train_runs import SMARTINF, TrainCase

try:
    import numpy
    import safetensors.numpy
    import torch
    import transformers
except ImportError as missing:
    print(f"skipped: {missing}; scripts/setup.sh installs what is missing")
    sys.exit(77)

TEXT = "def value(index):\n    return 'täst ☃ 𝄞' # \t\x00\x7f\n"


class Export(TrainCase):
    def logits(self, folder, kind):
        tokens = numpy.frombuffer(self.corpus.read_bytes()[:32], numpy.uint8).astype(numpy.int64)
        safetensors.numpy.save_file({"tokens": numpy.append(tokens, 0)[None]}, self.folder / "in")
        subprocess.run([OUTPUTS, str(folder), kind, str(self.folder / "in"), str(self.folder / "out")],
                       check=True)
        here = safetensors.numpy.load_file(self.folder / "out")["logits"]
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

    def refused(self, *words, code=1, says):
        done = subprocess.run([SMARTINF, "export", *map(str, words)], capture_output=True, text=True,
                              timeout=120, check=False)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        self.assertIn(says, done.stderr)

    def test_exports_to_one_place_do_not_mix(self):
        self.train(self.recipe(steps=2), "a")
        alive = self.folder / "out.00000001.partial"
        alive.mkdir()
        (alive / "model.safetensors.partial").write_bytes(b"half")
        with open(alive / ".smartinf-export", "w", encoding="ascii") as mark:
            fcntl.flock(mark, fcntl.LOCK_EX)
            weights = (self.export("a", "out") / "model.safetensors").read_bytes()
            self.assertEqual((alive / "model.safetensors.partial").read_bytes(), b"half")
        shutil.rmtree(self.folder / "out")
        words = [SMARTINF, "export", str(self.folder / "a"), "--out", str(self.folder / "out")]
        both = [subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) for _ in range(2)]
        for each in both:
            each.communicate(timeout=120)
        self.assertEqual(sorted(each.returncode for each in both), [0, 1])
        self.assertEqual((self.folder / "out/model.safetensors").read_bytes(), weights)
        self.assertEqual([p.name for p in self.folder.glob("out*")], ["out"])

    def test_an_interrupt_ends_it_and_leaves_nothing(self):
        self.train(self.recipe(steps=1), "a", "--model.width", "384", "--model.layers", "6",
                   "--model.mlp_width", "1024", "--train.micro_batch", "1", "--train.accumulation", "1")

        def interrupted_from_the_start():
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            os.kill(os.getpid(), signal.SIGINT)

        done = subprocess.run([SMARTINF, "export", str(self.folder / "a"), "--out", str(self.folder / "out")],
                              capture_output=True, text=True, timeout=120, check=False,
                              preexec_fn=interrupted_from_the_start)
        self.assertEqual(done.returncode, 130, done.stdout + done.stderr)
        self.assertEqual([p.name for p in self.folder.glob("out*")], [])

    def test_only_a_tokenizer_is_copied(self):
        self.train(self.recipe(steps=1), "a")
        recipe = self.folder / "a/recipe.toml"
        text = recipe.read_text()
        secret, fifo = self.folder / "secret", self.folder / "fifo"
        secret.write_text("root:*:1:0\n")
        os.mkfifo(fifo)
        wrong = self.folder / "wrong.json"
        wrong.write_text('{"model": "bpe", "version": "1.0"}')
        for path, says in ((secret, "not a tokenizer.json"), (wrong, "not a tokenizer.json"),
                           (fifo, "the path is a FIFO"), (self.folder / "none", "data.tokenizer")):
            with self.subTest(path=path.name):
                recipe.write_text(text.replace('tokenizer = ""', f'tokenizer = "{path}"'))
                self.refused(self.folder / "a", "--out", self.folder / "out", says=says)
                self.assertEqual([p.name for p in self.folder.glob("out*")], [])
        good = self.folder / "good.json"
        good.write_text('{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}}}')
        recipe.write_text(text.replace('tokenizer = ""', f'tokenizer = "{good}"'))
        self.assertEqual((self.export("a", "out") / "tokenizer.json").read_bytes(), good.read_bytes())
        self.refused(self.folder / "a", "--out", self.folder / "b", "--shard-size", "0", code=2,
                     says="--shard-size")

    @unittest.skipIf(os.geteuid() != 0, "only root can mount a file system")
    def test_from_a_file_system_that_cannot_be_written_to(self):
        place = self.folder / "place"
        place.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", place], check=False).returncode:
            self.skipTest("no tmpfs can be mounted here")
        self.addCleanup(subprocess.run, ["umount", place], check=False)
        self.train(self.recipe(steps=2), "place/a")
        before = (self.export("place/a", "before") / "model.safetensors").read_bytes()
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        self.assertEqual((self.export("place/a", "after") / "model.safetensors").read_bytes(), before)

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
