#!/usr/bin/env python3
"""The memory that `smartinf train --print-plan` states for runs drawn at random, against the peak that each process had
while it could not have more.

    bench/plan_memory.py --device DIR [--runs 30] [--seed 1] [--unlimited]

Each run is three steps of a Llama on this project's own text, without a GPU: width, layers, vocabulary, tokens,
precision, format of the state, what becomes of activations and gradients, devices, replicas and stages are drawn. It is
made twice: without a limit, for the peak (the kernel's, VmHWM), and with each process in a cgroup of what its plan
states, without swap, for whether it is killed. There it has program files of its own, copies below DIR that nobody else
has in memory, so that their pages count. Needs root, cgroup v1 or v2, and a drive at DIR: memory of a tmpfs would be
counted as well. SMARTINF names the binary [build/release/bin/smartinf].
"""
import argparse
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

from runs import ROOT, SMARTINF, text_of

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
PROCESS_BYTES = 100_000_000  # when a process has loaded its libraries
V1 = pathlib.Path("/sys/fs/cgroup/memory")


class Group:
    """A cgroup of so many bytes of memory, of either version, with copies of files that are in no memory yet."""

    def __init__(self, limit, files, place):
        self.mounts = "mount --make-rprivate /; "
        place.mkdir(exist_ok=True)
        for number, file in enumerate(files):
            copy = place / str(number)
            if not copy.exists():
                shutil.copy(file, copy)
            with open(copy, "rb+") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            self.mounts += f"mount --bind {copy} {file}; "
        self.folder = (V1 if V1.is_dir() else V1.parent) / f"plan_memory_{os.getpid()}_{id(self)}"
        self.folder.mkdir()
        names = ("memory.limit_in_bytes", "memory.swappiness") if V1.is_dir() else ("memory.max", "memory.swap.max")
        (self.folder / names[0]).write_text(str(limit))
        (self.folder / names[1]).write_text("0")

    def words(self):
        return ["unshare", "-m", "sh", "-ec", f'{self.mounts}echo $$ > {self.folder}/cgroup.procs; exec "$@"', "sh"]

    def kills(self):
        text = (self.folder / ("memory.oom_control" if V1.is_dir() else "memory.events")).read_text()
        return int(re.search(r"oom_kill (\d+)", text)[1])

    def remove(self):
        self.folder.rmdir()


def drawn(draw):
    """Keys of a run, and its ranks."""
    stages, replicas = draw.choice([(1, 1)] * 5 + [(1, 2), (2, 1), (2, 2)])
    ranks = stages * replicas
    width = draw.choice([256, 384, 512])
    batches = ranks * draw.choice([1, 1, 2]) * (2 if stages > 1 else 1)
    keys = {"model.layers": draw.randint(4, 8), "model.width": width, "model.heads": width // 64,
            "model.kv_heads": draw.choice([width // 64, width // 128]), "model.mlp_width": draw.choice([2, 3]) * width,
            "model.vocabulary": draw.choice([256, 4096, 16384]), "model.tied_head": draw.choice(["true", "false"]),
            "train.micro_batch": draw.choice([2, 4, 8]), "data.sequence": draw.choice([128, 256]),
            "train.accumulation": batches, "train.precision": draw.choice(["bf16", "bf16", "f32"]),
            "memory.activations": draw.choice(["keep", "recompute"]), "ranks.pipeline": stages,
            "optimizer.format": draw.choice(["f32", "f32", "bf16"])}
    way = draw.choice(["devices", "devices", "devices", "spilled", "streamed", "memory"]) if ranks == 1 else "devices"
    if way == "spilled":
        keys["engine.gradient_budget"] = 0
    if way == "streamed":
        keys["memory.activations"] = "recompute"
    if way == "memory":
        keys["optimizer.where"], keys["optimizer.format"] = "memory", "f32"
    return keys, ranks, draw.choice([1, 1, 2]) if way != "memory" else 1, way


def words_of(keys, ranks, devices, folder, device):
    """Of each rank."""
    keys = {"data.paths": ROOT / "docs", "data.suffixes": ".md", "data.validation_share": 0, "train.steps": 3,
            "train.run": folder / "run", "train.sample_tokens": 0, "train.accelerator": "cpu", **keys}
    if ranks > 1:
        keys["train.threads"] = 1
    for index in range(ranks * devices):
        keys[f"device.{index}.path"] = device / str(index)
    return [SMARTINF, "train", folder / "recipe.toml", *(word for key, value in keys.items() for word in (f"--{key}", value))]


def start(words, ranks, port, groups=None, out=None):
    """All ranks, each as if it were alone on a machine."""
    started = []
    for rank in range(ranks):
        more = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if ranks > 1 else {}
        command = [*(groups[rank].words() if groups else []), *words]
        started.append(subprocess.Popen([str(word) for word in command], stdout=out or subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True,
                                        env={**os.environ, **{key: str(value) for key, value in more.items()}}))
    return started


def stated(words, ranks, port):
    """Bytes of each rank's plan: the sum of its parts, which are rounded, and for that 2 MiB."""
    text = start([*words, "--print-plan"], ranks, port)
    text = [process.communicate()[0] for process in text][0]
    totals = []
    for parts in re.findall(r"of the host's memory are planned: ([^;\n]*)", text):
        sizes = re.findall(r" ([0-9.]+) ([KMG]?i?B)(?:,|$)", parts)
        totals.append(int(sum(float(number) * UNITS[unit] for number, unit in sizes)) + (2 << 20))
    if not totals:
        sys.exit(f"{' '.join(map(str, words))}: {text}")
    return totals if len(totals) == ranks else totals * ranks


def watch(process, peaks, rank, files):
    """Keeps a process's peak, and the files that it has mapped."""
    while process.poll() is None:
        try:
            text = pathlib.Path(f"/proc/{process.pid}/status").read_text()
            if "Name:\tsmartinf" in text:
                peaks[rank] = max(peaks[rank], int(re.search(r"VmHWM:\s+(\d+)", text)[1]) << 10)
                if len(files) == 0 and peaks[rank] > PROCESS_BYTES:
                    files += sorted(set(re.findall(r" r-xp .* (/\S+)$", pathlib.Path(f"/proc/{process.pid}/maps").read_text(), re.M)))
        except (OSError, TypeError):
            pass
        time.sleep(0.01)


def train(words, ranks, devices, device, port, groups=None):
    """Peaks and kills of all ranks, and a process's files."""
    peaks, files = [0] * ranks, []
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        processes = start(words, ranks, port, groups, said)
        watchers = [threading.Thread(target=watch, args=(process, peaks, rank, files)) for rank, process in enumerate(processes)]
        for watcher in watchers:
            watcher.start()
        for watcher in watchers:
            watcher.join()
        kills = sum(group.kills() for group in groups or [])
        said.seek(0)
        if any(process.returncode for process in processes) and kills == 0:
            sys.exit(f"{' '.join(map(str, words))}: {said.read()}")
    for index in range(ranks * devices):
        shutil.rmtree(device / str(index), ignore_errors=True)
    shutil.rmtree(words[words.index("--train.run") + 1], ignore_errors=True)
    return peaks, kills, files


def run(keys, ranks, devices, way, device, port, limited):
    """Plans and peaks of the ranks, and how many processes were killed."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "recipe.toml").write_text("", encoding="utf-8")
        words = words_of(keys, ranks, devices, folder, device)
        if way == "streamed":  # between what everything takes and the least
            most = stated(words, ranks, port)[0]
            refused = start([*words, "--memory.host", "1MiB", "--print-plan"], 1, port)[0].communicate()[0]
            number, unit = re.search(r"training needs ([0-9.]+) ([KMG]iB)", refused).groups()
            words += ["--memory.host", (most + int(float(number) * UNITS[unit])) // 2]
        plans = stated(words, ranks, port)
        if way != "streamed":
            words += ["--memory.host", max(plans) + (4 << 20)]  # another start may be a little larger
        peaks, kills, files = train(words, ranks, devices, device, port)
        groups = [Group(plan, files, device / f"files{rank}") for rank, plan in enumerate(plans) if limited]
        try:
            if limited:
                _, kills, _ = train(words, ranks, devices, device, port + 1, groups)
        finally:
            for group in groups:
                group.remove()
        return plans, peaks, kills


def text_of_row(keys, ranks, devices, way):
    stages = keys["ranks.pipeline"]
    return (f"{keys['model.layers']} x {keys['model.width']}, {keys['model.mlp_width']}, {keys['model.vocabulary']}"
            f"{' tied' if keys['model.tied_head'] == 'true' else ''} | {keys['train.micro_batch']} x {keys['data.sequence']}, "
            f"{keys['train.accumulation']} | {keys['train.precision']} | {keys['memory.activations']} | "
            f"{way}{' x 2' if devices > 1 else ''}, {keys['optimizer.format']} | {stages} x {ranks // stages}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=pathlib.Path, required=True, help="A directory on a drive; what is made there is erased")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skip", type=int, default=0, help="runs of the seed that are left out, the first ones")
    parser.add_argument("--unlimited", action="store_true", help="peaks alone, no run in a cgroup")
    args = parser.parse_args()
    args.device.mkdir(parents=True, exist_ok=True)
    args.device = args.device.resolve()
    if not (args.device / "smartinf.tuning").exists():
        text_of("calibrate", "--device", args.device, "--out", args.device / "machine.toml")
    draw = random.Random(args.seed)
    rows = [drawn(draw) for _ in range(args.runs)][args.skip:]
    print("| layers x width, inner, vocabulary | batch, number | weights | activations | state | stages x replicas "
          "| planned | peak | error |\n|---|---|---|---|---|---|---|---|---|")
    errors, killed = [], 0
    for number, row in enumerate(rows):
        plans, peaks, kills = run(*row, args.device, 29650 + 4 * number, not args.unlimited)
        worst = max(range(row[1]), key=lambda rank: abs(plans[rank] / max(1, peaks[rank]) - 1))
        errors.append(plans[worst] / peaks[worst] - 1)
        killed += kills
        print(f"| {text_of_row(*row)} | {plans[worst] / 1e6:.0f} MB | {peaks[worst] / 1e6:.0f} MB | "
              f"{100 * errors[-1]:+.1f} %{' killed' if kills else ''} |", flush=True)
    size = [abs(error) for error in errors]
    print(f"\n{len(size)} runs, mean error {100 * sum(size) / len(size):.1f} %, worst {100 * max(size):.1f} %, {killed} killed")


if __name__ == "__main__":
    main()
