"""A checkpoint as the optimizer.pt of torch.optim's class of the same rule, without a model or devices."""

import os

import torch

from smartinf import checkpoint, optimizers, state_io
from smartinf.errors import DeviceError, MismatchError, UsageError
from smartinf.storage_options import absolute

_CLASSES = {kind._rule: kind for kind in (optimizers.AdamW, optimizers.Adam, optimizers.SGD, optimizers.Adagrad)}


def write(folder, out):
    """folder: of save_checkpoint(), or Trainer's checkpoint-N with smartinf/ in it. Memory: what
    torch's optimizer takes as well, 4 bytes per parameter and moment. Returns one line for people."""
    folder, out = absolute(folder), absolute(out)
    inner = os.path.join(folder, "smartinf")
    groups = None
    if os.path.isdir(inner):
        groups = _saved_groups(os.path.join(folder, "optimizer.pt"))
        folder = inner
    stored = checkpoint.Stored(folder)
    if stored.rule not in _CLASSES:
        raise MismatchError(f"{folder} holds state of {stored.rule}, which torch.optim does not have")
    groups = groups or stored.param_groups
    if groups is None:
        raise UsageError(
            f"{folder} does not say how torch numbers the parameters, since the command made it. Load it in "
            "Python (load_checkpoint), and save full_state_dict() with torch.save."
        )
    kind = _CLASSES[stored.rule]
    state = {}
    for number, at in enumerate(_numbers(stored, groups)):
        steps = stored.lineage.steps[number]
        if steps == 0:
            continue
        shape = stored.parameters[number][1]
        entry = {"step": torch.tensor(float(steps))} if kind._torch_counts_steps else {}
        for plane, key in enumerate(kind._state_keys, start=1):
            entry[key] = torch.empty(shape)
            stored.read(plane, number, 0, entry[key].numel(), entry[key])
        state[at] = entry
    made = {"state": state, "param_groups": [dict(group) for group in groups]}
    partial = f"{out}.partial"
    try:
        torch.save(made, partial)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, out)
    except OSError as error:
        raise DeviceError(f"{out} cannot be written: {error.strerror}") from error
    count = len(stored.parameters)
    line = f"{out}: update {stored.lineage.updates}, {len(state)} of {count} parameters with state"
    return line + ("; rows of tables are in the checkpoint only" if stored.core.has_tables() else "")


def _saved_groups(path):
    """Of the state dict that Trainer saved beside the checkpoint; None without one."""
    if not os.path.exists(path):
        return None
    try:
        saved = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise MismatchError(f"{path} cannot be read: {error}") from error
    if not isinstance(saved, dict):
        return None
    return state_io.state_groups(saved.get("param_groups", []))


def _numbers(stored, groups):
    """torch's number of each parameter of the checkpoint."""
    by_name = {}
    for g, group in enumerate(groups):
        for i, number in enumerate(group["params"]):
            names = group.get("param_names")
            by_name[names[i] if names else f"group{g}.param{i}"] = number
    missing = [name for name, _ in stored.parameters if name not in by_name]
    if missing:
        raise MismatchError(
            f"the saved parameter groups do not name {missing[0]}, which the checkpoint holds"
        )
    return [by_name[name] for name, _ in stored.parameters]
