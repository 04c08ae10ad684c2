#!/usr/bin/env python3
"""The paper's figures as `smartinf simulate` sees them, beside the paper's points where they were given.

    bench/paper/figures.py N [--out figures]     N: 3, 9 to 17; or all

Writes figureN.csv, and figureN.svg and .png with matplotlib. Figures 10 and 12 to 17 are drawn for the subjects that we
take the paper's to have, and none of their points is known here; prices are assumptions (docs/simulator.md).
"""
import argparse
import csv
import pathlib
import tempfile
import textwrap

import rows as paper
from closed_form import forward_flops
from runs import pyplot, rows_of, text_of, values_in, with_values

THREE = ("baseline", "su+o", "su+o+c")
COUNTS = (1, 2, 4, 6, 8, 10)
PLAIN_DRIVE = 400  # dollars for an SSD of the size of a SmartSSD, whose price the machine files have
COLOURS = {"baseline": "#8a8f98", "su": "#9ecae1", "su+o": "#3182bd", "su+o+c": "#e6550d",
           "forward": "#a1d99b", "backward": "#9ecae1", "update": "#fdae6b"}


def step(**flags):
    """A simulated step; what is not said is the paper's usual."""
    flags = {"model": "gpt2-4.0B", "machine": "smartssd-a5000", "devices": 10, **flags}
    return rows_of("simulate", "--json", *(word for key, value in flags.items() for word in (f"--{key}", value)))[0]


def entry(panel, series, x, times, value, given=None):
    """A row: one point of a line or one bar, and the paper's value of the same."""
    return {"panel": panel, "series": series, "x": str(x), **{key: times[key] for key in ("model", "gpu", "devices")},
            **{phase: times[phase] for phase in paper.PHASES}, "value": value, "paper": given}


def speed_ups(panel, x, methods=THREE, **flags):
    """All methods of one configuration, over its baseline."""
    all_times = [step(method=method, **flags) for method in methods]
    return [entry(panel, method, x or times["gpu"], times, all_times[0]["total_s"] / times["total_s"])
            for method, times in zip(methods, all_times)]


def motivation():
    rows = []
    for model, shares in paper.SHARES.items():
        times = step(model=model, devices=1, method="baseline")
        rows += [entry("share of time, %", phase[:-2], model, times, 100 * times[phase] / times["total_s"], share)
                 for phase, share in zip(paper.PHASES, shares)]
    all_times = {devices: step(devices=devices, method="baseline") for devices in paper.RAID0}
    return rows + [entry("RAID0 speed-up", "baseline", devices, all_times[devices],
                         all_times[1]["total_s"] / all_times[devices]["total_s"], faster)
                   for devices, faster in paper.RAID0.items()]


def ablation():
    rows = []
    for (model, devices), all_times in paper.SECONDS.items():
        for method, given in zip(paper.METHODS, all_times):
            times = step(model=model, devices=devices, method=method)
            row = entry(f"{model}, {devices} devices", "simulated", method, times, times["total_s"], given[3])
            rows.append({**row, "paper_forward_s": given[0], "paper_computed_s": given[0] + given[1]})
    return rows


def scaling():
    one_s = step(devices=1, method="baseline")["total_s"]
    rows = []
    for method, points in paper.SCALING.items():
        for devices, faster in points.items():
            times = step(devices=devices, method=method)
            rows.append(entry("", method, devices, times, one_s / times["total_s"], faster))
    return rows


def ratios():
    rows = []
    for devices in (6, 10):
        base_s = step(devices=devices, method="baseline")["total_s"]
        for percent in (100, 20, 10, 5, 2, 1):
            method = "su+o" if percent == 100 else "su+o+c"
            times = step(devices=devices, method=method, ratio=percent / 100)
            rows.append(entry(f"{devices} devices", method, percent, times, base_s / times["total_s"]))
    return rows


def cost():
    rows = []
    for machine in ("smartssd-a5000", "smartssd-a100"):
        text = text_of("simulate", "--machine", machine, "--print-machine")
        of = values_in(text)
        flops = 3 * forward_flops(["--model", "gpt2-4.0B"], text)
        for method in THREE:
            drive = PLAIN_DRIVE if method == "baseline" else of["device.price"]
            for devices in COUNTS:
                times = step(machine=machine, devices=devices, method=method)
                dollars = of["price.host"] + of["price.gpu"] + devices * drive
                rows.append(entry(machine, method, devices, times, flops / times["total_s"] / 1e9 / dollars))
    return rows


def several_gpus():
    text = text_of("simulate", "--machine", "smartssd-a4000", "--print-machine")
    rows = []
    for gpus in (1, 2, 3):
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(with_values(text, {"gpu.link_is_host_link": str(gpus > 1).lower()}))
            file.flush()
            rows += speed_ups("", gpus, model="gpt2-1.16B", machine=file.name, gpus=gpus)
    return rows


def each(**lists):
    """Speed-ups for each value of one flag."""
    (flag, values), = lists.items()
    return [row for value in values for row in speed_ups("", value, **{flag: value})]


# Title, labels of the axes (for panels of different kinds one each), and the rows.
FIGURES = {
    3: ("One plain SSD: where a step's time goes; RAID0: what more drives bring", "model / drives",
        "% of the step / speed-up", motivation),
    9: ("What each part brings: seconds in a step", "method", "seconds", ablation),
    10: ("Larger models, ten devices: speed-up over the baseline", "model", "speed-up over the baseline",
         lambda: [row for size in ("4.0B", "8.4B", "16.6B", "24.8B", "33.0B")
                  for row in speed_ups("", f"gpt2-{size}", paper.METHODS, model=f"gpt2-{size}")]),
    11: ("Throughput against the number of devices, GPT-2 4.0B", "devices", "throughput, baseline with one device = 1",
         scaling),
    12: ("Other GPUs, ten devices: speed-up over the baseline", "GPU", "speed-up over the baseline",
         lambda: [row for model in ("gpt2-4.0B", "gpt2-8.4B") for machine in ("smartssd-a5000", "smartssd-a100")
                  for row in speed_ups(model, None, model=model, machine=machine)]),
    13: ("Other kinds of models, ten devices: speed-up over the baseline", "model", "speed-up over the baseline",
         lambda: each(model=("bert-0.34B", "bert-4.0B", "bert-8.3B", "bloom-3B", "bloom-7.1B", "vit-0.30B", "vit-0.63B"))),
    14: ("Other optimizers: speed-up over the baseline of the same, GPT-2 4.0B", "optimizer",
         "speed-up over the baseline",
         lambda: [row for devices in (6, 10) for rule in ("adam", "sgd", "adagrad")
                  for row in speed_ups(f"{devices} devices", rule, devices=devices, optimizer=rule)]),
    15: ("Compression ratio: speed-up over the baseline, GPT-2 4.0B", "compressed volume, % of the f32 gradients",
         "speed-up over the baseline", ratios),
    16: ("GFLOPS per dollar, GPT-2 4.0B (prices are assumptions, docs/simulator.md)", "devices", "GFLOPS per $", cost),
    17: ("Several GPUs behind the devices' link, GPT-2 1.16B, ten devices", "GPUs", "speed-up over the baseline",
         several_gpus),
}


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
        axis.hlines([row[key] for row in rows], [i - 0.34 for i in positions], [i + 0.34 for i in positions], "k",
                    lw=1.5, label=label)
    axis.plot(positions, [row["paper"] for row in rows], "kD", ms=5, label="paper, total")
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
        if given:
            axis.plot(at, given, "kD", ms=5, mfc=colour or "k", label=name + ", paper")
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


def draw(number, rows, path, plot):
    title, x_label, y_label, _ = FIGURES[number]
    panels = unique(row["panel"] for row in rows)
    width = max(7, 4.2 * len(panels))
    canvas, axes = plot.subplots(1, len(panels), figsize=(width, 4.9), squeeze=False)
    for index, (axis, panel) in enumerate(zip(axes[0], panels)):
        (stacked if number == 9 else lines_or_bars)(axis, [row for row in rows if row["panel"] == panel])
        axis.set_title(panel, fontsize=10)
        axis.set_xlabel(label_of(x_label, index, len(panels)))
        label = label_of(y_label, index, len(panels))
        if index == 0 or label != y_label:
            axis.set_ylabel(label)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    # One legend for all panels, below them: what is simulated in the first row, the paper's points of the same below.
    handles = {name: handle for axis in axes[0] for handle, name in zip(*axis.get_legend_handles_labels())}
    shown = {one: handles[one] for name in sorted(handles, key=lambda name: ", paper" in name)
             for one in (name, name + ", paper") if one in handles}
    paired = sum(", paper" in name for name in shown)
    columns = paired if 2 * paired == len(shown) else min(len(shown), int(width / 1.5))
    canvas.legend(shown.values(), shown.keys(), fontsize=8, loc="lower center", ncols=columns, frameon=False)
    given = any(row["paper"] is not None for row in rows)
    title = textwrap.fill(f"Figure {number}. {title}", int(11 * width))
    basis = ("simulated, beside the paper's points" if given else "simulated only: of the paper's figure no point is "
             "known here, and its subject is assumed")
    canvas.suptitle(title, fontsize=11, y=0.985)
    canvas.text(0.5, 0.93 - 0.04 * title.count("\n"), textwrap.fill(basis, int(14 * width)), fontsize=9, ha="center",
                va="top", color="#555555")
    canvas.tight_layout(rect=(0, 0.05 * -(-len(shown) // columns), 1, 0.94 - 0.04 * title.count("\n")))
    for kind in (".svg", ".png"):
        canvas.savefig(path.with_suffix(kind), dpi=140, metadata={"Date": None} if kind == ".svg" else None)
        print(path.with_suffix(kind))
    plot.close(canvas)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", metavar="N", choices=[*map(str, FIGURES), "all"])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."), metavar="DIR")
    parser.add_argument("--rows-only", action="store_true", help="no pictures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for number in FIGURES if options.number == "all" else [int(options.number)]:
        rows = FIGURES[number][3]()
        path = options.out / f"figure{number}.csv"
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
        print(path)
        if not options.rows_only:
            draw(number, rows, path, pyplot())


if __name__ == "__main__":
    main()
