#!/usr/bin/env python3
"""A step of `smartinf train` on two ranks of this machine beside one rank with as many threads, in turn.

    bench/ranks_step.py --device DIR [--rounds 2] [--steps 4] [--accumulation 2]

The Llama of bench/overlap.py (2e8 parameters, 512 tokens in a micro batch). One rank has two threads, two ranks have one thread each and
talk over gloo; both have the same two devices below DIR, on one drive. A line of JSON for each run: seconds of a step, median over
the steps behind the first two, the bytes that a rank sends and receives, and the last loss, which is the same with
ranks.order "fixed". TORCHRUN names torchrun.
"""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

import overlap  # the recipe
from runs import SMARTINF


def run(args, ranks, folder):
    recipe = pathlib.Path(folder, "recipe.toml")
    recipe.write_text(overlap.RECIPE, encoding="ascii")
    place = pathlib.Path(args.device, "ranks_step").resolve()
    log = pathlib.Path(folder, f"of{ranks}")
    words = [args.smartinf, "train", str(recipe), "--train.run", str(log), "--train.steps", str(args.steps + 3),
             "--train.accumulation", str(args.accumulation), "--train.threads", str(2 // ranks), "--ranks.order", "fixed"]
    for i in range(2):
        words += [f"--device.{i}.path", str(place / f"device{i}"), f"--device.{i}.bandwidth", "1", f"--device.{i}.threads", "1"]
    if ranks > 1:
        words = [os.environ.get("TORCHRUN", "torchrun"), "--no-python", "--nproc-per-node", str(ranks), *words]
    done = subprocess.run([*words, *args.more], capture_output=True, text=True)
    shutil.rmtree(place, ignore_errors=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)}: {done.stderr[-2000:]}")
    rows = [row for row in map(json.loads, (log / "log.jsonl").read_text(encoding="utf-8").splitlines()) if "loss" in row]
    shutil.rmtree(log)
    timed = rows[2:-1]  # behind the last one nothing is computed
    row = {"ranks": ranks, "step_s": statistics.median(one["seconds"] for one in timed),
           "steps_s": [round(one["seconds"], 3) for one in timed],
           "forward_s": statistics.median(one["forward_s"] for one in timed),
           "backward_s": statistics.median(one["backward_s"] for one in timed), "last_loss": rows[-1]["loss"]}
    for key in ("ranks_sent_bytes", "ranks_received_bytes"):
        if key in timed[-1]:
            row[key] = timed[-1][key]
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--smartinf", default=SMARTINF)
    parser.add_argument("more", nargs="*", help="behind --: further flags of smartinf train")
    args = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            seconds = {}
            for ranks in (1, 2):
                row = run(args, ranks, folder)
                seconds[ranks] = row["step_s"]
                print(json.dumps({"round": number, **row}), flush=True)
            ratios.append(seconds[2] / seconds[1])
    print(json.dumps({"two_over_one": statistics.median(ratios), "each": [round(one, 3) for one in ratios]}))


if __name__ == "__main__":
    main()
