"""smartinf.offload_activations: what autograd keeps for backward lies on devices until it is wanted."""

import logging
import os
import shutil
import time

import torch

from smartinf import _core
from smartinf.errors import UsageError
from smartinf.sizes import parse_bytes
from smartinf.storage_options import device_list, local_paths
from smartinf.spooled_tensors import SpooledTensors, plain, storage_key

_log = logging.getLogger("smartinf")


class Counts:
    """Sums since the beginning. Bytes of storages, each once for each time that it was saved."""

    def __init__(self):
        self.saved_bytes = 0  # all that is not a parameter, a buffer or small
        self.kept_bytes = 0  # of them, what stayed in memory
        self.written_bytes = 0  # to the devices
        self.handed_over_bytes = 0  # wanted back before their memory was used again
        self.read_bytes = 0  # from the devices
        self.waited_s = 0.0  # by backward, for the devices
        self.waited_to_write_s = 0.0  # by forward, for a buffer

    def __repr__(self):
        return "Counts(" + ", ".join(f"{name}={value}" for name, value in vars(self).items()) + ")"


class KeepRule:
    """What stays in memory. keep: "auto"; a share of the bytes, from 0 to 1; or bytes, above 1.

    With "auto" a tensor stays where there is no buffer for it at the moment, because the devices are behind with
    writing; and if backward waits for reading, as much less goes away as it waited for. Otherwise tensors that go away
    and tensors that stay alternate evenly, and forward waits for buffers."""

    _STEPS = 4  # that it learns from, but for the first one, in which all memory is new
    _WAITED = 0.02  # of a step, which is not worth less offloading

    def __init__(self, keep, clock=time.perf_counter):
        self._clock = clock
        self.waits = keep != "auto"
        self.share = 1.0  # of the bytes that go away
        self._bytes = None
        self._steps = 0
        self._decided = False
        self._begun = None
        if self.waits:
            number = _keep_number(keep)
            if number <= 1:
                self.share = 1.0 - number
            else:
                self._bytes = int(number)

    def step_begins(self, counts):
        self._seen = self._away = 0
        self._begun = self._clock()
        self._backward = self._ended = None
        self._before = dict(vars(counts))

    def offload(self, size):
        """Whether the next storage goes away."""
        if self._bytes is not None and self._steps == 0:  # how much there will be is not known yet
            return self._seen - self._away + size > self._bytes
        return self._away + size <= self.share * (self._seen + size) + 0.5

    def stored(self, size, kept):
        self._seen += size
        self._away += 0 if kept else size

    def brought_back(self):
        self._ended = self._clock()
        if self._backward is None:
            self._backward = self._ended

    def step_ended(self, counts):
        """No graph holds anything of the step any more."""
        if self._begun is None or self._ended is None or self._seen == 0:
            return
        step = {name: value - self._before[name] for name, value in vars(counts).items()}
        seconds, self._begun = self._ended - self._begun, None
        self._steps += 1
        if self._bytes is not None:
            self.share = max(0.0, 1.0 - self._bytes / self._seen)
        if self._decided or self._steps == 1:
            return
        if self.waits or step["waited_s"] <= self._WAITED * seconds or self._steps == self._STEPS:
            self._decided = True
            _log.info(
                "activations: of %.0f MiB that a step saves, %.0f MiB go to the devices; %.0f MiB of these are wanted "
                "back before they have left memory. Backward waited %.2f s of a step of %.2f s",
                *(step[name] / 2**20 for name in ("saved_bytes", "written_bytes", "handed_over_bytes")),
                step["waited_s"],
                seconds,
            )
            return
        late = step["waited_s"] / max(self._ended - self._backward, 1e-9)  # of what was read
        self.share = max(0.0, (self._away - late * step["read_bytes"]) / self._seen)


def _keep_number(keep):
    if isinstance(keep, str):
        return max(2, parse_bytes(keep, "keep"))
    if isinstance(keep, bool) or not isinstance(keep, (int, float)) or not keep >= 0:
        raise UsageError(f'keep={keep!r}: known are "auto", a share from 0 to 1, and bytes, as in keep="2GiB"')
    return keep


class offload_activations:  # noqa: N801 (used like a function)
    """A context in which what autograd saves for backward goes to devices, and comes back for backward.

    model:         whose parameters and buffers stay where they are
    devices:       directories, one for each drive, in which no optimizer's state lies. Nothing is left in them
    keep:          what stays in memory: "auto" (what the devices have no time for), a share from 0 to 1, or bytes
    memory_budget: for buffers on the way to the devices and back
    storage:       room that is taken on the devices while it is open, at most half of what is free there

    `counts` says what has moved. See docs/python.md."""

    def __init__(self, model, devices, *, keep="auto", memory_budget="512MiB", storage="16GiB"):
        if not isinstance(model, torch.nn.Module):
            raise UsageError(f"model={type(model).__name__}: give the module whose activations go to the devices")
        self._model = model
        self._devices = devices if hasattr(devices, "spool") else device_list(devices)  # spool: of an open core
        self._rule = KeepRule(keep)
        self._memory = parse_bytes(memory_budget, "memory_budget")
        self._storage = parse_bytes(storage, "storage")
        self.counts = Counts()
        self._hooks = self._tensors = None

    def __enter__(self):
        if self._hooks is not None:
            raise UsageError("this context is entered already; make another one")
        spool, owned = self._open_spool()
        devices = (p.device for p in self._model.parameters() if p.device.type not in ("cpu", "meta"))
        device = next(devices, None)
        self._tensors = SpooledTensors(spool, owned, self._memory, device, self._keys, self._rule, self.counts)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._tensors.pack, self._tensors.unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, kind, error, trace):
        self._hooks.__exit__(kind, error, trace)
        tensors, self._tensors, self._hooks = self._tensors, None, None
        try:
            tensors.leave()
        except Exception:
            if error is None:  # else that one is raised
                raise

    def _keys(self):
        """Of the storages that stay. A step's weights may lie elsewhere than the last one's."""
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            if plain(tensor):
                yield storage_key(tensor)

    def _open_spool(self):
        """(_core.Spool, whether it is this context's own)."""
        if hasattr(self._devices, "spool"):
            return self._devices.spool(), False
        devices = self._devices
        for path in local_paths(devices, "activations"):
            os.makedirs(path, exist_ok=True)
        drives = {os.stat(device["path"]).st_dev: shutil.disk_usage(device["path"]).free for device in devices}
        room = min(self._storage, sum(drives.values()) // 2)
        return _core.Spool({"devices": devices, "spool_bytes": room}), True
