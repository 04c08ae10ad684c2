"""Several ranks that share one optimizer state (as in ZeRO stage 1): each owns a span of the
parameter space on its own devices, and new weights go to all ranks after every step. Of parameters that fully_shard
has divided each rank owns what it holds, and nobody else needs the new weights.

Recovery, commits and the norm are agreed on by the core (engine/ranks/peers.h)."""

import contextlib
import functools
import itertools
import os
import pickle
import zlib

import torch
import torch.distributed as dist

from smartinf import _core, rank_calls
from smartinf.errors import Error, UsageError
from smartinf.storage_options import is_remote


_BACKENDS = {"cuda": "nccl"}  # for tensors on devices of a type
_PIECE_ELEMENTS = 16 << 20  # of weights that are sent at once


def _asked_for():
    asked = os.environ.get("SMARTINF_RANKS", "")
    if asked not in ("", "gloo", "nccl"):
        raise UsageError(f"SMARTINF_RANKS is {asked!r}; it may be gloo or nccl, or not be set")
    return asked


class Ranks:
    """One rank or many; with one, nothing is communicated.

    What ranks say to each other goes over gloo groups in CPU memory, whatever the model's own group uses; and so do
    gradients and weights, but between GPUs: these use NCCL (use_devices). SMARTINF_RANKS=gloo: gloo there as well; nccl:
    one rank alone makes these calls, too.
    """

    core = None  # the core's handle of several ranks
    together = False  # gradients are added up, and weights are sent
    accelerator = None  # where tensors are that a backend of their own adds up and sends; None: gloo does, in CPU memory
    _device_group = None

    def __init__(self, process_group=None):
        self.rank, self.world = 0, 1
        there = dist.is_available() and dist.is_initialized()
        if there and (dist.get_world_size(process_group) > 1 or _asked_for() == "nccl"):
            self.together = True
            self.rank = dist.get_rank(process_group)
            self.world = dist.get_world_size(process_group)
            self._members = dist.get_process_group_ranks(process_group or dist.group.WORLD)
            self._timeout = rank_calls.timeout_of(process_group)
            self._group = self._make_group()
            seconds = rank_calls.timeout_of(self._group).total_seconds()
            self._calls = rank_calls.RankCalls(self._members, self.rank, self._make_group, seconds)
            if self.world > 1:
                self.core = _core.Ranks(self.rank, self.world, self._calls)

    def _make_group(self, backend="gloo"):
        # Ranks that are not members do not take part: they may have groups of their own, as the stages of a pipeline.
        return dist.new_group(
            self._members, backend=backend, timeout=self._timeout, use_local_synchronization=True
        )

    def use_devices(self, layout):
        """If each rank has all parameters on one device of a type that has a backend of its own. Collective."""
        if not self.together or layout.mesh is not None:
            return
        devices = {param.device for param in layout.params}
        backend = _BACKENDS.get(next(iter(devices)).type) if len(devices) == 1 else None
        dense = all(param.is_contiguous() for param in layout.params)
        if backend is not None and not (_asked_for() != "gloo" and dense and dist.is_backend_available(backend)):
            backend = None
        backends = self.all_gather_object(backend)
        if any(other != backend for other in backends):
            backend = None
        if backend is None and _asked_for() == "nccl":
            raise UsageError(
                "SMARTINF_RANKS is nccl, which takes contiguous parameters that are all on one GPU on each rank, and a torch "
                f"that has it; the ranks have {', '.join(map(str, backends))}"
            )
        self.accelerator = None if backend is None else devices.pop()
        if backend is not None and self._device_group is None:
            self._device_group = self._make_group(backend)

    def device(self, device):
        """A device as the core wants it (storage_options.device_list), with a place of this rank's own."""
        path = device["path"]
        if "{rank}" in path:
            path = path.replace("{rank}", str(self.rank))
        elif self.world > 1 and is_remote(device):
            raise UsageError(f"{path}: each rank needs a device of its own; write {{rank}} into the name, e.g. {path}{{rank}}")
        elif self.world > 1:
            path = os.path.join(path, f"rank{self.rank}")
        return device | {"path": path}

    @contextlib.contextmanager
    def at(self, call):
        """The script has made this collective call. Without one it is at a step, in backward or in step()."""
        if self.world == 1:
            yield
            return
        before, self._calls.call = self._calls.call, call
        try:
            yield
        finally:
            self._calls.call = before

    # ---- Objects and decisions. Errors name the rank that has died or does not come.

    def barrier(self):
        if self.world > 1:
            self._calls.all_texts(b"")

    def broadcast_object(self, value):
        """Rank 0's value on every rank."""
        return self.all_gather_object(value if self.rank == 0 else None)[0]

    def all_gather_object(self, value):
        """Every rank's value, by rank."""
        return [value] if self.world == 1 else [pickle.loads(text) for text in self._calls.all_texts(pickle.dumps(value))]

    def check_parameters(self, described):
        """Errors: UsageError when the ranks optimize different parameters (lists of names and shapes)."""
        digests = self.all_gather_object(zlib.crc32(repr(described).encode()))
        if any(digest != digests[0] for digest in digests):
            raise UsageError(
                "the ranks' optimizers have different parameters, as pipeline parallelism makes them; these "
                "optimizers need the whole model on every rank, or one that fully_shard has divided. Leave that "
                "wrapper out, or give process_group the ranks that hold the same parameters."
            )

    @contextlib.contextmanager
    def failing_together(self):
        """What one rank raises within it, an Error, all ranks raise at its end."""
        failure = None
        try:
            yield
        except Error as error:
            failure = error
        if self.world > 1:
            try:
                self.core.all_ok("a call of the optimizer", failure)
            except Exception:
                if failure is None:
                    raise
        if failure is not None:
            raise failure

    def gave_up(self, error):
        """What the others say when they miss this rank."""
        if self.world > 1:
            self._calls.failed(str(error))

    def union(self, indices, count):
        """The union of every rank's indices (below count), in order."""
        if self.world == 1:
            return indices
        marks = bytearray(count)
        for i in indices:
            marks[i] = 1
        return [i for i, marked in enumerate(zip(*self._calls.all_texts(bytes(marks)), strict=True)) if any(marked)]

    # ---- Tensors. Errors of broadcast and all_gather_weights name the rank as well; those of reduce and all_reduce say
    # what any rank has said first.

    def make_reduce_group(self):
        """A group of its own for reduce(), so that its order does not depend on the other calls'."""
        self._reduce_group = self._make_group()

    def reduce(self, tensor, owner, on_device=False):
        """Starts adding up every rank's `tensor` into `owner`'s; the others' is then of no use. Returns what waits for it;
        on_device: what is computed there from then on."""
        group = self._device_group if on_device else self._reduce_group
        start = functools.partial(dist.reduce, tensor, self._members[owner], group=group, async_op=True)
        work = self._calls.of_torch(start)
        return lambda: self._calls.of_torch(work.wait)

    def broadcast(self, tensor):
        """Rank 0's values into every rank's tensor."""
        self._calls.broadcast_tensor(self._group, tensor, 0)

    def all_reduce(self, tensor):
        self._calls.meet("a sum", tensor.nbytes)
        self._calls.of_torch(lambda: dist.all_reduce(tensor, group=self._group))

    def all_gather_weights(self, layout, wanted):
        """Every rank's part of the flat weights to all ranks, which need them unless they are divided, and to these
        parameters."""
        if self.accelerator is not None:
            return self._broadcast_weights(layout, wanted)
        if self.together and layout.mesh is None:
            parts = [layout.flat[begin:end].view(torch.uint8) for begin, end in itertools.pairwise(layout.bounds)]
            self._calls.all_gather_tensors(self._group, parts)
        for i in wanted:
            layout.copy_back(i)

    def _broadcast_weights(self, layout, wanted):
        """They go up once, at their owner, and to the others from there: what others have in the flat buffer is old."""
        self._calls.meet("weights", layout.flat.nbytes)
        for owner, (begin, end) in enumerate(itertools.pairwise(layout.bounds)):
            for first in range(begin, end, _PIECE_ELEMENTS):
                piece = torch.empty(min(_PIECE_ELEMENTS, end - first), dtype=layout.dtype, device=self.accelerator)
                if owner == self.rank:
                    layout.upload(first, piece)
                send = functools.partial(dist.broadcast, piece, self._members[owner], group=self._device_group)
                self._calls.of_torch(send)
                for i in wanted:
                    layout.fill(i, first, piece)
