"""The parameters of units in slots of memory, over one source of weights."""

import collections
import ctypes

import torch

from smartinf import _core, device_copies
from smartinf.device_slots import DeviceSlots, SharedSlots
from smartinf.errors import UsageError
from smartinf.layout import TYPE_NAMES
from smartinf.process_memory import PAGE, aligned_memory

SLOTS = 3  # for each span of a unit: one in use, one whose backward follows, one read ahead
_GAP_ELEMENTS = 1 << 20  # that are read rather than to have another slot


class _Span:
    """Parameters of a unit that lie together in a source. members: [(index, element)], in their order."""

    def __init__(self, members, end):
        self.members, self.held = members, False
        self.first, self.count = members[0][1], end - members[0][1]


class Window:
    """A window over one source. firsts: {index of a parameter: its element there}. The parameters of a unit are one
    span, or several where much lies between them; each row of a parameter with experts is one of its own. Closed, it has
    no values any more: UsageError for who wants them."""

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
            for span in _spans_of(stream, sorted(members)):
                self._of_unit[unit].append(len(self._spans))
                self._spans.append(span)
        for i in sorted(stream.experts & firsts.keys()):
            self._rows[i] = len(self._spans)
            rows = stream.params[i].shape[0]
            count = stream.params[i].numel() // rows
            begins = [firsts[i] + row * count for row in range(rows)]
            self._spans += [_Span([(i, begin)], begin + count) for begin in begins]
        self._at_once = at_once = SLOTS * max(map(len, self._of_unit.values()), default=1)
        spans = [(span.first, span.count) for span in self._spans]
        type_name = TYPE_NAMES[stream.dtype]
        rows = min(self._rows.values(), default=len(spans))
        sizes = []
        for of, count in ((spans[:rows], at_once), (spans[rows:], 1)):
            if of:
                sizes += [-(-size // PAGE) * PAGE for size in _core.window_slot_bytes(source, of, type_name, count)]
        memory, begin = aligned_memory(sum(sizes))
        self._memory = memory, begin, sum(sizes)
        slots = [(begin + sum(sizes[:n]), size) for n, size in enumerate(sizes)]
        self._window = _core.LayerWindow(source, spans, type_name, slots, kept_address, kept, memory=memory)
        self._on_device = None  # DeviceSlots or SharedSlots, where the model does not compute on the CPU
        self._locked = False  # the slots' pages, for copies to a device

    @property
    def is_open(self):
        return self._window is not None

    def start(self, units):
        """They are likely to be wanted in this order."""
        if self.is_open:
            self._prepare_device()
            (self._on_device or self._window).start([number for unit in units for number in self._of_unit.get(unit, ())])

    def updated(self):
        """What was read ahead is not current."""
        if self.is_open:
            if self._on_device is not None:
                self._on_device.forget()
            self._window.updated()

    def moved(self):
        """The model computes elsewhere from now on."""
        if self._on_device is not None:
            self._on_device.forget()
            self._on_device = None

    def _prepare_device(self):
        device = self._stream.device
        if device.type == "cpu" or self._on_device is not None:
            return
        if not self._locked:
            self._locked = True
            device_copies.lock_pages(*self._memory, device)
        width = self._stream.dtype.itemsize
        parameters = self._stream.params
        spans = [
            [((first - span.first) * width, parameters[i].numel() * width) for i, first in span.members]
            for span in self._spans[: min(self._rows.values(), default=len(self._spans))]
        ]
        slots = SharedSlots if _core.memory_is_unified() else DeviceSlots
        self._on_device = slots(self._window, spans, self._at_once, device)

    def get(self, unit):
        """(index of a parameter, its values) of a unit, where the model computes, until release(). Rows of experts
        are still to be read."""
        stream = self._stream
        if unit in self._members and not self.is_open:
            raise UsageError(
                "the optimizer that holds the model's weights is closed; make a new one with resume=True to go on"
            )
        for i in self._members.get(unit, ()):
            if i in stream.experts:
                # Pages that nobody writes to take no memory.
                yield i, torch.zeros(stream.params[i].shape, dtype=stream.dtype, device=stream.device)
        for number in self._of_unit.get(unit, ()):
            span = self._spans[number]
            if stream.device.type != "cpu":
                self._prepare_device()
                storages = self._on_device.get(number)
                span.held = True
                for (i, _), storage in zip(span.members, storages, strict=True):
                    values = torch.empty(0, dtype=stream.dtype, device=stream.device)
                    yield i, values.set_(storage, 0, stream.params[i].shape)
                continue
            address = self._window.get(number)
            span.held = True
            for i, first in span.members:
                param = stream.params[i]
                yield i, self._at(address, first - span.first, param.numel()).view(param.shape)

    def wait_copied(self, unit):
        """What the current stream is given from here on sees the values of a unit that is held."""
        if self._on_device is not None:
            for number in self._of_unit.get(unit, ()):
                self._on_device.wait_copied(number)

    def read_row(self, index, row, out):
        if index in self._rows:
            number = self._rows[index] + row
            if self._on_device is not None:
                self._on_device.free_window()
            out.copy_(self._at(self._window.get(number), 0, out.numel()).view(out.shape))
            self._window.release(number)

    def release(self, unit):
        """Returns its parameters."""
        for number in self._of_unit.get(unit, ()):
            if self._spans[number].held:
                self._spans[number].held = False
                (self._on_device or self._window).release(number)
        return self._members.get(unit, ())

    def _at(self, address, offset, count):
        """Elements in a slot. A storage of its own: a view of the slot would have another offset in each slot."""
        width = self._stream.dtype.itemsize
        memory = (ctypes.c_char * (count * width)).from_address(address + offset * width)
        values = torch.frombuffer(memory, dtype=self._stream.dtype)
        # Where a parameter begins decides on the last bits of some products; torch's own begin on 64 bytes.
        return values if values.data_ptr() % 64 == 0 else values.clone()

    def close(self):
        self.moved()
        self._window.close()
        self._window = self.source = None


def _spans_of(stream, members):
    """members: [(element, index)], sorted. What lies between two of a span is read in vain."""
    together, end = [], members[0][0]
    for first, i in members:
        if first - end > _GAP_ELEMENTS:
            yield _Span(together, end)
            together = []
        together.append((i, first))
        end = first + stream.params[i].numel()
    yield _Span(together, end)
