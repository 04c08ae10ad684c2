"""Training over bad networks: packets that are lost, late or out of order, a slow link, one that is cut for 5 s, for 60 s
or for ever; and both sides killed or stopped meanwhile, at random moments. Runs side by side, each between two hosts of
its own. No committed step may be lost, nobody may hang, and each run's losses, weights and state must have the bits of a
run on a local device. Needs root, ip and /dev/net/tun. SMARTINF_TEST_KILLS: how many random moments of each kind;
SMARTINF_TEST_LANES: how many runs at once; SMARTINF_TEST_KINDS: of which kinds, with commas between ("cut for 5 s").

Usage: remote_network_test.py [unittest's own arguments] PATH/TO/smartinf PROJECT_ROOT
"""
import concurrent.futures
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

from command import COMMAND, run
from network_wire import ADDRESSES, Wire
from served import Authority, Server, small_recipe, what_it_made

MOMENTS = int(os.environ.get("SMARTINF_TEST_KILLS", "3"))
LANES = int(os.environ.get("SMARTINF_TEST_LANES", "6"))
KINDS = os.environ.get("SMARTINF_TEST_KINDS", "").split(",")
SEED = os.environ.get("SMARTINF_TEST_SEED", "7")
STEPS = 300
KEEPALIVE_S = 20  # 10 s between a client's signs of life, and 10 s until one that is missing breaks the connection
CONNECT_S = 20  # gRPC waits so long for a connection that nobody answers
BUSY_S = 50  # more, on a busy machine
WIRES = {"1 % lost": {"loss": 0.01}, "20 ms late": {"delay_s": 0.02}, "100 Mbit/s": {"bits_per_s": 100e6},
         "out of order": {"delay_s": 0.001, "jitter_s": 0.004}}
CLEAN = dict.fromkeys(("loss", "delay_s", "jitter_s", "bits_per_s"), 0)
CUTS = {"cut for 60 s": 60, "cut for ever": None, "cut for 5 s": 5}


class Client:
    """`smartinf train`, whose lines are read as they come."""

    def __init__(self, command, folder):
        self.step = 0
        self.opened = False
        self.wrong = ""
        with open(folder / "errors", "wb") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        self.errors = folder / "errors"
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self):
        for text in self.process.stdout:
            if not text.endswith("\n"):  # killed
                return
            line = json.loads(text)
            if "resumed_after_step" in line and line["resumed_after_step"] < self.step - 1:
                self.wrong = f"{line['resumed_after_step']} is committed after step {self.step} was done"
            if "resumed_after_step" in line or "loss" in line:
                self.opened = True
                self.step = line.get("resumed_after_step", line.get("step"))

    def ended(self):
        return self.process.poll() is not None

    def kill(self):
        self.process.kill()
        self.wait()

    def wait(self, timeout=None):
        """Its exit code, once all that it said is read."""
        code = self.process.wait(timeout)
        self.reader.join()
        self.process.stdout.close()
        return code


class Lane:
    """Runs over one wire, disturbed at so many moments."""

    def __init__(self, number, kind, moments, folder, authority, recipe, undisturbed):
        self.number, self.kind, self.moments = number, kind, moments
        self.folder, self.authority, self.recipe, self.undisturbed = folder, authority, recipe, undisturbed
        self.draw = random.Random(f"{SEED} {kind} {number}")
        self.client = None
        self.reached = 0  # step of the run that goes on
        self.runs = 0
        self.longest_s = 0
        self.done = {}  # how often which act

    def go(self):
        self.folder.mkdir()
        lease_s = 90 if self.kind == "cut for 60 s" else 10
        with Wire(seed=self.number, number=self.number) as self.wire:
            self.wire.shape(**WIRES.get(self.kind, {}))
            self.server = Server(self.authority, self.folder / "server", host=ADDRESSES[1], on=self.wire.on(1),
                                 keys=f"lease_seconds = {lease_s}\nkeepalive_seconds = 2\n")
            with self.server:
                try:
                    for _ in range(self.moments):
                        self.moment()
                    self.finish()
                finally:
                    if self.client:
                        self.client.kill()
        return self

    def moment(self):
        self.keep_going()
        if self.draw.random() < 0.75:
            self.recover()  # else it may be about to open its device
        until = time.monotonic() + self.draw.uniform(0.2, 4)
        while time.monotonic() < until:
            time.sleep(0.05)
            self.keep_going()
        if self.kind in CUTS:
            self.cut(CUTS[self.kind])
        else:
            self.harm(self.draw.choice((self.kill_client, self.kill_server, self.stop_server)))
            time.sleep(self.draw.choice((0, self.draw.uniform(0, 2))))
        self.recover()

    def harm(self, act):
        self.done[act.__name__] = self.done.get(act.__name__, 0) + 1
        act()

    def kill_client(self):
        self.client.kill()

    def kill_server(self):
        self.server.end(signal.SIGKILL)

    def stop_server(self):
        self.server.end(signal.SIGTERM)
        assert self.server.process.returncode == 0, self.server.log()[-2000:]

    def only_cut(self):
        pass

    def cut(self, seconds):
        began = time.monotonic()
        self.wire.cut()
        wait = seconds or 10
        at = self.draw.uniform(0, wait)
        time.sleep(at)
        self.harm(self.draw.choice((self.only_cut, self.kill_client, self.kill_server, self.stop_server)))
        if seconds is not None:
            time.sleep(max(0, began + seconds - time.monotonic()))
        elif not self.client.ended():
            # Its reconnect_seconds are 5, its restart_seconds 10; a try asks the server twice.
            code = self.client.wait(KEEPALIVE_S + 5 + 10 + 2 * CONNECT_S + BUSY_S)
            self.took(began)
            said = self.client.errors.read_text(encoding="utf-8")
            # It may have been at its end and had no need of the device.
            assert code == 0 or code == 1 and self.server.url().split("/")[2] in said, (code, said)
        self.wire.mend()

    def recover(self):
        """Everybody is there again: training must go on."""
        began = time.monotonic()
        if self.server.process.poll() is not None:
            self.server.start()
        step, runs = self.client.step, self.runs
        while self.client.step <= step:
            if self.client.ended():
                self.note_end()
                self.start()
                if self.runs > runs:
                    return
                step = self.client.step
            assert time.monotonic() - began < KEEPALIVE_S + 2 * CONNECT_S + BUSY_S, "hangs: " + self.said()
            time.sleep(0.02)
        self.took(began)

    def took(self, began):
        self.longest_s = max(self.longest_s, time.monotonic() - began)

    def said(self):
        return self.client.errors.read_text(encoding="utf-8")[-3000:] + self.server.log()[-3000:]

    def start(self):
        reconnect_s = self.draw.choice((5, 80)) if self.kind == "cut for 60 s" else 5
        restart_s = 10 if self.kind == "cut for ever" else 600
        self.client = Client(
            [*self.wire.on(0), COMMAND, "train", self.recipe, "--json", "--train.run", str(self.folder / f"run{self.runs}"),
             "--device.0.path", self.server.url(), *self.authority.flags(), "--remote.reconnect_seconds", str(reconnect_s),
             "--remote.restart_seconds", str(restart_s), "--remote.deadline_seconds", "20"], self.folder)
        self.client.step = self.reached

    def note_end(self):
        """A client that was killed, whose wire was cut for too long, or whose server was gone at its start."""
        code = self.client.wait()
        assert not self.client.wrong, self.client.wrong
        self.reached = self.client.step
        if code == 0:
            self.check()
        else:
            ended = self.kind == "cut for ever" or not self.client.opened
            assert code == -signal.SIGKILL or (code == 1 and ended), (code, self.said())
        self.client = None

    def keep_going(self):
        """A client trains: the same run, or the next one when that has come to its end."""
        if self.client is not None and not self.client.ended():
            assert not self.client.wrong, self.client.wrong
            return
        if self.client is not None:
            code = self.client.wait()
            assert code == 0, (code, self.said())
            self.note_end()
        self.start()

    def finish(self):
        self.wire.shape(**CLEAN)
        self.keep_going()
        code = self.client.wait(600)
        assert code == 0, (code, self.said())
        self.note_end()

    def check(self):
        self.wire.shape(**CLEAN)
        made = what_it_made(COMMAND, self.folder / f"run{self.runs}", on=self.wire.on(0))
        assert made == self.undisturbed, "other bits than those of a local device"
        self.wire.shape(**WIRES.get(self.kind, {}))
        self.runs += 1
        self.reached = 0
        self.server.end(signal.SIGTERM)
        (self.server.folder / "fast0/smartinf.state").unlink()
        self.server.start()


class RemoteNetwork(unittest.TestCase):
    def test_training_over_bad_networks_with_both_sides_killed(self):
        scratch = tempfile.TemporaryDirectory(prefix="smartinf_test_")
        self.addCleanup(scratch.cleanup)
        folder = pathlib.Path(scratch.name)
        if "without gRPC" in run("serve", str(folder / "x")).stderr:
            self.skipTest("built without gRPC")
        if "not in this build" in run("--help").stdout:
            self.skipTest("built without torch")
        with Wire(number="probe"):
            pass
        authority = Authority(COMMAND, folder / "ca", addresses=ADDRESSES)
        recipe = small_recipe(folder, STEPS)
        local = run("train", recipe, "--train.run", str(folder / "local"))
        self.assertEqual(local.returncode, 0, local)
        undisturbed = what_it_made(COMMAND, folder / "local")
        lanes = []
        for kind in (*CUTS, *WIRES):  # the longest first
            if any(KINDS) and kind not in KINDS:
                continue
            for first in range(0, MOMENTS, 10):
                number = len(lanes)
                lanes.append(Lane(number, kind, min(10, MOMENTS - first), folder / str(number), authority, recipe,
                                  undisturbed))
        with concurrent.futures.ThreadPoolExecutor(LANES) as pool:
            going = {pool.submit(lane.go): lane for lane in lanes}
            for done in concurrent.futures.as_completed(going):
                lane = going[done]
                if done.exception():
                    print(f"{lane.kind}, {lane.number}: {done.exception()!r}", flush=True)
                with self.subTest(kind=lane.kind, number=lane.number):
                    done.result()
                    print(f"{lane.kind}: {lane.moments} moments, {lane.done}, {lane.runs} runs of {STEPS} steps, longest "
                          f"wait {lane.longest_s:.1f} s", flush=True)


if __name__ == "__main__":
    result = unittest.main(exit=False).result
    sys.exit(1 if not result.wasSuccessful() else 77 if result.skipped else 0)
