"""The checks of scripts/gpu_check.sh: each runs in a process of its own, for a bounded time, and prints rows as it goes.

A check is a function that rows.check has registered; `run.py --check NAME` runs one here. Rows go to OUT/rows.jsonl, and what
a check prints to OUT/NAME.log.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--since", type=float, default=0)
    parser.add_argument("--check", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for module in ("bits", "trainer", "speed", "sanitizers"):
        __import__(module)
    if options.check:
        rows.run(options.check, options.quick, options.build, options.out)
        return 0
    names = options.only.split(",") if options.only else [n for n, check in rows.CHECKS.items() if not check.named]
    if unknown := set(names) - rows.CHECKS.keys():
        print(f"checks are {', '.join(rows.CHECKS)}", file=sys.stderr)
        return 0 if unknown == {"help"} else 2
    return Run(options).all([rows.CHECKS[name] for name in names])


class Run:
    """deadline: no check begins after it, and each is stopped at it."""

    def __init__(self, options):
        self.options, self.deadline = options, time.monotonic() + options.seconds - options.since
        self.lock, self.failed, self.passed = threading.Lock(), [], 0
        self.running = set()
        options.out.mkdir(parents=True, exist_ok=True)
        self.rows = options.out / "rows.jsonl"
        self.rows.unlink(missing_ok=True)
        self.take({"check": "build", "passed": True, "seconds": options.since, "cores": os.cpu_count()})

    def all(self, checks):
        beside = [check for check in checks if not check.alone and (check.quick or not self.options.quick)]
        at_once = max(1, min(8, os.cpu_count() // 2))
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            try:
                list(pool.map(self.one, beside))
            except KeyboardInterrupt:
                self.stop()
                raise
        for check in checks:
            if check.alone and (check.quick or not self.options.quick):
                self.one(check)
        print(f"{self.passed} rows passed, {len(self.failed)} failed{': ' if self.failed else ''}{', '.join(self.failed)}")
        print(f"rows: {self.rows}")
        return 1 if self.failed else 0

    def one(self, check):
        left = self.deadline - time.monotonic()
        if left < 5:
            return self.take({"check": check.name, "passed": None, "why": "no time was left"})
        bound, began = min(check.seconds, left), time.monotonic()
        folder = tempfile.mkdtemp(prefix=f"smartinf-{check.name}-", dir=os.environ.get("SMARTINF_CHECK_FOLDER"))
        command = [sys.executable, "-B", __file__, *sys.argv[1:], "--check", check.name]
        environment = os.environ | {"SMARTINF_CHECK_FOLDER": folder, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        with open(self.options.out / f"{check.name}.log", "w", encoding="utf-8") as log:
            child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True
            )
            reader = threading.Thread(target=self.read, args=(child.stdout, log), daemon=True)
            reader.start()
            self.running.add(child)
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(bound)
            finally:
                end(child)
                self.running.discard(child)
                for made in (folder, rows.in_memory(folder)):
                    shutil.rmtree(made, ignore_errors=True)
            reader.join(2)  # a process that left the group may hold the pipe for longer
        if child.returncode != 0 and self.deadline > 0:
            seconds = time.monotonic() - began
            why = f"still running after {bound:.0f} s" if seconds >= bound else self.last_line(check)
            self.take({"check": check.name, "passed": False, "why": why, "seconds": round(seconds, 1)})
        return None

    def stop(self):
        """Nothing begins any more, and what runs is ended."""
        self.deadline = 0
        for child in list(self.running):
            end(child)

    def read(self, pipe, log):
        for line in pipe:
            if line.startswith(rows.MARK):
                self.take(json.loads(line.removeprefix(rows.MARK)))
            else:
                log.write(line)
                log.flush()

    def last_line(self, check):
        text = (self.options.out / f"{check.name}.log").read_text(encoding="utf-8", errors="replace").strip()
        return text.rpartition("\n")[2][:300] or "ended without a word"

    def take(self, row):
        with self.lock:
            with self.rows.open("a", encoding="utf-8") as rows_file:
                rows_file.write(json.dumps(row) + "\n")
            if row["passed"]:
                self.passed += 1
            elif row["passed"] is not None:
                self.failed.append(row["check"])
            said = {True: "passed", False: "FAILED", None: "not run"}[row["passed"]]
            rest = {key: value for key, value in row.items() if key not in ("check", "passed")}
            print(f"{row['check']:40} {said:8} " + " ".join(f"{k}={str(v)[:300]}" for k, v in rest.items()), flush=True)


def end(child):
    """A check's process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted; what was found stands in rows.jsonl", file=sys.stderr)
        sys.exit(130)
