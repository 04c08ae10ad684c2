#!/usr/bin/env python3
"""What `smartinf plan` says a training run needs of host memory, against the peak resident size it really had.

    bench/plan_memory.py --device DIR [ROW ...]

Each row is a run of three steps of `smartinf train` on this project's own text, without a GPU, and a question to
`plan` about the same model, precision and devices. The peak is the kernel's, of the whole process. Rows with "python"
train a Llama of transformers with the Python package instead, on random tokens; they need both, torch, and PYTHONPATH.
Rows with
"streamed" give both a memory.host between what all would need and the least plan. Rows are named by what --list prints;
all of them when none is named. SMARTINF names the binary [build/release/bin/smartinf].
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from runs import ROOT, SMARTINF, text_of

STEPS = 3

# layers, width, heads, heads of keys and values, feed-forward, vocabulary
MODELS = {"5M": (6, 256, 4, 2, 768, 256), "25M": (8, 512, 8, 4, 1536, 256), "34M": (8, 512, 8, 4, 1536, 16384),
          "108M": (12, 896, 14, 7, 2432, 256)}
BATCH, SEQUENCE = 8, 256

# What differs from bf16 weights, f32 state on one device, gradients in memory, every layer's activations kept.
WAYS = {
    "": {},
    "checkpoints": {"checkpoints": True},
    "f32": {"precision": "f32"},
    "f32 checkpoints": {"precision": "f32", "checkpoints": True},
    "memory": {"where": "memory"},
    "f32 memory": {"precision": "f32", "where": "memory"},
    "spill": {"spill": True},
    "two devices": {"devices": 2},
    "batch 2 of 1024": {"batch": 2, "sequence": 1024},
    "accumulation": {"accumulation": 2},
    "checkpoints accumulation": {"accumulation": 2, "checkpoints": True},
    "streamed": {"streamed": True, "checkpoints": True, "batch": 1},
    "streamed accumulation": {"streamed": True, "checkpoints": True, "batch": 1, "accumulation": 3},
    "python": {"python": True},
    "python checkpoints": {"python": True, "checkpoints": True},
    "python release": {"python": True, "release": True},
    "python release checkpoints": {"python": True, "release": True, "checkpoints": True},
    "python release checkpoints accumulation": {"python": True, "release": True, "checkpoints": True,
                                                "accumulation": 2},
    "python checkpoints accumulation": {"python": True, "checkpoints": True, "accumulation": 2},
}
ROWS = {f"{model} {name}".strip(): (model, way) for model in MODELS for name, way in WAYS.items()
        if (model in ("5M", "25M") and "streamed" not in way) or ("streamed" in way and model == "108M")
        or name in ("", "checkpoints", "f32", "memory", "spill")
        or ("python" in way and model == "108M")}

PYTHON = """
import json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import smartinf

way = json.loads(sys.argv[1])
torch.set_default_dtype(torch.bfloat16)
model = LlamaForCausalLM(LlamaConfig(**way["config"], attn_implementation="sdpa"))
model.train()
if way.get("checkpoints"):
    model.gradient_checkpointing_enable()
accumulation = way.get("accumulation", 1)
release = way.get("release", False)
optimizer = smartinf.AdamW(model.parameters(), lr=1e-4, devices=[way["device"]], resume=False,
                           release_gradients=release, accumulation_steps=accumulation if release else 1)
for step in range(3):
    for _ in range(accumulation):
        tokens = torch.randint(0, way["config"]["vocab_size"], (8, 256))
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        del loss
    optimizer.step()
    optimizer.zero_grad()
optimizer.close()
"""


def config(model):
    layers, width, heads, kv_heads, inner, vocabulary = MODELS[model]
    return {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "intermediate_size": inner, "vocab_size": vocabulary,
            "tie_word_embeddings": True}


def host_limit(machine, needed):
    """A machine file with so much memory."""
    return re.sub(r"(\[host\][^\[]*?memory_bytes *= *)[^\n#]+", rf"\g<1>{needed}", machine)


def planned(model, way, machine, folder, unfit=False):
    if way.get("streamed"):
        # What everything takes where there is no limit; and, with no memory at all, the least plan's.
        free = dict(way, streamed=False)
        most = planned(model, free, host_limit(machine, 10**13), folder)
        least = planned(model, free, host_limit(machine, 1), folder, unfit=True)
        return planned(model, free, host_limit(machine, (most + least) // 2), folder)
    (folder / "config.json").write_text(json.dumps(config(model)), encoding="utf-8")
    if way.get("spill"):
        machine = re.sub(r"gradient_spilled *= *\w+", "gradient_spilled = true", machine)
    (folder / "machine.toml").write_text(machine, encoding="utf-8")
    plan = json.loads(text_of("plan", folder / "config.json", "--machine", folder / "machine.toml",
                           "--batch", way.get("batch", BATCH), "--seq", way.get("sequence", SEQUENCE),
                           "--precision", way.get("precision", "bf16"),
                           "--devices", way.get("devices", 1), "--accumulation", way.get("accumulation", 1),
                           "--recompute", str(way.get("checkpoints", False)).lower(),
                           *([] if unfit else ["--recipe", folder / "recipe.toml"]), "--json"))
    if way.get("python"):
        name = "Python, release_gradients=True" if way.get("release") else "Python"
        return next(one["expected_host_bytes"] for one in plan["uses"] if one["with"] == name)
    key = "memory_host_bytes" if way.get("where") == "memory" else "expected_host_bytes"
    return plan[key if way.get("checkpoints") else key + "_without_checkpoints"]


def peak(model, way, device, folder):
    """Of a process that trains plan's recipe: what the kernel counted when it ended."""
    keys = {"data.paths": ROOT / "docs", "data.suffixes": ".md", "data.validation_share": 0.2,
            "data.sequence": way.get("sequence", SEQUENCE), "train.run": folder / "run",
            "train.steps": STEPS, "train.sample_tokens": 0,
            "train.micro_batch": way.get("batch", BATCH), "train.accumulation": way.get("accumulation", 1),
            "train.precision": way.get("precision", "bf16"), "train.accelerator": "cpu",
            "memory.activations": "recompute" if way.get("checkpoints") else "keep",
            "optimizer.where": way.get("where", "device")}
    if way.get("spill"):
        keys["engine.gradient_budget"] = 0
    for index in range(way.get("devices", 1)):
        keys[f"device.{index}.path"] = device / str(index)
    words = ["train", folder / "recipe.toml"]
    words += [word for key, value in keys.items() for word in (f"--{key}", value)]
    words = [SMARTINF, *words]
    if way.get("python"):
        (folder / "train.py").write_text(PYTHON, encoding="utf-8")
        words = [sys.executable, folder / "train.py",
                 json.dumps(dict(way, config=config(model), device=str(device / "0")))]
    report = folder / "steps.txt"
    with open(report, "w", encoding="utf-8") as out:
        child = subprocess.Popen([str(word) for word in words], stdout=out, stderr=out)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        sys.exit(f"{' '.join(map(str, words))}: {report.read_text(encoding='utf-8')}")
    return usage.ru_maxrss * 1024


def measured(name, device, machine):
    model, way = ROWS[name]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        try:
            return name, planned(model, way, machine, folder), peak(model, way, device, folder)
        finally:
            for index in range(2):
                shutil.rmtree(device / str(index), ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--device", type=pathlib.Path, help="A directory on a drive; what is made there is erased")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list:
        return print("\n".join(ROWS))
    if not options.device:
        parser.error("--device is missing")
    for name in options.rows:
        if name not in ROWS:
            parser.error(f"no row '{name}'; --list names them")
    options.device.mkdir(parents=True, exist_ok=True)
    machine = options.device / "machine.toml"
    text_of("calibrate", "--device", options.device, "--out", machine)
    text = machine.read_text(encoding="utf-8")
    errors = []
    print("| model and options | planned | measured peak | error |\n|---|---|---|---|")
    for name in options.rows or ROWS:
        _, plan, real = measured(name, options.device, text)
        errors.append(plan / real - 1)
        print(f"| {name} | {plan / 1e6:.0f} MB | {real / 1e6:.0f} MB | {100 * errors[-1]:+.1f} % |", flush=True)
    size = [abs(error) for error in errors]
    print(f"\n{len(size)} rows, mean error {100 * sum(size) / len(size):.1f} %, worst {100 * max(size):.1f} %")


if __name__ == "__main__":
    main()
