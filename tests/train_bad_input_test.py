"""What is wrong is named, says what to do, and costs nothing."""
import fcntl
import unittest

from train_runs import TrainCase


class BadInput(TrainCase):
    def refused(self, words, flags, run="a", code=(1, 2), steps=2):
        """The run must fail with one of `code`, and say all of `words`."""
        import subprocess
        result = subprocess.run(self.command(self.recipe(steps=steps), run, flags),
                                capture_output=True, text=True, timeout=300)
        self.assertIn(result.returncode, code, result.stdout + result.stderr)
        for word in words:
            self.assertIn(word, result.stderr)
        self.assertNotRegex(result.stderr, r"(?<!e\.g)\. [a-z]", "a sentence begins in lower case")
        return result.stderr

    def test_values_that_cannot_work(self):
        for key, value in (("model.heads", "5"), ("model.heads", "96"), ("model.kv_heads", "3"),
                           ("model.layers", "0"), ("model.width", "4294967295"),
                           ("model.vocabulary", "100"),
                           ("data.sequence", "0"), ("train.steps", "0"), ("train.lr", "-1"),
                           ("train.accelerator", "gpu"), ("optimizer.where", "gpu"),
                           ("optimizer.eps", "0"), ("optimizer.eps", "1e-40")):
            with self.subTest(key=key, value=value):
                self.refused([key], ["--" + key, value], code=(2,))
        self.assertFalse((self.folder / "a").exists(), "nothing was made")

    def test_keys_that_do_not_exist(self):
        self.refused(["train.step", "train.steps"], ["--train.step", "5"], code=(2,))

    def test_data_that_cannot_be_learnt_from(self):
        self.refused(["data.paths", "no_such_text"],
                     ["--data.paths", str(self.folder / "no_such_text")])
        empty = self.folder / "empty"
        empty.mkdir()
        self.refused(["there is no text"], ["--data.paths", str(empty)])
        short = self.folder / "short.txt"
        short.write_text("def f")
        self.refused(["data.sequence"], ["--data.paths", str(short)])
        spoilt = self.folder / "spoilt.bin"
        spoilt.write_bytes(b"\0" * 4096)
        self.refused(["spoilt.bin", "not a token file"], ["--data.paths", str(spoilt)])
        self.refused(["data.tokenizer", "no_such.json"],
                     ["--data.tokenizer", str(self.folder / "no_such.json")])

    def test_a_trace_that_cannot_be_written(self):
        self.refused(["train.trace", "no_such_folder"],
                     ["--trace", str(self.folder / "no_such_folder" / "trace.json")])
        self.assertFalse((self.folder / "a" / "log.jsonl").exists(), "found before the first step")

    def test_devices_that_cannot_hold_the_state(self):
        plain = self.folder / "plain"
        plain.write_text("mine")
        self.refused([str(plain)], ["--device.0.path", str(plain)])
        self.assertEqual(plain.read_text(), "mine")
        self.refused(["/proc/1"], ["--device.0.path", "/proc/1/smartinf"])

    def test_a_run_of_another_model_or_other_data(self):
        recipe = self.recipe(steps=2)
        self.train(recipe, "a", *self.devices("a", 2))
        before = self.master_weights("a", "before")
        devices = self.devices("a", 2)
        self.refused(["model.layers.1"], devices + ["--model.layers", "1"])
        self.refused(["data.sequence", "16", "32"], devices + ["--data.sequence", "16"])
        self.refused(["data.seed"], devices + ["--data.seed", "2"])
        self.refused(["data.validation_share"], devices + ["--data.validation_share", "0.2"])
        self.refused(["device0"], devices[:2] + self.devices("none", 2)[2:])
        self.corpus.write_text(self.corpus.read_text() + "more")
        self.refused(["data.paths"], devices)
        self.assertEqual(self.master_weights("a", "after"), before)

    def test_a_run_that_is_pointed_at_empty_devices(self):
        self.train(self.recipe(steps=2), "a")
        before = (self.folder / "a" / "log.jsonl").read_text()
        elsewhere = self.folder / "elsewhere"
        self.refused(["a has trained 2 steps", "elsewhere", "recipe.toml"],
                     ["--device.0.path", str(elsewhere)], steps=4)
        self.refused(["a has trained 2 steps"], ["--optimizer.where", "memory"], steps=4)
        self.assertEqual((self.folder / "a" / "log.jsonl").read_text(), before)
        self.assertFalse(elsewhere.exists(), "nothing was made")

    def test_a_tokenizer_beside_text(self):
        (self.folder / "tokenizer.json").write_text("{}")
        self.refused(["data.tokenizer", "make_token_files.py"],
                     ["--data.tokenizer", str(self.folder / "tokenizer.json")])

    def test_a_device_missing_and_a_device_of_another_run(self):
        recipe = self.recipe(steps=2)
        self.train(recipe, "a", *self.devices("a", 2))
        self.train(recipe, "b", *self.devices("b", 2))
        self.refused(["device"], self.devices("a", 1), run="a")
        mixed = self.devices("a", 2)[:2] + self.devices("b", 2)[2:]
        self.refused(["device"], mixed, run="a")

    def test_a_run_that_is_going_on(self):
        run = self.folder / "a"
        run.mkdir()
        with open(run / "lock", "w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.refused(["train.run", "another process"], [])

    def test_an_export_over_something_else(self):
        import subprocess
        recipe = self.recipe(steps=2)
        self.train(recipe, "a")
        out = self.folder / "out"
        out.mkdir()
        (out / "mine.txt").write_text("mine")
        from train_runs import SMARTINF
        for arguments, word in (([str(self.folder / "a"), "--out", str(out)], "something already"),
                                ([str(self.folder), "--out", str(out / "x")], "is not a run's folder")):
            result = subprocess.run([SMARTINF, "export", *arguments], capture_output=True, text=True,
                                    timeout=60)
            self.assertNotEqual(result.returncode, 0)
            self.assertIn(word, result.stderr)
        self.assertEqual((out / "mine.txt").read_text(), "mine")


if __name__ == "__main__":
    unittest.main()
