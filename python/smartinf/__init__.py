"""Training with optimizer state kept and updated on storage.

``smartinf.AdamW`` (and ``Adam``, ``SGD``, ``Adagrad``, ``Lion``) are ``torch.optim.Optimizer``s whose
master weights and moments live in files on one or more devices and are updated there::

    optimizer = smartinf.AdamW(model.parameters(), lr=1e-3, devices=["/nvme/run1"])

torch is imported when the first optimizer class is touched, not with the package. The classes, their
options and their errors are described in docs/python.md; ``python -m smartinf --help`` lists the
commands.
"""

from smartinf._core import __version__
from smartinf.errors import (
    CorruptError,
    DeviceError,
    Error,
    MemoryLimitError,
    MismatchError,
    NonFiniteGradientError,
    NoSpaceError,
    UsageError,
)

TYPE_CHECKING = False  # type checkers take it for true; typing itself need not be imported
if TYPE_CHECKING:
    from smartinf.activations import offload_activations
    from smartinf.layer_major import forward_backward
    from smartinf.optimizers import SGD, Adagrad, Adam, AdamW, Lion
    from smartinf.streaming import from_pretrained, stream

_OTHERS = {
    "from_pretrained": "streaming",
    "stream": "streaming",
    "forward_backward": "layer_major",
    "offload_activations": "activations",
}
_OPTIMIZERS = ("AdamW", "Adam", "SGD", "Adagrad", "Lion")

__all__ = [
    *_OPTIMIZERS,
    *_OTHERS,
    "CorruptError",
    "DeviceError",
    "Error",
    "MemoryLimitError",
    "MismatchError",
    "NoSpaceError",
    "NonFiniteGradientError",
    "UsageError",
    "__version__",
]


def __getattr__(name):
    if name in _OPTIMIZERS:
        import smartinf.optimizers

        return getattr(smartinf.optimizers, name)
    if name in _OTHERS:
        import importlib

        return getattr(importlib.import_module(f"smartinf.{_OTHERS[name]}"), name)
    raise AttributeError(f"module 'smartinf' has no attribute '{name}'")


def __dir__():
    return sorted(__all__)
