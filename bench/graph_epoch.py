#!/usr/bin/env python3
"""An epoch of smartinf-gnn whose activations do not fit in memory, beside computing alone and the drive's rate.

    bench/graph_epoch.py --folder DIR [--graph GRAPH | --vertices 200000 --degree 8 --far 0.05 --block 3000] [--features 128]
        [--layers 3] [--hidden 128] [--share 0.25] [--rounds 3] [--epochs 3] [--swap]

DIR is on the drive to be measured. In each round the same epochs run twice: with all in memory, of which the seconds of computing
are taken, and with --memory of --share of the bytes of activations and their gradients, in a cgroup of as much and what the
process and the graph need, so that no page cache helps. Then the drive moves as many bytes as the epoch, with O_DIRECT in blocks
of 4 MiB: writes, then reads. read_bytes: what an epoch reads from the drive, where rows at random are read by the page. --swap: the
epochs as well with all tables in memory, in that cgroup, with swap on a file in DIR.

A line of JSON for each round, then medians. Needs root and cgroup v1 or v2. Without --graph: a ring of vertices.
"""
import argparse
import json
import mmap
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import time

import numpy

from runs import SMARTINF

BLOCK = 4 << 20
PROCESS_BYTES = 96 << 20  # libraries and the state of the weights


def drive_seconds(file, bytes_moved, writes):
    """Of so many bytes of a file, which are in no cache."""
    block = mmap.mmap(-1, BLOCK)
    block[:] = os.urandom(BLOCK)
    fd = os.open(file, os.O_DIRECT | (os.O_RDWR | os.O_CREAT))
    size = max(BLOCK, bytes_moved // BLOCK * BLOCK)
    begin = time.perf_counter()
    for at in range(0, size, BLOCK):
        (os.pwritev if writes else os.preadv)(fd, [block], at)
    if writes:
        os.fdatasync(fd)
    seconds = time.perf_counter() - begin
    os.close(fd)
    return seconds


class Limited:
    """A cgroup of so many bytes of memory, of either version."""

    def __init__(self, limit, swap):
        v1 = pathlib.Path("/sys/fs/cgroup/memory")
        self.folder = (v1 if v1.is_dir() else v1.parent) / f"graph_epoch_{os.getpid()}"
        self.folder.mkdir()
        names = ("memory.limit_in_bytes", "memory.swappiness") if v1.is_dir() else ("memory.max", "memory.swap.max")
        (self.folder / names[0]).write_text(str(limit))
        (self.folder / names[1]).write_text(("60" if swap else "0") if v1.is_dir() else ("max" if swap else "0"))

    def __enter__(self):
        return lambda: (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def __exit__(self, *_):
        self.folder.rmdir()


def make_graph(args, folder):
    """A ring in which each vertex has edges to the nearest --degree, of which the share --far leads anywhere instead."""
    draw = numpy.random.default_rng(1)
    begin = numpy.repeat(numpy.arange(args.vertices), args.degree // 2)
    end = (begin + numpy.tile(numpy.arange(1, args.degree // 2 + 1), args.vertices)) % args.vertices
    far = draw.random(len(end)) < args.far
    end[far] = draw.integers(0, args.vertices, far.sum())
    numpy.savetxt(folder / "edges.txt", numpy.stack([begin, end], axis=1), fmt="%d")
    numpy.save(folder / "x.npy", draw.standard_normal((args.vertices, args.features), dtype="f4"))
    numpy.save(folder / "y.npy", draw.integers(0, 16, args.vertices))
    subprocess.run([args.gnn, "import", args.graph, "--edges", folder / "edges.txt", "--features-file", folder / "x.npy",
                    "--labels-file", folder / "y.npy"], check=True, stdout=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--graph")
    parser.add_argument("--vertices", type=int, default=200000)
    parser.add_argument("--degree", type=int, default=8)
    parser.add_argument("--far", type=float, default=0.05)
    parser.add_argument("--block", type=int, default=3000)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--swap", action="store_true")
    parser.add_argument("--gnn", default=str(pathlib.Path(SMARTINF).with_name("smartinf-gnn")))
    args = parser.parse_args()
    folder = pathlib.Path(args.folder, "graph_epoch").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if args.graph is None:
        args.graph = str(folder / "graph")
        make_graph(args, folder)
        subprocess.run([args.gnn, "partition", args.graph, "--block", str(args.block)], check=True, stdout=sys.stderr)
    shape = [args.graph, "--layers", str(args.layers), "--hidden", str(args.hidden), "--json"]

    def rows_of(*words, into=None):
        blocks = resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock
        done = subprocess.run([args.gnn, *words], check=True, stdout=subprocess.PIPE, text=True, preexec_fn=into)
        rows_of.read_bytes = 512 * (resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock - blocks)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def median_of(way, *words, into=None):
        shutil.rmtree(folder / way, ignore_errors=True)
        rows_of("train", *shape, "--device", str(folder / way), "--epochs", "0", *words, into=into)  # features, a new drive's rate
        rows = rows_of("train", *shape, "--device", str(folder / way), "--epochs", str(args.epochs + 1), *words, into=into)
        return {name: statistics.median(row[name] for row in rows[1:]) for name in ("seconds", "compute_s", "rows_s")} | {
            name: rows[-1][name] for name in ("up_bytes", "down_bytes", "loss", "parts")} | {
            "read_bytes": rows_of.read_bytes / len(rows)}

    (plan,) = rows_of("plan", *shape, "--memory", "1TiB")
    activations = sum(table["bytes"] for table in plan["tables"] if table["name"] != "features")
    graph_bytes = sum(file.stat().st_size for file in pathlib.Path(args.graph).glob("*.npy") if file.stem != "features")
    memory = int(args.share * activations)
    limit = memory + 3 * graph_bytes + PROCESS_BYTES
    limited = ("--memory", str(memory))
    results = []
    for _ in range(args.rounds):
        alone = median_of("alone", "--memory", "1TiB", "--parts", "1")
        with Limited(limit, swap=False) as into:
            epoch = median_of("run", *limited, into=into)
        file = folder / "bytes"
        writes = drive_seconds(file, epoch["down_bytes"], True)
        file.unlink()
        drive_seconds(file, epoch["up_bytes"], True)
        reads = drive_seconds(file, epoch["up_bytes"], False)
        file.unlink()
        assert alone["loss"] == epoch["loss"]
        row = {"activation_bytes": activations, "memory": memory, "limit": limit, "epoch_s": epoch["seconds"], "alone_s": alone["seconds"],
               "alone_compute_s": alone["compute_s"], "compute_s": epoch["compute_s"], "rows_s": epoch["rows_s"], "parts": epoch["parts"], "read_bytes": epoch["read_bytes"],
               "up_bytes": epoch["up_bytes"], "down_bytes": epoch["down_bytes"], "drive_s": reads + writes}
        row["of_bound"] = row["epoch_s"] / max(row["alone_compute_s"], row["drive_s"])
        if args.swap:
            swap = folder / "swap"
            subprocess.run(["fallocate", "-l", str(4 * activations), swap], check=True)
            swap.chmod(0o600)
            subprocess.run(["mkswap", "-q", swap], check=True)
            subprocess.run(["swapon", swap], check=True)
            with Limited(limit, swap=True) as into:
                row["swap_s"] = median_of("swapped", "--memory", "1TiB", "--parts", str(epoch["parts"]), into=into)["seconds"]
            subprocess.run(["swapoff", swap], check=True)
            swap.unlink()
        results.append(row)
        print(json.dumps(row), flush=True)
    print(json.dumps({"median_of": len(results), **{name: statistics.median(row[name] for row in results) for name in results[0]}}))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
