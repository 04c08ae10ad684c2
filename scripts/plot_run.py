#!/usr/bin/env python3
"""Draws runs over each other: loss, gradient norm, learning rate, speed. Used by `smartinf plot`.

Usage: plot_run.py FILE.png < ROWS

ROWS is a JSON object on each line: {"run": NAME}, then the rows of that run, a step and numbers by name.
"""
import json
import os
import sys
import tempfile

COLOURS = ("#2f6db3", "#e6550d", "#2ca25f", "#7b5ea7", "#b3842f", "#c2417a")
MARKS = "osD^vP"


def read_runs(lines):
    runs = []
    for line in lines:
        row = json.loads(line)
        if "run" in row:
            runs.append((row["run"], []))
        else:
            runs[-1][1].append(row)
    return runs


def names_of(paths):
    """Paths without the folders that all of them lie in."""
    parts = [os.path.normpath(path).split(os.sep) for path in paths]
    while len(parts) > 1 and all(len(p) > 1 for p in parts) and len({p[0] for p in parts}) == 1:
        parts = [p[1:] for p in parts]
    return [os.sep.join(p) for p in parts]


def series(rows, name):
    points = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), (int, float))]
    return [step for step, _ in points], [value for _, value in points]


def smoothed(values):
    """The mean of the values around each, about a fiftieth of all; near the beginning, where a loss falls fast,
    of fewer, as many before as after."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    most = max(2, len(values) // 100)
    out = []
    for i in range(len(values)):
        before = min(most, i)
        end = min(i + before + 1, len(values))
        out.append((sums[end] - sums[i - before]) / (end - i + before))
    return out


def draw(axis, rows, name, colour, label=None):
    """A pale line of the values, and a strong one of their mean."""
    steps, values = series(rows, name)
    few = len(values) < 20
    axis.plot(steps, values, color=colour, alpha=1 if few else 0.25, lw=1.5 if few else 0.8,
              marker="." if few else None, label=label if few else None)
    means = values if few else smoothed(values)
    if not few:
        axis.plot(steps, means, color=colour, lw=1.8, label=label)
    return means


def draw_loss(axis, runs, shown):
    highest = []
    several = len(runs) > 1
    for (_, rows), name, colour in zip(runs, shown, COLOURS * len(runs)):
        highest += draw(axis, rows, "loss", colour, name if several else "training")[:1]
        held = sorted({key for row in rows for key in row
                       if key == "validation_loss" or key.startswith("evaluation_loss/")})
        for key, mark in zip(reversed(held), MARKS * len(held)):
            what = "validation" if key == "validation_loss" else key.split("/", 1)[1]
            steps, values = series(rows, key)
            highest += values[:1]
            axis.plot(steps, values, color=colour, ls="--", lw=1, marker=mark, ms=5, mec="white", mew=0.6,
                      label=f"{name}, {what}" if several else what)
    # What single steps show above the means' beginning is cut off.
    low, high = axis.get_ylim()
    if highest and max(highest) > low:
        axis.set_ylim(low, min(high, max(highest) + 0.08 * (max(highest) - low)))
    axis.set_ylabel("loss, nats per token\n(pale: each step)")
    axis.legend(fontsize=8, frameon=False, loc="upper right", ncols=1 + len(axis.get_lines()) // 8)


def draw_speed(axis, runs):
    for (_, rows), colour in zip(runs, COLOURS * len(runs)):
        draw(axis, rows, "seconds", colour)
        steps, values = series(rows, "exposed_s")
        axis.plot(steps, values if len(values) < 20 else smoothed(values), color=colour, ls=":", lw=1.5)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("seconds of a step\n(dotted: waited for updates)")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    runs = read_runs(sys.stdin)
    for run, rows in runs:
        if not any("loss" in row for row in rows):
            sys.exit(f"smartinf: the log of {run} has no step yet; plot it when it has")
    try:
        import matplotlib
    except ImportError as error:
        sys.exit(f"smartinf: {sys.executable} has no matplotlib ({error}). Install it ({sys.executable} -m pip "
                 "install matplotlib), or name another Python in the environment variable SMARTINF_PYTHON")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plot

    plot.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
                          "grid.alpha": 0.3, "font.size": 9, "svg.hashsalt": "smartinf"})
    shown = names_of([run for run, _ in runs])
    canvas = plot.figure(figsize=(11, 8.5), layout="constrained")
    grid = canvas.add_gridspec(3, 2, height_ratios=(1.7, 1, 1))
    draw_loss(canvas.add_subplot(grid[0, :]), runs, shown)
    places = [grid[1, 0], grid[1, 1], grid[2, 0], grid[2, 1]]
    for place, (name, label) in zip(places, (("gradient_norm", "gradient norm\n(before clipping)"),
                                             ("lr", "learning rate"), ("tokens_per_s", "tokens per second"))):
        axis = canvas.add_subplot(place)
        values = []
        for (_, rows), colour in zip(runs, COLOURS * len(runs)):
            if name == "lr":
                axis.plot(*series(rows, name), color=colour, lw=1.8)
            else:
                values += draw(axis, rows, name, colour)
        if name == "gradient_norm" and values and min(values) > 0 and max(values) > 20 * min(values):
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.set_ylabel(label)
    draw_speed(canvas.add_subplot(places[3]), runs)
    for axis in canvas.axes:
        axis.margins(x=0.01)
        axis.xaxis.get_major_locator().set_params(integer=True)
    for axis in (canvas.axes[0], *canvas.axes[3:]):
        axis.set_xlabel("step")
    canvas.suptitle(", ".join(shown) if len(shown) <= 3 else f"{len(shown)} runs", fontsize=11)

    out = sys.argv[1]
    ending = os.path.splitext(out)[1].lstrip(".").lower()
    if ending not in canvas.canvas.get_supported_filetypes():
        sys.exit(f"smartinf: {out} does not end in .png, .svg or .pdf")
    made = None
    try:
        file, made = tempfile.mkstemp(prefix=".smartinf-", suffix="." + ending, dir=os.path.dirname(out) or ".")
        mask = os.umask(0)
        os.umask(mask)
        os.fchmod(file, 0o666 & ~mask)
        with os.fdopen(file, "wb") as target:
            canvas.savefig(target, format=ending, dpi=140)
        os.replace(made, out)
        made = None
    except OSError as error:
        sys.exit(f"smartinf: cannot write {out}: {error}")
    finally:
        if made:
            os.unlink(made)
    print(out)


if __name__ == "__main__":
    main()
