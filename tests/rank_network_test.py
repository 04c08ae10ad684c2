"""Two ranks on two hosts of their own, network namespaces with 10 Gbit/s and 1 ms between them, and what happens
when the network is divided. Needs root; where the kernel has no netem, packets take no time.

Usage: rank_network_test.py PATH_OF_SMARTINF [unittest's own arguments]
"""
import os
import random
import shutil
import subprocess
import sys
import time
import unittest

from rank_processes import Ranks
from train_runs import StreamCase

ADDRESSES = ("10.77.61.1", "10.77.61.2")
TIMEOUT_S = 4
DIVISIONS = int(os.environ.get("SMARTINF_TEST_KILLS", "2"))


def run(*words):
    subprocess.run(words, check=True, capture_output=True, text=True)


class Hosts:
    """Two network namespaces and the wire between them."""

    def __init__(self):
        self.names = [f"smartinf-{os.getpid()}-{i}" for i in range(2)]

    def __enter__(self):
        try:
            for name in self.names:
                run("ip", "netns", "add", name)
                run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "link", "add", "wire", "netns", self.names[0], "type", "veth",
                "peer", "name", "wire", "netns", self.names[1])
            for name, address in zip(self.names, ADDRESSES):
                run("ip", "-n", name, "address", "add", address + "/24", "dev", "wire")
                run("ip", "-n", name, "link", "set", "wire", "up")
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise unittest.SkipTest(f"no network namespaces here: {error.cmd}: {error.stderr}") from None
        try:
            for name in self.names:  # half of a millisecond each way
                run("tc", "-n", name, "qdisc", "add", "dev", "wire", "root", "netem", "delay", "500us", "rate", "10gbit",
                    "limit", "100000")
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"no delay: {getattr(error, 'stderr', error)}")
            for name in self.names:
                subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "wire", "root", "tbf", "rate", "10gbit",
                                "burst", "1mb", "latency", "10ms"], capture_output=True, check=False)
        return self

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def divide(self):
        run("ip", "-n", self.names[1], "link", "set", "wire", "down")

    def join(self):
        run("ip", "-n", self.names[1], "link", "set", "wire", "up")


class RankNetwork(StreamCase):
    def setUp(self):
        super().setUp()
        if os.geteuid() != 0 or not shutil.which("ip"):
            self.skipTest("needs root, and ip")

    def test_a_divided_network_costs_nothing_but_the_step(self):
        recipe = self.recipe(steps=20 * DIVISIONS + 20)
        flags = ["--train.micro_batch", "2", "--train.clip_norm", "0.7", "--ranks.timeout", str(TIMEOUT_S), "--ranks.order", "fixed"]
        self.train(recipe, "whole", *flags)
        flags += self.even_devices("divided", 2)
        draw = random.Random(os.environ.get("SMARTINF_TEST_SEED", "7"))
        with Hosts() as hosts:
            def start():
                return Ranks(self.command(recipe, "divided", flags), 2, host=ADDRESSES[0],
                             prefix=lambda rank: ["ip", "netns", "exec", hosts.names[rank]])
            for division in range(DIVISIONS):
                with start() as ranks:
                    ranks.wait_for(0, "\nstep", 60)
                    time.sleep(draw.uniform(0, 0.3))
                    began = time.monotonic()
                    hosts.divide()
                    codes = ranks.wait(60)
                    print(f"division {division}: ended after {time.monotonic() - began:.1f} s: "
                          f"{ranks.err(0).splitlines()[-1][:150]} / {ranks.err(1).splitlines()[-1][:150]}")
                    self.assertEqual(codes, [1, 1], ranks.err(0) + ranks.err(1))
                    self.assertIn("rank 1 (process", ranks.err(0))
                    self.assertIn("rank 0 (process", ranks.err(1))
                hosts.join()
            with start() as ranks:
                self.assertEqual(ranks.wait(200), [0, 0], ranks.err(0) + ranks.err(1))
        self.check_same_as("divided", "whole")


if __name__ == "__main__":
    result = unittest.main(exit=False).result
    sys.exit(1 if not result.wasSuccessful() else 77 if result.skipped else 0)
