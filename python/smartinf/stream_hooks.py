"""The hooks on a streamed model: each module has its units in memory while it computes forward and backward."""

import inspect
import threading

import torch

from smartinf.modules import check_version, mapped, tensors_in, top_saved_tensors_hooks

_WEIGHT, _OUTER = "weight", "outer"  # how a saved tensor was packed; else its version


def attach(stream, model, of_module, blocks, experts):
    """of_module: {module: units}. blocks: those of them whose forward may be computed again in backward. experts:
    {module: parameters}."""

    @torch.compiler.disable
    def begin(*_):
        # A forward that is computed again in backward is no new pass.
        if torch._C._current_graph_task_id() == -1:
            _leave_abandoned(stream)
            stream.begin_forward()

    model.register_forward_pre_hook(begin, prepend=True)
    for module, units in of_module.items():
        hooks = _ModuleHooks(stream, tuple(units), module in blocks)
        module.register_forward_pre_hook(hooks.before, prepend=True)
        module.register_forward_hook(hooks.after, always_call=True)
    for module, params in experts.items():
        indices = [stream.index_of(param) for param in params if stream.index_of(param) is not None]
        if indices:
            module.register_forward_pre_hook(_expert_hook(stream, module, indices), with_kwargs=True)


def _expert_hook(stream, module, indices):
    signature = inspect.signature(module.forward)

    @torch.compiler.disable
    def read(_, args, kwargs):
        chosen = signature.bind(*args, **kwargs).arguments["top_k_index"]
        stream.read_experts(indices, [row for row in chosen.unique().tolist() if row < module.num_experts])

    return read


# What was entered before a module's forward and is to be left after it, innermost last: [(module's hooks, context)].
_entered = threading.local()


def _leave_abandoned(stream):
    """torch calls no hooks after a forward that KeyboardInterrupt has ended. At the beginning of a pass none is open."""
    stack = getattr(_entered, "stack", [])
    while stack and stack[-1][0]._stream is stream:
        hooks, saving = stack.pop()
        hooks.leave(saving)


class _ModuleHooks:
    def __init__(self, stream, units, watches_backward):
        self._stream, self._units, self._watches_backward = stream, units, watches_backward

    def __deepcopy__(self, memo):
        return _ModuleHooks(self._stream, (), False)  # a copy of a module has its parameters in memory

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
        if not hasattr(_entered, "stack"):
            _entered.stack = []
        _entered.stack.append((self, saving))

    @torch.compiler.disable
    def after(self, module, given, output):
        stack = getattr(_entered, "stack", None)
        if not stack or stack[-1][0] is not self:
            return None  # before() failed
        _, saving = stack.pop()
        try:
            # What a module returns of its weights is not there any longer than they are.
            saved_as = self._stream.saved_as
            if any(saved_as(tensor) is not None for tensor in tensors_in(output)):
                output = mapped(output, lambda t: t if saved_as(t) is None else t.clone())
        finally:
            self.leave(saving)
        if self._watches_backward and torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._enter_backward)
        return output

    def leave(self, saving):
        if saving is not None:
            saving.__exit__(None, None, None)
        for unit in self._units:
            self._stream.release(unit)

    @torch.compiler.disable
    def _enter_backward(self, _):
        self._stream.enter_backward(self._units)


def _saving(stream):
    """What autograd saves of the weights is found again in backward, wherever they are then. The rest goes the way
    that it would have gone: to the hooks that were there before, such as those of gradient checkpointing."""
    outer = top_saved_tensors_hooks()
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
        check_version(what, how, what.shape, what.dtype)
        return what

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

