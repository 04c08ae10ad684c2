"""Several ranks that share one optimizer state (as in ZeRO stage 1): each owns a stretch of the
parameter space on its own devices, and new weights are gathered after every step."""

import math
import os

import torch
import torch.distributed as dist

from smartinf.errors import MismatchError


class Ranks:
    """One rank or many; with one, nothing is communicated.

    Everything here goes over a gloo group in CPU memory, whatever the model's own group uses.
    """

    def __init__(self, process_group=None):
        self.rank, self.world, self._group = 0, 1, None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1:
            self.rank = dist.get_rank(process_group)
            self.world = dist.get_world_size(process_group)
            members = dist.get_process_group_ranks(process_group or dist.group.WORLD)
            self._group = dist.new_group(members, backend="gloo")
            self._members = members

    def device(self, given):
        """A device as the core wants it, with a place of this rank's own."""
        device = dict(given) if isinstance(given, dict) else {"path": given}
        path = os.path.expanduser(os.fspath(device["path"]))
        if "{rank}" in path:
            path = path.replace("{rank}", str(self.rank))
        elif self.world > 1:
            path = os.path.join(path, f"rank{self.rank}")
        device["path"] = path
        return device

    def barrier(self):
        if self.world > 1:
            dist.barrier(self._group)

    def same(self, value):
        """Rank 0's value on every rank."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self._members[0], group=self._group)
        return box[0]

    def check_same(self, value):
        """Errors: MismatchError when the ranks hold states of different steps or runs."""
        if self.world == 1:
            return
        values = [None] * self.world
        dist.all_gather_object(values, value, group=self._group)
        if any(other != values[0] for other in values):
            raise MismatchError(
                "the ranks' devices hold different states: "
                + "; ".join(f"rank {r}: update {v['updates']}" for r, v in enumerate(values))
                + ". Load the last checkpoint."
            )

    def any_of(self, indices, count):
        """The union of every rank's indices (below count), in order."""
        if self.world == 1:
            return indices
        marks = torch.zeros(count, dtype=torch.uint8)
        marks[indices] = 1
        dist.all_reduce(marks, dist.ReduceOp.MAX, group=self._group)
        return marks.nonzero().view(-1).tolist()

    def norm(self, norm, finite):
        """Global norm and whether all are finite, of the parts that the ranks own."""
        if self.world == 1:
            return norm, finite
        sums = torch.tensor([norm * norm if finite else 0.0, 0.0 if finite else 1.0]).double()
        dist.all_reduce(sums, group=self._group)
        finite = sums[1].item() == 0
        return (math.sqrt(sums[0].item()) if finite else math.inf), finite

    def sum(self, tensor):
        dist.all_reduce(tensor, group=self._group)

    def gather(self, layout):
        """Every rank's part of the flat weights to all ranks."""
        if self.world == 1:
            return
        for r, member in enumerate(self._members):
            part = layout.flat[layout.bounds[r] : layout.bounds[r + 1]].view(torch.uint8)
            dist.broadcast(part, src=member, group=self._group)
