"""Two ranks under torchrun on gloo, each owning half of the state, against one rank."""

import json
import pathlib
import random
import subprocess
import sys
import types

import pytest
import torch

WORKER = str(pathlib.Path(__file__).with_name("ranks_worker.py"))
STEPS = 12


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@pytest.fixture(scope="module")
def run():
    """run(world, folder, **job): see ranks_worker.py. Returns what the ranks made."""
    server = subprocess.Popen(
        [sys.executable, WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def run(world, folder, expect_death=False, torchrun=False, **job):
        folder.mkdir(exist_ok=True)
        job = {"devices": str(folder / "devices"), "results": str(folder), "last": STEPS, **job}
        job["world"] = world
        if torchrun:
            launch = [*TORCHRUN, f"--nproc-per-node={world}", WORKER, json.dumps(job)]
            done = subprocess.run(launch, capture_output=True, text=True, timeout=600)
            outcome = 9 if "Signal 9" in done.stderr else done.returncode
        else:
            server.stdin.write(json.dumps(job) + "\n")
            server.stdin.flush()
            outcome = int(server.stdout.readline().split()[1])
        assert outcome == (9 if expect_death else 0)
        return None if expect_death else torch.load(folder / f"w{world}.pt")

    yield run
    server.stdin.close()
    server.wait(timeout=600)


def assert_close(a, b):
    for name, value in a["model"].items():
        # The mean over ranks is added up in another order than the mean over the batch.
        apart = (value - b["model"][name]).abs()
        assert apart.max() < 1e-6, f"{name}: {(apart >= 1e-6).sum()} elements apart, by up to {apart.max()}"
    assert a["optimizer"]["state"].keys() == b["optimizer"]["state"].keys()
    for number, entry in a["optimizer"]["state"].items():
        other = b["optimizer"]["state"][number]
        assert entry["step"] == other["step"]
        apart = (entry["exp_avg"] - other["exp_avg"]).abs()
        assert apart.max() < 1e-8, f"momentum of {number}: apart by up to {apart.max()}"


def assert_same(a, b):
    for name, value in a["model"].items():
        assert torch.equal(value, b["model"][name]), name
    for number, entry in a["optimizer"]["state"].items():
        other = b["optimizer"]["state"][number]
        assert all(torch.equal(entry[key], other[key]) for key in entry)


@pytest.fixture(scope="module")
def one(run, tmp_path_factory):
    return run(1, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(run, tmp_path_factory):
    return run(2, tmp_path_factory.mktemp("two"), torchrun=True)


def test_two_ranks_are_one(one, two):
    assert_close(two, one)


def test_a_killed_rank_costs_nothing(run, one, two, tmp_path):
    """One of two dies while the other commits what both have prepared: both come back to that step,
    and the end is that of the undisturbed run, bit for bit."""
    run(2, tmp_path, expect_death=True, kill=["commit", 2], save_after=1)
    # Their checkpoint goes on with one rank, on its devices.
    alone = run(1, tmp_path / "one", load=str(tmp_path / "checkpoint"))
    assert_close(alone, one)
    assert_same(run(2, tmp_path), two)


def test_two_ranks_go_on_from_a_checkpoint(run, two, tmp_path):
    """And are one run from there on: what is resumed later has one history on all ranks."""
    run(2, tmp_path, last=3, save_after=2)
    saved = tmp_path / "checkpoint"
    assert sorted(path.name for path in saved.iterdir()) == ["checkpoint.json", "rank-0", "rank-1"]
    run(2, tmp_path / "on", last=4, load=str(saved))
    assert_same(run(2, tmp_path / "on"), two)


def test_two_ranks_add_a_parameter(run, two, tmp_path):
    """The state is laid out anew on both: elements change their owner, and the run goes on."""
    assert_close(run(2, tmp_path, add_after=3), two)
    assert [path.name for path in tmp_path.iterdir() if "add_param_group" in path.name] == []


@pytest.mark.nightly
@pytest.mark.parametrize("point", ["update", "agree", *["random"] * 4])
def test_a_rank_killed_at_another_moment(run, point, two, tmp_path):
    if point == "random":
        # Waits after the last step, so that death comes during training in any case.
        death = {"kill": [point, random.uniform(0, 0.3)], "stop_at": STEPS, "last": STEPS + 1}
        run(2, tmp_path, expect_death=True, torchrun=True, **death)
    else:
        run(2, tmp_path, expect_death=True, kill=[point, 3])
    assert_same(run(2, tmp_path), two)


def test_gradients_are_averaged_as_they_leave(run, tmp_path):
    """Without DistributedDataParallel, over several backward passes, scaled, one step overflowing."""
    release = {"release_gradients": True, "accumulation_steps": 2}
    expected = run(1, tmp_path / "one", passes=2)
    made = run(
        2, tmp_path / "two", ddp=False, passes=2, options=release, scaler=True, overflow_at=3
    )
    assert_close(made, expected)
    assert "unused" in made["model"]


def test_ranks_that_hold_different_steps_are_refused(tmp_path):
    from smartinf import _core
    from smartinf.errors import MismatchError
    from smartinf.ranks import Ranks

    ranks, erased = Ranks(), []
    ranks.world = 2

    def recovery(mine, others):
        ranks.all_gather_object = lambda value: [value, others] if not isinstance(value, str) else [None, None]
        ranks.raise_on_any_failure = lambda failure: None
        ranks.barrier = lambda: None
        core = types.SimpleNamespace(
            peek=lambda path: mine, erase=erased.append, recovery_step=_core.recovery_step
        )
        return ranks.recovery_step(["here"], core)

    assert recovery(None, None) is None
    assert recovery((True, 4, 5), (5, 5)) == 5  # the other has committed what is prepared here
    assert recovery((True, 5, 5), (4, 5)) == 5
    assert recovery((True, 4, 5), (4, 4)) == 4  # aborted here
    assert recovery((True, 4, 5), (4, 5)) == 5  # nobody has committed, all could
    with pytest.raises(MismatchError, match="older copy"):
        recovery((True, 3, 4), (5, 5))
    with pytest.raises(MismatchError, match="rank 1: empty"):
        recovery((True, 3, 4), None)
    assert not erased
    assert recovery((True, 0, 0), None) is None  # killed while the run was made
    assert erased == ["here"]


if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)
