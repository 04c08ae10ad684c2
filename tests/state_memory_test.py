"""fsck, checkpoint, restore and reshard of a state that is many times larger than their budget.

Usage: state_memory_test.py PATH_OF_SMARTINF [unittest's own arguments]
SMARTINF_STATE_PARAMS (1e7, 12 bytes each) and SMARTINF_STATE_BUDGET (20 MiB) choose another size.
"""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

SMARTINF = str(pathlib.Path(sys.argv.pop(1)).resolve())
PARAMS = os.environ.get("SMARTINF_STATE_PARAMS", "1e7")
BUDGET_MIB = int(os.environ.get("SMARTINF_STATE_BUDGET", "20"))
# The metadata of a step and what the allocator keeps: 24 bytes for each 65536 elements, and threads.
BESIDE_MIB = 16


def anonymous_mib(pid):
    """Memory that is the process's own: not its libraries, and not the page cache."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1024
    return 0


def peak_mib(*words):
    """The most memory of its own that a command was seen with. It must succeed."""
    peak = 0
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen([SMARTINF, *words], stdout=output, stderr=output) as process:
            while process.poll() is None:
                try:
                    peak = max(peak, anonymous_mib(process.pid))
                except (FileNotFoundError, ProcessLookupError):
                    break
                time.sleep(0.002)
        output.seek(0)
        if process.returncode != 0:
            raise AssertionError(f"{words}: {output.read()}")
    return peak


class StateMemory(unittest.TestCase):
    def test_stays_in_the_budget(self):
        with tempfile.TemporaryDirectory(dir=os.environ.get("SMARTINF_STATE_DIR")) as folder:
            a, b, c, d = (f"{folder}/{name}" for name in "abcd")
            peak_mib("bench", "step", "--params", PARAMS, "--repeat", "1", "--keep", "--device", a,
                     "--io-bytes", "1MiB", "--io-depth", "4", "--memory-budget", "64MiB")
            # What its libraries take for themselves.
            program = peak_mib("inspect", a)
            budget = ["--memory-budget", f"{BUDGET_MIB}MiB"]
            peaks = {"fsck": peak_mib("fsck", a, *budget),
                     "checkpoint": peak_mib("checkpoint", a, "--out", folder + "/kept", *budget)}
            shutil.rmtree(a)
            peaks["restore"] = peak_mib("restore", folder + "/kept/step-00000002", "--device", b, *budget)
            shutil.rmtree(folder + "/kept")
            peaks["reshard"] = peak_mib("reshard", "--from", b, "--to", c, d, *budget)
            # Two slots each.
            state = sum(os.path.getsize(f"{one}/smartinf.state") for one in (c, d)) / 2 / 2**20
            print(f"state {state:.0f} MiB, budget {BUDGET_MIB} MiB, program alone {program:.0f} MiB; peaks " +
                  ", ".join(f"{name} {peak:.0f}" for name, peak in peaks.items()) + " MiB")
            self.assertGreater(state, 3 * (BUDGET_MIB + BESIDE_MIB), "too small to show anything")
            for name, peak in peaks.items():
                self.assertLess(peak - program, BUDGET_MIB + BESIDE_MIB, name)


if __name__ == "__main__":
    unittest.main()
