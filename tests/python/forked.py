"""Programs in processes that have torch and the package already: forks of one process, which end as any other does.

As a program it takes a line of JSON for each process and prints its id and, when it has ended, its exit code.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time


class Process:
    """As subprocess.Popen, of `python -c code args...`. The next one begins when this has ended."""

    def __init__(self, server, folder, code, args):
        self.stdout_path, self.stderr_path = folder / "stdout", folder / "stderr"
        self.stdout_path.unlink(missing_ok=True)
        os.mkfifo(self.stdout_path)
        job = {"code": textwrap.dedent(code), "args": args, "stdout": str(self.stdout_path)}
        server.stdin.write(json.dumps(job | {"stderr": str(self.stderr_path)}) + "\n")
        server.stdin.flush()
        self._server, self.pid, self.returncode = server, int(server.stdout.readline()), None
        self.stdout = open(self.stdout_path, encoding="utf-8")

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def wait(self):
        if self.returncode is None:
            self.returncode = int(self._server.stdout.readline())
        return self.returncode

    def communicate(self):
        with self.stdout:
            out = self.stdout.read()
        self.wait()
        return out, self.stderr_path.read_text(encoding="utf-8")


class Processes:
    def __init__(self, folder):
        self._folder = folder
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, code, *args):
        return Process(self._server, self._folder, code, args)

    def run(self, code, *args):
        """As subprocess.run() with all that is said as text."""
        process = self.start(code, *args)
        out, err = process.communicate()
        return subprocess.CompletedProcess(code, process.returncode, out, err)

    def train_and_kill(self, kills, code, *args):
        """Starts a program that prints "step loss" of each step so often, and kills it some steps later, but for the last
        time. Returns {step: losses that were printed of it}."""
        found = {}

        def take(line):
            step, loss = line.split()
            found.setdefault(int(step), set()).add(float(loss))

        for kill in range(kills + 1):
            process = self.start(code, *args)
            for lines, line in enumerate(process.stdout):
                take(line)
                if kill < kills and lines == 5 + kill % 8:
                    time.sleep(0.003 * (kill % 8))
                    process.kill()
                    break
            out, err = process.communicate()
            for line in out.splitlines():  # of steps behind that one
                take(line)
            assert kill < kills or process.returncode == 0, err
        return found

    def close(self):
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait(600)


def next_program():
    """Comes back in each new process, with its program, and in the server at the end, with nothing."""
    import smartinf

    _ = smartinf.AdamW, smartinf.offload_activations  # which import torch
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            for number, path in enumerate((os.devnull, job["stdout"], job["stderr"])):
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC if number else os.O_RDONLY)
                os.dup2(file, number)
                os.close(file)
            sys.argv = ["-c", *job["args"]]
            return job["code"]
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return ""


if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path.cwd())
    exec(compile(next_program(), "<string>", "exec"))
