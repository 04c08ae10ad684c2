"""A parameter while its unit is not in memory: it has a shape and no values, and whoever reads it gets them from the
devices."""

import torch

from smartinf.errors import UsageError
from smartinf.modules import mapped

NAMES_THAT_READ = {"T", "mT", "H", "mH", "real", "imag"}  # of torch.Tensor's properties
METHODS_WITHOUT_VALUES = {
    "dim", "element_size", "get_device", "has_names", "is_complex", "is_contiguous", "is_floating_point", "is_inference",
    "is_pinned", "is_set_to", "is_shared", "is_signed", "nelement", "numel", "register_hook", "requires_grad_", "size",
    "register_post_accumulate_grad_hook", "storage_offset", "stride", "data_ptr", "__hash__", "__len__", "is_same_size",
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_empty",
    "new_ones", "new_full", "is_nonzero_size", "__dir__", "__setstate__", "backward", "retain_grad", "untyped_storage",
}  # fmt: skip
_WRITING_OPERATORS = {"__setitem__", "__delitem__"} | {
    f"__i{name}__" for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
}
_WITHOUT_GRADIENT = {"detach"}


class ReleasedParameter(torch.nn.Parameter):
    """The class of such a parameter, until its values are there again. Shape, type, device and gradient are as ever;
    what needs values is computed with a copy of them, read for it alone. Errors: UsageError that names the parameter,
    for a write, and in a backward that would leave its gradient out."""

    def __repr__(self, *, tensor_contents=None):
        stream, index = self._smartinf
        return f"Parameter containing:\n({stream.names[index]}: {list(self.shape)}, {self.dtype}, not in memory)"

    def __deepcopy__(self, memo):
        # Of a whole model the model refuses it; a module that is trained in place of one has its copy in memory.
        values = _values_of(self, False)
        memo[id(self)] = made = values if hasattr(self, "_smartinf_handle") else torch.nn.Parameter(values, self.requires_grad)
        return made

    def __reduce_ex__(self, protocol):
        values = _values_of(self, False)
        if not hasattr(self, "_smartinf_handle"):
            values = torch.nn.Parameter(values, self.requires_grad)
        return values.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name, is_set = name_of(func)
        with torch._C.DisableTorchFunctionSubclass():
            if is_set and name not in ("grad", "requires_grad"):
                _refuse_write(args[0])
            if name == "data" and not is_set:
                return handle(args[0])
            if name == "data_ptr" and hasattr(args[0], "_smartinf_handle"):
                _refuse(args[0], "asked for its memory. Take a copy first: tensor.clone(), or use save_pretrained()")
            is_property = getattr(func, "__name__", "") in ("__get__", "__set__")
            if is_property and name not in NAMES_THAT_READ or name in METHODS_WITHOUT_VALUES:
                return func(*args, **kwargs)
            if _writes(name):
                _refuse_writes(args[0] if args else next(iter(kwargs.values()), None))
            _refuse_writes(kwargs.get("out"))
            records = torch.is_grad_enabled() and name not in _WITHOUT_GRADIENT
            args, kwargs = mapped((args, kwargs), lambda tensor: _values_of(tensor, records))
            return func(*args, **kwargs)


def _writes(name):
    """Whether a function of torch writes to its first argument, a tensor or a list of them."""
    if name.startswith("__"):
        return name in _WRITING_OPERATORS
    return name.endswith("_") or name.startswith("_fused_")


def _refuse_writes(given):
    for part in given if isinstance(given, (list, tuple)) else [given]:
        if isinstance(part, ReleasedParameter):
            _refuse_write(part)


def name_of(func):
    """(name of the function or property, whether the property is set)."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(func.__self__, "__name__", ""), name == "__set__"
    return name, False


def handle(param):
    """What stands for param.data, and for the parameter in a state dict: values are read when they are used, and writes
    are refused."""
    stand_in = getattr(param, "_smartinf_stand_in", None)
    if stand_in is None:
        # Of one parameter all have one storage, by which shared tensors are known.
        stand_in = without_values(param.shape, param.dtype, param.device)
        stand_in.untyped_storage().resize_(param.itemsize)
        param._smartinf_stand_in = stand_in
    made = torch.Tensor._make_subclass(ReleasedParameter, stand_in)
    made._smartinf, made._smartinf_handle = param._smartinf, True
    return made


def without_values(shape, dtype, device):
    """A tensor of that shape whose storage is empty."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def _values_of(tensor, records):
    if not isinstance(tensor, ReleasedParameter):
        return tensor
    stream, index = tensor._smartinf
    values = stream.read(index)
    if records and tensor.requires_grad:
        # Whoever only looks, as adapters do when they are made, calls no backward.
        values.requires_grad_()
        values.register_hook(lambda _: _refuse_gradient(tensor))
    return values


def _refuse_gradient(param):
    _refuse(
        param,
        "used outside of the forward of the module that holds it, where its gradient would be lost. Read it "
        "under torch.no_grad(), freeze it, or name the modules that use it as blocks: layers=[...]",
    )


def set_to_itself(param):
    """Makes param.set_(param), as torch's parametrizations call it around each forward, what it says: nothing. torch
    counts it as a write."""
    param.set_ = lambda source, *more: param if source is param else torch.Tensor.set_(param, source, *more)


def _refuse(param, what):
    stream, index = param._smartinf
    raise UsageError(f"parameter {stream.names[index]} is not in memory and was {what}.")


def _refuse_write(param):
    _refuse(
        param,
        "to be written. Write it before the model is streamed (load_state_dict, resize_token_embeddings, merging, adapters "
        "that begin with a part of it), and stream it then",
    )
