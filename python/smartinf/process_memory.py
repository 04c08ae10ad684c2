"""What the process's memory is told, so that what has left memory does not look as if it were in it."""

import ctypes
import mmap
import re

import torch

PAGE = 4096  # direct I/O wants addresses and sizes that are multiples of it
_MADV_DONTNEED = 4
_DROP_EVERY = 256 << 20


def aligned_memory(size):
    """(a tensor of bytes that is to be kept, the address of `size` bytes in it, on a page)."""
    memory = torch.empty(size + PAGE, dtype=torch.uint8)
    return memory, -(-memory.data_ptr() // PAGE) * PAGE


class MappedFiles:
    """Files of this name that are mapped into memory from now on, to be read once."""

    def __init__(self, suffix):
        self._suffix = suffix
        self._read = 0  # bytes since pages were dropped
        self._before = {span for span, _ in self._mappings()}

    def read(self, size):
        """So many bytes were read and are not wanted any more. Now and then lets go of the pages that they lie in, but
        for mappings that were there before or that somebody has written to."""
        self._read += size
        if self._read < _DROP_EVERY:
            return
        self._read = 0
        madvise = ctypes.CDLL(None).madvise
        for (begin, end), written in self._mappings():
            if (begin, end) not in self._before and not written:
                madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED)

    def _mappings(self):
        """((begin, end), whether pages of it differ from the file)."""
        span = None
        with open("/proc/self/smaps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
                if found:
                    span = None
                    if line.rstrip().endswith(self._suffix):
                        span = tuple(int(text, 16) for text in found.groups())
                elif span is not None and line.startswith("Anonymous:"):
                    yield span, int(line.split()[1]) > 0


class FreedMemory:
    """glibc's malloc keeps much of what tensors have freed: what it allocates with an alignment does not fit into a
    hole of the same size. It is given back to the system whenever the process has grown by `limit` bytes since, or by
    `least`, below which it is not worth its time."""

    _EVERY = 16 << 20  # bytes that were freed

    def __init__(self, limit=0, least=256 << 20):
        self._limit = max(limit, least)
        self._every = min(self._EVERY, self._limit)
        self._freed = 0
        self._low = _resident_bytes()
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def freed(self, size):
        self._freed += size
        if self._trim is None or self._freed < self._every:
            return
        self._freed = 0
        resident = _resident_bytes()
        self._low = min(self._low, resident)
        if resident > self._low + self._limit:
            self._trim(0)
            self._low = _resident_bytes()


def _resident_bytes():
    with open("/proc/self/statm", "rb") as sizes:
        return int(sizes.read().split()[1]) * mmap.PAGESIZE
