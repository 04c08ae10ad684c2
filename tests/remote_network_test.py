"""A server and its client on two hosts of their own with a bad wire between them: lossy, slow, late, out of order, cut;
and either side killed. What is committed has the bits of a local device that took as many steps. Needs root, ip and
/dev/net/tun. SMARTINF_TEST_KILLS: how many random moments.

Usage: remote_network_test.py [unittest's own arguments] PATH/TO/smartinf PROJECT_ROOT
"""
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from command import COMMAND, run
from network_wire import ADDRESSES, Wire
from served import Authority, Server, with_environment

MOMENTS = int(os.environ.get("SMARTINF_TEST_KILLS", "3"))
PARAMS = 300000
STATE_BYTES = 12 * PARAMS
STEP = ["bench", "step", "--params", str(PARAMS), "--io-bytes", "1048576", "--io-depth", "2", "--keep"]
# A client that has lost its server for good: signs of life 2 * 10 s apart, connecting again, and a busy machine.
GIVES_UP = ["--remote-reconnect", "5", "--remote-deadline", "10"]
GIVES_UP_S = 90


class RemoteNetwork(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(prefix="smartinf_test_")
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        self.draw = random.Random(os.environ.get("SMARTINF_TEST_SEED", "7"))
        told = run("certificates", "--ca", str(self.folder / "x"), "--list").stderr
        if "without" in told or "made without" in run("serve", str(self.folder / "x")).stderr:
            self.skipTest("built without OpenSSL or gRPC")
        self.wire = self.enterContext(Wire())
        self.authority = Authority(COMMAND, self.folder / "ca", addresses=ADDRESSES)
        self.server = Server(self.authority, self.folder / "server", host=ADDRESSES[1], on=self.wire.on(1),
                             keys="lease_seconds = 10\nkeepalive_seconds = 2\n")
        self.enterContext(self.server)
        self.url = self.server.url()

    def start(self, *words):
        return subprocess.Popen([*self.wire.on(0), COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                text=True, env=with_environment(self.authority.environment()))

    def end(self, process, timeout=GIVES_UP_S):
        """What it said of errors; it must come to its end in time."""
        return process.communicate(timeout=timeout)[1]

    def done(self, *words):
        process = self.start(*words)
        out, err = process.communicate(timeout=300)
        self.assertEqual(process.returncode, 0, out + err)
        return out

    def committed(self):
        return json.loads(self.done("inspect", self.url, "--json"))["committed_step"]

    def state(self, folder, remote):
        """The bytes of a device's state, which stand at the end of its copy."""
        (self.done if remote else run)("checkpoint", self.url if remote else str(self.folder / folder), "--out",
                                       str(self.folder / f"copy-{folder}"))
        (copy,) = (self.folder / f"copy-{folder}").rglob("smartinf.state")
        return copy.read_bytes()[-STATE_BYTES:]

    def check_bits(self):
        """Each round of the command takes two steps."""
        self.assertIn("sound", self.done("fsck", self.url))
        steps = self.committed()
        self.assertEqual(steps % 2, 0)
        (self.folder / "local").mkdir()
        run(*STEP, "--repeat", str(steps // 2), "--device", str(self.folder / "local"))
        self.assertEqual(self.state("remote", True), self.state("local", False))

    def test_a_bad_wire_changes_no_bit(self):
        for shape in ({"loss": 0.01}, {"delay_s": 0.02}, {"bits_per_s": 100e6}, {"delay_s": 0.001, "jitter_s": 0.004},
                      {"loss": 0.01, "delay_s": 0.02}):
            self.wire.shape(**shape)
            began = time.monotonic()
            self.done(*STEP, "--repeat", "3", "--device", self.url)
            print(f"{shape}: 6 steps of {PARAMS} parameters and three openings in {time.monotonic() - began:.1f} s")
        self.wire.shape()
        self.check_bits()

    def test_a_wire_that_is_cut_for_a_while_costs_nothing(self):
        for _ in range(MOMENTS):
            process = self.start(*STEP, "--repeat", "20", "--device", self.url)
            time.sleep(self.draw.uniform(0.5, 3))
            self.wire.cut()
            time.sleep(5)
            self.wire.mend()
            err = self.end(process, 200)
            # Whoever was about to connect for the first time is not kept waiting.
            self.assertTrue(process.returncode == 0 or "no connection" in err, err)
        self.until_even()
        self.check_bits()

    def until_even(self):
        for _ in range(20):
            if self.committed() % 2 == 0:
                return
            self.disturb(self.kill_client)
        self.fail("no even number of steps")

    def disturb(self, act):
        before = self.committed() if (self.server.folder / "fast0/smartinf.state").exists() else 0
        process = self.start(*STEP, "--repeat", "1000", *GIVES_UP, "--device", self.url)
        time.sleep(self.draw.uniform(0.5, 3))
        act(process)
        err = self.end(process)
        self.assertNotEqual(process.returncode, 0)
        self.wire.mend()
        if self.server.process.poll() is not None:
            self.server.start()
        time.sleep(11)  # the lease of a client that vanished
        self.assertGreaterEqual(self.committed(), before, err)

    def kill_client(self, process):
        process.kill()

    def kill_server(self, _):
        self.server.end(signal.SIGKILL)

    def stop_server(self, _):
        self.server.end(signal.SIGTERM)

    def cut_for_ever(self, _):
        self.wire.cut()

    def test_whoever_dies_and_whatever_is_cut_loses_no_committed_step(self):
        for _ in range(MOMENTS):
            for act in (self.kill_client, self.kill_server, self.stop_server, self.cut_for_ever):
                self.disturb(act)
        self.until_even()
        self.check_bits()


if __name__ == "__main__":
    result = unittest.main(exit=False).result
    sys.exit(1 if not result.wasSuccessful() else 77 if result.skipped else 0)
