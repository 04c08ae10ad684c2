"""The smartinf command on real file systems in small files: full, read-only, failing, with reflinks.

Usage: file_systems_test.py PATH_OF_SMARTINF [unittest's own arguments]
Exit code 77: not root, or a file system or device-mapper target that this machine lacks was skipped,
with a message.
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

SMARTINF = str(pathlib.Path(sys.argv.pop(1)).resolve())
MKFS = {"ext4": ["mkfs.ext4", "-q"], "xfs": ["mkfs.xfs", "-q"], "btrfs": ["mkfs.btrfs", "-q"]}
KINDS = os.environ.get("SMARTINF_TEST_FILE_SYSTEMS", "ext4 xfs btrfs tmpfs").split()
IMAGE_MIB = 400  # the least that mkfs.xfs takes is 300


def quiet(*words):
    return subprocess.run(words, capture_output=True, text=True, check=False)


def run(*words):
    return subprocess.run([SMARTINF, *words], capture_output=True, text=True, timeout=120, check=False)


class Folder(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="smartinf_fs_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def done(self, *words):
        done = run(*words)
        self.assertEqual(done.returncode, 0, f"{words}\n{done.stdout}{done.stderr}")
        return done.stdout

    def refused(self, *words, says):
        done = run(*words)
        self.assertEqual(done.returncode, 1, f"{words}\n{done.stdout}{done.stderr}")
        self.assertIn(says, done.stdout + done.stderr)

    def make_state(self, device, code=0):
        made = run("bench", "step", "--params", "1e6", "--repeat", "1", "--keep", "--device", device,
                   "--io-bytes", "1MiB", "--io-depth", "2")
        self.assertEqual(made.returncode, code, made.stdout + made.stderr)
        return made.stdout + made.stderr

    def mount(self, kind, name="mount"):
        image, point = f"{self.folder}/{name}.img", f"{self.folder}/{name}"
        os.mkdir(point)
        if kind == "tmpfs":
            if quiet("mount", "-t", "tmpfs", "-o", f"size={IMAGE_MIB}m", "tmpfs", point).returncode != 0:
                self.skipTest("no tmpfs can be mounted here")
        else:
            with open(image, "wb") as file:
                file.truncate(IMAGE_MIB << 20)
            if shutil.which(MKFS[kind][0]) is None:
                self.skipTest(f"no {MKFS[kind][0]} (Debian: e2fsprogs, xfsprogs, btrfs-progs)")
            if (quiet(*MKFS[kind], image).returncode != 0
                    or quiet("mount", "-o", "loop", image, point).returncode != 0):
                self.skipTest(f"no {kind} can be mounted here")
        self.addCleanup(quiet, "umount", point)
        return point


class FileSystems(Folder):
    def every(self):
        for kind in KINDS:
            with self.subTest(kind):
                yield kind, self.mount(kind, "mount_" + kind)

    def test_checkpoints_share_blocks_where_the_file_system_can(self):
        for kind, point in self.every():
            self.make_state(point + "/a")
            made = json.loads(self.done("checkpoint", point + "/a", "--out", point + "/kept", "--json"))
            self.assertEqual(made["cloned"], kind in ("xfs", "btrfs"))
            before = json.loads(self.done("inspect", point + "/a", "--json"))["committed_step"]
            self.done("fsck", made["checkpoint"])
            # What the run writes afterwards does not reach the copy.
            trained = run("reshard", "--from", point + "/a", "--to", point + "/b", "--json")
            self.assertEqual(trained.returncode, 0, trained.stderr)
            with open(point + "/a/smartinf.state", "r+b") as state:
                state.seek(4 << 20)
                state.write(bytes(8 << 20))
            self.assertEqual(run("fsck", point + "/a").returncode, 1)
            self.done("fsck", made["checkpoint"])
            self.done("restore", made["checkpoint"], "--device", point + "/c")
            self.done("fsck", point + "/c")
            restored = json.loads(self.done("inspect", point + "/c", "--json"))
            self.assertEqual(restored["committed_step"], before)

    def test_a_full_one_is_said_before_anything_is_written(self):
        for _, point in self.every():
            self.make_state(point + "/a")
            elsewhere = self.folder + "/kept_" + os.path.basename(point)
            kept = self.done("checkpoint", point + "/a", "--out", elsewhere, "--json")
            with open(point + "/filler", "wb") as filler:
                try:
                    while True:
                        filler.write(bytes(1 << 20))
                        filler.flush()
                except OSError:
                    pass
            told = self.make_state(point + "/b", code=1)
            self.assertIn("are free", told)
            self.assertIn("Free space there", told)
            self.refused("restore", json.loads(kept)["checkpoint"], "--device", point + "/b", says="free")
            self.refused("checkpoint", point + "/a", "--out", point + "/kept", says="free")
            self.assertFalse(os.path.exists(point + "/b/smartinf.state"))
            left = os.listdir(point + "/kept") if os.path.exists(point + "/kept") else []
            self.assertEqual(left, [])
            self.done("fsck", point + "/a")

    def test_a_read_only_one_can_be_checked_and_copied_from(self):
        for _, point in self.every():
            self.make_state(point + "/a")
            made = json.loads(self.done("checkpoint", point + "/a", "--out", point + "/kept", "--json"))
            self.assertEqual(quiet("mount", "-o", "remount,ro", point).returncode, 0)
            name = self.folder + "/" + os.path.basename(point)
            self.done("fsck", point + "/a")
            self.done("fsck", made["checkpoint"])
            self.done("inspect", point + "/a")
            self.done("checkpoint", point + "/a", "--out", name + "_kept")
            self.done("restore", made["checkpoint"], "--device", name + "_restored")
            self.done("fsck", name + "_restored")
            self.refused("fsck", point + "/a", "--repair", says="Read-only file system")
            self.assertIn("Read-only file system", self.make_state(point + "/b", code=1))


class DeviceMapper(Folder):
    """Drives with bad places: what cannot be read is named, the rest is checked."""

    def setUp(self):
        super().setUp()
        if shutil.which("dmsetup") is None:
            self.skipTest("no dmsetup (Debian: dmsetup)")
        self.targets = quiet("dmsetup", "targets").stdout
        if "error" not in self.targets:
            self.skipTest("this kernel has no device-mapper: " +
                          quiet("dmsetup", "targets").stderr.strip().split("\n")[0])
        with open(self.folder + "/image", "wb") as file:
            file.truncate(64 << 20)
        made = quiet("losetup", "-f", "--show", self.folder + "/image")
        if made.returncode != 0:
            self.skipTest("no loop device: " + made.stderr.strip())
        self.loop = made.stdout.strip()
        self.addCleanup(quiet, "losetup", "-d", self.loop)
        self.name = f"smartinf{os.getpid()}"
        self.sectors = (64 << 20) // 512

    def table(self, lines, verb):
        done = subprocess.run(["dmsetup", verb, self.name], input="\n".join(lines), text=True,
                              capture_output=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)

    def start(self):
        self.table([f"0 {self.sectors} linear {self.loop} 0"], "create")
        self.addCleanup(quiet, "dmsetup", "remove", "--retry", self.name)
        return "/dev/mapper/" + self.name

    def replace(self, lines):
        quiet("dmsetup", "suspend", self.name)
        self.table(lines, "load")
        quiet("dmsetup", "resume", self.name)

    def test_bad_places_are_named(self):
        device = self.start()
        self.make_state(device)
        self.done("fsck", device)
        bad = 20480  # 10 MiB: in the state
        self.replace([f"0 {bad} linear {self.loop} 0", f"{bad} 64 error",
                      f"{bad + 64} {self.sectors - bad - 64} linear {self.loop} {bad + 64}"])
        self.refused("fsck", device, says="cannot be read")
        self.refused("reshard", "--from", device, "--to", self.folder + "/b", says="cannot read")
        self.assertFalse(os.path.exists(self.folder + "/b/smartinf.state"))

    def test_a_drive_that_fails_now_and_then(self):
        if "flakey" not in self.targets:
            self.skipTest("this kernel has no flakey target (dm-flakey)")
        device = self.start()
        self.make_state(device)
        self.replace([f"0 {self.sectors} flakey {self.loop} 0 0 60"])
        self.refused("fsck", device, says="I/O error")
        self.replace([f"0 {self.sectors} linear {self.loop} 0"])
        self.done("fsck", device)


if __name__ == "__main__":
    if os.geteuid() != 0:
        print("file systems can be mounted by root only: skipped")
        sys.exit(77)
    ran = unittest.main(verbosity=2, exit=False).result
    sys.exit(1 if not ran.wasSuccessful() else 77 if ran.skipped else 0)
