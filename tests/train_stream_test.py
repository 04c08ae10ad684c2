"""Runs with less memory than everything takes: stopped, killed, resumed with more or less, exported."""
import os
import random
import re
import signal
import subprocess
import time
import unittest

from train_runs import TrainCase

MODEL = ["--model.layers", "12", "--model.width", "256", "--model.mlp_width", "768",
         "--train.micro_batch", "1", "--train.accumulation", "3", "--engine.subgroup_elements", "65536"]
KILLS = int(os.environ.get("SMARTINF_TEST_KILLS", "6"))


class Stream(TrainCase):
    def setUp(self):
        super().setUp()
        self.short = self.recipe(steps=10)
        # What is there at least depends on the machine's libraries.
        told = self.train(self.short, "refused", *MODEL, "--memory.host", "50MiB", code=1)
        self.least_mib = int(re.search(r"needs (\d+) MiB", told).group(1))
        self.less = [*MODEL, "--memory.host", f"{self.least_mib + 6}MiB"]

    def start(self, recipe, run, *flags):
        return subprocess.Popen(self.command(recipe, run, flags), stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)

    def wait_for_step(self, process, count=1):
        """The lines until then."""
        lines = []
        for line in process.stdout:
            lines.append(line)
            count -= line.startswith("step")
            if count == 0:
                return "".join(lines)
        self.fail("no step before the end: " + process.stderr.read())

    def check_same_as(self, run, undisturbed):
        self.assertEqual(self.losses(run), self.losses(undisturbed))
        self.assertEqual(self.master_weights(run), self.master_weights(undisturbed, "of_" + run))

    def test_too_little_is_refused_before_anything_is_written(self):
        told = self.train(self.short, "a", *MODEL, "--memory.host", "50MiB", code=1)
        for part in ("memory.host", "50.0 MiB may be used", "slots of units", "the process itself"):
            self.assertIn(part, told)
        self.assertFalse((self.folder / "a").exists())

    def test_killed_runs_go_on_as_if_they_had_not_been(self):
        recipe = self.recipe(steps=12 * KILLS)
        self.train(recipe, "whole", *MODEL, "--train.clip_norm", "5")
        # Beside two devices the drives would be measured, which takes memory.
        flags = [*self.devices("killed", 2), *MODEL, "--memory.host", f"{self.least_mib + 24}MiB",
                 "--device.0.bandwidth", "1", "--device.1.bandwidth", "1", "--train.clip_norm", "5"]
        draw = random.Random(os.environ.get("SMARTINF_TEST_SEED", "7"))
        for kill in range(KILLS):
            overlap = ("early", "late", "none")[kill % 3]
            offload = ("recompute", "offload")[kill % 2]
            process = self.start(recipe, "killed", *flags, "--optimizer.overlap", overlap,
                                 "--memory.activations", offload)
            said = self.wait_for_step(process)
            self.assertIn("come from the devices", said)
            time.sleep(draw.uniform(0, 0.4))
            process.kill()
            process.communicate()
            self.assertEqual(process.returncode, -signal.SIGKILL)
        self.train(recipe, "killed", *flags)
        self.check_same_as("killed", "whole")

    def test_interrupts_stop_at_a_committed_step(self):
        # Steps of about a second, of which forward takes a quarter.
        slow = [*MODEL, "--memory.host", f"{self.least_mib + 24}MiB", "--train.micro_batch", "16"]
        recipe = self.recipe(steps=8)
        self.train(recipe, "whole", *MODEL, "--train.micro_batch", "16")
        draw = random.Random(1)
        for stop in range(3):
            process = self.start(recipe, "stopped", *slow)
            self.wait_for_step(process)
            time.sleep(draw.uniform(0.05, 0.3))
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=60)
            if process.returncode == 0:
                break  # all steps are done
            self.assertEqual(process.returncode, 130, output + errors)
            step = int(re.search(r"stopped at step (\d+), which is committed", output).group(1))
            self.assertEqual(self.losses("stopped")[-1][0], step)
        self.train(recipe, "stopped", *slow)
        self.check_same_as("stopped", "whole")

    def test_memory_may_change_between_starts(self):
        for first, second in ((MODEL, self.less), (self.less, MODEL)):
            with self.subTest(first=first[-1], second=second[-1]):
                run = "changed" + str(len(first))
                process = self.start(self.short, run, *first)
                self.wait_for_step(process, 3)
                process.send_signal(signal.SIGINT)
                process.communicate(timeout=60)
                self.train(self.short, run, *second)
                if not (self.folder / "whole").exists():
                    self.train(self.short, "whole", *MODEL)
                self.check_same_as(run, "whole")

    def test_checkpoint_and_export_are_those_of_a_run_in_memory(self):
        self.train(self.short, "whole", *MODEL)
        self.train(self.short, "less", *self.less, "--checkpoint.every", "4",
                   "--memory.activations", "offload")
        whole, less = (self.export(run, run + "_bf16") for run in ("whole", "less"))
        for file in sorted(path.name for path in whole.iterdir()):
            if file.endswith(".safetensors"):
                self.assertEqual((less / file).read_bytes(), (whole / file).read_bytes(), file)
        checkpoints = sorted((self.folder / "less" / "checkpoints").iterdir())
        self.assertEqual(len(checkpoints), 2)
        command = self.command("", "")[0]
        restored = self.folder / "restored"
        done = subprocess.run([command, "restore", str(checkpoints[-1]), "--device", str(restored)],
                              capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        there = [*self.less, "--device.0.path", str(restored)]
        told = self.train(self.short, "again", *there, code=1)
        run = re.search(r"--take-over (\w{8})", told).group(1)
        self.train(self.short, "again", *there, "--take-over", run)
        self.assertEqual(self.losses("again"), self.losses("whole")[8:])
        self.assertEqual(self.master_weights("again"), self.master_weights("whole"))


if __name__ == "__main__":
    unittest.main()
