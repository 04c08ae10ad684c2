"""compute-sanitizer over small streamed trainings: accesses out of bounds, and races within kernels."""

import functools
import os
import shutil
import subprocess
import sys

import bits
import trainer
from rows import check


def _sanitized(here, tool, command, environment):
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.path.exists(found):
        return here.row("", None, why="there is no compute-sanitizer")
    done = subprocess.run(
        [found, "--tool", tool, "--target-processes", "all", "--error-exitcode", "86", *map(str, command)],
        env=environment, text=True, capture_output=True, errors="replace", check=False,
    )  # fmt: skip
    said = [line for line in (done.stdout + done.stderr).splitlines() if "=========" in line]
    summary = next((line.strip("= ") for line in reversed(said) if "SUMMARY" in line), "no summary")
    print(done.stdout[-4000:], done.stderr[-4000:], sep="\n")
    return here.row("", done.returncode == 0 and "SUMMARY" in summary, tool=tool, said=summary)


@check(seconds=60, named=True, cuda=True)
def streamed_once(here):
    bits.streamed_variants(here, {"plain": {"max_grad_norm": 0}})


def _of_command(tool, here):
    accelerator = ["--memory.accelerator", (24 << 20) + trainer.CUDA_BYTES]
    command = [here.build / "bin/smartinf", *trainer.recipe(here, here.folder / "run", *accelerator, steps=2)]
    _sanitized(here, tool, command, trainer.environment(here))


def _of_package(tool, here):
    command = [sys.executable, "-B", os.path.join(os.path.dirname(__file__), "run.py"), "--build", here.build]
    _sanitized(here, tool, [*command, "--out", here.out, "--check", "streamed-once"], os.environ)


for _tool in ("memcheck", "racecheck"):
    check(name=f"{_tool}-command", seconds=150, cuda=True)(functools.partial(_of_command, _tool))
    check(name=f"{_tool}-package", seconds=150, cuda=True)(functools.partial(_of_package, _tool))
