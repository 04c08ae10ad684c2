#!/usr/bin/env python3
"""The closed form that people put on a slide, beside the event-driven step of `smartinf simulate`, and why they part.

    bench/paper/closed_form.py [FLAGS of smartinf simulate ...] [--json]

T_opt,n = max(T_opt / n, T_swap / min(n, B_host / B_device)), T_total,n = T_opt,n + T_fwd + T_bwd. T_opt: one device reads
and writes a step's state and gradients. T_swap: what crosses the host link in the update, over one device's own link.
Everything overlaps perfectly, nothing is copied, and drives lose nothing by mixing. Source: the scalability model of a
course project that repeated the paper on one SmartSSD. Beside it the bytes of the paper's Table I (HPCA 2024).
"""
import argparse
import json
import tempfile

import rows as paper
from runs import rows_of, text_of, values_in, with_values

ENDLESS = 1e18
PLANES = {"adamw": 3, "adam": 3, "sgd": 2, "adagrad": 2, "lion": 2}
BYTES = {"f32": 4, "bf16": 2, "q8": 1 + 1 / 64}  # of a moment's element; the master weight has 4

# What the closed form assumes, one thing at a time: keys of the machine file, and flags.
IDEALS = {
    "copies on the host take no time": {"host.copy_bytes_per_s": ENDLESS},
    "gradients leave while backward goes on": {"software.offload_waits": "false"},
    "selection takes no time": {
        "gpu.select_passes": 0.0, "host.step_ahead_params_per_s": 0.0,
        "host.select_params_per_s": lambda old: ENDLESS if float(old) > 0 else old},
    "drives lose nothing when reads and writes mix, nor to their own processor": {"device.mixed_efficiency": 1.0},
    "the update itself takes no time": {
        "host.update_bytes_per_s": ENDLESS, "device.kernel_clock_hz": 0.0, "device.update_bytes_per_s": ENDLESS,
        "device.decompress_bytes_per_s": ENDLESS},
    "the host link has no limit": {"host.link_bytes_per_s": ENDLESS},
    "every subgroup overlaps with the next ones (eight slots)": {"software.overlapped": "'overlapped'"},
}


def step(flags, text, method, values=None):
    """The simulated step, on the machine with these values."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(with_values(text, values or {}))
        file.flush()
        return rows_of("simulate", *flags, "--method", method, "--machine", file.name, "--json")[0]


def forward_flops(flags, text):
    """Of forward: seconds of a GPU of 1 TFLOPS that does nothing else."""
    alone = {"gpu.peak_flops": 1e12, "gpu.product_efficiency": 1.0, "gpu.activation_passes": 0.0,
             "gpu.memory_bytes_per_s": 1e30, "gpu.link_bytes_per_s": 1e30}
    return 1e12 * step(flags, text, "baseline", alone)["forward_s"]


def table_one(row):
    """Bytes over the host link up and down, in f32 gradients and weights as the paper moves them. With M = 2 bytes a
    parameter: baseline 8M up and 8M down, SmartUpdate 2M and 2M, SmartComp ratio x 2M down. Optimizers with one
    moment keep 4M of state in place of 6M."""
    parameters = row["parameters"]
    if row["method"] == "baseline":
        return ((4 * PLANES[row["optimizer"]] + 4) * parameters,) * 2
    return 4 * parameters, (row["ratio"] if row["method"] == "su+o+c" else 1) * 4 * parameters


def closed_form(row, text, flops):
    """Of the step that was simulated to `row`."""
    of = values_in(text)
    parameters, n = row["parameters"], row["devices"]
    state = 4 + (PLANES[row["optimizer"]] - 1) * BYTES[row["state_format"]]
    compressed = row["method"] == "su+o+c"
    # Where the host selects, whole gradients leave the GPU and wait in memory.
    on_host = compressed and of["host.select_params_per_s"] > 0
    gradient = 4 * row["ratio"] if compressed and not on_host else of["software.gradient_bytes"]
    spilled = of["software.gradient_spilled"] and not on_host
    read, written = parameters * (state + (gradient if spilled else 0)), parameters * state
    one_s = read / of["device.read_bytes_per_s"] + written / of["device.write_bytes_per_s"]
    swapped = max(read, written) if row["method"] == "baseline" else parameters * of["software.weight_bytes"]
    swap_s = swapped / of["device.link_bytes_per_s"]
    # Remote devices pass the network in place of the host's link.
    servers = text.count("[[device]]") * of["device.link_bytes_per_s"]
    shared = min(of["network.bytes_per_s"], servers) if of["device.remote"] else of["host.link_bytes_per_s"]
    worth = shared / of["device.link_bytes_per_s"]
    update_s = max(one_s / n, swap_s / min(n, worth))
    products = of["gpu.peak_flops"] * of["gpu.product_efficiency"]
    link = of["gpu.link_bytes_per_s"] if row["gpu"] != "none" else 1e30
    forward_s = max(flops / products, 2 * parameters / link)
    backward_s = max(3 * flops / products, max(2, gradient) * parameters / link)
    return {"forward_s": forward_s, "backward_s": backward_s, "update_s": update_s,
            "total_s": forward_s + backward_s + update_s, "optimizer_one_s": one_s, "swap_one_s": swap_s,
            "links_worth": worth, "bound_by": "host link" if swap_s / min(n, worth) > one_s / n else "drives"}


def why_they_part(flags, text, row):
    """Seconds of the step that go away with each assumption alone, most first."""
    saved = []
    for what, values in IDEALS.items():
        method, more = row["method"], []
        if "slots" in what:
            method, more = {"su": "su+o"}.get(method, method), ["--slots", 8]
        saved.append((row["total_s"] - step([*flags, *more], text, method, values)["total_s"], what))
    return sorted(saved, key=lambda one: -one[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="smartssd-a5000")
    parser.add_argument("--method", choices=paper.METHODS, default="su+o")
    parser.add_argument("--json", action="store_true")
    options, flags = parser.parse_known_args()
    text = text_of("simulate", *flags, "--machine", options.machine, "--print-machine")
    row = step(flags, text, options.method)
    form = closed_form(row, text, forward_flops(flags, text))
    up, down = table_one(row)
    if options.json:
        row |= {f"closed_form_{key}": value for key, value in form.items()}
        print(json.dumps({**row, "table_one_up_bytes": up, "table_one_down_bytes": down}))
        return
    print(f"{'':10}{'closed form':>14}{'simulated':>14}{'difference':>14}")
    for phase in paper.PHASES:
        print(f"{phase[:-2]:10}{form[phase]:12.2f} s{row[phase]:12.2f} s{row[phase] - form[phase]:+12.2f} s")
    print(f"T_opt {form['optimizer_one_s']:.2f} s on one device, T_swap {form['swap_one_s']:.2f} s over one link, "
          f"{form['links_worth']:.1f} devices fill the host link: limited by the {form['bound_by']}")
    print(f"Table I, host link: {up / 1e9:.1f} GB up, {down / 1e9:.1f} GB down (f32 gradients and weights)")
    print("They differ because the closed form assumes, and the event-driven run does not:")
    for saved, what in why_they_part(flags, text, row):
        if saved >= 0.005 * row["total_s"]:
            print(f"  {saved:8.2f} s  {what}")


if __name__ == "__main__":
    main()
