"""checkpoint.every: copies made between steps, the oldest dropped, one brought back on other devices."""
import json
import os
import re
import subprocess
import unittest

from train_runs import SMARTINF, TrainCase

EVERY = ("--checkpoint.every", "10", "--checkpoint.keep", "2")


class Checkpoints(TrainCase):
    def smartinf(self, *words, code=0):
        done = subprocess.run([SMARTINF, *words], capture_output=True, text=True, timeout=300, check=False)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def kept(self, run):
        return sorted(os.listdir(self.folder / run / "checkpoints"))

    def test_made_dropped_restored_and_gone_on_with(self):
        recipe = self.recipe(steps=50)
        two = self.devices("a", 2)
        self.train(recipe, "plain")
        self.train(recipe, "a", *two, *EVERY)
        # The run is what it would have been without.
        self.assertEqual(self.losses("a"), self.losses("plain"))
        weights = self.master_weights("plain")
        self.assertEqual(self.master_weights("a"), weights)
        self.assertEqual(self.kept("a"), ["step-00000040", "step-00000050"])
        made = [line for line in self.log("a") if "checkpoint" in line]
        self.assertEqual([line["step"] for line in made], [10, 20, 30, 40, 50])
        self.assertEqual([names(line["removed"]) for line in made],
                         [[], [], ["step-00000010"], ["step-00000020"], ["step-00000030"]])
        checkpoint = str(self.folder / "a/checkpoints/step-00000040")
        self.smartinf("fsck", checkpoint)
        # Three devices instead of two, and one; the rest of the steps is the same to the last bit.
        for count in (3, 1):
            with self.subTest(devices=count):
                run = f"back{count}"
                devices = self.devices(run, count)
                told = self.smartinf("restore", checkpoint,
                                     *[word for path in devices[1::2] for word in ("--device", path)])
                self.train(recipe, run, *told.split("smartinf train RECIPE ")[1].split())
                self.assertEqual(self.losses(run), self.losses("plain")[40:])
                self.assertEqual(self.master_weights(run), weights)

    def test_it_has_the_residual_of_compressed_gradients(self):
        # Which no step but the last of all would write.
        compress = ["--compress.density", "0.3", "--compress.residual_every", "100000"]
        recipe = self.recipe(steps=20)
        self.train(recipe, "a", *self.devices("a", 1), *EVERY, *compress)
        devices = self.devices("back", 1)
        said = self.smartinf("restore", str(self.folder / "a/checkpoints/step-00000010"), "--device",
                             devices[1])
        warned = self.train(recipe, "back", *said.split("smartinf train RECIPE ")[1].split(), *compress)
        self.assertNotIn("residual", warned)
        self.assertEqual(self.losses("back"), self.losses("a")[10:])
        self.assertEqual(self.master_weights("back"), self.master_weights("a"))

    @unittest.skipIf(os.geteuid() != 0, "only root can mount a small file system")
    def test_no_room_costs_a_copy_and_not_the_run(self):
        recipe = self.recipe(steps=20)
        small = self.folder / "small"
        small.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small]
        if subprocess.run(mount, check=False).returncode != 0:
            self.skipTest("no tmpfs can be mounted here")
        self.addCleanup(subprocess.run, ["umount", small], check=False)
        self.train(recipe, "plain")
        told = self.train(recipe, "a", *EVERY, "--checkpoint.folder", str(small))
        self.assertIn("step 10: no checkpoint: ", told)
        self.assertIn("step 20: no checkpoint: ", told)
        self.assertEqual(self.losses("a"), self.losses("plain"))
        self.assertEqual(os.listdir(small), [], "nothing half-made stays")

    def test_what_cannot_work_is_said_at_the_start(self):
        recipe = self.recipe(steps=20)
        (self.folder / "in_the_way").write_text("a file", encoding="ascii")
        told = self.train(recipe, "a", *EVERY, "--checkpoint.folder", str(self.folder / "in_the_way"),
                          code=1)
        self.assertIn("checkpoint.folder", told)
        self.assertEqual(self.log("a") if (self.folder / "a/log.jsonl").exists() else [], [])
        told = self.train(recipe, "b", *EVERY, "--optimizer.where", "memory", code=2)
        self.assertIn("checkpoint.every is set", told)

    def test_what_a_run_says(self):
        recipe = self.recipe(steps=5)
        words = self.command(recipe, "a", ["--device.0.path", str(self.folder / "a_device"),
                                           "--device.0.rated_endurance", "600TB",
                                           "--train.log_every", "2"])
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
        self.assertRegex(done.stdout, r"written to .*a_device: [\d.]+ MiB by this state, .*% of the .* "
                                      r"the drive is rated for")
        steps = [line for line in done.stdout.splitlines() if re.match(r"step \d+/", line)]
        self.assertEqual([line.split("/")[0] for line in steps], [f"step {n}" for n in (1, 2, 4, 5)])
        for line in steps:
            self.assertLess(len(line), 150)
            self.assertRegex(line, r"/5  loss [\d.]+  grad norm [\d.]+  lr [\d.e-]+  .* tokens/s")
        self.assertIn(" left", steps[0])
        self.assertEqual(done.stdout.count("bytes of a step: host link up "), 1)
        self.assertEqual(len(re.findall("^memory: ", done.stdout, re.MULTILINE)), 2)
        self.assertEqual(len(self.losses("a")), 5, "the log has every step")
        done = subprocess.run([*words, "--json", "--train.steps", "6"], capture_output=True, text=True,
                              timeout=300, check=True)
        wear = [line for line in map(json.loads, done.stdout.splitlines()) if "bytes_written_ever" in line]
        self.assertEqual(len(wear), 1)
        self.assertEqual(wear[0]["rated_endurance_bytes"], 600 * 10**12)
        self.assertGreater(wear[0]["bytes_written_ever"], 6 * 12 * 100000)

    def test_the_best_checkpoint_is_exported_after_training_has_gone_on(self):
        flags = ("--train.validate_every", "2", "--train.keep_best", "true", *self.devices("run", 2))
        self.train(self.recipe(steps=4), "run", *flags)
        self.assertEqual([p.name for p in (self.folder / "run/checkpoints/best").iterdir()], ["step-00000004"])
        then = self.master_weights("run", "then")
        self.train(self.recipe(steps=8), "run", "--train.lr", "3", *flags)  # which makes it worse
        self.assertNotEqual(self.master_weights("run", "now"), then)
        best = self.folder / "run/checkpoints/best"
        for place in (best, best / "step-00000004"):
            out = self.export("run", f"of_{place.name}", "--type", "f32", "--checkpoint", str(place))
            self.assertEqual((out / "model.safetensors").read_bytes(), then)
        told = subprocess.run([SMARTINF, "export", str(self.folder / "run"), "--out", str(self.folder / "none"),
                               "--checkpoint", str(self.folder)], capture_output=True, text=True, check=False)
        self.assertIn("there is no checkpoint", told.stderr)
        spoken = [subprocess.run([SMARTINF, "generate", str(self.folder / "run"), "--prompt", "def", *words],
                                 capture_output=True, check=True).stdout
                  for words in ((), ("--checkpoint", str(best)))]
        self.assertNotEqual(*spoken)


def names(paths):
    return [os.path.basename(path) for path in paths]


if __name__ == "__main__":
    unittest.main()
