"""The examples run as they are written."""

import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def example(name, *arguments):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_train_one_line(tmp_path):
    first = float(example("train_one_line.py", tmp_path / "device", 5).split()[-1])
    later = float(example("train_one_line.py", tmp_path / "device", 100).split()[-1])
    assert later < first


def test_release_gradients(tmp_path):
    assert "gradient norm" in example("release_gradients.py", tmp_path / "device")


def test_trainer(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    out = example("trainer.py", tmp_path / "device", tmp_path / "out")
    assert "train_loss" in out
    assert (tmp_path / "out" / "checkpoint-20" / "smartinf" / "checkpoint.json").exists()
    example("trainer.py", tmp_path / "device", tmp_path / "out", "--resume")


def test_lightning_module(tmp_path):
    """Stopped after 6 steps, resumed on other devices: the losses of the whole run."""
    pytest.importorskip("lightning")

    def losses(device, out, *arguments):
        text = example("lightning_module.py", tmp_path / device, tmp_path / out, *arguments)
        return re.findall(r"step \d+ loss \S+", text)

    whole = losses("d1", "o1", 10)
    assert len(whole) == 10
    first = losses("d2", "o2", 6)
    assert first + losses("d3", "o3", 10, tmp_path / "o2" / "last.ckpt") == whole


def test_every_example_is_run():
    tested = set(re.findall(r'"(\w+\.py)"', pathlib.Path(__file__).read_text()))
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested
