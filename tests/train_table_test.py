"""[table]: the embedding as a table on devices, trained, killed, brought to other devices, exported, fine-tuned.

Usage: train_table_test.py SMARTINF
"""
import json
import os
import signal
import subprocess
import sys
import unittest

from train_runs import SMARTINF, STREAMED, StreamCase

os.environ.setdefault("SMARTINF_PYTHON", sys.executable)  # makes tokens of a text

NAME = "model.embed_tokens.weight"
UNTIED = ["--model.tied_head", "false"]
ROOM = ["--table.memory", "80MiB", "--table.log", "2MiB"]
TABLE = [*UNTIED, *ROOM, "--table.embedding", "adamw"]
# Sums of a step's rows and of its parameters are then made in one order.
SAME = ["--train.accumulation", "1", "--train.clip_norm", "0", "--train.weight_decays", f"{NAME} = 0",
        "--train.lr_factors", f"{NAME} = 0.5"]


class Table(StreamCase):
    def smartinf(self, *words):
        done = subprocess.run([SMARTINF, *map(str, words)], capture_output=True, text=True, timeout=300, check=False)
        self.assertEqual(done.returncode, 0, done.stdout[-2000:] + done.stderr[-2000:])
        return done.stdout

    def tokens(self, folder, *words):
        flags = [word for prompt in ("118,97", "105") for word in ("--prompt-tokens", prompt)]
        said = self.smartinf("generate", folder, "--threads", "1", *flags, "--tokens", 12, "--json", *words)
        return [json.loads(line)["tokens"] for line in said.splitlines()]

    def test_adamw_has_the_bits_of_a_parameter(self):
        recipe = self.recipe(steps=12, precision="f32")
        self.train(recipe, "dense", *UNTIED, *SAME)
        variants = {"one": [], "two": [*self.devices("two", 2), "--memory.activations", "recompute",
                                       "--optimizer.overlap", "early"],
                    "host": ["--optimizer.where", "host"]}
        for run, flags in variants.items():
            with self.subTest(run):
                said = self.train(recipe, run, *TABLE, *SAME, *flags)
                self.assertEqual(self.losses(run), self.losses("dense"), said)
                self.assertEqual(self.master_weights(run), self.master_weights("dense", "of_" + run))

    def test_killed_copied_and_streamed(self):
        recipe = self.recipe(steps=12)
        flags = [*TABLE, "--table.embedding", "sparse_adam", "--train.accumulation", "3", "--train.clip_norm", "0.7",
                 "--train.validate_every", "4"]
        self.train(recipe, "whole", *flags)
        self.assertEqual(len(self.losses("whole")), 12)
        flags += ["--checkpoint.every", "4", "--checkpoint.keep", "0"]
        process = self.start(recipe, "killed", *flags, *self.devices("killed", 2))
        self.wait_for_step(process, 6)
        process.kill()
        process.communicate()
        self.assertEqual(process.returncode, -signal.SIGKILL)
        self.train(recipe, "killed", *flags, *self.devices("killed", 2))
        self.check_same_as("killed", "whole")
        self.assertEqual([line["validation_loss"] for line in self.log("killed") if "validation_loss" in line],
                         [line["validation_loss"] for line in self.log("whole") if "validation_loss" in line])
        self.smartinf("fsck", self.folder / "killed")
        back = self.devices("back", 3)
        said = self.smartinf("restore", self.folder / "killed/checkpoints/step-00000004",
                             *[word for path in back[1::2] for word in ("--device", path)])
        self.train(recipe, "back", *said.split("smartinf train RECIPE ")[1].split(), *flags)
        self.assertEqual(self.losses("back"), self.losses("whole")[4:])
        self.assertEqual(self.master_weights("back"), self.master_weights("whole", "again"))

    def test_streamed_beside_in_memory(self):
        recipe = self.recipe(steps=6)
        flags = [*STREAMED, *TABLE]
        self.train(recipe, "whole", *flags)
        process = self.start(recipe, "streamed", *self.even_devices("streamed", 1), *self.host(12, *flags))
        self.assertIn("come from the devices", self.wait_for_step(process))
        process.communicate()
        self.check_same_as("streamed", "whole")
        said = self.tokens(self.folder / "streamed")
        self.assertEqual(self.tokens(self.folder / "of_streamed", "--type", "bf16"), said)

    def test_from_a_folder_of_weights(self):
        recipe = self.recipe(steps=6, precision="f32")
        self.train(recipe, "made", *UNTIED)
        self.export("made", "folder", "--type", "f32", "--shard-size", "300KB")
        text = (self.folder / "f32_6.toml").read_text(encoding="utf-8")
        tune = self.folder / "tune.toml"
        tune.write_text("[model]\nfrom = \"" + str(self.folder / "folder") + "\"\n" + text[text.index("[data]"):],
                        encoding="utf-8")
        table = [*ROOM, "--table.embedding", "adamw"]
        same = [*SAME, "--data.validation_share", "0"]  # the text is one document
        self.train(str(tune), "dense", *same)
        samples = ["--train.sample_prompts", "value", "--train.sample_tokens", "5"]
        subprocess.run(self.command(str(tune), "table", [*same, *table, *samples]), capture_output=True, check=True,
                       timeout=300)
        self.check_same_as("table", "dense")
        self.assertEqual(self.tokens(self.folder / "table"), self.tokens(self.folder / "of_table"))

    def test_what_cannot_be_is_refused_by_name(self):
        recipe = self.recipe(steps=3)
        for code, flags, says in ((2, [], "model.tied_head = false"),
                                  (2, [*UNTIED, "--optimizer.where", "memory"], "optimizer.where"),
                                  (2, [*UNTIED, "--ranks.pipeline", "2"], "ranks.pipeline"),
                                  (1, [*UNTIED, "--engine.durability", "none"], "durability"),
                                  (1, [*UNTIED, "--table.memory", "1MiB"], "memory")):
            with self.subTest(flags):
                told = self.train(recipe, "no", "--table.embedding", "sgd", *flags, code=code)
                self.assertIn(says, told)
        self.train(recipe, "run", *TABLE)
        told = self.train(self.recipe(steps=4), "run", *TABLE, "--table.embedding", "row_adam", code=1)
        self.assertIn("row_adam", told)
        self.assertIn("adamw", told)


if __name__ == "__main__":
    unittest.main()
