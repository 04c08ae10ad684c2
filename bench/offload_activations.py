#!/usr/bin/env python3
"""What smartinf.offload_activations takes and saves: steps of a transformers Llama, each run in a process of its own.

    offload_activations.py --device DIR [--layers 24] [--width 512] [--sequence 512] [--batch 1] [--keep auto]
        [--memory-budget 32MiB] [--steps 6] [--rounds 3] [--checkpointing]

Prints the peak of activations (the largest resident size of a step, less what was resident before it), the time of a
step (the fastest and the median, the first one left out), the processor time that the process takes for it, their
ratios, and whether losses and gradients have the same bits.
"""

import argparse
import contextlib
import hashlib
import json
import logging
import os
import statistics
import subprocess
import sys
import time


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", required=True)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--keep", default="auto")
    parser.add_argument("--memory-budget", default="32MiB")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--run", choices=["plain", "offload"], help=argparse.SUPPRESS)
    return parser.parse_args()


def resident(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))


def digest(model, loss):
    sums = hashlib.sha256(loss.detach().numpy().tobytes())
    for parameter in model.parameters():
        sums.update(parameter.grad.numpy().tobytes())
    return sums.hexdigest()


def run(options):
    import torch
    import transformers

    import smartinf

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=options.width,
            intermediate_size=options.width * 8 // 3 // 64 * 64,
            num_hidden_layers=options.layers,
            num_attention_heads=options.width // 64,
            vocab_size=options.vocabulary,
            max_position_embeddings=options.sequence,
            use_cache=False,
        )
    )
    if options.checkpointing:
        model.gradient_checkpointing_enable()
    for parameter in model.parameters():  # not activations
        parameter.grad = torch.ones_like(parameter)
    tokens = torch.randint(options.vocabulary, (options.batch, options.sequence))
    model(input_ids=tokens[:, :8], labels=tokens[:, :8]).loss.backward()  # what is loaded at first use
    context, counts = contextlib.nullcontext(), None
    if options.run == "offload":
        keep = options.keep if options.keep == "auto" or options.keep[-1] == "B" else float(options.keep)
        context = smartinf.offload_activations(
            model, [options.device], keep=keep, memory_budget=options.memory_budget
        )
        counts = context.counts
    seconds, cpu_seconds, digests = [], [], []
    with open("/proc/self/clear_refs", "w") as clear:  # the peak begins anew
        clear.write("5")
    before = resident("VmRSS")
    with context:
        for _ in range(options.steps):
            model.zero_grad(set_to_none=False)
            began, cpu_began = time.perf_counter(), time.process_time()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            seconds.append(time.perf_counter() - began)
            cpu_seconds.append(time.process_time() - cpu_began)
            digests.append(digest(model, loss))
    print(
        json.dumps(
            {
                "peak": resident("VmHWM") - before,
                "seconds": seconds[1:],
                "cpu_seconds": cpu_seconds[1:],
                "digests": digests,
                "counts": counts and vars(counts),
            }
        )
    )


def measure(kind):
    done = subprocess.run(
        [sys.executable, *sys.argv, "--run", kind], stdout=subprocess.PIPE, text=True, check=True, env=os.environ
    )
    return json.loads(done.stdout)


def main():
    options = arguments()
    if options.run:
        run(options)
        return
    rows = {"plain": [], "offload": []}
    for _ in range(options.rounds):
        for kind, results in rows.items():
            results.append(measure(kind))
    took = {}
    for kind, results in rows.items():
        seconds = [s for result in results for s in result["seconds"]]
        cpu = statistics.median(s for result in results for s in result["cpu_seconds"])
        peak = max(result["peak"] for result in results)
        took[kind] = (peak, min(seconds), statistics.median(seconds), cpu)
        print(
            f"{kind:8} peak {took[kind][0] / 2**20:7.0f} MiB, step {took[kind][1]:.3f} s at best, "
            f"{took[kind][2]:.3f} s in the median (of {', '.join(f'{s:.2f}' for s in seconds)}), "
            f"processor {cpu:.3f} s"
        )
    ratios = [offload / plain for offload, plain in zip(took["offload"], took["plain"], strict=True)]
    print(
        f"ratio    peak {ratios[0]:.3f}, step {ratios[1]:.3f} at best, {ratios[2]:.3f} in the median, "
        f"processor {ratios[3]:.3f}"
    )
    steps = options.steps
    for name, value in rows["offload"][-1]["counts"].items():
        print(f"  {name:20} a step {value / steps:14,.3f}")
    same = all(r["digests"] == rows["plain"][0]["digests"] for results in rows.values() for r in results)
    print("losses and gradients have the same bits" if same else "LOSSES OR GRADIENTS DIFFER")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
