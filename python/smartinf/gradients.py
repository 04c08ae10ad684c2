"""Where a step's gradients come from, by default: from p.grad, when step() is called."""

import functools

import torch

from smartinf import sharded_parameters
from smartinf.device_copies import Downloads
from smartinf.errors import UsageError
from smartinf.layout import TYPE_NAMES


def flat(layout, i):
    """Of what this process holds of the parameter, [elements], in its order, where it is; the gradient itself where it
    can be."""
    grad = sharded_parameters.local_gradient(layout.params[i], layout.names[i])
    if grad.layout is not torch.strided:
        raise UsageError(
            f"the gradient of {layout.names[i]} is sparse. Keep the embedding's rows on devices "
            "(smartinf.move_tables(model, [its name]), docs/rows.md), or make it with sparse=False."
        )
    if grad.dtype not in TYPE_NAMES:
        raise UsageError(
            f"the gradient of {layout.names[i]} is {grad.dtype}; known are float32, bfloat16 and float16"
        )
    return grad.detach().contiguous().view(-1)


def of_all(layout):
    """Bytes of the gradients that devices will have."""
    local = map(layout.local, range(len(layout.params)))
    return sum(tensor.nbytes for tensor in local if tensor.device.type != "cpu")


class HeldGradients:
    """Each parameter holds its gradient until step(). A source has no reference to the session, which it is
    given with each call, so that `del optimizer` lets the devices go."""

    collective = False  # whether a step begins on all ranks in backward
    pending = False  # whether backward has handed over any since the last step

    def __init__(self, layout, lock=None):
        self._copies = Downloads(of_all(layout), lock)  # from devices

    def attach(self, session):
        """The session is open: backward calls the source from here on, if it is to."""

    def taking_part(self, layout):
        return [param.grad is not None for param in layout.params]

    def hand_over(self, session):
        """What the core does not have yet. Returns for each parameter whether it takes part."""
        taking_part = self.taking_part(session.layout)
        if any(taking_part):
            session.begin_step()
            self._put_all(session, taking_part)
        return taking_part

    def forget(self):
        """The step is over: nothing has been handed over for the next."""
        self._copies.drop()

    def drop(self, session):
        """The step is not made. Brings to an end what has been started for it."""

    def broadcast_parameters(self, session):
        """Makes the ranks' parameters alike, where nobody else does."""

    def _rest_of(self, layout, i):
        """Parameter i's gradient, which takes part; None: the core has it."""
        return flat(layout, i)

    def _put_all(self, session, taking_part):
        core, layout = session.core, session.layout
        ranges, addresses, types = [], [], []
        for segment in layout.segments:
            i = segment.param
            if not taking_part[i]:
                core.skip_gradient(segment.index)
                continue
            gradient, held = self._rest_of(layout, i), layout.params[i].grad
            if gradient is None:
                continue
            piece = gradient[segment.start : segment.stop]
            if piece.device.type != "cpu":
                self._copies.start(piece, functools.partial(put_piece, core, segment.index))
                continue
            entry = (segment.index, piece.data_ptr(), TYPE_NAMES[piece.dtype])
            if held is not None and gradient.data_ptr() == sharded_parameters.local(held).data_ptr():
                for to, value in zip((ranges, addresses, types), entry, strict=True):
                    to.append(value)
            else:  # a copy is handed over at once, so that there is never more than one
                core.put_gradients(*([value] for value in entry))
        if ranges:
            core.put_gradients(ranges, addresses, types)
        self._copies.finish()


def put_piece(core, segment, first, piece):
    """From element `first` of a segment on."""
    core.put_gradient_part(segment, first, piece.data_ptr(), TYPE_NAMES[piece.dtype], piece.numel())
