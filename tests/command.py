"""Runs the smartinf command for tests, whose last arguments are PATH/TO/smartinf PROJECT_ROOT."""
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(sys.argv.pop())
COMMAND = sys.argv.pop()


def run(*words, cwd=None, **environment):
    return subprocess.run([COMMAND, *words], cwd=cwd, capture_output=True, text=True, timeout=120,
                          env={**os.environ, **environment}, check=False)


def make_state(folder, params="3e5"):
    """A small state of a few committed steps in each of the folders."""
    words = ["bench", "step", "--params", params, "--repeat", "1", "--keep", "--io-bytes", "1048576",
             "--io-depth", "2"]
    for one in [folder] if isinstance(folder, str) else folder:
        words += ["--device", one]
    made = run(*words)
    assert made.returncode == 0, made
