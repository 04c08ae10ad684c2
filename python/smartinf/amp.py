"""GradScaler with released gradients, which are with the devices when it looks for them.

GradScaler.step() asks an optimizer for `_step_supports_amp_scaling`. Where that is true, it looks for
infinities in the gradients that the parameters hold, sets `found_inf` and `grad_scale` on the optimizer,
and calls its step(), which unscales and may skip. So what happens when it asks is:

1. show() hands all gradients over and sums up their norm on all ranks. Collective.
2. One parameter gets a sparse gradient of one element, infinite when that norm was not finite: the signal.
3. GradScaler reads it; step() removes it and asks scale() what to unscale by.
"""

import math

import torch

from smartinf.errors import UsageError


class ScalerSignal:
    def __init__(self):
        self._param = None  # which shows it

    def show(self, session):
        """Steps 1 and 2. Returns whether there is something to be unscaled. Collective."""
        if session.core is None or not (session.options.release and session.step_in_progress):
            return False
        if session.layout.mesh is not None:
            raise UsageError(
                "GradScaler does not go together with release_gradients and parameters that fully_shard has divided: "
                "leave one of them out (bf16 needs no GradScaler)"
            )
        try:
            taking_part = session.collect()
            if not any(taking_part):
                return False
            _, finite, _ = session.gradient_norm(1.0)
        except BaseException as error:
            session.recover_after(error)
            raise
        self.clear()
        self._param = param = session.layout.params[taking_part.index(True)]
        place = torch.zeros((param.dim(), 1), dtype=torch.int64, device=param.device)
        value = torch.full((1,), 0.0 if finite else math.inf, dtype=param.dtype, device=param.device)
        param.grad = torch.sparse_coo_tensor(place, value, param.shape, check_invariants=False)
        return True

    def clear(self):
        if self._param is not None:
            self._param.grad = None
            self._param = None

    def scale(self, optimizer):
        """What GradScaler multiplied released gradients by, 1 without one; None: skip the step."""
        self.clear()
        found = getattr(optimizer, "found_inf", None)
        if found is None:
            return 1.0
        scale = getattr(optimizer, "grad_scale", None)
        if scale is None or not isinstance(found, torch.Tensor):
            raise UsageError(
                "scaler.unscale_() finds no gradients with release_gradients: leave it out, scaler.step() "
                "does what is needed, and clip with max_grad_norm."
            )
        return None if found.item() != 0 else float(scale)
