"""Updates behind the next forward (overlap=model): step() returns while the devices update, and each module waits
for its own parameters before it computes with them."""

import weakref

import torch

from smartinf.errors import UsageError

_waiting = weakref.WeakKeyDictionary()  # model -> what waits for all of its parameters


class LateWeights:
    """pending: parameters, by index, whose new weights have not been handed over yet."""

    def __init__(self):
        self.pending = set()

    def attach(self, session, model):
        """Puts the hooks on. Errors: UsageError that names a parameter that is in no module of `model`."""
        layout, in_modules, take_weights = session.layout, set(), weakref.WeakMethod(session.take_weights)

        def wait_for(own):
            @torch.compiler.disable
            def wait(*_):
                if not self.pending.isdisjoint(own):
                    take_weights()(own)

            return wait

        def wait_for_all(*_):
            take_weights()()

        for module in model.modules():
            own = {layout.index_of.get(id(param)) for param in module.parameters(recurse=False)} - {None}
            if not own:
                continue
            in_modules |= own
            session.hooks += [
                module.register_forward_pre_hook(wait_for(frozenset(own))),
                module.register_state_dict_pre_hook(wait_for_all),
                module.register_load_state_dict_pre_hook(wait_for_all),
            ]
        outside = [name for i, name in enumerate(layout.names) if i not in in_modules]
        if outside:
            raise UsageError(
                f"overlap: parameter {outside[0]} is in no module of the model that was given. Give the model "
                "whose forward uses all parameters of the optimizer, or leave overlap out."
            )
        session.hooks.append(_Finished(model, take_weights))

    def begin(self, layout, taking_part):
        """The devices update the parameters that take part."""
        self.pending = {i for i, taking in enumerate(taking_part) if taking}
        for i in self.pending:
            # A graph of the weights before is of no use any more: torch's own check finds it.
            torch.autograd.graph.increment_version(layout.params[i])

    def take(self, core, layout, wanted):
        """Waits for those of `wanted` (None: all) that are pending, and hands them to their parameters."""
        with torch.no_grad():
            for i in sorted(self.pending if wanted is None else self.pending & wanted):
                segment = layout.segments[layout.segment_of[i]]
                core.wait_weights(segment.first, segment.count)
                layout.copy_back(i)
                self.pending.discard(i)


class _Finished:
    """Until removed, whoever walks over the model's parameters finds finished weights. The model gets a class of
    its own for that, as FSDP2 does; a copy of the model is not waited for."""

    def __init__(self, model, take_weights):
        self._model, self._plain = weakref.ref(model), type(model)
        plain = self._plain

        def finish(self):
            take_weights = _waiting.get(self, lambda: None)()
            if take_weights is not None:
                take_weights()

        def named_parameters(self, *args, **kwargs):
            finish(self)
            return plain.named_parameters(self, *args, **kwargs)

        def reduce_ex(self, protocol):  # copies and pickles are of the model's own class
            finish(self)
            made, args, *rest = plain.__reduce_ex__(self, protocol)
            return made, tuple(plain if arg is type(self) else arg for arg in args), *rest

        def zero_grad(self, set_to_none=True):
            waiting = _waiting.pop(self, None)  # looks at gradients alone
            try:
                plain.zero_grad(self, set_to_none)
            finally:
                if waiting is not None:
                    _waiting[self] = waiting

        body = {
            "named_parameters": named_parameters,
            "zero_grad": zero_grad,
            "__reduce_ex__": reduce_ex,
            "__module__": plain.__module__,
            "__qualname__": plain.__qualname__,
            "__doc__": plain.__doc__,
        }
        model.__class__ = type(plain.__name__, (plain,), body)
        _waiting[model] = take_weights

    def remove(self):
        model = self._model()
        if model is not None:
            _waiting.pop(model, None)
            model.__class__ = self._plain

