#!/usr/bin/env python3
"""Texts continued one after another with each layer's keys and values in a file, as oLLM does it
(github.com/Mega4alik/ollm, src/ollm/kvcache.py, commit 0158e31), written again for CPUs and GPT-2.

Of its ways it keeps: the prompt's keys and values of a layer are one file (torch.save), in 16 bits; for each new token
and layer that file is loaded whole (torch.load), those of the tokens since, which stay in memory, are put behind
them, and then the new ones: two copies of all. Left out: its weights outside memory and its GPU.

Prints a JSON object: seconds of prompts and of tokens apart.
"""

import argparse
import json
import pathlib
import time

import torch
import transformers
from torch.nn import functional


class FileCache:
    """Keys and values of one layer of one text."""

    def __init__(self, path: pathlib.Path):
        self.path, self.tail = path, None

    def extend(self, new):
        if self.tail is None:
            torch.save(new, self.path)
            self.tail = [one[:, :, :0] for one in new]
            return new
        loaded = torch.load(self.path)
        before = [torch.cat(parts, dim=2) for parts in zip(loaded, self.tail)]
        self.tail = [torch.cat(parts, dim=2) for parts in zip(self.tail, new)]
        return [torch.cat(parts, dim=2) for parts in zip(before, new)]


def step(model, caches, tokens_1S, first):
    """The next token of a text, whose tokens from `first` on are given."""
    body, count = model.transformer, tokens_1S.shape[1]
    x = body.wte(tokens_1S) + body.wpe(torch.arange(first, first + count))
    for block, cache in zip(body.h, caches):
        parts = block.attn.c_attn(block.ln_1(x)).split(x.shape[2], dim=2)
        q, k, v = (part.view(1, count, model.config.n_head, -1).transpose(1, 2).bfloat16() for part in parts)
        k_all, v_all = cache.extend([k, v])
        out = functional.scaled_dot_product_attention(q, k_all, v_all, is_causal=count > 1)
        x = x + block.attn.c_proj(out.transpose(1, 2).reshape(x.shape).float())
        x = x + block.mlp(block.ln_2(x))
    return model.lm_head(body.ln_f(x[:, -1:])).argmax(dim=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path, help="a Hugging Face folder of a GPT-2")
    parser.add_argument("prompts", type=pathlib.Path, help='lines of {"tokens": [...]}')
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="for the files, on the drive")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    options.folder.mkdir(parents=True, exist_ok=True)
    seconds, lines = [0.0, 0.0], options.prompts.read_text().splitlines()
    for line in lines:
        given = torch.tensor([json.loads(line)["tokens"]])
        caches = [FileCache(options.folder / f"layer_{layer}.pt") for layer in range(len(model.transformer.h))]
        first = 0
        for number in range(options.tokens):
            begun = time.monotonic()
            with torch.inference_mode():
                made = step(model, caches, given, first)
            first, given = first + given.shape[1], made
            seconds[number > 0] += time.monotonic() - begun
    row = {"prompt_seconds": seconds[0], "token_seconds": seconds[1], "tokens": len(lines) * (options.tokens - 1)}
    print(json.dumps(row))


if __name__ == "__main__":
    main()
