"""A bar for work that takes long, on rank 0 and a terminal only."""

import contextlib
import sys
import types

_WORTH_ELEMENTS = 1 << 26  # less is over before anyone looks


def progress(what, elements, rank):
    """A context manager with update(elements)."""
    if rank == 0 and elements >= _WORTH_ELEMENTS and sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            return tqdm(desc=what, total=elements, unit="el", unit_scale=True)
    return contextlib.nullcontext(types.SimpleNamespace(update=lambda _count: None))
