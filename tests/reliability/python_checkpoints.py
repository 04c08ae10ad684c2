"""Trials of the Python package's checkpoints: harmed, killed while they are written, and power cuts."""
import json
import os
import shutil
import signal
import threading

import shim
from files import flip
from from_python import _state, finish, start
from machine import ANSWER_S
from outcomes import Failure, Outcome
from processes import shim_environment
from trials import scenario


class Loader:
    """One process that loads checkpoints, for all trials."""

    def __init__(self, machine):
        self.folder = machine.folder / "python_checkpoints"
        self.folder.mkdir()
        self.device = self.folder / "device"
        done = start(machine, "loop", self.device, 6, "plain")
        self.six = _state(*finish(done), done)[0]
        self.kept = self.folder / "kept"
        self.save(machine, self.kept)
        self.at_six = self.folder / "at_six"
        shutil.copytree(self.device, self.at_six)
        self.process = start(machine, "serve", self.folder / "served")
        self.three = json.loads(self.process.stdout.readline())["state"]
        self.lock = threading.Lock()

    def save(self, machine, folder, env=None):
        process = start(machine, "save", self.device, folder, env=env)
        out, err = finish(process)
        if process.returncode != 0:
            raise Failure(f"save_checkpoint fails: {out[-500:]}{err[-2000:]}")

    def load(self, folder):
        """What load_checkpoint says. Failure: no answer in time."""
        with self.lock:
            late = threading.Timer(ANSWER_S, self.process.kill)
            late.start()
            print(folder, file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
            late.cancel()
        if not line:
            raise Failure(f"load_checkpoint gives no answer or dies: {self.process.stderr.read()[-2000:]}")
        return json.loads(line)


def loader(machine):
    return machine.once("loader", lambda: Loader(machine))


def judge_loaded(answer, states, what, may_refuse=True):
    if "raised" in answer:
        raise Failure(f"{what}: no smartinf.Error but {answer['raised']}")
    if "refused" in answer:
        if not may_refuse:
            raise Failure(f"{what}: {answer['refused']}")
        return Outcome.REFUSED
    if answer["state"] not in states:
        raise Failure(f"{what}: another state was loaded, and nothing said so")
    return Outcome.SAME


@scenario(count=60, short=3)
def python_checkpoint_damage(trial):
    """A checkpoint of save_checkpoint() with a flipped bit, a zeroed or moved part, or cut short, is loaded."""
    machine, draw = trial.machine, trial.draw
    with_it = loader(machine)
    folder = trial.folder / "kept"
    shutil.copytree(with_it.kept, folder)
    every = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 0)
    largest = max(every, key=lambda path: path.stat().st_size)
    path = largest if draw.random() < 0.5 else draw.choice(every)
    size = path.stat().st_size
    what = ("flip", "flip", "zeroed", "moved", "cut")[trial.index % 5]
    if what == "flip":
        flip(path, draw.randrange(8 * size))
    elif what == "cut":
        os.truncate(path, draw.randrange(size))
    else:
        with open(path, "r+b") as file:
            length = min(4096, size)
            file.seek(draw.randrange(size - length + 1))
            part = bytes(length) if what == "zeroed" else file.read(length)
            file.seek(draw.randrange(size - length + 1))
            file.write(part)
    return judge_loaded(with_it.load(folder), {with_it.six}, f"{what} in {path.relative_to(folder)}")


@scenario(count=40, short=2)
def python_checkpoint_power_cut(trial):
    """save_checkpoint() in place of another loses power: the new one is there or the old one; after it all."""
    machine, draw = trial.machine, trial.draw
    with_it = loader(machine)

    def make():
        folder = machine.folder / "python_recorded"
        root = folder / "root"
        root.mkdir(parents=True)
        shutil.copytree(with_it.kept, root / "kept")
        shutil.copytree(root, folder / "before")
        inodes = shim.inodes_below(root)
        process = start(machine, "loop", with_it.device, 9, "plain")
        nine = _state(*finish(process), process)[0]
        with_it.save(machine, root / "kept", env=shim_environment(machine, root, record=folder / "record"))
        return folder / "before", shim.Record(folder / "record", root, inodes), nine

    before, record, nine = machine.once("python_recorded", make)
    done = draw.random() < 0.4
    cut = len(record) if done else draw.randint(0, len(record))
    fate = "drop" if done else draw.choice(("drop", "keep", "tear"))
    shim.crash(before, record, cut, fate, draw, trial.folder / "root")
    answer = with_it.load(trial.folder / "root" / "kept")
    what = f"power cut at {cut} of {len(record)}, {fate}"
    return judge_loaded(answer, {nine} if done else {with_it.six, nine}, what, may_refuse=False)


@scenario(count=20, short=1)
def python_checkpoint_killed(trial):
    """save_checkpoint() in place of another is killed at any call: the new one is there or the old one."""
    machine, draw = trial.machine, trial.draw
    with_it = loader(machine)
    root = trial.folder / "root"
    root.mkdir()
    shutil.copytree(with_it.kept, root / "kept")
    shutil.copytree(with_it.at_six, trial.folder / "device")
    process = start(machine, "save", trial.folder / "device", root / "kept", env=shim_environment(
        machine, root, fault=f"any kill {draw.randint(1, 60)} 0"))
    out, err = finish(process)
    if process.returncode not in (0, -signal.SIGKILL):
        raise Failure(f"save_checkpoint: code {process.returncode}\n{out[-500:]}{err[-1500:]}")
    return judge_loaded(with_it.load(root / "kept"), {with_it.six}, "killed while saving", may_refuse=False)
