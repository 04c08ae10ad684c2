"""What a training process takes, by the benchmark that docs/results/python.md was made with."""

import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "bench" / "python_memory.py"


def measure(*arguments):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.nightly
def test_weights_gradients_and_the_budget(tmp_path):
    """84 million parameters. Importing torch takes half a GB and is left out; so are 64 MiB for what
    does not grow with the model. A second copy of the gradients would be 335 MB."""
    smaller = ["--layers", 5, "--memory-budget-mib", 64, "--steps", 2]
    ours = measure("--with", "smartinf", "--device", tmp_path / "device", *smaller)
    asked = ours["weights_and_gradients_bytes"] + ours["budget_bytes"]
    taken = ours["rss_peak_bytes"] - ours["rss_after_import_bytes"]
    assert taken <= 1.15 * asked + (64 << 20)
    assert ours["rss_peak_bytes"] < measure("--with", "torch", *smaller)["rss_peak_bytes"]


def test_the_compiler_is_not_imported(tmp_path):
    """torch's Optimizer would import it: 150 MB that nobody needs who does not compile."""
    small = ["--layers", 1, "--width", 64, "--steps", 1]
    assert not measure("--with", "smartinf", "--device", tmp_path / "d", *small)["torch_compiler_imported"]
