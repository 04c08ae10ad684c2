"""Runs with less memory than everything takes: stopped, killed, resumed with more or less, exported."""
import os
import random
import re
import signal
import subprocess
import time
import unittest

from train_runs import ALL, STREAMED, StreamCase

KILLS = int(os.environ.get("SMARTINF_TEST_KILLS", "6" if ALL else "2"))


class Stream(StreamCase):
    def setUp(self):
        super().setUp()
        self.short = self.recipe(steps=6)
        self.less = self.host(6, *STREAMED)

    def test_too_little_is_refused_before_anything_is_written(self):
        told = self.train(self.short, "a", *STREAMED, "--memory.host", "50MiB", code=1)
        for part in ("memory.host", "50.0 MiB may be used", "slots of units", "the process itself"):
            self.assertIn(part, told)
        self.assertFalse((self.folder / "a").exists())

    def test_killed_runs_go_on_as_if_they_had_not_been(self):
        recipe = self.recipe(steps=8 * KILLS)
        self.train(recipe, "whole", *STREAMED, "--train.clip_norm", "5")
        flags = [*self.even_devices("killed", 2), *self.host(12, *STREAMED, devices=2), "--train.clip_norm", "5"]
        draw = random.Random(os.environ.get("SMARTINF_TEST_SEED", "7"))
        for kill in range(KILLS):
            overlap = ("early", "late", "none")[kill % 3]
            offload = ("offload", "recompute")[kill % 2]  # the first needs more, so it spills
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

    def test_the_time_of_an_update_after_its_line_is_in_the_next_one(self):
        rate = 100e6
        self.train(self.recipe(steps=5), "slow", *self.host(12, *STREAMED), *self.even_devices("slow", 1), "--optimizer.overlap",
                   "none", "--device.0.internal_write", f"{rate:.0f}", "--device.0.internal_read", f"{rate:.0f}")
        steps = [line for line in self.log("slow") if "loss" in line]
        for step, following in zip(steps[1:], steps[2:]):
            written = sum(device["written"]["state"] for device in following["devices"])
            self.assertGreater(written, 0)
            # A link lets pass some of it at once after it was idle.
            self.assertGreater(following["update_s"], 0.8 * written / rate, step)
            self.assertGreater(following["exposed_s"], 0.8 * written / rate, step)
            self.assertGreaterEqual(following["seconds"], following["update_s"])
            # Each without its own waiting for weights.
            self.assertGreater(min(following["forward_s"], following["backward_s"]), 0)

    @unittest.skipUnless(ALL, "where memory changes between starts, they end by an interrupt")
    def test_interrupts_stop_at_a_committed_step(self):
        # Steps of about a second, of which forward takes a quarter.
        slow = [*self.host(24, *STREAMED), "--train.micro_batch", "16"]
        recipe = self.recipe(steps=8)
        self.train(recipe, "whole", *STREAMED, "--train.micro_batch", "16")
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
        for first, second in ((STREAMED, self.less), (self.less, STREAMED)):
            with self.subTest(first=first[-1], second=second[-1]):
                run = "changed" + str(len(first))
                process = self.start(self.short, run, *first)
                self.wait_for_step(process, 3)
                process.send_signal(signal.SIGINT)
                process.communicate(timeout=60)
                self.train(self.short, run, *second)
                if not (self.folder / "whole").exists():
                    self.train(self.short, "whole", *STREAMED)
                self.check_same_as(run, "whole")

    def test_checkpoint_and_export_are_those_of_a_run_in_memory(self):
        short = self.recipe(steps=5)
        self.train(short, "whole", *STREAMED)
        self.train(short, "less", *self.less, "--checkpoint.every", "2",
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
        told = self.train(short, "again", *there, code=1)
        run = re.search(r"--take-over (\w{8})", told).group(1)
        self.train(short, "again", *there, "--take-over", run)
        self.assertEqual(self.losses("again"), self.losses("whole")[4:])
        self.assertEqual(self.master_weights("again"), self.master_weights("whole"))


if __name__ == "__main__":
    unittest.main()
