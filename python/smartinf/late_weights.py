"""The new weights of an overlapped update (`overlap`): units of one parameter each that never leave memory. Each module
waits for its own before it computes with them, whatever else uses one waits for that one, and nobody reads weights that are
being overwritten."""

import collections
import copyreg
import functools
import weakref

import torch

from smartinf.absent_parameter import Absent
from smartinf.errors import UsageError
from smartinf.modules import current_backward, give_class, tensors_in
from smartinf.residency import Hook, Place, Residency, attach

_waiting = weakref.WeakKeyDictionary()  # model -> need_all() of its LateWeights


class LateWeights(Residency):
    """pending: parameters, by index, whose new weights have not been handed over yet.
    early: those whose gradient is with the devices before step(); an early update may have overwritten them.
    shared: those that belong to several modules."""

    def __init__(self, layout):
        super().__init__(len(layout.params))
        self.pending, self.early, self.shared = self.at[Place.COMING], self.at[Place.WRITTEN], set()
        self._all, self._names, self._take = frozenset(range(len(layout.params))), layout.names, None
        self._scripted = set()  # those of TorchScript's modules, which read them where nothing waits
        self._taking_part = set()  # of those of the last step
        self._modules = collections.defaultdict(list)  # by index: (module, indices of all of the module's own)
        # By parameter what has updated it last: an object for each step(); before step() the backward pass that
        # completed its gradient.
        self._updated_by = {}

    def attach(self, session, model):
        """Puts the hooks on. Errors: UsageError that names a parameter that is in no module of `model`."""
        if isinstance(model, torch.jit.ScriptModule):
            raise UsageError("overlap: a model of TorchScript has no hooks that could wait for weights. Leave overlap out")
        index_of, take_weights = session.layout.index_of, weakref.WeakMethod(session.take_weights)

        def take(wanted):
            waiting = take_weights()
            if waiting is None:
                raise UsageError(
                    "the optimizer was deleted before the model had the last step's weights; call its close() first"
                )
            waiting(wanted)

        self._take = take
        in_modules, of_module = set(), {}
        for module in model.modules():
            own = frozenset({index_of.get(id(param)) for param in module.parameters(recurse=False)} - {None})
            self.shared |= own & in_modules
            in_modules |= own
            if isinstance(module, torch.jit.ScriptModule):  # has no hooks, and calls none
                self._scripted |= own
            elif own:
                of_module[module] = own
                for i in own:
                    self._modules[i].append((weakref.ref(module), own))
        if in_modules != self._all:
            raise UsageError(
                f"overlap: parameter {self._names[min(self._all - in_modules)]} is in no module of the model that was given. "
                "Give the model whose forward uses all parameters of the optimizer, or leave overlap out."
            )
        session.hooks += attach(self, model, of_module)
        for module in of_module:
            session.hooks.append(module.register_state_dict_pre_hook(Hook(self.need_all)))
            session.hooks.append(module.register_load_state_dict_pre_hook(Hook(self.need_all)))
        session.hooks.append(_Finished(model, self.need_all))

    # ---- Whoever needs values.

    def need(self, own, values=True):
        """Waits for these. values: whoever waits looks at weights, not only at gradients."""
        if not self.pending.isdisjoint(own):
            self._take(own)
        if values and not self.early.isdisjoint(own):
            raise UsageError(
                f"{self._names[min(own & self.early)]} is used between the end of its backward and step(), and an early update "
                'may have overwritten it already. Call step() or zero_grad() first, or make the optimizer with overlap="late".'
            )

    def need_all(self, *_, values=True):
        self.need(self._all, values)

    def begin_forward(self):
        # torch looks at more than a module's own parameters where it looks for a faster way without gradients.
        if not torch.is_grad_enabled():
            self.need_all()

    def before_forward(self, own):
        self.need(own)

    def use(self, tensor, name, written):
        self.need({tensor._smartinf[1]})
        return tensor

    def after_forward(self, own, output):
        """A backward through `output` needs the weights that it was computed with. torch compares versions where it
        has saved a weight, but names no parameter, and nothing is saved where a forward is computed again."""
        if not torch.is_grad_enabled():
            return
        before = {i: self._updated_by.get(i) for i in own}

        def check(_):
            this_pass = current_backward()
            for i, by in before.items():
                # What this very pass has completed it does not need any more, or torch finds it.
                if self._updated_by.get(i) not in (by, this_pass):
                    raise UsageError(
                        f"backward over a graph whose weights have been updated: {self._names[i]} has changed since "
                        "this forward. Compute the forward again after step()."
                    )

        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(check)

    # ---- From place to place.

    def put(self, i, param, place):
        super().put(i, param, place)
        if place is Place.HERE:
            vars(param).pop("_smartinf", None)  # nothing of it is in a pickle
        for module, own in self._modules[i] if place is not Place.WRITTEN else ():
            if module() is not None:
                _watch_attributes(module(), not self.pending.isdisjoint(own))

    def may_begin_early(self, layout, i):
        """Whether the devices may overwrite parameter i before step(). What a graph has saved of it may be needed by
        another part of the backward than the one that made its gradient."""
        param = layout.params[i]
        return i not in self.shared | self._scripted and not _held_elsewhere(param) and not _saved_in_graph(param)

    def begin_early(self, layout, i):
        """The devices have the gradient of parameter i and may update it before step()."""
        self._updated_by[i] = current_backward()
        torch.autograd.graph.increment_version(layout.params[i])
        self.put(i, layout.params[i], Place.WRITTEN)

    def begin(self, layout, taking_part):
        """step(): the devices update the parameters that take part. Returns those to take at once, because others
        hold their memory."""
        held = {i for i, param in enumerate(layout.params) if i not in self.early and _held_elsewhere(param)}
        self._taking_part = {i for i, taking in enumerate(taking_part) if taking}
        self._updated_by |= dict.fromkeys(self._taking_part, object())
        # Also those that do not take part: they may share a subgroup with one that does, and an early update that did
        # not foresee it may have overwritten them, until the devices have written them again.
        for i, param in enumerate(layout.params):
            if i in self._taking_part:
                # A graph of the weights before is of no use any more: torch's own check finds it.
                torch.autograd.graph.increment_version(param)
            self.put(i, param, Place.COMING)
        return held | self._scripted

    def take(self, core, layout, wanted):
        """Waits for those of `wanted` (None: all) that are pending, and hands them to their parameters."""
        taken = sorted(self.pending if wanted is None else self.pending & wanted)
        with torch.no_grad():
            for i in taken:
                segment = layout.segments[layout.segment_of[i]]
                core.wait_weights(segment.first, segment.count)
                self.put(i, layout.params[i], Place.HERE)
                if i in self._taking_part:
                    layout.copy_back(i)
            layout.copied_back()
            layout.snapshot([i for i in taken if i in self._taking_part])

    def forget(self, layout):
        """The parameters hold the committed step's weights again, or are about to be given them."""
        for i in self.pending | self.early:
            self.put(i, layout.params[i], Place.HERE)


class _Attributes(dict):
    """A module's parameters by name, of which those that it hands out as its attributes have their values: they may go
    to code where torch asks nobody, such as functions of TorchScript, extension modules and torch.tensor()."""

    def __getitem__(self, name):
        param = super().__getitem__(name)
        return param._smartinf[0].use(param, "", False) if isinstance(param, Absent) else param

    def __reduce_ex__(self, protocol):
        return dict, (dict(self),)


def _watch_attributes(module, watch):
    there = module.__dict__["_parameters"]
    if isinstance(there, _Attributes) != watch:
        module.__dict__["_parameters"] = (_Attributes if watch else dict)(there)


def _held_elsewhere(param):
    """Whether another tensor, or an array of numpy, has the parameter's memory: a view, p.data, p.detach(), what a graph
    has saved of it. Nobody can know when that is read."""
    return _uses(param) > _uses(torch.empty(0))


def _uses(tensor):
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _saved_in_graph(param):
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


class _Finished:
    """Until removed, whoever walks over the model's parameters finds finished weights. The model gets a class of
    its own for that, as FSDP2 does; a copy of the model is not waited for."""

    def __init__(self, model, need_all):
        self._model, self._plain = weakref.ref(model), type(model)
        plain = self._plain

        def finished(name, values):
            method = getattr(plain, name)

            def finish(self, *args, **kwargs):
                if self in _waiting:
                    _waiting[self](values=values)
                return method(self, *args, **kwargs)

            return finish

        def reduce_ex(self, protocol):  # copies and pickles are of the model's own class
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
            "named_parameters": finished("named_parameters", False),  # clip_grad_norm_(model.parameters()) precedes step()
            "named_modules": finished("named_modules", False),  # parameters() of a module around the model asks for them
            "_apply": finished("_apply", True),  # .to(), .half(), share_memory() ...
            "zero_grad": zero_grad,
            "__reduce_ex__": reduce_ex,
        }
        give_class(model, body)
        _waiting[model] = need_all

    def remove(self):
        model = self._model()
        if model is not None:
            _waiting.pop(model, None)
            model.__class__ = self._plain
