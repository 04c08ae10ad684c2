#!/usr/bin/env python3
"""Python's optimizer.step() beside `smartinf bench step`: the same state, types, threads and drive, in turn.

    bench/python_step.py --device DIR [--params 2e8] [--rounds 3] [--state-format f32]

Both keep their state below DIR. A step is what comes after backward: gradients handed over, their norm,
update, new weights, commit. Python's ends with synchronize(), so that both are durable; "step_s" alone is
the time until the parameters hold their new values. Weights and gradients are bf16, as in the benchmark;
--dtype f32 has no counterpart there (--alone). The result is one JSON object.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import time

import torch

import smartinf

PARAMETER = 5_000_000  # elements of each parameter


def bench_step(args, folder):
    """One step of the command, after one that is not counted."""
    command = [args.smartinf, "bench", "step", "--json", "--keep", "--repeat", "1", "--device", folder]
    command += ["--params", str(args.params), "--state-format", args.state_format]
    command += ["--memory-budget", args.memory_budget]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row = json.loads(done.stdout.splitlines()[-1])
    return {key: row[key] for key in ("gradient_s", "weights_s", "update_s", "drive_limit_s")}


def python_step(params, optimizer):
    for param in params:
        param.grad.fill_(1e-3)
    begin = time.perf_counter()
    optimizer.step()
    step_s = time.perf_counter() - begin
    optimizer.synchronize()
    return {"step_s": step_s, "durable_s": time.perf_counter() - begin}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", required=True, help="a directory on the drive")
    parser.add_argument("--params", type=float, default=2e8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--state-format", default="f32")
    parser.add_argument("--memory-budget", default="512MiB")
    parser.add_argument("--dtype", choices=["bf16", "f32"], default="bf16")
    parser.add_argument("--alone", action="store_true", help="Python's steps only")
    parser.add_argument("--smartinf", default="build/release/bin/smartinf")
    args = parser.parse_args()
    if args.dtype == "f32" and not args.alone:
        parser.error("--dtype f32 is for --alone")

    dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[args.dtype]
    count = max(round(args.params / PARAMETER), 1)
    args.params = count * PARAMETER
    params = [torch.nn.Parameter(torch.full((PARAMETER,), 0.5, dtype=dtype)) for _ in range(count)]
    for param in params:
        param.grad = torch.zeros_like(param)
    folders = {who: os.path.join(args.device, who) for who in ("python", "bench")}
    optimizer = smartinf.AdamW(
        params,
        lr=1e-4,
        devices=[folders["python"]],
        resume=False,
        state_format=args.state_format,
        memory_budget=args.memory_budget,
    )
    rows = []
    try:
        for _ in range(args.rounds):
            row = {} if args.alone else {"bench": bench_step(args, folders["bench"])}
            python_step(params, optimizer)  # not counted, as in the benchmark
            row["python"] = python_step(params, optimizer)
            rows.append(row)
        describe = optimizer.describe_devices()
        optimizer.close()
    finally:
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)

    def median(who, *keys):
        return round(statistics.median(sum(row[who][key] for key in keys) for row in rows), 4)

    result = {"params": args.params, "state_format": args.state_format, "dtype": args.dtype}
    result |= {"python_step_s": median("python", "step_s"), "python_s": median("python", "durable_s")}
    if not args.alone:
        result["bench_s"] = median("bench", "gradient_s", "update_s")
        result["python_over_bench"] = round(result["python_s"] / result["bench_s"], 3)
    print(json.dumps({**result, "devices": describe, "rows": rows}))


if __name__ == "__main__":
    main()
