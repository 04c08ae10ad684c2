"""Training with optimizer state kept and updated on storage.

``smartinf.AdamW`` (and ``Adam``, ``SGD``, ``Adagrad``, ``Lion``) are ``torch.optim.Optimizer``s whose
master weights and moments live in files on one or more devices and are updated there::

    optimizer = smartinf.AdamW(model.parameters(), lr=1e-3, devices=["/nvme/run1"])

torch is imported when the first optimizer class is touched, not with the package. The classes, their
options and their errors are described in docs/python.md; ``python -m smartinf --help`` lists the
commands.

The modules, in the order in which a step meets them; each says in its first lines what it does:

- optimizers, storage_optimizer, storage_options, options: torch's classes, their keywords
- session, core_options, layout: one opening of the devices, and where each parameter stands there
- gradients, released_gradients, averaged_gradients, amp: where a step's gradients come from
- residency, absent_parameter, late_weights, early_updates: weights that a step has left behind (overlap)
- streaming, units, layer_stream, layer_window, device_slots, layer_major: models larger than memory
- distillation: a smaller model learns from a larger one, block by block
- tables, table_files, nn: embeddings of which a step touches few rows
- graph: features of vertices on devices, for torch_geometric's loaders
- activations, spooled_tensors: what autograd saves, on devices
- device_cache: keys and values of generate, on devices
- device_copies: what goes between the host and a GPU beside what computes there
- ranks, rank_calls, sharded_parameters: several processes; FSDP2
- lineage, state_io, checkpoint, relayout, torch_state: which state this is, and its copies
- hf, trainer_arguments, deepspeed: Trainer and Accelerate
"""


def _not_built():
    """Why there is no core module, and what to do."""
    import glob
    import os
    import sys

    here = os.path.dirname(os.path.abspath(__file__))
    build = os.path.dirname(os.path.dirname(here))  # build/release of build/release/python/smartinf
    if others := glob.glob(os.path.join(here, "_core.*")):
        this = f"Python {sys.version_info.major}.{sys.version_info.minor}"
        return f"{others[0]} is for another Python than this {this}: build or install the package with this one"
    if os.path.exists(os.path.join(build, "CMakeCache.txt")):
        return f"the package is not built: cmake --build {build} --target smartinf_core"
    if os.path.exists(os.path.join(build, "CMakePresets.json")):
        return (
            f"{here} is the source of the package: run `pip install .` in {build}, or build it there "
            "(cmake --preset release, then cmake --build build/release --target smartinf_core) and use build/release/python"
        )
    return f"{here} has no core module: install the package again (pip install --force-reinstall)"


try:
    from smartinf._core import __version__
except ModuleNotFoundError as error:
    if error.name != "smartinf._core":
        raise
    raise ImportError(_not_built(), name="smartinf._core", path=__file__) from None

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
    from smartinf.device_cache import DeviceCache
    from smartinf.distillation import distill, prune
    from smartinf.layer_major import forward_backward
    from smartinf.optimizers import SGD, Adagrad, Adam, AdamW, Lion
    from smartinf.streaming import from_pretrained, stream
    from smartinf.table_files import save_tables
    from smartinf.tables import move_tables

_OTHERS = {
    "from_pretrained": "streaming",
    "stream": "streaming",
    "forward_backward": "layer_major",
    "offload_activations": "activations",
    "DeviceCache": "device_cache",
    "distill": "distillation",
    "prune": "distillation",
    "move_tables": "tables",
    "save_tables": "table_files",
}
_OPTIMIZERS = ("AdamW", "Adam", "SGD", "Adagrad", "Lion")

__all__ = [
    *_OPTIMIZERS,
    *(name for name in _OTHERS if name != "DeviceCache"),  # needs transformers, and `import *` does not
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
    return sorted({*__all__, *_OTHERS})
