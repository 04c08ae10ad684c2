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
from smartinf.process_memory import PAGE, FreedMemory, aligned_memory
from smartinf.released_parameter import ReleasedParameter, set_to_itself, without_values

SLOTS = 3  # for each span of a unit: one in use, one whose backward follows, one read ahead
_GAP_ELEMENTS = 1 << 20  # that are read rather than to have another slot


class LayerStream:
    """params, names: of all streamed parameters, unit after unit. unit_of: the unit of each.

    A unit's parameters have values while somebody holds it (gather, release); otherwise they are ReleasedParameters.
    Threads: autograd's and the model's; calls take turns. Errors: of the devices, named; UsageError once it is closed.
    """

    def __init__(self, units, weights, firsts, device, shared, experts):
        """weights: the file with the values. firsts: the element there of each parameter. shared: ids of the model's
        parameters that several units use. experts: ids of those that have an expert in each row, of which only the
        rows that somebody asks for are read (read_experts)."""
        self.units, self.shared = units, shared
        self.params, self.names, self.unit_of = [], [], []
        for u, unit in enumerate(units):
            for name, param in unit.params:
                param._smartinf = (self, len(self.params))
                set_to_itself(param)
                self.params.append(param)
                self.names.append(name)
                self.unit_of.append(u)
        self.experts = frozenset(i for i, param in enumerate(self.params) if id(param) in experts)
        self._rows = {}  # index of one of these that has values: the rows that are there
        self.dtype = self.params[0].dtype
        self.device = device
        self.waited_s = 0.0  # for weights that were not there when they were used
        self._classes = [torch.nn.Parameter if isinstance(p, ReleasedParameter) else type(p) for p in self.params]
        self._turn = threading.RLock()
        self._holds = collections.Counter()  # by unit
        self._freed = FreedMemory()
        self._lingering = set()  # units that nobody holds, and that are still there
        self._in_backward = frozenset()  # units that a backward pass holds
        self._versions = {}  # index of a parameter that has values: torch's version of it
        self._generation = 0  # updates of the trained parameters
        self._by_storage = {}  # address of a storage -> index of the parameter that has it
        self._uses, self._last_uses, self._mode, self._joined = [], {}, None, False
        self._weights = weights
        self._read_only = _Window(self, weights.core, dict(enumerate(firsts)), 0, [])
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
            self._trained = _Window(self, core, firsts, layout.flat.data_ptr(), layout.kept_spans) if firsts else None
            frozen = {i: f for i, f in self._read_only.firsts.items() if i not in firsts} if self._read_only else {}
            if self._read_only is None or len(frozen) < len(self._read_only.firsts):
                if self._read_only is not None:
                    self._read_only.close()
                self._read_only = _Window(self, self._weights.core, frozen, 0, []) if frozen else None
                if not frozen:
                    self._weights.close()
            self._last_uses.clear()

    @property
    def trained(self):
        """Whether values are in an optimizer's state, and nowhere else."""
        return self._trained is not None

    @property
    def has_open_optimizer(self):
        return isinstance(self._trained, _Window)

    def updated(self, values_change=True):
        """An update was started, or taken back: what is in memory is not current. values_change: of streamed ones."""
        with self._turn:
            self._let_go()
            self._generation += values_change
            if self._trained is not None:
                self._trained.window.updated()

    def close_trained(self, core):
        """The optimizer of `core` closes: its parameters have no values until another one is made."""
        with self._turn:
            if self.has_open_optimizer and self._trained.source is core:
                self._let_go()
                self._trained.close()
                self._trained = _Closed(self._trained)

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
                window.window.start([number for u in order for number in window.numbers_of(u)])

    @contextlib.contextmanager
    def one_pass(self):
        """What begins within it, with gradients, is one pass together: units that are released stay until another one
        is wanted."""
        self.begin_forward()
        self._joined = True
        try:
            yield
        finally:
            with self._turn:
                self._joined = False
                self._drop_lingering()

    def summed_later(self, param):
        """Whether its gradient comes in more parts than there are batches, until the pass together ends: that of one
        that several units use."""
        return self._joined and id(param) in self.shared

    def gather(self, unit):
        """Its parameters have values until release(), which each gather() needs."""
        with self._turn:
            if unit in self._lingering:
                self._lingering.discard(unit)
            elif self._holds[unit] == 0:
                self._drop_lingering()
                self._uses.append(unit)
                begin = time.monotonic()
                try:
                    for window in self._windows():
                        for index, data in window.get(unit):
                            self._fill(index, data)
                except BaseException:
                    self._let_go_of(unit)
                    raise
                self.waited_s += time.monotonic() - begin
            self._holds[unit] += 1

    def release(self, unit):
        with self._turn:
            if self._holds[unit] == 0:
                return  # an update came in between
            self._holds[unit] -= 1
            if self._holds[unit] == 0 and self._joined:
                self._lingering.add(unit)
            elif self._holds[unit] == 0:
                self._let_go_of(unit)

    def read_experts(self, indices, rows):
        """Of parameters that have an expert in each row, whose unit is held: these rows have values."""
        with self._turn:
            begin = time.monotonic()
            for index in indices:
                if index not in self._rows:
                    continue  # of a copy of the module
                there = self._rows[index]
                for row in sorted(set(rows) - there):
                    for window in self._windows():
                        window.read_row(index, row, self.params[index].data[row])
                    there.add(row)
            self.waited_s += time.monotonic() - begin

    def enter_backward(self, units):
        """A backward pass comes to these units: it holds them, and no others, until it comes to the next or ends."""
        with self._turn:
            units = frozenset(units)
            if units <= self._in_backward and all(self._holds[unit] > 0 for unit in units):
                return
            if not self._in_backward:
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            leave = self._in_backward - units
            self._in_backward = frozenset(unit for unit in self._in_backward & units if self._holds[unit] > 0)
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
        """A copy of a parameter's values. Errors: UsageError where nothing holds them any more."""
        unit = self.unit_of[index]
        with self._turn:
            if not any(index in window.firsts for window in self._windows()):
                raise UsageError(f"parameter {self.names[index]} has no values: another optimizer was made without it")
            self.gather(unit)
            try:
                if index in self.experts:
                    self.read_experts([index], range(self.params[index].shape[0]))
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
        rows = frozenset(self._rows.get(index, ()))
        where = tensor.storage_offset(), tensor.size(), tensor.stride()
        return _SavedView(index, tensor.dtype, *where, rows, self._generation)

    def restore(self, saved):
        with self._turn:
            is_trained = self._trained is not None and saved.index in self._trained.firsts
            if is_trained and saved.generation != self._generation:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"parameter {self.names[saved.index]} was updated by step() since this forward. Compute the forward "
                    "again after step()."
                )
            self.enter_backward([self.unit_of[saved.index]])
            if saved.rows:
                self.read_experts([saved.index], saved.rows)
            storage = self.params[saved.index].untyped_storage()
            tensor = torch.empty(0, dtype=saved.dtype, device=self.device)
            return tensor.set_(storage, saved.offset, saved.size, saved.stride)

    # ---- Parts.

    def _windows(self):
        return [window for window in (self._trained, self._read_only) if window is not None]

    def _let_go(self):
        self._end_abandoned_backward()
        self._in_backward = frozenset()
        self._drop_lingering()
        for unit in [unit for unit, count in self._holds.items() if count > 0]:
            self._holds[unit] = 0
            self._let_go_of(unit)

    def _drop_lingering(self):
        while self._lingering:
            self._let_go_of(self._lingering.pop())

    def _let_go_of(self, unit):
        written = [i for window in self._windows() for i in window.release(unit) if self._release(i)]
        # With a block's weights go its own tensors, which leave as much or more to the heap.
        self._freed.freed(self.units[unit].elements * self.dtype.itemsize)
        if written:
            raise UsageError(
                f"parameter {self.names[written[0]]} was written while its module computed, and a streamed parameter keeps "
                "nothing of that. Write it before the model is streamed"
            )

    def _fill(self, index, data):
        param = self.params[index]
        if index in self.experts:
            self._rows[index] = set()
        param.__class__ = self._classes[index]
        param.data = data
        self._versions[index] = param._version
        self._by_storage[data.untyped_storage().data_ptr()] = index

    def _release(self, index):
        """Returns whether somebody has written to it."""
        param = self.params[index]
        if not isinstance(param, ReleasedParameter):
            written = self._versions.pop(index, param._version) != param._version
            self._by_storage.pop(param.untyped_storage().data_ptr(), None)
            param.data = without_values(param.shape, param.dtype, self.device)
            param.__class__ = ReleasedParameter
            self._rows.pop(index, None)
            return written
        return False


# rows: of a parameter with experts, those that had values. generation: of its values.
_SavedView = collections.namedtuple("_SavedView", ["index", "dtype", "offset", "size", "stride", "rows", "generation"])


class _Span:
    """Parameters of a unit that lie together in a source. members: [(index, element)], in their order."""

    def __init__(self, unit, members, count):
        self.unit, self.members, self.count, self.held = unit, members, count, False
        self.first = members[0][1]


class _Window:
    """A window over one source. firsts: {index of a parameter: its element there}. The parameters of a unit are one
    span, or several where much lies between them; each row of a parameter with experts is one of its own."""

    def __init__(self, stream, source, firsts, kept_address, kept):
        self._stream, self.source, self.firsts = stream, source, firsts
        self._members = collections.defaultdict(list)  # by unit
        self._spans = []
        self._of_unit = collections.defaultdict(list)  # numbers of spans
        self._rows = {}  # index of a parameter with experts: number of its first row
        by_unit = collections.defaultdict(list)
        for i, first in firsts.items():
            self._members[stream.unit_of[i]].append(i)
            if i not in stream.experts:
                by_unit[stream.unit_of[i]].append((first, i))
        for unit, members in by_unit.items():
            for span in _spans_of(stream, unit, sorted(members)):
                self._of_unit[unit].append(len(self._spans))
                self._spans.append(span)
        for i in sorted(stream.experts & firsts.keys()):
            self._rows[i] = len(self._spans)
            rows = stream.params[i].shape[0]
            count = stream.params[i].numel() // rows
            self._spans += [_Span(None, [(i, firsts[i] + row * count)], count) for row in range(rows)]
        at_once = SLOTS * max(map(len, self._of_unit.values()), default=1) + bool(self._rows)
        spans = [(span.first, span.count) for span in self._spans]
        type_name = TYPE_NAMES[stream.dtype]
        slot_bytes = _core.window_slot_bytes(source, spans, type_name)
        slot_bytes = -(-slot_bytes // PAGE) * PAGE
        self._memory, begin = aligned_memory(at_once * slot_bytes, stream.device.type == "cuda")
        slots = [begin + n * slot_bytes for n in range(at_once)]
        self.window = _core.LayerWindow(
            source, spans, type_name, slots, slot_bytes, kept_address, kept, memory=self._memory
        )

    def numbers_of(self, unit):
        return self._of_unit.get(unit, ())

    def get(self, unit):
        """(index of a parameter, its values) of a unit, where the model computes, until release(). Rows of experts
        are still to be read."""
        stream = self._stream
        for i in self._members.get(unit, ()):
            if i in stream.experts:
                # Pages that nobody writes to take no memory.
                yield i, torch.zeros(stream.params[i].shape, dtype=stream.dtype, device=stream.device)
        for number in self.numbers_of(unit):
            span = self._spans[number]
            address = self.window.get(number)
            span.held = True
            for i, first in span.members:
                param = stream.params[i]
                yield i, self._at(address, first - span.first, param.numel()).view(param.shape).to(stream.device)

    def read_row(self, index, row, out):
        if index in self._rows:
            number = self._rows[index] + row
            out.copy_(self._at(self.window.get(number), 0, out.numel()).view(out.shape))
            self.window.release(number)

    def release(self, unit):
        """Returns its parameters."""
        for number in self.numbers_of(unit):
            if self._spans[number].held:
                self._spans[number].held = False
                self.window.release(number)
        return self._members.get(unit, ())

    def _at(self, address, offset, count):
        """Elements in a slot. A storage of its own: a view of the slot would have another offset in each slot."""
        width = self._stream.dtype.itemsize
        memory = (ctypes.c_char * (count * width)).from_address(address + offset * width)
        values = torch.frombuffer(memory, dtype=self._stream.dtype)
        # Where a parameter begins decides on the last bits of some products; torch's own begin on 64 bytes.
        return values if values.data_ptr() % 64 == 0 else values.clone()

    def close(self):
        self.window.close()


def _spans_of(stream, unit, members):
    """members: [(element, index)], sorted. What lies between two of a span is read in vain."""
    together, end = [], members[0][0]
    for first, i in members:
        if first - end > _GAP_ELEMENTS:
            yield _Span(unit, together, end - together[0][1])
            together = []
        together.append((i, first))
        end = first + stream.params[i].numel()
    yield _Span(unit, together, end - together[0][1])


class _Closed:
    """In place of a window whose optimizer was closed."""

    def __init__(self, window):
        self.firsts, self._units, self.window = window.firsts, frozenset(window._members), self

    def numbers_of(self, unit):
        return ()

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
