"""What the package raises. The text is the core's own: what failed, where, and what to do."""


class Error(RuntimeError):
    """Base of all of them.

    code:   the core's name of the failure, e.g. ``"no space"``; empty when it arose in Python
    path:   the file or device concerned, or empty
    advice: the part of the text that says what to do, or empty
    """

    code = ""
    path = ""
    advice = ""


class UsageError(Error, ValueError):
    """An option or a call that is wrong whatever the state of the machine, or in the wrong order."""


class DeviceError(Error, OSError):
    """A device is missing, locked by another process, does not answer, or its medium failed."""


class NoSpaceError(DeviceError):
    """A device cannot hold the state: the message says how much is missing."""


class MemoryLimitError(Error, MemoryError):
    """More memory than the budget or a system limit allows."""


class MismatchError(Error):
    """What is on the device or in the checkpoint belongs to another model, run or format."""


class CorruptError(Error):
    """A checksum or a structure on a device is wrong: the data must not be used."""


class NonFiniteGradientError(Error, ArithmeticError):
    """A gradient holds an infinity or NaN. The step was not made; state and weights are unchanged."""
