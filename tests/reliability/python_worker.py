"""The process with torch and the smartinf package in it that from_python.py starts.

  python_worker.py loop DEVICE STEPS KIND   trains on; "step N" a line, at the end "state SHA256"
  python_worker.py save DEVICE FOLDER       the device's state into a checkpoint, in place of one there
  python_worker.py serve DEVICE             loads checkpoints: a folder a line in, a JSON object a line out
"""
import hashlib
import json
import signal
import sys

import torch

import smartinf

KINDS = {"plain": {}, "released": {"release_gradients": True}, "compressed": {"compress": 0.05},
         "bf16": {"state_format": "bf16"}, "two": {}}


def make(device, kind="plain", resume=True):
    torch.manual_seed(0)
    params = [(f"p{i}", torch.nn.Parameter(torch.randn(n))) for i, n in enumerate((70_000, 300, 9_000))]
    devices = [f"{device}/{i}" for i in range(2 if kind == "two" else 1)]
    return smartinf.AdamW(params, lr=1e-3, devices=devices, resume=resume, memory_budget=32 << 20,
                          subgroup_elements=65536, **KINDS[kind])


def state(optimizer):
    found = hashlib.sha256()

    def visit(name, _, entry):
        found.update(f"{name} {entry['step']}".encode())
        for key in sorted(set(entry) - {"step"}):
            found.update(entry[key].contiguous().numpy().tobytes())

    optimizer.visit_full_state(visit)
    return found.hexdigest()


def step(optimizer, number):
    optimizer.zero_grad()
    draw = torch.Generator().manual_seed(number)
    loss = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            loss = loss + (param * torch.randn(param.shape, generator=draw)).sum()
    loss.backward()
    optimizer.step()


def loop(device, steps, kind):
    """Ctrl-C at any moment costs at most the step under way, and is counted."""
    optimizer = make(device, kind)
    print("ready", flush=True)
    interrupts = 0
    while True:
        try:
            while optimizer._session.lineage.updates < steps:
                step(optimizer, optimizer._session.lineage.updates)
                print("step", optimizer._session.lineage.updates, flush=True)
            found = state(optimizer)
            break
        except KeyboardInterrupt:
            interrupts += 1
            torch.set_grad_enabled(True)  # torch's no_grad() may be cut off as it begins
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("state", found, interrupts, flush=True)
    optimizer.close()


def serve(device):
    optimizer = make(device)
    for number in range(3):
        step(optimizer, number)
    print(json.dumps({"state": state(optimizer)}), flush=True)
    for line in sys.stdin:
        try:
            optimizer.load_checkpoint(line.rstrip("\n"))
            answer = {"state": state(optimizer)}
        except smartinf.Error as error:
            answer = {"refused": str(error), "class": type(error).__name__}
        except BaseException as error:
            answer = {"raised": repr(error)[:500]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    what, device, *rest = sys.argv[1:]
    if what == "loop":
        loop(device, int(rest[0]), rest[1])
    elif what == "save":
        optimizer = make(device)
        optimizer.save_checkpoint(rest[0], replace=True)
    else:
        serve(device)
