#!/usr/bin/env python3
"""A table of rows that is larger than memory: steps of smartinf.move_tables beside torch.optim.SparseAdam on tensors of
torch.from_file, whose pages the kernel brings and writes back. Both run in a cgroup with the same limit of memory, page
cache included, which needs root; the page cache is dropped before each. Prints a JSON line for each: the median of a
step's seconds, the bytes that a step reads and writes on the drive, and memory: anonymous before and with the table, and
the largest that was resident.

  bench/tables_beside_torch.py --drive DIR                          1e5 different rows a step
  bench/tables_beside_torch.py --drive DIR --zipf 1 --share 0.05    ids by Zipf's law; memory for a share of the table

A third way, --ways pages, has whole records in one file, mapped, of which the kernel is told that reads are random: what
any page cache can do for them. Its step reads and writes the records of its rows and computes nothing.

With --share the memory beyond what the process has with a small table is that share of the table's state: for torch
and pages the kernel's page cache, for smartinf the cache of rows. The buffers of a device and what says where rows are
(--fixed) come on top, because they do not grow with a table as its cache does."""
import argparse
import contextlib
import json
import mmap
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time

import numpy  # and torch where a way needs it: its libraries take pages of the process, too

DIM = 64
RECORD_BYTES = 3 * 4 * DIM  # of SparseAdam: a weight and two moments
OF_PAGE = 4096 // RECORD_BYTES


WAYS = ["torch", "pages", "smartinf"]


def ids_of(options):
    """Of each step; ranks of Zipf's law are scattered over the table, as hashed ids are."""
    random = numpy.random.default_rng(1)
    weights = None
    if options.zipf > 0:
        weights = numpy.cumsum(numpy.arange(1, options.rows + 1, dtype=numpy.float64) ** -options.zipf)
    for _ in range(options.warm_up + options.steps):
        if weights is None:
            rows = random.permutation(numpy.unique(random.integers(0, options.rows, 2 * options.batch)))[: options.batch]
        else:
            ranks = numpy.searchsorted(weights, random.random(options.batch) * weights[-1])
            rows = ranks * 2_654_435_761 % options.rows
        yield rows


def status(key):
    text = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(key + ":"))


def moved():
    fields = dict(line.split(": ") for line in pathlib.Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def stored(options, drive, name):
    import torch

    torch.set_num_threads(1)
    return torch.from_file(str(drive / name), shared=True, size=options.rows * DIM, dtype=torch.float32).view(-1, DIM)


def by_torch(options, drive):
    import torch

    weight = torch.nn.Parameter(stored(options, drive, "weight"))
    optimizer = torch.optim.SparseAdam([weight], lr=1e-3)
    optimizer.state[weight] = {
        "step": 0, **{name: stored(options, drive, name) for name in ("exp_avg", "exp_avg_sq")}}

    def step(ids):
        torch.nn.functional.embedding(torch.from_numpy(ids), weight, sparse=True).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: None


def by_pages(options, drive):
    with open(drive / "records", "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    mapped.madvise(mmap.MADV_RANDOM)
    values = numpy.frombuffer(mapped, numpy.float32)
    shape, strides = (len(values) // 1024, OF_PAGE, RECORD_BYTES // 4), (4096, RECORD_BYTES, 4)
    records = numpy.lib.stride_tricks.as_strided(values, shape, strides)

    def step(ids):
        rows = numpy.unique(ids)
        for some in numpy.array_split(rows, len(rows) // 256 + 1):  # none is brought twice
            at = some // OF_PAGE, some % OF_PAGE
            records[at] = records[at] + 1

    return step, lambda: None


def by_smartinf(options, drive):
    import smartinf
    import torch

    table = torch.nn.Embedding.from_pretrained(stored(options, drive, "weight"), freeze=False)
    model = torch.nn.ModuleDict({"table": table, "dense": torch.nn.Linear(1, 1)})
    smartinf.move_tables(model, ["table"], memory=options.memory, log=options.log)
    optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-3, devices=[str(drive / "device")], memory_budget="64MiB")

    def step(ids):
        (model["table"](torch.from_numpy(ids)).square().sum() + model["dense"](torch.ones(1, 1)).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, optimizer.close


def worker(way, options):
    with contextlib.suppress(ImportError):
        __import__({"torch": "torch", "pages": "mmap", "smartinf": "smartinf"}[way])
    before = status("RssAnon")
    step, close = {"torch": by_torch, "pages": by_pages, "smartinf": by_smartinf}[way](options, options.drive / "tables_bench")
    seconds, read, written, anonymous = [], [], [], 0
    for i, ids in enumerate(ids_of(options)):
        at, begin = moved(), time.perf_counter()
        step(ids)
        anonymous = max(anonymous, status("RssAnon"))
        if i >= options.warm_up:
            seconds.append(time.perf_counter() - begin)
            now = moved()
            read.append(now[0] - at[0])
            written.append(now[1] - at[1])
    close()
    print(json.dumps({
        "way": way, "rows": options.rows, "state_bytes": options.rows * RECORD_BYTES, "batch": options.batch,
        "zipf": options.zipf, "limit_bytes": options.limit, "memory": options.memory, "step_s": statistics.median(seconds),
        "step_s_all": seconds, "read_bytes": statistics.mean(read), "written_bytes": statistics.mean(written),
        "anonymous_before_bytes": before, "anonymous_bytes": anonymous, "peak_bytes": status("VmHWM")}))


def write_files(way, rows, drive):
    """All of their pages, as after training. smartinf takes its rows from the first."""
    sizes = dict.fromkeys(("weight", "exp_avg", "exp_avg_sq"), rows * DIM * 4)
    if way == "pages":
        sizes = {"records": -(-rows // OF_PAGE) * 4096}
    for name, left in sizes.items():
        with open(drive / name, "wb") as file:
            while left > 0:
                left -= file.write(bytes(min(left, 64 << 20)))


def run(way, rows, words, limit, drive):
    """limit None: none. Returns the worker's words."""
    from batch_job import drop_page_cache, memory_group

    drive.mkdir(parents=True)
    try:
        write_files(way, rows, drive)
        drop_page_cache()
        with memory_group(limit) if limit else contextlib.nullcontext([]) as prefix:
            command = [*prefix, sys.executable, __file__, *words, "--rows", str(rows), "--way", way]
            return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    finally:
        shutil.rmtree(drive)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drive", type=pathlib.Path, required=True, help="folder on the drive")
    parser.add_argument("--rows", type=lambda text: int(float(text)), default=4_000_000)
    parser.add_argument("--batch", type=int, default=100_000, help="ids of a step")
    parser.add_argument("--zipf", type=float, default=0.0, help="exponent for the ids; 0: all rows alike, and different")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--memory", default="256MiB", help="of smartinf for tables")
    parser.add_argument("--log", default=None, help="of smartinf")
    parser.add_argument("--limit", type=int, default=1 << 30, help="bytes of memory of a process, page cache included")
    parser.add_argument("--share", type=float, help="of the state, for the cache, in place of --limit and --memory")
    parser.add_argument("--fixed", type=int, default=20 << 20, help="bytes beside smartinf's cache of rows, with --share")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["torch", "smartinf"])
    parser.add_argument("--way", choices=WAYS, help="one of them, without a limit")
    options = parser.parse_args()
    if options.way:
        return worker(options.way, options)
    for way in options.ways:
        words, limit = sys.argv[1:], options.limit
        drive = options.drive / "tables_bench"
        if options.share:
            cache = int(options.share * options.rows * RECORD_BYTES) + (options.fixed if way == "smartinf" else 0)
            words += ["--memory", str(cache)]
            limit = None  # smartinf reads past the page cache
            if way != "smartinf":
                limit = run(way, 10 * options.batch, words, None, drive)["anonymous_bytes"] + cache
        words += ["--limit", str(limit or 0)]
        print(json.dumps(run(way, options.rows, words, limit, drive)), flush=True)


if __name__ == "__main__":
    main()
