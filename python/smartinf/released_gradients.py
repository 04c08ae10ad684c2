"""Gradients that leave during backward (release_gradients=True): each is handed over when it is complete, or
summed in host memory over as many backward passes as make a step. Those of a device are, once they have come from there."""

import functools
import weakref

import torch

from smartinf import gradients, open_optimizers
from smartinf.errors import UsageError
from smartinf.layout import TYPE_NAMES


def _watch_zero_grad():
    """model.zero_grad() finds no gradient that has left already, so it has to say that there are to be none: after a
    backward that broke off they would be taken for those of the next one."""
    plain = torch.nn.Module.zero_grad
    if getattr(plain, "drops_released_gradients", False):
        return

    @functools.wraps(plain)
    def zero_grad(self, set_to_none=True):
        plain(self, set_to_none)
        for session in open_optimizers.with_pending_gradients():
            session.gradients.dropped_by(self, session)

    zero_grad.drops_released_gradients = True
    torch.nn.Module.zero_grad = zero_grad


class ReleasedGradients(gradients.HeldGradients):
    """collective: several ranks hold a part of each parameter (FSDP2), so that a step begins on all of them."""

    _stay = False  # they are handed over where they are

    def __init__(self, session, accumulation_steps, collective=False):
        # Several ranks hand over in backward's own thread, so that all of them do it in the same order.
        super().__init__(session.layout, None if collective else session.turn)
        self._accumulation_steps = accumulation_steps
        self.collective = collective
        # Of the step in progress, by parameter:
        self._handed_over = set()
        self._sums = {}  # of the passes so far
        self._complete = {}  # what the core is still to be given, in the order in which backward made it
        self._passes = {}
        self._later = set()  # parameters whose gradients a pass of several batches sums until it ends

    @property
    def pending(self):
        return bool(self._passes or self._later)

    def attach(self, session):
        @torch.no_grad()
        def hook(param):
            with session.step_taken():
                try:
                    self._take(session, param)
                except BaseException as error:
                    session.recover_after(error)
                    raise
            param.grad = None

        session.hooks = [p.register_post_accumulate_grad_hook(hook) for p in session.layout.params]
        _watch_zero_grad()

    def taking_part(self, layout):
        return [
            param.grad is not None or i in self._passes
            for i, param in enumerate(layout.params)
        ]

    def pass_ended(self, batches):
        """So many batches went through a streamed model together."""
        self._copies.finish()
        for i in self._later:
            self._passes[i] = self._passes.get(i, 0) + batches
            if self._passes[i] == self._accumulation_steps:
                self._complete[i] = self._sums.pop(i)
        self._later.clear()

    def dropped_by(self, module, session):
        """zero_grad() of a module with all of the gradients that backward has handed over drops the step. Errors:
        UsageError where it has only some of them: others could not be dropped alone."""
        layout, here = session.layout, set(map(id, module.parameters()))
        handed = self._later.union(self._passes)  # perhaps by another thread, which trains another model
        kept = sorted(i for i in handed if id(layout.params[i]) not in here)
        if handed and not kept:
            with session.turn:
                session.drop_step()
        elif len(kept) < len(handed):
            raise UsageError(
                "zero_grad() of a part of the model, between a backward and step(): with release_gradients=True the "
                f"gradients that have left are dropped all together or not at all, and that of {layout.names[kept[0]]} "
                "is not in this part. Call zero_grad() of the optimizer or of the whole model"
            )

    def forget(self):
        super().forget()
        self._handed_over.clear()
        self._sums.clear()
        self._complete.clear()
        self._passes.clear()
        self._later.clear()

    def _rest_of(self, layout, i):
        if i in self._handed_over:
            return None
        return self._complete.get(i, self._sums.get(i)) if i in self._passes else gradients.flat(layout, i)

    def _take(self, session, param):
        """A backward pass has completed the gradient of `param`."""
        layout = session.layout
        i = layout.index_of[id(param)]
        if self._passes.get(i, 0) == self._accumulation_steps:
            raise UsageError(
                f"a second gradient of {layout.names[i]} came before step(). Say how many backward passes make a step with "
                "accumulation_steps; or, where a backward broke off and is left out, call zero_grad() of the optimizer or "
                "the model before the next one."
            )
        gradient = gradients.flat(layout, i)
        first = i not in self._later and i not in self._passes
        stream = session.options.stream
        if stream is not None and stream.summed_later(param):
            self._later.add(i)
        else:
            self._passes[i] = self._passes.get(i, 0) + 1
        last = i not in self._later and self._passes[i] == self._accumulation_steps
        if last and not session.step_begun and not self._may_wait(session):
            session.begin_step()
            self._put_complete(session)
        if self._stay:
            self._arrived(session, i, last, gradient)
        elif gradient.device.type != "cpu" and gradient.numel() > 0:
            own = weakref.proxy(session), i, first, last, gradient.numel()
            self._copies.start(gradient, functools.partial(self._piece_arrived, *own))
        else:
            self._arrived(session, i, last, gradient.to("cpu"))

    def _arrived(self, session, i, last, gradient):
        """A pass's gradient. last: of the passes that make a step."""
        total = self._sums.pop(i, None)
        if total is not None:
            gradient = total.add_(gradient)
        if not last:
            # In f32: many sums rounded to bf16 would lose what a single pass adds.
            self._sums[i] = gradient if total is not None else gradient.to(torch.float32, copy=True)
            return
        self._complete[i] = gradient
        if session.step_begun:
            self._put_complete(session)

    def _piece_arrived(self, session, i, first, last, count, begin, piece):
        """Elements from `begin` on of a pass's gradient, `count` in all, are in pinned memory until this returns. first,
        last: of the passes that make a step."""
        end = begin + piece.numel()
        if first and last and i not in self._sums and self._put_piece(session, i, begin, piece):
            if end == count:
                self._handed_over.add(i)
            return
        if first and begin == 0:
            self._sums[i] = torch.empty(count, dtype=piece.dtype if last else torch.float32)
        total = self._sums[i][begin:end]
        if first:
            total.copy_(piece)
        else:
            total.add_(piece)
        if last and end == count:
            self._complete[i] = self._sums.pop(i)
            if session.step_begun:
                self._put_complete(session)

    def _may_wait(self, session):
        """Complete gradients stay here, so that backward need not wait for the commit of the step before. Not where
        the memory that they take is bounded."""
        return session.late is not None and "gradient_budget_bytes" not in session.options.core and session.committing()

    def _put_complete(self, session):
        for i in list(self._complete):
            # One on a device has its memory to itself until step().
            if session.updating_early and session.layout.is_view(i):
                # A module computed again in backward (gradient checkpointing) may make another gradient of a
                # parameter that several modules share: until step() it stays as it is.
                if not session.late.may_begin_early(session.layout, i):
                    continue
                session.late.begin_early(session.layout, i)
            self._put(session, i, self._complete.pop(i))
            self._handed_over.add(i)

    def _put_all(self, session, taking_part):
        self._copies.finish()
        super()._put_all(session, taking_part)

    def _put_piece(self, session, i, begin, piece):
        """Returns whether the core takes it now."""
        if session.step_begun:
            gradients.put_piece(session.core, session.layout.segment_of[i], begin, piece)
        return session.step_begun

    def _put(self, session, i, gradient):
        segment = session.layout.segment_of.get(i)
        if segment is not None:  # this rank may hold no row of a DTensor
            session.core.put_gradients([segment], [gradient.data_ptr()], [TYPE_NAMES[gradient.dtype]])
