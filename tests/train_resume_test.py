"""A run that is stopped or killed goes on as if it had not been."""
import os
import random
import signal
import time
import unittest

from train_runs import ALL, TrainCase

CLIPPED = ["--train.clip_norm", "0.7"]  # so that some guesses of early updates are wrong
SMALL = ["--optimizer.format", "q4", "--optimizer.master", "m24"]  # codes are drawn by step and element
KILLS = int(os.environ.get("SMARTINF_TEST_KILLS", "4"))  # 50 in scripts/nightly.sh


class Resume(TrainCase):
    def check_same_as(self, run, undisturbed):
        self.assertEqual(self.losses(run), self.losses(undisturbed))
        self.assertEqual(self.master_weights(run), self.master_weights(undisturbed))

    def test_kill_at_random_moments(self):
        starts = 1 + (KILLS - 1) // 4
        recipe = self.recipe(steps=12 * starts + 20 * (KILLS - starts))  # more than are made between the kills
        flags = [*CLIPPED, *SMALL]
        self.train(recipe, "whole", *flags)
        draw = random.Random(os.environ.get("SMARTINF_TEST_SEED", "7"))
        flags += self.devices("killed", 2)
        kills = 0
        while kills < KILLS:
            overlap = ("early", "late")[kills // 2 % 2]
            process = self.start(recipe, "killed", *flags, "--optimizer.overlap", overlap)
            # Most kills hit a step; one in four the start: creation, recovery, loading.
            if kills % 4 == 0:
                time.sleep(draw.uniform(0, 2))
            else:
                self.wait_for_step(process)
                time.sleep(draw.uniform(0, 0.1))
            process.kill()
            output = process.communicate()
            self.assertEqual(process.returncode, -signal.SIGKILL, output)
            kills += 1
        self.train(recipe, "killed", *flags)
        self.check_same_as("killed", "whole")

    def test_interrupt_stops_at_a_committed_step(self):
        # With compressed gradients the last step writes the residual, which is due at none before it.
        compress = ["--compress.density", "0.3", "--compress.residual_every", "100000"]
        early = ["--optimizer.overlap", "early", *CLIPPED]
        cases = [("compressed", compress), ("early", early), ("device", []), ("memory", [])]
        for where, more in cases if ALL else cases[:2]:
            with self.subTest(where):
                recipe = self.recipe(steps=40)
                flags = ["--optimizer.where", "memory" if where == "memory" else "device", *more]
                self.train(recipe, where + "_whole", *flags)
                process = self.start(recipe, where, *flags)
                self.wait_for_step(process)
                process.send_signal(signal.SIGINT)
                output, errors = process.communicate(timeout=120)
                self.assertEqual(process.returncode, 130, output + errors)
                self.assertIn("stopped at step", output)
                self.assertLess(len(self.losses(where)), 40)
                errors = self.train(recipe, where, *flags)
                self.assertNotIn("residual", errors)
                self.check_same_as(where, where + "_whole")

    def test_a_complete_run_only_shows_its_result_again(self):
        recipe = self.recipe(steps=3)
        self.train(recipe, "a")
        before = (self.folder / "a" / "log.jsonl").read_text()
        self.train(recipe, "a")
        self.assertEqual((self.folder / "a" / "log.jsonl").read_text(), before)
        self.assertEqual(before.count("validation_loss"), 1)

    def test_a_second_interrupt_stops_at_once(self):
        # One step that takes long: the first Ctrl-C waits for the micro batch.
        recipe = self.recipe(steps=50)
        process = self.start(recipe, "a", "--train.micro_batch", "4096")
        for line in process.stdout:
            if line.startswith("state:"):
                break
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)  # raises if it goes on; the micro batch takes far longer
        self.assertEqual(process.returncode, 130)


if __name__ == "__main__":
    unittest.main()
