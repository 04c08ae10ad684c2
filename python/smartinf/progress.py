"""A bar for work that takes long, on rank 0 and a terminal only."""

import sys

_WORTH_ELEMENTS = 1 << 26  # less is over before anyone looks


class _Silent:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def update(self, _count):
        pass


def progress(what, elements, rank):
    """A context manager with update(elements)."""
    if rank != 0 or elements < _WORTH_ELEMENTS or not sys.stderr.isatty():
        return _Silent()
    try:
        from tqdm import tqdm
    except ImportError:
        return _Silent()
    return tqdm(desc=what, total=elements, unit="el", unit_scale=True)
