#!/usr/bin/env python3
"""Seconds of a step of a table on a drive against the share of its rows that the step touches, beside the dense update of
all of them (`smartinf bench rows`, `smartinf bench step`; both AdamW-like in f32, exact).

    bench/rows_beside_dense.py --device DIR [--rows 2e6] [--shares 0.001,0.003,0.01,0.03,0.1] > rows.jsonl
    bench/rows_beside_dense.py --draw rows.jsonl [--out rows.svg]       an SVG, with matplotlib

DIR is a folder on the drive that is empty or not there. The ids of a step are all different and random: the worst case.
"""
import argparse
import json
import pathlib
import sys

from runs import pyplot, rows_of


def draw(rows, plot):
    canvas, axis = plot.subplots(figsize=(6.4, 4))
    steps = [row for row in rows if "share" in row]
    dense = next(row for row in rows if "share" not in row)
    shares = [100 * row["share"] for row in steps]
    axis.plot(shares, [row["step_s"] for row in steps], "o-", color="#1f5fa8", label="rows: what the step touches")
    axis.plot(shares, [row["alone_s"] for row in steps], "_", ms=16, mew=1.5, color="#d62728",
              label="the same reads and log writes alone")
    axis.axhline(dense["update_s"], color="#8a8f98", label="dense update of all rows")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks(shares, [f"{share:g} %" for share in shares])
    axis.minorticks_off()
    ticks = [t for t in (.02, .05, .1, .2, .5, 1, 2, 5, 10, 20, 50)
             if min(row["alone_s"] for row in steps) / 1.5 < t < 1.5 * max([*(row["step_s"] for row in steps), dense["update_s"]])]
    axis.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axis.set_xlabel("share of the rows that a step touches")
    axis.set_title(f"Seconds of a step, {dense['params'] / 64 / 1e6:g} million rows of 64", fontsize=11)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8.5, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    canvas.tight_layout()
    return canvas


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", metavar="DIR")
    parser.add_argument("--rows", type=float, default=2e6)
    parser.add_argument("--shares", default="0.001,0.003,0.01,0.03,0.1")
    parser.add_argument("--memory", default="256MiB", help="of both")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--draw", type=pathlib.Path, metavar="RESULT.jsonl", help="measure nothing")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.svg", help="of --draw [beside RESULT.jsonl]")
    options = parser.parse_args()
    if options.draw:
        rows = [json.loads(line) for line in options.draw.read_text(encoding="utf-8").splitlines()]
        path = (options.out or options.draw).with_suffix(".svg")
        draw(rows, pyplot()).savefig(path, metadata={"Date": None})
        print(path)
        return
    if options.device is None:
        parser.error("--device or --draw is needed")
    both = ["--repeat", options.repeat, "--json", "--device", options.device]
    params = int(options.rows) * 64
    dense = rows_of("bench", "step", "--params", params, "--memory-budget", options.memory, *both)[0]
    print(json.dumps(dense), flush=True)
    for share in map(float, options.shares.split(",")):
        row = rows_of("bench", "rows", "--rows", options.rows, "--dim", 64, "--batch", int(share * options.rows),
                      "--memory", options.memory, *both)[0]
        print(json.dumps({"share": share, **row}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
