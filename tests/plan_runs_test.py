"""What `smartinf plan` writes is run by `smartinf train`, one row of each kind: method, state format, what runs beside
the update, what stays in memory, several ranks. The bytes of its steps are those of the plan.

Usage: TEST.py PATH_OF_SMARTINF [unittest's own arguments]
"""
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest

from rank_processes import Ranks
from train_runs import ALL, SMARTINF, TUNING, make_corpus

# Larger for what is streamed: while the drives are measured, before training, a process takes 224 MiB.
MODEL = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 768, "vocab_size": 256, "tie_word_embeddings": False}

LARGE = {**MODEL, "hidden_size": 640, "intermediate_size": 1920}

# The rates matter for what is recommended only, and each row says what it wants.
MACHINE = """
name = "this"
[gpu]
name = "none"
peak_flops = 1e11
memory_bytes_per_s = 1e10
link_bytes_per_s = 1e10
[host]
memory_bytes = {host}
link_bytes_per_s = 5e9
update_bytes_per_s = 4e9
copy_bytes_per_s = 4e9
select_params_per_s = 5e8
step_ahead_params_per_s = 3e8
process_bytes = {process}
[[device]]
count = {devices}
read_bytes_per_s = 1e9
write_bytes_per_s = 1e9
link_bytes_per_s = 5e9
update_bytes_per_s = 2e9
decompress_bytes_per_s = 2e9
on_host_cores = true
[software]
subgroup_elements = 65536
slots = 8
in_flight_bytes = 33554432
gradient_bytes = 2
weight_bytes = 2
overlapped = "overlapped"
gradient_spilled = false
offload_waits = false
"""
STEPS = 4
# As the command says them at the end of a run.
BYTES = {"host_link_up_bytes": r"host link up ([^,]*)", "host_link_down_bytes": r"host link up [^,]*, down ([^;]*)",
         "drive_read_bytes": r"drives read ([^,]*)", "drive_written_bytes": r"drives read [^,]*, written ([^;\n]*)"}
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def bytes_of_a_step(said, which):
    """Bytes of all kinds, for example of "2.61 MiB state + 12.0 KiB metadata"."""
    kinds = re.search("bytes of a step: .*" + BYTES[which], said).group(1)
    return sum(float(number) * UNITS[unit] for number, unit in re.findall(r"([0-9.]+) ([KMG]?i?B)", kinds))


class PlanRuns(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="smartinf_test_")
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        for name, model in (("model", MODEL), ("large", LARGE)):
            (cls.folder / f"{name}.json").write_text(json.dumps(model), encoding="ascii")
        make_corpus(cls.folder / "corpus.txt")
        # As the machine's file has it.
        (cls.folder / "smartinf.tuning").write_text(TUNING, encoding="ascii")
        cls.process_bytes = 400_000_000
        cls.process_bytes = cls.resident_bytes()

    @classmethod
    def resident_bytes(cls):
        """What the trainer counts of its process here, as `smartinf calibrate` would find it."""
        cls.plan("measure")
        refused = subprocess.run(cls.command("measure", "--memory.host", "50MiB"), capture_output=True, text=True)
        return int(re.search(r"the process itself (\d+) MiB", refused.stderr).group(1)) << 20

    @classmethod
    def plan(cls, name, *flags, host=0, devices=1, model="model"):
        """The plan, and its recipe with data and devices filled in."""
        machine, recipe = cls.folder / f"{name}.machine.toml", cls.folder / f"{name}.toml"
        machine.write_text(MACHINE.format(host=host, process=cls.process_bytes, devices=devices), encoding="ascii")
        words = [SMARTINF, "plan", str(cls.folder / f"{model}.json"), "--machine", str(machine), "--with", "train",
                 "--seq", "64", "--batch", "1", "--subgroup", "65536", "--json", "--recipe", str(recipe), *flags]
        done = subprocess.run(words, capture_output=True, text=True)
        plan = json.loads(done.stdout)
        if done.returncode == 0:
            text = recipe.read_text(encoding="ascii").replace("tokens.bin", str(cls.folder / "corpus.txt"))
            text = text.replace("/mnt/", f"{cls.folder}/{name}-")
            recipe.write_text(text, encoding="ascii")
        return plan

    @classmethod
    def command(cls, name, *flags, steps=STEPS):
        return [SMARTINF, "train", str(cls.folder / f"{name}.toml"), "--train.run", str(cls.folder / name),
                "--train.steps", str(steps), "--train.threads", "1", "--train.validate_every", "0",
                "--train.sample_tokens", "0", "--train.clip_norm", "0", *flags]  # so that no update is made twice

    def run_it(self, name, steps):
        """The rows of its steps, and what it says."""
        done = subprocess.run(self.command(name, steps=steps), capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stdout[-2000:] + done.stderr[-2000:])
        return self.rows(name, steps), done.stdout

    def rows(self, name, steps=STEPS):
        lines = (self.folder / name / "log.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, lines) if "loss" in row]
        self.assertEqual(len(rows), steps)
        return rows

    def check_bytes(self, plan, said, apart):
        """apart: how far the simulator may be off, for what it does not model."""
        for key in BYTES:
            with self.subTest(key):
                measured = bytes_of_a_step(said, key)
                self.assertLessEqual(abs(plan[key] / measured - 1), apart, (plan[key], measured))

    def row(self, name, *flags, apart=0.02, steps=STEPS, **machine):
        plan = self.plan(name, *flags, **machine)
        self.assertTrue(plan["fits"], plan["result"])
        rows, said = self.run_it(name, steps)
        self.check_bytes(plan, said, apart)
        return plan, rows

    def test_methods_and_formats_with_everything_in_memory(self):
        cases = (("c", "su+o", "q8", "early"), ("d", "su", "f32", "none"), ("e", "baseline", "f32", "none"),
                 ("b", "su+o", "bf16", "late"), ("a", "su+o", "f32", "none"))
        for name, method, state, overlap in cases if ALL else cases[:3]:
            with self.subTest((method, state, overlap)):
                plan, rows = self.row(name, "--method", method, "--state-format", state, "--overlap", overlap)
                self.assertIsNone(plan["streaming"])
                self.assertEqual(plan["overlap"], overlap)
                self.assertEqual(rows[1]["overlap"], overlap)

    def test_memory_is_what_train_plans_for_the_recipe(self):
        for name, flags in (("keep", ["--recompute", "false"]), ("f32", ["--precision", "f32"]),
                            ("sums", ["--accumulation", "4"]), ("select", ["--method", "su+o+c"])):
            with self.subTest(name):
                plan = self.plan("memory_" + name, *flags, model="large")
                told = subprocess.run(self.command("memory_" + name, "--print-plan"), capture_output=True, text=True)
                planned = re.search(r"memory: ([0-9.]+) ([KMG]iB) of the host's memory are planned", told.stdout)
                self.assertIsNotNone(planned, told)
                # The process differs by some pages, and texts are rounded.
                self.assertLess(abs(float(planned[1]) * UNITS[planned[2]] - plan["host_bytes"]), 12 << 20, told.stdout)

    def test_compressed_gradients(self):
        # A step of the plan has its part of the residual that is written in every sixteenth.
        plan, rows = self.row("compressed", "--method", "su+o+c", steps=16)
        self.assertIsNone(plan["streaming"])
        self.assertGreater(rows[1]["compressed_bytes"], 0)

    def test_activations_that_are_kept(self):
        self.row("kept", "--method", "su+o", "--recompute", "false")
        self.plan("recomputed", "--method", "su+o")
        kept, recomputed = ((self.folder / f"{name}.toml").read_text(encoding="ascii") for name in ("kept", "recomputed"))
        self.assertIn('activations = "keep"', kept)
        self.assertIn('activations = "recompute"', recomputed)

    @unittest.skipUnless(ALL, "it takes minutes")
    def test_weights_and_inputs_from_the_devices(self):
        """With so much memory that some of each stay."""
        flags = ["--method", "su+o", "--accumulation", "12"]
        least = self.plan("least", *flags, host=1, model="large")
        self.assertFalse(least["fits"])
        for name, overlap, more_mib in (("late", "late", 4), ("none", "none", 24), ("early", "early", 24)):
            with self.subTest(name):
                plan, rows = self.row(name, *flags, "--overlap", overlap, host=least["host_bytes"] + (more_mib << 20),
                                      model="large", apart=0.25)  # the ends of four steps
                streaming = plan["streaming"]
                self.assertGreater(streaming["units_from_devices"], 0)
                self.assertEqual(rows[1]["overlap"], overlap)
                told = subprocess.run(self.command(name, "--print-plan"), capture_output=True, text=True).stdout
                units, all_units = map(int, re.search(r"(\d+) of (\d+) units stay in memory", told).groups())
                self.assertEqual(all_units, streaming["units"])
                self.assertLessEqual(abs(units - streaming["units_in_memory"]), 1, told)

    def cluster(self, name, *flags, links='rate = "1 Gbit/s"'):
        """The plan for two boxes like this machine, whose recipe runs as it is."""
        text = ""
        for box in ("left", "right"):
            machine = MACHINE.format(host=0, process=self.process_bytes, devices=1)
            machine = machine.replace("[[device]]", f"[[device]]\nname = '{self.folder}/{name}-{box}'")
            (self.folder / f"{name}.{box}.toml").write_text(machine, encoding="ascii")
            text += f"[[box]]\nname = '{box}'\nmachine = '{name}.{box}.toml'\n"
        (self.folder / f"{name}.cluster.toml").write_text(f"{text}[links]\n{links}\n", encoding="ascii")
        done = subprocess.run([SMARTINF, "plan", str(self.folder / "model.json"), "--cluster",
                               str(self.folder / f"{name}.cluster.toml"), "--tokens-per-step", "256", "--seq", "64",
                               "--subgroup", "65536", "--json", "--recipe", str(self.folder / f"{name}.toml"),
                               "--data", str(self.folder / "corpus.txt"), *flags], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)["options"]

    def test_stages_over_boxes_run_as_they_are_planned(self):
        for name, flags, messages in (("stages", ("--recompute", "false"), 1), ("chunks", ("--recompute", "true", "--chunks", "2"), 3)):
            with self.subTest(name):
                option = self.cluster(name, "--stages", "2", "--batch", "1", *flags)[0]
                self.assertEqual((option["pipeline"], option["boundary_bytes"]), (2, messages * 2 * 256 * MODEL["hidden_size"]))
                self.assertEqual([shlex.split(line)[4] for line in option["launch"]], ["0", "1"])
                with Ranks(self.command(name, "--print-plan"), 2) as ranks:
                    self.assertEqual(ranks.wait(100), [0, 0], ranks.err(0) + ranks.err(1))
                    told = ranks.out(0)
                self.assertIn("2 chunks by turns; 4 micro batches under way" if name == "chunks" else
                              f"{min(4, 2 + option['ahead'])} micro batches under way", told)
                planned = re.findall(r"memory: ([0-9.]+) ([KMG]iB) of the host's memory are planned", told)
                self.assertEqual(len(planned), 2, told)
                for (number, unit), box in zip(planned, option["boxes"]):
                    self.assertLess(abs(float(number) * UNITS[unit] - box["host_bytes"]), 12 << 20, told)
                with Ranks(self.command(name), 2) as ranks:
                    self.assertEqual(ranks.wait(100), [0, 0], ranks.err(0) + ranks.err(1))
                self.assertEqual({row["pipeline_sent_bytes"] for row in self.rows(name)}, {option["boundary_bytes"]})

    def test_two_ranks_as_plan_says_that_they_are_started(self):
        flags = ["--method", "su+o", "--ranks", "2", "--accumulation", "4", "--overlap", "late"]
        plan = self.plan("ranks", *flags, devices=2)
        self.assertTrue(plan["fits"], plan["result"])
        words = shlex.split(plan["launch"])
        self.assertEqual(words[:2] + words[-3:], ["torchrun", "--no-python", "smartinf", "train", "RECIPE"])
        count = int(words[words.index("--nproc-per-node") + 1])
        torchrun = shutil.which("torchrun", path=os.path.dirname(sys.executable))
        if torchrun is None:  # torch is not this Python's
            with Ranks(self.command("ranks"), count) as ranks:
                self.assertEqual(ranks.wait(120), [0] * count, [ranks.out(0), ranks.err(0)])
        else:
            words = [torchrun, *words[1:-3], *self.command("ranks")]
            done = subprocess.run(words, capture_output=True, text=True, timeout=120)
            self.assertEqual(done.returncode, 0, done.stdout[-2000:] + done.stderr[-2000:])
        rows = self.rows("ranks")
        for planned, counted in (("ranks_sent_bytes", "ranks_sent_bytes"),
                                 ("ranks_received_bytes", "ranks_received_bytes")):
            measured = sum(row[counted] for row in rows) / len(rows)
            # Pieces that reach over subgroups of both ranks go to both.
            self.assertLessEqual(abs(plan[planned] / measured - 1), 0.5, (plan[planned], measured))


if __name__ == "__main__":
    unittest.main()
