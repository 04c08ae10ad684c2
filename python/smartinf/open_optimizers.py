"""Every open session of this process: closed when the interpreter ends, so that a commit in the
background is carried through and the devices are let go in order. Forked children let go at once."""

import atexit
import contextlib
import os
import threading
import time
import weakref

from smartinf.errors import DeviceError

_LAST_STEP_SECONDS = 60
_ERROR_SECONDS = 0.1
_open = weakref.WeakSet()


def add(session):
    _open.add(session)


def of_parameters(params):
    """Whether an open optimizer has any of these parameters."""
    ids = {id(param) for param in params}
    return any(s.core is not None and not ids.isdisjoint(s.layout.index_of) for s in list(_open))


def with_pending_gradients():
    """The sessions to which backward has handed over gradients of a step that is not made yet."""
    return [session for session in list(_open) if session.core is not None and session.gradients.pending]


def _same(a, b):
    try:
        return a == b or os.path.samefile(a, b)
    except OSError:
        return False


@contextlib.contextmanager
def named_when_busy(devices):
    """The lock on a device names the process that holds it. When that is this one, it is an optimizer
    that a notebook's cell or an earlier Trainer has made, and the user can close it."""
    try:
        yield
    except DeviceError as error:
        if error.code != "busy":
            raise
        held = [d["path"] for s in list(_open) if s.core is not None for d in s.devices]
        for device in devices:
            if any(_same(device["path"], path) for path in held):
                advice = (
                    "Call its close(), or del it, before you make a new one. With Trainer it is "
                    "smartinf.hf.unwrap(trainer.optimizer), with Accelerate "
                    "smartinf.hf.unwrap(optimizer)."
                )
                advised = DeviceError(
                    f"{device['path']}: the device is in use by another optimizer of this process. {advice}"
                )
                advised.code, advised.path, advised.advice = error.code, device["path"], advice
                raise advised from None
        raise


@atexit.register
def close_all():
    for session in list(_open):
        # A daemon thread may be in a step, which is waited for. One without an end (a rank that waits for
        # another that died) is left as it is.
        contended = not session.turn.acquire(blocking=False)
        if contended and not session.turn.acquire(timeout=_LAST_STEP_SECONDS):
            continue
        # Too late to be handled; the state of the last committed step stands in any case.
        with contextlib.suppress(Exception):
            session.close()
        session.turn.release()
        if contended:  # its next step fails now; the interpreter's end inside of torch would abort it
            time.sleep(_ERROR_SECONDS)


def _let_go_in_child():
    """The lock of a device belongs to an open file, which a forked child shares: a DataLoader's worker
    that outlives its killed parent would hold the device. The child cannot use the optimizer."""
    for session in _open:
        session.turn = threading.RLock()  # whoever held it is not here
    places = [os.path.realpath(d["path"]) for s in _open if s.core is not None for d in s.devices]
    if not places:
        return
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{number}")
            if any(path == place or path.startswith(place + os.sep) for place in places):
                os.close(int(number))


os.register_at_fork(after_in_child=_let_go_in_child)
