"""Every open optimizer of this process: closed when the interpreter ends, so that a commit in the
background is carried through and the devices are let go in order."""

import atexit
import contextlib
import weakref

_open = weakref.WeakSet()


def add(optimizer):
    _open.add(optimizer)


@atexit.register
def close_all():
    for optimizer in list(_open):
        # Too late to be handled; the state of the last committed step stands in any case.
        with contextlib.suppress(Exception):
            optimizer.close()
