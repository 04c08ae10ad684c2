"""Fits the accelerator's two free parameters to PageRank's rows of Piccolo (CAL 2024), or prints rows beside them.

    python3 fit.py PATH/TO/smartinf-graph                 every row, fitted ones beside the paper's
    python3 fit.py PATH/TO/smartinf-graph --fit           the grid that the constants of main.cc come from

Rows as read off the paper: speed-ups are printed there, shares of accesses measured in its figure (+- 0.02).
"""
import argparse
import json
import math
import subprocess

CLASSES = ("read", "write", "read_data_buffer", "write_buffers", "total")
GIVEN = {"pokec": (2.6, 0.18, 0.02, 0.07, 0.13, 0.40),
         "orkut": (2.2, 0.24, 0.02, 0.07, 0.12, 0.45),
         "livejournal": (1.7, 0.27, 0.02, 0.07, 0.13, 0.49)}


def simulated(program, *words):
    row = json.loads(subprocess.check_output([program, "simulate", "--json", *words]))
    return (row["speedup"], *(row[f"in_bank_accesses_{name}"] for name in CLASSES), row["energy_saved"])


def worst(rows):
    """Of PageRank's rows, in shares of what is allowed: a fifth of a speed-up, 0.08 of a total; and whether they keep the order."""
    deviations = [max(abs(math.log(rows[graph][0] / given[0])) / math.log(1.2), abs(rows[graph][5] - given[5]) / 0.08)
                  for graph, given in GIVEN.items()]
    speedups = [rows[graph][0] for graph in GIVEN]
    return max(deviations), speedups == sorted(speedups, reverse=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--scale-down", default="16")
    options = parser.parse_args()
    scale = ("--scale-down", options.scale_down, "--iterations", "1")
    if options.fit:
        for cache in (1 << 19, 3 << 18, 7 << 17, 1 << 20):
            for collected in (2560, 2688, 2816):
                rows = {graph: simulated(options.program, "--stand-in", graph, *scale, "--cache-bytes", str(cache),
                                         "--rows-collected", str(collected)) for graph in GIVEN}
                deviation, ordered = worst(rows)
                print(f"{cache:>9} {collected:>5}  {deviation:.2f} of what is allowed, {'' if ordered else 'not '}in order;",
                      " ".join(f"{rows[graph][0]:.2f}" for graph in GIVEN), flush=True)
        return
    print("| algorithm | graph | speed-up | " + " | ".join(name.replace("_", " ") for name in CLASSES) + " | energy saved |")
    print("|---|---|" + "---|" * (2 + len(CLASSES)))
    for algorithm in ("pagerank", "bfs", "components", "sssp"):
        for graph, given in GIVEN.items():
            row = simulated(options.program, "--algorithm", algorithm, "--stand-in", graph, *scale)
            cells = [f"{value:.2f}" + (f" ({paper:.2f})" if algorithm == "pagerank" else "")
                     for value, paper in zip(row, given)] + [f"{row[-1]:.2f}"]
            print(f"| {algorithm} | {graph} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
