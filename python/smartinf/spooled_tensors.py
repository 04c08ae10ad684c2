"""What autograd saves for backward, on devices: each storage once, through buffers of a fixed size."""

import atexit
import collections
import contextlib
import ctypes
import logging
import threading
import time
import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from smartinf import device_copies
from smartinf.errors import NoSpaceError, UsageError
from smartinf.modules import check_version, current_backward
from smartinf.process_memory import PAGE, FreedMemory, aligned_memory

_log = logging.getLogger("smartinf")
_SMALL = 64 << 10  # smaller ones cost more to keep track of than they take
_VIEW = 64  # a view of less than this part of a storage belongs to something larger that stays, like a data set
_AHEAD = 2  # storages that are copied to their device before they are wanted
_open = weakref.WeakSet()
_empty = {}  # (type, device) -> a tensor without elements


def _version_of(tensor):
    """A tensor with the version counter of this one, and without its memory."""
    kind = (tensor.dtype, tensor.device)
    if kind not in _empty:
        _empty[kind] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    counter = tensor.detach()
    counter.data = _empty[kind]
    return counter


def _bytes_of(storage):
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def storage_key(tensor):
    return tensor.untyped_storage()._cdata


class Buffers:
    """Aligned host memory, cut into buffers. A buffer is a memoryview, which is free again when nobody holds it or a
    tensor made of it. Pages that were never used take no memory. Threads: one at a time."""

    def __init__(self, size, device=None):
        """device: other than the CPU, that they are copied from and to."""
        self.memory, self._address = aligned_memory(size)
        if device is not None:
            device_copies.lock_pages(self.memory, self._address, size, device)
        self.size = size
        self._whole = memoryview((ctypes.c_ubyte * size).from_address(self._address))
        self._holes = [(0, size)]  # by offset; no two of them touch
        self._returned = collections.deque()

    def take(self, size):
        """(memoryview, address), or None where no hole is large enough."""
        if self._returned:
            self._merge()
        for i, (offset, free) in enumerate(self._holes):
            if free >= size:
                if free == size:
                    del self._holes[i]
                else:
                    self._holes[i] = (offset + size, free - size)
                buffer = self._whole[offset : offset + size]
                # Called on any thread, also within a call of this class.
                weakref.finalize(buffer, _give_back, self.memory, self._returned, offset, size).atexit = False
                return buffer, self._address + offset
        return None

    def _merge(self):
        while self._returned:
            self._holes.append(self._returned.popleft())
        self._holes.sort()
        merged = []
        for offset, size in self._holes:
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._holes = merged


def _give_back(memory, returned, offset, size):
    """memory: which lives as long as any of its buffers."""
    returned.append((offset, size))


def _lone_buffer(size):
    """Beyond the fixed memory, where all of that is in use."""
    memory, address = aligned_memory(size)
    buffer = memoryview((ctypes.c_ubyte * size).from_address(address))
    weakref.finalize(buffer, _give_back, memory, [], 0, size).atexit = False
    return buffer, address


class _Stored:
    """A storage that autograd has saved a view of."""

    def __init__(self, storage, counter, version, number):
        self.key = storage._cdata
        self.storage = StorageWeakRef(storage)  # its address is not used again while this is held
        self.nbytes = storage.nbytes()
        self.room = -(-self.nbytes // PAGE) * PAGE
        self.device = storage.device
        self.counter, self.version = counter, version
        self.number = number  # in the order in which the last views were saved
        self.views = 0  # that graphs hold
        self.wanted = 0  # views that backward, which has begun with it, still wants
        self.kept = False  # it stays in memory, held by its views
        self.source = self.copied = None  # storage and event of a copy to the host that is under way
        self.buffer = self.address = None  # while its bytes are in memory
        self.ticket = None  # of the spool
        self.written = self.coming = self.came = False
        self.there = self.uploaded = None  # on its device again, for those who wait for the event


class _Saved:
    """What a graph holds in place of a tensor that was stored or kept."""

    __slots__ = ("counter", "dead", "dtype", "offset", "shape", "stored", "stride", "tensor", "version")

    def __init__(self, tensor, stored, dead):
        self.stored, self.dead = stored, dead
        self.version = tensor._version
        self.shape, self.dtype = tensor.shape, tensor.dtype
        if stored.kept:
            self.tensor = self.counter = tensor.detach()  # one that its own graph keeps would never be freed
        else:
            self.tensor, self.counter = None, _version_of(tensor)
            self.stride, self.offset = tensor.stride(), tensor.storage_offset()

    def __del__(self):
        self.dead.append(self.stored)  # on any thread


class _Stays:
    """What a graph holds of a parameter or a small tensor."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor):
        self.tensor, self.version = tensor.detach(), tensor._version


class SpooledTensors:
    """The two hooks of autograd on saved tensors, pack() and unpack(), over a spool (_core.Spool).

    stays:  keys of storages that are not stored: parameters and buffers; called at the beginning of each step
    rule:   KeepRule of activations.py
    counts: Counts, likewise
    owned:  whether the spool is closed with this
    device: other than the CPU, where most of the tensors are; or None
    Threads: any; they take turns. It lives as long as a graph holds what it has stored."""

    def __init__(self, spool, owned, memory, device, stays, rule, counts):
        self._spool, self._owned, self._rule, self.counts = spool, owned, rule, counts
        self._buffers = Buffers(memory, device)
        self._stays, self._staying = stays, frozenset()
        self._turn = threading.RLock()
        self._stored = {}  # by storage key
        self._order = {}  # by number, ascending
        self._alive = 0  # views that graphs hold
        self._next = 0
        self._dead = collections.deque()  # whose views were let go
        self._copying = collections.deque()  # to the host
        self._writing = collections.deque()
        self._reading_dead = []  # that nobody wants any more
        self._uploads = collections.deque()  # (event, buffer)
        self._written = {}  # by number: in memory and on the devices, so that the buffer can be given up
        self._last = self._ahead = -1  # numbers: wanted last; next to be read ahead
        self._full = False
        self._freed = FreedMemory(memory)
        _open.add(self)

    # ---- autograd's side

    def pack(self, tensor):
        # Within backward: a recomputation, or a graph of the gradients. It is used at once, or stays.
        if current_backward() != -1 or not plain(tensor):
            return _Stays(tensor)
        if tensor.untyped_storage().nbytes() < _SMALL:
            return _Stays(tensor)
        with self._turn:
            self._forget_dead()
            if self._alive == 0:
                self._begin_step()
            stored = self._find_or_store(tensor)
            if stored is None:
                return _Stays(tensor)
            stored.views += 1
            self._alive += 1
            return _Saved(tensor, stored, self._dead)

    def unpack(self, saved):
        if type(saved) is _Stays:
            check_version(saved.tensor, saved.version, saved.tensor.shape, saved.tensor.dtype)
            return saved.tensor
        check_version(saved.counter, saved.version, saved.shape, saved.dtype)
        with self._turn:
            if self._spool is None:
                raise UsageError("what this backward needs was dropped when the devices of activations were closed")
            flat = None if saved.stored.kept else self._bring(saved.stored)
            self._rule.brought_back()
        if flat is None:
            return saved.tensor
        empty = torch.empty(0, dtype=saved.dtype, device=flat.device)
        return empty.set_(flat.untyped_storage(), saved.offset, saved.shape, saved.stride)

    # ---- saving

    def _begin_step(self):
        self._rule.step_ended(self.counts)
        self._rule.step_begins(self.counts)
        self._staying = frozenset(self._stays())

    def _find_or_store(self, tensor):
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if size > self._buffers.size or storage._cdata in self._staying:
            return None
        stored = self._stored.get(storage._cdata)
        if stored is not None:
            # Unless it has changed since: then it is another tensor.
            if stored.nbytes == size and stored.version == tensor._version == stored.counter._version:
                self._renumber(stored)
                return stored
        elif tensor.numel() * tensor.element_size() * _VIEW < size:
            return None
        stored = _Stored(storage, _version_of(tensor), tensor._version, self._number())
        stored.kept = not self._rule.offload(size) or not self._store(stored, storage)
        self._rule.stored(size, stored.kept)
        self.counts.saved_bytes += size
        self._freed.freed(size)
        if stored.kept:
            self.counts.kept_bytes += size
        self._stored[stored.key] = stored
        self._order[stored.number] = stored
        return stored

    def _number(self):
        self._next += 1
        return self._next

    def _renumber(self, stored):
        """Another view was saved of it, which backward will want first."""
        old, stored.number = stored.number, self._number()
        del self._order[old]
        self._order[stored.number] = stored
        if self._written.pop(old, None) is not None:
            self._written[stored.number] = stored

    def _store(self, stored, storage):
        self._tidy()
        if self._full:
            return False
        taken = self._take(stored.room, wait=self._rule.waits)
        if taken is None:
            return False
        stored.buffer, stored.address = taken
        host = torch.frombuffer(stored.buffer, dtype=torch.uint8, count=stored.nbytes)
        if stored.device.type == "cpu":
            host.copy_(_bytes_of(storage))
            return self._put(stored)
        stored.source = storage
        side = device_copies.stream(stored.device, "down")
        device_copies.order_behind(side)
        stored.copied = device_copies.copy(host, _bytes_of(storage), side)
        self._copying.append(stored)
        return True

    def _put(self, stored):
        try:
            stored.ticket = self._spool.put(stored.address, stored.room)
        except NoSpaceError as error:
            if not self._full:
                _log.warning("%s What has no room there stays in memory.", error)
            self._full = True
            stored.buffer = None
            return False
        self.counts.written_bytes += stored.nbytes
        self._writing.append(stored)
        return True

    def _take(self, room, wait, reading=None):
        """A buffer, or None. reading: the number of what backward wants now, for which it gives up only what is not
        wanted before."""
        while True:
            taken = self._buffers.take(room)
            if taken is not None:
                return taken
            if self._evict(reading):
                continue
            if not wait or not (self._writing or self._copying):
                return None
            began = time.perf_counter()
            if self._writing:
                self._spool.wait(self._writing[0].ticket)
            else:
                self._copying[0].copied.synchronize()
            self._tidy()
            if reading is None:
                self.counts.waited_to_write_s += time.perf_counter() - began

    def _evict(self, reading):
        """Gives up a buffer whose bytes are on the devices: the one that was written first."""
        for number, stored in self._written.items():
            if reading is None or (number > reading and stored.wanted == 0):
                del self._written[number]
                stored.buffer = None
                return True
        return False

    # ---- bringing back

    def _bring(self, stored):
        """Its bytes, where it was."""
        self._tidy()
        stored.wanted = (stored.wanted or stored.views) - 1
        away = stored.there is None and stored.source is None
        began = time.perf_counter()
        waits = away and (stored.buffer is None or stored.coming)
        if away and stored.buffer is None:
            room = stored.room
            taken = self._take(room, wait=True, reading=stored.number) or self._take(room, wait=False)
            self._start_get(stored, taken or _lone_buffer(room))
        self._read_ahead(stored.number)
        if away:
            self._finish_get(stored)
        if waits:
            self.counts.waited_s += time.perf_counter() - began
        if not stored.came:
            stored.came = True
            self.counts.handed_over_bytes += stored.nbytes
        if stored.device.type != "cpu":
            return self._upload(stored)
        return torch.frombuffer(stored.buffer, dtype=torch.uint8, count=stored.nbytes)

    def _start_get(self, stored, taken):
        stored.buffer, stored.address = taken
        self._spool.start_get(stored.ticket, stored.address)
        stored.coming = True
        self.counts.read_bytes += stored.nbytes

    def _finish_get(self, stored):
        if stored.coming:
            self._spool.wait(stored.ticket)
            stored.coming, stored.came = False, True
            self._written[stored.number] = stored

    def _read_ahead(self, number):
        """In the reverse of the order of saving, as far as there is memory."""
        if number > self._last:  # another backward
            self._ahead = number
        self._last = number
        self._ahead = min(self._ahead, number)
        first = next(iter(self._order), number)
        while self._ahead > first:
            stored = self._order.get(self._ahead - 1)
            if stored is not None and stored.buffer is None and stored.ticket is not None:
                taken = self._take(stored.room, wait=False, reading=number)
                if taken is None:
                    return
                self._start_get(stored, taken)
            self._ahead -= 1

    # ---- other devices than the CPU

    def _upload(self, stored):
        """Its bytes on its device, for the current stream: still, again, or copied there now; and the next ones on their
        way."""
        if stored.source is not None:
            return _bytes_of(stored.source)
        if stored.there is None:
            self._start_upload(stored)
        flat = stored.there
        device_copies.wait(stored.uploaded, stored.device)
        if stored.wanted == 0:
            stored.there = None
        self._upload_ahead(stored.number)
        return flat

    def _start_upload(self, stored):
        """The memory is the current stream's, which uses it behind the copy and whose next tensors have it then: nobody
        but autograd knows when it lets go of what it was given, so that buffers of our own could not be used again."""
        host = torch.frombuffer(stored.buffer, dtype=torch.uint8, count=stored.nbytes)
        stored.there = torch.empty(stored.nbytes, dtype=torch.uint8, device=stored.device)
        side = device_copies.stream(stored.device, "up")
        device_copies.order_behind(side)
        stored.uploaded = device_copies.copy(stored.there, host, side)
        self._uploads.append((stored.uploaded, stored.buffer))

    def _upload_ahead(self, number):
        first = next(iter(self._order), number)
        found = 0
        while number > first and found < _AHEAD:
            number -= 1
            stored = self._order.get(number)
            if stored is None or stored.kept or stored.source is not None:
                continue
            if stored.there is None:
                if stored.buffer is None or stored.coming and not self._spool.settled(stored.ticket):
                    return
                self._finish_get(stored)
                self._start_upload(stored)
            found += 1

    def _leave_device(self, stored):
        """The memory that it was copied to is the current stream's again, behind the copy."""
        if stored.there is not None:
            device_copies.wait(stored.uploaded, stored.device)
            stored.there = None

    # ---- what has ended in the meantime

    def _forget_dead(self):
        while self._dead:
            stored = self._dead.popleft()
            stored.views -= 1
            self._alive -= 1
            if stored.views == 0:
                self._forget(stored)

    def _tidy(self):
        self._forget_dead()
        while self._uploads and self._uploads[0][0].query():
            self._uploads.popleft()
        while self._copying and self._copying[0].copied.query():
            stored = self._copying.popleft()
            if stored.views == 0:
                stored.buffer = stored.source = None
            elif self._put(stored):
                stored.source = None
        while self._writing and self._spool.settled(self._writing[0].ticket):
            stored = self._writing.popleft()
            self._spool.wait(stored.ticket)
            stored.written = True
            if stored.views == 0:
                self._drop(stored)
            else:
                self._written[stored.number] = stored
        if self._reading_dead:
            ended = [stored for stored in self._reading_dead if self._spool.settled(stored.ticket)]
            for stored in ended:
                self._reading_dead.remove(stored)
                self._drop(stored)

    def _forget(self, stored):
        """No graph holds it any more."""
        if self._stored.get(stored.key) is stored:
            del self._stored[stored.key]
        del self._order[stored.number]
        self._written.pop(stored.number, None)
        self._leave_device(stored)
        if stored.coming:
            self._reading_dead.append(stored)
        elif stored.written:
            self._drop(stored)

    def _drop(self, stored):
        self._spool.drop(stored.ticket)
        stored.ticket = stored.buffer = None

    # ---- the end

    def leave(self):
        """Nothing more is saved. What graphs still hold comes back all the same; it is closed after that."""
        with self._turn:
            self._tidy()
            if self._alive == 0:
                self._rule.step_ended(self.counts)
                self.close()

    def close(self):
        with self._turn:
            spool, self._spool = self._spool, None
            if spool is None:
                return
            for copied in [*(stored.copied for stored in self._copying), *(copied for copied, _ in self._uploads)]:
                copied.synchronize()
            if self._owned:
                spool.close(self._buffers.memory)
                return
            for stored in {*self._order.values(), *self._writing, *self._reading_dead}:
                if stored.ticket is not None:
                    spool.drop(stored.ticket)

    def __del__(self):
        with contextlib.suppress(Exception):  # too late to be handled
            self.close()


def plain(tensor):
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_meta)
    )


@atexit.register
def _close_all():
    for tensors in list(_open):
        tensors.close()
