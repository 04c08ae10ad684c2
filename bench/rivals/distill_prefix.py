#!/usr/bin/env python3
"""Blockwise distillation beside the prefix method, in which a teacher runs from its first block again for each block that
learns, as blockwise training does that keeps no outputs (DNA, arXiv 1911.13053; the baseline of Pipe-BD, DATE 2023).

Both are smartinf.distill() on a random Llama and its student with half of the channels, state on a device; the prefix
method replaces only how the teacher's outputs come about, so that both end with the same weights. By counts a teacher of
U blocks then takes (U (U + 1) / 2 t + U s) / (U (t + s)) times as long, for t seconds of a teacher's block and s of a
student's step. Ways are run in turn. Prints a JSON object a run, and one of the medians.

    bench/rivals/distill_prefix.py --drive DIR --blocks 8 --repeat 3
"""

import argparse
import json
import pathlib
import statistics
import tempfile
import time

import torch
import transformers

import smartinf
from smartinf import distillation


class Timed(distillation._Distillation):
    """seconds: of all blocks of the teacher, and of all steps of the student."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seconds = {"teacher": 0.0, "student": 0.0}
        last.append(self)

    def _all(self, cut, block, given, computed=None):
        begin = time.perf_counter()
        returned = self.outputs(cut, block, given, computed)
        self.seconds["teacher"] += time.perf_counter() - begin
        return returned

    def outputs(self, cut, block, given, computed):
        return super()._all(cut, block, given, computed)

    def _train(self, *args):
        begin = time.perf_counter()
        super()._train(*args)
        self.seconds["student"] += time.perf_counter() - begin


class Prefix(Timed):
    def outputs(self, cut, block, given, computed):
        returned = self._stores()
        with torch.no_grad():
            for k, ids in enumerate(self._data):
                hidden = cut.embed(ids)
                for before in range(block + 1):
                    hidden = cut.run(before, hidden)
                    computed[cut.names[before]] += 1
                returned.put(k, hidden)
        return returned


def run(way, drive):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=args.width, intermediate_size=4 * args.width, num_hidden_layers=args.blocks,
        num_attention_heads=args.width // 64, tie_word_embeddings=True,
    )  # fmt: skip
    teacher = transformers.LlamaForCausalLM(config)
    data = list(torch.randint(1024, (args.batches, args.rows, args.length)))
    student = smartinf.prune(teacher, data[:1], ffn=0.5)
    distillation._Distillation = way
    with tempfile.TemporaryDirectory(dir=drive) as device:
        made = smartinf.distill(teacher, student, data, devices=[device], top_k=0)
    blocks = sum(count for name, count in made.computed.items() if name != "embedding")
    weights = torch.cat([param.detach().flatten() for param in student.parameters()])
    return last[-1].seconds | {"blocks_computed": blocks // args.batches}, weights


parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--drive", type=pathlib.Path, required=True, help="folder for the state, which is deleted")
for name, value in {"blocks": 8, "width": 256, "batches": 16, "rows": 4, "length": 128, "repeat": 3, "threads": 1}.items():
    parser.add_argument(f"--{name}", type=int, default=value)
args = parser.parse_args()
torch.set_num_threads(args.threads)
last, rows, weights = [], {Timed: [], Prefix: []}, []
for _ in range(args.repeat):
    for way, of in rows.items():
        row, made = run(way, args.drive)
        of.append(row)
        weights.append(made)
        print(json.dumps({"way": "smartinf" if way is Timed else "prefix"} | row), flush=True)
assert all(torch.equal(weights[0], made) for made in weights), "the ways end with other weights"
t, s = (statistics.median(row[of] / args.blocks / args.batches for row in rows[Timed]) for of in ("teacher", "student"))
by_counts = ((args.blocks + 1) / 2 * t + s) / (t + s)
total = {way: statistics.median(row["teacher"] + row["student"] for row in of) for way, of in rows.items()}
print(json.dumps({"times_as_long": total[Prefix] / total[Timed], "by_counts": by_counts, "t": t, "s": s}))
