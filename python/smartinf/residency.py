"""Where the values of parameters are, and what a module's forward asks for: one state machine for the units of a streamed
model (LayerStream), which come and go, and for the weights that an overlapped update leaves behind (LateWeights), each of
which is a unit that never leaves.

    AWAY -> HERE -> AWAY                 streamed: gathered by a forward or backward, and released
    HERE -> COMING -> HERE               late: step() starts the update, and whoever needs the weight waits for it
    HERE -> WRITTEN -> COMING -> HERE    early: from its gradient until step() the update may be overwriting it

Modules ask in one pre-forward hook. Whoever else uses a parameter that is not HERE meets its class (absent_parameter.py),
and gets finished values, or an error with the parameter's name."""

import enum
import functools

import torch

from smartinf.absent_parameter import Absent, absent_class


class Place(enum.Enum):
    HERE = "in memory and finished"
    COMING = "on its way to memory: whoever needs it waits"
    WRITTEN = "in memory, and perhaps being overwritten: whoever needs it is refused"
    AWAY = "on the devices: whoever needs it outside of its module's forward gets a copy"


class Residency:
    """at: by place the indices of the parameters whose values are there. Subclasses say what a forward needs
    (begin_forward, before_forward, after_forward) and what any other use does (use)."""

    releases = False  # whether after_forward() is due also where forward raised

    def __init__(self, count):
        self.at = {place: set() for place in Place}
        self.at[Place.HERE] |= set(range(count))

    def put(self, i, param, place):
        """The values of parameter i are at `place` from now on."""
        for there in self.at.values():
            there.discard(i)
        self.at[place].add(i)
        if place is Place.HERE:
            if isinstance(param, Absent):
                param.__class__ = type(param).__bases__[1]  # its own, which absent_class() was given
        else:
            param._smartinf = self, i
            if not isinstance(param, Absent):
                param.__class__ = absent_class(type(param))

    def begin_forward(self):
        """A forward of the model begins."""

    def before_forward(self, own):
        """A module's forward begins, which reads what `own` (see attach) stands for."""

    def after_forward(self, own, output):
        """It has ended. Returns the output, or None for the same."""

    def use(self, tensor, name, written):
        """An absent tensor as torch's function `name` may use it, or write to it."""
        raise NotImplementedError

    def data(self, tensor):
        """tensor.data"""
        return self.use(tensor, "data", False).data

    def whole(self, tensor):
        """With values and of its own class, for copies."""
        return self.use(tensor, "clone", False)

    def described(self, tensor):
        return repr(self.whole(tensor))


def attach(residency, model, of_module):
    """Puts the hooks on a model, which torch.compile does not look into. of_module: {module: what before_forward() is
    given}. Returns their handles."""

    @torch.compiler.disable
    def begin(*_):
        residency.begin_forward()

    @torch.compiler.disable
    def before(own, *_):
        residency.before_forward(own)

    @torch.compiler.disable
    def after(own, module, given, output):
        return residency.after_forward(own, output)

    handles = []
    for module, own in of_module.items():
        handles += [
            module.register_forward_pre_hook(Hook(functools.partial(before, own)), prepend=True),
            module.register_forward_hook(Hook(functools.partial(after, own)), always_call=residency.releases),
        ]
    # The last one that is put in front is called first, also where the model reads parameters of its own.
    return [*handles, model.register_forward_pre_hook(Hook(begin), prepend=True)]


class Hook:
    """Of a module. A copy of the module, or a pickle, has one that does nothing."""

    def __init__(self, call):
        self._call = call

    def __call__(self, *given):
        return self._call(*given)

    def __reduce__(self):
        return Hook, (_nothing,)


def _nothing(*_):
    pass
