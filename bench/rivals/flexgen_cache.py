#!/usr/bin/env python3
"""Texts continued with keys and values in files, as FlexGen does it (github.com/FMInference/FlexLLMGen, commit 004ffef),
written again for CPUs and GPT-2, because the original needs CUDA and OPT.

Of its ways it keeps: a numpy.memmap of [tokens, texts x heads, width] in 16 bits for keys, and one for values, of
each layer and group of texts, through the page cache; for each token, layer by layer and in a layer group by group, a
copy of the whole of both, the next group's by threads while one is computed, which are waited for after each group;
attention in f32 over permuted copies. Left out: its weights outside memory, its 4-bit cache and its GPU.

Prints a JSON object: seconds of prompts and of tokens apart.
"""

import argparse
import concurrent.futures
import json
import pathlib
import time

import numpy
import torch
import transformers
from torch.nn import functional


class FileCache:
    """Keys or values of one layer and group of texts."""

    def __init__(self, path: pathlib.Path, tokens: int, rows: int, width: int):
        self.file = numpy.memmap(path, dtype=numpy.float16, mode="w+", shape=(tokens, rows, width))

    def store(self, first: int, values_SRd: torch.Tensor) -> None:
        self.file[first : first + len(values_SRd)] = values_SRd.to(torch.float16).numpy()

    def load(self, tokens: int) -> torch.Tensor:
        return torch.from_numpy(numpy.array(self.file[:tokens]))


class Continuation:
    def __init__(self, model, folder: pathlib.Path, texts: int, group: int, tokens_max: int):
        self.model = model.transformer
        self.head = model.lm_head
        config = model.config
        self.heads = config.n_head
        self.width = config.n_embd // config.n_head
        self.groups = [range(first, min(first + group, texts)) for first in range(0, texts, group)]
        self.copies = concurrent.futures.ThreadPoolExecutor(4)
        self.caches = [
            [
                [
                    FileCache(folder / f"{layer}_{number}_{part}", tokens_max, len(rows) * self.heads, self.width)
                    for part in "kv"
                ]
                for number, rows in enumerate(self.groups)
            ]
            for layer in range(config.n_layer)
        ]

    def split(self, x_BSC):
        """[B, S, C] as [S, B heads, d]."""
        batch, tokens, _ = x_BSC.shape
        return x_BSC.view(batch, tokens, self.heads, self.width).permute(1, 0, 2, 3).reshape(tokens, -1, self.width)

    def attend(self, block, x_BSC, first, cached):
        """Attention of a layer; cached: keys and values before x, or None, and where those of x go."""
        batch, tokens, channels = x_BSC.shape
        q, k, v = block.attn.c_attn(x_BSC).split(channels, dim=2)
        k_SRd, v_SRd = self.split(k), self.split(v)
        q_RSd = self.split(q).permute(1, 0, 2)
        loaded, caches = cached
        self.writes = [self.copies.submit(cache.store, first, new) for cache, new in zip(caches, (k_SRd, v_SRd))]
        if loaded is None:
            shape = (batch, self.heads, tokens, self.width)
            k_all, v_all = (part.permute(1, 0, 2).reshape(shape) for part in (k_SRd, v_SRd))
            out = functional.scaled_dot_product_attention(q_RSd.reshape(shape), k_all, v_all, is_causal=True)
            out_BSC = out.permute(0, 2, 1, 3).reshape(batch, tokens, channels)
        else:
            k_all = torch.cat([loaded[0].float(), k_SRd]).permute(1, 2, 0).contiguous()
            v_all = torch.cat([loaded[1].float(), v_SRd]).permute(1, 0, 2).contiguous()
            weights = torch.bmm(q_RSd * self.width**-0.5, k_all).softmax(dim=2)
            out_BSC = torch.bmm(weights, v_all).view(batch, tokens, channels)
        return block.attn.c_proj(out_BSC.contiguous())

    def load(self, layer, number, tokens):
        if tokens == 0:
            return None
        return [self.copies.submit(cache.load, tokens) for cache in self.caches[layer][number]]

    def step(self, tokens_TS, first):
        """The next token of each text, whose tokens from `first` on are given."""
        positions = torch.arange(first, first + tokens_TS.shape[1])
        hidden = [self.model.wte(tokens_TS[list(rows)]) + self.model.wpe(positions) for rows in self.groups]
        order = [(layer, number) for layer in range(len(self.model.h)) for number in range(len(self.groups))]
        ahead = self.load(*order[0], first)
        for index, (layer, number) in enumerate(order):
            loaded = None if ahead is None else [copy.result() for copy in ahead]
            if index + 1 < len(order):
                ahead = self.load(*order[index + 1], first)
            block = self.model.h[layer]
            x = hidden[number]
            x = x + self.attend(block, block.ln_1(x), first, (loaded, self.caches[layer][number]))
            hidden[number] = x + block.mlp(block.ln_2(x))
            # FlexGen waits for all copies after each group.
            concurrent.futures.wait(self.writes + (ahead or []))
        last = torch.cat([self.model.ln_f(x[:, -1]) for x in hidden])
        return self.head(last).argmax(dim=1, keepdim=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path, help="a Hugging Face folder of a GPT-2")
    parser.add_argument("prompts", type=pathlib.Path, help='lines of {"tokens": [...]}, all of one length')
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="for the files, on the drive")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--group", type=int, default=16, help="texts that are computed together")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--answers", type=pathlib.Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    prompts = torch.tensor([json.loads(line)["tokens"] for line in options.prompts.read_text().splitlines()])
    texts, length = prompts.shape
    options.folder.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode():
        run = Continuation(model, options.folder, texts, options.group, length + options.tokens)
        begun = time.monotonic()
        made = [run.step(prompts, 0)]
        prefilled = time.monotonic()
        for number in range(options.tokens - 1):
            made.append(run.step(made[-1], length + number))
        ended = time.monotonic()
    if options.answers:
        lines = [json.dumps({"tokens": row}) for row in torch.cat(made, dim=1).tolist()]
        options.answers.write_text("\n".join(lines) + "\n")
    row = {"prompt_seconds": prefilled - begun, "token_seconds": ended - prefilled, "tokens": texts * (options.tokens - 1)}
    print(json.dumps(row))


if __name__ == "__main__":
    main()
