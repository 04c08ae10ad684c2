"""What overlap puts on the model and its parameters: each module waits for its own parameters' new weights before it
computes with them, whatever else uses one waits for that one, and nobody reads weights that are being overwritten."""

import collections
import copyreg
import functools
import weakref

import torch

from smartinf.errors import UsageError
from smartinf.guarded_parameter import (
    guard,
    guard_attributes,
    held_elsewhere,
    saved_in_graph,
    unguard,
    unguard_attributes,
)
from smartinf.modules import give_class, tensors_in

_waiting = weakref.WeakKeyDictionary()  # model -> wait_for_all() of its LateWeights


class LateWeights:
    """pending: parameters, by index, whose new weights have not been handed over yet.
    early: those whose gradient is with the devices before step(); an early update may have overwritten them.
    Both are guarded: a module waits for its own in a hook, and every other use of the parameter for itself.
    shared: those that belong to several modules."""

    def __init__(self):
        self.pending, self.early, self.shared = set(), set(), set()
        self._scripted = set()  # those of TorchScript's modules, which read them where nothing waits
        self._taking_part = set()  # of those of the last step
        self._ready = None  # by index: waits for that parameter
        self._modules = collections.defaultdict(list)  # by index: (module, indices of all of the module's own)
        # By parameter what has updated it last: an object for each step(); before step() the backward pass that
        # completed its gradient.
        self._updated_by = {}

    def attach(self, session, model):
        """Puts the hooks on. Errors: UsageError that names a parameter that is in no module of `model`."""
        if isinstance(model, torch.jit.ScriptModule):
            raise UsageError("overlap: a model of TorchScript has no hooks that could wait for weights. Leave overlap out")
        names, index_of = session.layout.names, session.layout.index_of
        take_weights = weakref.WeakMethod(session.take_weights)

        def take(wanted=None):
            waiting = take_weights()
            if waiting is None:
                raise UsageError(
                    "the optimizer was deleted before the model had the last step's weights; call its close() first"
                )
            waiting(wanted)

        def wait_for_all(*_, values=True):
            """values: whoever waits looks at weights, not only at gradients."""
            if self.pending:
                take()
            if values and self.early:
                self._reject_early(names, self.early)

        @torch.compiler.disable
        def wait_for(own, *_):
            if not self.pending.isdisjoint(own):
                take(own)
            if not self.early.isdisjoint(own):
                self._reject_early(names, own & self.early)

        def after_forward(own):
            @torch.compiler.disable
            def watch(module, given, output):
                if torch.is_grad_enabled():
                    self._watch_backward(names, own, output)

            return watch

        @torch.compiler.disable
        def before_evaluation(*_):
            # torch looks at more than a module's own parameters where it looks for a faster way without gradients.
            if not torch.is_grad_enabled():
                wait_for_all()

        self._ready = [functools.partial(wait_for, {i}) for i in range(len(names))]
        session.hooks.append(model.register_forward_pre_hook(_Hook(before_evaluation)))
        in_modules = set()
        for module in model.modules():
            own = {index_of.get(id(param)) for param in module.parameters(recurse=False)} - {None}
            if not own:
                continue
            self.shared |= own & in_modules
            in_modules |= own
            if isinstance(module, torch.jit.ScriptModule):  # has no hooks, and calls none
                self._scripted |= own
                continue
            for i in own:
                self._modules[i].append((weakref.ref(module), own))
            session.hooks += [
                module.register_forward_pre_hook(_Hook(functools.partial(wait_for, frozenset(own)))),
                module.register_forward_hook(_Hook(after_forward(frozenset(own)))),
                module.register_state_dict_pre_hook(_Hook(wait_for_all)),
                module.register_load_state_dict_pre_hook(_Hook(wait_for_all)),
            ]
        outside = [name for i, name in enumerate(names) if i not in in_modules]
        if outside:
            raise UsageError(
                f"overlap: parameter {outside[0]} is in no module of the model that was given. Give the model "
                "whose forward uses all parameters of the optimizer, or leave overlap out."
            )
        session.hooks.append(_Finished(model, wait_for_all))

    @staticmethod
    def _reject_early(names, which):
        raise UsageError(
            f"{names[min(which)]} is used between the end of its backward and step(), and an early update may have "
            'overwritten it already. Call step() or zero_grad() first, or make the optimizer with overlap="late".'
        )

    def _watch_backward(self, names, own, output):
        """A backward through `output` needs the weights that it was computed with. torch compares versions where it
        has saved a weight, but names no parameter, and nothing is saved where a forward is computed again."""
        before = {i: self._updated_by.get(i) for i in own}

        def check(_):
            this_pass = torch._C._current_graph_task_id()
            for i, by in before.items():
                # What this very pass has completed it does not need any more, or torch finds it.
                if self._updated_by.get(i) not in (by, this_pass):
                    raise UsageError(
                        f"backward over a graph whose weights have been updated: {names[i]} has changed since "
                        "this forward. Compute the forward again after step()."
                    )

        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(check)

    def may_begin_early(self, layout, i):
        """Whether the devices may overwrite parameter i before step(). What a graph has saved of it may be needed by
        another part of the backward than the one that made its gradient."""
        param = layout.params[i]
        return i not in self.shared | self._scripted and not held_elsewhere(param) and not saved_in_graph(param)

    def begin_early(self, layout, i):
        """The devices have the gradient of parameter i and may update it before step()."""
        self.early.add(i)
        self._updated_by[i] = torch._C._current_graph_task_id()
        torch.autograd.graph.increment_version(layout.params[i])
        guard(layout.params[i], self._ready[i])

    def begin(self, layout, taking_part):
        """step(): the devices update the parameters that take part. Returns those to take at once, because others
        hold their memory."""
        held = {i for i, param in enumerate(layout.params) if i not in self.early and held_elsewhere(param)}
        held |= self._scripted
        self.early.clear()
        # Also those that do not take part: they may share a subgroup with one that does, and an early update that did
        # not foresee it may have overwritten them, until the devices have written them again.
        self.pending = set(range(len(layout.params)))
        self._taking_part = {i for i, taking in enumerate(taking_part) if taking}
        self._updated_by |= dict.fromkeys(self._taking_part, object())
        for i, param in enumerate(layout.params):
            if i in self._taking_part:
                # A graph of the weights before is of no use any more: torch's own check finds it.
                torch.autograd.graph.increment_version(param)
            guard(param, self._ready[i])
            for module, _ in self._modules[i]:
                if module() is not None:
                    guard_attributes(module())
        return held

    def take(self, core, layout, wanted):
        """Waits for those of `wanted` (None: all) that are pending, and hands them to their parameters."""
        taken = sorted(self.pending if wanted is None else self.pending & wanted)
        with torch.no_grad():
            for i in taken:
                segment = layout.segments[layout.segment_of[i]]
                core.wait_weights(segment.first, segment.count)
                unguard(layout.params[i])
                if i in self._taking_part:
                    layout.copy_back(i)
                self.pending.discard(i)
                self._unguard_attributes(i)
            layout.snapshot([i for i in taken if i in self._taking_part])

    def _unguard_attributes(self, i):
        for module, own in self._modules[i]:
            if self.pending.isdisjoint(own) and module() is not None:
                unguard_attributes(module())

    def forget(self, layout):
        """The parameters hold the committed step's weights again, or are about to be given them."""
        forgotten = self.pending | self.early
        self.pending.clear()
        self.early.clear()
        for i in forgotten:
            unguard(layout.params[i])
            self._unguard_attributes(i)


class _Hook:
    """Of a module. A copy of the module, or a pickle, has one that does nothing."""

    def __init__(self, call):
        self._call = call

    def __call__(self, *given):
        self._call(*given)

    def __reduce__(self):
        return _no_hook, ()


def _no_hook():
    return _nothing


def _nothing(*_):
    pass


class _Finished:
    """Until removed, whoever walks over the model's parameters finds finished weights. The model gets a class of
    its own for that, as FSDP2 does; a copy of the model is not waited for."""

    def __init__(self, model, wait_for_all):
        self._model, self._plain = weakref.ref(model), type(model)
        plain = self._plain

        def finish(self, values=True):
            wait = _waiting.get(self)
            if wait is not None:
                wait(values=values)

        def named_parameters(self, *args, **kwargs):
            finish(self, values=False)  # clip_grad_norm_(model.parameters()) comes before step()
            return plain.named_parameters(self, *args, **kwargs)

        def named_modules(self, *args, **kwargs):  # parameters() of a module around the model asks for them
            finish(self, values=False)
            return plain.named_modules(self, *args, **kwargs)

        def apply(self, *args, **kwargs):  # .to(), .half(), share_memory() ...
            finish(self)
            return plain._apply(self, *args, **kwargs)

        def reduce_ex(self, protocol):  # copies and pickles are of the model's own class
            finish(self)
            made, args, *rest = plain.__reduce_ex__(self, protocol)
            if made is copyreg.__newobj__:  # pickle compares its class with the object's
                made, args = copyreg._reconstructor, (plain, object, None)
            return made, args, *rest

        def zero_grad(self, set_to_none=True):
            wait = _waiting.pop(self, None)  # looks at gradients alone
            try:
                plain.zero_grad(self, set_to_none)
            finally:
                if wait is not None:
                    _waiting[self] = wait

        body = {
            "named_parameters": named_parameters,
            "named_modules": named_modules,
            "zero_grad": zero_grad,
            "_apply": apply,
            "__reduce_ex__": reduce_ex,
        }
        give_class(model, body)
        _waiting[model] = wait_for_all

    def remove(self):
        model = self._model()
        if model is not None:
            _waiting.pop(model, None)
            model.__class__ = self._plain
