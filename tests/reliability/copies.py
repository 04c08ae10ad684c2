"""Trials of what copies a state: checkpoint, restore, reshard and export, interrupted at any call."""
import json
import pathlib
import shutil
import signal

import shim
from machine import BEGUN, KINDS, device_of, check_end, weights_in
from outcomes import Failure, Outcome
from processes import counted, recorded, shim_environment
from trials import scenario

KIND = KINDS["threads"]
TOOLS = ("checkpoint", "restore", "replace", "reshard", "export")


def words_of(machine, tool, root):
    devices = machine.devices(KIND, root / "run")
    kept = root / "kept" / f"step-{BEGUN:08d}"
    return {"checkpoint": ("checkpoint", *devices, "--out", root / "made"),
            "restore": ("restore", kept, "--device", root / "to0", "--device", root / "to1"),
            "replace": ("restore", kept, *(w for d in devices for w in ("--device", d)), "--replace"),
            "reshard": ("reshard", "--from", *devices, "--to", root / "to0", root / "to1"),
            "export": ("export", root / "run", "--out", root / "made", "--type", "f32")}[tool]


def prepare(machine, root):
    """A run at step BEGUN, and a checkpoint of it."""
    def make():
        folder = machine.folder / "to_be_copied"
        folder.mkdir()
        run = machine.begun(KIND, folder)
        done = machine.answer("checkpoint", *machine.devices(KIND, run), "--out", folder / "kept", "--json")
        if done.code != 0 or json.loads(done.out)["checkpoint"] != str(folder / "kept" / f"step-{BEGUN:08d}"):
            raise Failure(f"no checkpoint: {done.text}")
        return folder
    shutil.copytree(machine.once("to_be_copied", make), root, dirs_exist_ok=True)


def check_source(machine, tool, root):
    """What was copied from is as it was. Of restore --replace, only the checkpoint is."""
    for devices in ([] if tool == "replace" else [machine.devices(KIND, root / "run")]) + [
            [root / "kept" / f"step-{BEGUN:08d}"]]:
        step, sound, done = machine.fsck(devices)
        if step != BEGUN or not sound:
            raise Failure(f"the source of {tool} is harmed: {done.text}")


def check_result(machine, tool, root):
    """What the tool made is whole, and training goes on from it with the same weights."""
    run = root / "run"
    if tool == "export":
        weights = machine.once("exported", lambda: machine.undisturbed(KIND, BEGUN))
        if weights_in(root / "made") != weights:
            raise Failure("wrong weights were exported")
        return
    devices = machine.devices(KIND, run)
    if tool == "checkpoint":
        done = machine.answer("restore", root / "made" / f"step-{BEGUN:08d}",
                              *(w for d in devices for w in ("--device", d)), "--replace")
        if done.code != 0:
            raise Failure(f"a checkpoint that was made cannot be restored: {done.text}")
    elif tool != "replace":
        for i, device in enumerate(devices):
            shutil.rmtree(device, ignore_errors=True)
            (root / f"to{i}").rename(device)
    step, sound, done = machine.fsck(devices)
    if step != BEGUN or not sound:
        raise Failure(f"what {tool} made is not sound: {done.text}")
    # A copy is a run of its own, which this folder does not know yet.
    copied = json.loads(machine.answer("inspect", devices[0], "--json").out)
    copied = copied.get("run") or copied["devices"][0]["run"]
    done = machine.answer(*machine.train_words(KIND, run), "--take-over", copied[:8])
    if done.code != 0:
        raise Failure(f"training does not go on from what {tool} made: {done.text}")
    machine.check_weights(KIND, run)


def again(machine, tool, root):
    """The tool once more after it failed or was killed; what it left may first have to be cleaned up."""
    done = machine.answer(*words_of(machine, tool, root))
    if done.code == 0:
        return
    clean = machine.answer("gc", root, "--yes")
    second = machine.answer(*words_of(machine, tool, root))
    if clean.code != 0 or second.code != 0:
        raise Failure(f"{tool} cannot be done again:\n{done.text}\ngc: {clean.text}\n{second.text}")


def made(tool, root):
    """Whether there is something under the name that only a whole result has."""
    return {"checkpoint": root / "made" / f"step-{BEGUN:08d}", "export": root / "made",
            "restore": root / "to0" / "smartinf.state", "reshard": root / "to0" / "smartinf.state",
            "replace": device_of(root / "run", 0) / "smartinf.state"}[tool].exists()


@scenario(count=60, short=2)
def interrupted_copy(trial):
    """A copying command is killed, gets Ctrl-C, or an error of the system, at any of its calls."""
    machine, draw = trial.machine, trial.draw
    tool = TOOLS[trial.index % len(TOOLS)]
    root = trial.folder / "root"
    prepare(machine, root)
    calls = counted(machine, tool, lambda root: prepare(machine, root),
                    lambda root: words_of(machine, tool, root))
    fault = draw.choice(("kill", "kill", "interrupt", draw.choice(shim.ERRORS)))
    words = words_of(machine, tool, root)
    nth = draw.randint(1, calls["any"])
    done = machine.run(*words, env=shim_environment(machine, root, fault=f"any {fault} {nth} 1",
                                                    fired=trial.folder / "fired"))
    try:
        if not (fault == "kill" and done.code == -signal.SIGKILL):
            check_end(done, words)
        check_source(machine, tool, root)
        if done.code != 0:
            if tool in ("checkpoint", "export") and made(tool, root):
                shutil.rmtree(root / "made")  # whole, then: the end was no longer said
            elif tool in ("restore", "reshard") and made(tool, root) and machine.fsck(
                    [root / "to0", root / "to1"])[0] is not None:
                for i in range(2):
                    shutil.rmtree(root / f"to{i}")
            again(machine, tool, root)
        check_result(machine, tool, root)
    except Failure as failure:
        raise Failure(f"{tool}, {fault} at call {nth}: {failure}\nIt had said: {done.text[-800:]}") from None
    return Outcome.SAME if done.code == 0 else Outcome.REFUSED


@scenario(count=40, short=2)
def power_cut_copy(trial):
    """A copying command loses power: after it said that it is done all is there, before it the source is."""
    machine, draw = trial.machine, trial.draw
    tool = TOOLS[trial.index % len(TOOLS)]
    before, record, lock = recorded(machine, tool, lambda root: prepare(machine, root),
                              lambda root: words_of(machine, tool, root))
    done = draw.random() < 0.5
    cut = len(record) if done else draw.randint(0, len(record))
    fate = "drop" if done else draw.choice(("drop", "keep", "tear"))
    with lock:
        root = pathlib.Path(record.root)
        shim.crash(before, record, cut, fate, draw, root)
        try:
            _after_power_cut(machine, tool, root, done)
        except Failure as failure:
            raise Failure(f"{tool}, power cut at {cut} of {len(record)}, {fate}: {failure}") from None
        except FileNotFoundError as error:
            raise Failure(f"{tool} said that it is done, and after a power cut there is no {error.filename}"
                          if done else f"{tool}, {cut}: {error}") from None
    return Outcome.SAME


def _after_power_cut(machine, tool, root, done):
    check_source(machine, tool, root)
    if not done:
        whole = made(tool, root)
        if whole and tool in ("restore", "reshard", "replace"):
            whole = machine.fsck(machine.devices(KIND, root / "run") if tool == "replace" else
                                 [root / "to0", root / "to1"])[0] is not None
        if not whole:
            again(machine, tool, root)
    check_result(machine, tool, root)
