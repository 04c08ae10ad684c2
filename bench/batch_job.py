#!/usr/bin/env python3
"""Whole jobs of texts that are continued, in turn and in one run: `smartinf generate --batch` with keys and values on a
drive and in memory, FlexGen's and oLLM's ways (rivals/flexgen_cache.py, ollm_cache.py) and transformers' generate(), on
GPT-2 with 124 million random weights in f32.

    bench/batch_job.py SMARTINF --folder DIR [--prompts 64] [--prompt-tokens 900] [--tokens 64] [--rounds 3]

Ways with a limit run in a cgroup of --limit bytes, page cache included, which needs root; the page cache is dropped
before each. oLLM's way gets --few prompts, because it answers one after another. Prints a JSON line for each job: tokens
for each second of decoding, seconds of prompts and of tokens, the share of those that smartinf waited for the drive, and
bytes that the drive read; and in each round what the drive gives to reads of such blocks alone, and to attention alone.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

import torch
import transformers

RIVALS = pathlib.Path(__file__).parent / "rivals"


@contextlib.contextmanager
def memory_group(limit):
    """A cgroup of either version with a limit; yields what starts a command in it."""
    unified = pathlib.Path("/sys/fs/cgroup/cgroup.controllers").exists()
    group = pathlib.Path("/sys/fs/cgroup" if unified else "/sys/fs/cgroup/memory") / f"bench_{os.getpid()}"
    group.mkdir()
    (group / ("memory.max" if unified else "memory.limit_in_bytes")).write_text(str(limit))
    try:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        group.rmdir()


def drop_page_cache():
    os.sync()
    with contextlib.suppress(PermissionError):
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("1")


def by_smartinf(options, files, drive, extra):
    out = drive / "answers.jsonl"
    words = [options.smartinf, "generate", files / "model", "--batch", files / "prompts.jsonl", "--out", out, "--json"]
    words += ["--tokens", options.tokens, "--temperature", 0, "--sequences", options.prompts]
    words += ["--threads", options.threads, "--accelerator", "cpu", *extra]
    return words


TRANSFORMERS = """
import json, pathlib, sys, time, torch, transformers
model, prompts, tokens, threads, group = sys.argv[1:]
torch.set_num_threads(int(threads))
transformers.logging.disable_progress_bar()
model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
rows = torch.tensor([json.loads(line)["tokens"] for line in pathlib.Path(prompts).read_text().splitlines()])
seconds = []
for count in (1, int(tokens)):
    begun = time.monotonic()
    for part in rows.split(int(group)):
        model.generate(part, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
    seconds.append(time.monotonic() - begun)
print(json.dumps({"prompt_seconds": seconds[0], "token_seconds": seconds[1] - seconds[0],
                  "tokens": len(rows) * (int(tokens) - 1)}))
"""


def ways(options, files, drive):
    cache = ["--cache", drive / "kv", "--memory", options.memory]
    flexgen = [RIVALS / "flexgen_cache.py", files / "model", files / "prompts.jsonl", "--folder", drive / "flexgen"]
    flexgen += ["--tokens", options.tokens, "--group", options.group, "--threads", options.threads]
    ollm = [RIVALS / "ollm_cache.py", files / "model", files / "few.jsonl", "--folder", drive / "ollm"]
    ollm += ["--tokens", options.tokens, "--threads", options.threads]
    plain = ["-c", TRANSFORMERS, files / "model", files / "prompts.jsonl", options.tokens, options.threads, options.group]
    return {
        "smartinf": (True, by_smartinf(options, files, drive, [*cache, "--cache-format", "bf16"])),
        "smartinf q8": (True, by_smartinf(options, files, drive, [*cache, "--cache-format", "q8"])),
        "FlexGen's way": (True, [sys.executable, *flexgen]),
        "oLLM's way": (True, [sys.executable, *ollm]),
        "smartinf in memory": (False, by_smartinf(options, files, drive, ["--cache-format", "bf16"])),
        "transformers in memory": (False, [sys.executable, *plain]),
    }


def measure(options, files, way):
    limited, words = way
    drive = options.folder / "job"
    shutil.rmtree(drive, ignore_errors=True)
    drive.mkdir(parents=True)
    drop_page_cache()
    with memory_group(options.limit) if limited else contextlib.nullcontext([]) as prefix:
        run = subprocess.Popen([*prefix, *map(str, words)], stdout=subprocess.PIPE, text=True)
        stdout = run.stdout.read()
        _, status, usage = os.wait4(run.pid, 0)
        run.returncode = os.waitstatus_to_exitcode(status)
    if run.returncode != 0:
        sys.exit(f"{' '.join(map(str, words))}: exit code {run.returncode}")
    row = json.loads(stdout.splitlines()[-1])
    shutil.rmtree(drive)
    made = {
        "limit": options.limit if limited else 0,
        "tokens_per_s": round(row["tokens"] / row["token_seconds"], 2),
        "prompt_seconds": round(row["prompt_seconds"], 2),
        "token_seconds": round(row["token_seconds"], 2),
        "drive_read_bytes": row.get("cache_read_bytes", usage.ru_inblock * 512),
    }
    if "cache_wait_seconds" in row:
        made["waiting_share"] = round(row["cache_wait_seconds"] / row["token_seconds"], 3)
    return made


def measure_drive(options):
    """The drive with nothing else to do, in blocks of the jobs' shape."""
    folder = options.folder / "alone"
    words = [options.smartinf, "bench", "attend", "--device", folder, "--format", "bf16", "--heads", 12, "--kv-heads", 12]
    words += ["--head-width", 64, "--tokens", options.prompt_tokens // 32 * 32, "--sequences", options.prompts, "--json"]
    run = subprocess.run([*map(str, words)], capture_output=True, text=True, check=True)
    shutil.rmtree(folder)
    row = json.loads(run.stdout)
    return {"by": "the drive", "reads_bytes_per_s": row["read_bytes_per_s"], "attention_bytes_per_s": row["bytes_per_s"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("smartinf")
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="on the drive")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=900)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--group", type=int, default=16, help="texts that the others compute together")
    parser.add_argument("--few", type=int, default=4, help="prompts of oLLM's way")
    parser.add_argument("--memory", default="1500MB", help="of smartinf")
    parser.add_argument("--limit", type=int, default=2500 * 10**6, help="bytes of memory with the page cache")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    files = options.folder / "files"
    files.mkdir(exist_ok=True)
    torch.manual_seed(1)
    config = transformers.GPT2Config(eos_token_id=None, bos_token_id=None)
    transformers.GPT2LMHeadModel(config).save_pretrained(files / "model")
    prompts = torch.randint(0, config.vocab_size, (options.prompts, options.prompt_tokens)).tolist()
    for name, some in (("prompts.jsonl", prompts), ("few.jsonl", prompts[: options.few])):
        (files / name).write_text("".join(json.dumps({"tokens": one}) + "\n" for one in some))
    for number in range(options.rounds):
        print(json.dumps({"round": number, **measure_drive(options)}), flush=True)
        for name, way in ways(options, files, options.folder / "job").items():
            if options.ways and name not in options.ways:
                continue
            row = {"by": name, "round": number, **measure(options, files, way)}
            print(json.dumps(row), flush=True)
    shutil.rmtree(files)


if __name__ == "__main__":
    main()
