"""Where each torch parameter stands in the parameter space and in host memory."""

import mmap

import torch

from smartinf.errors import UsageError

TYPE_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


class Segment:
    """Elements [start, stop) of one parameter: a range of this process's parameter space.

    first: its first element in this process's space. In one process every parameter is one segment;
    with several ranks each owns a stretch of the whole, which may begin and end inside a parameter.
    """

    __slots__ = ("first", "index", "param", "start", "stop")

    def __init__(self, index, param, start, stop, first):
        self.index = index  # of the parameter, over all groups
        self.param = param  # index in Layout.params
        self.start = start
        self.stop = stop
        self.first = first

    @property
    def count(self):
        return self.stop - self.start


class Layout:
    """All parameters laid end to end, their homes in one flat buffer of new weights, and the part of
    it that this rank owns.

    A contiguous parameter in CPU memory moves into the buffer: the devices then write its new
    weights where the model reads them, and there is no second copy. Every other parameter (on a GPU,
    not contiguous, of another type than the rest) is copied from the buffer after each step. Each
    parameter keeps a storage of its own, so saving one of them saves no more than itself.
    """

    def __init__(self, named_params, rank=0, world=1):
        self.names = [name for name, _ in named_params]
        self.params = [param for _, param in named_params]
        for name, param in named_params:
            if param.dtype not in TYPE_NAMES:
                kind = "complex" if param.is_complex() else str(param.dtype).removeprefix("torch.")
                raise UsageError(
                    f"parameter {name} is {kind}; only float32, bfloat16 and float16 parameters can be "
                    "optimized here. Convert it, or give it to an optimizer of torch.optim."
                )
            if param.layout is not torch.strided:
                raise UsageError(f"parameter {name} is sparse; only dense parameters can be optimized")
            if param.is_meta:
                raise UsageError(
                    f"parameter {name} is on the meta device and has no values yet. Materialize the "
                    "model (to_empty, then load its weights) before making the optimizer."
                )
        dtypes = {param.dtype for param in self.params}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        self.type_name = TYPE_NAMES[self.dtype]
        self.firsts = []
        total = 0
        for param in self.params:
            self.firsts.append(total)
            total += param.numel()
        self.total = total

        # Equal parts but for the last, on whole cache lines.
        part = -(-total // (world * 64)) * 64
        self.bounds = [min(r * part, total) for r in range(world)] + [total]
        self.owned = (self.bounds[rank], self.bounds[rank + 1])
        if any(a == b for a, b in zip(self.bounds, self.bounds[1:], strict=False)):
            raise UsageError(
                f"{total} trainable elements cannot be shared among {world} ranks; use fewer ranks"
            )
        self.segments = []
        low, high = self.owned
        for i, param in enumerate(self.params):
            start = max(low, self.firsts[i])
            stop = min(high, self.firsts[i] + param.numel())
            if start < stop:
                first = self.firsts[i]
                self.segments.append(Segment(len(self.segments), i, start - first, stop - first, start - low))

        self._memory = mmap.mmap(
            -1, max(total * self.dtype.itemsize, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.flat = torch.frombuffer(self._memory, dtype=self.dtype, count=total)
        # Slices of one tensor would share a storage; each of these is its own.
        view = memoryview(self._memory)
        width = self.dtype.itemsize
        self._homes = [
            torch.frombuffer(
                view[first * width : (first + param.numel()) * width], dtype=self.dtype
            ).view(param.shape)
            for first, param in zip(self.firsts, self.params, strict=True)
        ]
        self._versions = [None] * len(self.params)

    @property
    def owned_address(self):
        return self.flat.data_ptr() + self.owned[0] * self.dtype.itemsize

    def range_names(self):
        return [self.range_name(segment) for segment in self.segments]

    def range_name(self, segment):
        name = self.names[segment.param]
        if segment.count == self.params[segment.param].numel():
            return name
        return f"{name}[{segment.start}:{segment.stop}]"

    def range_shapes(self):
        shapes = []
        for segment in self.segments:
            param = self.params[segment.param]
            whole = segment.count == param.numel()
            shapes.append(list(param.shape) if whole else [segment.count])
        return shapes

    def at_home(self, i):
        return self.params[i].data_ptr() == self._homes[i].data_ptr()

    def settle(self):
        """Moves every parameter that can live in the flat buffer there, with its values."""
        for param, home in zip(self.params, self._homes, strict=True):
            if param.device.type == "cpu" and param.dtype == self.dtype and param.is_contiguous():
                home.copy_(param.data)
                param.data = home

    def values(self, i):
        """Parameter i as a contiguous tensor [numel] in CPU memory, of its own type."""
        return self.params[i].detach().to("cpu").contiguous().view(-1)

    def deliver(self, i):
        """Hands the weights that are in the flat buffer to parameter i."""
        param = self.params[i]
        if self.at_home(i):
            torch.autograd.graph.increment_version(param)
        else:
            param.detach().copy_(self._homes[i])

    def remember(self):
        """The parameters now hold what the master weights say."""
        self._versions = [(param._version, param.data_ptr()) for param in self.params]

    def changed(self):
        """Parameters whose values somebody else may have written since remember()."""
        return [
            i
            for i, param in enumerate(self.params)
            if self._versions[i] != (param._version, param.data_ptr())
        ]
