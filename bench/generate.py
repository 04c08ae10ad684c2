#!/usr/bin/env python3
"""How fast texts are continued, one and several at once: `smartinf generate`, another build of it, and transformers'
generate(), in turn and in one run, on a model of random weights in the shape of SmolLM2 with 135 million parameters.

    bench/generate.py SMARTINF [--other SMARTINF] [--texts 1 16] [--steps 32] [--rounds 5] [--threads 0]

Prints a JSON line for each measurement: the time of a step, which makes a token of each text, by the clock and of the
processor. Both are those of 1 + STEPS tokens less those of one, so that starting and prompts do not count.
"""

import argparse
import json
import os
import pathlib
import resource
import subprocess
import tempfile
import time

import torch
import transformers

SMOLLM2 = dict(  # noqa: C408
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    rope_theta=100000.0,
    eos_token_id=None,
    bos_token_id=None,
)
PROMPT_TOKENS = 4


def now():
    """Seconds: of the clock, of this process and of those it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic(), time.process_time() + children.ru_utime + children.ru_stime


def by_smartinf(binary, folder, prompts, threads):
    flags = [word for prompt in prompts for word in ("--prompt-tokens", ",".join(map(str, prompt)))]

    def make(tokens):
        words = ["--threads", str(threads), "--tokens", str(tokens), "--json", *flags]
        subprocess.run([binary, "generate", str(folder), *words], capture_output=True, check=True)

    return make


def by_transformers(folder, prompts):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens_BT = torch.tensor(prompts)

    def make(tokens):
        model.generate(
            tokens_BT, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
        )

    return make


def measure(make, steps):
    times = [now()]
    for tokens in (1, 1 + steps):
        make(tokens)
        times.append(now())
    return [((times[2][i] - times[1][i]) - (times[1][i] - times[0][i])) / steps for i in (0, 1)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("smartinf")
    parser.add_argument("--other")
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--types", nargs="+", default=["bf16", "f32"])
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    threads = options.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.types:
            folder = pathlib.Path(scratch) / name
            torch.manual_seed(1)
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMOLLM2))
            model.to(torch.bfloat16 if name == "bf16" else torch.float32).save_pretrained(folder)
            for count in options.texts:
                prompts = torch.randint(0, 49152, (count, PROMPT_TOKENS)).tolist()
                ways = {"smartinf": by_smartinf(options.smartinf, folder, prompts, threads)}
                if options.other:
                    ways["other"] = by_smartinf(options.other, folder, prompts, threads)
                ways["transformers"] = by_transformers(folder, prompts)
                for number in range(options.rounds):
                    for way, make in ways.items():
                        clock_s, cpu_s = measure(make, options.steps)
                        row = {"type": name, "texts": count, "by": way, "round": number}
                        row |= {
                            "step_ms": round(1e3 * clock_s, 1),
                            "step_cpu_ms": round(1e3 * cpu_s, 1),
                        }
                        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
