"""Gradients that leave during backward (release_gradients=True): each is handed over when it is complete, or
summed in host memory over as many backward passes as make a step."""

import torch

from smartinf import gradients
from smartinf.errors import UsageError
from smartinf.layout import TYPE_NAMES


class ReleasedGradients(gradients.HeldGradients):
    def __init__(self, accumulation_steps):
        self._accumulation_steps = accumulation_steps
        # Of the step in progress, by parameter:
        self._handed_over = set()
        self._sums = {}  # of the passes so far
        self._passes = {}

    @property
    def pending(self):
        return bool(self._passes)

    def attach(self, session):
        @torch.no_grad()
        def hook(param):
            with session.turn:
                try:
                    self._take(session, param)
                except BaseException as error:
                    session.recover_after(error)
                    raise
            param.grad = None

        session.hooks = [p.register_post_accumulate_grad_hook(hook) for p in session.layout.params]

    def taking_part(self, layout):
        return [
            param.grad is not None or i in self._handed_over or i in self._sums
            for i, param in enumerate(layout.params)
        ]

    def forget(self):
        self._handed_over.clear()
        self._sums.clear()
        self._passes.clear()

    def _rest_of(self, layout, i):
        if i in self._handed_over:
            return None
        return self._sums[i] if i in self._sums else gradients.on_host(layout, i)

    def _take(self, session, param):
        """A backward pass has completed the gradient of `param`."""
        layout = session.layout
        i = layout.index_of[id(param)]
        if i in self._handed_over:
            raise UsageError(
                f"a second gradient of {layout.names[i]} came before step(). Say how many "
                "backward passes make a step with accumulation_steps."
            )
        gradient = gradients.on_host(layout, i)
        total = self._sums.pop(i, None)
        if total is not None:
            gradient = total.add_(gradient)
        self._passes[i] = self._passes.get(i, 0) + 1
        if self._passes[i] < self._accumulation_steps:
            # In f32: many sums rounded to bf16 would lose what a single pass adds.
            self._sums[i] = gradient if total is not None else gradient.to(torch.float32, copy=True)
        else:
            session.begin_step()
            self._put(session, i, gradient)
            self._handed_over.add(i)

    def _put(self, session, i, gradient):
        session.core.put_gradients(
            [session.layout.segment_of[i]], [gradient.data_ptr()], [TYPE_NAMES[gradient.dtype]]
        )
