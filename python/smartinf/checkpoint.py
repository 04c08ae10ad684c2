"""The whole state in a folder, streamed.

    index.json                     rule, lineage, parameters, files; written last
    state-00000-of-00002.safetensors   one per rank that wrote: "master.<range>", "exp_avg.<range>", ...

A range is a parameter, or its part "name[start:stop]" where a rank owned only that. Any safetensors
reader opens the files.
"""

import json
import mmap
import os
import struct

import torch

from smartinf.errors import CorruptError, DeviceError, MismatchError
from smartinf.lineage import Lineage
from smartinf.progress import progress

_FORMAT = 1
_INDEX = "index.json"


def _plane_names(optimizer):
    return ("master", *optimizer._state_keys)


def save(optimizer, folder, replace=False):
    ranks, layout = optimizer._ranks, optimizer._layout
    folder = os.fspath(folder)
    os.makedirs(folder, exist_ok=True)
    there = os.path.exists(os.path.join(folder, _INDEX))
    ranks.barrier()
    if there and not replace:
        raise DeviceError(f"{folder} holds a checkpoint already; give another folder or replace=True")
    if there and ranks.rank == 0:
        # The index goes first: from here on the folder is seen to be incomplete.
        os.unlink(os.path.join(folder, _INDEX))
        for name in os.listdir(folder):
            if name.startswith("state-") and name.endswith(".safetensors"):
                os.unlink(os.path.join(folder, name))
    ranks.barrier()
    name = f"state-{ranks.rank:05d}-of-{ranks.world:05d}.safetensors"
    planes = _plane_names(optimizer)

    header, bases, offset = {}, {}, 0
    for p, plane in enumerate(planes):
        shapes = layout.range_shapes()
        for segment, shape in zip(layout.segments, shapes, strict=True):
            end = offset + 4 * segment.count
            header[f"{plane}.{layout.range_name(segment)}"] = {
                "dtype": "F32",
                "shape": shape,
                "data_offsets": [offset, end],
            }
            bases[p, segment.index] = offset
            offset = end
    residual = optimizer._residual()
    if residual is not None:
        for segment, shape in zip(layout.segments, layout.range_shapes(), strict=True):
            end = offset + 2 * segment.count
            header[f"residual.{layout.range_name(segment)}"] = {
                "dtype": "BF16",
                "shape": shape,
                "data_offsets": [offset, end],
            }
            offset = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data_from = 8 + len(text)

    path = os.path.join(folder, name)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        _write(file, struct.pack("<Q", len(text)) + text, 0, path)
        with progress("Saving optimizer state", layout.owned[1] - layout.owned[0], ranks.rank) as bar:

            def visit(first, count, views):
                for segment, start, stop, at in optimizer._pieces(first, count):
                    for p, view in enumerate(views):
                        where = data_from + bases[p, segment.index] + 4 * (start - segment.start)
                        _write(file, view[at : at + stop - start].cast("B"), where, path)
                bar.update(count)

            optimizer._core.read_state((1 << len(planes)) - 1, visit)
            if residual is not None:  # segments lie in the space as in the file
                _write(file, optimizer._residual_memory(), data_from + offset - 2 * len(residual), path)
        os.fsync(file)
    except OSError as error:
        if isinstance(error, DeviceError):
            raise
        raise DeviceError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        os.close(file)

    mine = {"file": name, "ranges": [[s.param, s.start, s.stop] for s in layout.segments]}
    files = [mine]
    if ranks.world > 1:
        files = [None] * ranks.world
        torch.distributed.all_gather_object(files, mine, group=ranks._group)
    if ranks.rank == 0:
        index = {
            "format": _FORMAT,
            "rule": optimizer._rule,
            "planes": planes,
            "residual": residual is not None,
            "step_ahead": optimizer._core.step_ahead(),  # by parameter
            "lineage": optimizer._lineage.to_json(),
            "parameters": [
                [name, list(param.shape)]
                for name, param in zip(layout.names, layout.params, strict=True)
            ],
            "files": files,
        }
        temporary = os.path.join(folder, _INDEX + ".new")
        with open(temporary, "w", encoding="utf-8") as out:
            json.dump(index, out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, os.path.join(folder, _INDEX))
    ranks.barrier()


def _write(file, data, offset, path):
    data = memoryview(data)
    while data:
        written = os.pwrite(file, data, offset)
        data = data[written:]
        offset += written


def read_index(folder):
    """Errors: DeviceError without one, CorruptError for one that save() did not write."""
    path = os.path.join(os.fspath(folder), _INDEX)
    try:
        with open(path, encoding="utf-8") as file:
            index = json.load(file)
    except FileNotFoundError:
        raise DeviceError(
            f"{folder} holds no complete optimizer checkpoint ({_INDEX} is missing): it was interrupted "
            "while it was written, or it was saved without smartinf's callback. Use the one before it."
        ) from None
    except ValueError as error:
        raise CorruptError(f"{path} is damaged: {error}") from error
    if index.get("format") != _FORMAT:
        raise MismatchError(f"{path} has format {index.get('format')}, this version knows {_FORMAT}")
    return index


def identity(folder):
    """Which state it holds, as in a small state dict."""
    index = read_index(folder)
    lineage = Lineage.from_json(index["lineage"], len(index["parameters"]), folder)
    return lineage.identity()


class _Source:
    """The ranges of one parameter in the files: read-only views of mapped memory."""

    def __init__(self):
        self.parts = []  # (start, stop, {plane: f32 tensor})

    def copy(self, plane, start, stop, out, name):
        done = start
        for low, high, planes in self.parts:
            a, b = max(start, low), min(stop, high)
            if a < b:
                out[a - start : b - start].copy_(planes[plane][a - low : b - low])
                done += b - a
        if done != stop:
            raise CorruptError(f"the checkpoint lacks elements of {plane} of {name}")


def load(optimizer, folder, strict):
    """strict: every parameter must be there. Otherwise one that is not keeps what the optimizer has.
    Parameters are matched by name."""
    layout, ranks = optimizer._layout, optimizer._ranks
    index = read_index(folder)
    if index["rule"] != optimizer._rule:
        raise MismatchError(f"{folder} holds state of {index['rule']}, this optimizer is {optimizer._rule}")
    stored = Lineage.from_json(index["lineage"], len(index["parameters"]), folder)
    expected = optimizer._expected
    if expected is not None and expected != stored.identity():
        raise MismatchError(
            f"{folder} holds update {stored.updates} of run {stored.run[:8]}, but the state dict that was "
            f"loaded belongs to update {expected['updates']} of run {expected['run'][:8]}"
        )
    there = {name: (i, shape) for i, (name, shape) in enumerate(index["parameters"])}
    lineage = Lineage(len(layout.params))
    lineage.run, lineage.branch, lineage.updates = stored.run, stored.branch, stored.updates
    lineage.branch_next = True
    wanted = {}
    for i, (name, param) in enumerate(zip(layout.names, layout.params, strict=True)):
        if name not in there:
            if strict:
                raise MismatchError(f"{folder} holds no state of parameter {name}: it is of another model")
            continue
        number, shape = there[name]
        if shape != list(param.shape):
            raise MismatchError(f"{name} is {shape} in {folder} and {list(param.shape)} here")
        wanted[number] = i
        lineage.steps[i] = stored.steps[number]
    if strict and len(there) != len(layout.params):
        missing = sorted(set(there) - set(layout.names))[0]
        raise MismatchError(f"{folder} holds state of {missing}, which this optimizer does not have")

    sources = {i: _Source() for i in wanted.values()}
    for entry in index["files"]:
        _map(os.path.join(folder, entry["file"]), entry["ranges"], index, wanted, sources)
    planes_here = _plane_names(optimizer)
    with progress("Loading optimizer state", layout.owned[1] - layout.owned[0], ranks.rank) as bar:

        def edit(segment, start, stop, planes):
            source = sources.get(segment.param)
            bar.update(stop - start)
            if source is None:
                return False
            for plane, out in zip(planes_here, planes, strict=True):
                source.copy(plane, start, stop, out, layout.names[segment.param])
            return True

        residual = optimizer._no_residual()
        if residual is not None:
            for segment in layout.segments:
                source = sources.get(segment.param)
                if source is not None and index.get("residual"):
                    out = residual[segment.first : segment.first + segment.count]
                    name = layout.names[segment.param]
                    source.copy("residual", segment.start, segment.stop, out, name)
        optimizer._edit(edit, lineage, residual, _ahead(optimizer, index, wanted))
    optimizer._undecided = False
    optimizer._expected = None
    optimizer._take_weights()


def _ahead(optimizer, index, wanted):
    """The core's step_ahead() for what the checkpoint kept; a parameter that it lacks has no rate."""
    here = optimizer._core.step_ahead()
    if not here or not index.get("residual"):
        return ()
    there = index.get("step_ahead", [])
    ahead = [(0.0, 1.0, 0.0)] * len(here)
    for number, i in wanted.items():
        if number < len(there):
            ahead[i] = tuple(there[number])
    return ahead


def _map(path, ranges, index, wanted, sources):
    try:
        with open(path, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        (length,) = struct.unpack("<Q", memory[:8])
        header = json.loads(memory[8 : 8 + length])
    except FileNotFoundError:
        raise DeviceError(f"{path} is missing: the checkpoint is incomplete") from None
    except (ValueError, struct.error) as error:
        raise CorruptError(f"{path} is damaged: {error}") from error
    for number, start, stop in ranges:
        i = wanted.get(number)
        if i is None:
            continue
        name, shape = index["parameters"][number]
        count = 1
        for size in shape:
            count *= size
        range_name = name if stop - start == count else f"{name}[{start}:{stop}]"
        planes = {}
        kept = ["residual"] if index.get("residual") else []
        for plane in [*index["planes"], *kept]:
            width = 2 if plane == "residual" else 4
            entry = header.get(f"{plane}.{range_name}")
            if entry is None:
                raise CorruptError(f"{path} lacks {plane}.{range_name}")
            low, high = (8 + length + offset for offset in entry["data_offsets"])
            if high > len(memory) or high - low != width * (stop - start):
                raise CorruptError(f"{path} is too short for {plane}.{range_name}: the copy is incomplete")
            dtype = torch.bfloat16 if plane == "residual" else torch.float32
            planes[plane] = torch.frombuffer(memory, dtype=dtype, count=stop - start, offset=low)
        sources[i].parts.append((start, stop, planes))
