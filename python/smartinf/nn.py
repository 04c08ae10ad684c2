"""Embeddings whose rows lie on devices. smartinf.move_tables() makes them of torch.nn.Embedding and EmbeddingBag."""

import torch
from torch.nn import functional

from smartinf.absent_parameter import absent_class, without_values
from smartinf.errors import UsageError

__all__ = ["Embedding", "EmbeddingBag"]


class _Rows(torch.autograd.Function):
    """Rows of a table [ids, dim]; backward keeps their gradients for the next step. anchor: any tensor that requires a
    gradient, for there is no parameter to do so."""

    @staticmethod
    def forward(ctx, anchor, table, ids, padding):
        ctx.table, ctx.ids, ctx.padding = table, ids, padding
        return table.gather(ids, keep=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        ids, gradient = ctx.ids, gradient.detach().to("cpu")
        if ctx.padding is not None:
            seen = ids != ctx.padding
            ids, gradient = ids[seen], gradient[seen]
        ctx.table.keep_gradient(ids, gradient.contiguous())
        return None, None, None, None


class _Weight:
    """In the place of a Residency (absent_parameter.py): nothing but shape, type and device can be had."""

    def __init__(self, name):
        self.name = name

    def use(self, tensor, function, writes):
        raise UsageError(
            f"{self.name}.weight is used by {function or 'something'}, and its rows are on devices: call the module with ids, "
            "or read rows with its rows(first, count)"
        )

    def data(self, tensor):
        self.use(tensor, "data", False)

    def whole(self, tensor):
        self.use(tensor, "a copy", False)

    def described(self, tensor):
        return f"rows of {self.name} on devices, shape={tuple(tensor.shape)}, dtype={tensor.dtype}"


def weight_of(name, shape, dtype, device):
    """What a module has as its weight. It is no parameter."""
    weight = without_values(shape, dtype, device)
    weight.__class__ = absent_class(torch.Tensor)
    weight._smartinf = (_Weight(name), 0)
    return weight


class _OnDevices:
    """What both kinds share. `table`: see smartinf.tables.Table."""

    table = None

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.table is not None:
            to = fn(torch.empty(0, dtype=self.weight.dtype, device=self.weight.device))
            self.weight = weight_of(self.table.name, self.weight.shape, to.dtype, to.device)
        return self

    def prefetch(self, ids):
        """A hint: rows that will be looked up soon are read ahead. ids: integers of any shape. Returns at once."""
        self.table.prefetch(_flat(ids))

    def rows(self, first=0, count=None):
        """Weights of rows [first, first + count) as they are now, f32 [count, dim] in CPU memory. count: None, all that
        follow; a table that does not fit in memory is read piece by piece."""
        stop = self.num_embeddings if count is None else first + count
        return self.table.gather(torch.arange(first, stop), torch.float32)

    def _looked_up(self, ids):
        """[ids, dim] of the module's type and on its device, ids flat and in CPU memory."""
        table = self.table
        if table is None:
            raise UsageError("a module of smartinf.nn has no table: smartinf.move_tables(model, [name]) makes it one")
        if torch.is_grad_enabled() and table.trained:
            rows = _Rows.apply(torch.empty(0, requires_grad=True), table, ids, self.padding_idx)
        else:
            rows = table.gather(ids)
        return rows.to(self.weight.device, self.weight.dtype)


def _flat(ids):
    return ids.detach().to("cpu", torch.int64).reshape(-1)


class Embedding(_OnDevices, torch.nn.Embedding):
    """torch.nn.Embedding whose rows are on devices. `weight` has its shape, type and device, and no values."""

    def forward(self, input):
        return self._looked_up(_flat(input)).view(*input.shape, self.embedding_dim)


class EmbeddingBag(_OnDevices, torch.nn.EmbeddingBag):
    """torch.nn.EmbeddingBag whose rows are on devices, likewise."""

    def forward(self, input, offsets=None, per_sample_weights=None):
        ids, padding = _flat(input), None
        place = torch.arange(len(ids))
        if self.padding_idx is not None:  # torch leaves out one index: that of one row more stands for all of them
            padding = len(ids)
            place[ids == self.padding_idx] = padding
            ids = torch.cat([ids, torch.tensor([self.padding_idx])])
        rows = self._looked_up(ids)
        place = place.to(rows.device).view(input.shape)
        return functional.embedding_bag(
            place, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset, padding_idx=padding,
        )  # fmt: skip
