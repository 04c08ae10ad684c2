"""The whole state in a folder: copies of the devices' stores, as `smartinf checkpoint` writes them.

    checkpoint.json              run, step, devices; with a checksum; written last
    device-0, device-1, ...      stores, every block with a checksum

Several ranks: rank-0, rank-1 and so on, each of them such a folder, and a checkpoint.json that says which
belong together. Each part names its ranges: a parameter, or elements of it, as "weight[0:4096]".
"""

import contextlib
import json
import math
import operator
import os
import re

import torch

from smartinf import _core
from smartinf.errors import CorruptError, DeviceError, Error, MismatchError
from smartinf.lineage import Lineage
from smartinf.progress import progress
from smartinf.storage_options import absolute

_AT_ONCE = 1 << 20  # elements of the residual that are read at once


def save(session, groups, folder, replace=False):
    """groups: param_groups, which torch-state needs. No step is in progress. Collective."""
    ranks, layout = session.ranks, session.layout
    folder = absolute(folder)
    session.adopt_changes()
    session.write_residual(session.core)
    session.wait_commit()
    about = json.dumps(
        {
            "parameters": [
                [name, list(param.shape)]
                for name, param in zip(layout.names, layout.params, strict=True)
            ],
            "param_groups": _plain_groups(groups),
        },
        separators=(",", ":"),
    )
    owned = layout.owned_count
    with progress("Saving optimizer state", owned, ranks.rank) as bar:
        shown = 0

        def moved(done, total):
            nonlocal shown
            elements = owned * done // max(total, 1)
            bar.update(elements - shown)
            shown = elements

        if ranks.world == 1:
            try:
                session.core.save_checkpoint(folder, replace, about, moved)
            except MismatchError as error:
                raise _in_the_way(error) from None
            return
        _save_of_ranks(session, folder, replace, about, moved)


def _save_of_ranks(session, folder, replace, about, moved):
    ranks = session.ranks
    whole, place = None, None
    try:
        with ranks.failing_together():
            if ranks.rank == 0:
                try:
                    whole = _core.RanksCheckpoint.begin(folder, replace)
                except MismatchError as error:
                    raise _in_the_way(error) from None
                place = [whole.rank_folder(r) for r in range(ranks.world)]
        place = ranks.broadcast_object(place)
        with ranks.failing_together():
            session.core.save_checkpoint(place[ranks.rank], False, "", moved)
        with ranks.failing_together():
            if whole is not None:
                whole.finish(ranks.world, about)
    finally:
        del whole  # unless it is finished nothing is left of it


def _in_the_way(error):
    made = DeviceError(str(error))
    made.code, made.path, made.advice = error.code, error.path, error.advice
    return made


def _plain_groups(param_groups):
    """param_groups as in torch's state dict, as far as JSON can say it."""
    groups, numbers = [], {}
    for group in param_groups:
        plain = {}
        for key, value in group.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            with contextlib.suppress(TypeError, ValueError):
                json.dumps(value)
                plain[key] = value
        plain["params"] = [numbers.setdefault(id(param), len(numbers)) for param in group["params"]]
        groups.append(plain)
    return groups


class Stored:
    """A checkpoint opened for reading. Every block that is read is checked."""

    def __init__(self, folder):
        self.folder = absolute(folder)
        try:
            self.core = _core.Checkpoint(self.folder)
        except DeviceError as error:
            if error.code != "not found" or error.path != self.folder:
                raise
            raise self._missing(error) from None
        self.rule = self.core.rule()
        self.planes = self.core.planes()
        self._parts = self.core.parts()
        self.param_groups, self.parameters = self._described()
        self._ranges = self._ranges_of_parameters()
        self.residual = "residual" in self.planes and all(part["residual"] for part in self._parts)
        lineages = [self._lineage(part) for part in self._parts]
        self.lineage = lineages[0]
        if any(other.identity() != self.lineage.identity() for other in lineages):
            raise MismatchError(f"{self.folder}: the ranks' parts are of different updates")

    def _described(self):
        """(param_groups or None, [(name, shape)])."""
        try:
            about = json.loads(self.core.trainer() or "{}")
            groups = about.get("param_groups")
            if groups is not None:
                groups = [{**group, "params": list(map(operator.index, group["params"]))} for group in groups]
            # A checkpoint that the command made says of its parameters what the devices say.
            ranges = about.get("parameters") or self._parts[0]["ranges"]
            parameters = [(name, list(map(operator.index, shape))) for name, shape in ranges]
            if not all(isinstance(name, str) for name, _ in parameters):
                raise TypeError("a name is no text")
            return groups, parameters
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptError(f"{self.folder}: what checkpoint.json says of the parameters is damaged ({error})") from error

    def _ranges_of_parameters(self):
        """Of each parameter, in order: (first element, behind its last, part, its first in the part, its rates of
        step-ahead or None)."""
        numbers = {name: number for number, (name, _) in enumerate(self.parameters)}
        made = [[] for _ in self.parameters]
        for p, part in enumerate(self._parts):
            at = 0
            for k, (name, shape) in enumerate(part["ranges"]):
                number, start, count = numbers.get(name), 0, math.prod(shape)
                if number is None:
                    cut = re.fullmatch(r"(.*)\[(\d+):(\d+)\]", name)
                    if cut is None or cut[1] not in numbers:
                        raise CorruptError(f"{self.folder} holds elements of {name}, which it does not list")
                    number, start = numbers[cut[1]], int(cut[2])
                rates = part["ahead"][k] if k < len(part["ahead"]) else None
                made[number].append((start, start + count, p, at, rates))
                at += count
        for (name, shape), ranges in zip(self.parameters, made, strict=True):
            ranges.sort()
            ends = [0, *(stop for _, stop, *_ in ranges)]
            if [start for start, *_ in ranges] != ends[:-1] or ends[-1] != math.prod(shape):
                raise CorruptError(f"{self.folder} does not hold every element of {name} once")
        return made

    def _missing(self, error):
        if os.path.exists(os.path.join(self.folder, "index.json")):
            return MismatchError(
                f"{self.folder} was written before checkpoints had checksums (index.json beside safetensors "
                "files), and this version does not read that form. Load it with the version of smartinf that "
                "wrote it, save full_state_dict() there with torch.save, and give that to load_state_dict() "
                "here."
            )
        advice = error.advice if "beside it" in error.advice else "Use the one before it."
        return DeviceError(
            f"{self.folder} holds no complete optimizer checkpoint (checkpoint.json is missing): it was "
            f"interrupted while it was written, or it was saved without smartinf's callback. {advice}"
        )

    def _lineage(self, part):
        count = len(self.parameters)
        try:
            ours = "branch" in json.loads(part["client_metadata"])
        except (ValueError, TypeError, RecursionError):
            ours = False
        if ours:
            return Lineage.from_json(part["client_metadata"], count, self.folder)
        # Of `smartinf train`, where every step is one of all parameters.
        return Lineage(count, part["run"], updates=part["step"], steps=[part["step"]] * count)

    def check(self):
        """Reads everything. Errors: CorruptError for a damaged block."""
        self.core.check()

    def read(self, plane, number, start, stop, out):
        """Elements [start, stop) of parameter `number` into `out`, a contiguous f32 tensor."""
        for low, high, part, at, _ in self._ranges[number]:
            a, b = max(start, low), min(stop, high)
            if a < b:
                self.core.read(part, plane, at + a - low, b - a, out.data_ptr() + 4 * (a - start))

    def read_residual(self, number, start, stop, out):
        """The same of the residual, into bf16."""
        piece = torch.empty(min(_AT_ONCE, stop - start))
        for first in range(start, stop, _AT_ONCE):
            end = min(stop, first + _AT_ONCE)
            self.read(len(self.planes) - 1, number, first, end, piece)
            out[first - start : end - start].copy_(piece[: end - first])

    def ahead(self, number):
        """The factors (lr, bias, eps) by which weights are ahead of the stored ones (step-ahead)."""
        return self._ranges[number][0][4] or (0.0, 1.0, 0.0)


def identity(folder):
    """Which state it holds, as in a small state dict."""
    return Stored(folder).lineage.identity()


def identity_of_devices(paths, remote):
    """The same of devices that nobody has open; None: it is not this package's."""
    try:
        given = json.loads(_core.stored_client_metadata(paths, remote))
        return {key: given[key] for key in ("run", "branch", "updates")}
    except (Error, ValueError, KeyError, TypeError):
        return None


def load(session, folder, strict):
    """strict: every parameter must be there. Otherwise one that is not keeps what the optimizer has.
    Parameters are matched by name. Collective."""
    layout, options = session.layout, session.options
    stored = Stored(folder)
    if stored.rule != options.rule:
        raise MismatchError(f"{folder} holds state of {stored.rule}, this optimizer is {options.rule}")
    expected = session.expected
    if expected is not None and expected != stored.lineage.identity():
        raise MismatchError(
            f"{folder} holds update {stored.lineage.updates} of run {stored.lineage.run[:8]}, but the state "
            f"dict that was loaded belongs to update {expected['updates']} of run {expected['run'][:8]}"
        )
    number_of = _matched(stored, layout, strict)
    lineage = stored.lineage.continued(len(layout.params), session.ranks.broadcast_object)
    for i, number in number_of.items():
        lineage.steps[i] = stored.lineage.steps[number]
    if options.core["durability"] == "none":
        stored.check()  # what is overwritten in place cannot be aborted

    with progress("Loading optimizer state", layout.owned_count, session.ranks.rank) as bar:

        def edit(segment, start, stop, planes):
            number, offset = number_of.get(segment.param), layout.offsets[segment.param]
            bar.update(stop - start)
            if number is None:
                return False
            for plane, out in enumerate(planes):
                stored.read(plane, number, offset + start, offset + stop, out)
            return True

        residual = session.empty_residual()
        if residual is not None and stored.residual:
            for segment in layout.segments:
                number, offset = number_of.get(segment.param), layout.offsets[segment.param]
                if number is not None:
                    out = residual[segment.first : segment.first + segment.count]
                    stored.read_residual(number, offset + segment.start, offset + segment.stop, out)
        ahead = ()
        if session.core.step_ahead() and stored.residual:
            # A parameter that the checkpoint lacks has no residual, and so is not ahead.
            ahead = [
                stored.ahead(number_of[segment.param]) if segment.param in number_of else (0.0, 1.0, 0.0)
                for segment in layout.segments
            ]
        session.core.load_tables(stored.core)
        session.edit(edit, lineage, residual, ahead)
    session.claim()
    session.load_weights()


def _matched(stored, layout, strict):
    """The checkpoint's number of each of the layout's parameters that it holds, by the layout's index."""
    there = {name: (number, shape) for number, (name, shape) in enumerate(stored.parameters)}
    number_of = {}
    for i, (name, param) in enumerate(zip(layout.names, layout.params, strict=True)):
        if name not in there:
            if strict:
                raise MismatchError(
                    f"{stored.folder} holds no state of parameter {name}: it is of another model, or was saved before "
                    "add_param_group() added the parameter. Load it before that, or into an optimizer without it"
                )
            continue
        number, shape = there[name]
        if shape != list(param.shape):
            raise MismatchError(f"{name} is {shape} in {stored.folder} and {list(param.shape)} here")
        number_of[i] = number
    if strict and len(there) != len(layout.params):
        missing = sorted(set(there) - set(layout.names))[0]
        raise MismatchError(
            f"{stored.folder} holds state of {missing}, which this optimizer does not have. If it was added later, call "
            "add_param_group() first, and load the checkpoint then"
        )
    return number_of
