"""A step of two stages (rank_worker) beside one of torch's DistributedDataParallel on two ranks, where computing sleeps.

The model is GPT-2's shape: 124 million parameters, width 768, 16 micro batches of 1024 tokens a step. Both ranks together compute
as long in both programs: a stage sleeps F and 2 F for each micro batch, a replica twice as long for each of its eight. DDP exchanges
f32 gradients, or bf16 ones by its own hook, behind its last micro batch's layers; stages send bf16, twice for each micro batch and
direction as a head does that is the embedding's matrix on the first stage (ranks.tied = "fold"). Neither makes updates.
Links are those of pipeline_beside_torch.py. A line of JSON for each program and rate. Needs root.

    python3 bench/pipeline_beside_ddp.py --worker build/release/bin/rank_worker > rows.jsonl
"""
import argparse
import contextlib
import json
import os
import statistics
import sys
import time

import pipeline_beside_torch as stages

WIDTH, TOKENS, MICRO_BATCHES, LAYERS = 768, 1024, 16, 12
OF_LAYER, OF_EMBEDDING = 7_087_872, 39_385_344  # parameters


def ddp_rank(forward_s, hook, repeats):
    """One rank: prints the seconds of its steps, as JSON."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    class Sleeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, seconds):
            ctx.seconds, ctx.gradient = seconds, torch.zeros_like(weight)
            time.sleep(seconds)
            return x + 0

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(2 * ctx.seconds)
            return gradient, ctx.gradient, None

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            sizes = [OF_EMBEDDING] + [OF_LAYER] * LAYERS
            self.weights = torch.nn.ParameterList(torch.zeros(size) for size in sizes)

        def forward(self, x):
            for i, weight in enumerate(self.weights):
                x = Sleeps.apply(x, weight, 2 * forward_s / LAYERS if i > 0 else 0.0)
            return x

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(Model())
    if hook == "bf16":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    x, took = torch.zeros(1, requires_grad=True), []
    for step in range(2 + repeats):  # DDP forms its buckets again behind the first
        dist.barrier()
        began = time.monotonic()
        for micro_batch in range(MICRO_BATCHES // 2):
            last = micro_batch + 1 == MICRO_BATCHES // 2
            with contextlib.nullcontext() if last else model.no_sync():
                model(x).sum().backward()
        dist.barrier()
        took.append(time.monotonic() - began)
    if dist.get_rank() == 0:
        print(json.dumps(took[2:]))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e8, 1e9, 1e10], help="bits per second")
    parser.add_argument("--forward", type=float, default=0.05, help="seconds of a stage's forward of a micro batch; backward takes two")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker", required=True, help="rank_worker of the build")
    parser.add_argument("--ddp-rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ddp_rank:
        return ddp_rank(arguments.forward, arguments.ddp_rank, arguments.repeats)
    stages.FORWARD_S, stages.BACKWARD_S = arguments.forward, 2 * arguments.forward
    for rate in arguments.rates:
        with stages.Links(2, rate) as links:
            def ddp(hook):
                took = json.loads(stages.run_ranks(links, [
                    sys.executable, os.path.abspath(__file__), "--ddp-rank", hook, "--forward", str(arguments.forward),
                    "--repeats", str(arguments.repeats), "--worker", "none"]))
                return statistics.median(took)

            programs = {
                "two stages": lambda: stages.worker_step(links, arguments.worker, MICRO_BATCHES, 2 * 2 * TOKENS * WIDTH,
                                                         arguments.repeats),
                "DDP, f32": lambda: ddp("f32"),
                "DDP, bf16": lambda: ddp("bf16")}
            for program, step in programs.items():
                before = links.sent_bytes(0)
                seconds = step()
                print(json.dumps({"program": program, "bits_per_s": rate, "forward_s": arguments.forward, "step_s": round(seconds, 3),
                                  "tokens_per_s": round(MICRO_BATCHES * TOKENS / seconds),
                                  "sent_bytes_in_all": links.sent_bytes(0) - before}), flush=True)


if __name__ == "__main__":
    main()
