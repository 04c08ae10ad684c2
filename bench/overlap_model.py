#!/usr/bin/env python3
"""What `smartinf simulate --overlap` says of a step, against the same step measured on this machine.

    bench/overlap_model.py --device DIR [--machine FILE] [--params 2e8] [--program bench|train|schedules] [--spill]

bench: `smartinf bench overlap`, a step whose computing is a sleep of a given length. train: three short runs of
`smartinf train` (the recipe of bench/overlap.py). schedules: runs of a smaller model as `smartinf plan` writes them, with
overlap none, late and early, where everything stays in memory and where weights are streamed with two sizes of memory, with
several micro batches, and with two ranks on this machine. The machine file is made by `smartinf calibrate` where none is
given. Of it the rate of computing is set so that forward and backward alone take as long as they did. simulated_s:
with the drives of the file; fitted_s: with drives so much faster or slower that the update alone takes as long as it
did, because the rate of a drive drifts between two runs. With schedules both rates are set once in a round, by the first
row, where everything stays and nothing overlaps; all other rows are predictions. One line of JSON for each row, then the differences.
SMARTINF names the binary [build/release/bin/smartinf]. Run it when nothing else runs.
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

import overlap  # the recipe of the train program, beside this file

ROOT = pathlib.Path(__file__).resolve().parent.parent
SMARTINF = os.environ.get("SMARTINF", str(ROOT / "build/release/bin/smartinf"))
LAYERS = 32  # of bench overlap
# The Llama that bench/overlap.py trains, on bytes.
LLAMA = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16,
         "num_key_value_heads": 16, "intermediate_size": 2816, "vocab_size": 256, "tie_word_embeddings": True}


def run(*words):
    done = subprocess.run([SMARTINF, *map(str, words)], stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def with_values(text, values):
    """A machine file's text in which keys, named "section.key", have other values (or are multiplied by a float)."""
    lines, section = [], ""
    for line in text.splitlines():
        if header := re.match(r"\s*\[+(\w+)\]+", line):
            section = header.group(1)
        key = re.match(r"(\w+) = ([^#]*[^#\s])", line)
        value = values.get(f"{section}.{key.group(1)}") if key else None
        if value is not None:
            line = f"{key.group(1)} = {value(key.group(2)) if callable(value) else value}"
        lines.append(line)
    return "\n".join(lines) + "\n"


class Model:
    """The simulator's step for one measured program."""

    def __init__(self, machine, words, folder, values):
        self.machine, self.words, self.path = machine, words, os.path.join(folder, "machine.toml")
        self.values = {"gpu.product_efficiency": 1.0, **values}

    def step(self, mode, peak_flops, drives=1.0, guess="right"):
        faster = lambda rate: float(rate) * drives  # noqa: E731
        values = {**self.values, "gpu.peak_flops": peak_flops, "device.read_bytes_per_s": faster,
                  "device.write_bytes_per_s": faster}
        pathlib.Path(self.path).write_text(with_values(self.machine, values), encoding="utf-8")
        words = ["--machine", self.path, "--method", "su+o", "--overlap", mode, "--guess", guess]
        return run("simulate", *self.words, *words, "--json")[0]

    def peak_flops(self, computing_s, whole):
        """With which computing takes so long; whole: with all else that forward and backward do."""
        slow, fast = (self.step("none", peak) for peak in (1e12, 2e12))
        slow_s, fast_s = (times["forward_s"] + times["backward_s"] for times in (slow, fast))
        rest_s = 2 * fast_s - slow_s
        return 2e12 * (slow_s - fast_s) / (computing_s - rest_s if whole else computing_s)

    def drives(self, peak, update_s):
        """Factor of the drives' rates with which an update takes so long."""
        low, high = 0.05, 20.0
        for _ in range(30):
            middle = (low * high) ** 0.5
            slower = self.step("none", peak, middle)["update_s"] > update_s
            low, high = (middle, high) if slower else (low, middle)
        return (low * high) ** 0.5


def bench_rows(args):
    words = ["--params", args.params, "--layers", LAYERS, "--rounds", args.rounds, "--computing", args.computing]
    words += ["--spill"] if args.spill else []
    for guess in ("right", "wrong"):
        overlaps = "none,late,early" if guess == "right" else "early"
        rows = run("bench", "overlap", "--device", os.path.join(args.device, "bench"), *words, "--overlap", overlaps,
                   "--guesses", guess, "--json")
        for row in rows:
            yield {"overlap": row["overlap"], "guess": guess, "computing_s": row["computing_s"],
                   "update_s": row["update_s"], "measured_s": row["step_s"]}


def train_rows(args):
    given = argparse.Namespace(smartinf=SMARTINF, steps=args.steps, clip_norm=0)
    for _ in range(args.rounds):
        none = None
        for mode in ("none", "late", "early"):
            with tempfile.TemporaryDirectory(dir=args.device) as folder:
                row = overlap.command(given, mode, folder)
            none = none or row
            yield {"overlap": mode, "guess": "right", "computing_s": none["compute_s"], "update_s": none["exposed_s"],
                   "measured_s": row["step_s"]}


SMALL = {"model_type": "llama", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
         "num_key_value_heads": 12, "intermediate_size": 2048, "vocab_size": 256, "tie_word_embeddings": False}
SEQUENCE = 256

# Weights in memory; streamed with so much more memory than the least; ranks. The first fits the rates.
SCHEDULES = [{"memory": memory, "overlap": mode, "accumulation": batches, "ranks": ranks}
        for memory, batches, ranks, modes in (
            ("all", 2, 1, ("none", "late", "early")), ("all", 1, 1, ("none", "late", "early")),
            (150, 4, 1, ("none", "late", "early")), (40, 4, 1, ("none", "late", "early")),
            ("all", 2, 2, ("none", "late")), ("all", 4, 2, ("none", "late")), (100, 4, 2, ("none", "late")))
        for mode in modes]


class Schedules:
    """The program "schedules". Each row is planned, and its recipe run as `smartinf plan` writes it."""

    def __init__(self, args, machine, folder):
        self.args, self.text = args, machine
        self.folder = pathlib.Path(folder)
        (self.folder / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
        text = "a rather short text, of which only the length matters. "
        (self.folder / "text.txt").write_text(4000 * text, encoding="utf-8")
        self.values = {"gpu.product_efficiency": 1.0}
        self.drives = 1.0

    def machine(self, row, **values):
        devices = row["ranks"]
        part = lambda rate: float(rate) / devices  # noqa: E731
        drive = lambda rate: float(rate) * self.drives / devices  # noqa: E731
        text = with_values(self.text, {
            **self.values, "device.count": devices, "device.read_bytes_per_s": drive, "device.write_bytes_per_s": drive,
            "device.update_bytes_per_s": part, "device.decompress_bytes_per_s": part, **values})
        path = self.folder / "machine.toml"
        path.write_text(text, encoding="utf-8")
        return path

    def plan(self, row, host_bytes=0, recipe=None):
        machine = self.machine(row, **{"host.memory_bytes": host_bytes * row["ranks"]})
        words = [SMARTINF, "plan", self.folder / "config.json", "--machine", machine, "--with", "train", "--json",
                 "--method", "su+o", "--overlap", row["overlap"], "--accumulation", row["accumulation"], "--ranks",
                 row["ranks"], "--seq", SEQUENCE, "--batch", 1]
        if recipe:
            words += ["--recipe", recipe]
        done = subprocess.run([*map(str, words)], stdout=subprocess.PIPE, text=True)
        plan = json.loads(done.stdout)
        option = next(one for one in plan["options"] if one["option"] == plan["recommended"])
        return plan, option

    def recipe(self, row, host_bytes):
        """As plan writes it, with data and devices filled in."""
        path = self.folder / "recipe.toml"
        plan, option = self.plan(row, host_bytes, path)
        text = path.read_text(encoding="utf-8").replace("tokens.bin", str(self.folder / "text.txt"))
        place = pathlib.Path(self.args.device).resolve()
        path.write_text(text.replace("/mnt/", f"{place}/schedules-"), encoding="utf-8")
        return path, plan, option

    def command(self, recipe, run, *flags):
        return [SMARTINF, "train", str(recipe), "--train.run", str(run), "--train.steps", str(self.args.steps + 3),
                "--train.validate_every", "0", "--train.sample_tokens", "0", "--train.clip_norm", "0", *flags]

    def measure(self, row, recipe):
        ranks = row["ranks"]
        with tempfile.TemporaryDirectory(dir=self.args.device) as run:
            words = self.command(recipe, run)
            if ranks > 1:
                torchrun = os.environ.get("TORCHRUN", "torchrun")
                words = [torchrun, "--no-python", "--nproc-per-node", str(ranks), *words]
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode != 0:
                sys.exit(f"{' '.join(words)}: {done.stderr[-2000:]}")
            lines = pathlib.Path(run, "log.jsonl").read_text(encoding="utf-8").splitlines()
        for folder in pathlib.Path(self.args.device).glob("schedules-*"):
            shutil.rmtree(folder)
        steps = [line for line in map(json.loads, lines) if "forward_s" in line][2:-1]
        median = lambda key: statistics.median(step[key] for step in steps)  # noqa: E731
        return {"measured_s": median("seconds"), "computing_s": median("forward_s") + median("backward_s"),
                "update_s": median("exposed_s"), "least_s": min(step["seconds"] for step in steps),
                "most_s": max(step["seconds"] for step in steps)}

    def set_process_bytes(self):
        """What the trainer counts of its process."""
        recipe, _, _ = self.recipe(SCHEDULES[0], 0)
        words = self.command(recipe, self.folder / "refused", "--memory.host", "50MiB")
        told = subprocess.run(words, capture_output=True, text=True).stderr
        self.values["host.process_bytes"] = int(re.search(r"the process itself (\d+) MiB", told).group(1)) << 20

    def fit(self, row, measured):
        """The rates of computing and of the drives, one after the other."""
        def search(set_rate, seconds, wanted_s):
            low, high = 1e-3, 1e3
            for _ in range(40):
                middle = (low * high) ** 0.5
                set_rate(middle)
                low, high = (middle, high) if seconds(self.plan(row)[1]) > wanted_s else (low, middle)

        def computing(factor):
            self.values["gpu.peak_flops"] = 1e11 * factor

        def drives(factor):
            self.drives = factor

        for _ in range(2):
            search(computing, lambda step: step["forward_s"] + step["backward_s"], measured["computing_s"])
            search(drives, lambda step: step["update_s"], measured["update_s"])

    def limit(self, row):
        """Memory of a process for the row."""
        if row["memory"] == "all":
            return 0
        least, _ = self.plan(row, 1)  # the smallest plan, which does not fit
        return least["host_bytes"] + row["memory"] * (1 << 20)

    def run(self, number):
        for row in SCHEDULES:
            host_bytes = self.limit(row)
            recipe, _, _ = self.recipe(row, host_bytes)
            measured = self.measure(row, recipe)
            if row is SCHEDULES[0]:
                self.fit(row, measured)
            plan, step = self.plan(row, host_bytes)
            yield {"round": number, **row, "units_from_devices": (plan["streaming"] or {}).get("units_from_devices", 0),
                   **measured, "simulated_s": step["total_s"], "load": os.getloadavg()[0]}


def compare_schedules(args, machine, folder):
    errors = []
    for number in range(1, args.rounds + 1):
        grid = Schedules(args, machine, folder)
        grid.set_process_bytes()
        for row in grid.run(number):
            row["error"] = round(row["simulated_s"] / row["measured_s"] - 1, 4)
            errors.append(row["error"])
            print(json.dumps(row), flush=True)
    sizes = list(map(abs, errors))
    print(f"mean {statistics.mean(errors):+.1%}, mean size {statistics.mean(sizes):.1%}, worst {max(sizes):.1%} of "
          f"{len(sizes)} rows", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", required=True, help="a directory on the drive")
    parser.add_argument("--machine", help="machine file [a new one by smartinf calibrate]")
    parser.add_argument("--program", choices=("bench", "train", "schedules"), default="bench")
    parser.add_argument("--params", type=float, default=2e8, help="of the bench")
    parser.add_argument("--computing", default="0.25,0.5,1,2,4", help="of the bench, in multiples of the update's time")
    parser.add_argument("--spill", action="store_true", help="of the bench: gradients go to the drive")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of a run of the trainer")
    args = parser.parse_args()
    os.makedirs(args.device, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        path = args.machine
        if not path:
            path = os.path.join(folder, "calibrated.toml")
            run("calibrate", "--device", args.device, "--out", path, "--json")
        machine = pathlib.Path(path).read_text(encoding="utf-8")
        if args.program == "schedules":
            return compare_schedules(args, machine, folder)
        if args.program == "bench":
            # 12 x hidden^2 parameters a layer; what sleeps takes no core.
            hidden = round((args.params / LAYERS / 12) ** 0.5 / 8) * 8
            words = ["--layers", LAYERS, "--hidden", hidden, "--heads", 8, "--vocab", 256, "--seq", 256, "--batch", 1]
            values = {"device.on_host_cores": "false", "gpu.activation_passes": 0.0, "gpu.memory_bytes_per_s": 1e18,
                      "software.gradient_spilled": str(args.spill).lower()}
            words += ["--slots", 32] if args.spill else []
            rows = bench_rows(args)
        else:
            config = os.path.join(folder, "config.json")
            pathlib.Path(config).write_text(json.dumps(LLAMA), encoding="utf-8")
            words, values = ["--model", config, "--seq", 512, "--batch", 1], {}
            rows = train_rows(args)
        model = Model(machine, [*words, "--recompute", "false"], folder, values)
        errors = {"simulated_s": [], "fitted_s": []}
        for row in rows:
            peak = model.peak_flops(row["computing_s"], args.program == "train")
            drives = model.drives(peak, row["update_s"])
            for name, factor in (("simulated_s", 1.0), ("fitted_s", drives)):
                row[name] = model.step(row["overlap"], peak, factor, row["guess"])["total_s"]
                errors[name].append(row[name] / row["measured_s"] - 1)
            print(json.dumps(row), flush=True)
    for name, all_errors in errors.items():
        sizes = list(map(abs, all_errors))
        print(f"{name}: mean {statistics.mean(all_errors):+.1%}, mean size {statistics.mean(sizes):.1%}, "
              f"worst {max(sizes):.1%} of {len(sizes)} rows", file=sys.stderr)


if __name__ == "__main__":
    main()
