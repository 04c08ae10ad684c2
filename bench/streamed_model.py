#!/usr/bin/env python3
"""A Llama of transformers, trained by Trainer with its weights on a device, and in memory: peak, time, bits.

Makes a random model in WORK/model if there is none, then runs each way in a process of its own, and prints a JSON line
for each and a comparison. Needs the package (PYTHONPATH or installed), transformers and accelerate.

    bench/streamed_model.py WORK [--steps 10] [--memory-budget 1.2GB] [--only streamed|plain]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", help="a folder on the drive; states and the model are written there")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--memory-budget", default="1.2GB")
    parser.add_argument("--only", choices=["streamed", "plain", "model"])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def make_model(args):
    import torch
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.width,
        intermediate_size=args.width * 8 // 3 // 128 * 128,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 128,
        dtype="bfloat16",
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(f"{args.work}/model", max_shard_size="1GB")


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def train(args, streamed):
    import torch
    import transformers

    import smartinf
    import smartinf.hf

    imported = peak_mib()
    generator = torch.Generator().manual_seed(2)
    count = args.batch * args.accumulation * args.steps
    rows = torch.randint(args.vocabulary, (count, args.sequence), generator=generator)
    data = [{"input_ids": row, "labels": row} for row in rows]
    folder, device = f"{args.work}/model", f"{args.work}/{'streamed' if streamed else 'plain'}"
    begin = time.monotonic()
    if streamed:
        model = smartinf.from_pretrained(
            folder, devices=[device], memory_budget=args.memory_budget, dtype=torch.bfloat16
        )
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    loaded_s, loaded = time.monotonic() - begin, peak_mib()
    model.gradient_checkpointing_enable()
    training = transformers.TrainingArguments(
        f"{args.work}/out", max_steps=args.steps, per_device_train_batch_size=args.batch, learning_rate=1e-4,
        gradient_accumulation_steps=args.accumulation, logging_steps=1, report_to=[], save_strategy="no",
        disable_tqdm=True, use_cpu=True, max_grad_norm=1.0, warmup_steps=4, dataloader_pin_memory=False,
    )  # fmt: skip
    steps = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.began = time.monotonic()

        def on_step_end(self, *_, optimizer=None, **__):
            ours = smartinf.hf.unwrap(optimizer)
            traffic = ours.traffic()
            steps.append({
                "seconds": round(time.monotonic() - self.began, 2), "exposed_s": round(ours.exposed_s, 2),
                "norm": ours.grad_norm, "read": sum(traffic["read"].values()),
                "written": sum(traffic["written"].values()),
            })  # fmt: skip

    class Layerwise(smartinf.hf.StreamedTrainer, transformers.Trainer):
        pass

    options = {} if streamed else {"devices": [device], "release_gradients": True}
    kind = Layerwise if streamed and args.accumulation > 1 else transformers.Trainer
    trainer = kind(
        model, training, train_dataset=data, **smartinf.hf.optimizer(training, callbacks=[Clock()], **options)
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(json.dumps({
        "way": "streamed" if streamed else "plain", "parameters": model.num_parameters(), "loaded_s": round(loaded_s, 1),
        "peak_mib": {"imports": imported, "loaded": loaded, "trained": peak_mib()}, "losses": losses, "steps": steps,
    }))  # fmt: skip


def main():
    args = arguments()
    if args.child:
        if args.only == "model":
            make_model(args)
        else:
            train(args, args.only == "streamed")
        return 0
    os.makedirs(args.work, exist_ok=True)
    results = {}
    ways = ["streamed", "plain"] if args.only is None else [args.only]
    if not os.path.exists(f"{args.work}/model/config.json"):
        ways.insert(0, "model")
    for way in ways:
        command = [sys.executable, __file__, *sys.argv[1:], "--child", "--only", way]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            print(f"{way}: ended with {done.returncode}", file=sys.stderr)
            return 1
        for line in done.stdout.splitlines():
            if line.startswith('{"way"'):
                print(line, flush=True)
                results[way] = json.loads(line)
    if len(results) == 2:
        streamed, plain = results["streamed"], results["plain"]
        same = streamed["losses"] == plain["losses"] and [s["norm"] for s in streamed["steps"]] == [
            s["norm"] for s in plain["steps"]
        ]
        middle = [sorted(s["seconds"] for s in r["steps"][1:])[(len(r["steps"]) - 1) // 2] for r in (streamed, plain)]
        print(
            f"losses and norms {'have the same bits' if same else 'DIFFER'}; step {middle[0]} s streamed, {middle[1]} s "
            f"in memory; peak {streamed['peak_mib']['trained']} and {plain['peak_mib']['trained']} MiB"
        )
        return 0 if same else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
