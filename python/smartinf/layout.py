"""Where each torch parameter stands in the parameter space and in host memory."""

import itertools
import mmap
from typing import NamedTuple

import torch

from smartinf import _core, device_copies, sharded_parameters
from smartinf.digest import digest
from smartinf.errors import UsageError

TYPE_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_SUBGROUP_MAX = 1 << 27  # elements, with a streamed model


def _check(name, param):
    """Errors: UsageError for a parameter that cannot be optimized."""
    if param.dtype not in TYPE_NAMES:
        kind = "complex" if param.is_complex() else str(param.dtype).removeprefix("torch.")
        raise UsageError(
            f"parameter {name} is {kind}; only float32, bfloat16 and float16 parameters can be "
            "optimized here. Convert it, or give it to an optimizer of torch.optim."
        )
    if getattr(param, "_is_flat_param", False) or getattr(param, "_fsdp_flattened", False):
        raise UsageError(
            f"parameter {name} is a part of a FlatParameter, as FullyShardedDataParallel makes it; these optimizers "
            "need whole parameters, or DTensors. Use fully_shard (FSDP2) instead, or leave the sharding out: under "
            "torchrun each rank keeps a part of the optimizer state on its own devices by itself, with "
            "DistributedDataParallel or with release_gradients=True."
        )
    if param.layout is not torch.strided:
        raise UsageError(f"parameter {name} is sparse; only dense parameters can be optimized")
    if param.is_meta:
        raise UsageError(
            f"parameter {name} is on the meta device and has no values yet. Materialize the "
            "model (to_empty, then load its weights) before making the optimizer."
        )


def _checksums(device, tensors):
    """Of each of these tensors, all on `device`, a number that all of its values decide; _OnDevice where that is not the CPU."""
    if device.type != "cpu":
        sums = torch.stack([digest(tensor) for tensor in tensors])
        return [_OnDevice(sums, k) for k in range(len(tensors))]
    if not all(tensor.is_contiguous() for tensor in tensors):  # one copy at a time
        return [_checksums(device, [tensor.contiguous()])[0] for tensor in tensors]
    return _core.checksums([t.data_ptr() for t in tensors], [t.numel() * t.element_size() for t in tensors])


class _OnDevice(NamedTuple):
    """A checksum that a device has found: number k of a tensor of them."""

    sums: torch.Tensor
    k: int


def _bring(*contents):
    """Checksums that are on devices are numbers of the host from here on; it waits once for each device."""
    sums = {}  # by device and id
    for content in itertools.chain.from_iterable(each.values() for each in contents):
        if isinstance(content[-1], _OnDevice):
            there = content[-1].sums
            sums.setdefault(there.device, {})[id(there)] = there
    here = {}
    for tensors in sums.values():
        numbers = iter(torch.cat(list(tensors.values())).tolist())
        here |= {key: [next(numbers) for _ in range(len(tensor))] for key, tensor in tensors.items()}
    for each in contents:
        for i, (*others, one) in each.items():
            if isinstance(one, _OnDevice):
                each[i] = (*others, here[id(one.sums)][one.k])


class Segment(NamedTuple):
    """Elements [start, stop) of one parameter, as far as this process holds it: a range of this process's
    parameter space.

    index: of the segment. param: in Layout.params. first: its first element in this process's space. In one process
    every parameter is one segment; with several ranks each owns a span of the whole, which may begin and end inside a
    parameter. Of DTensors each rank owns what it holds.
    """

    index: int
    param: int
    start: int
    stop: int
    first: int

    @property
    def count(self):
        return self.stop - self.start


class Layout:
    """All parameters laid end to end in one flat buffer of new weights, and the part of
    it that this rank owns.

    A contiguous parameter in CPU memory moves into the buffer: the devices then write its new
    weights where the model reads them, and there is no second copy. Every other parameter (on a GPU,
    in shared memory, not contiguous, of another type than the rest) is copied from the buffer after
    each step, and so is one whose storage is exchanged later, wherever it then is. Each parameter
    keeps a storage of its own, so saving one of them saves no more than itself.

    streamed: a StreamedModel. The parameters of its units come last, in the units' order whichever of them stay in
    memory (kept); those that are streamed have no place in the buffer.
    stored: names and shapes on the devices. Where they are the same parameters, they are in the order there.
    mesh: of parameters that are DTensors. The buffer then has what this rank holds of each, and all of that is its own.
    """

    def __init__(self, named_params, rank=0, world=1, streamed=None, mesh=None, stored=None):
        stream = None if streamed is None else streamed.stream
        self.stream, self.mesh = stream, mesh
        if streamed is not None:
            named_params = sorted(named_params, key=lambda named: streamed.place(named[1]))
        places = {(name, tuple(shape)): place for place, (name, shape) in enumerate(stored or ())}
        if places.keys() == {(name, tuple(param.shape)) for name, param in named_params}:
            named_params = sorted(named_params, key=lambda named: places[named[0], tuple(named[1].shape)])
        self.names = [name for name, _ in named_params]
        self.params = [param for _, param in named_params]
        for name, param in named_params:
            _check(name, param)
        self.kept = [stream is None or stream.index_of(param) is None for param in self.params]
        dtypes = {param.dtype for param in self.params}
        if len(dtypes) > 1 and self.streams:
            other = next(i for i, param in enumerate(self.params) if param.dtype != stream.dtype)
            raise UsageError(
                f"parameter {self.names[other]} is {self.params[other].dtype} and the model is streamed as "
                f"{stream.dtype}; an optimizer of both would round it. Give them one type before the model is streamed"
            )
        self.dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        self.type_name = TYPE_NAMES[self.dtype]
        # Of what this process holds of each parameter, which is all of it but for a DTensor: its shape, its first
        # element in the parameter, and that in the buffer.
        self.shapes = [self.local(i).shape for i in range(len(self.params))]
        self.offsets = [0 if mesh is None else sharded_parameters.rows_before(param) for param in self.params]
        self.firsts = []
        total = 0
        for shape in self.shapes:
            self.firsts.append(total)
            total += shape.numel()
        self.total = total
        if mesh is not None:
            rank, world = 0, 1

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
        for i, shape in enumerate(self.shapes):
            start = max(low, self.firsts[i])
            stop = min(high, self.firsts[i] + shape.numel())
            if start < stop:
                first = self.firsts[i]
                self.segments.append(Segment(len(self.segments), i, start - first, stop - first, start - low))

        # Spans that the devices send up, with what shares a subgroup with them; None: everything. Memory that nobody
        # writes to is not taken.
        self.kept_spans = self._kept_spans() if self.streams else None
        self._kept_end = sum(self.kept_spans[-1]) if self.kept_spans else 0
        self.buffer_count = min(total, self._kept_end + _SUBGROUP_MAX) if self.streams else total
        self._memory = mmap.mmap(
            -1, max(self.buffer_count * self.dtype.itemsize, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.flat = torch.frombuffer(self._memory, dtype=self.dtype, count=self.buffer_count)
        self._uploads = device_copies.Uploads()
        self._lock_pages()
        self._snapshot = {}
        self.index_of = {id(param): i for i, param in enumerate(self.params)}
        self.segment_of = {segment.param: segment.index for segment in self.segments}

    @property
    def streams(self):
        """Whether some of the parameters are streamed."""
        return not all(self.kept)

    def _kept_spans(self):
        """[(first, count)] of parameters that stay in memory, neighbours together."""
        spans = []
        for first, shape, kept in zip(self.firsts, self.shapes, self.kept, strict=True):
            if kept and spans and sum(spans[-1]) == first:
                spans[-1] = spans[-1][0], spans[-1][1] + shape.numel()
            elif kept:
                spans.append((first, shape.numel()))
        return spans

    def local(self, i):
        """What this process holds of parameter i: of a DTensor its shard, else the parameter."""
        return sharded_parameters.local(self.params[i])

    def check_kept(self, core):
        """Updates write whole subgroups of the core's to the buffer."""
        if self.kept_spans and core.subgroup_end(self._kept_end - 1) > self.buffer_count:
            raise UsageError("subgroup_elements is too large for a streamed model; leave it out")

    @property
    def owned_count(self):
        return self.owned[1] - self.owned[0]

    @property
    def owned_address(self):
        return self.flat.data_ptr() + self.owned[0] * self.dtype.itemsize

    def pieces(self, first, count):
        """(segment, start, stop, offset in the piece) for each parameter in elements [first, first +
        count) of this rank's space; start and stop count within the parameter."""
        for segment in self.segments:
            low = max(first, segment.first)
            high = min(first + count, segment.first + segment.count)
            if low < high:
                start = segment.start + low - segment.first
                yield segment, start, start + high - low, low - first

    def ranges(self):
        """(names, shapes) of the segments; a part of a parameter is a vector."""
        names, shapes = [], []
        for segment in self.segments:
            name, param = self.names[segment.param], self.params[segment.param]
            whole, offset = segment.count == param.numel(), self.offsets[segment.param]
            names.append(name if whole else f"{name}[{offset + segment.start}:{offset + segment.stop}]")
            shapes.append(list(param.shape) if whole else [segment.count])
        return names, shapes

    def _flat_view(self, i):
        """Parameter i in the flat buffer, as far as this process holds it."""
        first = self.firsts[i]
        return self.flat[first : first + self.shapes[i].numel()].view(self.shapes[i])

    def is_view(self, i):
        # By the buffer's own address: a tensor that shares the parameter's storage moves with it.
        place = self.flat.data_ptr() + self.firsts[i] * self.dtype.itemsize
        return self.mesh is None and self.params[i].data_ptr() == place

    def rebind(self):
        """Moves every parameter that can live in the flat buffer there, with its values. One in shared
        memory stays: other processes look at it. So does a DTensor, whose storage fully_shard has taken note of."""
        if self.mesh is not None:
            return
        view = memoryview(self._memory)
        width = self.dtype.itemsize
        for i, param in enumerate(self.params):
            if not self.kept[i]:
                continue
            movable = param.device.type == "cpu" and param.dtype == self.dtype and param.is_contiguous()
            if not movable or param.is_shared():
                continue
            self._flat_view(i).copy_(param.data)
            # A slice of the flat tensor would share a storage with all others; this one is its own.
            first = self.firsts[i] * width
            place = view[first : first + param.numel() * width]
            param.data = torch.frombuffer(place, dtype=self.dtype).view(param.shape)

    def _lock_pages(self):
        """Of what is copied to a device after each step."""
        held = zip(self.firsts, self.shapes, self.params, self.kept, strict=True)
        ends = [(first + shape.numel(), p.device) for first, shape, p, kept in held if kept and p.device.type != "cpu"]
        if ends:
            end, device = max(ends, key=lambda each: each[0])
            device_copies.lock_pages(self.flat, self.flat.data_ptr(), end * self.dtype.itemsize, device)

    def values(self, i):
        """What this process holds of parameter i, as a contiguous tensor [elements] in CPU memory, of its own type."""
        if not self.kept[i]:
            return self.stream.read(self.stream.index_of(self.params[i])).to("cpu").view(-1)
        return self.local(i).detach().to("cpu").contiguous().view(-1)

    def copy_back(self, i):
        """Hands the weights that are in the flat buffer to parameter i. On a device it has them behind copied_back()."""
        param = self.params[i]
        if not self.kept[i]:
            return  # it is read when it is used
        if self.is_view(i):
            torch.autograd.graph.increment_version(param)
        else:
            self._check_shape(i)
            self._uploads.start(self.local(i).detach(), self._flat_view(i))
            if self.mesh is not None:
                torch.autograd.graph.increment_version(param)

    def copied_back(self):
        """What the current streams are given from here on computes with what copy_back() has handed over."""
        self._uploads.order_before()

    def wait_copies(self):
        """Before the buffer is written: waits for what is still copied from it."""
        self._uploads.wait()

    def upload(self, first, to):
        """Copies the flat buffer from element `first` on to `to`, on a device, for what the current stream is given from
        here on."""
        self._uploads.start(to, self.flat[first : first + len(to)])
        self._uploads.order_before()

    def fill(self, i, first, values):
        """Gives parameter i, contiguous, what it has of `values`: new weights from element `first` of the flat buffer on,
        on the parameter's device."""
        self._check_shape(i)
        begin = max(self.firsts[i], first)
        end = min(self.firsts[i] + self.shapes[i].numel(), first + len(values))
        if begin < end:
            to = self.local(i).detach().view(-1)
            to[begin - self.firsts[i] : end - self.firsts[i]].copy_(values[begin - first : end - first])

    def _check_shape(self, i):
        if self.local(i).shape != self.shapes[i]:
            raise UsageError(
                f"parameter {self.names[i]} is {list(self.local(i).shape)} now and was "
                f"{list(self.shapes[i])} when the optimizer was made. Resize the model first (for "
                "example resize_token_embeddings), then make the optimizer."
            )

    def _contents(self, which):
        """Of each of these parameters what tells that somebody else wrote or exchanged it: its place, its type and a
        checksum of all of it. Versions of torch do not: a write through `.data`, an array of numpy or another process
        leaves them as they are."""
        contents, here = {}, {}
        for i in which:
            self._check_shape(i)
            if not self.kept[i]:
                continue  # nobody can write it
            param = self.local(i).detach()
            here.setdefault(param.device, []).append(param)
            contents[i] = (param.data_ptr(), param.dtype, param.device)
        sums = {device: iter(_checksums(device, params)) for device, params in here.items()}
        return {i: (place, dtype, next(sums[device])) for i, (place, dtype, device) in contents.items()}

    def snapshot(self, which=None):
        """These parameters (None: all) now hold what the master weights say."""
        self._snapshot |= self._contents(range(len(self.params)) if which is None else which)

    def changed(self, which=None, moved=True):
        """Those of these parameters (None: all) whose values somebody else has written since their snapshot().
        moved: also those that only have another place.
        Errors: UsageError that names a parameter whose shape has changed."""
        contents = self._contents(range(len(self.params)) if which is None else which)
        _bring(self._snapshot, contents)
        first = 0 if moved else 1
        return [i for i, content in contents.items() if self._snapshot.get(i, ())[first:] != content[first:]]
