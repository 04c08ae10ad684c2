"""The accelerator for tests, in Python. README.md"""

import ctypes
import types

import torch

_library = None


def register(library_path):
    """Loads the accelerator's library. Returns its device; once for each process."""
    global _library
    torch.ops.load_library(str(library_path))
    _library = ctypes.CDLL(str(library_path))
    module = types.ModuleType("test_accelerator")
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda _: None
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None  # of torch.manual_seed()
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.synchronize = torch.accelerator.synchronize
    module.cudart = lambda: _Cudart
    torch._register_device_module("test_accelerator", module)
    return torch.device("test_accelerator", 0)


class _Cudart:
    """As torch.cuda.cudart()."""

    @staticmethod
    def cudaHostRegister(address, size, flags):  # noqa: N802
        _library.smartinf_test_accelerator_pin(ctypes.c_void_p(address), ctypes.c_uint64(size))
        return 0

    @staticmethod
    def cudaHostUnregister(address):  # noqa: N802
        _library.smartinf_test_accelerator_unpin(ctypes.c_void_p(address))
        return 0


def hold_copies(hold):
    """While held, no copy between host and device begins."""
    _library.smartinf_test_accelerator_hold_copies(ctypes.c_bool(hold))


def order_errors():
    """That the check of order has found since the beginning, also those that somebody caught."""
    count = _library.smartinf_test_accelerator_order_errors
    count.restype = ctypes.c_uint64
    return count()


class _Memory(ctypes.Structure):
    """Of accelerator.h: bytes in use, and the most that were."""

    _fields_ = [("current", ctypes.c_uint64), ("peak", ctypes.c_uint64)]  # noqa: RUF012


def _memory():
    memory = _library.smartinf_test_accelerator_memory
    memory.restype = _Memory
    return memory()


def reset_peak():
    """Returns the bytes that tensors take now."""
    _library.smartinf_test_accelerator_reset_peak()
    return _memory().current


def peak():
    """The most bytes that tensors took since reset_peak()."""
    return _memory().peak
