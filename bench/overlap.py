#!/usr/bin/env python3
"""What a training step takes with the update behind forward or backward, and without, in turn.

    bench/overlap.py --device DIR [--rounds 3] [--steps 8] [--programs command,python]

Both programs train a Llama of about 200 million parameters in bf16 on 512 tokens a step: `smartinf train`
(optimizer.overlap none, late and early) and Hugging Face's model with smartinf.AdamW (overlap none, late and early).
"compute": forward and backward alone, without any update. One line of JSON for each: seconds of a step, median
over the steps behind the first two, and the bits of the last loss. Every run is a process of its own. State is
kept below DIR and removed.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

RECIPE = """
[model]
layers = 16
width = 1024
heads = 16
mlp_width = 2816
[data]
paths = ["python-stdlib"]
sequence = 512
[train]
micro_batch = 1
validate_every = 0
validation_batches = 1
sample_tokens = 0
lr = 1e-4
[engine]
memory_budget = "512MiB"
"""


def command(args, mode, folder):
    """Steps of `smartinf train`. The computing alone is what its steps say of forward and backward."""
    recipe = os.path.join(folder, "recipe.toml")
    with open(recipe, "w", encoding="ascii") as file:
        file.write(RECIPE)
    words = [args.smartinf, "train", recipe, "--json", "--train.run", os.path.join(folder, "run")]
    words += ["--train.steps", str(args.steps + 2), "--optimizer.overlap", mode]
    words += ["--train.clip_norm", str(args.clip_norm)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        steps = [row for row in map(json.loads, process.stdout) if "forward_s" in row]
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"{' '.join(words)}: exit code {process.returncode}")
    timed = steps[2:-1]  # behind the last one nothing is computed
    return {
        "step_s": statistics.median(row["seconds"] for row in timed),
        "compute_s": statistics.median(row["forward_s"] + row["backward_s"] for row in timed),
        "exposed_s": statistics.median(row["exposed_s"] for row in timed),
        "wrong_guesses": sum(row["wrong_guess"] for row in timed),
        "loss": steps[-1]["loss"].hex(),
        "peak_bytes": usage.ru_maxrss * 1024,
    }


def python_steps(mode, folder, steps, clip_norm):
    """In a process of its own: the same with transformers and the package."""
    import torch
    import transformers

    import smartinf

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=8192,
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=16,
            tie_word_embeddings=True,
        )
    ).to(torch.bfloat16)
    optimizer = None
    if mode != "compute":
        overlap = {} if mode == "none" else {"overlap": mode, "model": model}
        optimizer = smartinf.AdamW(
            model.named_parameters(),
            lr=1e-4,
            devices=[folder],
            max_grad_norm=clip_norm,
            release_gradients=True,
            **overlap,
        )
    tokens = torch.randint(8192, (1, 512))
    seconds, exposed, wrong = [], [0.0], [False]
    for _ in range(steps + 2):
        begin = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if optimizer is None:
            model.zero_grad()
        else:
            optimizer.step()
            exposed.append(optimizer.exposed_s)
            wrong.append(optimizer.wrong_guess)
        seconds.append(time.perf_counter() - begin)
    if optimizer is not None:
        optimizer.close()
    print(
        json.dumps(
            {
                "step_s": statistics.median(seconds[2:]),
                "exposed_s": statistics.median(exposed[2:] or exposed),
                "wrong_guesses": sum(wrong[3:]),
                "loss": loss.item().hex(),
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "params": sum(param.numel() for param in model.parameters()),
            }
        )
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", required=True, help="a directory on the drive")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each run")
    parser.add_argument("--clip-norm", type=float, default=1.0, help="0: every guess is right")
    parser.add_argument("--programs", default="command,python")
    parser.add_argument("--smartinf", default="smartinf", help="the command")
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mode:
        return python_steps(args.mode, args.device, args.steps, args.clip_norm)
    os.makedirs(args.device, exist_ok=True)
    for round_number in range(args.rounds):
        for program in args.programs.split(","):
            for mode in ("none", "late", "early") if program == "command" else ("compute", "none", "late", "early"):
                with tempfile.TemporaryDirectory(dir=args.device) as folder:
                    if program == "command":
                        row = command(args, mode, folder)
                    else:
                        words = [sys.executable, __file__, "--mode", mode, "--steps", str(args.steps)]
                        words += ["--device", folder, "--clip-norm", str(args.clip_norm)]
                        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
                        row = json.loads(done.stdout.splitlines()[-1])
                print(json.dumps({"round": round_number, "program": program, "mode": mode, **row}), flush=True)


if __name__ == "__main__":
    main()
