#!/usr/bin/env python3
"""What `smartinf simulate --overlap` says of a step, against the same step measured on this machine.

    bench/overlap_model.py --device DIR [--machine FILE] [--params 2e8] [--program bench|train|schedules] [--spill]

bench: `smartinf bench overlap`, a step whose computing is a sleep of a given length. train: three short runs of
`smartinf train` (the recipe of bench/overlap.py). schedules: runs of a smaller model as `smartinf plan` writes them, with
overlap none, late and early, where everything stays in memory and where weights are streamed, with one and two micro
batches, with two ranks on this machine, and with the device behind `smartinf serve` on this machine (loopback; the
network's rate is the file's near_bytes_per_s, and what the cores carry comes from CPU seconds of `smartinf bench step` on a
remote and on a local device). `smartinf calibrate` measures in each round what the drive's syncs take, and its part of the
cores. The machine file is made by `smartinf calibrate` where none is given. Of it the rate of
computing is set so that forward and backward alone take as long as they did.

With bench and train, simulated_s is the step with the drives of the file, and fitted_s the step with drives so much faster
or slower that the update alone takes as long as it did, because the rate of a drive drifts between two runs. With schedules
all rounds are measured first, each in a random order; a row's time is the median of its rounds. Both rates are set once, by
the two rows without overlap where everything stays; all other rows are predictions. One line of JSON for each row, then the
differences.
SMARTINF names the binary [build/release/bin/smartinf]. Run it when nothing else runs.
"""
import argparse
import json
import os
import pathlib
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

import overlap  # the recipe of the train program
import remote_step
from runs import ROOT, SMARTINF, rows_of as run, text_of, with_values

sys.path.insert(0, str(ROOT / "tests"))
from served import Authority, Server, with_environment  # pylint: disable=wrong-import-position

LAYERS = 32  # of bench overlap
# The Llama that bench/overlap.py trains, on bytes.
LLAMA = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16,
         "num_key_value_heads": 16, "intermediate_size": 2816, "vocab_size": 256, "tie_word_embeddings": True}


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


SMALL = {"model_type": "llama", "hidden_size": 640, "num_hidden_layers": 8, "num_attention_heads": 10,
         "num_key_value_heads": 10, "intermediate_size": 1728, "vocab_size": 256, "tie_word_embeddings": False}
SEQUENCE = 64

# Weights in memory; streamed, with so many MiB more than the least; ranks; remote.
SCHEDULES = [{"memory": memory, "overlap": mode, "accumulation": batches, "ranks": ranks, "remote": remote}
        for memory, batches, ranks, remote, modes in (
            ("all", 1, 1, False, ("none", "late", "early")), ("all", 2, 1, False, ("none", "late", "early")),
            (20, 2, 1, False, ("none", "late", "early")), ("all", 2, 2, False, ("none", "late")),
            ("all", 1, 1, True, ("none", "late", "early")), ("all", 2, 1, True, ("none", "late", "early")))
        for mode in modes]
FITTED = [row for row in SCHEDULES if row["overlap"] == "none" and row["memory"] == "all"
          and row["ranks"] == 1 and not row["remote"]]


class Schedules:
    """The program "schedules". Each row is planned, and its recipe run as `smartinf plan` writes it."""

    def __init__(self, args, machine, folder):
        self.args, self.folder = args, pathlib.Path(folder)
        self.text = machine
        (self.folder / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
        text = "a rather short text, of which only the length matters. "
        (self.folder / "text.txt").write_text(4000 * text, encoding="utf-8")
        near = re.search(r"(?m)^near_bytes_per_s = ([0-9.e+]+)", self.text).group(1)
        self.values = {"gpu.product_efficiency": 1.0, "network.bytes_per_s": near}
        self.drives = 1.0
        self.authority = None

    def machine(self, row, **values):
        devices = row["ranks"]
        if row["remote"]:
            values.update({"device.remote": "true", "device.link_bytes_per_s": self.values["network.bytes_per_s"]})
        part = lambda rate: float(rate) / devices  # noqa: E731
        drive = lambda rate: float(rate) * self.drives / devices  # noqa: E731
        text = with_values(self.text, {
            **self.values, "device.count": devices, "device.read_bytes_per_s": drive, "device.write_bytes_per_s": drive,
            "device.sync_bytes_per_s": part, "device.update_bytes_per_s": part, "device.decompress_bytes_per_s": part,
            **values})
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

    # ---- Measured.

    def served(self):
        self.authority = self.authority or Authority(SMARTINF, self.folder / "certificates")
        return Server(self.authority, pathlib.Path(self.args.device, "served"), threads=os.cpu_count(),
                      device_keys='memory_budget = "4GiB"')

    def remove_devices(self):
        for folder in pathlib.Path(self.args.device).glob("*"):
            if folder.name in ("local", "served") or folder.name.startswith("schedules-"):
                shutil.rmtree(folder)

    def cores_bytes_per_s(self):
        """What all cores carry between client and server: CPU seconds of both beside those of a local step."""
        params, repeat = 5e7, 4
        given = argparse.Namespace(smartinf=SMARTINF, params=str(params), threads=os.cpu_count(), more=[])
        cpu = {}
        with self.served() as server:
            environment = with_environment(self.authority.environment())
            for place in (os.path.join(self.args.device, "local"), server.url()):
                short, long = (remote_step.run(given, place, times, server, environment)[1] for times in (2, 2 + repeat))
                cpu[place] = sum(long[key] - short[key] for key in ("client_cpu_s", "server_cpu_s")) / (2 * repeat)
        self.remove_devices()
        local_s, remote_s = cpu.values()
        return 4 * params * os.cpu_count() / (remote_s - local_s)

    def rates(self):
        """Keys of the machine file that are measured in each round, because they drift."""
        drive = run("calibrate", "--device", self.args.device, "--out", self.folder / "calibrated.toml", "--json")[0]
        return {"network.cores_bytes_per_s": self.cores_bytes_per_s(),
                **{f"device.{key}": drive[f"device0_{key}"] for key in ("sync_bytes_per_s", "cores_bytes_per_s")}}

    def command(self, recipe, run, *flags):
        return [SMARTINF, "train", str(recipe), "--train.run", str(run), "--train.steps", str(self.args.steps + 3),
                "--train.validate_every", "0", "--train.sample_tokens", "0", "--train.clip_norm", "0", *flags]

    def recipe(self, row, host_bytes):
        """As plan writes it, with data and devices filled in."""
        path = self.folder / "recipe.toml"
        self.plan(row, host_bytes, path)
        text = path.read_text(encoding="utf-8").replace("tokens.bin", str(self.folder / "text.txt"))
        place = pathlib.Path(self.args.device).resolve()
        path.write_text(text.replace("/mnt/", f"{place}/schedules-"), encoding="utf-8")
        return path

    def process_bytes(self):
        """What the trainer counts of its process."""
        words = self.command(self.recipe(SCHEDULES[0], 0), self.folder / "refused", "--memory.host", "50MiB")
        told = subprocess.run(words, capture_output=True, text=True).stderr
        return int(re.search(r"the process itself (\d+) MiB", told).group(1)) << 20

    def limit(self, row):
        """Memory of a process for the row."""
        if row["memory"] == "all":
            return 0
        least, _ = self.plan(row, 1)  # the smallest plan, which does not fit
        return least["host_bytes"] + row["memory"] * (1 << 20)

    def measure(self, row):
        host_bytes = self.limit(row)
        recipe = self.recipe(row, host_bytes)
        try:
            if not row["remote"]:
                return {"host_bytes": host_bytes, **self.run_recipe(row, recipe)}
            with self.served() as server:
                text = recipe.read_text(encoding="utf-8").replace("grpc://server-0:7443/drive-0", server.url())
                for name, file in zip(("client.crt", "client.key", "ca.crt"), self.authority.files("clients", "gpu1")):
                    text = text.replace(f'"{name}"', f'"{file}"')
                recipe.write_text(text, encoding="utf-8")
                return {"host_bytes": host_bytes, **self.run_recipe(row, recipe)}
        finally:
            self.remove_devices()

    def run_recipe(self, row, recipe):
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
        steps = [line for line in map(json.loads, lines) if "forward_s" in line]
        for step, following in zip(steps, steps[1:]):
            # Not "seconds": where weights are streamed and nothing overlaps, those of the next step have the update.
            step["seconds"] = following["began_s"] - step["began_s"]
        steps = steps[2:-1]
        median = lambda key: statistics.median(step[key] for step in steps)  # noqa: E731
        return {"measured_s": median("seconds"), "computing_s": median("forward_s") + median("backward_s"),
                "update_s": median("exposed_s"), "least_s": min(step["seconds"] for step in steps),
                "most_s": max(step["seconds"] for step in steps), "load": os.getloadavg()[0]}

    def measure_all(self, path):
        """All rounds, each with every row, as lines of the file. Each round has a random order, because a row may leave the
        drive busy for the next."""
        for _ in range(self.args.rounds):
            with path.open("a", encoding="utf-8") as file:
                process_bytes = self.values["host.process_bytes"] = self.process_bytes()
                print(json.dumps({"process_bytes": process_bytes, **self.rates()}), file=file, flush=True)
                for row in random.sample(SCHEDULES, len(SCHEDULES)):
                    print(json.dumps({**row, **self.measure(row)}), file=file, flush=True)

    # ---- Simulated.

    def fit(self, rows):
        """The rates of computing and of the drives: with which the rows' times for each add up to those measured."""
        def search(set_rate, keys, wanted_s):
            low, high = 1e-3, 1e3
            for _ in range(25):
                middle = (low * high) ** 0.5
                set_rate(middle)
                seconds = sum(self.plan(row)[1][key] for row in FITTED for key in keys)
                low, high = (middle, high) if seconds > wanted_s else (low, middle)

        def computing(factor):
            self.values["gpu.peak_flops"] = 1e11 * factor

        def drives(factor):
            self.drives = factor

        for _ in range(2):
            # With what a step has beside computing and waiting for the update: batches, its line in the log.
            search(computing, ("forward_s", "backward_s"), sum(row["measured_s"] - row["update_s"] for row in rows))
            search(drives, ("update_s",), sum(row["update_s"] for row in rows))

    def compare(self, path):
        """Each row's median over the rounds, with what is simulated."""
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        median = lambda rows, key: statistics.median(row[key] for row in rows)  # noqa: E731
        once = [line for line in lines if "process_bytes" in line]
        self.values["host.process_bytes"] = once[0]["process_bytes"]
        self.text = with_values(self.text, {key: median(once, key) for key in once[0] if "." in key})
        measured = []
        for row in SCHEDULES:
            rounds = [line for line in lines if row.items() <= line.items()]
            measured.append({**row, "rounds": len(rounds), "host_bytes": rounds[0]["host_bytes"],
                             **{key: round(median(rounds, key), 4) for key in ("measured_s", "computing_s", "update_s")},
                             "least_s": min(line["measured_s"] for line in rounds),
                             "most_s": max(line["measured_s"] for line in rounds)})
        self.fit([row for row in measured if {key: row[key] for key in SCHEDULES[0]} in FITTED])
        for given, row in zip(SCHEDULES, measured):
            plan, step = self.plan(given, row["host_bytes"])
            yield {**row, "fitted": given in FITTED,
                   "units_from_devices": (plan["streaming"] or {}).get("units_from_devices", 0),
                   **{f"simulated_{key}": round(step[key], 4) for key in ("total_s", "forward_s", "backward_s", "update_s")},
                   "error": round(step["total_s"] / row["measured_s"] - 1, 4)}


def compare_schedules(args, machine, folder):
    grid = Schedules(args, machine, folder)
    path = pathlib.Path(args.rows or grid.folder / "rows.jsonl")
    grid.measure_all(path)
    errors = []
    for row in grid.compare(path):
        print(json.dumps(row), flush=True)
        if not row["fitted"]:
            errors.append(row["error"])
    sizes = list(map(abs, errors))
    print(f"mean {statistics.mean(errors):+.1%}, mean size {statistics.mean(sizes):.1%}, worst {max(sizes):.1%} of "
          f"{len(sizes)} rows that are not fitted", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", required=True, help="a directory on the drive")
    parser.add_argument("--machine", help="machine file [a new one by smartinf calibrate]")
    parser.add_argument("--program", choices=("bench", "train", "schedules"), default="bench")
    parser.add_argument("--params", type=float, default=2e8, help="of the bench")
    parser.add_argument("--computing", default="0.25,0.5,1,2,4", help="of the bench, in multiples of the update's time")
    parser.add_argument("--spill", action="store_true", help="of the bench: gradients go to the drive")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", help="of schedules: a file that keeps what is measured; with --rounds 0 it is only read")
    parser.add_argument("--steps", type=int, default=8, help="of a run of the trainer")
    args = parser.parse_args()
    os.makedirs(args.device, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        path = args.machine
        if not path:
            path = os.path.join(folder, "calibrated.toml")
            run("calibrate", "--device", args.device, "--out", path, "--json")
        machine = text_of("simulate", "--machine", path, "--print-machine")  # with every key, so that each can be set
        if args.program == "schedules":
            return compare_schedules(args, machine, folder)
        if args.program == "bench":
            # 12 x hidden^2 parameters a layer; what sleeps takes no core.
            hidden = round((args.params / LAYERS / 12) ** 0.5 / 8) * 8
            words = ["--layers", LAYERS, "--hidden", hidden, "--heads", 8, "--vocab", 256, "--seq", 256, "--batch", 1]
            values = {"device.on_host_cores": "false", "gpu.activation_passes": 0.0, "gpu.memory_bytes_per_s": 1e18,
                      "software.gradient_spilled": str(args.spill).lower(),
                      "device.sync_bytes_per_s": 0.0}  # the measured update has it
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
