"""What hooks on anybody's modules have in common: tensors within what modules take and return, a class of a model's own,
and the checks that torch leaves out where saved tensors have hooks."""

import torch


def tensors_in(given):
    """The tensors of what a module takes or returns."""
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (list, tuple, dict)):
        for part in given.values() if isinstance(given, dict) else given:
            yield from tensors_in(part)


def mapped(given, change):
    """`given` with change(tensor) in place of each tensor, in the containers that a module takes and returns. A dict,
    which may be of a class of the model's own, is changed in place."""
    if isinstance(given, torch.Tensor):
        return change(given)
    if isinstance(given, tuple):
        made = [mapped(part, change) for part in given]
        return type(given)(*made) if hasattr(given, "_fields") else tuple(made)
    if isinstance(given, list):
        return [mapped(part, change) for part in given]
    if isinstance(given, dict):
        for key, value in given.items():
            new = mapped(value, change)
            if new is not value:
                given[key] = new
        return given
    return given


def give_class(model, methods):
    """Gives a model a class of its own with these methods, of the same name as the one that it had, as FSDP2 does."""
    plain = type(model)
    named = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    model.__class__ = type(plain.__name__, (plain,), methods | named)


def current_backward():
    """A number of the backward pass that this thread is in; -1: none."""
    return torch._C._current_graph_task_id()


def top_saved_tensors_hooks():
    """(pack, unpack) that autograd calls at present, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def check_version(tensor, version, shape, dtype):
    """torch checks saved tensors itself only where there are no hooks on them. tensor: has the version counter."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{dtype} {list(shape)}] is at version {tensor._version}; expected version {version} instead."
        )
