"""Two hosts of their own, network namespaces, and a wire between them that a test can spoil: packets that are lost,
late or out of order, a slow link, no link at all. A process of ours carries the packets (the kernel's netem is not
everywhere). Needs root, ip and /dev/net/tun.

    with Wire() as wire:
        wire.shape(loss=0.01, delay_s=0.02)
        subprocess.Popen([*wire.on(0), "sleep", "1"])
        wire.cut()
        wire.mend()
"""
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
import unittest

ADDRESSES = ("10.77.62.1", "10.77.62.2")
QUEUE_BYTES = 1 << 20  # of each direction on a slow link; what comes then is lost


def run(*words):
    subprocess.run(words, check=True, capture_output=True, text=True)


class Wire:
    """The hosts have ADDRESSES. number: of several wires of one process."""

    def __init__(self, seed=7, number=0):
        self.names = [f"smartinf-{os.getpid()}-{number}-{i}" for i in range(2)]
        self.seed = seed
        self.carrier = None

    def __enter__(self):
        if os.geteuid() != 0:
            raise unittest.SkipTest("network namespaces need root")
        try:
            for name in self.names:
                run("ip", "netns", "add", name)
                run("ip", "-n", name, "link", "set", "lo", "up")
            self.carrier = subprocess.Popen([sys.executable, os.path.abspath(__file__), str(self.seed), *self.names],
                                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            if self.carrier.stdout.readline() != "ready\n":
                raise OSError("no TUN devices here")
            for name, address in zip(self.names, ADDRESSES):
                run("ip", "-n", name, "address", "add", address + "/24", "dev", "wire")
                run("ip", "-n", name, "link", "set", "wire", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            raise unittest.SkipTest(f"no network namespaces here: {error} {getattr(error, 'stderr', '')}") from None
        return self

    def __exit__(self, *_):
        if self.carrier:
            self.carrier.kill()
            self.carrier.wait()
            self.carrier.stdin.close()
            self.carrier.stdout.close()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def on(self, host):
        """What stands before a command that runs on a host."""
        return ["ip", "netns", "exec", self.names[host]]

    def shape(self, loss=0.0, delay_s=0.0, jitter_s=0.0, bits_per_s=0.0):
        """Each way. jitter_s: added to the delay at random, so that packets overtake each other."""
        self._say(loss=loss, delay_s=delay_s, jitter_s=jitter_s, bits_per_s=bits_per_s)

    def cut(self):
        """No packet passes, and nobody is told."""
        self._say(cut=True)

    def mend(self):
        self._say(cut=False)

    def _say(self, **words):
        self.carrier.stdin.write(json.dumps(words) + "\n")
        self.carrier.stdin.flush()


# ---- The process that carries the packets.

def tun_in(namespace):
    """A TUN device named wire; packets come and go as they are."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as file:
        if libc.setns(file.fileno(), 0x40000000) != 0:  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), "setns")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, 0x400454CA, struct.pack("16sH22x", b"wire", 0x1001))  # TUNSETIFF, IFF_TUN | IFF_NO_PI
    return tun


def carry(seed, namespaces):
    tuns = [tun_in(name) for name in namespaces]
    print("ready", flush=True)
    draw = random.Random(seed)
    shape = {"loss": 0.0, "delay_s": 0.0, "jitter_s": 0.0, "bits_per_s": 0.0, "cut": False}
    under_way = []  # (when it is due, number, to whom, packet)
    number = 0
    free_at = [0.0, 0.0]  # when the link of a direction has sent what it has
    asked = b""
    while True:
        wait = None if not under_way else max(0.0, under_way[0][0] - time.monotonic())
        ready, _, _ = select.select([0, *tuns], [], [], wait)
        if 0 in ready:
            more = os.read(0, 4096)
            if not more:
                return
            asked += more
            *lines, asked = asked.split(b"\n")
            for line in lines:
                shape.update(json.loads(line))
        now = time.monotonic()
        for here, tun in enumerate(tuns):
            if tun not in ready:
                continue
            for _ in range(64):
                try:
                    packet = os.read(tun, 65536)
                except OSError:
                    break
                if shape["cut"] or draw.random() < shape["loss"]:
                    continue
                due = now
                if shape["bits_per_s"]:
                    begin = max(now, free_at[here])
                    if (begin - now) * shape["bits_per_s"] > 8 * QUEUE_BYTES:
                        continue
                    due = free_at[here] = begin + 8 * len(packet) / shape["bits_per_s"]
                due += shape["delay_s"] + shape["jitter_s"] * draw.random()
                number += 1
                heapq.heappush(under_way, (due, number, 1 - here, packet))
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, _, to, packet = heapq.heappop(under_way)
            try:
                if not shape["cut"]:
                    os.write(tuns[to], packet)
            except OSError:
                pass  # its queue is full, or the host is going away


if __name__ == "__main__":
    carry(int(sys.argv[1]), sys.argv[2:])
