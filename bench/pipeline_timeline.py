#!/usr/bin/env python3
"""Draws docs/images/pipeline_timeline.svg: a step of `smartinf train` on two stages over a slow link, from the ranks' traces.

    bench/pipeline_timeline.py --device DIR [--rate 1e8] [--step 4] [-- FLAGS of smartinf train]

Each rank has a network namespace, one thread and a device below DIR; the link is a veth pair with that many bits per second in each
direction (tc tbf). All are on one machine, whose clock aligns the traces. The step reaches from its first forward to its last
backward; what drives do is of that time. Needs root.
"""
import argparse
import collections
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import cluster_step  # draws
from pipeline_beside_torch import Links, address
from runs import ROOT, SMARTINF

RECIPE = """
[model]
layers = 8
width = 384
heads = 6
mlp_width = 1024
vocabulary = 8192
tied_head = true
[data]
paths = ["python-stdlib"]
sequence = 256
[train]
micro_batch = 2
accumulation = 6
threads = 1
validate_every = 0
sample_tokens = 0
[ranks]
pipeline = 2
[engine]
memory_budget = "64MiB"
"""
SHORT = {"forward": "F", "backward": "B", "head": "H"}


def spans_of(rank, path, step):
    """(lane, name, begin_s, end_s), on the machine's clock: what the stage computes in the step, and its device's work."""
    trace = json.loads(path.read_text(encoding="utf-8"))
    start_s = trace["otherData"]["start_ns"] / 1e9
    groups = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    made, counts = [], collections.Counter()
    for event in trace["traceEvents"]:
        if event["ph"] != "X":
            continue
        times = start_s + event["ts"] / 1e6, start_s + (event["ts"] + event["dur"]) / 1e6
        if groups[event["pid"]] == "trainer":
            if event["name"] in SHORT and event["args"]["step"] == step:
                name = SHORT[event["name"]]
                made.append((f"stage {rank}", f"{name}{counts[name]}", *times))
                counts[name] += 1
        elif threads[event["pid"], event["tid"]].split()[0] in ("read", "write"):
            made.append((f"stage {rank}, its drive", threads[event["pid"], event["tid"]].split()[0][0], *times))
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", required=True)
    parser.add_argument("--rate", type=float, default=1e8)
    parser.add_argument("--step", type=int, default=4)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs/images/pipeline_timeline.svg")
    parser.add_argument("more", nargs="*", help="behind --: further flags of smartinf train")
    args = parser.parse_args()
    place = pathlib.Path(args.device, "pipeline_timeline").resolve()
    with tempfile.TemporaryDirectory() as folder, Links(2, args.rate) as links:
        recipe = pathlib.Path(folder, "recipe.toml")
        recipe.write_text(RECIPE, encoding="ascii")
        words = [SMARTINF, "train", str(recipe), "--train.run", f"{folder}/run", "--train.steps", str(args.step + 1),
                 "--train.trace", f"{folder}/{{rank}}.json", *args.more]
        for i in range(2):
            words += [f"--device.{i}.path", str(place / str(i)), f"--device.{i}.bandwidth", "1", f"--device.{i}.threads", "1"]
        processes = [subprocess.Popen([*links.on(rank), *words], stdout=subprocess.DEVNULL,
                                      env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
                                           "MASTER_ADDR": address(0), "MASTER_PORT": "29602"}) for rank in range(2)]
        codes = [process.wait() for process in processes]
        shutil.rmtree(place, ignore_errors=True)
        if any(codes):
            sys.exit(f"{' '.join(words)}: exit codes {codes}")
        spans = [span for rank in range(2) for span in spans_of(rank, pathlib.Path(folder, f"{rank}.json"), args.step)]
    computed = [span for span in spans if "drive" not in span[0]]
    begin_s, end_s = min(span[2] for span in computed), max(span[3] for span in computed)
    within = [(lane, name, max(0, begin - begin_s), min(end, end_s) - begin_s) for lane, name, begin, end in spans
              if end > begin_s and begin < end_s]
    args.out.write_text(cluster_step.drawn(within, {
        "F": ("#a1d99b", "forward of a micro batch"), "H": ("#fdae6b", "head, both ways"), "B": ("#9ecae1", "backward"),
        "r": ("#bcbddc", "read"), "w": ("#fa9fb5", "write")}), encoding="ascii")


if __name__ == "__main__":
    main()
