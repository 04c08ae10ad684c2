"""Parameters that fully_shard (FSDP2) has divided among the ranks: DTensors, of which each rank holds some rows."""

import torch
import torch.distributed as dist

from smartinf.errors import UsageError


def is_sharded(tensor):
    return hasattr(tensor, "device_mesh")


def local(tensor):
    """What this rank holds of a tensor: the rows of a DTensor, another tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def local_gradient(param, name):
    """What this rank holds of the gradient that a parameter has."""
    grad = param.grad
    if is_sharded(param) and (not is_sharded(grad) or grad.placements != param.placements):
        raise UsageError(
            f"the gradient of {name} is not divided among the ranks as the parameter is; redistribute it to the "
            "parameter's placements first"
        )
    return local(grad)


def rows_before(param):
    """Elements of a DTensor before those of this rank. Every rank but the last ones has equally many rows."""
    rows, mesh = param.shape[0], param.device_mesh
    each = -(-rows // mesh.size())
    return min(mesh.get_local_rank() * each, rows) * (param.numel() // rows)


def mesh_of(named):
    """The device mesh that parameters, (name, tensor) pairs, are divided over; None: each rank has them whole.
    The answer and the errors are the same on all ranks. Errors: UsageError that names a parameter which is divided in
    another way than over one dimension of a mesh, by rows, or which is not divided as the others are."""
    mesh = next((param.device_mesh for _, param in named if is_sharded(param)), None)
    if mesh is None:
        return None
    for name, param in named:
        if not is_sharded(param):
            raise UsageError(
                f"parameter {name} is whole on every rank, as fully_shard leaves ignored_params, and others are "
                "DTensors. Give it an optimizer of its own, over other devices and with release_gradients=True, which "
                "averages its gradient."
            )
        _check_placements(name, param)
        if param.device_mesh != mesh:
            raise UsageError(f"parameter {name} is divided over another device mesh than {named[0][0]}: use one mesh")
    last = mesh.size() - 1  # the rank that has the fewest rows
    if all(param.shape[0] <= last * -(-param.shape[0] // mesh.size()) for _, param in named):
        raise UsageError(
            f"rank {last} holds no element of any parameter: none has rows enough for {mesh.size()} ranks. Use fewer "
            "ranks, or an optimizer over more parameters."
        )
    return mesh


def _check_placements(name, param):
    placements, advice = param.placements, "Apply fully_shard over a mesh of one dimension, and nothing else."
    replicated = [placement.is_replicate() for placement in placements]
    if len(placements) > 1:
        kind = (
            "is kept by several groups of ranks, as hybrid sharding (HSDP) does it; each group would update a state of "
            "its own"
            if any(replicated)
            else "is divided over several dimensions of its device mesh, as FSDP2 and tensor parallelism do it together"
        )
    elif any(replicated):
        kind = "is a DTensor that every rank has whole, as tensor parallelism leaves norms and biases"
    elif not placements[0].is_shard(0):
        kind = "is not divided by rows (Shard(0)) but in another way, by tensor parallelism or a shard_placement_fn"
    else:
        each = -(-param.shape[0] // param.device_mesh.size())
        expected = min(each, max(param.shape[0] - param.device_mesh.get_local_rank() * each, 0))
        if local(param).shape[0] == expected:
            return
        kind = "has other numbers of rows on the ranks than fully_shard gives them"
    raise UsageError(f"parameter {name} {kind}. These optimizers cannot work with that. {advice}")


def process_group(mesh, given):
    """The ranks that parameters are divided among. given: the optimizer's process_group, or None."""
    group = mesh.get_group()
    if given is not None and dist.get_process_group_ranks(given) != dist.get_process_group_ranks(group):
        raise UsageError(
            "process_group has other ranks than the device mesh that the parameters are divided over: leave it out"
        )
    return group


def sharded_like(param, values):
    """A DTensor in CPU memory, divided as `param` is, of this rank's `values` [its rows, ...]."""
    made = torch.empty_like(param, dtype=values.dtype, device="cpu", requires_grad=False)
    local(made).copy_(values)
    return made
