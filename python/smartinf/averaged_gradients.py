"""Gradients that leave during backward, averaged over ranks on the way.

Elements are cut into pieces, each of one parameter and one owner, and pieces into buckets for one
owner. A bucket is added up at its owner as soon as all of its parameters are complete and all buckets
before it have gone: the same order on every rank, as in DistributedDataParallel. The first step's
order is that of the parameters, backwards; later ones go by when gradients really came on rank 0.
"""

import collections

import torch

from smartinf.errors import UsageError
from smartinf.released_gradients import ReleasedGradients
from smartinf.session import Phase

BUCKET_ELEMENTS = 4 << 20  # 16 MiB, in f32
_IN_FLIGHT_MAX = 3  # buckets being added up, and their buffers


# start: in the parameter. owner: a rank. within: its first element in the owner's range of that parameter.
_Piece = collections.namedtuple("_Piece", ["param", "start", "count", "owner", "within"])


class Buckets:
    """put(owned piece) is called with each of this rank's pieces, averaged, as (param, within, f32
    tensor in CPU memory); it is copied before the call returns. copies: of gradients that are on
    ranks.accelerator and are added up there; what a rank owns alone comes to the host. None: in CPU memory."""

    def __init__(self, layout, ranks, put, copies=None):
        self._layout, self._ranks, self._put, self._copies = layout, ranks, put, copies
        self.device = torch.device("cpu") if copies is None else ranks.accelerator
        self._pieces = [self._cut(i) for i in range(len(layout.params))]
        self._buffers = []
        self._arranged = False
        self._arrange(range(len(layout.params) - 1, -1, -1))
        self._reset()

    def _cut(self, i):
        layout, pieces = self._layout, []
        first, count = layout.firsts[i], layout.params[i].numel()
        for owner in range(self._ranks.world):
            low = max(layout.bounds[owner] - first, 0)
            high = min(layout.bounds[owner + 1] - first, count)
            for start in range(low, high, BUCKET_ELEMENTS):
                here = min(BUCKET_ELEMENTS, high - start)
                pieces.append(_Piece(i, start, here, owner, start - low))
        return pieces

    def _arrange(self, order):
        self._buckets, sizes = [], []
        for i in order:
            for piece in self._pieces[i]:
                last = self._buckets[-1] if self._buckets else None
                if last and last[0].owner == piece.owner and sizes[-1] + piece.count <= BUCKET_ELEMENTS:
                    last.append(piece)
                    sizes[-1] += piece.count
                else:
                    self._buckets.append([piece])
                    sizes.append(piece.count)
        self._bucket_elements = max(sizes)

    def _reset(self):
        self._gradients = {}  # complete ones, until all their pieces have gone
        self._left = {}
        self._came = []
        self._next = 0
        self._in_flight = collections.deque()
        self._taking = None

    @property
    def started(self):
        """Whether this rank has sent anything in this step."""
        return self._next > 0

    def add(self, i, gradient):
        """Parameter i's gradient of this rank is complete: [numel] on `device`."""
        self._gradients[i] = gradient
        self._left[i] = len(self._pieces[i])
        self._came.append(i)
        while self._next < len(self._buckets) and all(
            piece.param in self._gradients for piece in self._buckets[self._next]
        ):
            self._launch()

    def finish(self, taking=None):
        """Sends what is left and waits for all of it. Collective. taking: for each parameter whether
        any rank had a gradient; one that none had is not put. None: nothing is put any more."""
        self._taking = taking if taking is not None else [False] * len(self._layout.params)
        while self._next < len(self._buckets):
            self._launch()
        while self._in_flight:
            self._finish_oldest()
        if self._copies is not None:
            self._copies.finish()
        if not self._arranged and taking is not None:
            self._arranged = True
            came = self._ranks.broadcast_object(self._came)
            there = set(came)
            self._arrange([*came, *(i for i in range(len(self._pieces)) if i not in there)])
        self._reset()

    def _launch(self):
        while len(self._in_flight) >= _IN_FLIGHT_MAX:
            self._finish_oldest()
        bucket = self._buckets[self._next]
        self._next += 1
        elements = sum(piece.count for piece in bucket)
        memory = self._buffers.pop() if self._buffers else torch.empty(0)
        if memory.numel() < elements:
            memory = torch.empty(self._bucket_elements, device=self.device)
        flat, at = memory[:elements], 0
        for piece in bucket:
            out = flat[at : at + piece.count]
            gradient = self._gradients.get(piece.param)
            if gradient is None:
                out.zero_()
            else:
                torch.div(
                    gradient[piece.start : piece.start + piece.count].float(), self._ranks.world, out=out
                )
                self._left[piece.param] -= 1
                if self._left[piece.param] == 0:
                    self._gradients[piece.param] = None  # has been here, but is no longer held
            at += piece.count
        wait = self._ranks.reduce(flat, bucket[0].owner, on_device=self._copies is not None)
        self._in_flight.append((bucket, memory, flat, wait))

    def _finish_oldest(self):
        bucket, memory, flat, wait = self._in_flight.popleft()
        wait()
        if bucket[0].owner == self._ranks.rank:
            at = 0
            for piece in bucket:
                if self._taking is None or self._taking[piece.param]:
                    self._give(piece, flat[at : at + piece.count])
                at += piece.count
        if self._copies is None:
            self._buffers.append(memory)

    def _give(self, piece, values):
        if values.device.type == "cpu":
            self._put(piece.param, piece.within, values)
        else:
            self._copies.start(values, lambda first, part: self._put(piece.param, piece.within + first, part))


class AveragedGradients(ReleasedGradients):
    """Released gradients, averaged over the ranks as they leave. Each rank's core gets its own part."""

    def __init__(self, accumulation_steps, session):
        super().__init__(session, accumulation_steps, collective=True)
        core, segment_of = session.core, session.layout.segment_of

        def put(param, within, values):
            core.put_gradient_part(segment_of[param], within, values.data_ptr(), "f32", values.numel())

        self._stay = accumulation_steps == 1 and session.ranks.accelerator is not None
        self._buckets = Buckets(session.layout, session.ranks, put, self._copies if self._stay else None)

    def broadcast_parameters(self, session):
        """Rank 0's on all ranks, as DistributedDataParallel does it."""
        layout = session.layout
        for i, param in enumerate(layout.params):
            values = layout.values(i).clone()
            session.ranks.broadcast(values)
            with torch.no_grad():
                param.copy_(values.view(param.shape))

    def hand_over(self, session):
        session.begin_step()
        here = [i for i, taking in enumerate(self.taking_part(session.layout)) if taking]
        count = len(session.layout.params)
        anywhere = set(session.ranks.union(here, count))
        taking_part = [i in anywhere for i in range(count)]
        if any(taking_part):
            self._put_all(session, taking_part)
        return taking_part

    def drop(self, session):
        if session.phase is Phase.COLLECTED:
            return
        session.begin_step()
        if session.ranks.union([0] if self._buckets.started else [], 1):
            self._buckets.finish()

    def _put(self, session, i, gradient):
        self._buckets.add(i, gradient)

    def _put_piece(self, session, i, first, piece):
        return False  # a bucket waits for whole gradients

    def _put_all(self, session, taking_part):
        """What backward has not handed over: sums of fewer passes than said, gradients set by hand."""
        self._copies.finish()
        layout = session.layout
        for i, param in enumerate(layout.params):
            if i in self._handed_over and param.grad is not None:
                raise UsageError(
                    "gradients are there again after release_gradients has taken them. If the model "
                    "is wrapped in DistributedDataParallel, give the plain model instead: gradients "
                    "are averaged over the ranks as they leave."
                )
            if i in self._sums or param.grad is not None:
                self._buckets.add(i, self._rest_of(layout, i).to(self._buckets.device))
        self._buckets.finish(taking_part)
        for segment in layout.segments:
            if not taking_part[segment.param]:
                session.core.skip_gradient(segment.index)
