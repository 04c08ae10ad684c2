"""Brings the parameters of units to memory and lets go of them again, through windows of slots over what holds them:
the file that the model was read into, and the optimizer's state once there is one."""

import collections
import contextlib
import ctypes
import threading
import time

import torch

from smartinf import _core
from smartinf.errors import UsageError
from smartinf.layout import TYPE_NAMES
from smartinf.released_parameter import ReleasedParameter, without_values

SLOTS = 3  # one in use, one whose backward follows, one read ahead
_SLOT_ALIGNMENT = 4096


class LayerStream:
    """params, names: of all streamed parameters, unit after unit. unit_of: the unit of each.

    A unit's parameters have values while somebody holds it (gather, release); otherwise they are ReleasedParameters.
    Threads: autograd's and the model's; calls take turns. Errors: of the devices, named; UsageError once it is closed.
    """

    def __init__(self, units, weights, firsts, device, shared):
        """weights: the file with the values. firsts: the element there of each parameter. shared: ids of the model's
        parameters that several units use."""
        self.units, self.shared = units, shared
        self.params, self.names, self.unit_of = [], [], []
        for u, unit in enumerate(units):
            for name, param in unit.params:
                param._smartinf = (self, len(self.params))
                self.params.append(param)
                self.names.append(name)
                self.unit_of.append(u)
        self.dtype = self.params[0].dtype
        self.device = device
        self.waited_s = 0.0  # for weights that were not there when they were used
        self._classes = [torch.nn.Parameter if isinstance(p, ReleasedParameter) else type(p) for p in self.params]
        self._turn = threading.RLock()
        self._holds = collections.Counter()  # by unit
        self._in_backward = frozenset()  # units that a backward pass holds
        self._by_storage = {}  # address of a storage -> index of the parameter that has it
        self._uses, self._last_uses, self._mode, self._joined = [], {}, None, False
        self._weights = weights
        self._read_only = _Window(self, weights.core, dict(enumerate(firsts)), 0, 0)
        self._trained = None
        for index in range(len(self.params)):
            self._release(index)

    # ---- Where values come from.

    def train_with(self, core, layout):
        """From now on parameters in `layout` are those that `core` updates."""
        with self._turn:
            self._let_go()
            firsts = {i: layout.firsts[layout.index_of[id(p)]] for i, p in enumerate(self.params)
                      if id(p) in layout.index_of}  # fmt: skip
            self._trained = _Window(self, core, firsts, layout.flat.data_ptr(), layout.resident_count) if firsts else None
            frozen = {i: f for i, f in self._read_only.firsts.items() if i not in firsts} if self._read_only else {}
            if self._read_only is None or len(frozen) < len(self._read_only.firsts):
                if self._read_only is not None:
                    self._read_only.close()
                self._read_only = _Window(self, self._weights.core, frozen, 0, 0) if frozen else None
                if not frozen:
                    self._weights.close()
            self._last_uses.clear()

    @property
    def trained(self):
        """Whether values are in an optimizer's state, and nowhere else."""
        return self._trained is not None

    def updated(self):
        """An update was started, or taken back: what is in memory is not current."""
        with self._turn:
            self._let_go()
            if self._trained is not None:
                self._trained.window.updated()

    def close_trained(self):
        """The optimizer closes: its parameters have no values until another one is made."""
        with self._turn:
            if self._trained is not None:
                self._let_go()
                self._trained.close()
                self._trained = _Closed(self._trained)

    def close(self):
        with self._turn:
            self._let_go()
            for window in (self._trained, self._read_only):
                if window is not None:
                    window.close()
            self._trained = self._read_only = None
            self._weights.close()

    # ---- Holding units.

    def begin_forward(self):
        """A pass over the model begins: its uses are likely to be those of the last one like it."""
        with self._turn:
            if self._joined:
                return
            self._end_abandoned_backward()
            if self._mode is not None and self._uses:
                self._last_uses[self._mode] = self._uses
            self._mode, self._uses = torch.is_grad_enabled(), []
            order = self._last_uses.get(self._mode)
            if order is None:
                order = list(range(len(self.units)))
                order += order[::-1] if self._mode else []
            if not self._mode:
                order = order + order  # evaluation and generation go on with the next pass
            for window in self._windows():
                window.window.start([window.index[u] for u in order if u in window.index])

    @contextlib.contextmanager
    def one_pass(self):
        """What begins within it, with gradients, is one pass together."""
        self.begin_forward()
        self._joined = True
        try:
            yield
        finally:
            self._joined = False

    def summed_later(self, param):
        """Whether its gradient comes in more parts than there are batches, until the pass together ends: that of one
        that several units use."""
        return self._joined and id(param) in self.shared

    def gather(self, unit):
        """Its parameters have values until release(), which each gather() needs."""
        with self._turn:
            if self._holds[unit] == 0:
                self._uses.append(unit)
                begin = time.monotonic()
                for window in self._windows():
                    for index, data in window.get(unit):
                        self._fill(index, data)
                self.waited_s += time.monotonic() - begin
            self._holds[unit] += 1

    def release(self, unit):
        with self._turn:
            self._holds[unit] -= 1
            if self._holds[unit] == 0:
                for window in self._windows():
                    for index in window.release(unit):
                        self._release(index)

    def enter_backward(self, units):
        """A backward pass comes to these units: it holds them, and no others, until it comes to the next or ends."""
        with self._turn:
            units = frozenset(units)
            if units <= self._in_backward:
                return
            if not self._in_backward:
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            leave, self._in_backward = self._in_backward - units, self._in_backward & units
            for unit in leave:
                self.release(unit)
            for unit in sorted(units - self._in_backward):
                self.gather(unit)
                self._in_backward |= {unit}

    def _end_backward(self):
        with self._turn:
            units, self._in_backward = self._in_backward, frozenset()
            for unit in units:
                self.release(unit)

    def _end_abandoned_backward(self):
        """One that raised has not ended."""
        if self._in_backward and torch._C._current_graph_task_id() == -1:
            self._end_backward()

    def index_of(self, param, otherwise=None):
        """Of a streamed parameter; `otherwise`: it is none of this stream."""
        stream, index = getattr(param, "_smartinf", (None, None))
        return index if stream is self else otherwise

    def read(self, index):
        """A copy of a parameter's values."""
        unit = self.unit_of[index]
        with self._turn:
            self.gather(unit)
            try:
                return self.params[index].detach().clone()
            finally:
                self.release(unit)

    def move_to(self, device):
        """The model computes on another device from now on."""
        with self._turn:
            if device == self.device:
                return
            self._let_go()
            self.device = device
            for param in self.params:
                param.__class__ = torch.nn.Parameter
                param.data = without_values(param.shape, param.dtype, device)
                param.__class__ = ReleasedParameter

    # ---- What autograd saves.

    def saved_as(self, tensor):
        """What stands for a tensor that shares memory with a parameter; None: it does not."""
        if not self._by_storage or tensor.layout is not torch.strided:
            return None
        index = self._by_storage.get(tensor.untyped_storage().data_ptr())
        if index is None:
            return None
        return _SavedView(index, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

    def restore(self, saved):
        with self._turn:
            self.enter_backward([self.unit_of[saved.index]])
            storage = self.params[saved.index].untyped_storage()
            tensor = torch.empty(0, dtype=saved.dtype, device=self.device)
            return tensor.set_(storage, saved.offset, saved.size, saved.stride)

    # ---- Parts.

    def _windows(self):
        return [window for window in (self._trained, self._read_only) if window is not None]

    def _let_go(self):
        self._end_abandoned_backward()
        for unit in [unit for unit, count in self._holds.items() if count > 0]:
            self._holds[unit] = 1
            self.release(unit)

    def _fill(self, index, data):
        param = self.params[index]
        param.__class__ = self._classes[index]
        param.data = data
        self._by_storage[data.untyped_storage().data_ptr()] = index

    def _release(self, index):
        param = self.params[index]
        if not isinstance(param, ReleasedParameter):
            self._by_storage.pop(param.untyped_storage().data_ptr(), None)
            param.data = without_values(param.shape, param.dtype, self.device)
            param.__class__ = ReleasedParameter


_SavedView = collections.namedtuple("_SavedView", ["index", "dtype", "offset", "size", "stride"])


class _Window:
    """A window over one source. firsts: {index of a parameter: its element there}; of each unit they are one span.
    index: {unit: its number in the window}."""

    def __init__(self, stream, source, firsts, resident_address, resident_count):
        self._stream, self.firsts = stream, firsts
        self._members = collections.defaultdict(list)  # by unit
        for i in firsts:
            self._members[stream.unit_of[i]].append(i)
        self.index = {unit: n for n, unit in enumerate(self._members)}
        spans = []
        for members in self._members.values():
            first = min(firsts[i] for i in members)
            end = max(firsts[i] + stream.params[i].numel() for i in members)
            spans.append((first, end - first))
        self._spans = spans
        type_name = TYPE_NAMES[stream.dtype]
        slot_bytes = _core.window_slot_bytes(source, spans, type_name)
        slot_bytes = -(-slot_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        pinned = stream.device.type == "cuda"
        self._slab = torch.empty(SLOTS * slot_bytes + _SLOT_ALIGNMENT, dtype=torch.uint8, pin_memory=pinned)
        begin = -(-self._slab.data_ptr() // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        slots = [begin + n * slot_bytes for n in range(SLOTS)]
        self.window = _core.LayerWindow(
            source, spans, type_name, slots, slot_bytes, resident_address, resident_count
        )

    def get(self, unit):
        """(index of a parameter, its values) of a unit, where the model computes, until release()."""
        number = self.index.get(unit)
        if number is None:
            return
        stream = self._stream
        address = self.window.get(number)
        for i in self._members[unit]:
            param = stream.params[i]
            offset = (self.firsts[i] - self._spans[number][0]) * stream.dtype.itemsize
            memory = (ctypes.c_char * (param.numel() * stream.dtype.itemsize)).from_address(address + offset)
            # A storage of its own: a view of the slot would have another offset in each slot.
            yield i, torch.frombuffer(memory, dtype=stream.dtype).view(param.shape).to(stream.device)

    def release(self, unit):
        number = self.index.get(unit)
        if number is None:
            return ()
        self.window.release(number)
        return self._members[unit]

    def close(self):
        self.window.close()


class _Closed:
    """In place of a window whose optimizer was closed."""

    def __init__(self, window):
        self.firsts, self._units, self.index, self.window = window.firsts, window.index, {}, self

    def get(self, unit):
        if unit in self._units:
            raise UsageError(
                "the optimizer that holds the model's weights is closed; make a new one with resume=True to go on"
            )
        return ()

    def release(self, unit):
        return ()

    def start(self, order):
        """As a window's; there is nothing to read."""

    def updated(self):
        """Likewise."""

    def close(self):
        """Likewise."""
