"""Attention of a decode step from memory: `smartinf bench attend` and torch's scaled_dot_product_attention in turn.

Each process of the command is beside one measurement of torch over as many keys and values, so that a busy machine
slows both. Prints a JSON line for each pair and the median of the ratios.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import time

import torch


def torch_seconds(
    args: argparse.Namespace, keys_values: list[torch.Tensor], query: torch.Tensor
) -> float:
    seconds = []
    for _ in range(args.repeat + 1):
        start = time.perf_counter()
        torch.nn.functional.scaled_dot_product_attention(query, *keys_values, enable_gqa=True)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smartinf", type=pathlib.Path, required=True)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--formats", nargs="+", default=["bf16", "q8"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = (args.sequences, args.kv_heads, args.tokens, args.head_width)
    keys_values = [torch.randn(shape, dtype=torch.bfloat16) for _ in range(2)]
    query = torch.randn(args.sequences, args.heads, 1, args.head_width, dtype=torch.bfloat16)
    flags = []
    for name in ("heads", "kv_heads", "head_width", "tokens", "sequences", "threads", "repeat"):
        flags += ["--" + name.replace("_", "-"), str(getattr(args, name))]
    ratios: dict[str, list[float]] = {name: [] for name in args.formats}
    for _ in range(args.pairs):
        for name in args.formats:
            command = [args.smartinf, "bench", "attend", "--format", name, "--json", *flags]
            ours = json.loads(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout
            )
            tokens_per_s = args.sequences / torch_seconds(args, keys_values, query)
            ratios[name].append(ours["layer_tokens_per_s"] / tokens_per_s)
            print(
                json.dumps(
                    {**ours, "torch": torch.__version__, "torch_tokens_per_s": tokens_per_s}
                ),
                flush=True,
            )
    print(json.dumps({name: statistics.median(of_format) for name, of_format in ratios.items()}))


if __name__ == "__main__":
    main()
