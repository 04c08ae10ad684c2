"""Trains the same model in several variants and seeds and compares the validation losses.

Each pair of variant and seed is one run of `smartinf train`, kept below --work: started again, this
goes on where it stopped. What a run showed is one line of JSON in --out; pairs that have a line
there are not run again, so that the runs may be spread over days and machines.

  bench/loss_curves.py run recipes/quickstart.toml --out curves.jsonl --seeds 1,2,3 \\
      --variant f32= --variant bf16="--optimizer.format bf16" --variant q8="--optimizer.format q8" \\
      -- --train.steps 2000
  bench/loss_curves.py table curves.jsonl     mean final loss, and the distance to the first variant
  bench/loss_curves.py plot curves.jsonl --out curves.svg     (needs matplotlib)
"""
import argparse
import collections
import json
import pathlib
import shlex
import statistics
import subprocess
import sys
import time

from runs import ROOT, pyplot



def read_rows(path):
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            row["variant"], row["seed"], row["curve"][-1][1]
        except (ValueError, KeyError, IndexError, TypeError):
            sys.exit(f"{path}:{number}: not a row of this script")
        rows.append(row)
    return rows


def variants_of(rows):
    """Rows by variant, in the order of their first row."""
    of = collections.OrderedDict()
    for row in rows:
        of.setdefault(row["variant"], {})[row["seed"]] = row
    return of


def train(smartinf, recipe, folder, variant, flags, seed, train_flags):
    command = [str(smartinf), "train", str(recipe), "--train.run", str(folder), "--train.seed", str(seed),
               "--data.seed", str(seed), "--train.sample_tokens", "0", *train_flags, *flags]
    started = time.monotonic()
    result = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if result.returncode != 0:
        sys.exit(f"{shlex.join(command)}: exit code {result.returncode}")
    curve, steps = [], 0
    for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if "validation_loss" in entry:
            curve.append([entry["step"], entry["validation_loss"]])
        steps = max(steps, entry["step"])
    return {"variant": variant, "seed": seed, "steps": steps, "seconds": round(time.monotonic() - started, 1),
            "command": shlex.join(["smartinf", "train", str(recipe), *train_flags, *flags]), "curve": curve}


def run(options):
    variants = []
    for variant in options.variant:
        name, _, flags = variant.partition("=")
        variants.append((name, shlex.split(flags)))
    for seed in options.seeds.split(","):
        seed = int(seed)
        for name, flags in variants:
            if any(row["variant"] == name and row["seed"] == seed for row in read_rows(options.out)):
                continue
            folder = options.work / options.out.stem / f"{name}-{seed}"
            row = train(options.smartinf, options.recipe, folder, name, flags, seed, options.train_flags)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with open(options.out, "a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
            print(f"{name} seed {seed}: {row['curve'][-1][1]:.4f} at step {row['steps']}", flush=True)


def table(options):
    of = variants_of(read_rows(options.rows))
    first = next(iter(of.values()))
    print("| variant | seeds | final validation loss: mean (by seed) | against the first, same seeds |")
    print("|---|---|---|---|")
    for name, by_seed in of.items():
        finals = [row["curve"][-1][1] for row in by_seed.values()]
        pairs = [(row["curve"][-1][1] / first[seed]["curve"][-1][1] - 1) * 100
                 for seed, row in by_seed.items() if seed in first]
        against = f"{statistics.mean(pairs):+.2f} % ({min(pairs):+.2f} to {max(pairs):+.2f})" if pairs else "-"
        print(f"| {name} | {len(finals)} | {statistics.mean(finals):.4f} "
              f"({', '.join(f'{final:.4f}' for final in finals)}) | {against} |")


def plot(options):
    figure, axes = pyplot().subplots(figsize=(7.2, 4.2), layout="constrained")
    for index, (name, by_seed) in enumerate(variants_of(read_rows(options.rows)).items()):
        curves = [dict(map(tuple, row["curve"])) for row in by_seed.values()]
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        if not steps:
            sys.exit(f"{name}: its runs were validated at different steps")
        means = [statistics.mean(curve[step] for curve in curves) for step in steps]
        axes.plot(steps, means, color=f"C{index}", marker=".", label=f"{name}: {means[-1]:.4f}")
        axes.fill_between(steps, [min(curve[step] for curve in curves) for step in steps],
                          [max(curve[step] for curve in curves) for step in steps], color=f"C{index}", alpha=0.2,
                          linewidth=0)
    axes.set_xlabel("step")
    axes.set_ylabel("validation loss, nats per token")
    axes.set_title(options.title)
    axes.legend(title="mean of the seeds, at the end")
    axes.grid(alpha=0.3)
    figure.savefig(options.out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("run", help="train what has no row yet; flags of smartinf train come after --")
    command.add_argument("recipe", type=pathlib.Path)
    command.add_argument("--variant", action="append", required=True, metavar="NAME=FLAGS")
    command.add_argument("--seeds", default="1,2,3")
    command.add_argument("--out", type=pathlib.Path, required=True, metavar="ROWS.jsonl")
    command.add_argument("--work", type=pathlib.Path, default=ROOT / "runs" / "curves", help="folder of the runs")
    command.add_argument("--smartinf", default=str(ROOT / "build/release/bin/smartinf"))
    command.set_defaults(do=run)
    command = commands.add_parser("table", help="print a Markdown table")
    command.add_argument("rows", type=pathlib.Path)
    command.set_defaults(do=table)
    command = commands.add_parser("plot", help="draw the curves, a band from the lowest to the highest seed")
    command.add_argument("rows", type=pathlib.Path)
    command.add_argument("--out", type=pathlib.Path, required=True)
    command.add_argument("--title", default="Validation loss")
    command.set_defaults(do=plot)
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:end])
    options.train_flags = arguments[end + 1:]
    options.do(options)


if __name__ == "__main__":
    main()
