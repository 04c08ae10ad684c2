"""One rank of test_fsdp2.py: trains a model that fully_shard has divided, and leaves weights and state behind.

Takes one JSON object a line, starts as many ranks as its "world" says by fork (which spares them torch's import), and
prints the number of the signal that ended one of them, or 0.

  check              a function of this file instead of a training
  devices, results   folders
  last               steps in all; those that the devices hold are not repeated
  kind               "plain": the model as it is, for comparison; "torch": torch.optim.AdamW over the divided model
  given              gradients are made up, and the same for any number of ranks, instead of coming from a loss
  dtype, mixed       of the parameters; bf16 in forward and backward
  offload            CPUOffloadPolicy
  passes             backward passes of a step
  clip               by max_grad_norm, or torch's clip_grad_norm_
  halve_after        updates after which somebody writes the weights
  save_after, load   updates after which a checkpoint is saved; one to begin from
  dcp_after, dcp_from    the same with torch.distributed.checkpoint; dcp_options are get_optimizer_state_dict's
  add_after          updates after which a parameter without a gradient is added
  kill               see ranks_worker.py
  options            of the optimizer
"""

import os

import pytest
import torch
import torch._dynamo  # fully_shard imports it: here once for all ranks
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks_worker import plan_death, serve
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import smartinf
import smartinf.optimizers

torch.set_num_threads(1)

LR, EPS, CLIP = 1e-2, 1e-4, 0.05  # for eps see ranks_worker.py
GLOBAL_BATCH = 8


def make_model(seed=4, dtype=torch.float32):
    """Rows that two ranks cannot share evenly, and one that the last rank has nothing of."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(20, 31), torch.nn.Tanh(), torch.nn.Linear(31, 5), torch.nn.Linear(5, 1)]
    return torch.nn.Sequential(*layers).to(dtype)


def divide(model, job):
    options = {}
    if job.get("mixed"):
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if job.get("offload"):
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def give_gradients(model, step):
    for i, param in enumerate(model.parameters()):
        seed = torch.Generator().manual_seed(100 * step + i)
        grad = torch.randn(param.shape, generator=seed).to(param.dtype)
        if isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, param.placements)
        param.grad = grad


def backward(model, step, passes):
    rank, world = dist.get_rank(), dist.get_world_size()
    for micro in range(passes):
        seed = torch.Generator().manual_seed(10 * step + micro)
        x = torch.randn(GLOBAL_BATCH, 20, generator=seed).to(next(model.parameters()).dtype)
        share = x[rank * GLOBAL_BATCH // world : (rank + 1) * GLOBAL_BATCH // world]
        (model(share).float().pow(2).mean() / passes).backward()


def make_optimizer(model, job):
    if job.get("kind") == "torch":
        return torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)
    clip = {"max_grad_norm": CLIP} if job.get("clip") else {}
    return smartinf.AdamW(
        model.named_parameters(),
        lr=LR,
        eps=EPS,
        devices=[job["devices"]],
        **{"resume": True, **clip, **job.get("options", {})},
    )


def save_dcp(model, optimizer, folder):
    weights, state = dcp_state.get_state_dict(model, optimizer)
    for name, param in model.named_parameters():
        entry = state["state"][name]
        assert all(value.placements == param.placements for key, value in entry.items() if key != "step")
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load_dcp(model, optimizer, folder):
    weights, state = dcp_state.get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    dcp_state.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def same_on_all_ranks(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert all(other == values[0] for other in values), values


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(job):
    ours = job.get("kind") != "torch"
    fresh = 7 if "load" in job or "dcp_from" in job else 4  # what is loaded counts
    model = make_model(fresh, getattr(torch, job.get("dtype", "float32")))
    if job.get("kind") != "plain":
        divide(model, job)
    optimizer = make_optimizer(model, job)
    if "load" in job:
        optimizer.load_checkpoint(job["load"])
    if "dcp_from" in job:
        load_dcp(model, optimizer, job["dcp_from"])
    if "kill" in job and dist.get_rank() == dist.get_world_size() - 1:
        plan_death(optimizer, *job["kill"])
    step = job.get("first", 0) if not ours else max(optimizer._session.lineage.steps)
    norms = []
    while step < job["last"]:
        if job.get("given"):
            give_gradients(model, step)
        else:
            backward(model, step, job.get("passes", 1))
        if job.get("clip") and not ours:
            norms.append(full(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)).item())
        optimizer.step()
        if ours:
            same_on_all_ranks(optimizer.grad_norm)
            norms.append(optimizer.grad_norm)
        optimizer.zero_grad()
        step += 1
        if step == job.get("halve_after"):
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.5)
        if step == job.get("save_after"):
            optimizer.save_checkpoint(os.path.join(job["results"], "checkpoint"))
        if step == job.get("dcp_after"):
            save_dcp(model, optimizer, os.path.join(job["results"], "dcp"))
        if step == job.get("add_after"):
            late = distribute_tensor(torch.ones(9), model[0].weight.device_mesh, [Shard(0)])
            optimizer.add_param_group({"params": [("late", torch.nn.Parameter(late))]})
    made = {"model": {name: full(param.detach()) for name, param in model.named_parameters()}, "norms": norms}
    if ours:
        made["optimizer"] = optimizer.full_state_dict()
        optimizer.close()
    if dist.get_rank() == 0:
        torch.save(made, os.path.join(job["results"], f"w{dist.get_world_size()}.pt"))


def one_step(job, **options):
    """A divided model after one step, with its optimizer."""
    model = divide(make_model(), job)
    optimizer = make_optimizer(model, {**job, "options": options})
    give_gradients(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def assert_same_state(a, b):
    assert a["state"].keys() == b["state"].keys()
    for number, entry in a["state"].items():
        for key, value in entry.items():
            assert torch.equal(full(value), full(b["state"][number][key])), (number, key)


# ---- Checks.


def state_dicts(job):
    """Every form of torch.distributed.checkpoint, of torch.optim.AdamW's, and back."""
    model, optimizer = one_step(job)
    state = optimizer.state_dict()
    assert sorted(state["state"]) == list(range(6))
    assert bool(optimizer.state)
    assert list(optimizer.state[model[0].weight]) == ["step", "exp_avg", "exp_avg_sq"]
    with pytest.raises(smartinf.UsageError, match="full_state_dict"):
        optimizer.state[model[0].weight]["exp_avg"]
    whole = optimizer.full_state_dict()
    assert_same_state(whole, state)

    theirs = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)
    theirs.load_state_dict(state)
    assert_same_state(theirs.state_dict(), whole)
    forms = [
        dcp_state.StateDictOptions(),
        dcp_state.StateDictOptions(flatten_optimizer_state_dict=True),
        dcp_state.StateDictOptions(full_state_dict=True),
        dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True),
    ]
    given = [dcp_state.get_optimizer_state_dict(model, optimizer, options=form) for form in forms]
    for number, (form, one) in enumerate(zip(forms, given, strict=True)):
        devices = f"{job['devices']}-{number}"
        with make_optimizer(model, {"devices": devices}) as other:
            dcp_state.set_optimizer_state_dict(model, other, one, options=form)
            assert_same_state(other.full_state_dict(), whole)
    with make_optimizer(model, {"devices": f"{job['devices']}-torch"}) as other:
        other.load_state_dict(theirs.state_dict())
        assert_same_state(other.full_state_dict(), whole)
        other.load_state_dict(whole)
        assert_same_state(other.full_state_dict(), whole)
    optimizer.close()


def unclaimed(job):
    """State on the devices that nobody has said is meant."""
    model, optimizer = one_step(job)
    saved = optimizer.state_dict()
    optimizer.close()
    with make_optimizer(model, {**job, "options": {"resume": None}}) as other:
        other.load_state_dict(other.state_dict())  # as Accelerate does it
        give_gradients(model, 1)
        with pytest.raises(smartinf.UsageError, match="not taken over unasked"):
            other.step()
        other.zero_grad()
        dcp_state.set_optimizer_state_dict(model, other, dict_by_names(model, saved))
        give_gradients(model, 1)
        other.step()
        assert other._session.lineage.steps == [2] * 6


def not_finite(job):
    """One row, which one rank has, stops the step of both; and so does a gradient that is divided in another way."""
    model, optimizer = one_step(job)
    before = [full(param.detach()).clone() for param in model.parameters()]
    give_gradients(model, 1)
    if dist.get_rank() == 1:
        model[0].weight.grad.to_local()[0, 0] = float("inf")
    with pytest.raises(smartinf.NonFiniteGradientError):
        optimizer.step()
    assert all(torch.equal(full(a), b) for a, b in zip(model.parameters(), before, strict=True))
    model[0].weight.grad = model[0].weight.grad.redistribute(placements=[Replicate()])
    with pytest.raises(smartinf.UsageError, match="gradient of 0.weight is not divided"):
        optimizer.step()
    give_gradients(model, 2)
    optimizer.step()
    optimizer.synchronize()
    assert optimizer._session.lineage.updates == 2
    optimizer.close()


def stages(job):
    """Two stages of a pipeline, each divided among two ranks, with other parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    stage = mesh.get_local_rank("stage")
    model = torch.nn.Sequential(*make_model(), *[torch.nn.Linear(1, 3)] * stage)
    fully_shard(model, mesh=mesh["data"])
    optimizer = make_optimizer(model, {"devices": f"{job['devices']}-{stage}"})
    for step in range(2):
        give_gradients(model, step)
        optimizer.step()
    assert (optimizer._session.ranks.world, optimizer._session.lineage.steps) == (2, [2] * (6 + 2 * stage))
    optimizer.close()


def dict_by_names(model, state):
    names = [name for name, _ in model.named_parameters()]
    groups = [{**group, "params": [names[n] for n in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[n]: entry for n, entry in state["state"].items()}, "param_groups": groups}


def refusals(job):
    """What is divided in another way, by name and with advice."""

    def refused(match, params, **options):
        with pytest.raises(smartinf.UsageError, match=match):
            smartinf.AdamW(params, devices=[job["devices"]], **options)

    def linear(*sizes):
        return torch.nn.Linear(*sizes)

    mesh = init_device_mesh("cpu", (2,))
    hybrid = fully_shard(linear(4, 4), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    refused(r"parameter weight is kept by several groups.*HSDP.*mesh of one dimension", hybrid.named_parameters())
    both = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1, 2)), [Shard(0), Shard(1)])
    refused("several dimensions.*tensor parallelism", [("w", torch.nn.Parameter(both))])
    columns = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
    refused("parameter w is not divided by rows", [("w", torch.nn.Parameter(columns))])
    whole = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
    refused("parameter w is a DTensor that every rank has whole", [("w", torch.nn.Parameter(whole))])
    model = linear(4, 4)
    fully_shard(model, mesh=mesh, ignored_params={model.bias})
    refused("parameter bias is whole on every rank.*optimizer of its own", model.named_parameters())
    divided = fully_shard(linear(4, 4), mesh=mesh)
    alone = [dist.new_group([r]) for r in range(2)][dist.get_rank()]
    refused("process_group has other ranks", divided.named_parameters(), process_group=alone)
    refused("overlap works in one process", divided.named_parameters(), overlap=divided)
    refused("rank 1 holds no element", fully_shard(linear(4, 1), mesh=mesh).named_parameters())

    model = linear(16, 16)
    with smartinf.AdamW(model.named_parameters(), devices=[job["devices"]]) as optimizer:
        fully_shard(model, mesh=mesh)
        optimizer.param_groups[0]["params"] = list(model.parameters())  # as Accelerate does it
        give_gradients(model, 0)
        with pytest.raises(smartinf.UsageError, match="divided by fully_shard after"):
            optimizer.step()


def released(job):
    """Gradients leave in backward, with the bits of those that stay; zero_grad() and GradScaler in between."""
    model, optimizer = one_step(job, release_gradients=True, accumulation_steps=2, max_grad_norm=CLIP)
    other = divide(make_model(), job)
    held = make_optimizer(other, {"devices": job["devices"] + "-held", "clip": True})
    give_gradients(other, 0)
    held.step()
    held.zero_grad()
    for step in range(1, 4):
        backward(model, 50 + step, 2)
        optimizer.zero_grad()
        backward(model, step, 2)
        assert all(param.grad is None for param in model.parameters())
        optimizer.step()
        backward(other, step, 2)
        held.step()
        held.zero_grad()
        assert optimizer.grad_norm == held.grad_norm
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(full(a), full(b))
    scaler = torch.amp.GradScaler("cpu")
    backward(model, 9, 2)
    with pytest.raises(smartinf.UsageError, match="GradScaler"):
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
    optimizer.zero_grad()
    held.close()
    optimizer.close()


def main(job):
    dist.init_process_group("gloo")
    globals()[job["check"]](job) if "check" in job else train(job)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    serve(main)
