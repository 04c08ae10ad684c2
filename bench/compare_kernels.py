#!/usr/bin/env python3
"""Times smartinf's AdamW and Top-K and those of torch and DeepSpeed in turn, and prints a page.

    bench/rivals/setup_deepspeed.sh
    build/rivals/deepspeed/bin/python bench/compare_kernels.py [--params 2e7] [--rounds 5] > kernels.md

In every round each rival runs once, one after the other, so that a busy machine slows all; medians of
the rounds count. All keep f32 state and read f32 gradients. smartinf is timed without weights out, as
torch and DeepSpeed have none, and with bf16 weights out, which is what a step needs. torch.topk gets
magnitudes that are already there; smartinf makes them itself, and returns indices in order.
Without DeepSpeed (any python with torch) its row is left out, and said so.
"""
import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

from runs import ROOT

# An extension cache of its own: a build that was killed leaves a lock on which every later one waits.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / "build/rivals/extensions"))
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"  # ninja

import torch  # noqa: E402


def seconds_of(work, repeat):
    """The median of `repeat` runs."""
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def smartinf_rows(binary, options, *arguments):
    command = [binary, "bench", "kernels", "--json", "--params", str(options.params), "--repeat",
               str(options.repeat), *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def deepspeed_adam(parameter):
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return None
    return DeepSpeedCPUAdam([parameter], lr=1e-4, weight_decay=0.1, adamw_mode=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--params", type=float, default=2e7)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=3, help="runs in a round, of which the median counts")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--shares", type=float, nargs="+", default=[1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0],
                        help="what Top-K keeps, of 1")
    parser.add_argument("--smartinf", default=str(ROOT / "build/release/bin/smartinf"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    n = int(options.params)
    torch.manual_seed(0)

    def parameter():
        p = torch.nn.Parameter(torch.randn(n))
        p.grad = torch.randn(n) * 1e-3
        return p

    torch_parameter = parameter()
    fused = torch.optim.AdamW([torch_parameter], lr=1e-4, weight_decay=0.1, fused=True)
    optimizers = {"torch fused AdamW": fused}
    adam = deepspeed_adam(parameter())
    if adam is None:
        print("DeepSpeed is not there: bench/rivals/setup_deepspeed.sh", file=sys.stderr)
    else:
        optimizers["DeepSpeed CPUAdam"] = adam
    for optimizer in optimizers.values():
        optimizer.step()
    magnitude = torch_parameter.grad.abs()

    seconds = {}  # who -> one number a round

    def note(who, value):
        seconds.setdefault(who, []).append(value)

    for _ in range(options.rounds):
        for weights in ("none", "bf16"):
            (row,) = smartinf_rows(options.smartinf, options, "--kernel", "update", "--rule", "adamw",
                                   "--format", "f32", "--gradient", "f32", "--weights", weights,
                                   "--threads", str(options.threads))
            note(f"smartinf AdamW f32, weights out {weights}", n / row["params_per_s"])
        for name, optimizer in optimizers.items():
            note(name, seconds_of(optimizer.step, options.repeat))
        rows = smartinf_rows(options.smartinf, options, "--kernel", "topk", "--threads", "1", "--share",
                             *map(str, options.shares))
        for row in rows:
            if row["kernel"] == "topk":
                note(("smartinf", row["share"]), n / row["params_per_s"])
        for share in options.shares:
            k = max(1, int(n * share))
            note(("torch", share), seconds_of(lambda k=k: magnitude.topk(k, sorted=False), 1))

    median = {who: statistics.median(values) for who, values in seconds.items()}
    cpu = subprocess.run("lscpu | sed -n 's/^Model name: *//p'", shell=True, capture_output=True,
                         text=True)
    print(f"Command: `bench/compare_kernels.py --params {options.params:g} --rounds {options.rounds} --repeat "
          f"{options.repeat} --threads {options.threads}`\n")
    print(f"Machine: {os.cpu_count()} cores of {cpu.stdout.strip()}, Linux {platform.release()}; "
          f"torch {torch.__version__}; load at the end {os.getloadavg()[0]:.1f}.\n")
    print(f"| AdamW, {n:.3g} elements, {options.threads} threads | median ms | min | max | Mparams/s |")
    print("|---|---|---|---|---|")
    for who, values in seconds.items():
        if isinstance(who, str):
            print(f"| {who} | {median[who] * 1e3:.1f} | {min(values) * 1e3:.1f} | {max(values) * 1e3:.1f} | "
                  f"{n / median[who] / 1e6:.0f} |")
    print(f"\n| Top-K, one thread of smartinf, {options.threads} of torch | smartinf ms | torch.topk ms | times faster |\n|---|---|---|---|")
    for share in options.shares:
        ours, theirs = median["smartinf", share], median["torch", share]
        print(f"| {share * 100:g} % | {ours * 1e3:.1f} | {theirs * 1e3:.1f} | {theirs / ours:.1f} |")


if __name__ == "__main__":
    main()
