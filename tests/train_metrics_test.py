"""What a run's log becomes: the view on a terminal, CSV, TensorBoard's events, a picture."""
import csv
import importlib.util
import json
import os
import pty
import signal
import subprocess
import sys
import time
import unittest

from train_runs import SMARTINF, TrainCase

WITH_PYTHON = {"SMARTINF_PYTHON": sys.executable}


def has(module):
    return importlib.util.find_spec(module) is not None


class Metrics(TrainCase):
    def smartinf(self, *words, code=0, env=None):
        done = subprocess.run([SMARTINF, *map(str, words)], capture_output=True, text=True, timeout=300,
                              check=False, env={**os.environ, **WITH_PYTHON, **(env or {})})
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def write_log(self, steps, run="made"):
        """A log of a run that was never trained."""
        (self.folder / run).mkdir(parents=True, exist_ok=True)
        lines = [{"step": step, "loss": 4 / step, "gradient_norm": 1 / step, "lr": 1e-3, "tokens_per_s": 9.5,
                  "seconds": 1, "exposed_s": 0.25, "began_s": 1.7e9 + step} for step in range(1, steps + 1)]
        lines.append({"step": steps, "validation_loss": 2.5, "evaluation_loss": {"code": 1.5}})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (self.folder / run / "log.jsonl").write_text(text)
        return self.folder / run

    def on_a_terminal(self, words, **environment):
        ours, theirs = pty.openpty()
        process = subprocess.Popen(words, stdout=theirs, stderr=subprocess.DEVNULL,
                                   env={**os.environ, "TERM": "xterm", "LANG": "C.UTF-8", "LC_ALL": "", "LC_CTYPE": "",
                                        **environment})
        os.close(theirs)
        text = b""
        try:
            while part := os.read(ours, 4096):
                text += part
        except OSError:
            pass  # all who wrote to it are gone
        os.close(ours)
        self.assertEqual(process.wait(timeout=60), 0, text)
        return text.decode()

    def test_a_terminal_shows_how_the_run_is_doing(self):
        flags = ["--train.validate_every", "2"]
        text = self.on_a_terminal(self.command(self.recipe(steps=6), "a", flags))
        first = text.split("step 1/6, 16%")[1].split("step 2: validation")[0]
        for word in (" left", "loss ", "▁", "gradient norm ", "lr ", "tokens/s", "B memory", "% waiting\x1b[0m",
                     "\x1b[2m", "\x1b[3A"):
            self.assertIn(word, first)
        self.assertIn("validation ", text.split("step 2: validation")[1].split("step 4: validation")[0])
        self.assertEqual(text.count("backward"), 1)  # the last step's line
        # Nothing of the view stays.
        self.assertNotIn("tokens/s  ", text.rpartition("\x1b[J")[2])
        plain = self.on_a_terminal(self.command(self.recipe(steps=2), "b"), NO_COLOR="1", LANG="C")
        self.assertIn("gradient norm", plain)
        for word in ("▁", "[2m"):
            self.assertNotIn(word, plain)
        for environment, more in (({"TERM": "dumb"}, []), ({}, ["--json"])):
            lines = self.on_a_terminal(self.command(self.recipe(steps=2), "c" + str(len(more)), more), **environment)
            self.assertNotIn("\x1b", lines)

    def test_csv_has_a_row_for_each_step(self):
        self.train(self.recipe(steps=4), "a", "--train.validate_every", "2", "--train.layer_stats_every", "4")
        self.smartinf("metrics", self.folder / "a", "--csv", self.folder / "a.csv")
        with open(self.folder / "a.csv", encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual([int(row["step"]) for row in rows], [1, 2, 3, 4])
        self.assertEqual([(int(row["step"]), float(row["loss"])) for row in rows], self.losses("a"))
        self.assertEqual([row["validation_loss"] != "" for row in rows], [False, True, False, True])
        self.assertEqual(rows[0]["layers/model.layers.1/update_ratio"], "")
        self.assertGreater(float(rows[3]["layers/model.layers.1/update_ratio"]), 0)
        self.assertEqual(self.smartinf("metrics", self.folder / "a"), (self.folder / "a.csv").read_text())

    def test_what_cannot_be_made_says_what_to_do(self):
        run = self.write_log(steps=3)
        before = sorted(path.name for path in self.folder.rglob("*"))
        none = {"SMARTINF_PYTHON": str(self.folder / "none")}
        # A Python without packages, and no Python.
        bare = self.folder / "bare"
        bare.write_text(f"#!/bin/sh\nexec {sys.executable} -I -S \"$@\"\n")
        bare.chmod(0o755)
        for words, package in ((("metrics", run, "--tensorboard", self.folder / "events"), "tensorboard"),
                               (("plot", run), "matplotlib")):
            told = self.smartinf(*words, code=1, env={"SMARTINF_PYTHON": str(bare)})
            self.assertIn(f"-m pip install {package}", told)
            self.assertIn("SMARTINF_PYTHON", told)
            self.assertIn("Install Python 3", self.smartinf(*words, code=1, env=none))
        bare.unlink()
        self.assertEqual(sorted(path.name for path in self.folder.rglob("*")), before)
        self.assertIn("has no log.jsonl", self.smartinf("metrics", self.folder, code=1))
        self.assertIn("has no log.jsonl", self.smartinf("plot", run, self.folder, "--out", "p.png", code=1))
        self.assertIn("--out", self.smartinf("plot", run, run, code=2))
        self.assertIn("--csv", self.smartinf("metrics", run, "--follow", code=2))
        self.assertIn("cannot write", self.smartinf("metrics", run, "--csv", self.folder / "no/a.csv", code=1))

    def follow(self, run, *flags):
        process = subprocess.Popen([SMARTINF, "metrics", str(run), "--follow", *map(str, flags)],
                                   env={**os.environ, **WITH_PYTHON}, stdout=subprocess.DEVNULL)
        self.addCleanup(process.kill)
        return process

    def wait_for(self, what):
        limit = time.monotonic() + 60
        while not what():
            self.assertLess(time.monotonic(), limit)
            time.sleep(0.05)

    def test_a_followed_run_adds_rows_and_drops_those_that_were_cut(self):
        run, out = self.write_log(steps=3), self.folder / "a.csv"
        process = self.follow(run, "--csv", out)
        for steps in (3, 5, 2):
            self.write_log(steps)
            self.wait_for(lambda: out.exists() and len(out.read_text().splitlines()) == steps + 1)
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(timeout=60), 130)

    @unittest.skipUnless(has("tensorboard"), "tensorboard is not installed")
    def test_tensorboard_reads_its_events(self):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        events = self.folder / "events"

        def read(tag):
            found = EventAccumulator(str(events)).Reload()
            return [(e.step, round(e.value, 6)) for e in found.Scalars(tag)] if tag in found.Tags()["scalars"] else []

        run = self.write_log(steps=3)
        for _ in range(2):  # the second time replaces the first
            self.smartinf("metrics", run, "--tensorboard", events)
            self.assertEqual(read("train/loss"), [(1, 4), (2, 2), (3, 1.333333)])
            self.assertEqual(read("validation/loss") + read("validation/code"), [(3, 2.5), (3, 1.5)])
        process = self.follow(run, "--tensorboard", events)
        for steps in (5, 2):
            self.write_log(steps)
            self.wait_for(lambda: [step for step, _ in read("train/loss")] == list(range(1, steps + 1)))
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(timeout=60), 130)
        self.assertEqual(len(list(events.iterdir())), 1)

    @unittest.skipUnless(has("matplotlib"), "matplotlib is not installed")
    def test_pictures(self):
        runs = [self.write_log(steps, f"runs/{steps}") for steps in (1, 3, 40)]
        self.smartinf("plot", runs[1])
        self.assertTrue((runs[1] / "plot.png").read_bytes().startswith(b"\x89PNG"))
        self.smartinf("plot", *runs, "--out", self.folder / "all.svg")
        text = (self.folder / "all.svg").read_text()
        self.assertTrue(text.startswith("<?xml"))
        told = self.smartinf("plot", runs[0], "--out", self.folder / "p.xyz", code=1)
        self.assertIn(".png, .svg or .pdf", told)
        (runs[0] / "log.jsonl").write_text("")
        self.assertIn("has no step yet", self.smartinf("plot", runs[0], code=1))


if __name__ == "__main__":
    unittest.main()
