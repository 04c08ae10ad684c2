#!/usr/bin/env python3
"""A step of `smartinf train` on two ranks over a slow link: two stages beside two replicas, or beside one process, in turn.

    bench/pipeline_step.py --device DIR [--beside replicas|one] [--rates 1e8 1e9] [--rounds 2] [--steps 3] [--accumulation 8]
        [--reads BYTES_PER_S --writes BYTES_PER_S] [-- FLAGS of smartinf train]

Each rank has a network namespace, one thread and a device below DIR; the link is a veth pair with that many bits per second in each
direction (tc tbf). Devices read and write no faster than they are told to (device.N.internal_read, which sleeps). The recipe is that
of bench/overlap.py (2e8 parameters). A line of JSON for each run. Needs root.
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
from pipeline_beside_torch import Links, address
from runs import SMARTINF


def run(args, rate, stages, ranks, folder):
    recipe = pathlib.Path(folder, "recipe.toml")
    recipe.write_text(overlap.RECIPE, encoding="ascii")
    place = pathlib.Path(args.device, "pipeline_step").resolve()
    log = pathlib.Path(folder, "run")
    words = [args.smartinf, "train", str(recipe), "--train.run", str(log), "--train.steps", str(args.steps + 2),
             "--train.accumulation", str(args.accumulation), "--train.threads", "1", "--ranks.order", "fixed",
             "--ranks.pipeline", str(stages)]
    for i in range(ranks):
        words += [f"--device.{i}.path", str(place / f"device{i}"), f"--device.{i}.bandwidth", "1", f"--device.{i}.threads", "1"]
        if args.reads:
            words += [f"--device.{i}.internal_read", str(args.reads), f"--device.{i}.internal_write", str(args.writes)]
    with Links(2, rate) as links:
        processes = [subprocess.Popen([*links.on(rank), *words, *args.more], stdout=subprocess.DEVNULL,
                                      env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1",
                                           "MASTER_ADDR": address(0), "MASTER_PORT": "29601"}) for rank in range(ranks)]
        payload = [{}, {}]
        while args.count and all(process.poll() is None for process in processes):
            for rank in range(2):
                links.payload_bytes(rank, payload[rank])
        codes = [process.wait() for process in processes]
        sent = [links.sent_bytes(rank) for rank in range(2)]
    shutil.rmtree(place, ignore_errors=True)
    if any(codes):
        sys.exit(f"{' '.join(words)}: exit codes {codes}")
    rows = [row for row in map(json.loads, (log / "log.jsonl").read_text(encoding="utf-8").splitlines()) if "loss" in row]
    shutil.rmtree(log)
    timed = rows[1:-1]  # behind the last one nothing is computed
    row = {"bits_per_s": rate, "ranks": ranks, "stages": stages, "tokens": timed[-1]["tokens"],
           "step_s": statistics.median(one["seconds"] for one in timed),
           "steps_s": [round(one["seconds"], 3) for one in timed], "last_loss": rows[-1]["loss"],
           "link_bytes": sent, "payload_bytes": [sum(one.values()) for one in payload], "steps": len(rows)}
    for key in ("ranks_sent_bytes", "ranks_received_bytes", "pipeline_sent_bytes", "pipeline_wait_s", "forward_s", "backward_s"):
        if key in timed[-1]:
            row[key] = timed[-1][key]
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", required=True)
    parser.add_argument("--beside", choices=("replicas", "one"), default="replicas")
    parser.add_argument("--reads", type=float, help="of a device, bytes per second")
    parser.add_argument("--writes", type=float)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e8, 1e9])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--count", action="store_true", help="what two stages send in a step, at sockets and over each interface, and nothing else")
    parser.add_argument("--smartinf", default=SMARTINF)
    parser.add_argument("more", nargs="*", help="behind --: further flags of smartinf train")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.count:  # of steps alone: between runs of some and of more
            few = run(args, args.rates[0], 2, 2, folder)
            args.steps += 6
            more = run(args, args.rates[0], 2, 2, folder)
            each = lambda key: [round((there - here) / (more["steps"] - few["steps"])) for here, there in zip(few[key], more[key])]
            print(json.dumps({"tokens": more["tokens"], "of_messages": more["pipeline_sent_bytes"],
                              "of_ranks": more["ranks_sent_bytes"], "payload_of_a_step": each("payload_bytes"),
                              "link_bytes_of_a_step": each("link_bytes")}))
            return
        for rate in args.rates:
            for _ in range(args.rounds):
                for stages, ranks in ((2, 2), (1, 2 if args.beside == "replicas" else 1)):
                    print(json.dumps(run(args, rate, stages, ranks, folder)), flush=True)


if __name__ == "__main__":
    main()
