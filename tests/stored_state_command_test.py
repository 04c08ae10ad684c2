"""The commands about states that are stored: fsck, checkpoint, restore, reshard, gc.

Usage: stored_state_command_test.py PATH/TO/smartinf PROJECT_ROOT
"""
import fcntl
import json
import os
import pathlib
import shutil
import tempfile
import unittest

from command import make_state, run


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


class Fsck(unittest.TestCase):
    def check(self, *words):
        done = run("fsck", "--json", *words)
        return done.returncode, json.loads(done.stdout)

    def test_a_sound_run(self):
        with tempfile.TemporaryDirectory() as folder:
            make_state([folder + "/a", folder + "/b"])
            code, found = self.check(folder + "/a", folder + "/b")
            self.assertEqual((code, found["sound"], found["problem"], found["note"]), (0, True, "", ""))
            self.assertGreaterEqual(found["step"], 1)
            for device in found["devices"]:
                self.assertGreater(device["blocks_checked"], 0)
                self.assertEqual(device["faults"], [])
            code, found = self.check(folder + "/b")
            self.assertEqual(code, 0)
            self.assertIn("device 0 of the 2", found["note"])
            self.assertIn("sound", run("fsck", folder + "/a", folder + "/b").stdout)

    def test_every_kind_of_block_is_found_and_copies_are_repaired(self):
        with tempfile.TemporaryDirectory() as folder:
            make_state(folder)
            file = folder + "/smartinf.state"
            metadata_end = 4 * 65536 + 2 * 4096
            step = json.loads(run("inspect", folder, "--json").stdout)["committed_step"]
            copies = [(65536 * copy + 100, "superblock") for copy in range(4)]
            copies += [(4 * 65536 + 4096 * copy + 80, "layout") for copy in range(2)]
            # Two copies of the table of even steps, then two of odd ones: header, records, 64 KiB.
            size = pathlib.Path(file).stat().st_size
            stride = next(n for n in range(65536, 1 << 20, 4096) if table_at(file, metadata_end, n, step))
            copies += [(metadata_end + (step % 2 * 2 + copy) * stride + 60, "table") for copy in range(2)]
            for offset, kind in copies:
                with self.subTest(kind=kind, offset=offset):
                    flip(file, offset)
                    code, found = self.check(folder)
                    self.assertEqual(code, 1)
                    self.assertEqual([f["kind"] for f in found["devices"][0]["faults"]], [kind])
                    self.assertFalse(found["devices"][0]["state_lost"])
                    code, found = self.check(folder, "--repair")
                    self.assertEqual((code, found["devices"][0]["faults_repaired"]), (0, 1))
                    self.assertEqual(self.check(folder)[0], 0)
            # State: one of the two slots of a plane is current, so of two flips one is found.
            first = metadata_end + 4 * stride
            blocks = 0
            for offset in range(first + 5, size, 262144):
                flip(file, offset)
                code, found = self.check(folder, "--repair")
                if code == 1:
                    blocks += 1
                    self.assertTrue(found["devices"][0]["state_lost"])
                    self.assertEqual([f["kind"] for f in found["devices"][0]["faults"]], ["block"])
                flip(file, offset)
            self.assertEqual(self.check(folder)[0], 0)
            self.assertGreaterEqual(blocks, 12, "of five current blocks of each of three planes")

    def test_what_cannot_be_checked(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(run("fsck", folder).returncode, 1)
            make_state([folder + "/a", folder + "/b"])
            shutil.copytree(folder + "/a", folder + "/copy")
            code, found = self.check(folder + "/a", folder + "/copy")
            self.assertEqual(code, 1)
            self.assertIn("two devices say", found["problem"])
            os.truncate(folder + "/a/smartinf.state", 300000)
            code, found = self.check(folder + "/a", folder + "/b")
            self.assertEqual(code, 1)
            self.assertTrue(found["devices"][0]["state_lost"])
            self.assertTrue(not found["devices"][1]["state_lost"])
            told = run("fsck", folder + "/a", folder + "/b").stdout
            self.assertIn("state is lost", told)
            self.assertNotIn("resumes after", told)

    def test_values_that_make_no_sense(self):
        for words in (("fsck", "x", "--memory-budget", "0"), ("checkpoint", "x", "--out", "y", "--keep=-1"),
                      ("checkpoint", "x", "--out", "y", "--memory-budget", "1000"),
                      ("reshard", "--from", "x", "--to", "y", "--memory-budget", "0")):
            with self.subTest(words=words):
                done = run(*words)
                self.assertEqual(done.returncode, 2, done)
                self.assertIn(words[-1].split("=")[0] if "=" in words[-1] else words[-2], done.stderr)


class Copies(unittest.TestCase):
    def state_of(self, folder):
        return json.loads(run("inspect", folder, "--json").stdout)

    def done(self, *words):
        done = run(*words, "--json")
        self.assertEqual(done.returncode, 0, done)
        return json.loads(done.stdout)

    def test_checkpoint_restore_and_reshard(self):
        with tempfile.TemporaryDirectory() as folder:
            a, b, c, d = (folder + "/" + name for name in "abcd")
            make_state([a, b])
            step = self.state_of(a)["committed_step"]
            no_place = run("checkpoint", a, b)
            self.assertEqual(no_place.returncode, 2)
            self.assertIn("--out DIR", no_place.stderr)
            one_missing = run("checkpoint", a, "--out", folder + "/kept")
            self.assertEqual(one_missing.returncode, 1)
            self.assertIn("missing", one_missing.stderr)

            made = self.done("checkpoint", a, b, "--out", folder + "/kept")
            self.assertEqual(made["step"], step)
            self.assertEqual(made["checkpoint"], f"{folder}/kept/step-{step:08}")
            self.assertTrue(self.done("checkpoint", a, b, "--out", folder + "/kept")["existed"])
            self.assertEqual(run("fsck", made["checkpoint"]).returncode, 0)

            refused = run("restore", made["checkpoint"], "--device", a)
            self.assertEqual(refused.returncode, 1)
            self.assertIn("already holds run", refused.stderr)
            self.assertEqual(run("restore", a, "--device", c).returncode, 1)
            back = self.done("restore", made["checkpoint"], "--device", c)
            self.assertEqual((back["step"], back["blocks_without_checksum"]), (step, 0))
            self.assertEqual(self.state_of(c)["elements"], self.state_of(c)["run_elements"])
            self.assertNotEqual(self.state_of(c)["run"], self.state_of(a)["run"])
            self.assertEqual(run("fsck", c).returncode, 0)

            moved = self.done("reshard", "--from", c, "--to", d, "--state-format", "bf16", "--master", "m24")
            self.assertEqual(self.state_of(d)["state_format"], "m24+bf16")
            self.assertEqual(self.state_of(d)["committed_step"], step)
            self.assertLess(moved["state_bytes"], back["state_bytes"])
            self.assertEqual(run("fsck", d).returncode, 0)
            self.assertEqual(run("reshard", "--from", d, "--to", d).returncode, 2)

            self.done("restore", made["checkpoint"], "--device", a, "--device", d, "--replace")
            self.assertEqual(self.state_of(d)["state_format"], "f32")
            self.assertEqual(run("fsck", a, d).returncode, 0)
            # The old state stays until the new one is whole, also when a later target cannot take its part.
            pathlib.Path(folder, "file").write_bytes(b"x")
            before = self.state_of(a)
            refused = run("restore", made["checkpoint"], "--device", a, "--device", folder + "/file", "--replace")
            self.assertNotEqual(refused.returncode, 0)
            self.assertEqual(self.state_of(a), before)
            # A description over the devices of another checkpoint is no checkpoint.
            mixed = folder + "/mixed"
            shutil.copytree(made["checkpoint"], mixed)
            other = self.done("checkpoint", c, "--out", folder + "/other")["checkpoint"]
            shutil.copy(other + "/checkpoint.json", mixed)
            for words in (("fsck", mixed), ("restore", mixed, "--device", folder + "/e"),
                          ("reshard", "--from", mixed, "--to", folder + "/e")):
                refused = run(*words)
                self.assertEqual(refused.returncode, 1, refused)
                self.assertIn("was put together from others", refused.stderr)
            self.assertFalse(os.path.exists(folder + "/e"))
            # Nothing is deleted for a checkpoint that turns out to be damaged.
            flip(made["checkpoint"] + "/device-0/smartinf.state", 1 << 20)
            self.assertEqual(run("fsck", made["checkpoint"]).returncode, 1)
            damaged = run("restore", made["checkpoint"], "--device", a, "--replace")
            self.assertEqual(damaged.returncode, 1)
            self.assertIn("nothing was replaced", damaged.stderr)
            self.assertEqual(run("fsck", a, d).returncode, 0)

    def test_gc(self):
        with tempfile.TemporaryDirectory() as folder:
            make_state(folder + "/a")
            other = pathlib.Path(folder) / "b"
            other.mkdir()
            (other / "smartinf.state.creating").write_bytes(bytes(100000))
            partial = pathlib.Path(folder) / "kept/step-00000007.partial"
            (partial / "device-0").mkdir(parents=True)
            (partial / "device-0/smartinf.state").write_bytes(b"x")

            def kinds(*words):
                done = run("gc", folder, "--json", *words)
                self.assertEqual(done.returncode, 0, done)
                return sorted((one["kind"], one["deleted"]) for one in json.loads(done.stdout)["leftovers"])

            # The checkpoint is of just now: somebody may be writing it.
            self.assertEqual(kinds(), [("interrupted creation", False)])
            for path in (*partial.rglob("*"), partial):
                os.utime(path, (1, 1))
            self.assertEqual([kind for kind, _ in kinds()],
                             ["interrupted checkpoint", "interrupted creation"])
            asked = run("gc", folder)
            self.assertIn("nothing was deleted", asked.stdout)
            self.assertTrue(partial.exists())
            self.assertEqual(len(kinds("--yes")), 2)
            self.assertFalse(partial.exists())
            self.assertEqual(os.listdir(other), ["smartinf.lock"])
            self.assertEqual(kinds(), [])
            # A whole state is deleted only when asked for, and never one in use.
            self.assertTrue(os.path.exists(folder + "/a/smartinf.state"))
            with open(folder + "/a/smartinf.lock", "w", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self.assertEqual(kinds("--states", "--yes"), [])
            (pathlib.Path(folder) / "recipe.toml").write_text("", encoding="utf-8")
            self.assertEqual(kinds("--states", "--yes"), [])
            os.unlink(folder + "/recipe.toml")
            # Nor because it is offered: by the name of its run alone.
            run_id = self.state_of(folder + "/a")["run"]
            self.assertEqual(kinds("--states", "--yes"), [("state without a run's folder", False)])
            told = run("gc", folder, "--states", "--yes").stdout
            self.assertIn(f"run {run_id[:8]}, step ", told)
            self.assertIn(f"use --delete-run {run_id[:8]} to delete it", told)
            self.assertEqual(run("gc", folder, "--delete-run", run_id[:4]).returncode, 2)
            self.assertEqual(run("gc", folder, "--delete-run", "00000000").returncode, 1)
            self.assertTrue(os.path.exists(folder + "/a/smartinf.state"))
            # A recipe that names it is enough to keep it, even against its name.
            recipe = pathlib.Path(folder) / "sub/mine.toml"
            recipe.parent.mkdir()
            recipe.write_text(f'[[device]]\npath = "{folder}/a"\n', encoding="utf-8")
            refused = run("gc", folder, "--delete-run", run_id[:8])
            self.assertEqual(refused.returncode, 1)
            self.assertIn("mine.toml", refused.stderr)
            recipe.unlink()
            self.assertEqual(kinds("--delete-run", run_id[:8]), [("state without a run's folder", True)])
            self.assertFalse(os.path.exists(folder + "/a/smartinf.state"))

    def test_gc_deletes_nothing_that_is_not_smartinfs(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name in ("step-1-draft.partial/thesis.tex", "step-00000001.partial/thesis.tex",
                         "step-00000002.partial/device-0/smartinf.state", "step-00000002.partial/notes.txt",
                         "model.partial/model.safetensors", "other.0a1b2c3d.partial/.smartinf-export",
                         "other.0a1b2c3d.partial/notes.txt"):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text("work", encoding="ascii")
            (root / "step-00000003.partial").symlink_to(root / "step-00000001.partial")
            for path in root.rglob("*"):
                os.utime(path, (1, 1), follow_symlinks=False)
            before = sorted(root.rglob("*"))
            done = run("gc", folder, "--yes", "--states")
            self.assertEqual(done.returncode, 0, done)
            self.assertEqual(sorted(root.rglob("*")), before, done.stdout)
            self.assertIn("step-00000001.partial: holds files that are not smartinf's", done.stdout)
            # What a killed export leaves is its own, and so is what one that runs is writing.
            (root / "other.0a1b2c3d.partial/notes.txt").unlink()
            with open(root / "other.0a1b2c3d.partial/.smartinf-export", encoding="ascii") as mark:
                fcntl.flock(mark, fcntl.LOCK_EX)
                self.assertIn("was written to within the last ten minutes",
                              run("gc", folder, "--yes").stdout)
                self.assertTrue((root / "other.0a1b2c3d.partial").exists())
            self.assertIn("interrupted export", run("gc", folder, "--yes").stdout)
            self.assertFalse((root / "other.0a1b2c3d.partial").exists())
            self.assertTrue((root / "model.partial/model.safetensors").exists())


def table_at(file, begin, stride, step):
    with open(file, "rb") as state:
        state.seek(begin + (step % 2 * 2 + 1) * stride)
        return state.read(8) == b"SMRTINFT"


if __name__ == "__main__":
    unittest.main()
