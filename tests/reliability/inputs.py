"""Trials of what people give to the command: recipes, paths and files that are not what they should be."""
import os
import re
import shutil
import socket

from machine import KINDS, state_of
from outcomes import Failure, Outcome
from trials import scenario

_VALUES = ("-1", "0", "1", "2", "3.5", "1e308", "-1e308", "nan", "inf", "18446744073709551615",
           "9223372036854775807", "99999999999999999999999", '""', '"x"', '"-1"', '"1TB"', '"1e9GiB"',
           '"\\u001b[31m"', "[]", "[1, 2]", '["x"]', "{}", "true", "1979-05-27", '"' + "x" * 5000 + '"')
# Keys of which any value is legal work, but too much of it for a test.
_LONG = ("train.steps", "train.sample_tokens", "train.micro_batch", "train.accumulation",
         "train.validation_batches", "data.sequence", "train.threads", "device.threads")
_MEMORY = 12 << 30  # of address space, most of it libraries


def _keys(machine):
    def make():
        text = machine.answer("train", "--help-recipe").out
        section, keys = "", []
        for line in text.splitlines():
            if found := re.match(r"\[\[?(\w+)\]", line):
                section = found[1]
            elif (found := re.match(r"  (\w+) = (\S)", line)) and f"{section}.{found[1]}" not in _LONG:
                keys.append((section, *found.groups()))
        return keys
    return machine.once("keys", make)


@scenario(count=220, short=2)
def odd_recipes(trial):
    """A value of a recipe that is odd in size, sign, type or length; or a recipe that is none."""
    machine, draw = trial.machine, trial.draw
    run, recipe = trial.folder / "run", trial.folder / "recipe.toml"
    text = machine.recipe.read_text()
    if trial.index % 5 == 0:
        data = text.encode()
        recipe.write_bytes(draw.choice((
            b"", draw.randbytes(1000), b"[" * 100_000, b"a=" + b"[" * 100_000, b"a." * 100_000 + b"a=1",
            data[:draw.randrange(len(data))], data.replace(b"=", b"", 1), data + data,
            data + b"\nnothing = 1\n", data + b"\n[nothing]\na = 1\n", b"\xef\xbb\xbf" + data,
            data.replace(b"\n", b"\r\n"), b"\0" * 4096, data.replace(b"[train]", b"[train]\0"))))
        what = "a recipe that is none"
    else:
        section, key, default = draw.choice(_keys(machine))
        of_its_type = [v for v in _VALUES if (v[0] == '"') == (default == '"')]
        value = draw.choice(of_its_type if draw.random() < 0.7 else _VALUES)
        line = f"{key} = {value}"
        text = re.sub(rf"(?m)^{key} = .*\n", "", text)
        text = text.replace(f"[{section}]\n", f"[{section}]\n{line}\n") if f"[{section}]" in text else (
            text + (f"[[device]]\n{line}\n" if section == "device" else f"[{section}]\n{line}\n"))
        recipe.write_text(text)
        what = f"{section}: {line[:80]}"
    # Whatever a path in it names, it is below the trial's folder.
    words = ["train", recipe, "--train.run", run, "--train.steps", 2]
    if trial.index % 5 == 0:
        for key, value in {"data.paths": machine.corpus, "data.sequence": 16, "train.micro_batch": 1,
                           "train.threads": 1, "train.sample_tokens": 0, "model.layers": 1}.items():
            words += ["--" + key, value]
    done = machine.answer(*words, memory=_MEMORY)
    if "\033" in done.text:
        raise Failure(f"{what}: control characters are printed")
    if done.code not in (0, 1, 2):
        raise Failure(f"{what}: code {done.code} {done.text[-500:]}")
    return Outcome.UNHARMED if done.code == 0 else Outcome.REFUSED


def _odd_file(trial, path):
    sort = trial.draw.choice(("folder", "socket", "null", "zero", "dangling", "loop", "bytes", "empty", "secret",
                              "fifo", "fifo", "link", "link"))
    if sort == "folder":
        path.mkdir()
    elif sort == "socket":
        with socket.socket(socket.AF_UNIX) as unix:
            here = os.open(path.parent, os.O_PATH)
            unix.bind(f"/proc/self/fd/{here}/{path.name}")  # a socket's own path is at most 108 bytes
            os.close(here)
    elif sort in ("null", "dangling", "loop", "link"):
        path.symlink_to({"null": "/dev/null", "dangling": path.parent / "nowhere", "loop": path,
                         "link": trial.folder / "victim"}[sort])
    elif sort == "fifo":
        os.mkfifo(path)
    elif sort == "zero":
        path.write_bytes(bytes(10_000))
    elif sort == "bytes":
        path.write_bytes(trial.draw.randbytes(10_000))
    else:
        path.write_bytes(b"")
        if sort == "secret":
            path.chmod(0)
    return sort


@scenario(count=60, short=2)
def odd_files(trial):
    """A file that the command reads or writes is another sort of thing."""
    machine, draw = trial.machine, trial.draw
    kind = KINDS["f32"]
    run = machine.begun(kind, trial.folder)
    recipe = trial.folder / "recipe.toml"
    recipe.write_bytes(machine.recipe.read_bytes())
    places = {"recipe": recipe, "kept recipe": run / "recipe.toml", "log": run / "log.jsonl",
              "run lock": run / "lock", "device lock": state_of(run).with_name("smartinf.lock"),
              "tuning": state_of(run).with_name("smartinf.tuning"), "text": trial.folder / "text.txt",
              "tokens": trial.folder / "tokens.bin", "creation": state_of(run).with_name(
                  "smartinf.state.creating"), "partial": run / "log.jsonl.partial",
              "recipe's partial": run / "recipe.toml.partial",
              "measure": state_of(run).with_name("smartinf.measure")}
    victim = trial.folder / "victim"
    victim.write_bytes(b"somebody else's\n" * 1000)
    name = sorted(places)[trial.index % len(places)]
    if places[name].exists():
        places[name].unlink()
    sort = _odd_file(trial, places[name])
    words = machine.train_words(kind, run)
    words[1] = recipe
    if name in ("text", "tokens"):
        words += ["--data.paths", places[name]]
    if name in ("measure", "tuning"):
        words += ["--engine.io_size", 0, "--engine.io_depth", 0]
    done = machine.answer(*words)
    exported = machine.answer("export", run, "--out", trial.folder / "weights")
    what = f"the {name} is {sort}"
    if done.code not in (0, 1, 2) or exported.code not in (0, 1, 2):
        raise Failure(f"{what}: {done.code} {done.text[-800:]}")
    if victim.read_bytes() != b"somebody else's\n" * 1000:
        raise Failure(f"{what}: what it points at was written to")
    shutil.rmtree(places[name]) if sort == "folder" else places[name].unlink(missing_ok=True)
    step, _, checked = machine.fsck(machine.devices(kind, run))
    if step is None:
        raise Failure(f"{what}: the state is lost: {checked.text}")
    if done.code != 0:
        return Outcome.REFUSED
    return Outcome.UNHARMED


@scenario(count=40, short=2)
def odd_paths(trial):
    """Folders with odd names, and arguments that are no folders."""
    machine, draw = trial.machine, trial.draw
    names = ("with space", "-dash", "ünïcödé", "new\nline", "quote'\"", "$HOME", "x" * 250, "x" * 300, "a/../b",
             "./a//b/", "..", "", "dev/null", "\\", "%s%n", "a" + "/a" * 120, "*", "[x]", "tab\there")
    name = names[trial.index % len(names)]
    (trial.folder / "in").mkdir()
    run = f"{trial.folder}/in/{name}"
    if trial.index % 2 == 0:
        done = machine.answer("train", machine.recipe, f"--train.run={run}", "--train.steps", 2)
        if done.code == 0:
            for words in (("fsck", run), ("export", run, "--out", trial.folder / "out"),
                          ("inspect", f"{run}/state")):
                other = machine.answer(*words)
                if other.code != 0:
                    raise Failure(f"train works in {name!r}, {words[0]} does not: {other.text[-800:]}")
            return Outcome.UNHARMED
    else:
        device = machine.begun(KINDS["f32"], trial.folder) / "device0"
        words = draw.choice((("checkpoint", device, "--out", run), ("reshard", "--from", device, "--to", run),
                             ("fsck", run), ("inspect", run), ("restore", run, "--device", trial.folder / "x"),
                             ("gc", run), ("export", run, "--out", trial.folder / "x")))
        done = machine.answer(*words)
    return Outcome.REFUSED if done.code else Outcome.UNHARMED
