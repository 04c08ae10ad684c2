"""The hooks on a streamed model: each module has its units in memory while it computes forward and backward."""

import threading

import torch

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_WEIGHT, _OUTER = "weight", "outer"  # how a saved tensor was packed; else its version


def attach(stream, model, of_module, blocks, experts):
    """of_module: {module: units}. blocks: those of them whose forward may be computed again in backward. experts:
    {module: parameters}. Returns handles; remove() of each takes the hooks off."""

    @torch.compiler.disable
    def begin(*_):
        # A forward that is computed again in backward is no new pass.
        if torch._C._current_graph_task_id() == -1:
            stream.begin_forward()

    handles = [model.register_forward_pre_hook(begin, prepend=True)]
    for module, units in of_module.items():
        hooks = _ModuleHooks(stream, tuple(units), module in blocks)
        handles.append(module.register_forward_pre_hook(hooks.before, prepend=True))
        handles.append(module.register_forward_hook(hooks.after, always_call=True))
    for module, params in experts.items():
        indices = [stream.index_of(param) for param in params if stream.index_of(param) is not None]
        if indices:
            handles.append(module.register_forward_pre_hook(_expert_hook(stream, indices), with_kwargs=True))
    return handles


def _expert_hook(stream, indices):
    @torch.compiler.disable
    def read(module, args, kwargs):
        chosen = kwargs.get("top_k_index", args[1] if len(args) > 1 else None)
        rows = range(module.num_experts)
        if isinstance(chosen, torch.Tensor) and not chosen.is_floating_point():
            rows = [row for row in chosen.unique().tolist() if row < module.num_experts]
        stream.read_experts(indices, rows)

    return read


class _ModuleHooks:
    def __init__(self, stream, units, watches_backward):
        self._stream, self._units, self._watches_backward = stream, units, watches_backward
        self._entered = threading.local()  # .saving: what is to be taken off after the forward, innermost last

    @torch.compiler.disable
    def before(self, *_):
        held, saving = [], None
        try:
            for unit in self._units:
                self._stream.gather(unit)
                held.append(unit)
            if torch.is_grad_enabled():
                saving = _saving(self._stream)
                saving.__enter__()
        except BaseException:
            for unit in held:
                self._stream.release(unit)
            raise
        if not hasattr(self._entered, "saving"):
            self._entered.saving = []
        self._entered.saving.append(saving)

    @torch.compiler.disable
    def after(self, module, given, output):
        if not getattr(self._entered, "saving", None):
            return  # before() failed
        saving = self._entered.saving.pop()
        if saving is not None:
            saving.__exit__(None, None, None)
        if self._watches_backward and torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._enter_backward)
        for unit in self._units:
            self._stream.release(unit)

    @torch.compiler.disable
    def _enter_backward(self, _):
        self._stream.enter_backward(self._units)

    def __reduce__(self):
        # A copy of the module, or a pickle, has hooks that do nothing.
        return _NoHooks, ()


class _NoHooks:
    def before(self, *_):
        """Nothing."""

    def after(self, *_):
        """Likewise."""


def _saving(stream):
    """What autograd saves of the weights is found again in backward, wherever they are then. The rest goes the way
    that it would have gone: to the hooks that were there before, such as those of gradient checkpointing."""
    outer = _top_hooks(False)
    outer_pack, outer_unpack = outer if outer is not None else (None, None)

    def pack(tensor):
        saved = stream.saved_as(tensor)
        if saved is not None:
            return _WEIGHT, saved
        if outer_pack is not None:
            return _OUTER, outer_pack(tensor)
        # Detached: a tensor that its own graph keeps would never be freed.
        return tensor._version, tensor.detach()

    def unpack(packed):
        how, what = packed
        if how is _WEIGHT:
            return stream.restore(what)
        if how is _OUTER:
            return outer_unpack(what)
        if what._version != how:
            raise RuntimeError(
                f"a tensor of {list(what.shape)} that is needed for gradient computation has been modified by an "
                f"inplace operation: it is at version {what._version}, and was saved at version {how}"
            )
        return what

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def tensors_in(output):
    """The tensors of what a module returns."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (list, tuple, dict)):
        for part in output.values() if isinstance(output, dict) else output:
            yield from tensors_in(part)
