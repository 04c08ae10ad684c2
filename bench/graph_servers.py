#!/usr/bin/env python3
"""Epochs of smartinf-gnn on servers behind slow links: rows exchanged, hops preloaded, and samples, in turn.

    bench/graph_servers.py --folder DIR [--graph GRAPH | --scale 14 --degree 30] [--servers 2] [--ranks 1] [--rates 2e6]
        [--ratio 28] [--ways 0 1 2 3 4 5 sample] [--rounds 2] [--epochs 3] [-- FLAGS of smartinf-gnn train]

Each server is a network namespace, and each of its ranks has one thread and a device below DIR. Every two servers are joined by a veth
pair of --rates bytes per second in each direction, and a server's ranks by its loopback of --ratio times as many for each (tc tbf). Without --graph an R-MAT
graph is made. A way is a number of hops to preload, or `sample` (one hop, --fanout neighbours). A line of JSON for each run, with
the median of its epochs but the first, and with what was predicted: by the plan's counts, the rate of a plain socket between servers, the seconds of an exchange
of few rows over the same links, and the computing and the rows of epochs in one process. Then for each rate whether the chosen number of hops was the fastest of those measured, or behind it by no more
than the larger of their spreads (between the quartiles of all their epochs). Needs root.
"""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys

from pipeline_beside_torch import BURST_BYTES, Links, address
from runs import SMARTINF


def shape(links, args, rate):
    """Ranks of a server reach each other over its loopback, which they share."""
    for name in links.names:
        bits = int(8 * rate * args.ratio * args.ranks)
        subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "tbf", "rate", f"{bits}bit", "burst",
                        str(4 * BURST_BYTES), "latency", "2s"], check=True)


def command(args, name, device, *words):
    return [args.gnn, name, args.graph, "--layers", str(args.layers), "--hidden", str(args.hidden), "--json", *args.more,
            *(["--device", str(device), "--threads", "1"] if device else []), *words]


def rows_of(text):
    return [json.loads(line) for line in text.splitlines()]


def median_of(rows, name):
    return statistics.median(row[name] for row in rows[1:])


def spread_of(epochs):
    """Seconds between the quartiles."""
    low, _, high = statistics.quantiles(epochs, n=4)
    return high - low


def alone(args, folder):
    """Seconds of computing and bytes of rows per second in one process, of as many at once as ranks, which share this machine's memory."""
    processes = []
    for rank in range(args.servers * args.ranks):
        device = folder / f"alone{rank}"
        shutil.rmtree(device, ignore_errors=True)
        device.mkdir()
        processes.append(subprocess.Popen(command(args, "train", device, "--epochs", str(args.epochs + 1)), stdout=subprocess.PIPE, text=True))
    runs = [rows_of(process.communicate()[0]) for process in processes]
    compute_s, rows_s = (statistics.median(median_of(rows, name) for rows in runs) for name in ("compute_s", "rows_s"))
    return compute_s, runs[0][-1]["row_bytes"] / rows_s


def run(args, links, way, device):
    ranks = args.servers * args.ranks
    words = ["--servers", str(args.servers), "--epochs", str(args.epochs + 1)]
    words += ["--sample", "1", "--fanout", str(args.fanout)] if way == "sample" else ["--preload", way]
    shutil.rmtree(device, ignore_errors=True)
    device.mkdir()
    env = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": address(0), "MASTER_PORT": "29603", "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen([*links.on(rank // args.ranks), *command(args, "train", device, *words)], stdout=subprocess.PIPE, text=True,
                                  env={**env, "RANK": str(rank)}) for rank in range(ranks)]
    said = [process.communicate()[0] for process in processes]
    if codes := [process.returncode for process in processes if process.returncode]:
        sys.exit(f"{' '.join(words)}: exit codes {codes}")
    rows = rows_of(said[0])
    return {"way": way, "epoch_s": median_of(rows, "seconds"), "epochs_s": [round(row["seconds"], 3) for row in rows[1:]],
            "exchange_s": median_of(rows, "exchange_s"), "between_bytes": rows[-1]["between_bytes"],
            "planned_between_bytes": rows[-1]["planned_between_bytes"], "within_bytes": rows[-1]["within_bytes"],
            "loss": rows[-1]["loss"]}


def exchange_seconds(args, links, folder):
    """Of an exchange of a graph of few vertices, with its wait for the last rank."""
    few = argparse.Namespace(**{**vars(args), "graph": str(folder / "few"), "epochs": 20, "more": []})
    if not pathlib.Path(few.graph).exists():
        ranks = args.servers * args.ranks
        for words in (["import", few.graph, "--made-of", str(16 * ranks), "--features", "16"], ["partition", few.graph, "--block", "4"]):
            subprocess.run([args.gnn, *words], check=True, stdout=subprocess.DEVNULL)
    return run(few, links, "0", folder / "run")["exchange_s"] / (2 * args.layers - 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--graph")
    parser.add_argument("--scale", type=int, default=14)
    parser.add_argument("--degree", type=float, default=30)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="of each server")
    parser.add_argument("--rates", type=float, nargs="+", default=[2e6], help="bytes per second between servers")
    parser.add_argument("--ratio", type=float, default=28)
    parser.add_argument("--ways", nargs="+", default=["0", "1", "2", "3", "4", "5", "sample"])
    parser.add_argument("--fanout", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--gnn", default=str(pathlib.Path(SMARTINF).with_name("smartinf-gnn")))
    parser.add_argument("more", nargs="*", help="behind --: further flags of smartinf-gnn train")
    args = parser.parse_args()
    folder = pathlib.Path(args.folder, "graph_servers").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    output = lambda words: subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
    if args.graph is None:
        args.graph = str(folder / "graph")
        output([args.gnn, "import", args.graph, "--rmat", str(args.scale), "--degree", str(args.degree), "--features",
                str(args.features)])
        output([args.gnn, "partition", args.graph, "--block", str((1 << args.scale) // 8)])
    for rate in args.rates:
        alone_s, row_rate = alone(args, folder)
        with Links(args.servers, 8 * rate) as links:
            shape(links, args, rate)
            socket_rate = links.measured_rate(int(rate / 2))
            exchange_s = exchange_seconds(args, links, folder)
            plan = rows_of(output(command(args, "plan", None, "--servers", str(args.servers), "--ranks",
                                          str(args.servers * args.ranks), "--alone", str(alone_s),
                                          "--rows", str(int(row_rate)), "--between", str(int(socket_rate)),
                                          "--within", str(int(rate * args.ratio)), "--exchange", str(exchange_s))))[0]
            predicted = {str(row["hops"]): row["seconds"] for row in plan["preload"]}
            measured = {}
            for _ in range(args.rounds):
                for way in args.ways:
                    row = {"between": rate, "socket": round(socket_rate), "alone_s": round(alone_s, 3), "one_exchange_s": round(exchange_s, 5), **run(args, links, way, folder / "run")}
                    print(json.dumps({**row, "predicted_s": predicted.get(way), "chosen": plan["chosen"]}), flush=True)
                    if way in predicted:
                        measured.setdefault(way, []).extend(row["epochs_s"])
            chosen = str(plan["chosen"])
            if chosen not in measured or len(measured[chosen]) < 2:
                continue
            medians = {way: statistics.median(epochs) for way, epochs in measured.items()}
            best = min(medians, key=medians.get)
            behind = medians[chosen] - medians[best]
            within = max(spread_of(measured[chosen]), spread_of(measured[best]))
            print(json.dumps({"between": rate, "rows_per_s": round(row_rate), "chosen": chosen, "best": best, "medians_s": medians, "behind_s": behind,
                              "spread_s": within, "is_best": behind <= within}), flush=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
