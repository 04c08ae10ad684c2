"""Trials that end, stop or mislead a process: kills, errors of the system, power cuts, second processes."""
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import struct
import subprocess
import threading

import shim
from machine import ANSWER_S, BEGUN, KINDS, STEPS, Done, check_end
from outcomes import Failure, Outcome
from trials import scenario

KILLED = ("two", "threads", "topk_two", "q8_kept", "spill", "early")
CUT = ("threads", "topk_two", "q8_kept", "f32", "early")
KILLED_STEPS = 60


def shim_environment(machine, root, **names):
    """Of a process that runs with the shim: fault="CALL KIND NTH SEED", fired=, count=, record=FILE."""
    return {"LD_PRELOAD": machine.shim, "RELIABILITY_ROOT": str(root),
            **{f"RELIABILITY_{name.upper()}": str(value) for name, value in names.items()}}


def _last_step(text):
    steps = re.findall(r"^step +(\d+)/", text, re.MULTILINE)
    return int(steps[-1]) if steps else 0


def _check_nothing_lost(said, found, of):
    """A step's line comes before its commit: the last one may be lost, no other."""
    if said > 0 and (found is None or found < said - 1):
        raise Failure(f"step {said} was printed, step {found} is found after {of}")


@scenario(count=40, short=2)
def kill(trial):
    """kill -9 at about four moments of one run, one in four of them before its first step."""
    kind = KINDS[KILLED[trial.index % len(KILLED)]]
    run = trial.folder / "run"
    words = trial.machine.train_words(kind, run, KILLED_STEPS)
    said = 0
    for _ in range(4):
        process = trial.machine.start(*words)
        late = threading.Timer(ANSWER_S, process.kill)
        late.start()
        text = ""
        if trial.draw.random() < 0.25:
            threading.Event().wait(trial.draw.uniform(0, 0.7))
        else:
            wanted = said + trial.draw.randint(1, KILLED_STEPS // 3)
            for line in process.stdout:
                text += line
                if _last_step(line) >= wanted:
                    break
            threading.Event().wait(trial.draw.uniform(0, 0.02))
        process.kill()
        out, err = process.communicate()
        if not late.is_alive():
            raise Failure(f"no step in {ANSWER_S} s:\n{text}{out}{err}")
        late.cancel()
        text += out
        first = re.search(r"^step +(\d+)/", text, re.MULTILINE)
        if first:
            _check_nothing_lost(said, int(first[1]) - 1, "a kill")
        said = max(said, _last_step(text))
        if process.returncode == 0:
            break
    return trial.machine.judge(kind, run, KILLED_STEPS)


def counted(machine, name, before, words_in):
    """How often a command makes each call. before(root) makes the folder's contents; words_in(root): the command."""
    def make():
        root, count = machine.folder / f"counted_{name}", machine.folder / f"count_{name}"
        root.mkdir()
        before(root)
        done = machine.answer(*words_in(root), env=shim_environment(machine, root, count=count))
        if done.code != 0:
            raise Failure(f"a command under the shim fails: {done.text}")
        counts = (line.split() for line in count.read_text().splitlines())
        return {call: int(number) for call, number in counts}
    return machine.once((name, "counted"), make)


def calls_of_training(machine, kind, begun):
    """begun: from step BEGUN on."""
    return counted(machine, f"{kind.name}_{begun}", lambda root: machine.begun(kind, root) if begun else None,
                   lambda root: machine.train_words(kind, root / "run"))


@scenario(count=400, short=3)
def system_errors(trial):
    """One call of a training run fails, is short, or does something else than it says; or all from there."""
    machine, draw = trial.machine, trial.draw
    kind = KINDS[("threads", "early")[trial.index % 2]]
    begun = draw.random() < 0.6
    calls = calls_of_training(machine, kind, begun)
    # Reads and writes of the state most often: their faults are the most various.
    call = draw.choice([call for call in (*shim.CALLS, *3 * ("preadv2", "pwritev2")) if calls[call] > 0])
    fault = draw.choice((*shim.ERRORS, *shim.KINDS.get(call, ()), "kill"))
    nth = draw.randint(1, calls[call])
    if fault in shim.ERRORS and draw.random() < 0.25:
        nth = -nth
    run = machine.begun(kind, trial.folder) if begun else trial.folder / "run"
    fired = trial.folder / "fired"
    words = machine.train_words(kind, run)
    done = machine.run(*words, env=shim_environment(
        machine, trial.folder, fault=f"{call} {fault} {nth} {draw.randrange(2**31)}", fired=fired))
    what = f"{call} {fault} {nth}, {'a run going on' if begun else 'a new run'}"
    if not (fault == "kill" and done.code == -signal.SIGKILL):
        try:
            check_end(done, words)
        except Failure as failure:
            raise Failure(f"{what}: {failure}") from None
    try:
        # Further than the run has been, so that every plane is read again.
        return _after(machine, kind, run, STEPS + 2, harmed=fault in shim.LIES)
    except Failure as failure:
        raise Failure(f"{what}: {failure}\nThe run itself had said:\n{done.text[-1500:]}") from None


def _after(machine, kind, run, steps, harmed=False):
    """judge(), where perhaps nothing has been begun; harmed: the state may be lost."""
    if not (run / "log.jsonl").exists() or not (run / "log.jsonl").read_text().strip():
        done = machine.answer(*machine.train_words(kind, run, steps))
        if done.code != 0:
            if harmed:
                return Outcome.REFUSED
            raise Failure(f"a run that had made no step does not begin again: {done.text[-1500:]}")
        machine.check_weights(kind, run, steps)
        return Outcome.SAME
    outcome = machine.judge(kind, run, steps)
    if outcome is Outcome.REFUSED and not harmed:
        raise Failure("the state is lost, and nothing had written anything wrong")
    return outcome


# --- power cuts -----------------------------------------------------------------------------------------


def recorded(machine, name, before, words_in, expected=(0,)):
    """A command's record: a copy of its folder from before, the Record, a lock for who works in that folder.
    before(root) makes the folder's contents; words_in(root): the command. Images are made at the same place:
    a run's folder that is elsewhere is another run's."""
    def make():
        folder = machine.folder / f"recorded_{name}"
        folder.mkdir()
        root = folder / "root"
        root.mkdir()
        before(root)
        shutil.copytree(root, folder / "before")
        inodes = shim.inodes_below(root)
        done = machine.answer(*words_in(root), env=shim_environment(machine, root, record=folder / "record"))
        if done.code not in expected:
            raise Failure(f"the command to be recorded fails: {done.text}")
        return folder / "before", shim.Record(folder / "record", root, inodes), threading.Lock()
    return machine.once((name, "recorded"), make)


@scenario(count=120, short=2)
def power_cut(trial):
    """Training loses power at any write or sync: what was not synced is lost, kept or torn."""
    machine, draw = trial.machine, trial.draw
    kind = KINDS[CUT[trial.index % len(CUT)]]
    begun = trial.index // len(CUT) % 2 == 0
    before, record, lock = recorded(
        machine, f"{kind.name}_{begun}", lambda root: machine.begun(kind, root) if begun else None,
        lambda root: machine.train_words(kind, root / "run"))
    cut = draw.randint(0, len(record))
    fate = draw.choice(("drop", "keep", "tear", "tear"))
    said = max((json.loads(data).get("step", 0) for data in _log_lines(record, cut)), default=0)
    with lock:
        shim.crash(before, record, cut, fate, draw, record.root)
        try:
            return _after_power_cut(machine, kind, pathlib.Path(record.root) / "run", begun, said)
        except Failure as failure:
            raise Failure(f"{kind.name}, cut at {cut} of {len(record)}, {fate}: {failure}") from None


def _after_power_cut(machine, kind, run, begun, said):
    devices = machine.devices(kind, run)
    if said > 1 or begun:
        step, _, done = machine.fsck(devices)
        _check_nothing_lost(max(said, BEGUN + 1 if begun else 0), step, f"a power cut: {done.text}")
    elif not any(device.joinpath("smartinf.state").exists() for device in devices):
        shutil.rmtree(run, ignore_errors=True)
    done = machine.answer(*machine.train_words(kind, run))
    if done.code != 0:
        raise Failure(f"does not go on: {done.text}")
    machine.check_weights(kind, run)
    return Outcome.SAME


def _log_lines(record, cut):
    """Lines of log.jsonl that had been written when the first `cut` operations were done."""
    for data in record.data(cut):
        if data.startswith(b'{"step":'):
            yield from data.decode().splitlines()


# --- a second process -----------------------------------------------------------------------------------


@scenario(count=20, short=1)
def second_process(trial):
    """A run stands still in the middle of a step; every other command is refused, but inspect."""
    machine, draw = trial.machine, trial.draw
    kind = KINDS["threads"]
    checkpoints = trial.folder / "kept"
    run = machine.begun(kind, trial.folder)
    devices = machine.devices(kind, run)
    made = machine.answer("checkpoint", *devices, "--out", checkpoints, "--json")
    if made.code != 0:
        raise Failure(f"no checkpoint: {made.text}")
    kept = json.loads(made.out)["checkpoint"]
    nth = draw.randint(1, calls_of_training(machine, kind, True)["pwritev2"])
    process = machine.start(*machine.train_words(kind, run), env=shim_environment(
        machine, trial.folder, fault=f"pwritev2 stop {nth} 0", fired=trial.folder / "fired"))
    late = threading.Timer(ANSWER_S, process.kill)
    late.start()
    what = ""
    try:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        commands = {"train": machine.train_words(kind, run),
                    "train elsewhere": [*machine.train_words(kind, run), "--train.run", trial.folder / "b"],
                    "fsck": ("fsck", *devices), "checkpoint": ("checkpoint", *devices, "--out", checkpoints),
                    "reshard": ("reshard", "--from", *devices, "--to", trial.folder / "to"),
                    "export": ("export", run, "--out", trial.folder / "weights"),
                    "restore": ("restore", kept, "--device", devices[0], "--device", devices[1], "--replace"),
                    "gc": ("gc", trial.folder, "--states", "--yes"), "inspect": ("inspect", devices[0])}
        if trial.index % 2 == 1:  # somebody took it for left over
            for lock in (run / "lock", *(pathlib.Path(device, "smartinf.lock") for device in devices)):
                lock.unlink(missing_ok=True)
            what = "after its lock files were deleted"
        for name in draw.sample(sorted(commands), 4):
            done = machine.answer(*commands[name])
            if (done.code == 0) != (name in ("inspect", "gc")):
                raise Failure(f"{name} beside a running process {what}: {done.text}")
            if done.code != 0 and str(process.pid) not in done.text and "process" not in done.text:
                raise Failure(f"{name} does not say that another process is there: {done.text}")
        if not all(pathlib.Path(device, "smartinf.state").exists() for device in devices):
            raise Failure("the state of a running process was deleted")
    finally:
        process.send_signal(signal.SIGCONT)
        out, err = process.communicate()
        late.cancel()
    if process.returncode != 0:
        raise Failure(f"the first process: code {process.returncode} {out[-500:]}{err[-1500:]}")
    machine.check_weights(kind, run)
    return Outcome.SAME


# --- limits -----------------------------------------------------------------------------------------------


@scenario(count=20, short=1)
def limits(trial):
    """A file may not grow, memory ends, files are few, or the data are cut short under a running process."""
    machine, draw = trial.machine, trial.draw
    kind = KINDS["f32"]
    what = ("file size", "cut short", "descriptors", "address space")[trial.index % 4]
    begun = what != "cut short" and draw.random() < 0.5
    run = machine.begun(kind, trial.folder) if begun else trial.folder / "run"
    words = machine.train_words(kind, run)
    if what == "cut short":
        tokens = trial.folder / "tokens.bin"
        tokens.write_bytes(struct.pack("<256i", 20240520, 1, 1 << 20, *253 * (0,)) +
                           b"".join(bytes((byte, 0)) for byte in draw.randbytes(1 << 20)))
        process = machine.start(*words, "--train.steps", 100_000, "--data.paths", tokens,
                                "--model.vocabulary", 256)
        late = threading.Timer(ANSWER_S, process.kill)
        late.start()
        for line in process.stdout:
            if line.startswith("step"):
                break
        os.truncate(tokens, 4096)
        out, err = process.communicate()
        late.cancel()
        check_end(Done(process.returncode, out, err), words)
        return Outcome.REFUSED if process.returncode else Outcome.UNHARMED
    limit, most = {"file size": (resource.RLIMIT_FSIZE, draw.choice((0, 4096, 1 << 20, 10 << 20))),
                   "descriptors": (resource.RLIMIT_NOFILE, draw.randint(40, 80)),
                   "address space": (resource.RLIMIT_AS, draw.randint(8, 30) << 28)}[what]
    if what == "file size":
        words += ["--engine.io_size", 0, "--engine.io_depth", 0]
    with machine.start(*words) as process:
        resource.prlimit(process.pid, limit, (most, most))
        try:
            done = Done(-1, *process.communicate(timeout=ANSWER_S))
        except subprocess.TimeoutExpired:
            process.kill()
            raise Failure(f"no end under a limit of {what} of {most}") from None
    done.code = process.returncode
    # The loader's own words where not even libraries fit.
    if not (done.code == 127 and "shared libraries" in done.err):
        try:
            check_end(done, words)
        except Failure as failure:
            raise Failure(f"{what} of {most}: {failure}") from None
    return _after(machine, kind, run, STEPS)
