"""Trials of whose is what: run folders that were copied or moved, checkpoint folders that are shared or mixed up,
and what cleaning up and replacing may delete."""
import json
import os
import pathlib
import shutil
import time

import shim
from machine import BEGUN, KINDS, OLDER, check_end, Done, state_of, weights_in
from outcomes import Failure, Outcome
from processes import shim_environment
from trials import scenario

ONE, TWO = KINDS["f32"], KINDS["two"]


def _own_state(machine, run, steps):
    """Trains a run whose state is where it is without any [[device]]: in its folder."""
    return ("train", machine.recipe, "--train.run", run, "--train.steps", steps)


def _kept(machine, kind, run, out):
    done = machine.answer("checkpoint", *machine.devices(kind, run), "--out", out, "--json")
    if done.code != 0:
        raise Failure(f"no checkpoint: {done.text}")
    return pathlib.Path(json.loads(done.out)["checkpoint"])


@scenario(count=20, short=1)
def copied_run(trial):
    """A run's folder is copied or moved while the other goes on: every command that names it works on it."""
    machine, draw = trial.machine, trial.draw
    a, b = trial.folder / "a", trial.folder / "b"

    def begun():
        run = machine.folder / "own_state"
        done = machine.answer(*_own_state(machine, run, BEGUN))
        if done.code != 0:
            raise Failure(f"an undisturbed run fails: {done.text}")
        weights = machine.weights_of(run)
        shutil.copytree(run, machine.folder / "own_state_kept")
        shutil.rmtree(run)
        return weights

    weights = machine.once("own state", begun)
    shutil.copytree(machine.folder / "own_state_kept", a)
    # From here on `a` is a run like any other: it was trained on under this name.
    done = machine.answer(*_own_state(machine, a, BEGUN))
    if done.code != 0:
        raise Failure(f"a copied run does not go on: {done.text}")
    if draw.random() < 0.5:
        shutil.copytree(a, b)
        machine.answer(*_own_state(machine, a, BEGUN + 2))
    else:
        a.rename(b)
    name = draw.choice(("fsck", "checkpoint", "reshard", "export"))
    before = state_of_own(a).read_bytes() if a.exists() else b""
    if name == "fsck":
        state_of_own(b).write_bytes(b"damaged" * 1000)
        if machine.answer("fsck", b).code == 0:
            raise Failure("fsck of a run whose own state is damaged says that it is sound")
        return Outcome.REFUSED
    if name == "export":
        done = machine.answer("export", b, "--out", trial.folder / "out", "--type", "f32")
        if done.code == 0 and weights_in(trial.folder / "out") != weights:
            raise Failure("export gives other weights than the run's own")
    else:
        to = trial.folder / "to"
        words = ("checkpoint", b, "--json") if name == "checkpoint" else ("reshard", "--from", b, "--to", to)
        done = machine.answer(*words)
        if done.code == 0:
            made = json.loads(done.out)["checkpoint"] if name == "checkpoint" else to
            step, _, checked = machine.fsck([made])
            if step != BEGUN or (name == "checkpoint" and b not in pathlib.Path(made).parents):
                raise Failure(f"{name} of a copied run: {done.text}{checked.text}")
    if done.code != 0:
        raise Failure(f"{name} of a copied run: {done.text}")
    if before and state_of_own(a).read_bytes() != before:
        raise Failure(f"{name} of a copy changed the original")
    return Outcome.SAME


def state_of_own(run):
    return pathlib.Path(run) / "state" / "smartinf.state"


@scenario(count=40, short=1)
def shared_checkpoint_folder(trial):
    """Several processes keep checkpoints in one folder at once: what is said to be made is there, and whole."""
    machine, draw = trial.machine, trial.draw
    out, runs = trial.folder / "kept", []
    for name in "ab":
        run = trial.folder / name
        if name == "a":
            shutil.copytree(machine.history(ONE)[BEGUN], run)
        else:
            shutil.copytree(machine.once("another run", lambda: _another(machine)), run)
        runs.append(run)
    if draw.random() < 0.3:
        runs[1] = runs[0]
    started = []
    for run in runs:
        started.append(machine.start("checkpoint", *machine.devices(ONE, run), "--out", out, "--json"))
        time.sleep(draw.choice((0, 0, 0.01, 0.05)))
    made = []
    for run, process in zip(runs, started, strict=True):
        done = Done(-1, *process.communicate(timeout=120))
        done.code = process.returncode
        check_end(done, ("checkpoint",))
        if done.code == 0:
            made.append((run, json.loads(done.out)["checkpoint"]))
    if not made:
        raise Failure("two checkpoints at once: both fail")
    for run, folder in made:
        if not os.path.isdir(folder):
            raise Failure(f"said to be made, and not there: {folder}")
        step, sound, done = machine.fsck([folder])
        if step != BEGUN or not sound:
            raise Failure(f"said to be made, and not sound: {done.text}")
        kept = [json.loads(machine.answer("inspect", path, "--json").out)["run"]
                for path in (state_of(run).parent, pathlib.Path(folder, "device-0"))]
        if kept[0] != kept[1]:
            raise Failure(f"{folder} holds another run than the one it was said to be of")
    return Outcome.SAME if len(made) == 2 else Outcome.REFUSED


def _another(machine):
    run = machine.folder / "another_run"
    machine.train(ONE, run, BEGUN)
    return run


@scenario(count=20, short=1)
def mixed_checkpoint(trial):
    """checkpoint.json or a device of another checkpoint, run or step: fsck and restore refuse."""
    machine, draw = trial.machine, trial.draw
    run = machine.begun(TWO, trial.folder)
    kept = _kept(machine, TWO, run, trial.folder / "kept")
    if draw.random() < 0.5:
        other = machine.history(TWO)[OLDER]
    else:
        other = trial.folder / "other"
        machine.train(TWO, other, BEGUN)
    shutil.copytree(other, trial.folder / "copied")
    other = _kept(machine, TWO, trial.folder / "copied", trial.folder / "others")
    swap = draw.choice(("checkpoint.json", "device-0", "device-1", "devices"))
    for name in ("device-0", "device-1") if swap == "devices" else (swap,):
        place = kept / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()
        (other / name).rename(place)
    step, sound, done = machine.fsck([kept])
    if sound and step is not None:
        raise Failure(f"{swap} of another checkpoint, and fsck says that it is sound: {done.text}")
    done = machine.answer("restore", kept, "--device", trial.folder / "to")
    if done.code == 0:
        raise Failure(f"{swap} of another checkpoint is restored: {done.text}")
    return Outcome.REFUSED


@scenario(count=20, short=1)
def cleaning_up(trial):
    """gc --yes deletes nothing that is not smartinf's, and nothing that a run needs."""
    machine, draw = trial.machine, trial.draw
    run = machine.begun(TWO, trial.folder)
    kept = _kept(machine, TWO, run, run / "checkpoints")
    # A checkpoint that was interrupted: that one may go.
    shutil.copytree(kept, kept.with_name(kept.name + ".partial"))
    strangers = []
    for name in draw.sample(("step-1-draft.partial", "step-00000001.partial", "step-00000001", "x.creating",
                             "smartinf", "step-00000004-0123abcd.partial", "made.partial"), 3):
        place = trial.folder / draw.choice((".", "run", "run/checkpoints")) / name / "deep"
        place.mkdir(parents=True)
        strangers.append(place / draw.choice(("thesis.tex", "smartinf.statement", "device-0")))
        strangers[-1].write_text("work")
    old = time.time() - 7200
    for folder, _, files in os.walk(trial.folder):
        for name in [*files, "."]:
            os.utime(os.path.join(folder, name), (old, old))
    done = machine.answer("gc", trial.folder, "--yes", *(["--states"] if draw.random() < 0.5 else []))
    if done.code != 0:
        raise Failure(f"gc fails: {done.text}")
    for stranger in strangers:
        if not stranger.exists():
            raise Failure(f"gc deleted {stranger.relative_to(trial.folder)}")
    if machine.fsck([kept])[0] != BEGUN:
        raise Failure("gc harmed a checkpoint")
    return machine.judge(TWO, run)


@scenario(count=20, short=1)
def replace_that_fails(trial):
    """restore --replace onto something that cannot take a state: the old state is still there."""
    machine, draw = trial.machine, trial.draw
    run = machine.begun(TWO, trial.folder)
    kept = _kept(machine, TWO, run, trial.folder / "kept")
    devices = machine.devices(TWO, run)
    bad = draw.choice(("a file", "too many", "no space", "no names"))
    words, environment = ["restore", kept, "--replace", "--device", devices[0], "--device", devices[1]], {}
    if bad == "a file":
        (trial.folder / "file").write_text("x")
        words += ["--device", trial.folder / "file"]
    elif bad == "too many":
        for i in range(40):
            words += ["--device", trial.folder / f"more{i}"]
    else:
        environment = shim_environment(machine, trial.folder, fault="fallocate ENOSPC -1 0" if bad == "no space"
                                       else f"mkdir EROFS -{draw.randint(1, 2)} 0")
        words += ["--device", trial.folder / "more"]
    done = machine.answer(*words, env=environment)
    if done.code == 0:
        return Outcome.UNHARMED
    step, sound, checked = machine.fsck(devices)
    if step != BEGUN or not sound:
        raise Failure(f"{bad}: the old state is gone, and there is no new one: {done.text}\n{checked.text}")
    return machine.judge(TWO, run)


@scenario(count=20, short=1)
def small_model_many_devices(trial):
    """More devices than there are parts of the model, or very unequal ones: the run trains, with a remark."""
    machine, draw = trial.machine, trial.draw
    run = trial.folder / "run"
    count = draw.randint(2, 5)
    words = ["train", machine.recipe, "--train.run", run, "--train.steps", BEGUN]
    for i in range(count):
        words += [f"--device.{i}.path", run / f"device{i}"]
        if trial.index % 3 == 1:
            words += [f"--device.{i}.bandwidth", 10 ** draw.randint(0, 3)]
    environment = {}
    if trial.index % 3 == 2:  # the measurement of the devices meets an error
        environment = shim_environment(
            machine, trial.folder, fault=f"open {draw.choice(shim.ERRORS)} {draw.randint(1, 12)} 0")
    done = machine.answer(*words, env=environment)
    if done.code != 0:
        if not environment:
            raise Failure(f"{count} devices: {done.text}")
        second = machine.answer(*words)
        if second.code != 0:
            raise Failure(f"after an error once it cannot be started: {done.text}\n{second.text}")
    if machine.weights_of(run) != machine.undisturbed(ONE, BEGUN):
        raise Failure("wrong bits")
    return Outcome.SAME
