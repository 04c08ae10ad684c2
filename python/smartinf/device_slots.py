"""Weights of a streamed model's units on the device that computes, copied there from the window's slots in host memory while
other units compute, as far ahead as there are slots."""

import collections
import ctypes

import torch

from smartinf import _core, device_copies

_ALIGNMENT = 256  # bytes, of each parameter: where it begins decides on the last bits of some products


class _Slot:
    """used: event behind what computed with it last. copied: event of the last copy to it. in_host: whether the window's
    slot that it was copied from is held. uses: of the span in it."""

    def __init__(self, size, device):
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.used = torch.accelerator.current_stream(device).record_event()  # whoever had the memory before
        self.copied = self.span = None
        self.held = self.in_host = False
        self.uses = 0


class DeviceSlots:
    """spans: for each span of `window` (_core.LayerWindow) the bytes [(offset in it, size)] of its parameters, in order.
    count: of slots. Spans are numbers. The current stream is to be the one that computes; the host waits for it only where every
    slot of the window is in use."""

    def __init__(self, window, spans, count, device):
        self._window, self.device = window, device
        self._places, self._runs = [], []  # by span: (offset in a slot, size) of each parameter; what is copied at once
        self._sizes = []
        for members in spans:
            places, runs, end = [], [], 0
            for offset, size in members:
                end = _aligned(end)
                if runs and offset - runs[-1][0] == end - runs[-1][1]:
                    runs[-1] = (*runs[-1][:2], end + size - runs[-1][1])
                else:
                    runs.append((offset, end, size))
                places.append((end, size))
                end += size
            self._places.append(places)
            self._runs.append(runs)
            self._sizes.append(_aligned(end))
        self._slots = [_Slot(size, device) for size in _core.slot_sizes(self._sizes, count)]
        self._order, self._next = [], 0

    def start(self, order):
        """The uses to come."""
        self._order, self._next = order, 0
        self._tell_window()

    def get(self, number):
        """Storages of its parameters until release(), with their values behind wait_copied()."""
        if number in self._order[self._next :]:
            self._next = self._order.index(number, self._next) + 1
        slot = self._slot_of(number) or self._bring(number)
        slot.held = True
        slot.uses += 1
        try:
            if slot.uses > 1:
                self._tell_window()
            self._copy_ahead()
        except BaseException:
            slot.held = False
            raise
        begin = slot.memory.data_ptr()
        made = torch._C._construct_storage_from_data_pointer
        return [made(begin + offset, self.device, size) for offset, size in self._places[number]]

    def wait_copied(self, number):
        """What the current stream is given from here on has its values."""
        device_copies.wait(self._slot_of(number).copied, self.device)

    def release(self, number):
        slot = self._slot_of(number)
        slot.used = torch.accelerator.current_stream(self.device).record_event()
        slot.held = False
        self._copy_ahead()

    def free_window(self):
        """No copy needs a slot of the window any more; the host waits for those under way."""
        for slot in self._slots:
            self._let_window_go(slot)

    def forget(self):
        """What is in the slots is not current. None is held."""
        self.free_window()
        for slot in self._slots:
            slot.span = None

    def _slot_of(self, number):
        return next((slot for slot in self._slots if slot.span == number), None)

    def _bring(self, number, ahead=None):
        """Starts the copy. ahead: where in the order it is used; it may find no slot then: None."""
        there = [(slot.memory.numel(), slot.span, slot.held) for slot in self._slots]
        chosen = _core.choose_slot(there, self._order, self._next, self._sizes, number, ahead)
        if chosen is None:
            if ahead is not None:
                return None
            chosen = len(self._slots)  # as the window does
            self._slots.append(_Slot(self._sizes[number], self.device))
        slot = self._slots[chosen]
        self._let_window_go(slot)
        if ahead is None and not self._window.has_come(number):
            self.free_window()  # which has to read it
        address = self._window.get(number)
        side = device_copies.stream(self.device, "up")
        side.wait_event(slot.used)
        for offset, to, size in self._runs[number]:
            host = torch.frombuffer((ctypes.c_char * size).from_address(address + offset), dtype=torch.uint8)
            slot.copied = device_copies.copy(slot.memory[to : to + size], host, side)
        slot.span, slot.in_host, slot.uses = number, True, 0
        return slot

    def _copy_ahead(self):
        for slot in self._slots:
            if slot.in_host and slot.copied.query():
                self._let_window_go(slot)
        for use in range(self._next, len(self._order)):
            number = self._order[use]
            if self._slot_of(number) is None and not (self._window.has_come(number) and self._bring(number, use)):
                return

    def _let_window_go(self, slot):
        if slot.in_host:
            slot.copied.synchronize()
            slot.in_host = False
            self._window.release(slot.span)

    def _tell_window(self):
        """Which of the uses need something that is not here."""
        here = {slot.span for slot in self._slots}
        wanted = []
        for number in self._order[self._next :]:
            if number in here:
                here.discard(number)
            else:
                wanted.append(number)
        self._window.start(wanted)


class SharedSlots:
    """As DeviceSlots, where the device computes in the host's memory: in the window's own slots, whose pages are locked.
    Each is given back when what computes with it has ended. A parameter that does not begin on 256 bytes is copied."""

    def __init__(self, window, spans, count, device):
        self._window, self._spans, self.device = window, spans, device
        self._leaving = collections.deque()  # (number, event)

    def start(self, order):
        self._window.start(order)

    def get(self, number):
        self._give_back()
        if not self._window.has_come(number):
            self.free_window()  # which has to read it
        address = self._window.get(number)
        return [self._storage(address + offset, size) for offset, size in self._spans[number]]

    def wait_copied(self, number):
        """It is there."""

    def release(self, number):
        self._leaving.append((number, torch.accelerator.current_stream(self.device).record_event()))
        self._give_back()

    def free_window(self):
        for _, used in self._leaving:
            used.synchronize()
        self._give_back()

    forget = free_window

    def _storage(self, address, size):
        there = torch._C._construct_storage_from_data_pointer(address, self.device, size)
        if address % _ALIGNMENT == 0:
            return there
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(there, 0, (size,)).clone().untyped_storage()

    def _give_back(self):
        while self._leaving and self._leaving[0][1].query():
            self._window.release(self._leaving.popleft()[0])


def _aligned(size):
    return -(-size // _ALIGNMENT) * _ALIGNMENT
