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
    return (row["speedup"], *(row[f"in_bank_accesses_{name}"] for name in CLASSES))


def error(rows):
    """Of PageRank's rows: mean of the speed-up's relative error and the total's difference."""
    return sum(abs(math.log(rows[graph][0] / GIVEN[graph][0])) + abs(rows[graph][-1] - GIVEN[graph][-1])
               for graph in GIVEN) / len(GIVEN)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--scale-down", default="16")
    options = parser.parse_args()
    scale = ("--scale-down", options.scale_down, "--iterations", "1")
    if options.fit:
        for cache in (3 << 19, 2 << 20, 5 << 19):
            for collected in (1792, 2048, 2304):
                rows = {graph: simulated(options.program, "--stand-in", graph, *scale, "--cache-bytes", str(cache),
                                         "--rows-collected", str(collected)) for graph in GIVEN}
                print(f"{cache:>9} {collected:>5}  error {error(rows):.3f}  speed-ups",
                      " ".join(f"{rows[graph][0]:.2f}" for graph in GIVEN), flush=True)
        return
    print("| algorithm | graph | speed-up | " + " | ".join(name.replace("_", " ") for name in CLASSES) + " |")
    print("|---|---|" + "---|" * (1 + len(CLASSES)))
    for algorithm in ("pagerank", "bfs", "components", "sssp"):
        for graph, given in GIVEN.items():
            row = simulated(options.program, "--algorithm", algorithm, "--stand-in", graph, *scale)
            cells = [f"{value:.2f}" + (f" ({paper:.2f})" if algorithm == "pagerank" else "")
                     for value, paper in zip(row, given, strict=True)]
            print(f"| {algorithm} | {graph} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
