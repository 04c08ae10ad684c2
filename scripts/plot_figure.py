#!/usr/bin/env python3
"""Draws the rows that `smartinf simulate --figure N` writes: FILE.json -> FILE.svg and FILE.png.

Usage: plot_figure.py FILE.json     (needs matplotlib; the rows are there without it)
"""
import json
import pathlib
import sys
import textwrap

COLOURS = {"baseline": "#8a8f98", "su": "#9ecae1", "su+o": "#3182bd", "su+o+c": "#e6550d",
           "forward": "#a1d99b", "backward": "#9ecae1", "update": "#fdae6b"}


def unique(values):
    return list(dict.fromkeys(values))


def stacked(axis, rows):
    positions = range(len(rows))
    below = [0.0] * len(rows)
    for phase in ("forward", "backward", "update"):
        heights = [row[phase + "_s"] for row in rows]
        axis.bar(positions, heights, bottom=below, color=COLOURS[phase], label=phase, width=0.6)
        below = [a + b for a, b in zip(below, heights)]
    for key, label in (("paper_forward_s", None), ("paper_computed_s", "paper, forward and backward")):
        given = [(i, row[key]) for i, row in zip(positions, rows) if row.get(key) is not None]
        axis.hlines([v for _, v in given], [i - 0.34 for i, _ in given], [i + 0.34 for i, _ in given], "k", lw=1.5,
                    label=label)
    given = [(i, row["paper"]) for i, row in zip(positions, rows) if row["paper"] is not None]
    axis.plot([i for i, _ in given], [v for _, v in given], "kD", ms=5, label="paper, total")
    axis.set_xticks(list(positions), [row["x"] for row in rows])


def lines_or_bars(axis, rows):
    places = unique(row["x"] for row in rows)
    numeric = all(place.replace(".", "").isdigit() for place in places)
    names = unique(row["series"] for row in rows)
    for index, name in enumerate(names):
        mine = [row for row in rows if row["series"] == name]
        colour = COLOURS.get(name)
        given = [row["paper"] for row in mine if row["paper"] is not None]
        if numeric and len(mine) == 1 and len(places) > 1:  # what the others are compared with
            axis.axhline(mine[0]["value"], ls="--", lw=1.2, color=colour, label=name)
            places = [place for place in places if place != mine[0]["x"]]
            continue
        if numeric:
            at = [float(row["x"]) for row in mine]
            axis.plot(at, [row["value"] for row in mine], "-o", ms=3, color=colour, label=name)
        else:
            width = 0.8 / len(names)
            at = [places.index(row["x"]) - 0.4 + width * (index + 0.5) for row in mine]
            bars = axis.bar(at, [row["value"] for row in mine], width=width, color=colour, label=name)
            if not given:
                axis.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
        given = [(x, row["paper"]) for x, row in zip(at, mine) if row["paper"] is not None]
        if given:
            axis.plot([x for x, _ in given], [v for _, v in given], "kD", ms=5,
                      mfc=colour or "k", label=name + ", paper")
    if numeric:
        if max(float(p) for p in places) >= 20:
            axis.set_xscale("log")
        axis.set_xticks([float(p) for p in places], places)
        axis.minorticks_off()
    else:
        axis.set_xticks(range(len(places)), places, rotation=20 if len(places) > 4 else 0)
    axis.set_ylim(0, 1.08 * axis.get_ylim()[1])


def label_of(text, panel, panels):
    """Panels of different kinds have a label each: "model / drives"."""
    parts = text.split(" / ")
    return parts[panel] if len(parts) == panels else text


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    path = pathlib.Path(sys.argv[1])
    figure = json.loads(path.read_text(encoding="utf-8"))
    try:
        import matplotlib
    except ImportError:
        sys.exit(f"smartinf: the rows are written, but not drawn: {sys.executable} has no matplotlib. "
                 f"Install it ({sys.executable} -m pip install matplotlib), or name another Python in "
                 "the environment variable SMARTINF_PYTHON")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plot

    panels = unique(row["panel"] for row in figure["rows"])
    width = max(7, 4.2 * len(panels))
    canvas, axes = plot.subplots(1, len(panels), figsize=(width, 4.9), squeeze=False)
    for index, (axis, panel) in enumerate(zip(axes[0], panels)):
        rows = [row for row in figure["rows"] if row["panel"] == panel]
        (stacked if figure["stacked"] else lines_or_bars)(axis, rows)
        axis.set_title(panel, fontsize=10)
        axis.set_xlabel(label_of(figure["x_label"], index, len(panels)))
        label = label_of(figure["y_label"], index, len(panels))
        if index == 0 or label != figure["y_label"]:
            axis.set_ylabel(label)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    # One legend for all panels, below them, where it hides nothing.
    handles = {name: handle for axis in axes[0] for handle, name in zip(*axis.get_legend_handles_labels())}
    # What is simulated in the first row, and the paper's points of the same below it.
    shown = {}
    for name in sorted(handles, key=lambda name: ", paper" in name):
        for one in (name, name + ", paper"):
            if one in handles:
                shown[one] = handles[one]
    paired = sum(", paper" in name for name in shown)
    columns = paired if 2 * paired == len(shown) else min(len(shown), int(width / 1.5))
    canvas.legend(shown.values(), shown.keys(), fontsize=8, loc="lower center", ncols=columns, frameon=False)
    title = textwrap.fill(f"Figure {figure['figure']}. {figure['title']}", int(11 * width))
    basis = textwrap.fill(figure["basis"], int(14 * width))
    canvas.suptitle(title, fontsize=11, y=0.985)
    canvas.text(0.5, 0.93 - 0.04 * title.count("\n"), basis, fontsize=9, ha="center", va="top", color="#555555")
    lines = title.count("\n") + basis.count("\n")
    canvas.tight_layout(rect=(0, 0.05 * -(-len(shown) // columns), 1, 0.96 - 0.04 * lines))
    for kind in (".svg", ".png"):
        canvas.savefig(path.with_suffix(kind), dpi=140)
        print(path.with_suffix(kind))


if __name__ == "__main__":
    main()
