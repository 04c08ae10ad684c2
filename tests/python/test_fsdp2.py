"""Parameters that fully_shard (FSDP2) has divided among two ranks on gloo, against one process and against torch."""

import json
import pathlib
import subprocess
import sys

import pytest
import torch
from nightly import nightly
from test_ranks import assert_same

WORKER = str(pathlib.Path(__file__).with_name("fsdp2_worker.py"))
STEPS = 6

pytest.importorskip("torch.distributed.fsdp", reason="this torch has no FSDP")
if not hasattr(torch.distributed.fsdp, "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)


@pytest.fixture(scope="module")
def run():
    """run(world, folder, **job): see fsdp2_worker.py. Returns what the ranks made."""
    server = subprocess.Popen([sys.executable, WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(world, folder, expect_death=False, **job):
        folder.mkdir(exist_ok=True)
        job = {"devices": str(folder / "devices"), "results": str(folder), "last": STEPS, "world": world, **job}
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        outcome = int(server.stdout.readline().split()[1])
        assert outcome == (9 if expect_death else 0)
        return None if expect_death or "check" in job else torch.load(folder / f"w{world}.pt")

    yield run
    server.stdin.close()
    server.wait(timeout=600)


def assert_close(a, b, most=1e-6):
    for name, value in a["model"].items():
        apart = (value.float() - b["model"][name].float()).abs().max()
        assert apart < most, f"{name}: apart by up to {apart}"


@pytest.fixture(scope="module")
def plain(run, tmp_path_factory):
    """One process with whole parameters and made up gradients."""
    return run(1, tmp_path_factory.mktemp("plain"), kind="plain", given=True)


@pytest.mark.parametrize("world", [1, 2])
def test_the_bits_of_one_process_with_whole_parameters(run, world, plain, tmp_path):
    made = run(world, tmp_path, given=True)
    assert_same(made, plain)
    assert_close({"model": {"norm": torch.tensor(made["norms"])}}, {"model": {"norm": torch.tensor(plain["norms"])}})


@pytest.mark.parametrize("how", [{}, {"offload": True, "passes": 2}, {"mixed": True}])
def test_beside_torch_over_the_same_divided_model(run, how, tmp_path):
    """With clipping in every step."""
    ours = run(2, tmp_path / "ours", clip=True, **how)
    theirs = run(2, tmp_path / "torch", clip=True, kind="torch", **how)
    assert_close(ours, theirs)
    assert all(abs(a - b) < 1e-6 * b for a, b in zip(ours["norms"], theirs["norms"], strict=True))
    assert min(ours["norms"]) > 0.05


def test_weights_that_somebody_writes_are_taken_over(run, plain, tmp_path):
    job = {"given": True, "halve_after": 3}
    made = run(2, tmp_path / "two", **job)
    assert_same(made, run(1, tmp_path / "one", kind="plain", **job))
    assert not torch.equal(made["model"]["0.weight"], plain["model"]["0.weight"])


@pytest.mark.parametrize("point", [nightly("update"), nightly("agree"), "commit"])
def test_a_killed_rank_costs_nothing(run, point, plain, tmp_path):
    run(2, tmp_path, expect_death=True, given=True, kill=[point, 3])
    assert_same(run(2, tmp_path, given=True), plain)


def test_a_checkpoint_goes_on_with_other_numbers_of_ranks(run, plain, tmp_path):
    """Two ranks, one, two, and whole parameters: in two ranks, then in one."""
    run(2, tmp_path / "a", given=True, last=1, save_after=1)
    run(1, tmp_path / "b", given=True, last=2, load=str(tmp_path / "a/checkpoint"), save_after=2)
    run(2, tmp_path / "c", given=True, last=3, load=str(tmp_path / "b/checkpoint"), save_after=3)
    run(2, tmp_path / "d", kind="plain", given=True, last=4, load=str(tmp_path / "c/checkpoint"), save_after=4)
    run(2, tmp_path / "e", given=True, last=5, load=str(tmp_path / "d/checkpoint"), save_after=5)
    assert_same(run(1, tmp_path / "f", kind="plain", given=True, load=str(tmp_path / "e/checkpoint")), plain)
    assert_same(run(2, tmp_path / "e", given=True), plain)


def test_distributed_checkpoint_goes_on_with_other_numbers_of_ranks(run, plain, tmp_path):
    run(2, tmp_path / "a", given=True, last=2, dcp_after=2)
    run(1, tmp_path / "b", given=True, last=4, dcp_from=str(tmp_path / "a/dcp"), dcp_after=4)
    assert_same(run(2, tmp_path / "c", given=True, dcp_from=str(tmp_path / "b/dcp")), plain)


def test_distributed_checkpoint_keeps_the_master_weights_of_bf16(run, tmp_path):
    job = {"given": True, "dtype": "bfloat16"}
    whole = run(2, tmp_path / "a", dcp_after=3, **job)
    assert_same(run(2, tmp_path / "b", dcp_from=str(tmp_path / "a/dcp"), **job), whole)
    assert_same(run(1, tmp_path / "c", kind="plain", **job), whole)


def test_compressed_gradients_go_on_from_a_checkpoint(run, tmp_path):
    job = {"given": True, "options": {"compress": {"density": 0.1, "residual_every": 1}}}
    whole = run(2, tmp_path / "a", save_after=3, **job)
    assert_same(run(2, tmp_path / "b", load=str(tmp_path / "a/checkpoint"), **job), whole)


def test_a_parameter_is_added(run, plain, tmp_path):
    made = run(2, tmp_path, given=True, add_after=3)
    assert_same(made, plain)


def test_every_form_of_state_dict_is_given_and_taken(run, tmp_path):
    run(2, tmp_path, check="state_dicts")


def test_state_on_the_devices_is_taken_over_by_a_state_dict_alone(run, tmp_path):
    run(2, tmp_path, check="unclaimed")


def test_one_ranks_infinity_stops_the_step_of_all(run, tmp_path):
    run(2, tmp_path, check="not_finite")


def test_the_stages_of_a_pipeline_have_states_of_their_own(run, tmp_path):
    run(4, tmp_path, check="stages")


def test_what_is_divided_in_another_way_is_refused_by_name(run, tmp_path):
    run(2, tmp_path, check="refusals")


def test_gradients_that_leave_in_backward_give_the_same_bits(run, tmp_path):
    run(2, tmp_path, check="released")
