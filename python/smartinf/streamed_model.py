"""Which models are streamed, and what belongs to each."""

import weakref

_streamed = weakref.WeakKeyDictionary()  # model -> StreamedModel


class StreamedModel:
    """What belongs to a streamed model. stream: None where all of it stays in memory. devices: as an optimizer takes
    them. found: its Units. plan: engine_bytes and gradient_bytes of the budget, for the buffers of an optimizer and for
    gradients on their way to it. blocks: the modules that are a unit whole."""

    def __init__(self, stream, devices, found, plan):
        self.stream, self.devices, self.plan, self.blocks = stream, devices, plan, found.blocks
        of_units = [param for unit in found.units for _, param in unit.params]
        self._places = {id(param): place for place, param in enumerate(of_units)}
        self.optimizer = self.session = None  # a weak reference to the one that trains it, and its session
        self.pass_ended = lambda: None  # gives what is called after batches went through the model together

    def place(self, param):
        """Among the parameters of all units, also of those that stay in memory; -1: it is in none."""
        return self._places.get(id(param), -1)

    def close_deleted_optimizer(self):
        """The session of an optimizer lives as long as the model needs its weights, also where the optimizer was
        deleted; a new one takes its place."""
        if self.optimizer is not None and self.optimizer() is None:
            self.session.close()
            self.optimizer = self.session = None


def register(model, *parts):
    """They belong to `model` from now on."""
    _streamed[model] = StreamedModel(*parts)


def is_streamed(model):
    return model in _streamed


def of(params):
    """The StreamedModel that one of the parameters belongs to, or None."""
    wanted = {id(param) for param in params}
    for model, streamed in list(_streamed.items()):
        if any(id(param) in wanted for param in model.parameters()):
            return streamed
    return None
