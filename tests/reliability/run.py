"""Harms states, processes and inputs of the smartinf command in many small ways, and looks what comes of it.

A trial ends well when the exported weights are those of an undisturbed run ("same"), when the command
refuses with a message and fsck agrees ("refused"), or, where there are no weights to compare, when an
answer comes in time and nothing else was touched ("unharmed"). Anything else is a failure: wrong bits
that nothing reported, a hang, a death without a message, fsck and train disagreeing, a lost committed
step. Each is printed with the command that repeats it. Exit code 0: no failures, 1: some, 77: cannot run
here.

  run.py --smartinf build/release/bin/smartinf             all scenarios; a trial takes a core about 2 s
  run.py --smartinf ... --short                            a few trials of each
  run.py --smartinf ... --scenario flips --count 50 --seed 7
  run.py --smartinf ... --scenario flips --seed 7 --only 31    one trial again; its files are kept
"""
import argparse
import concurrent.futures
import importlib.util
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback

import shim
from machine import Machine
from outcomes import Failure, Row, table
from trials import SCENARIOS, Trial

import copies  # noqa: F401  each module of scenarios adds its own
import files  # noqa: F401
import folders  # noqa: F401
import from_python  # noqa: F401
import inputs  # noqa: F401
import processes  # noqa: F401
import python_checkpoints  # noqa: F401


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--smartinf", required=True, help="the command")
    parser.add_argument("--python-path", default="", help="folder of the Python package; empty: its scenarios "
                        "are left out")
    parser.add_argument("--scenario", action="append", choices=sorted(SCENARIOS), help="only this one")
    parser.add_argument("--count", type=int, help="trials of each scenario")
    parser.add_argument("--only", type=int, help="the number of one trial")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--short", action="store_true", help="few trials of each")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="trials at once")
    parser.add_argument("--folder", help="where it works (a temporary folder)")
    return parser.parse_args()


def one(machine, scenario, seed, index, kept):
    """Runs one trial: (Outcome or None, text of a failure, seconds)."""
    folder = machine.folder / f"{scenario.name}_{index}"
    folder.mkdir()
    begun = time.monotonic()
    outcome, text = None, ""
    try:
        draw = random.Random(f"{seed} {scenario.name} {index}")
        outcome = scenario.run(Trial(machine, draw, folder, index))
    except Failure as failure:
        text = str(failure)
    except Exception:  # of the harness itself, or of output that it cannot read
        text = traceback.format_exc()
    if not kept:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome, text, time.monotonic() - begun


def main():
    # Behind a shell's & it would be ignored, and by all children as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = arguments()
    if shutil.which(os.environ.get("CC", "cc")) is None:
        print("reliability: no C compiler (Debian: gcc): skipped")
        return 77
    folder = pathlib.Path(tempfile.mkdtemp(prefix="smartinf_reliability_", dir=options.folder))
    kept = options.only is not None
    rows = {}
    try:
        machine = Machine(options.smartinf, options.python_path, folder, shim.build(folder))
        work = []
        python = options.python_path and importlib.util.find_spec("torch") is not None
        if not python:
            print("reliability: without --python-path or torch the scenarios from Python are left out")
        for scenario in SCENARIOS.values():
            if options.scenario and scenario.name not in options.scenario:
                continue
            if not python and scenario.name.startswith("python_"):
                continue
            count = scenario.short if options.short else scenario.count
            count = count if options.count is None else options.count
            rows[scenario.name] = Row()
            numbers = range(count) if options.only is None else [options.only]
            work += [(scenario, number) for number in numbers]
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            trials = {pool.submit(one, machine, scenario, options.seed, number, kept): (scenario, number)
                      for scenario, number in work}
            for trial in concurrent.futures.as_completed(trials):
                scenario, number = trials[trial]
                outcome, text, seconds = trial.result()
                row = rows[scenario.name]
                row.seconds += seconds
                if outcome is not None:
                    row.outcomes[outcome] += 1
                    continue
                row.failures.append((number, text))
                print(f"FAILURE in {scenario.name}; again: --scenario {scenario.name} --seed {options.seed} "
                      f"--only {number}\n{text}\n", flush=True)
    finally:
        if kept:
            print(f"files are kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    print(table(rows))
    return 1 if any(row.failures for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
