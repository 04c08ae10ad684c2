"""A parameter whose weights are not there yet, or may be overwritten: whoever uses its values waits for them, or is
refused, by whatever way it came to the parameter."""

import functools

import torch

from smartinf.modules import tensors_in
from smartinf.released_parameter import METHODS_WITHOUT_VALUES, NAMES_THAT_READ, name_of

_POINTERS = {"data_ptr", "untyped_storage"}  # of values that are read behind torch's back
_NAMES_WITHOUT_VALUES = (METHODS_WITHOUT_VALUES - _POINTERS) | {"grad"}  # torch.autograd.grad
_PROPERTIES_WITH_VALUES = NAMES_THAT_READ | {"data", "__cuda_array_interface__"}


class _Guarded:
    """What guard() puts before a parameter's own class."""

    __slots__ = ()

    def __deepcopy__(self, memo):
        self._smartinf_ready()
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol):
        self._smartinf_ready()
        return self.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _uses_values(func):
            for tensor in tensors_in((args, kwargs)):
                if isinstance(tensor, _Guarded):
                    tensor._smartinf_ready()
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _uses_values(func):
    name, is_set = name_of(func)
    if is_set:
        return name not in ("grad", "requires_grad")
    if getattr(func, "__name__", "") == "__get__":
        return name in _PROPERTIES_WITH_VALUES
    return name not in _NAMES_WITHOUT_VALUES


@functools.lru_cache
def _guarded(plain):
    named = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(plain.__name__, (_Guarded, plain), {"__slots__": ()} | named)


def guard(param, ready):
    """From here on ready() comes before any use of the parameter's values: it calls unguard(), or raises."""
    param._smartinf_ready = ready
    if not isinstance(param, _Guarded):
        param.__class__ = _guarded(type(param))


def unguard(param):
    if isinstance(param, _Guarded):
        param.__class__ = type(param).__mro__[2]
        del param._smartinf_ready


class _Attributes(dict):
    """A module's parameters by name, of which those that it hands out as its attributes have their values: they may go
    to code where torch asks nobody, such as functions of TorchScript, extension modules and torch.tensor()."""

    def __getitem__(self, name):
        param = super().__getitem__(name)
        if isinstance(param, _Guarded):
            param._smartinf_ready()
        return param

    def __reduce_ex__(self, protocol):
        return dict, (dict(self),)


def guard_attributes(module):
    if not isinstance(module.__dict__["_parameters"], _Attributes):
        module.__dict__["_parameters"] = _Attributes(module.__dict__["_parameters"])


def unguard_attributes(module):
    if isinstance(module.__dict__["_parameters"], _Attributes):
        module.__dict__["_parameters"] = dict(module.__dict__["_parameters"])


def held_elsewhere(param):
    """Whether another tensor, or an array of numpy, has the parameter's memory: a view, p.data, p.detach(), what a graph
    has saved of it. Nobody can know when that is read."""
    return _uses(param) > _uses(torch.empty(0))


def _uses(tensor):
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)


def saved_in_graph(param):
    """In backward, behind the gradient of `param`: whether a graph has saved it where it was frozen, which is no part of
    that gradient."""
    return hasattr(param, "_use_count") and param._use_count() > _uses_behind_gradient()


@functools.cache
def _uses_behind_gradient():
    uses, param = [], torch.nn.Parameter(torch.ones(1))
    param.register_post_accumulate_grad_hook(lambda param: uses.append(param._use_count()))
    with torch.enable_grad():
        (param * param).sum().backward()
    return uses[0]
