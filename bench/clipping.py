#!/usr/bin/env python3
"""How often gradients were clipped in runs of `smartinf train`, and what overlap = "auto" did about it.

    bench/clipping.py [--clip-norm 1.0] [--parts 2] RUN/log.jsonl ...

One row of a Markdown table for each part of each log, the steps of which are divided into --parts equal ones:
the share of steps whose norm exceeded the limit, the median of the norm, the share of steps with each overlap, how
many early updates were made by a right and by a wrong guess, and the seconds that steps waited for the update,
in all and as a share of the time of the steps.
"""
import argparse
import collections
import json
import statistics


def rows_of(path):
    """Of each step the last row: a run that was stopped may have made steps twice."""
    rows = {}
    with open(path, encoding="utf-8") as file:
        for row in map(json.loads, file):
            if "gradient_norm" in row:
                rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)]


def line(path, rows, limit):
    count = len(rows)
    clipped = sum(row["gradient_norm"] > limit for row in rows) / count
    norm = statistics.median(row["gradient_norm"] for row in rows)
    overlaps = collections.Counter(row["overlap"] for row in rows)
    wrong = sum(row["wrong_guess"] for row in rows)
    exposed_s = sum(row["exposed_s"] for row in rows)
    share = exposed_s / sum(row["seconds"] for row in rows)
    used = ", ".join(f"{name} {number / count:.0%}" for name, number in overlaps.most_common())
    return (f"| {path} | {rows[0]['step']} to {rows[-1]['step']} | {clipped:.0%} | {norm:.2f} | {used} | "
            f"{overlaps['early'] - wrong} | {wrong} | {exposed_s:.1f} s ({share:.1%}) |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+")
    parser.add_argument("--clip-norm", type=float, default=1.0)
    parser.add_argument("--parts", type=int, default=2)
    args = parser.parse_args()
    print("| run | steps | clipped | median norm | overlap | right guesses | wrong guesses | waited |")
    print("|---|---|---|---|---|---|---|---|")
    for path in args.logs:
        rows = rows_of(path)
        for part in range(args.parts):
            these = rows[len(rows) * part // args.parts:len(rows) * (part + 1) // args.parts]
            if these:
                print(line(path, these, args.clip_norm))


if __name__ == "__main__":
    main()
