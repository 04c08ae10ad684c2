"""`smartinf train` as two ranks beside torch's DistributedDataParallel and pipelining, with AdamW, as two ranks, in f32.

Usage: ranks_beside_ddp_test.py SMARTINF
"""
import pathlib
import sys
import unittest

from rank_processes import Ranks
from small_models import CONFIGS, WIDE_HEADS, FineTuneCase, make

STEPS = 30
WORKER = str(pathlib.Path(__file__).with_name("ddp_adamw_worker.py"))
LR = "1e-3"


class RanksBesideDDP(FineTuneCase):
    def fine_tune_as_ranks(self, folder, run, *flags):
        """As fine_tune(), by two ranks."""
        recipe = pathlib.Path(self.recipe(steps=STEPS))
        text = recipe.read_text()
        recipe.write_text(f'[model]\nfrom = "{folder}"\n\n' + text[text.index("[data]"):])
        command = self.command(str(recipe), run, ["--train.lr_floor", "1", *flags, *self.even_devices(run, 2)])
        with Ranks(command, 2) as ranks:
            self.assertEqual(ranks.wait(200), [0, 0], ranks.err(0) + ranks.err(1))

    def model(self):
        folder = self.folder / "model"
        make(CONFIGS["qwen3"].__class__(**dict(WIDE_HEADS, vocab_size=256)), folder)
        self.corpus.write_bytes(self.corpus.read_bytes()[:32 * 8 + 1])
        return folder

    def test_the_curve_is_that_of_ddp_and_adamw(self):
        folder = self.model()
        self.fine_tune_as_ranks(folder, "here", *self.SAME_BATCH, "--train.micro_batch", "4", "--train.accumulation",
                                "2", "--train.lr", LR)
        self.check_beside(folder, "ddp")

    def test_the_curve_of_stages_is_that_of_torch_pipelining_and_adamw(self):
        folder = self.model()
        self.fine_tune_as_ranks(folder, "here", *self.SAME_BATCH, "--train.micro_batch", "2", "--train.accumulation",
                                "4", "--train.lr", LR, "--ranks.pipeline", "2")
        self.check_beside(folder, "stages")

    def check_beside(self, folder, how):
        with Ranks([sys.executable, WORKER, str(folder), str(self.corpus), str(STEPS), LR, how], 2) as ranks:
            self.assertEqual(ranks.wait(400), [0, 0], ranks.err(0) + ranks.err(1))
            there = [float(line) for line in ranks.out(0).split()]
        here = [loss for _, loss in self.losses("here")]
        self.assertEqual(len(here), len(there))
        apart = [abs(a - b) / b for a, b in zip(here, there, strict=True)]
        print(f"{STEPS} steps: losses differ by at most {max(apart):.1e}, and fell from {there[0]:.3f} to {there[-1]:.3f}")
        self.assertLess(max(apart), 1e-5, f"step {1 + apart.index(max(apart))}")
        self.assertLess(there[-1], 0.9 * there[0], "the model has learnt something")


if __name__ == "__main__":
    unittest.main()
