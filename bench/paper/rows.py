#!/usr/bin/env python3
"""Every step that was read off the Smart-Infinity paper, beside `smartinf simulate`.

    bench/paper/rows.py [--machine smartssd-a5000] [--json]

The constants of machines/smartssd-*.toml are fitted to these rows. Source: Jang et al., HPCA 2024 (arXiv 2403.06664);
bar heights are good to about 0.05 s. SMARTINF names the binary [build/release/bin/smartinf].
"""
import argparse
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from runs import rows_of  # pylint: disable=wrong-import-position

METHODS = ("baseline", "su", "su+o", "su+o+c")
PHASES = ("forward_s", "backward_s", "update_s", "total_s")
ONE_DEVICE_S = 53.7  # the baseline's step with one device, GPT-2 4.0B

# Seconds of forward, backward, update and step, by model, devices and method.
SECONDS = {
    ("gpt2-4.0B", 6): ((0.62, 5.59, 17.54, 23.76), (0.67, 5.33, 13.04, 19.05), (0.67, 5.43, 12.27, 18.37),
                       (0.67, 4.14, 10.77, 15.58)),
    ("gpt2-4.0B", 10): ((0.67, 5.23, 17.75, 23.65), (0.67, 5.33, 9.63, 15.63), (0.67, 5.80, 8.28, 14.75),
                        (0.67, 4.19, 7.30, 12.16)),
    ("gpt2-8.4B", 6): ((1.12, 11.18, 37.64, 49.93), (1.12, 11.18, 28.07, 40.37), (1.12, 10.93, 27.45, 39.50),
                       (1.12, 8.19, 25.84, 35.15)),
    ("gpt2-8.4B", 10): ((1.12, 10.93, 36.76, 48.81), (1.12, 10.80, 20.50, 32.42), (1.12, 10.93, 19.50, 31.55),
                        (1.12, 8.19, 17.02, 26.33)),
}
# Throughput of GPT-2 4.0B over that of the baseline with one device, by devices; the baseline's RAID0 likewise.
SCALING = {"baseline": {1: 1.00, 2: 1.55, 4: 2.23, 6: 2.26, 8: 2.26, 10: 2.27},
           "su+o": {1: 0.80, 2: 1.48, 4: 2.55, 6: 2.92, 8: 3.25, 10: 3.64},
           "su+o+c": {1: 0.89, 2: 1.62, 4: 2.80, 6: 3.45, 8: 3.76, 10: 4.42}}
RAID0 = {1: 1.0, 2: 1.705, 4: 2.163, 6: 2.226, 8: 2.243, 10: 2.261}
# Shares of a step with one plain SSD, in percent: forward, backward, update.
SHARES = {"gpt2-2.5B": (1.5, 10.5, 88.0), "gpt2-8.3B": (1.2, 12.8, 86.0), "gpt2-20.5B": (1.3, 15.8, 83.0)}


def row(group, model, devices, method, times, optimizer="adamw"):
    """Times that the paper does not give are 0."""
    return {"group": group, "model": model, "devices": devices, "method": method, "optimizer": optimizer,
            **{f"paper_{phase}": seconds for phase, seconds in zip(PHASES, times)}}


ROWS = [row("seconds", model, devices, method, times)
        for (model, devices), all_times in SECONDS.items() for method, times in zip(METHODS, all_times)]
ROWS += [row(group, "gpt2-4.0B", devices, method, (0, 0, 0, ONE_DEVICE_S / faster))
         for group, method, points in (*(("scaling", *item) for item in SCALING.items()), ("raid0", "baseline", RAID0))
         for devices, faster in points.items()]
ROWS += [row("kinds", "bert-0.34B", 6, "su+o", (0.10, 0, 1.67, 2.33)),
         row("kinds", "gpt2-4.0B", 6, "su+o", (0, 0, 10.53, 15.95), "sgd")]


def simulated(machine="smartssd-a5000", rows=ROWS):
    """The rows with what the machine takes, and the error of the total."""
    devices_of = {}
    for one in rows:
        devices_of.setdefault((one["model"], one["method"], one["optimizer"]), []).append(one["devices"])
    times = {}
    for (model, method, optimizer), devices in devices_of.items():
        for step in rows_of("simulate", "--machine", machine, "--model", model, "--method", method, "--optimizer",
                            optimizer, "--sweep", f"devices={','.join(map(str, dict.fromkeys(devices)))}", "--json"):
            times[model, method, optimizer, step["devices"]] = {phase: step[phase] for phase in PHASES}
    done = [{**one, **times[one["model"], one["method"], one["optimizer"], one["devices"]]} for one in rows]
    return [{**one, "error": one["total_s"] / one["paper_total_s"] - 1} for one in done]


def errors_of(rows):
    errors = [100 * abs(one["error"]) for one in rows]
    return f"{len(errors):2} rows, mean {sum(errors) / len(errors):4.1f} %, worst {max(errors):4.1f} %"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="smartssd-a5000")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = simulated(options.machine)
    for one in rows:
        print(json.dumps(one) if options.json else
              f"{one['group']:8} {one['model']:10} {one['optimizer']:5} {one['devices']:2} devices {one['method']:8}  "
              f"paper {one['paper_total_s']:6.2f} s  simulated {one['total_s']:6.2f} s  {100 * one['error']:+5.1f} %")
    if not options.json:
        print(errors_of(rows))


if __name__ == "__main__":
    main()
