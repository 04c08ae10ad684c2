#!/usr/bin/env python3
"""Fits the constants of a smartssd machine file to the rows that were read off the paper, and tells how far the
simulator is from rows that a fit has not seen.

    bench/paper/fit.py [--machine smartssd-a5000] [--no-fit]

Fits by trying one constant after another (coordinate search, steps of 8 to 1 %), to the total time of each row and to
its phases where the paper gives them. Then each kind of row is left out in turn, the rest is fitted, and the rows left
out are predicted: a model size, an update rule, a number of devices, a method. Those errors are the last lines.
"""
import argparse
import math
import sys
import tempfile

import rows
from runs import text_of, values_in, with_values

# Key, lowest and highest value that is plausible (docs/simulator.md).
CONSTANTS = [
    ("gpu.product_efficiency", 0.55, 0.8),
    ("gpu.select_passes", 40, 150),
    ("gpu.link_bytes_per_s", 10e9, 25e9),
    ("host.link_bytes_per_s", 6e9, 16e9),
    ("host.update_bytes_per_s", 10e9, 60e9),
    ("host.copy_bytes_per_s", 4e9, 15e9),
    ("host.weights_bytes_per_s", 2e9, 9e9),
    ("device.read_bytes_per_s", 2.8e9, 3.3e9),
    ("device.write_bytes_per_s", 1.5e9, 2.0e9),
    ("device.burst_bytes", 2e9, 40e9),
    ("device.weights_bytes_per_s", 0.5e9, 4e9),
    ("software.update_start_s", 0, 1),
]
KINDS = {
    "models of 8.4 B": lambda row: row["model"] == "gpt2-8.4B",
    "BERT": lambda row: row["model"].startswith("bert"),
    "SGD with momentum": lambda row: row["optimizer"] == "sgd",
    "1 and 2 devices": lambda row: row["devices"] <= 2,
    "6 devices": lambda row: row["devices"] == 6,
    "10 devices": lambda row: row["devices"] == 10,
    "su": lambda row: row["method"] == "su",
    "su+o": lambda row: row["method"] == "su+o",
    "su+o+c": lambda row: row["method"] == "su+o+c",
}
PHASE_WEIGHT = 0.5  # of a phase's error, as a part of the step, beside that of the total


class Fit:
    def __init__(self, machine):
        self.text, self._known = text_of("simulate", "--machine", machine, "--print-machine"), {}

    def run(self, values):
        values = tuple(values)
        if values not in self._known:
            numbers = {key: round(value) if key == "device.burst_bytes" else float(value)
                       for (key, _, _), value in zip(CONSTANTS, values, strict=True)}
            with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
                file.write(with_values(self.text, numbers))
                file.flush()
                self._known[values] = rows.simulated(file.name)
        return self._known[values]

    def cost(self, values, wanted):
        """Squares of errors in percent; beyond 4 % they grow linearly, so that no single row decides."""
        total = 0
        for row in filter(wanted, self.run(values)):
            errors = [100 * math.log(row["total_s"] / row["paper_total_s"])]
            for phase in rows.PHASES[:3]:
                if row["paper_" + phase] > 0:
                    errors.append(PHASE_WEIGHT * 100 * (row[phase] - row["paper_" + phase]) / row["paper_total_s"])
            total += sum(min(e * e, 8 * abs(e) - 16) if abs(e) > 4 else e * e for e in errors)
        return total

    def fit(self, values, wanted):
        values, best = list(values), self.cost(values, wanted)
        for step in (0.08, 0.04, 0.02, 0.01):
            for _ in range(4):
                before = best
                for i, (_, lowest, highest) in enumerate(CONSTANTS):
                    for factor in (1 + step, 1 / (1 + step)):
                        tried = list(values)
                        tried[i] = min(max(values[i] * factor, lowest), highest)
                        cost = self.cost(tried, wanted)
                        if cost < best:
                            values, best = tried, cost
                if best > before - 0.1:
                    break
        return values


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="smartssd-a5000")
    parser.add_argument("--no-fit", action="store_true", help="only the errors of the file as it is")
    options = parser.parse_args()
    fit = Fit(options.machine)
    there = values_in(fit.text)
    values = [there[key] for key, _, _ in CONSTANTS]
    print("as the file is:       ", rows.errors_of(fit.run(values)))
    if options.no_fit:
        return
    values = fit.fit(values, lambda row: True)
    print("fitted:               ", rows.errors_of(fit.run(values)))
    for (key, _, _), value in zip(CONSTANTS, values, strict=True):
        print(f"    {key} = {value:.4g}")
    print("left out of the fit, and then predicted:", flush=True)
    unseen = []
    for kind, is_of in KINDS.items():
        without = fit.fit(values, lambda row, is_of=is_of: not is_of(row))
        predicted = [row for row in fit.run(without) if is_of(row)]
        unseen += predicted
        print(f"    {kind:18}", rows.errors_of(predicted), flush=True)
    print("all of them together: ", rows.errors_of(unseen))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
