#!/usr/bin/env python3
"""Features of vertices that are larger than memory: batches of random rows by smartinf.graph.FeatureStore beside numpy.memmap, whose
pages the kernel brings, with pages around them or, told that reads are at random (madvise), alone. All run in a cgroup with the same limit of memory, page cache included, which needs root; the
page cache is dropped before each. Prints a JSON line for each: the median of a batch's seconds, and the bytes that a batch
reads from the drive.

  bench/features_beside_memmap.py --drive DIR                    rows of 512 bytes, 2.6 GB, 20,000 different rows a batch
"""
import argparse
import json
import mmap
import pathlib
import shutil
import statistics
import subprocess
import sys
import time

import numpy

from batch_job import drop_page_cache, memory_group


def bytes_read():
    fields = dict(line.split(": ") for line in pathlib.Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def worker(way, options, folder):
    if way.startswith("memmap"):
        values = numpy.load(folder / "x.npy", mmap_mode="r")
        if way == "memmap-random":
            values._mmap.madvise(mmap.MADV_RANDOM)
        get = values.__getitem__
    else:
        import torch
        from torch_geometric.data import TensorAttr

        from smartinf.graph import FeatureStore

        store = FeatureStore(folder / "device", memory=options.memory)
        get = lambda ids: store.get_tensor(TensorAttr(None, "x", torch.from_numpy(ids))).numpy()
    random = numpy.random.default_rng(1)
    seconds, read, total = [], [], 0.0
    for i in range(options.batches + 1):
        ids = random.permutation(numpy.unique(random.integers(0, options.rows, 2 * options.batch)))[: options.batch]
        at, begin = bytes_read(), time.perf_counter()
        rows = numpy.asarray(get(ids))
        if i > 0:
            seconds.append(time.perf_counter() - begin)
            read.append(bytes_read() - at)
        total += float(rows.sum())
    print(json.dumps({
        "way": way, "rows": options.rows, "dim": options.dim, "batch": options.batch, "limit_bytes": options.limit,
        "memory": options.memory, "batch_s": statistics.median(seconds), "batch_s_all": seconds,
        "read_bytes": statistics.mean(read), "sum": total}))


def make(options, folder):
    from smartinf.graph import FeatureStore

    random = numpy.random.default_rng(0)
    x = numpy.lib.format.open_memmap(folder / "x.npy", "w+", numpy.float32, (options.rows, options.dim))
    for first in range(0, options.rows, 1 << 16):
        some = x[first : first + (1 << 16)]
        some[:] = random.integers(0, 1 << 10, some.shape)
    x.flush()
    FeatureStore(folder / "device", {"x": x}, memory=options.memory).close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drive", type=pathlib.Path, required=True, help="folder on the drive")
    parser.add_argument("--rows", type=lambda text: int(float(text)), default=5_000_000)
    parser.add_argument("--dim", type=int, default=128, help="floats of a row")
    parser.add_argument("--batch", type=int, default=20_000, help="rows of a batch")
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--memory", default="128MiB", help="of smartinf")
    parser.add_argument("--limit", type=int, default=1 << 30, help="bytes of memory of a process, page cache included")
    parser.add_argument("--way", choices=["memmap", "memmap-random", "smartinf"], help="one of them, on what is there")
    options = parser.parse_args()
    folder = options.drive / "features_bench"
    if options.way:
        return worker(options.way, options, folder)
    folder.mkdir(parents=True)
    try:
        make(options, folder)
        for way in ("memmap", "memmap-random", "smartinf"):
            drop_page_cache()
            with memory_group(options.limit) as prefix:
                command = [*prefix, sys.executable, __file__, *sys.argv[1:], "--way", way]
                print(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout, end="", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
