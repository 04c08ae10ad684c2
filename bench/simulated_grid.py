"""Holds the simulator's update times against measured ones over a grid, and writes a page.

Usage: simulated_grid.py ROWS.jsonl [--device DIR] [--round 1] [--seconds 230] [--page PAGE.md]
                                    [--part FILE.jsonl]

Runs `bench/scale.py` (emulated devices) over device counts, rates, state formats and subgroup sizes,
and with --device `bench step` on the real drive behind DIR. Rows that ROWS.jsonl has already are not run
again, but in another round, and after --seconds no new one is begun: run it as often as it takes, when
nothing else runs.
SMARTINF names the binary [build/release/bin/smartinf].
"""
import argparse
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
import time

from runs import ROOT, SMARTINF, this_machine
from scale import SCHEMES

# Drives and host link per second, what shares a budget, and the parameters for each 2.5 devices, so that steps
# take from a tenth of a second to some seconds.
RATES = {"slow": ("75MB", "40MB", "160MB", "all", 1 << 21), "middle": ("200MB", "120MB", "400MB", "drives", 1 << 22),
         "fast": ("250MB", "200MB", "800MB", "none", 1 << 23)}
SCALE = [("scale", {"devices": devices, "rates": rates, "format": state, "subgroups": subgroups})
         for rates, subgroups, state, devices in itertools.product(RATES, (8, 32), ("f32", "bf16", "q8"), (1, 2, 4, 10))]
# The part of it that a test keeps: --part.
PART = [("scale", point) for _, point in SCALE
        if point["subgroups"] == 8 and point["devices"] != 2
        and (point["format"] == "f32" or (point["format"] == "q8" and point["rates"] != "fast"))]
STEP = [("step", {"devices": devices, "format": state, "subgroup": subgroup, "way": way})
        for state, subgroup, devices, way in (
            *itertools.product(("f32", "bf16", "q8"), (1 << 20, 1 << 22), (1,), ("device",)),
            *itertools.product(("f32", "q8"), (1 << 20,), (1,),
                               ("device --schedule naive", "device --spill", "device --density 0.08", "host --spill")),
            ("f32", 1 << 20, 2, "device"))]
PARAMS, REPEAT = "1e8", 7


def command(kind, point, device):
    if kind == "scale":
        read, write, host, shared, params = RATES[point["rates"]]
        params *= math.ceil(point["devices"] / 2.5)
        return ["bench/scale.py", "--devices", str(point["devices"]), "--params", str(params), "--internal-read", read,
                "--internal-write", write, "--host-link", host, "--shared", shared, "--state-format", point["format"],
                "--subgroups", str(point["subgroups"]), "--json"]
    words = ["smartinf", "bench", "step", "--params", PARAMS, "--state-format", point["format"], "--subgroup", str(point["subgroup"]),
             "--repeat", str(REPEAT), "--json", "--where", *point["way"].split()]
    for index in range(point["devices"]):
        words += ["--device", f"{device}/{index}"]
    return words


def measure(rows, grid, device, number, seconds):
    known = {json.dumps([row["kind"], row["point"]]) for row in read(rows) if row["round"] == number}
    end = time.monotonic() + seconds
    for kind, point in grid:
        if json.dumps([kind, point]) in known:
            continue
        if time.monotonic() > end:
            return False
        words = command(kind, point, device)
        program = [sys.executable, ROOT / words[0]] if kind == "scale" else [SMARTINF]
        done = subprocess.run([*program, *words[1:]], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(words)}: {done.stderr}")
        result = json.loads(done.stdout.splitlines()[-1])
        row = {"kind": kind, "point": point, "round": number, "load": os.getloadavg()[0],
               "result": result["rows"][0] if kind == "scale" else result}
        with open(rows, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(kind, *point.values(), *(f"{name} {100 * error:+.1f}" for name, _, _, error in comparisons(row)))
    return True


def read(rows):
    if not rows.exists():
        return []
    return [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]


def comparisons(row):
    """(scheme, measured, simulated, error) of each pair in a row."""
    result, found = row["result"], []
    if row["kind"] == "step":
        pairs = [(row["point"]["way"], result["update_s"], result.get("simulated_s"))]
    else:
        pairs = [(name, result[f"{name}_s"], result.get(f"{name}_simulated_s")) for name in SCHEMES]
    for name, measured, simulated in pairs:
        if simulated is not None:
            found.append((name, measured, simulated, simulated / measured - 1))
    return found


def recorded(rows):
    """What sim/update_test.cc holds the simulator against: measured seconds, and the shape to simulate."""
    lines = []
    for row in rows:
        for name, measured, _, _ in comparisons(row):
            shape = {key: float(f"{value:.6g}") if isinstance(value, float) else value
                     for key, value in row["result"][f"{name}_shape"].items()}
            lines.append(json.dumps({**row["point"], "scheme": name, "measured_s": round(measured, 5),
                                     "shape": shape}))
    return "".join(f"{line}\n" for line in lines)


def summary(rows, title, key):
    """A table of mean and worst error by what key(row, scheme) gives."""
    groups = {}
    for row in rows:
        for name, _, _, error in comparisons(row):
            groups.setdefault(key(row, name), []).append(abs(error))
            groups.setdefault("all", []).append(abs(error))
    lines = [f"| {title} | points | mean error | worst |", "|---|---|---|---|"]
    order = sorted((name for name in groups if name != "all"), key=str) + ["all"]
    for name in order:
        errors = groups[name]
        lines.append(f"| {name} | {len(errors)} | {100 * sum(errors) / len(errors):.1f} % | {100 * max(errors):.1f} % |")
    return "\n".join(lines)


SPREAD = 1.1


def spread(row):
    return row["result"]["drive_limit_s_max"] / row["result"]["drive_limit_s_min"]


def raw(rows, fields):
    step = rows[0]["kind"] == "step"
    lines = [",".join(["load", *fields, "scheme", "measured_s", "simulated_s", "error_percent",
                       *(["round", "limit_spread"] if step else [])])]
    for row in rows:
        for name, measured, simulated, error in comparisons(row):
            values = [f"{row['load']:.1f}", *(str(row["point"][field]) for field in fields), name]
            values += [f"{measured:.4f}", f"{simulated:.4f}", f"{100 * error:+.1f}"]
            lines.append(",".join([*values, *([str(row["round"]), f"{spread(row):.2f}"] if step else [])]))
    return "```csv\n" + "\n".join(lines) + "\n```"


def shown(kind, point):
    return " ".join(command(kind, point, "DIR"))


def page(rows):
    scale = [row for row in rows if row["kind"] == "scale"]
    step = [row for row in rows if row["kind"] == "step"]
    rates = "\n".join(f"- {name}: drives {read} read, {write} written; host link {host}; `--shared {shared}`; {params} parameters"
                      for name, (read, write, host, shared, params) in RATES.items())
    rounds = " and ".join(f"{sum(row['round'] == number for row in step)} of {len(STEP)} points in round {number}"
                          for number in sorted({row["round"] for row in step}))
    text = f"""# The simulated update against the measured one

Command: `python3 bench/simulated_grid.py rows.jsonl --device DIR --page docs/results/simulator.md`, run until all
rows are there, while builds were paused.

Machine: {this_machine()}. The load in the rows is
the one-minute average; builds that were stopped for the measurement still count in it.

Every point of `bench/scale.py` is run once{f"; of `bench step`, {rounds}" if step else ""}.
No row of these rounds is left out; earlier ones, with bench and simulator not yet as they are, are not here.
An error is simulated / measured - 1. Nothing is fitted: the simulator gets the rates asked for, and what the
cores do as timed in the same run (update, copies, selection and expansion of compressed gradients).

## bench/scale.py: emulated devices

From the first gradient to the committed step. 1, 2, 4 and 10 devices; f32, bf16 and q8 state; 8 and 32
subgroups on each device; the rates below, with twice the parameters on 4 and four times on 10 devices, so that
a step takes from a tenth of a second to some seconds. The first point:

    {shown(*SCALE[0])}

{rates}

{summary(scale, "scheme", lambda row, name: name)}

{summary(scale, "rates", lambda row, name: row["point"]["rates"])}

{summary(scale, "devices", lambda row, name: row["point"]["devices"])}

{summary(scale, "state", lambda row, name: row["point"]["format"])}

{summary(scale, "subgroups", lambda row, name: row["point"]["subgroups"])}
"""
    errors = [abs(error) for row in rows for _, _, _, error in comparisons(row)]
    text += f"""
The aim is 5 % in the mean and 12 % at worst. {sum(error > 0.12 for error in errors)} of {len(errors)} points on this page are
above that.
"""
    if step:
        wild = [abs(error) for row in step if spread(row) > SPREAD for _, _, _, error in comparisons(row)]
        calm = [abs(error) for row in step if spread(row) <= SPREAD for _, _, _, error in comparisons(row)]
        steady = (f"Where it is at most {SPREAD}, {len(calm)} points, the mean error is {100 * sum(calm) / len(calm):.1f} % "
                  f"and the worst {100 * max(calm):.1f} %.") if wild and calm else ""
        text += f"""
## bench step: the real drive

The update from the norm to the committed step, median of {REPEAT}. The drive's rate is the one that `bench step`
finds with the same bytes in the same memory and no computing, in turn with the steps. Two devices are two
directories on one drive. That drive is a virtual machine's, and others use it: `limit_spread` is the longest of
their limits over the shortest. {steady}
The first point:

    {shown(*STEP[0])}

{summary(step, "way", lambda row, name: name)}

{summary(step, "state", lambda row, name: row["point"]["format"])}

{summary(step, "subgroup", lambda row, name: row["point"]["subgroup"])}

{summary(step, "devices", lambda row, name: row["point"]["devices"])}

{summary(step, "round", lambda row, name: row["round"])}
"""
    text += f"\n## Every row\n\n{raw(scale, ('devices', 'rates', 'format', 'subgroups'))}\n"
    if step:
        text += f"\n{raw(step, ('devices', 'format', 'subgroup'))}\n"
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=pathlib.Path)
    parser.add_argument("--device", help="A directory on a real drive; 8 GB are written there and erased")
    parser.add_argument("--round", type=int, default=1, help="Another number measures every point again")
    parser.add_argument("--seconds", type=float, default=230)
    parser.add_argument("--page", type=pathlib.Path)
    parser.add_argument("--part", type=pathlib.Path, help="Measure what the test keeps, and write its rows")
    options = parser.parse_args()
    grid, device = (PART, None) if options.part else (SCALE + (STEP if options.device else []), options.device)
    if not measure(options.rows, grid, device, options.round, options.seconds):
        print("not complete: run it again")
    if options.part:
        options.part.write_text(recorded(read(options.rows)), encoding="utf-8")
    elif options.page:
        options.page.write_text(page(read(options.rows)), encoding="utf-8")


if __name__ == "__main__":
    main()
