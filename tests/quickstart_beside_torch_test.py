"""The quickstart's first 200 steps in f32, on a device and with torch's own AdamW.

Takes minutes, so only scripts/nightly.sh runs it (ctest -C Nightly); train_bits_test.py does the same on
a small model.
"""
import pathlib
import unittest

from train_runs import TrainCase

RECIPE = str(pathlib.Path(__file__).resolve().parent.parent / "recipes" / "quickstart.toml")


class QuickstartBesideTorch(TrainCase):
    def test_200_steps_in_f32(self):
        # The quickstart warms up for 200 steps, so a run of 200 has its learning rates.
        flags = ["--train.steps", "200", "--train.precision", "f32", "--train.sample_tokens", "0",
                 "--train.validate_every", "0"]
        for run in ("device", "memory"):
            self.train(RECIPE, run, *flags, "--optimizer.where", run, timeout=3600)
        # Seen: 251. Where a gradient is near zero, a rounding decides the direction of Adam's step.
        self.check_beside_torch("device", "memory", steps=200, ulps_max=1024)


if __name__ == "__main__":
    unittest.main()
