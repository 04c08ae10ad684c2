"""Draws `smartinf bench scale --json`: how updates scale with the number of devices.

Usage: plot_scale.py RESULT.json [--out scale.svg]     writes the SVG and a PNG of the same name

Left: how many times faster than one device's host update, beside the same ratio in Smart-Infinity
(HPCA 2024). Right: seconds, and the bound that the links allow. Needs matplotlib.
"""
import argparse
import json
import pathlib
import sys

# Figure 11 of the paper, GPT-2 4.0B: throughput of a whole iteration relative to the baseline with one
# device, 53.7 s. Forward and backward take 5.9 to 6.5 s of it at every count, so the
# rest is the update. Read off the figures.
ITERATION_S, FORWARD_BACKWARD_S = 53.7, 6.2
PAPER = {"host_update": {1: 1.00, 2: 1.55, 4: 2.23, 6: 2.26, 8: 2.26, 10: 2.27},
         "overlapped": {1: .80, 2: 1.48, 4: 2.55, 6: 2.92, 8: 3.25, 10: 3.64}}
PAPER_NAMES = {"host_update": "paper: host update", "overlapped": "paper: SmartUpdate, fp32, overlapped"}
SCHEMES = {"host_update": ("host update", "#8a8f98", "s"), "naive": ("SmartUpdate, naive", "#7fb2dd", "^"),
           "overlapped": ("SmartUpdate, overlapped", "#1f5fa8", "o"),
           "compressed": ("..., gradients compressed", "#2e8b57", "D")}


def read_result(path):
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        for row in result["rows"]:
            for key in SCHEMES:
                row["devices"], row[key + "_s"], row[key + "_bound_s"]
        return result
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{path}: not a result of `smartinf bench scale --json`: {error!r}")


def paper_update(points):
    """Times faster than the paper's host update on one device, by count."""
    unit_s = ITERATION_S - FORWARD_BACKWARD_S
    return {count: unit_s / (ITERATION_S / ratio - FORWARD_BACKWARD_S) for count, ratio in points.items()}


def draw(result, plot):
    rows = sorted(result["rows"], key=lambda row: row["devices"])
    counts = [row["devices"] for row in rows]
    unit_s = rows[0]["host_update_s"] if counts[0] == 1 else None
    canvas, (speedup, seconds) = plot.subplots(1, 2, figsize=(10, 4.2))

    for key, (name, colour, marker) in SCHEMES.items():
        times = [row[key + "_s"] for row in rows]
        # Hollow and larger, to be seen below the overlapped one where they are as fast.
        style = {"marker": marker, "color": colour, "label": name,
                 **({"ms": 11, "mfc": "none", "lw": 1} if key == "naive" else {"ms": 6})}
        if unit_s:
            speedup.plot(counts, [unit_s / t for t in times], **style)
        seconds.plot(counts, times, **style)
        if key != "naive":
            bounds = [row[key + "_bound_s"] for row in rows]
            seconds.plot(counts, bounds, "_", ms=16, mew=1.5, color="#d62728",
                         zorder=3, label="what the links allow" if key == "overlapped" else None)
    for key, points in PAPER.items() if unit_s else ():
        ratios = paper_update(points)
        speedup.plot(list(ratios), list(ratios.values()), "--", marker=SCHEMES[key][2], mfc="white", ms=6,
                     lw=1, color=SCHEMES[key][1], label=PAPER_NAMES[key])

    speedup.set_title("Times faster than the host update of one device", fontsize=11)
    seconds.set_title("Seconds of an update", fontsize=11)
    seconds.set_yscale("log")
    values = [row[key + "_s"] for row in rows for key in SCHEMES]
    ticks = [t for t in (.1, .2, .5, 1, 2, 5, 10, 20, 50, 100) if min(values) / 1.2 < t < max(values) * 1.2]
    seconds.set_yticks(ticks, [f"{t:g}" for t in ticks])
    seconds.minorticks_off()
    speedup.set_ylim(bottom=0)
    for axis in (speedup, seconds):
        axis.set_xticks(counts)
        axis.set_xlabel("devices")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8.5, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    canvas.tight_layout()
    return canvas


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=pathlib.Path, metavar="RESULT.json")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.svg", help="default: beside RESULT.json")
    arguments = parser.parse_args()
    result = read_result(arguments.result)
    try:
        import matplotlib
    except ImportError:
        sys.exit("plot_scale: matplotlib is not installed (pip install matplotlib)")
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "smartinf"  # the same rows give the same file
    import matplotlib.pyplot as plot

    canvas = draw(result, plot)
    out = arguments.out or arguments.result.with_suffix(".svg")
    for path in (out.with_suffix(".svg"), out.with_suffix(".png")):
        metadata = {"Date": None} if path.suffix == ".svg" else None
        canvas.savefig(path, dpi=130, metadata=metadata)
        print(path)


if __name__ == "__main__":
    main()
