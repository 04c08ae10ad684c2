#!/usr/bin/env python3
"""What the format of cached keys and values changes in a model's next tokens: real text goes through a model token by
token, each with caches in f32, bf16 and q8 (smartinf.DeviceCache, in memory), and the distributions of the next
token are compared: how often the likeliest token is the same, and the Kullback-Leibler divergence in nats.

    PYTHONPATH=build/release/python bench/cache_format_quality.py models/smollm2 models/gemma3 [--tokens 10240]

The text is the licences and the Python library that every Debian system has, half of each, in rows of --length tokens.
Prints a JSON line for each model and pair of formats.
"""

import argparse
import itertools
import json
import pathlib
import sysconfig

import torch
import transformers

import smartinf

PAIRS = (("f32", "bf16"), ("bf16", "q8"))  # the one that is compared with, first


def text_of(files, length):
    """Of the files in their order, until it is so long."""
    texts = itertools.takewhile(lambda _: length > 0, (file.read_text(errors="replace") for file in files))
    made = ""
    for text in texts:
        made += text
        if len(made) >= length:
            return made[:length]
    return made


def rows_of(tokenizer, count, length):
    licences = sorted(pathlib.Path("/usr/share/common-licenses").glob("*"))
    library = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("[a-m]*.py"))
    rows = []
    for files in (licences, library):
        tokens = tokenizer(text_of(files, 20 * count), add_special_tokens=False, truncation=False)["input_ids"]
        half = count // 2 // length
        rows += [tokens[row * length : (row + 1) * length] for row in range(half)]
    return torch.tensor(rows)


def compare(folder, count, length):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows_RT = rows_of(transformers.AutoTokenizer.from_pretrained(folder), count, length)
    caches = {name: smartinf.DeviceCache(model, format=name, max_length=length) for name in ("f32", "bf16", "q8")}
    model.set_attn_implementation("smartinf")
    same, divergence, largest = ({pair: 0.0 for pair in PAIRS} for _ in range(3))
    with torch.inference_mode():
        for position in range(length):
            logs = {}
            for name, cache in caches.items():
                out = model(rows_RT[:, position : position + 1], past_key_values=cache, use_cache=True)
                logs[name] = out.logits[:, -1].float().log_softmax(dim=-1)
            for pair in PAIRS:
                p, q = (logs[name] for name in pair)
                of_rows = (p.exp() * (p - q)).sum(dim=-1)
                same[pair] += (p.argmax(dim=-1) == q.argmax(dim=-1)).sum().item()
                divergence[pair] += of_rows.sum().item()
                largest[pair] = max(largest[pair], of_rows.max().item())
    for pair in PAIRS:
        print(
            json.dumps(
                {
                    "model": folder.name,
                    "format": pair[1],
                    "beside": pair[0],
                    "tokens": rows_RT.numel(),
                    "row_tokens": length,
                    "top1_agreement": same[pair] / rows_RT.numel(),
                    "kl_mean": divergence[pair] / rows_RT.numel(),
                    "kl_max": largest[pair],
                }
            ),
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=pathlib.Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=10240)
    parser.add_argument("--length", type=int, default=640)
    options = parser.parse_args()
    for folder in options.models:
        compare(folder, options.tokens, options.length)


if __name__ == "__main__":
    main()
