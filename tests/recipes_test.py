"""Every recipe that comes with the project runs, and those that differ only in where the update runs
give the same losses, bit for bit.

Usage: recipes_test.py PATH_OF_SMARTINF PROJECT_ROOT
"""
import json
import os
import pathlib
import subprocess
import sys
import unittest

ROOT = pathlib.Path(sys.argv.pop())

from train_runs import SMARTINF, TrainCase  # noqa: E402  (takes the other argument)

SHORT = ["--train.steps", "2", "--train.epochs", "0", "--train.warmup_steps", "1", "--train.micro_batch", "1",
         "--train.threads", "1", "--data.sequence", "32", "--train.validate_every", "0",
         "--train.validation_batches", "1", "--train.sample_tokens", "0"]


class Recipes(TrainCase):
    def run_recipe(self, path):
        flags = [*SHORT, "--data.paths", str(self.corpus)]
        for i in range(path.read_text(encoding="utf-8").count("\n[[device]]")):
            flags += [f"--device.{i}.path", str(self.folder / f"{path.stem}_{i}")]
        self.train(str(path), path.stem, *flags)
        return self.losses(path.stem)

    def test_all_run(self):
        losses = {path.stem: self.run_recipe(path) for path in sorted((ROOT / "recipes").glob("*.toml"))
                  if path.stem not in ("finetune", "distill")}
        self.assertIn("quickstart", losses)
        for name, steps in losses.items():
            self.assertEqual(len(steps), 2, name)
        self.assertEqual(losses["ten-smartssds"], losses["ten-ssds-host-update"])

    def test_a_model_is_fine_tuned_on_conversations(self):
        try:
            import safetensors.torch  # noqa: F401
            import tokenizers  # noqa: F401
            import transformers  # noqa: F401
        except ImportError as missing:
            self.skipTest(str(missing))
        from small_models import COMMON, CONFIGS, make, make_tokenizer
        recipe = ROOT / "recipes/finetune.toml"
        self.assertLessEqual(len(recipe.read_text(encoding="utf-8").splitlines()), 17)
        make(CONFIGS["llama"].__class__(**dict(COMMON, vocab_size=300)), self.folder / "model")
        make_tokenizer(self.folder / "model", self.corpus)
        words = self.corpus.read_text().split(" ")
        (self.folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": [
            {"role": "user", "content": " ".join(words[i:i + 3])},
            {"role": "assistant", "content": " ".join(words[i + 3:i + 9])}]}) for i in range(0, 1000, 10)))
        # As the page says: a folder with a model, a file of conversations, one command.
        environment = {**os.environ, "SMARTINF_PYTHON": sys.executable}

        def run(*words, code=0):
            done = subprocess.run([SMARTINF, *words], capture_output=True, text=True, timeout=300, check=False,
                                  cwd=self.folder, env=environment)
            self.assertEqual(done.returncode, code, done.stdout + done.stderr)
            return done.stdout + done.stderr

        short = ["--train.sample_prompts", "value", "--train.sample_tokens", "5"]
        told = run("train", str(recipe), *short)
        self.assertIn("data: making tokens of 1 file: chats.jsonl", told)
        self.assertIn("100 documents", told)
        self.assertRegex(told, r"data: \d{4,5} tokens for training, \d{2,4} for validation, of 1 file")
        self.assertIn("sample:\nvalue", told)
        made = self.folder / "runs/finetune/data/training.safetensors"
        time = made.stat().st_mtime_ns
        self.assertIn("nothing to train", run("train", str(recipe), *short))
        self.assertEqual(made.stat().st_mtime_ns, time)
        self.assertIn("prompt 2:", run("generate", "runs/finetune", "--chat", "--prompt", "if", "--prompt", "else"))
        run("export", "runs/finetune", "--out", "out")
        transformers.AutoModelForCausalLM.from_pretrained(self.folder / "out")
        self.assertIsNotNone(transformers.AutoTokenizer.from_pretrained(self.folder / "out").chat_template)
        # What a new user gets wrong.
        (self.folder / "bad.jsonl").write_text('{"messages": []}')
        for words, says in ((["--data.paths", "none.jsonl"], "data.paths: no such file or folder: none.jsonl"),
                            (["--data.paths", "bad.jsonl"], "bad.jsonl:1: messages is not a list"),
                            (["--data.paths", "python-stdlib"], "the model has a tokenizer"),
                            (["--model.from", "elsewhere"], "elsewhere/config.json")):
            told = run("train", str(recipe), "--train.run", "wrong", *words, code=2 if "python-stdlib" in words else 1)
            self.assertIn(says, told)
            self.assertFalse((self.folder / "wrong/run.json").exists())


if __name__ == "__main__":
    unittest.main()
