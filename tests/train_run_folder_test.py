"""Whose state it is: a run's folder and its devices know each other, and neither goes on with what is
another's."""
import fcntl
import json
import os
import pathlib
import shutil
import subprocess
import unittest

from train_runs import SMARTINF, TrainCase


class RunFolders(TrainCase):
    def smartinf(self, *words, code=0, cwd=None):
        done = subprocess.run([SMARTINF, *map(str, words)], capture_output=True, text=True, timeout=300,
                              check=False, cwd=cwd)
        self.assertIn(done.returncode, code if isinstance(code, tuple) else (code,), done.stdout + done.stderr)
        return done.stdout + done.stderr

    def start(self, recipe, run, *flags, code=0):
        return self.smartinf(*self.command(recipe, run, flags)[1:], code=code)

    def digits(self, run):
        return json.loads((self.folder / run / "run.json").read_text())["run"][:8]

    def steps(self, run):
        return [step for step, _ in self.losses(run)]

    def tree(self):
        """Names and contents of all that is there, but for the stores' locks."""
        return {path: path.is_file() and path.read_bytes() for path in self.folder.rglob("*")
                if path.name != "smartinf.lock"}

    def test_a_folder_that_never_saw_the_run_is_refused_before_anything_is_written(self):
        recipe, devices = self.recipe(steps=4), self.devices("own", 2)
        self.train(recipe, "own", *devices)
        before = self.tree()
        told = self.start(recipe, "fresh", *devices, "--train.seed", "77", "--train.steps", "6", code=1)
        run = self.digits("own")
        for word in ("own_device0", "own_device1", f"run {run}", "step 4", str(self.folder / "own"),
                     f"--take-over {run}", f"--start-over {run}"):
            self.assertIn(word, told)
        self.assertEqual(self.tree(), before)
        # A folder with a history of its own is not another's either.
        self.train(recipe, "other")
        told = self.start(recipe, "other", *devices, code=1)
        self.assertIn(f"is the folder of run {self.digits('other')}", told)
        # Only the run that is there can be named, and never by nothing.
        for flag in ("--take-over", "--start-over"):
            self.start(recipe, "fresh", *devices, flag, "00000000", code=1)
            self.start(recipe, "fresh", *devices, flag, run[:4], code=2)
        self.assertFalse((self.folder / "fresh").exists())

    def test_taking_over_and_starting_over(self):
        recipe, devices = self.recipe(steps=6), self.devices("own", 2)
        self.train(recipe, "plain")
        self.train(recipe, "own", *devices, "--train.steps", "3")
        run = self.digits("own")
        self.start(recipe, "taker", *devices, "--take-over", run)
        self.assertEqual(self.steps("taker"), [4, 5, 6])
        self.assertEqual(self.log("taker")[0],
                         {"step": 3, "taken_over": run + self.log("taker")[0]["taken_over"][8:],
                          "from": str(self.folder / "own")})
        self.assertEqual(self.digits("taker"), run)
        # The other folder has fallen behind: its log does not jump.
        told = self.start(recipe, "own", *devices, "--train.steps", "8", code=1)
        self.assertIn("ends at step 3", told)
        self.assertIn(f"that run was resumed in {self.folder / 'taker'}", told)
        # Naming it once more is harmless, and so is a complete run.
        self.start(recipe, "taker", *devices, "--take-over", run)
        self.assertEqual(self.steps("taker"), [4, 5, 6])

        self.start(recipe, "own", *devices, "--start-over", run)
        self.assertEqual(self.losses("own"), self.losses("plain"))
        self.assertEqual(self.steps("own"), [1, 2, 3, 4, 5, 6])
        self.assertEqual(len((self.folder / "own/log.jsonl.1").read_text().splitlines()), 4)
        self.assertNotEqual(self.digits("own"), run)
        # The same command again does not delete what it has made.
        self.start(recipe, "own", *devices, "--start-over", run, code=1)
        self.assertEqual(self.steps("own"), [1, 2, 3, 4, 5, 6])

    def test_nothing_is_erased_before_the_new_run_is_known_to_begin(self):
        recipe, devices = self.recipe(steps=2), self.devices("own", 2)
        self.train(recipe, "own", *devices, "--checkpoint.every", "2")
        self.train(recipe, "other", *self.devices("other", 1))
        run = self.digits("own")

        def states():
            return {path: path.read_bytes() for path in self.folder.rglob("smartinf.state")}

        before = states()
        own0, own1 = (self.folder / f"own_device{i}" for i in (0, 1))
        part = self.folder / "own/checkpoints/step-00000002/device-"
        wide = ("--model.width", "192")
        with open(own1 / "smartinf.state", "rb") as second:
            fcntl.flock(second, fcntl.LOCK_EX)
            told = self.start(recipe, "new", *devices, "--start-over", run, code=1)
            self.assertIn("own_device1", told)
        self.assertEqual(states(), before)
        for flags, says in (((*devices, *wide, "--device.0.capacity", "1MiB", "--device.1.capacity", "1MiB"), "needs"),
                            ((*devices, "--device.0.bandwidth", "1"), "bandwidth"),
                            ((*devices, "--engine.memory_budget", "1MiB"), "memory budget"),
                            ((*devices, "--optimizer.overlap", "early", "--compress.density", "0.3"), "compressed"),
                            ((*devices, "--optimizer.overlap", "early", "--engine.durability", "none"), "durability"),
                            ((*devices, "--device.1.processor", "opencl:none"), "OpenCL"),
                            ((*devices, "--device.2.path", own1), "also the path of device 1"),
                            ((*devices, "--device.2.path", self.folder / "other_device0"), "other_device0"),
                            (("--device.0.path", f"{part}0", "--device.1.path", f"{part}1"), "part of a checkpoint")):
            with self.subTest(flags=flags):
                told = self.start(recipe, "new", *map(str, flags), "--start-over", run, code=(1, 2))
                self.assertIn(says, told)
                self.assertEqual(states(), before, told)
        # What the old state takes is room for the new one.
        self.start(recipe, "new", *devices, "--device.0.capacity", str(own0.joinpath("smartinf.state").stat().st_size * 5 // 4),
                   "--start-over", run)
        self.assertEqual(self.steps("new"), [1, 2])

    @unittest.skipIf(os.geteuid() != 0, "only root can mount a small file system")
    def test_the_room_of_the_old_state_counts_for_the_new_one(self):
        recipe = self.recipe(steps=2)
        self.train(recipe, "sized")
        room = (self.folder / "sized/state/smartinf.state").stat().st_size * 3 // 2
        small = self.folder / "small"
        small.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", small], check=False).returncode != 0:
            self.skipTest("no tmpfs can be mounted here")
        self.addCleanup(subprocess.run, ["umount", small], check=False)
        device = ("--device.0.path", str(small / "d"))
        self.train(recipe, "own", *device)
        kept = (small / "d/smartinf.state").read_bytes()
        told = self.start(recipe, "own", *device, "--model.layers", "4", "--start-over", self.digits("own"), code=1)
        self.assertIn("nothing was erased", told)
        self.assertEqual((small / "d/smartinf.state").read_bytes(), kept)
        self.start(recipe, "own", *device, "--start-over", self.digits("own"))
        self.assertEqual(self.losses("own"), self.losses("sized"))

    def test_a_restored_state_comes_back_by_the_line_that_restore_prints(self):
        recipe = self.recipe(steps=6)
        every = ["--checkpoint.every", "2", "--checkpoint.keep", "0"]
        self.train(recipe, "a", *every)
        weights, losses = self.master_weights("a"), self.losses("a")
        checkpoint = self.folder / "a/checkpoints/step-00000002"
        told = self.smartinf("restore", checkpoint, "--device", self.folder / "a/state", "--replace")
        words = told.split("smartinf train RECIPE ")[1].split()
        self.start(recipe, "a", *every, code=1)
        self.start(recipe, "a", *every, *words)
        self.assertEqual(self.losses("a"), losses)
        self.assertEqual(self.master_weights("a", "again"), weights)
        cut = [json.loads(line) for line in (self.folder / "a/log.jsonl.1").read_text().splitlines()]
        self.assertEqual([line["step"] for line in cut if "loss" in line], [3, 4, 5, 6])
        told = self.smartinf("reshard", "--from", self.folder / "a", "--to", self.folder / "d")
        words = told.split("smartinf train RECIPE ")[1].split()
        self.start(recipe, "a", *words, "--train.steps", "7")
        self.assertEqual(self.steps("a"), [1, 2, 3, 4, 5, 6, 7])

    def test_a_folder_of_an_earlier_version_is_known_by_its_log(self):
        recipe, devices = self.recipe(steps=3), self.devices("a", 2)
        self.train(recipe, "a", *devices)
        (self.folder / "a/run.json").unlink()
        log = (self.folder / "a/log.jsonl").read_text()
        # A step more than the devices': its commit was lost.
        (self.folder / "a/log.jsonl").write_text(log + '{"step":4,"loss":1.0}\n')
        self.start(recipe, "a", *devices, "--train.steps", "4")
        self.assertEqual(self.steps("a"), [1, 2, 3, 4])
        for lines, says in (("", "has trained nothing"), (log, "has trained 3 steps"),
                            (log + '{"step":9}\n', "has trained 9 steps")):
            (self.folder / "a/run.json").unlink(missing_ok=True)
            (self.folder / "a/log.jsonl").write_text(lines)
            self.assertIn(says, self.start(recipe, "a", *devices, "--train.steps", "5", code=1))
            self.assertEqual((self.folder / "a/log.jsonl").read_text(), lines)

    def test_devices_that_are_older_than_the_log(self):
        recipe = self.recipe(steps=3)
        self.train(recipe, "a")
        shutil.copytree(self.folder / "a/state", self.folder / "old")
        self.train(recipe, "a", "--train.steps", "6")
        losses = self.losses("a")
        shutil.rmtree(self.folder / "a/state")
        (self.folder / "old").rename(self.folder / "a/state")
        told = self.start(recipe, "a", "--train.steps", "6")
        for word in ("has steps up to 6", "hold step 3", "older copy", "log.jsonl.1"):
            self.assertIn(word, told)
        self.assertEqual(self.losses("a"), losses)
        cut = [json.loads(line) for line in (self.folder / "a/log.jsonl.1").read_text().splitlines()]
        self.assertEqual([line["step"] for line in cut if "loss" in line], [4, 5, 6])

    def test_changed_keys_are_told_and_a_start_that_trains_nothing_changes_nothing(self):
        recipe = self.recipe(steps=4)
        self.train(recipe, "a")
        told = self.start(recipe, "a", "--train.steps", "6", "--train.warmup_steps", "2")
        self.assertIn("train.steps: 4 -> 6\n", told)
        self.assertIn("train.warmup_steps: 4 -> 2\n", told)
        self.assertIn("resuming at step 5\n", told)
        self.assertEqual(told.count(" -> "), 2)
        self.assertNotIn("changed", self.start(recipe, "a", "--train.steps", "6", "--train.warmup_steps", "2"))
        before = self.tree()
        told = self.start(recipe, "a", "--train.steps", "2")
        self.assertIn("nothing to train: the run is at step 6, and train.steps is 2", told)
        self.assertIn("train.steps: 6 -> 2\n", told)
        after = self.tree()
        changed = [path for path in after if after[path] != before.get(path)]
        self.assertEqual([path.name for path in changed], [])
        lines = subprocess.run(self.command(recipe, "a", ["--json", "--train.steps", "2"]),
                               capture_output=True, text=True, check=True).stdout.splitlines()
        self.assertIn({"resumed_after_step": 6, "steps_left": 0,
                       "changed": {"train.steps": ["6", "2"], "train.warmup_steps": ["2", "4"]}},
                      [json.loads(line) for line in lines])

    def test_a_copy_is_of_the_copied_devices(self):
        recipe = self.recipe(steps=3)
        self.smartinf("train", recipe, "--train.run", "A", cwd=self.folder)
        shutil.copytree(self.folder / "A", self.folder / "B")
        self.smartinf("train", recipe, "--train.run", "A", "--train.steps", "5", cwd=self.folder)
        elsewhere = self.folder / "elsewhere"
        elsewhere.mkdir()
        for cwd, b in ((self.folder, "B"), (elsewhere, "../B"), (elsewhere, self.folder / "B")):
            self.assertIn(f"{b}/state: step 3", self.smartinf("fsck", b, cwd=cwd))
            self.assertIn(f"device           {b}/state\n", self.smartinf("inspect", b, cwd=cwd))
            self.assertIn("step 3", self.smartinf("checkpoint", b, "--out", self.folder / "kept", cwd=cwd))
            self.assertIn("of step 3", self.smartinf("export", b, "--out", self.folder / "out", cwd=cwd))
            shutil.rmtree(self.folder / "out")
        self.smartinf("reshard", "--from", "../B", "--to", "c", cwd=elsewhere)
        self.assertIn("step 3", self.smartinf("fsck", elsewhere / "c"))
        # Going on with the copy's own recipe, too, and not at the cost of the original.
        original = self.smartinf("fsck", self.folder / "A")
        self.smartinf("train", "../B/recipe.toml", "--train.steps", "4", cwd=elsewhere)
        self.assertEqual(self.steps("B"), [1, 2, 3, 4])
        self.assertEqual(self.smartinf("fsck", self.folder / "A"), original)
        self.assertEqual(os.listdir(elsewhere), ["c"])
        # A moved one keeps the devices outside of it.
        self.smartinf("train", recipe, "--train.run", "C", "--device.0.path", "out_of_c", cwd=self.folder)
        (self.folder / "C").rename(elsewhere / "D")
        self.assertIn("out_of_c: step 3", self.smartinf("fsck", "D", cwd=elsewhere))
        self.smartinf("train", "D/recipe.toml", "--train.steps", "4", cwd=elsewhere)
        record = json.loads((elsewhere / "D/run.json").read_text())
        self.assertEqual(record["devices"], [str(self.folder / "out_of_c")])

    def test_the_first_device_may_be_one_that_nothing_falls_to(self):
        recipe, devices = self.recipe(steps=4), self.devices("own", 2)
        self.train(recipe, "plain")
        for steps in (2, 4):
            told = self.start(recipe, "own", *devices, "--device.0.bandwidth", 1, "--device.1.bandwidth", 1e6,
                              "--train.steps", steps)
            self.assertIn("own_device0 is left out", told)
        self.assertEqual(self.losses("own"), self.losses("plain"))

    def test_a_device_whose_name_cannot_be_shown_is_refused_before_anything_is_written(self):
        recipe = self.recipe(steps=2)
        for name in ("tab\there", "new\nline", "\x1b[31m"):
            told = self.start(recipe, name, code=2)
            self.assertIn("control characters", told)
            self.assertNotIn("\x1b", told)
            self.assertFalse((self.folder / name / "state").exists())

    def test_a_log_that_cannot_be_written_costs_the_log_and_not_the_run(self):
        recipe = self.recipe(steps=4)
        self.train(recipe, "plain")
        log = pathlib.Path("/dev/full")
        run = self.folder / "a"
        self.train(recipe, "a", "--train.steps", "1")
        kept = (run / "log.jsonl").read_text()
        # What every write to it fails on as on a full disk.
        (run / "log.jsonl").unlink()
        (run / "log.jsonl").symlink_to(log)
        told = self.start(recipe, "a")
        self.assertEqual(told.count("No space left on device; the run goes on"), 1, told)
        self.assertIn("lines of this run are missing in", told)
        self.assertIn("step 4/4", told)
        self.assertEqual(self.master_weights("a"), self.master_weights("plain"))
        # Found when it is started again, with the folder that it has always had.
        (run / "log.jsonl").unlink()
        (run / "log.jsonl").write_text(kept)
        told = self.start(recipe, "a", "--train.steps", "5")
        self.assertIn("ends at step 1, but the devices hold step 4", told)
        self.assertEqual(self.steps("a"), [1, 5])


if __name__ == "__main__":
    unittest.main()
