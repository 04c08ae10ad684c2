#!/usr/bin/env python3
"""A step of `smartinf train` on two replicas over a slow link: dense gradients beside compressed ones and beside compress.stages =
"auto", in turn.

    bench/ranks_compressed.py --device DIR --machine FILE [--rates 1e8] [--rounds 2] [--steps 3] [--accumulation 8] [--count] [-- FLAGS]

Links, recipe and rows are those of bench/pipeline_step.py; FILE is what `smartinf calibrate` says of the machine that each rank has.
With --count it says instead what compressed ranks send in a step, by their log and at sockets. Needs root.
"""
import argparse
import json
import pathlib
import tempfile

import pipeline_step
from runs import SMARTINF


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", required=True)
    parser.add_argument("--machine", required=True)
    parser.add_argument("--density", default="0.25")
    parser.add_argument("--values", default="bf16")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e8])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--smartinf", default=SMARTINF)
    parser.add_argument("more", nargs="*", help="behind --: further flags of smartinf train")
    args = parser.parse_args()
    args.reads = None
    more = args.more
    with tempfile.TemporaryDirectory() as folder:
        cluster = pathlib.Path(folder, "cluster.toml")
        for rate in args.rates:
            cluster.write_text("".join(f'[[box]]\nname = "box{i}"\nmachine = "{pathlib.Path(args.machine).resolve()}"\nranks = 1\n'
                                       for i in range(2)) + f'[links]\nrate = "{rate / 1e6:g} Mbit/s"\n', encoding="ascii")
            compress = ["--compress.density", args.density, "--compress.values", args.values, "--compress.residual_every", "0"]
            if args.count:  # of steps alone: between runs of some and of more
                args.more = [*more, *compress]
                few = pipeline_step.run(args, rate, 1, 2, folder)
                args.steps += 6
                many = pipeline_step.run(args, rate, 1, 2, folder)
                steps = many["steps"] - few["steps"]
                print(json.dumps({"sent": [many["ranks_sent_bytes"], many["ranks_received_bytes"]], "at_sockets":
                                  [round((b - a) / steps) for a, b in zip(few["payload_bytes"], many["payload_bytes"])]}), flush=True)
                continue
            for number in range(args.rounds):
                for name, flags in (("dense", []), ("compressed", compress),
                                    ("auto", [*compress, "--compress.stages", "auto", "--ranks.cluster", str(cluster)])):
                    args.more = [*more, *flags]
                    row = pipeline_step.run(args, rate, 1, 2, folder)
                    print(json.dumps({"round": number, "gradients": name, "tokens_per_s": round(row["tokens"] / row["step_s"], 1), **row}),
                          flush=True)


if __name__ == "__main__":
    main()
