"""Two ranks under torchrun on gloo, each owning half of the state, against one rank."""

import pathlib
import subprocess
import sys

import pytest
import torch

WORKER = str(pathlib.Path(__file__).with_name("ranks_worker.py"))


def run(world, *arguments):
    launch = [sys.executable, WORKER]
    if world > 1:
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={world}",
            WORKER,
        ]
    return subprocess.run([*launch, *map(str, arguments)], capture_output=True, text=True, timeout=240)


def assert_close(a, b):
    for name, value in a["model"].items():
        # The mean over ranks is added up in another order than the mean over the batch.
        assert torch.allclose(value, b["model"][name], rtol=1e-4, atol=1e-5), name
    for number, entry in a["optimizer"]["state"].items():
        other = b["optimizer"]["state"][number]
        assert entry["step"] == other["step"]
        assert torch.allclose(entry["exp_avg"], other["exp_avg"], rtol=1e-3, atol=1e-6)


def test_two_ranks_are_one_and_resume_on_one(tmp_path):
    one = run(1, tmp_path / "d1", 0, 6, "-", tmp_path)
    assert one.returncode == 0, one.stderr
    two = run(2, tmp_path / "d2", 0, 6, "-", tmp_path)
    assert two.returncode == 0, two.stderr
    assert (tmp_path / "d2" / "rank0").is_dir()
    assert (tmp_path / "d2" / "rank1").is_dir()
    expected = torch.load(tmp_path / "w1.pt")
    assert_close(torch.load(tmp_path / "w2.pt"), expected)

    # One of two ranks is killed in a later step; the checkpoint of both goes on with one.
    killed = run(2, tmp_path / "d3", 0, 5, "-", tmp_path / "killed", "kill")
    assert killed.returncode != 0
    saved = tmp_path / "killed" / "checkpoint-2"
    assert len(list(saved.glob("*.safetensors"))) == 2
    resumed = run(1, tmp_path / "d4", 3, 6, saved, tmp_path / "killed")
    assert resumed.returncode == 0, resumed.stderr
    assert_close(torch.load(tmp_path / "killed" / "w1.pt"), expected)


if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)
