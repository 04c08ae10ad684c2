"""Every recipe that comes with the project runs, and those that differ only in where the update runs
give the same losses, bit for bit.

Usage: recipes_test.py PATH_OF_SMARTINF PROJECT_ROOT
"""
import pathlib
import sys
import unittest

ROOT = pathlib.Path(sys.argv.pop())

from train_runs import TrainCase  # noqa: E402  (takes the other argument)

SHORT = ["--train.steps", "2", "--train.warmup_steps", "1", "--train.micro_batch", "1", "--train.threads", "1",
         "--data.sequence", "32", "--train.validate_every", "0", "--train.validation_batches", "1",
         "--train.sample_tokens", "0"]


class Recipes(TrainCase):
    def run_recipe(self, path):
        flags = [*SHORT, "--data.paths", str(self.corpus)]
        for i in range(path.read_text(encoding="utf-8").count("\n[[device]]")):
            flags += [f"--device.{i}.path", str(self.folder / f"{path.stem}_{i}")]
        self.train(str(path), path.stem, *flags)
        return self.losses(path.stem)

    def test_all_run(self):
        losses = {path.stem: self.run_recipe(path) for path in sorted((ROOT / "recipes").glob("*.toml"))}
        self.assertIn("quickstart", losses)
        for name, steps in losses.items():
            self.assertEqual(len(steps), 2, name)
        self.assertEqual(losses["ten-smartssds"], losses["ten-ssds-host-update"])


if __name__ == "__main__":
    unittest.main()
