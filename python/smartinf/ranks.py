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


class Ranks:
    """One rank or many; with one, nothing is communicated.

    Everything here goes over gloo groups in CPU memory, whatever the model's own group uses.
    """

    core = None  # the core's handle of several ranks

    def __init__(self, process_group=None):
        self.rank, self.world = 0, 1
        if dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1:
            self.rank = dist.get_rank(process_group)
            self.world = dist.get_world_size(process_group)
            self._members = dist.get_process_group_ranks(process_group or dist.group.WORLD)
            self._timeout = rank_calls.timeout_of(process_group)
            self._group = self._make_group()
            seconds = rank_calls.timeout_of(self._group).total_seconds()
            self._calls = rank_calls.RankCalls(self._members, self.rank, self._make_group, seconds)
            self.core = _core.Ranks(self.rank, self.world, self._calls)

    def _make_group(self):
        # Ranks that are not members do not take part: they may have groups of their own, as the stages of a pipeline.
        return dist.new_group(
            self._members, backend="gloo", timeout=self._timeout, use_local_synchronization=True
        )

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

    def reduce(self, tensor, owner):
        """Starts adding up every rank's `tensor` into `owner`'s; the others' is then of no use. Returns what waits for it."""
        start = functools.partial(dist.reduce, tensor, self._members[owner], group=self._reduce_group, async_op=True)
        work = self._calls.of_torch(start)
        return lambda: self._calls.of_torch(work.wait)

    def broadcast(self, tensor):
        """Rank 0's values into every rank's tensor."""
        self._calls.broadcast_tensor(self._group, tensor, 0)

    def all_reduce(self, tensor):
        self._calls.meet("a sum", tensor.nbytes)
        self._calls.of_torch(lambda: dist.all_reduce(tensor, group=self._group))

    def all_gather_weights(self, layout):
        """Every rank's part of the flat weights to all ranks, which need them unless they are divided."""
        if self.world == 1 or layout.mesh is not None:
            return
        parts = [layout.flat[begin:end].view(torch.uint8) for begin, end in itertools.pairwise(layout.bounds)]
        self._calls.all_gather_tensors(self._group, parts)
