#!/usr/bin/env python3
"""Seconds of an update against the number of devices, beside the bound of their links and the simulator.

    bench/scale.py [--devices 1,2,4,6,8,10] [--params 16777216] [--json > scale.json]
    bench/scale.py --draw scale.json [--out scale.svg]     an SVG and a PNG of the same name, with matplotlib

Devices are emulated in memory behind links (`smartinf bench step --emulated`): Figure 11 of Smart-Infinity (HPCA 2024) on
one machine. The usual rates are one fortieth of what its SmartSSDs and its host's path to ten of them were measured at: 3.0
and 1.6 GB/s, 6.4 GB/s for both directions together. Schemes: the host's update with f32 gradients that pass the drives, and
SmartUpdate in bf16, one subgroup after another (naive), overlapped, and with compressed gradients.
Drawn are, left, how many times faster than one device's host update, beside the same ratio in the paper, and, right,
seconds and the bound that the links allow.
"""
import argparse
import json
import pathlib
import sys

from runs import pyplot, rows_of

DENSITY = 0.08
OVERLAPPED = ["--where", "device", "--schedule", "overlapped"]
SCHEMES = {"host_update": ["--where", "host", "--spill"], "naive": ["--where", "device", "--schedule", "naive"],
           "overlapped": OVERLAPPED, "compressed": [*OVERLAPPED, "--density", DENSITY]}
STATE_BYTES = {"f32": 12, "bf16": 8, "q8": 4 + 2 * (1 + 1 / 64)}  # of a parameter
UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9}

# Figure 11 of the paper, GPT-2 4.0B: throughput of a whole iteration relative to the baseline with one
# device, 53.7 s. Forward and backward take 5.9 to 6.5 s of it at every count, so the
# rest is the update. Read off the figures.
ITERATION_S, FORWARD_BACKWARD_S = 53.7, 6.2
PAPER = {"host_update": {1: 1.00, 2: 1.55, 4: 2.23, 6: 2.26, 8: 2.26, 10: 2.27},
         "overlapped": {1: .80, 2: 1.48, 4: 2.55, 6: 2.92, 8: 3.25, 10: 3.64}}
PAPER_NAMES = {"host_update": "paper: host update", "overlapped": "paper: SmartUpdate, fp32, overlapped"}
STYLES = {"host_update": ("host update", "#8a8f98", "s"), "naive": ("SmartUpdate, naive", "#7fb2dd", "^"),
          "overlapped": ("SmartUpdate, overlapped", "#1f5fa8", "o"),
          "compressed": ("..., gradients compressed", "#2e8b57", "D")}


def rate_of(text):
    return float(text[:-2]) * UNITS[text[-2:]] if text[-2:] in UNITS else float(text)


def bound_s(options, scheme, devices, gradient):
    """What the links allow if everything on them overlaps, and equal work for equal time. An update needs all
    gradients, for the norm; so theirs is time before it, for every scheme. gradient: bytes of a parameter's."""
    read, write, link = (rate_of(text) for text in (options.internal_read, options.internal_write, options.host_link))
    state = STATE_BYTES[options.state_format]
    speed = devices - 1 + options.slow_device

    def both(shared, one, other):
        return one + other if shared else max(one, other)

    def drives(read_bytes, written):
        return options.params / speed * both(options.shared != "none", read_bytes / read, written / write)

    def host(up, down):
        return options.params * both(options.shared == "all", up, down) / link

    if scheme == "host_update":
        # fp32 gradients are written, then read again beside the state; all of it crosses the link.
        return max(drives(0, 4), host(0, 4)) + max(drives(state + 4, state), host(state + 4, state))
    return host(0, gradient) + max(drives(state, state), host(2, 0))


def measure(options, devices):
    """The row of so many devices: all schemes."""
    row = {"devices": devices, "params": options.params}
    elements = -(-options.params // (devices * options.subgroups))
    for scheme, flags in SCHEMES.items():
        words = ["bench", "step", "--emulated", devices, "--params", options.params, "--repeat", options.repeat, *flags,
                 "--internal-read", options.internal_read, "--internal-write", options.internal_write, "--host-link",
                 options.host_link, "--shared", options.shared, "--slow-device", options.slow_device, "--state-format",
                 options.state_format, "--subgroup", -(-elements // 65536) * 65536, "--threads", 1,
                 "--no-checksums",  # a few cores stand for all devices' processors
                 "--json", *(["--trace", options.trace] if options.trace else [])]
        step = rows_of(*words)[0]
        seconds = step["gradient_s"] + step["update_s"]
        bound = bound_s(options, scheme, devices, step["host_gradient_bytes_down"] / options.params)
        row |= {f"{scheme}_s": seconds, f"{scheme}_s_min": step["gradient_s"] + step["update_s_min"],
                f"{scheme}_s_max": step["gradient_s"] + step["update_s_max"], f"{scheme}_bound_s": bound,
                f"{scheme}_ratio": seconds / bound, f"{scheme}_slots": step["slots"]}
        if "simulated_total_s" in step:
            row |= {f"{scheme}_simulated_s": step["simulated_total_s"],
                    f"{scheme}_simulated_ratio": step["simulated_total_s"] / seconds,
                    f"{scheme}_shape": step["simulated_shape"]}
    return row


def paper_update(points):
    """Times faster than the paper's host update on one device, by count."""
    unit_s = ITERATION_S - FORWARD_BACKWARD_S
    return {count: unit_s / (ITERATION_S / ratio - FORWARD_BACKWARD_S) for count, ratio in points.items()}


def draw(result, plot):
    rows = sorted(result["rows"], key=lambda row: row["devices"])
    counts = [row["devices"] for row in rows]
    unit_s = rows[0]["host_update_s"] if counts[0] == 1 else None
    canvas, (speedup, seconds) = plot.subplots(1, 2, figsize=(10, 4.2))

    for key, (name, colour, marker) in STYLES.items():
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
        speedup.plot(list(ratios), list(ratios.values()), "--", marker=STYLES[key][2], mfc="white", ms=6,
                     lw=1, color=STYLES[key][1], label=PAPER_NAMES[key])

    speedup.set_title("Times faster than the host update of one device", fontsize=11)
    seconds.set_title("Seconds of an update", fontsize=11)
    seconds.set_yscale("log")
    values = [row[key + "_s"] for row in rows for key in STYLES]
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="1,2,4,6,8,10", help="numbers of devices, one row each")
    parser.add_argument("--params", type=int, default=1 << 24)
    parser.add_argument("--internal-read", default="75MB", help="bytes per second that a drive reads")
    parser.add_argument("--internal-write", default="40MB", help="bytes per second that a drive writes")
    parser.add_argument("--host-link", default="160MB", help="bytes per second between all devices and the host")
    parser.add_argument("--shared", choices=["none", "drives", "all"], default="all",
                        help="links whose two directions share the link's time: the drives', or the host link, too")
    parser.add_argument("--slow-device", type=float, default=1, help="speed of the first device, relative to the others")
    parser.add_argument("--state-format", choices=STATE_BYTES, default="f32")
    parser.add_argument("--subgroups", type=int, default=48, help="of each device")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--trace", help="Chrome trace of the last scheme's steps to write")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--draw", type=pathlib.Path, metavar="RESULT.json", help="measure nothing")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.svg", help="of --draw [beside RESULT.json]")
    options = parser.parse_args()
    if options.draw:
        canvas = draw(json.loads(options.draw.read_text(encoding="utf-8")), pyplot())
        for kind in (".svg", ".png"):
            path = (options.out or options.draw).with_suffix(kind)
            canvas.savefig(path, dpi=130, metadata={"Date": None} if kind == ".svg" else None)
            print(path)
        return
    rows = []
    for devices in map(int, options.devices.split(",")):
        rows.append(measure(options, devices))
        if not options.json:
            print(f"{devices:2} devices  " + "  ".join(
                f"{scheme} {rows[-1][f'{scheme}_s']:.3f} s = {rows[-1][f'{scheme}_ratio']:.2f} bound, simulated "
                f"{rows[-1].get(f'{scheme}_simulated_s', 0):.3f} s" for scheme in SCHEMES), flush=True)
    if options.json:
        given = {key: value for key, value in vars(options).items() if key not in ("devices", "json", "draw", "out")}
        print(json.dumps({**given, "density": DENSITY, "rows": rows}))


if __name__ == "__main__":
    sys.exit(main())
