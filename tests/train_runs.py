"""Runs of the smartinf command on a small model, for the tests of training.

Usage of every test that uses it: TEST.py PATH_OF_SMARTINF [unittest's own arguments]
"""
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import unittest

from rank_processes import start_held

# Before torch is imported: models so small gain nothing from more, and several threads wait for each other by
# computing, for most of the time where other tests run beside.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# At night also what repeats or combines what is tested for each change (CONTRIBUTING.md).
ALL = "SMARTINF_TEST_ALL" in os.environ
SMARTINF = str(pathlib.Path(sys.argv.pop(1)).resolve()) if len(sys.argv) > 1 else "smartinf"

# Over 200 steps the engine and torch round differently in a few operations of each update
# (docs/numerics.md). Seen: 7.0 units in the last place of a tensor's largest weight; small weights near
# zero differ by more units of their own, so the unit is that of the largest. The limit leaves room
# for another processor's torch.
ULPS_OF_LARGEST_MAX = 32

# Several subgroups of the smallest size (65536 elements), trained in seconds on one thread.
RECIPE = """
[model]
layers = 2
width = 96
heads = 4
kv_heads = 2
mlp_width = 256

[data]
paths = ["{corpus}"]
sequence = 32
validation_share = 0.1

[train]
steps = {steps}
micro_batch = 4
accumulation = 2
threads = 1
lr = 3e-3
warmup_steps = {warmup}
validate_every = 0
validation_batches = 4
sample_tokens = 0
precision = "{precision}"

[engine]
io_size = "1MiB"
io_depth = 4
memory_budget = "32MiB"
"""


# Of a model whose units do not all stay in memory, when StreamCase.host() says how much there is.
STREAMED = ["--model.layers", "12", "--model.width", "256", "--model.mlp_width", "768",
            "--train.micro_batch", "1", "--train.accumulation", "3", "--engine.subgroup_elements", "65536"]

# Of a drive, as if it had been measured: else that takes seconds, and buffers depend on what was found.
TUNING = "io_bytes = 4194304\nio_depth = 8\nread_bytes_per_second = 1e9\nwrite_bytes_per_second = 1e9\n"


def make_corpus(path):
    """Text with structure to learn, the same every time."""
    draw = random.Random(1)
    words = ["def", "return", "if", "else", "for", "value", "index", "(", ")", ":", "=", "\n"]
    path.write_text(" ".join(draw.choice(words) for _ in range(8000)), encoding="ascii")


class TrainCase(unittest.TestCase):
    """A folder of its own per test, with a corpus and a recipe."""
    on_drive = False  # where temporary files go, and not in SMARTINF_TEST_FOLDER

    def setUp(self):
        parent = None if self.on_drive else os.environ.get("SMARTINF_TEST_FOLDER")
        self._folder = tempfile.TemporaryDirectory(prefix="smartinf_test_", dir=parent)
        self.addCleanup(self._folder.cleanup)
        self.folder = pathlib.Path(self._folder.name)
        self.corpus = self.folder / "corpus.txt"
        make_corpus(self.corpus)
        (self.folder / "smartinf.tuning").write_text(TUNING, encoding="ascii")

    def recipe(self, steps=50, precision="bf16"):
        path = self.folder / f"{precision}_{steps}.toml"
        path.write_text(RECIPE.format(corpus=self.corpus, steps=steps, precision=precision,
                                      warmup=min(5, steps)))
        return str(path)

    def command(self, recipe, run, flags=()):
        return [SMARTINF, "train", recipe, "--train.run", str(self.folder / run), *flags]

    def train(self, recipe, run, *flags, env=None, code=0, timeout=300):
        """Runs to the end and returns standard error; the exit code must be `code`."""
        result = subprocess.run(self.command(recipe, run, flags), capture_output=True, text=True,
                                env={**os.environ, **(env or {})}, timeout=timeout)
        self.assertEqual(result.returncode, code, result.stdout[-2000:] + result.stderr[-2000:])
        return result.stderr

    def start(self, recipe, run, *flags):
        """Standard output is read by lines, and the run goes ahead of its reader by a few of them only."""
        return self.held(self.command(recipe, run, flags))

    def held(self, words):
        process, output = start_held(words, stderr=subprocess.PIPE, text=True)
        with output:
            process.stdout = output.makefile("r")
        return process

    def wait_for_step(self, process, count=1):
        """The lines until then."""
        lines = []
        for line in process.stdout:
            lines.append(line)
            count -= line.startswith("step")
            if count == 0:
                return "".join(lines)
        self.fail("no step before the end: " + process.stderr.read())

    def devices(self, run, count):
        flags = []
        for i in range(count):
            flags += [f"--device.{i}.path", str(self.folder / f"{run}_device{i}")]
        return flags

    def log(self, run):
        with open(self.folder / run / "log.jsonl", encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    def losses(self, run):
        return [(line["step"], line["loss"]) for line in self.log(run) if "loss" in line]

    def export(self, run, out, *flags):
        folder = self.folder / out
        subprocess.run([SMARTINF, "export", str(self.folder / run), "--out", str(folder), *flags],
                       check=True, capture_output=True, text=True, timeout=300)
        return folder

    def master_weights(self, run, out=None):
        """The bytes of the run's master weights."""
        return (self.export(run, out or run + "_f32", "--type", "f32") /
                "model.safetensors").read_bytes()

    def check_beside_torch(self, device, memory, steps, ulps_max=ULPS_OF_LARGEST_MAX):
        """Losses of two runs in f32 agree to 1e-5, master weights to so many units in the last place."""
        import numpy
        from safetensors.numpy import load
        self.assertEqual(len(self.losses(device)), steps)
        apart = [abs(here - there) / there for (_, here), (_, there) in
                 zip(self.losses(device), self.losses(memory), strict=True)]
        here, there = (load(self.master_weights(run)) for run in (device, memory))
        ulps = max(float(numpy.max(numpy.abs(here[name] - there[name])) /
                         numpy.spacing(numpy.max(numpy.abs(there[name])))) for name in there)
        print(f"{steps} steps: losses differ by at most {max(apart):.1e}, master weights by "
              f"{ulps:.1f} units in the last place of a tensor's largest")
        self.assertLessEqual(max(apart), 1e-5, f"step {1 + apart.index(max(apart))}")
        self.assertLessEqual(ulps, ulps_max)


class StreamCase(TrainCase):
    """Runs with less memory than everything takes."""
    _least_mib = {}  # by flags and number of devices

    def host(self, more_mib, *flags, devices=1):
        """`flags`, and memory for the least that a run on so many devices can do with and so much more."""
        if (flags, devices) not in self._least_mib:  # it depends on the machine's libraries
            told = self.train(self.recipe(steps=10), "refused", *flags, *self.even_devices("refused", devices),
                              "--memory.host", "50MiB", code=1)
            self._least_mib[flags, devices] = int(re.search(r"needs (\d+) MiB", told).group(1))
        return [*flags, "--memory.host", f"{self._least_mib[flags, devices] + more_mib}MiB"]

    def even_devices(self, run, count):
        """Beside several devices the drives would be measured, which takes memory."""
        rates = [word for i in range(count) for word in (f"--device.{i}.bandwidth", "1")]
        return [*self.devices(run, count), *rates]

    def check_same_as(self, run, undisturbed):
        self.assertEqual(self.losses(run), self.losses(undisturbed))
        self.assertEqual(self.master_weights(run), self.master_weights(undisturbed, "of_" + run))
