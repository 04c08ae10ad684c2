"""Trials of the Python package: signals at any moment."""
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading

from machine import ANSWER_S
from outcomes import Failure, Outcome
from trials import scenario

_WORKER = pathlib.Path(__file__).with_name("python_worker.py")
KINDS = ("plain", "released", "compressed", "bf16", "two")
STEPS = 100


def start(machine, *words, env=None):
    return subprocess.Popen([sys.executable, _WORKER, *map(str, words)], stdin=subprocess.PIPE, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env={**os.environ, "PYTHONPATH": machine.python_path, "OMP_NUM_THREADS": "1",
                                 **(env or {})})


def finish(process):
    try:
        return process.communicate(timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise Failure(f"Python: no end after {ANSWER_S} s\n{out[-500:]}{err[-1000:]}") from None


def _state(out, err, process):
    found = re.search(r"^state (\w+) (\d+)$", out, re.MULTILINE)
    if process.returncode != 0 or not found:
        raise Failure(f"Python: code {process.returncode}\n{out[-500:]}{err[-2000:]}")
    return found[1], int(found[2])


def undisturbed(machine, kind):
    def make():
        process = start(machine, "loop", machine.folder / f"python_{kind}", STEPS, kind)
        return _state(*finish(process), process)[0]
    return machine.once(("python", kind), make)


@scenario(count=50, short=2)
def python_signals(trial):
    """Ctrl-C in one process again and again, or kill -9 and resume=True; the state is then an undisturbed one."""
    machine, draw = trial.machine, trial.draw
    kind = KINDS[trial.index // 2 % len(KINDS)]
    killed = trial.index % 2 == 0
    device = trial.folder / "device"
    process, text, said = start(machine, "loop", device, STEPS, kind), "", 0
    late = threading.Timer(ANSWER_S, lambda: process.kill())
    late.start()

    def read_until(wanted):
        nonlocal text, said
        for line in process.stdout:
            text += line
            said = max(said, int(line.split()[1])) if line.startswith("step") else said
            if wanted(line):
                return line
        return ""

    for _ in range(3):
        step = said + draw.randint(1, STEPS // 4)
        read_until(lambda line: line == "ready\n" if step < STEPS // 8 else said >= step)  # noqa: B023
        threading.Event().wait(draw.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL if killed else signal.SIGINT)
        if killed:
            process.communicate()
            process = start(machine, "loop", device, STEPS, kind)
            read_until(lambda line: line == "ready\n")
            before, line = said, read_until(lambda line: True)
            if line.startswith("step") and int(line.split()[1]) < before:
                raise Failure(f"{kind}: step {before} was made, and is made again after a kill")
    late.cancel()
    out, err = finish(process)
    found, interrupts = _state(text + out, err, process)
    if not killed and said < STEPS and interrupts < 3:
        raise Failure(f"{kind}: Ctrl-C three times, {interrupts} KeyboardInterrupts")
    if found != undisturbed(machine, kind):
        raise Failure(f"{kind}, {'killed' if killed else 'interrupted'}: another state than undisturbed")
    return Outcome.SAME
