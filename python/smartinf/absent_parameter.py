"""The class of a parameter whose values are not in memory, or not finished: whoever uses them, by whatever way it came to
the parameter, asks the parameter's Residency for them."""

import functools

import torch

from smartinf.modules import mapped, tensors_in

_PROPERTIES_WITH_VALUES = {"T", "mT", "H", "mH", "real", "imag", "data", "__cuda_array_interface__"}
_SET_WITHOUT_VALUES = {"grad", "requires_grad"}
POINTERS = {"data_ptr", "untyped_storage"}  # to values that are read behind torch's back
_WITHOUT_VALUES = {
    "dim", "element_size", "get_device", "has_names", "is_complex", "is_contiguous", "is_floating_point", "is_inference",
    "is_pinned", "is_set_to", "is_shared", "is_signed", "nelement", "numel", "register_hook", "requires_grad_", "size",
    "register_post_accumulate_grad_hook", "storage_offset", "stride", "__hash__", "__len__", "is_same_size", "zeros_like",
    "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_empty", "new_ones", "new_full",
    "is_nonzero_size", "__dir__", "__setstate__", "backward", "retain_grad", "grad",
}  # fmt: skip
_WRITING_OPERATORS = {"__setitem__", "__delitem__"} | {
    f"__i{name}__" for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
}


class Absent:
    """Stands before the parameter's own class. Shape, type, device and gradient are as ever. `_smartinf` of the parameter:
    its Residency, and its index there."""

    __slots__ = ()

    def __repr__(self, *, tensor_contents=None):
        return self._smartinf[0].described(self)

    def __deepcopy__(self, memo):
        whole = self._smartinf[0].whole(self)
        memo[id(self)] = made = whole.__deepcopy__(memo) if whole is self else whole
        return made

    def __reduce_ex__(self, protocol):
        return self._smartinf[0].whole(self).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name, uses, writes = _use_of(func)
        if not uses:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "data" and not writes:
            return args[0]._smartinf[0].data(args[0])
        first = args[0] if args else next(iter(kwargs.values()), None)
        written = {id(tensor) for tensor in tensors_in((first if writes else None, kwargs.get("out")))}

        def use(tensor):
            return tensor._smartinf[0].use(tensor, name, id(tensor) in written) if isinstance(tensor, Absent) else tensor

        args, kwargs = mapped((args, kwargs), use)
        return func(*args, **kwargs)


def _use_of(func):
    """(name of the function or property, whether it uses values, whether it writes to its first argument, a tensor or a
    list of them)."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(func.__self__, "__name__", "")
        return name, name in _PROPERTIES_WITH_VALUES, False
    if name == "__set__":
        name = getattr(func.__self__, "__name__", "")
        return name, name not in _SET_WITHOUT_VALUES, True
    special = name.startswith("__")
    writes = name in _WRITING_OPERATORS if special else name.endswith("_") or name.startswith("_fused_")
    return name, name not in _WITHOUT_VALUES, writes


@functools.lru_cache
def absent_class(plain):
    """`plain`, a class of tensors, as it is while values are absent; of the same name."""
    named = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(plain.__name__, (Absent, plain), {"__slots__": ()} | named)


def without_values(shape, dtype, device):
    """A tensor of that shape whose storage is empty."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor
