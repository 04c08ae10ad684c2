"""Copies between host memory and devices beside what computes there: the streams and the pinned memory of the package.

Everything is in the order of torch's current stream of the calling thread: a copy begins when that stream has come to where
it was asked for, and what it copies to is used once that stream has been told to wait for it. The host waits only where a
function says so.
"""

import collections
import contextlib
import functools
import threading
import weakref

import torch

_RING_BYTES = 256 << 20  # of pinned memory, by which gradients may lag behind backward
_PIECE_ELEMENTS = 4 << 20  # of a gradient; the core takes gradients in whole multiples of 2^20 elements


@functools.cache
def stream(device, name):
    """A stream of this device for copies, beside the one that computes. name: "up", "down", whose copies do not wait for
    each other."""
    return torch.Stream(device=device)


def order_behind(side):
    """What `side` is given from here on waits for what the current stream was given."""
    side.wait_stream(torch.accelerator.current_stream(side.device))


def copy(to, values, side):
    """Starts a copy on `side`, in its order alone. Returns its event. Memory of the host is pinned, or the copy is waited
    for; all memory stays as it is until the event has come."""
    with side:
        to.copy_(values, non_blocking=True)
        return side.record_event()


def wait(event, device):
    """What the current stream is given from here on waits for the event."""
    torch.accelerator.current_stream(device).wait_event(event)


def lock_pages(memory, address, size, device):
    """Makes host memory that is not torch's own pinned for as long as `memory`, which it belongs to, lives. Where the
    device's library cannot, copies from there are waited for."""
    cudart = getattr(torch.get_device_module(device), "cudart", None)
    if cudart is None:
        return
    if int(cudart().cudaHostRegister(address, size, 0)) == 0:
        weakref.finalize(memory, cudart().cudaHostUnregister, address)
    else:
        with contextlib.suppress(RuntimeError):  # the error waits for the next kernel
            torch.ones(1, device=device)


class Downloads:
    """Gradients on their way from devices to the host, in pieces, through a ring of pinned memory. They arrive in the order
    in which they were started.

    Threads: one at a time, but for one of its own, which hands over what has come while backward goes on. It lives while
    something is under way, and holds `lock` when it does so."""

    def __init__(self, bytes_of_all, lock=None):
        """bytes_of_all: of everything that may be under way together; a smaller ring is enough then. lock: an RLock that
        callers hold; None: there is no thread, and callers hand over."""
        self._size = bytes_of_all
        self._lock = lock
        self._ring = None  # [bytes], from the first gradient on
        self._free = 0  # where the next piece goes
        self._under_way = collections.deque()
        self._works = False  # the thread
        self._failure = None  # of the thread, for whoever calls next

    def start(self, values, arrived):
        """Copies `values` [count], contiguous, which the current stream has made. arrived(first, piece) is called with
        pieces of it, in CPU memory until it returns, by the thread, a later start() or finish(). Waits while the ring is
        full. Errors: of an arrived() before."""
        self._raise_failure()
        if self._lock is None:
            while self._under_way and self._under_way[0].event.query():
                self._hand_over_oldest()
        side = stream(values.device, "down")
        order_behind(side)
        for first in range(0, values.numel(), _PIECE_ELEMENTS):
            piece = values[first : first + _PIECE_ELEMENTS]
            place = self._take(piece.nbytes)
            host = self._ring[place : place + piece.nbytes].view(piece.dtype)
            self._under_way.append(_Download(host, copy(host, piece, side), values, place, first, arrived))
        if self._lock is not None and not self._works:
            self._works = True
            threading.Thread(target=self._work, name="smartinf-gradients", daemon=True).start()

    def finish(self):
        """Waits for everything, and hands it over. Errors: of an arrived()."""
        self._raise_failure()
        while self._under_way:
            self._hand_over_oldest()

    def drop(self):
        """Nothing that is under way arrives."""
        with self._lock or contextlib.nullcontext():
            self._failure = None
            self._under_way = collections.deque(download._replace(arrived=None) for download in self._under_way)

    def _work(self):
        while True:
            with self._lock:
                if not self._under_way or self._failure is not None:
                    self._works = False
                    return
                event = self._under_way[0].event
            event.synchronize()
            with self._lock:
                if self._under_way and self._under_way[0].event is event:
                    try:
                        self._hand_over_oldest()
                    except BaseException as error:  # noqa: BLE001  for whoever calls next
                        self._failure = error

    def _raise_failure(self):
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _hand_over_oldest(self):
        download = self._under_way[0]
        if not download.event.query():
            download.event.synchronize()
        try:
            if download.arrived is not None:
                download.arrived(download.first, download.host)
        finally:
            self._under_way.popleft()

    def _take(self, size):
        """An offset in the ring. Pieces lie behind each other; one that does not fit before the end begins anew."""
        if self._ring is None:
            whole = _PIECE_ELEMENTS * 4  # of the widest type
            self._ring = torch.empty(max(whole, min(_RING_BYTES, self._size)), dtype=torch.uint8, pin_memory=True)
        size = -(-size // 64) * 64
        while self._under_way:
            oldest = self._under_way[0].place
            begin = self._free
            if begin > oldest:  # free: from there to the end, and before the oldest
                if begin + size <= self._ring.numel():
                    break
                begin = 0
            if begin + size < oldest:  # equal would mean empty
                self._free = begin
                break
            self._hand_over_oldest()
        else:
            self._free = 0
        place, self._free = self._free, self._free + size
        return place


# values: kept until the copy has come.
_Download = collections.namedtuple("_Download", ["host", "event", "values", "place", "first", "arrived"])


class Uploads:
    """Copies from memory of the host that is written again, to memory of devices. Threads: one at a time."""

    def __init__(self):
        self._events = {}  # of each device's last copy

    def start(self, to, values):
        """Once the current stream has come here. `values` stay until wait() has returned."""
        if to.device.type == "cpu":
            to.copy_(values)
            return
        side = stream(to.device, "up")
        order_behind(side)
        self._events[to.device] = copy(to, values, side)

    def order_before(self):
        """What the current streams are given from here on sees what has been copied."""
        for device, event in self._events.items():
            wait(event, device)

    def wait(self):
        """The host may write to what it has copied from."""
        for event in self._events.values():
            event.synchronize()
        self._events.clear()
