"""The command under test: tiny models, undisturbed runs to compare with, and a judge of what it says."""
import dataclasses
import hashlib
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import struct
import subprocess
import threading

from outcomes import Failure, Outcome

OLDER, BEGUN, STEPS = 2, 4, 8  # most trials harm a run after step 4 and let it go on to step 8
ANSWER_S = 120  # longer is a hang: half a second is usual, and other tests may run beside this
# The learning rate does not depend on train.steps, so that a run can be made longer.
RECIPE = """
[model]
layers = 2
width = 64
heads = 4
kv_heads = 2
mlp_width = 192
[data]
paths = ["{corpus}"]
sequence = 16
validation_share = 0.1
[train]
steps = {steps}
micro_batch = 2
threads = 1
lr = 3e-3
lr_floor = 1.0
warmup_steps = 3
validate_every = 0
validation_batches = 1
sample_tokens = 0
[engine]
io_size = "64KiB"
io_depth = 4
memory_budget = "32MiB"
subgroup_elements = 65536
"""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A sort of run: its devices and flags."""
    name: str
    devices: int = 1
    flags: tuple = ()


KINDS = {kind.name: kind for kind in (
    Kind("f32"),
    Kind("two", devices=2),
    Kind("bf16", flags=("--optimizer.format", "bf16")),
    Kind("q8", flags=("--optimizer.format", "q8")),
    Kind("m24", devices=2, flags=("--optimizer.format", "q8", "--optimizer.master", "m24")),
    Kind("topk", flags=("--compress.density", "0.08", "--compress.residual_every", "1")),
    Kind("threads", devices=2, flags=("--engine.ring", "threads")),
    Kind("spill", devices=2, flags=("--engine.gradient_budget", "64KiB", "--train.accumulation", "2")),
    Kind("q8_kept", devices=2, flags=("--optimizer.format", "q8", "--checkpoint.every", "3")),
    # A little under half of the guesses are wrong at this limit; at the default of 1 all are.
    Kind("early", devices=2, flags=("--optimizer.overlap", "early", "--train.clip_norm", "2.6")),
    Kind("topk_two", devices=2, flags=("--compress.density", "0.08", "--compress.residual_every", "1")),
)}


@dataclasses.dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def text(self):
        return self.out + self.err


class Machine:
    """Runs of one smartinf in one folder. Methods may be called from several threads."""

    def __init__(self, smartinf, python_path, folder, shim):
        self.smartinf, self.python_path = str(pathlib.Path(smartinf).resolve()), python_path
        self.folder, self.shim = pathlib.Path(folder), shim
        self.corpus = self.folder / "corpus.txt"
        draw = random.Random(1)
        words = ["def", "return", "if", "else", "for", "value", "index", "(", ")", ":", "=", "\n"]
        self.corpus.write_text(" ".join(draw.choice(words) for _ in range(4000)), encoding="ascii")
        self.recipe = self.folder / "recipe.toml"
        self.recipe.write_text(RECIPE.format(corpus=self.corpus, steps=STEPS), encoding="utf-8")
        self._made = {}
        self._lock = threading.Lock()

    # --- the command ---------------------------------------------------------------------------------

    def start(self, *words, env=None):
        return subprocess.Popen([self.smartinf, *map(str, words)], stdout=subprocess.PIPE, text=True,
                                stderr=subprocess.PIPE, env={**os.environ, **(env or {})}, errors="replace",
                                stdin=subprocess.DEVNULL)

    def run(self, *words, env=None, seconds=ANSWER_S, memory=None):
        """Runs the command to its end, however it ends. memory: most bytes of address space.
        Failure: no end in time."""
        with self.start(*words, env=env) as process:
            if memory is not None:
                resource.prlimit(process.pid, resource.RLIMIT_AS, (memory, memory))
            try:
                done = Done(-1, *process.communicate(timeout=seconds))
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                raise Failure(f"no end after {seconds} s: {_said(words)}\n{_tail(out + err)}") from None
        done.code = process.returncode
        return done

    def answer(self, *words, **options):
        """run(), for commands that are to end by themselves. Failure: by a signal, or without a word."""
        done = self.run(*words, **options)
        check_end(done, words)
        return done

    def train_words(self, kind, run, steps=STEPS):
        words = ["train", self.recipe, "--train.run", run, "--train.steps", steps, *kind.flags]
        for i in range(kind.devices):
            words += [f"--device.{i}.path", device_of(run, i), f"--device.{i}.bandwidth", 1]
        return words

    def devices(self, kind, run):
        return [device_of(run, i) for i in range(kind.devices)]

    # --- undisturbed runs ----------------------------------------------------------------------------

    def once(self, key, make):
        """What make() returned the first time that it was asked for under this key."""
        with self._lock:
            made = self._made.setdefault(key, [threading.Lock(), None])
        with made[0]:
            if made[1] is None:
                made[1] = make()
            return made[1]

    def train(self, kind, run, steps):
        done = self.answer(*self.train_words(kind, run, steps))
        if done.code != 0:
            raise Failure(f"an undisturbed run fails: {_tail(done.text)}")

    def weights_of(self, run):
        """sha256 of the master weights, by way of export."""
        out = pathlib.Path(str(run) + "_weights")
        shutil.rmtree(out, ignore_errors=True)
        done = self.answer("export", run, "--out", out, "--type", "f32")
        if done.code != 0:
            raise Failure(f"export of a run that trained fails: {_tail(done.text)}")
        weights = weights_in(out)
        shutil.rmtree(out)
        return weights

    def undisturbed(self, kind, steps):
        """The weights of a run of `kind` that made so many steps in one go."""
        def make():
            run = self.folder / f"undisturbed_{kind.name}_{steps}"
            self.train(kind, run, steps)
            weights = self.weights_of(run)
            shutil.rmtree(run)
            return weights
        return self.once((kind.name, steps), make)

    def history(self, kind):
        """Folders of one run of `kind` as it was after each of OLDER and BEGUN steps. Not to be changed."""
        def make():
            folder = self.folder / f"history_{kind.name}"
            for steps in (OLDER, BEGUN):
                self.train(kind, folder / "run", steps)
                shutil.copytree(folder / "run", folder / str(steps))
            return {steps: folder / str(steps) for steps in (OLDER, BEGUN)}
        return self.once((kind.name, "history"), make)

    def begun(self, kind, folder):
        """A copy of a run that stands at step BEGUN, to be harmed."""
        run = pathlib.Path(folder) / "run"
        shutil.copytree(self.history(kind)[BEGUN], run)
        return run

    # --- judging -------------------------------------------------------------------------------------

    def fsck(self, devices, *flags):
        """What fsck says: (step or None where the state is lost, whether all is sound, Done)."""
        done = self.answer("fsck", *devices, "--json", *flags)
        try:
            found = json.loads(done.out)
        except ValueError:
            if done.code == 0:
                raise Failure(f"fsck --json is no JSON: {_tail(done.text)}") from None
            return None, False, done
        lost = bool(found["problem"]) or any(
            device.get("state_lost", True) for device in found["devices"])
        if found["sound"] and (lost or done.code != 0):
            raise Failure(f"fsck contradicts itself: code {done.code}\n{done.out}")
        return None if lost else found["step"], found["sound"], done

    def judge(self, kind, run, steps=STEPS, foreign=False):
        """Lets a harmed run go on to its end: its weights are an undisturbed run's, or it is refused and
        fsck has said so before. foreign: a state that is sound, but not this folder's, may be refused, too."""
        step, _, checked = self.fsck(self.devices(kind, run))
        done = self.answer(*self.train_words(kind, run, steps))
        if done.code != 0:
            if step is not None and not foreign:
                raise Failure(f"fsck finds step {step}, train refuses: {_tail(done.text)}\n"
                              f"fsck: {_tail(checked.text)}")
            return Outcome.REFUSED
        if step is None:
            raise Failure(f"fsck says that the state is lost, and train goes on: {_tail(checked.text)}\n"
                          f"{_tail(done.text)}")
        self.check_weights(kind, run, steps)
        return Outcome.SAME

    def check_weights(self, kind, run, steps=STEPS):
        if self.weights_of(run) != self.undisturbed(kind, steps):
            raise Failure("wrong bits, and nothing said so: the weights are not those of an undisturbed run")


def device_of(run, index):
    return pathlib.Path(run) / f"device{index}"


def state_of(run, index=0):
    return device_of(run, index) / "smartinf.state"


def weights_in(folder):
    """sha256 of the tensors' bytes."""
    data = (pathlib.Path(folder) / "model.safetensors").read_bytes()
    (header,) = struct.unpack_from("<Q", data)
    return hashlib.sha256(data[8 + header:]).hexdigest()


def check_end(done, words):
    """Failure: a death by a signal, a crash's words, or an error without a message."""
    if done.code < 0:
        raise Failure(f"died of {signal.Signals(-done.code).name}: {_said(words)}\n{_tail(done.text)}")
    for sign in ("terminate called", "Traceback (most", "Sanitizer", "runtime error:", "check failed"):
        if sign in done.text:
            raise Failure(f"crashed: {_said(words)}\n{_tail(done.text)}")
    if done.code not in (0, 1, 2, 130):
        raise Failure(f"exit code {done.code}: {_said(words)}\n{_tail(done.text)}")
    if done.code in (1, 2) and not done.text.strip():
        raise Failure(f"exit code {done.code} without a message: {_said(words)}")


def _said(words):
    return "smartinf " + " ".join(map(str, words))


def _tail(text):
    return "\n".join(text.strip().splitlines()[-6:])[-1500:]
