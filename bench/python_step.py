#!/usr/bin/env python3
"""Peak memory and time of optimizer.step() from Python, ours or torch's, as one JSON object.

    bench/python_step.py --params 2e8 --device DIR [--gradient-budget 64MiB] [--release]
    bench/python_step.py --params 2e8 --torch

The model is a list of f32 parameters of 5e6 elements; gradients are synthetic. rss_peak_bytes is
VmHWM of the process, torch's own libraries included (rss_start_bytes, before the model is made).
"""

import argparse
import json
import statistics
import time

import torch


def status_bytes(key):
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--params", type=float, default=2e8)
    parser.add_argument("--device")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--memory-budget", default="512MiB")
    parser.add_argument("--gradient-budget")
    parser.add_argument("--release", action="store_true", help="hand gradients over during backward")
    args = parser.parse_args()
    if args.torch == bool(args.device):
        parser.error("give either --device or --torch")

    start = status_bytes("VmRSS")
    size = 5_000_000
    count = max(round(args.params / size), 1)
    params = [torch.nn.Parameter(torch.full((size,), 0.5)) for _ in range(count)]
    if args.torch:
        optimizer = torch.optim.AdamW(params, foreach=False)
    else:
        import smartinf

        optimizer = smartinf.AdamW(
            params,
            devices=[args.device],
            resume=False,
            memory_budget=args.memory_budget,
            gradient_budget=args.gradient_budget,
            release_gradients=args.release,
        )
    seconds, durable = [], []
    for _ in range(args.repeat + 1):
        for param in params:
            if args.release:
                (param * 0.01).sum().backward()
            else:
                param.grad = torch.full_like(param, 0.01)
        begin = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
        if not args.torch:
            optimizer.synchronize()
        durable.append(time.perf_counter() - begin)
        optimizer.zero_grad()
    weights = 4 * size * count
    result = {
        "optimizer": "torch" if args.torch else "smartinf",
        "params": size * count,
        "step_s": statistics.median(seconds[1:]),
        "durable_s": statistics.median(durable[1:]),
        "durable_s_all": [round(s, 3) for s in durable[1:]],
        "weights_bytes": weights,
        "gradients_bytes": weights,
        "rss_start_bytes": start,
        "rss_peak_bytes": status_bytes("VmHWM"),
    }
    if not args.torch:
        result["optimizer_memory_bytes"] = optimizer.memory_bytes()
        optimizer.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
