"""Times torch's fused AdamW and torch.topk on the CPU, for comparison with `smartinf bench kernels`.

    python bench/rivals/torch_fused_adamw.py [--params 2e7] [--repeat 5] [--threads 2]

Run it in turn with `smartinf bench kernels --rule adamw --gradient f32 --json`. torch keeps gradients
in the parameter's type, so both read f32; smartinf also writes bf16 weights, which torch does not.
Prints one JSON object.
"""

import argparse
import json
import statistics
import time

import torch


def median_seconds(work, repeat):
    work()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=float, default=2e7)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    n = int(options.params)
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(n))
    parameter.grad = torch.randn(n) * 1e-3
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, weight_decay=0.1, fused=True)
    update_s = median_seconds(optimizer.step, options.repeat)
    magnitude = parameter.grad.abs()
    topk_s = median_seconds(lambda: magnitude.topk(n // 100, sorted=False), options.repeat)
    print(json.dumps({
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "params": n,
        "adamw_params_per_s": n / update_s,
        "adamw_bytes_per_s": n * 28 / update_s,  # 4 x f32 read, 3 x f32 written
        "topk_1_percent_s": topk_s,
    }))


if __name__ == "__main__":
    main()
