"""Processes of programs under test, which cannot run ahead of the test that reads their lines."""
import os
import pathlib
import selectors
import socket
import subprocess
import tempfile
import threading
import time


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_held(words, **more):
    """The process, and the socket of its output. It stands still when a few lines have not been read."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least that the kernel gives
        return subprocess.Popen(words, stdout=theirs, **more), ours


class Ranks:
    """Processes that run the same command, each with its rank in the environment as torchrun sets it.

    What they write is read by wait_for() until a text comes, and by wait() to the end: between the two they get
    ahead by a few lines only. prefix(rank) comes before the command; host is rank 0's address. All are killed at
    the end.
    """

    def __init__(self, command, count, host="127.0.0.1", env=None, prefix=lambda rank: []):
        self.folder = tempfile.TemporaryDirectory(prefix="smartinf_ranks_")
        port = str(free_port())
        self.processes, self._outputs, self._readers = [], [], {}
        self._said = [b""] * count
        for rank in range(count):
            own = command(rank) if callable(command) else command
            with open(self._errors(rank), "w") as err:
                process, output = start_held(
                    [*prefix(rank), *own], stderr=err, stdin=subprocess.DEVNULL,
                    env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": host,
                         "MASTER_PORT": port, "OMP_NUM_THREADS": "1", **(env or {})})
            self.processes.append(process)
            self._outputs.append(output)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for rank, output in enumerate(self._outputs):
            if rank in self._readers:
                self._readers[rank].join(10)
            output.close()
        self.folder.cleanup()

    def _errors(self, rank):
        return pathlib.Path(self.folder.name) / f"{rank}.err"

    def _read(self, rank):
        """More of its output, or nothing at its end."""
        part = self._outputs[rank].recv(65536)
        self._said[rank] += part
        return part

    def _read_to_the_end(self, rank):
        while self._read(rank):
            pass

    def out(self, rank):
        """What has been read of its output."""
        return self._said[rank].decode(errors="replace")

    def err(self, rank):
        return self._errors(rank).read_text(errors="replace")

    def wait_for(self, rank, text, seconds=60):
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as ready:
            for each, output in enumerate(self._outputs):
                ready.register(output, selectors.EVENT_READ, each)
            while text not in self.out(rank):
                for key, _ in ready.select(max(0, end - time.monotonic())):
                    if not self._read(key.data):
                        ready.unregister(key.fileobj)
                if text not in self.out(rank) and (time.monotonic() > end or self._outputs[rank] not in ready.get_map()):
                    raise AssertionError(f"rank {rank} did not say {text!r}: {self.out(rank)} {self.err(rank)}")

    def wait(self, seconds=120, ranks=None):
        """Exit codes of these ranks (default: all)."""
        end = time.monotonic() + seconds
        codes = []
        for rank in range(len(self.processes)):
            if rank not in self._readers:
                self._readers[rank] = threading.Thread(target=self._read_to_the_end, args=(rank,), daemon=True)
                self._readers[rank].start()
        for rank in range(len(self.processes)) if ranks is None else ranks:
            try:
                codes.append(self.processes[rank].wait(max(0.1, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {rank} still runs after {seconds} s:\n" + self.out(rank)[-2000:] +
                                     self.err(rank)[-2000:]) from None
            self._readers[rank].join(10)
        return codes
