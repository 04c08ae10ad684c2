#!/usr/bin/env python3
"""Peak resident memory of a Python process that trains, with the optimizer of --with, as one JSON object.

    bench/python_memory.py --with smartinf --device DIR [--keep-gradients] [--gradient-budget 64MiB]
    bench/python_memory.py --with torch
    build/rivals/deepspeed/bin/python bench/python_memory.py --with deepspeed --device DIR

The model is a chain of f32 linear layers of 4096 x 4096 (12 of them: 201 million parameters) with a
batch of 8. "allowed" is 1.15 x (weights + gradients + memory budget); what counts against it is the
whole process, Python, torch and its libraries included. deepspeed: ZeRO-3 with the optimizer's state
on NVMe and parameters in CPU memory, as in bench/rivals/deepspeed_step.py.
"""

import argparse
import json
import os
import sys


def status_bytes(key):
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return 0


def deepspeed_engine(model, device):
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29581"}
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 1 << 24,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "nvme", "nvme_path": device, "buffer_count": 4},
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 8},
    }
    return deepspeed.initialize(model=model, config=config)[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--with", dest="optimizer", choices=["smartinf", "torch", "deepspeed"], required=True)
    parser.add_argument("--device")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--memory-budget-mib", type=int, default=512)
    parser.add_argument("--gradient-budget")
    parser.add_argument("--keep-gradients", action="store_true", help="leave p.grad until zero_grad()")
    parser.add_argument("--compress", type=float)
    args = parser.parse_args()
    if (args.optimizer == "torch") == bool(args.device):
        parser.error("--device is for smartinf and deepspeed, and needed there")

    import torch

    start = status_bytes("VmHWM")
    model = torch.nn.Sequential(*[torch.nn.Linear(args.width, args.width) for _ in range(args.layers)])
    count = sum(p.numel() for p in model.parameters())
    engine = None
    if args.optimizer == "torch":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    elif args.optimizer == "deepspeed":
        engine = deepspeed_engine(model, args.device)
    else:
        import smartinf

        optimizer = smartinf.AdamW(
            model.parameters(),
            lr=1e-4,
            devices=[args.device],
            resume=False,
            memory_budget=args.memory_budget_mib << 20,
            gradient_budget=args.gradient_budget,
            release_gradients=not args.keep_gradients,
            compress=args.compress,
        )
    made = status_bytes("VmHWM")
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(args.steps):
        x = torch.randn(8, args.width, generator=generator)
        loss = (engine or model)(x).pow(2).mean()
        losses.append(loss.item())
        if engine is not None:
            engine.backward(loss)
            engine.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    peak = status_bytes("VmHWM")
    asked = 8 * count + (args.memory_budget_mib << 20)
    result = {
        "optimizer": args.optimizer,
        "params": count,
        "weights_and_gradients_bytes": 8 * count,
        "budget_bytes": args.memory_budget_mib << 20,
        "rss_after_import_bytes": start,
        "rss_peak_made_bytes": made,
        "rss_peak_bytes": peak,
        "of_allowed": round(peak / (1.15 * asked), 3),
        "torch_compiler_imported": "torch._dynamo" in sys.modules,
        "losses": losses,
    }
    if args.optimizer == "smartinf":
        result["optimizer_memory_bytes"] = optimizer.memory_bytes()
        result["options"] = {
            "release_gradients": not args.keep_gradients,
            "gradient_budget": args.gradient_budget,
            "compress": args.compress,
        }
        optimizer.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
