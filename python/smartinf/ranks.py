"""Several ranks that share one optimizer state (as in ZeRO stage 1): each owns a span of the
parameter space on its own devices, and new weights go to all ranks after every step. Of parameters that fully_shard
has divided each rank owns what it holds, and nobody else needs the new weights."""

import math
import os
import zlib

import torch
import torch.distributed as dist

from smartinf.errors import DeviceError, Error, MismatchError, UsageError


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
            self._members = members
            self._group = self._make_group()

    def _make_group(self):
        # Ranks that are not members do not take part: they may have groups of their own, as the stages of a pipeline.
        return dist.new_group(self._members, backend="gloo", use_local_synchronization=True)

    def device(self, device):
        """A device as the core wants it (storage_options.device_list), with a place of this rank's own."""
        path = device["path"]
        if "{rank}" in path:
            path = path.replace("{rank}", str(self.rank))
        elif self.world > 1:
            path = os.path.join(path, f"rank{self.rank}")
        return device | {"path": path}

    def make_reduce_group(self):
        """A group of its own for reduce(), so that its order does not depend on the other calls'."""
        self._reduce_group = self._make_group()

    def reduce(self, tensor, owner):
        """Starts adding up every rank's `tensor` into `owner`'s; the others' is then of no use."""
        return dist.reduce(
            tensor, dst=self._members[owner], group=self._reduce_group, async_op=True
        )

    def barrier(self):
        if self.world > 1:
            dist.barrier(self._group)

    def broadcast_object(self, value):
        """Rank 0's value on every rank."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self._members[0], group=self._group)
        return box[0]

    def check_same_state(self, value):
        """Errors: MismatchError when the ranks hold states of different steps or runs."""
        if self.world == 1:
            return
        values = self.all_gather_object(value)
        if any(other != values[0] for other in values):
            raise MismatchError(
                "the ranks' devices hold different states: "
                + "; ".join(f"rank {r}: update {v['updates']}" for r, v in enumerate(values))
                + ". Load the last checkpoint."
            )

    def check_parameters(self, described):
        """Errors: UsageError when the ranks optimize different parameters (lists of names and shapes)."""
        digests = self.all_gather_object(zlib.crc32(repr(described).encode()))
        if any(digest != digests[0] for digest in digests):
            raise UsageError(
                "the ranks' optimizers have different parameters, as pipeline parallelism makes them; these "
                "optimizers need the whole model on every rank, or one that fully_shard has divided. Leave that "
                "wrapper out, or give process_group the ranks that hold the same parameters."
            )

    def all_gather_object(self, value):
        """Every rank's value, by rank."""
        if self.world == 1:
            return [value]
        values = [None] * self.world
        dist.all_gather_object(values, value, group=self._group)
        return values

    def raise_on_any_failure(self, failure):
        """Raises on every rank when one of them has a failure (an Error, or None)."""
        texts = self.all_gather_object(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        for r, text in enumerate(texts):
            if text is not None:
                raise DeviceError(f"rank {r}: {text}")

    def all_agree(self, yes):
        votes = torch.tensor([int(yes)])
        dist.all_reduce(votes, dist.ReduceOp.MIN, group=self._group)
        return bool(votes.item())

    def recovery_step(self, paths, core):
        """The step that every rank's devices can be brought to, by the core's rule for one rank's devices.
        None: they are fresh, or this is the only rank. A run that was killed while it was being made
        starts over."""
        if self.world == 1:
            return None
        states, failure = [], None
        try:
            states = [core.peek(path) for path in paths]
        except Error as error:
            failure = error
        self.raise_on_any_failure(failure)
        held = [state for state in states if state is not None and state[0]]
        mine = None
        if len(held) == len(states):
            mine = (max(state[1] for state in held), min(state[2] for state in held))
        everyone = self.all_gather_object(mine)
        holding = [state for state in everyone if state is not None]
        if not holding:
            return None
        what = ", ".join(
            f"rank {r}: " + ("empty" if state is None else f"step {state[1]}")
            for r, state in enumerate(everyone)
        )
        if len(holding) < self.world:
            if any(committed > 0 for committed, _ in holding):
                raise MismatchError(
                    f"some ranks' devices hold state and others' do not ({what}). Give every rank the "
                    "devices it had, or load the last checkpoint over empty ones (resume=False)."
                )
            for path in paths:
                core.erase(path)
            self.barrier()
            return None
        try:
            return core.recovery_step(holding)
        except MismatchError:
            raise MismatchError(
                f"the ranks' devices hold different steps, and no crash explains that ({what}): one of "
                "them was replaced by an older copy. Load the last checkpoint."
            ) from None

    def union(self, indices, count):
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
        mine = torch.tensor([norm, float(finite)], dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(parts, mine, group=self._group)
        # Added up by every rank in the same order: the clip factor must have the same bits everywhere.
        norms, finites = zip(*(part.tolist() for part in parts), strict=True)
        return (math.sqrt(sum(n * n for n in norms)), True) if all(finites) else (math.inf, False)

    def broadcast(self, tensor):
        """Rank 0's values into every rank's tensor."""
        dist.broadcast(tensor, src=self._members[0], group=self._group)

    def all_reduce(self, tensor):
        dist.all_reduce(tensor, group=self._group)

    def all_gather_weights(self, layout):
        """Every rank's part of the flat weights to all ranks, which need them unless they are divided."""
        if self.world == 1 or layout.mesh is not None:
            return
        for r, member in enumerate(self._members):
            part = layout.flat[layout.bounds[r] : layout.bounds[r + 1]].view(torch.uint8)
            dist.broadcast(part, src=member, group=self._group)


class Commit:
    """The commit of the last step. One rank waits for its core. Several prepare the step on all of them,
    then commit it on all of them or on none; a rank that dies in between leaves it prepared, and opening
    again rolls it forward or back everywhere."""

    def __init__(self, ranks):
        self._ranks = ranks
        self._prepared = False  # the last step is still to be agreed on
        # What became of a step when wait() raises:
        self.outcome_unknown = False  # the ranks did not answer, and others may have committed
        self.aborted = False  # all ranks aborted it

    def started(self):
        self._prepared = self._ranks.world > 1

    def wait(self, core, failure=None):
        """Raises what the commit failed with. failure: of this rank, before it could prepare."""
        if self._ranks.world == 1:
            if failure is not None:
                raise failure
            core.wait_commit()
            return
        self.aborted = False
        if not self._prepared:
            return
        if failure is None:
            try:
                core.wait_commit()
            except Error as error:
                failure = error
        self.outcome_unknown = True
        agreed = self._ranks.all_agree(failure is None)
        self.outcome_unknown = self._prepared = False
        if agreed:
            core.commit_prepared()
            return
        core.abort()
        self.aborted = True
        raise failure or DeviceError("another rank could not write its part of the step: it was aborted")
