"""Several ranks of one program as processes of this machine, for tests."""
import os
import pathlib
import socket
import subprocess
import tempfile
import time


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Ranks:
    """Processes that run the same command, each with its rank in the environment as torchrun sets it.

    prefix(rank) comes before the command; host is rank 0's address. All are killed at the end.
    """

    def __init__(self, command, count, host="127.0.0.1", env=None, prefix=lambda rank: []):
        self.folder = tempfile.TemporaryDirectory(prefix="smartinf_ranks_")
        port = str(free_port())
        self.processes = []
        for rank in range(count):
            own = command(rank) if callable(command) else command
            with open(self._file(rank, "out"), "w") as out, open(self._file(rank, "err"), "w") as err:
                self.processes.append(subprocess.Popen(
                    [*prefix(rank), *own], stdout=out, stderr=err, stdin=subprocess.DEVNULL,
                    env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": host,
                         "MASTER_PORT": port, "OMP_NUM_THREADS": "1", **(env or {})}))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.folder.cleanup()

    def _file(self, rank, name):
        return pathlib.Path(self.folder.name) / f"{rank}.{name}"

    def out(self, rank):
        return self._file(rank, "out").read_text(errors="replace")

    def err(self, rank):
        return self._file(rank, "err").read_text(errors="replace")

    def wait_for(self, rank, text, seconds=60):
        end = time.monotonic() + seconds
        while text not in self.out(rank):
            if time.monotonic() > end or (self.processes[rank].poll() is not None
                                          and text not in self.out(rank)):
                raise AssertionError(f"rank {rank} did not say {text!r}: {self.out(rank)} {self.err(rank)}")
            time.sleep(0.01)

    def wait(self, seconds=120, ranks=None):
        """Exit codes of these ranks (default: all)."""
        end = time.monotonic() + seconds
        codes = []
        for rank in range(len(self.processes)) if ranks is None else ranks:
            try:
                codes.append(self.processes[rank].wait(max(0.1, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {rank} still runs after {seconds} s:\n" + self.out(rank)[-2000:] +
                                     self.err(rank)[-2000:]) from None
        return codes
