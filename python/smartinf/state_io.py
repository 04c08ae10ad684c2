"""An optimizer's state as torch's dicts, and parameter by parameter. Files are checkpoint.py's."""

import torch

from smartinf import sharded_parameters
from smartinf.errors import MismatchError, UsageError
from smartinf.lineage import Lineage

_FORMAT = 1  # of the small state dict
_STEPS_MAX = 2**53  # up to which a float counts
# What stands in the small dict in place of a state, so that torch's optimizers refuse it instead of
# starting without moments. Those that count steps read "step" as a number, and their error then holds this
# text: bytes, because torch copies a str as an iterator. The others look at nothing but the number of
# groups.
_NO_STATE_TEXT = b"""no state is in this file: it is on the devices of a smartinf optimizer, and in the checkpoint \
written with this file, if there is one. What torch.optim takes is made of that checkpoint by `python -m smartinf \
torch-state`, of a live optimizer by full_state_dict()"""
_NO_STATE = "smartinf_note"


class StateOnDevices(dict):
    """What ``optimizer.state`` is: it has no entries, and asking for one is an error."""

    @staticmethod
    def refuse(*_):
        raise UsageError(
            "optimizer.state is empty: the state is on the devices. visit_full_state() shows it parameter by "
            "parameter, full_state_dict() makes a copy in memory, load_state_dict() takes such a copy, "
            "save_checkpoint() is for files. torch.distributed.checkpoint cannot save it."
        )

    __missing__ = __setitem__ = setdefault = update = refuse
    # torch.distributed.checkpoint asks this, and makes a step where there is no state.
    __bool__ = refuse


class StateOfDivided(StateOnDevices):
    """The same where fully_shard has divided the parameters. torch.distributed.checkpoint makes no step, because there
    is a state, and asks for its names (keys) parameter by parameter. It takes the state from state_dict()."""

    def __init__(self, keys):
        self._keys = keys

    def __bool__(self):
        return True

    def __getitem__(self, param):
        return _Names(self._keys)


class _Names(StateOfDivided):
    __getitem__ = StateOnDevices.refuse

    def __iter__(self):
        return iter(self._keys)


def keys_of_divided(session):
    """The names of divided_dict()'s state of each parameter. Master weights are what f32 parameters are as well."""
    options = session.options
    master = () if all(param.dtype == torch.float32 for param in session.layout.params) else ("master",)
    return (*(("step",) if options.counts_steps else ()), *master, *options.state_keys)


def divided_dict(session, made, param_groups):
    """`made`, torch's dict of an optimizer without state, with the state of every parameter, also of those that were
    never stepped: as DTensors that are divided as the parameters are. Collective."""
    made["state"], tensors = {}, {}
    layout, keys = session.layout, keys_of_divided(session)
    numbers = _torch_numbers(layout, param_groups)

    def take(i, planes):
        tensors[i] = [sharded_parameters.sharded_like(layout.params[i], plane) for plane in planes]

    session.read(take, master="master" in keys, whole=False)
    names = [key for key in keys if key != "step"]
    for i, planes in sorted(tensors.items()):
        counted = {"step": torch.tensor(float(session.lineage.steps[i]))} if "step" in keys else {}
        made["state"][numbers[i]] = counted | dict(zip(names, planes, strict=True))
    if session.unclaimed or session.expected is not None:  # see small_dict; what a checkpoint is read into is needed
        made["smartinf"] = {"format": _FORMAT, "undecided": True}
    return made


def small_dict(session, made):
    """`made`, torch's dict of an optimizer without state, with what says which state it belongs to."""
    made["state"] = {}
    updates = session.lineage.updates
    if session.stepped and not session.unclaimed:
        session.options.warn_once(
            "state_dict",
            "state_dict() holds no optimizer state: that stays on the devices, and this dict is of use "
            "only while they stand at update %d. save_checkpoint(folder) copies the state, "
            "full_state_dict() gives torch's own form in memory; with Trainer and Accelerate see "
            "smartinf.hf.",
            updates,
        )
    if session.options.counts_steps:
        made["state"] = {0: {"step": _NO_STATE_TEXT}}
    else:
        note = {**made["param_groups"][0], "params": [], _NO_STATE: _NO_STATE_TEXT}
        made["param_groups"].append(note)
    if session.expected is not None:
        refers_to = session.expected
    elif session.unclaimed:
        # Whoever loads this back, as accelerate does it, has not said that the state is meant.
        refers_to = {"undecided": True}
    else:
        refers_to = session.lineage.identity()
    made["smartinf"] = {"format": _FORMAT, **refers_to}
    return made


def state_groups(groups):
    """Without the group by which torch's own optimizers refuse a small dict."""
    return [group for group in groups if _NO_STATE not in group]


def full_dict(session, made, param_groups):
    """`made`, torch's dict of an optimizer without state, with the state. Collective."""
    tensors = {}
    session.read(tensors.__setitem__)
    numbers = _torch_numbers(session.layout, param_groups)
    made["state"] = {}
    for i, planes in sorted(tensors.items()):
        steps = session.lineage.steps[i]
        if steps > 0:
            counted = {"step": torch.tensor(float(steps))} if session.options.counts_steps else {}
            named = dict(zip(session.options.state_keys, planes, strict=True))
            made["state"][numbers[i]] = counted | named
    return made


def visit(session, given):
    if session.ranks.world > 1:
        raise UsageError("visit_full_state is for one rank; use save_checkpoint under several")
    layout, keys = session.layout, ("master", *session.options.state_keys)

    def take(i, planes):
        entry = {"step": session.lineage.steps[i], **dict(zip(keys, planes, strict=True))}
        given(layout.names[i], layout.params[i], entry)

    session.read(take, master=True)


def _torch_numbers(layout, param_groups):
    """torch's number of each parameter of the layout: its place over all groups."""
    params = [param for group in param_groups for param in group["params"]]
    return [next(n for n, p in enumerate(params) if p is param) for param in layout.params]


def without_state(state_dict):
    """What torch loads of either form. Errors: MismatchError for a small dict of another format."""
    own = state_dict.get("smartinf")
    if own is not None and own.get("format") != _FORMAT:
        raise MismatchError(f"the state dict has format {own.get('format')}, known is {_FORMAT}")
    plain = {key: value for key, value in state_dict.items() if key != "smartinf"}
    return {**plain, "param_groups": state_groups(plain["param_groups"]), "state": {}}


def check_groups(saved, here):
    """torch's own words do not say what to do. Errors: UsageError where the groups are not those that were saved."""
    sizes = [[len(group["params"]) for group in groups] for groups in (saved, here)]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"the state dict has parameter groups of {sizes[0]} parameters, and this optimizer of {sizes[1]}. Call "
            "add_param_group() as before it was saved, and load it then"
        )


def load_state(session, state_dict, param_groups):
    """What without_state() left out, of either form. Collective."""
    own = state_dict.get("smartinf")
    if own is None and state_dict.get("state"):
        _load_full(session, state_dict, param_groups)
    elif own is None:
        raise MismatchError(
            "the state dict holds no optimizer state. One that torch.optim saved before its first "
            "step is of no use here: leave it out."
        )
    elif not own.get("undecided"):  # else it was saved before it was said which state is meant
        wanted = {key: own[key] for key in ("run", "branch", "updates")}
        if wanted != session.lineage.identity():
            session.expected = wanted
            return
        take_weights = session.unclaimed
        session.claim()
        if take_weights:
            session.load_weights()


def _values_here(value, layout, i):
    """Of a tensor of state of parameter i what this process holds of that, [elements]. None: it has other elements."""
    param = layout.params[i]
    if value.numel() != param.numel():
        return None
    value = value.detach()
    if sharded_parameters.is_sharded(value):
        if layout.mesh == value.device_mesh and value.placements == param.placements:
            return sharded_parameters.local(value).reshape(-1)
        value = value.full_tensor()
    return value.reshape(-1)[layout.offsets[i] :][: layout.shapes[i].numel()]


def _load_full(session, state_dict, param_groups):
    layout, keys, state = session.layout, session.options.state_keys, state_dict["state"]
    # torch.distributed.checkpoint has names in place of numbers, in the groups' order.
    saved = [number for group in state_groups(state_dict["param_groups"]) for number in group["params"]]
    lineage = Lineage(len(layout.params), session.ranks.broadcast_object(Lineage(0).run))
    entries = {}
    for i, number in enumerate(_torch_numbers(layout, param_groups)):
        entry = state.get(saved[number])
        if entry is None:
            continue
        entries[i] = {}
        for key in ("master", *keys):
            value = entry.get(key)
            if value is None and key in ("master", "momentum_buffer"):
                continue  # torch keeps none without momentum
            if value is not None:
                entries[i][key] = _values_here(value, layout, i)
            if entries[i].get(key) is None:
                raise MismatchError(
                    f"the state dict's {key} of {layout.names[i]} is "
                    f"{'missing' if value is None else tuple(value.shape)}, expected "
                    f"{tuple(layout.params[i].shape)}: it belongs to another rule or model"
                )
        steps = float(entry.get("step", 1))
        if not 0 <= steps < _STEPS_MAX:
            raise MismatchError(f"the state dict's step of {layout.names[i]} is {steps}, which is no number of steps")
        lineage.steps[i] = int(steps)
    lineage.updates = max(lineage.steps)

    def edit(segment, start, stop, planes):
        entry = entries.get(segment.param, {})
        for key, plane in zip(("master", *keys), planes, strict=True):
            value = entry.get(key)
            if value is not None:
                plane.copy_(value[start:stop])
            elif key != "master":
                plane.zero_()
        return True

    session.edit(edit, lineage, session.empty_residual())
    session.claim()
    session.adopt_weights(range(len(layout.params)))
