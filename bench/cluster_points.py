#!/usr/bin/env python3
"""Steps that `smartinf plan --cluster` predicts beside the same recipes run, over links of limited rate.

Two boxes are namespaces of this machine with a core, a device and a veth pair between them (pipeline_beside_torch.py). Devices sleep
to read and write no faster than --reads and --writes. --machine is a file of `smartinf calibrate` for one core: run it under
taskset on each core at once, with a device on tmpfs. Links are measured with `smartinf calibrate --links`. For every rate and model: what the plan chooses, and each way of WAYS. A
line of JSON for each; the last lines tell the mean error, and how far the choices are behind the best way measured. Needs root.

    bench/cluster_points.py --machine core.toml --device /dev/shm/points --data TEXT > rows.jsonl
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys

from pipeline_beside_torch import Links, address
from runs import SMARTINF

BOXES = ("left", "right")
MODELS = {"26M": (8, 512, 1408), "75M": (16, 640, 1728)}  # layers, width, inner width
WAYS = {"chosen": [], "two stages": ["--stages", "2", "--batch", "1", "--recompute", "false"],
        "two stages, recompute": ["--stages", "2", "--batch", "2", "--recompute", "true"],
        "two stages in two chunks": ["--stages", "2", "--batch", "1", "--chunks", "2", "--recompute", "true"],
        "no stages": ["--stages", "1", "--batch", "1", "--recompute", "false"]}


def links_of(args, folder, links):
    """What `smartinf calibrate --links` writes of two boxes, by name."""
    file = folder / "links.toml"
    words = [args.smartinf, "calibrate", "--links", "--save", file]
    runs = [subprocess.Popen([str(word) for word in (
        "taskset", "-c", rank, *links.on(rank), "unshare", "-u", "sh", "-c", 'hostname "$0"; exec "$@"', box, *words)],
        stdout=subprocess.DEVNULL, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "GROUP_RANK": str(rank),
                                        "MASTER_ADDR": address(0), "MASTER_PORT": "29601"}) for rank, box in enumerate(BOXES)]
    if any([run.wait() for run in runs]):
        sys.exit(f"{words} failed")
    return file.read_text(encoding="utf-8")


def planned(args, folder, model, links, flags):
    """The first option, whose recipe is written."""
    layers, width, inner = MODELS[model]
    shape = {"model_type": "llama", "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 64,
             "num_key_value_heads": width // 64, "intermediate_size": inner, "vocab_size": 256, "tie_word_embeddings": False,
             "max_position_embeddings": args.sequence}
    (folder / "model.json").write_text(json.dumps(shape), encoding="ascii")
    for box in BOXES:
        machine = args.machine.read_text(encoding="utf-8")
        device = machine.index("[[device]]")
        own = re.sub(r"(?m)^name = .*", f'name = "{folder / box}"', machine[device:])
        own = re.sub(r"(?m)^read_bytes_per_s = .*", f"read_bytes_per_s = {args.reads}", own)
        own = re.sub(r"(?m)^write_bytes_per_s = .*", f"write_bytes_per_s = {args.writes}", own)
        (folder / f"{box}.toml").write_text(machine[:device] + own, encoding="utf-8")
    (folder / "cluster.toml").write_text(links, encoding="utf-8")
    done = subprocess.run([args.smartinf, "plan", folder / "model.json", "--cluster", folder / "cluster.toml", "--tokens-per-step",
                           str(args.tokens), "--seq", str(args.sequence), "--json", "--recipe", folder / "recipe.toml",
                           "--data", args.data, *flags], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"smartinf plan: exit code {done.returncode}")
    return json.loads(done.stdout)["options"][0]


def measured(args, folder, links, ranks):
    """Median seconds of a step of the recipe."""
    words = [args.smartinf, "train", folder / "recipe.toml", "--train.run", folder / "run", "--train.steps", str(args.steps + 2),
             "--train.threads", "1", "--train.validate_every", "0", "--train.validation_batches", "1", "--train.sample_tokens", "0",
             "--train.clip_norm", "0", "--ranks.timeout", "300"]
    for i in range(ranks):
        words += [f"--device.{i}.internal_read", str(args.reads), f"--device.{i}.internal_write", str(args.writes),
                  f"--device.{i}.bandwidth", "1", f"--device.{i}.threads", "1"]
    runs = [subprocess.Popen(["taskset", "-c", str(rank), *links.on(rank), *words], stdout=subprocess.DEVNULL,
                             env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1",
                                  "MASTER_ADDR": address(0), "MASTER_PORT": "29601"}) for rank in range(ranks)]
    if any([run.wait() for run in runs]):
        sys.exit(f"{words} failed")
    rows = [row for row in map(json.loads, (folder / "run/log.jsonl").read_text().splitlines()) if "loss" in row]
    for place in ("run", "left", "right"):
        shutil.rmtree(folder / place, ignore_errors=True)
    return statistics.median(row["seconds"] for row in rows[1:-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=pathlib.Path, required=True)
    parser.add_argument("--device", type=pathlib.Path, required=True)
    parser.add_argument("--data", required=True, help="tokens or texts")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e8, 1e9], help="bits per second")
    parser.add_argument("--reads", type=float, default=5e8, help="of a device, bytes per second")
    parser.add_argument("--writes", type=float, default=5e8)
    parser.add_argument("--tokens", type=int, default=4096, help="of a step")
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--smartinf", default=SMARTINF)
    args = parser.parse_args()
    args.device.mkdir(parents=True, exist_ok=True)
    errors, behind = [], []
    for model in args.models:
        for rate in args.rates:
            took = {}
            with Links(2, rate) as links:
                text = links_of(args, args.device, links)
            for way, flags in WAYS.items():
                option = planned(args, args.device, model, text, flags)
                said = option["option"]
                with Links(2, rate) as links:
                    took[way] = measured(args, args.device, links, option["pipeline"] * option["replicas"])
                errors.append(abs(option["total_s"] / took[way] - 1))
                print(json.dumps({"model": model, "bits_per_s": rate, "way": way, "option": said, "planned_s": round(option["total_s"], 3),
                                  "measured_s": round(took[way], 3), "error": round(option["total_s"] / took[way] - 1, 3)}), flush=True)
            behind.append(took["chosen"] / min(took.values()) - 1)
    print(json.dumps({"points": len(errors), "mean_error": round(statistics.mean(errors), 3), "worst": round(max(errors), 3),
                      "choices_behind_the_best": [round(share, 3) for share in behind]}))


if __name__ == "__main__":
    main()
