#!/usr/bin/env python3
"""Times the optimizer step of DeepSpeed's ZeRO-Infinity with its state on storage, without a GPU.

One JSON line at the end has the same fields as `smartinf bench step --json`: update_s is the median
of engine.step(), which reads the fp32 state and gradients, updates, and writes the state back.
The options are those that were fastest for DeepSpeed where this was tried: its plain swapper with
16 transfers of 1 MiB in flight and subgroups of 2e7 parameters. The model is a row of square layers:
its forward and backward are there to make gradients and are not part of update_s.
"""
import argparse
import json
import os
import resource
import statistics
import time


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--params", type=float, default=2e8)
    parser.add_argument("--device", required=True, help="a directory for the state")
    parser.add_argument("--where", choices=["nvme", "cpu"], default="nvme")
    parser.add_argument("--repeat", type=int, default=5, help="timed steps, after one that is not")
    parser.add_argument("--hidden", type=int, default=2048)
    return parser.parse_args()


def configuration(arguments):
    offload = {"device": arguments.where}
    if arguments.where == "nvme":
        offload.update(nvme_path=arguments.device, buffer_count=14, pin_memory=False,
                       pipeline_read=False, pipeline_write=False)
    return {
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": offload,
            "sub_group_size": 20_000_000,
            "stage3_param_persistence_threshold": 0,
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 16, "single_submit": False,
                "overlap_events": True, "intra_op_parallelism": 2},
    }


def main():
    arguments = parse_arguments()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for key, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0",
                       "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(key, value)
    import deepspeed
    import torch

    layers = max(1, round(arguments.params / arguments.hidden**2))
    model = torch.nn.Sequential(*(torch.nn.Linear(arguments.hidden, arguments.hidden, bias=False)
                                  for _ in range(layers)))
    params = sum(p.numel() for p in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(),
                                      config=configuration(arguments))
    sample = torch.randn(1, arguments.hidden, dtype=torch.bfloat16)
    seconds = []
    for _ in range(arguments.repeat + 1):
        loss = engine(sample).float().square().mean()
        engine.backward(loss)
        begin = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - begin)
    timed = seconds[1:]
    print(json.dumps({
        "rival": "deepspeed", "version": deepspeed.__version__, "torch": torch.__version__,
        "params": params, "where": arguments.where, "repeat": arguments.repeat,
        "update_s": statistics.median(timed), "update_s_min": min(timed), "update_s_max": max(timed),
        "rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }), flush=True)


if __name__ == "__main__":
    main()
