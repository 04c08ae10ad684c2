#!/usr/bin/env python3
"""Memory that a table on devices takes in a process: anonymous memory after opening and at most after a step, above that
of a process that has made the model (device "meta" alone brings modules of torch of 80 MB) and trained an embedding with
torch, and gave back what that freed; beside what the optimizer was told to take.

  bench/tables_memory.py --device DIR [--rows 1e6] [--ids 2000]
"""
import argparse
import ctypes
import json
import pathlib

import torch

import smartinf

MEMORY, BUDGET, DIM = 256 << 20, 64 << 20, 64


def anonymous():
    text = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("RssAnon:"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", required=True, help="folder on a drive, which is not there yet")
    parser.add_argument("--rows", type=lambda text: int(float(text)), default=1_000_000)
    parser.add_argument("--ids", type=int, default=2000, help="of a step")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.nn.Embedding(100_000, DIM, sparse=True)(torch.arange(20_000)).square().sum().backward()
    torch.nn.Linear(8, 8)(torch.ones(4, 8)).sum().backward()
    with torch.device("meta"):
        table = torch.nn.Embedding(options.rows, DIM)
    model = torch.nn.ModuleDict({"table": table, "dense": torch.nn.Linear(1, 1)})
    ctypes.CDLL(None).malloc_trim(0)
    idle = anonymous()
    smartinf.move_tables(model, ["table"], memory=MEMORY, log="256MB", std=0.02)
    optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-3, devices=[options.device], memory_budget=BUDGET)
    opened, most = anonymous(), 0
    for _ in range(options.steps):
        ids = torch.randint(options.rows, (options.ids,))
        (model["table"](ids).square().sum() + model["dense"](torch.ones(1, 1)).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        most = max(most, anonymous())
    optimizer.close()
    print(json.dumps({"rows": options.rows, "ids": options.ids, "told_bytes": MEMORY + BUDGET, "idle_bytes": idle,
                      "opened_bytes": opened - idle, "most_bytes": most - idle}))


if __name__ == "__main__":
    main()
