"""Several micro batches of a step, each block of the model doing all of them before the next block starts, so that its
weights are needed once in each direction."""

import contextlib
import contextvars
import functools
import threading

import torch

from smartinf import streamed_model
from smartinf.errors import UsageError
from smartinf.modules import mapped, top_saved_tensors_hooks


def forward_backward(model, batches, loss_of=None):
    """The gradients of a step, like loss_of(model, batch).backward() for each batch in turn, and the same bits. The
    weights of a streamed model pass twice a step, and not twice a batch.

    The gradient of a weight that several modules share is summed in another order: module by module.

    batches: of one step: what loss_of takes. loss_of(model, batch): a scalar with a gradient; None: the first of what
    model(**batch) returns, divided by the number of batches. Returns the losses, detached.

    Random numbers (dropout) are drawn in another order than batch by batch. Errors: UsageError where the batches do not
    come to the same blocks in the same order; what loss_of raises.
    """

    def step(batch):
        if loss_of is not None:
            loss = loss_of(model, batch)
        else:
            output = model(**batch)
            loss = (output["loss"] if isinstance(output, dict) else output[0]) / len(batches)
        loss.backward()
        return loss.detach()

    return run_together(model, [functools.partial(step, batch) for batch in batches])


def run_together(model, steps):
    """Calls each of `steps`, which make a forward and a backward of one batch, in a thread of its own, one at a time,
    until its forward comes to the beginning or end of a block of a streamed model. Their backward ends at the last
    block's output, and goes on from there block by block. Returns what they return."""
    streamed = streamed_model.of(model.parameters())
    if not steps:
        raise UsageError("a step needs at least one batch")
    if streamed is None or streamed.stream is None:
        return [step() for step in steps]
    with streamed.stream.one_pass():
        results = _Pass(streamed.blocks, steps).run()
    pass_ended = streamed.pass_ended()
    if pass_ended is not None:
        pass_ended(len(steps))
    return results


class _Call:
    """One forward of a block for one batch, cut out of the batch's graph."""

    def __init__(self):
        self.inputs = []  # (tensor outside, leaf inside)
        self.outputs = []  # (tensor inside, leaf outside)


class _Pass:
    def __init__(self, blocks, steps):
        self._blocks, self._steps, self._count = blocks, steps, len(steps)
        self._calls = [[] for _ in steps]  # by batch, in order
        self._modules = [[] for _ in steps]
        self._results = [None for _ in steps]
        self._here = threading.local()  # .batch, in a forward's thread
        self._baton = threading.Condition()
        self._turn = 0
        self._arrived = [0 for _ in steps]  # beginnings and ends of blocks that each batch has come to
        self._ended = [False for _ in steps]
        self._failure = None
        self._saving = top_saved_tensors_hooks()
        self._autocast = {k: torch.get_autocast_dtype(k) for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)}

    def run(self):
        hooks, threads = [], []
        for block in self._blocks:
            hooks.append(block.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True))
            hooks.append(block.register_forward_hook(self._after))
        try:
            for k in range(self._count):
                threads.append(threading.Thread(target=self._forward, args=(contextvars.copy_context(), k)))
                threads[-1].start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C
            self._failure = error
        finally:
            for thread in threads:
                thread.join()
            for hook in hooks:
                hook.remove()
        if self._failure is not None:
            raise self._failure
        if len({tuple(map(id, modules)) for modules in self._modules}) > 1:
            raise UsageError("the batches came to different blocks; give them one by one to loss.backward() instead")
        self._backward()
        return self._results

    # ---- Forward, in the batches' threads.

    def _forward(self, context, k):
        def work():
            self._here.batch = k
            with contextlib.ExitStack() as stack:
                for kind, dtype in self._autocast.items():
                    stack.enter_context(torch.autocast(kind, dtype))
                if self._saving is not None:
                    stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._saving))
                self._results[k] = self._steps[k]()

        try:
            self._wait_turn(k)
            context.run(work)
        except BaseException as error:
            if self._failure is None:
                self._failure = error
        finally:
            self._ended[k] = True
            self._pass_on()

    def _wait_turn(self, k):
        with self._baton:
            self._baton.wait_for(lambda: self._turn == k or self._failure is not None)
        if self._failure is not None:
            raise _Stopped

    def _let_others_come(self, k):
        """To the same beginning or end of a block."""
        self._arrived[k] += 1
        self._pass_on()
        self._wait_turn(k)

    def _pass_on(self):
        """To the batch that has come the least far, the first of those."""
        with self._baton:
            waiting = [k for k in range(self._count) if not self._ended[k]]
            self._turn = min(waiting, key=lambda k: (self._arrived[k], k), default=self._count)
            self._baton.notify_all()

    def _before(self, module, args, kwargs):
        k = getattr(self._here, "batch", None)
        if k is None:
            return None
        self._let_others_come(k)
        call = _Call()
        self._calls[k].append(call)
        self._modules[k].append(module)

        def cut(tensor):
            if not tensor.requires_grad:
                return tensor
            for outside, leaf in call.inputs:
                if outside is tensor:
                    return leaf
            leaf = tensor.detach().requires_grad_()
            call.inputs.append((tensor, leaf))
            return leaf

        return mapped(args, cut), mapped(kwargs, cut)

    def _after(self, module, args, output):
        k = getattr(self._here, "batch", None)
        if k is None:
            return None
        self._let_others_come(k)
        call = self._calls[k][-1]

        def cut(tensor):
            if not tensor.requires_grad:
                return tensor
            leaf = tensor.detach().requires_grad_()
            call.outputs.append((tensor, leaf))
            return leaf

        return mapped(output, cut)

    # ---- Backward.

    def _backward(self):
        first_use = [{} for _ in range(self._count)]  # by batch: id of an outside tensor -> the call
        for k, calls in enumerate(self._calls):
            for position, call in enumerate(calls):
                for outside, _ in call.inputs:
                    first_use[k].setdefault(id(outside), position)
        sums = [{} for _ in range(self._count)]  # by batch: id -> (tensor, gradient)
        for position in reversed(range(len(self._calls[0]))):
            for k in range(self._count):
                call = self._calls[k][position]
                self._calls[k][position] = None
                _run_backward([(inside, leaf.grad) for inside, leaf in call.outputs])
                for outside, leaf in call.inputs:
                    if leaf.grad is None:
                        continue
                    known = sums[k].get(id(outside))
                    sums[k][id(outside)] = (outside, leaf.grad if known is None else known[1] + leaf.grad)
                ready = [i for i in sums[k] if first_use[k][i] == position]
                _run_backward([sums[k].pop(i) for i in ready])


class _Stopped(Exception):
    """Another batch has failed."""


def _run_backward(pairs):
    """pairs: (tensor, its gradient or None)."""
    pairs = [(tensor, gradient) for tensor, gradient in pairs if gradient is not None]
    leaves = [pair for pair in pairs if pair[0].grad_fn is None]
    for tensor, gradient in leaves:
        tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient
    graphs = [pair for pair in pairs if pair[0].grad_fn is not None]
    if graphs:
        try:
            torch.autograd.backward([tensor for tensor, _ in graphs], [gradient for _, gradient in graphs])
        except RuntimeError as error:
            if "second time" not in str(error):
                raise
            raise UsageError(
                "a tensor leaves a block by another way than what the block returns, such as a router's logits or hidden "
                "states that are recorded, so that its graph cannot be cut there. Give the batches one by one to "
                "loss.backward()"
            ) from error
