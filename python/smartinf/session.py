"""One opening of the devices: the core that works with them, the state they hold, and a step's phase."""

import contextlib
import ctypes
import enum
import logging
import threading
import time
import weakref

import torch

from smartinf import _core, compression, core_options, open_optimizers, relayout
from smartinf.errors import DeviceError, Error, MismatchError, UsageError
from smartinf.late_weights import LateWeights
from smartinf.layout import TYPE_NAMES, Layout
from smartinf.lineage import Lineage

_log = logging.getLogger("smartinf")
_STAGING_BYTES = 8 << 20  # of the core's buffers, beside those of the devices


class Phase(enum.Enum):
    """How far a step has come. A step goes from IDLE to COLLECTING, COLLECTED, UPDATING and back to IDLE;
    one that is dropped goes back at once. UPDATING, FAILED and ABORTED last beyond a call only where
    recover() could not come to its end; the next call that needs the state begins with it."""

    IDLE = enum.auto()  # the parameters hold the last step's weights; its commit may be under way
    COLLECTING = enum.auto()  # the core takes gradients
    COLLECTED = enum.auto()  # it has all of them
    UPDATING = enum.auto()  # the parameters may hold weights of a step that was never committed
    FAILED = enum.auto()  # a step ended before its update
    ABORTED = enum.auto()  # the last step was aborted, on all ranks; the parameters hold its weights
    CLOSED = enum.auto()


def _pass_remarks_on():
    """What the core has to say goes to Python's logger "smartinf"."""
    for level, text in _core.take_remarks():
        _log.log(logging.getLevelNamesMapping()[level.upper()], text)


class Session:
    """Opens the devices for the parameters in `named`, as `resume` says; closed, it is of no further use.

    A collective method says so. A hook of backward and a step hold `turn`, so that close() waits for them.

    unclaimed: the devices hold a state that nobody has said is meant (resume=None).
    expected: identity of the state that a small state dict referred to and that is not on the devices.
    """

    def __init__(self, options, gradients, named, rule_options, resume):
        self.options, self.ranks, self.tables = options, options.ranks, options.tables
        self.turn = threading.RLock()
        self.stepping = None  # the thread that is in a step, or hands over a gradient
        self.core, self.phase = None, Phase.CLOSED
        stored = None
        if resume is not False and self.ranks.world == 1:
            stored = _core.stored_state([device["path"] for device in options.devices], options.remote)
        parameters, self._has_room, self._subgroup = stored or (None, True, 0)
        self.layout = Layout(named, self.ranks.rank, self.ranks.world, options.streamed, options.mesh, parameters)
        self.ranks.use_devices(self.layout)
        self.stream = options.stream if self.layout.streams else None
        self.lineage = Lineage(len(self.layout.params))
        self.devices = core_options.devices_for(self.layout, options.devices)
        self.unclaimed, self.expected = False, None
        self.waited_s = 0.0  # for commits, and for weights that a step has left behind
        self.stepped = False  # there is a residual that may not be on the devices
        self.taking_part = None  # whether each parameter does, once COLLECTED
        self.hooks = []
        self.late = LateWeights(self.layout) if options.overlap is not None else None
        self.overlap = "none"  # of the step in progress, or of the last: "none", "late" or "early"
        self.wrong_guess = False  # of the last step
        self.expected_update = lambda: None  # an early update's guess: after, scale, group options, norm_max
        self._guess = None  # what the core was given of it
        paths = [device["path"] for device in self.devices]
        if resume is False:
            if self.stream is not None and self.stream.trained:
                raise UsageError(
                    "resume=False would discard the state that holds the model's own weights. Make the optimizer with "
                    "resume=True, or load the model again"
                )
            with open_optimizers.named_when_busy(self.devices):
                for path in paths:
                    _core.erase(path, options.remote)
        else:
            relayout.check_interrupted(options, paths)
        self.layout.rebind()
        try:
            self._open(rule_options)
            self.gradients = gradients(self)
            self.layout.check_kept(self.core)
            if self.core.fresh():
                self._initialize()
                if options.core["master"] != "f32":
                    self.load_weights()  # as they are stored, which a resumed run begins with
                elif self.stream is not None:
                    # A subgroup of the parameters that stay in memory may have streamed ones.
                    self.core.load_weights(self.layout.type_name, self.layout.owned_address, self.layout.kept_spans)
                    self._stream_from_core()
            else:
                self.lineage = self._stored_lineage()
                self.unclaimed = not resume
                if resume:
                    self.load_weights()
            self.gradients.attach(self)
            if self.tables is not None:
                self.tables.attach(self)
            if options.stream is not None:
                options.streamed.pass_ended = weakref.WeakMethod(self.pass_ended)
            if self.late is not None:
                self.late.attach(self, options.model())
            self.early_possible = self._early_possible()
            open_optimizers.add(self)
        except BaseException:
            self.abandon()
            raise

    def _open(self, rule_options):
        options = core_options.options_of(self.options, self.layout, self.devices) | rule_options
        if self.tables is not None:
            options |= self.tables.core_options()
        if self.options.streamed is not None:
            # Of each device a subgroup with its gradient, and four masters that are read as weights.
            of_device = self._subgroup * (4 * (1 + len(self.options.state_keys)) + 20)
            least = len(self.devices) * of_device + _STAGING_BYTES
            options["memory_budget_bytes"] = max(options["memory_budget_bytes"], least if self._subgroup else 0)
        if self.options.streamed is not None and not self._has_room and "gradient_budget_bytes" in options:
            # Made when all gradients fitted in memory.
            del options["gradient_budget_bytes"]
            _log.warning(
                "%s has no room for gradients, so all of them stay in memory, whatever memory_budget says. A checkpoint "
                "that is loaded into an optimizer on other devices has it",
                self.devices[0]["path"],
            )
        try:
            with open_optimizers.named_when_busy(self.devices):
                self.core = _core.Updater(options, *self.layout.ranges())
        finally:
            _pass_remarks_on()
        self.phase = Phase.IDLE

    def _early_possible(self):
        """Whether updates may begin in backward. Errors: UsageError where they are to."""
        refusal = self.core.early_update_refusal()
        if refusal and self.options.overlap == "early":
            raise UsageError(f'overlap="early": {refusal} overlap="auto" chooses where both are possible.')
        return self.options.release and not refusal

    def _initialize(self):
        layout = self.layout
        self.lineage.run = self.lineage.branch = self.ranks.broadcast_object(self.lineage.run)
        self.gradients.broadcast_parameters(self)
        values = [None]  # keeps alive what the core reads

        def provide(index):
            segment = layout.segments[index]
            values[0] = layout.values(segment.param)[segment.start : segment.stop]
            return values[0].data_ptr(), TYPE_NAMES[values[0].dtype]

        if self.tables is not None:
            self.tables.initialize(self.core)
        self.core.initialize(provide, self.lineage.to_json())
        layout.snapshot()

    def pass_ended(self, batches):
        """So many batches went through a streamed model together."""
        with self.turn:
            if self.core is not None:
                self.gradients.pass_ended(batches)

    def _stream_from_core(self):
        """Streamed parameters have the committed step's weights from here on."""
        if self.stream is not None:
            self.stream.train_with(self.core, self.layout)

    def _stored_lineage(self):
        where = ", ".join(device["path"] for device in self.devices)
        return Lineage.from_json(self.core.client_metadata(), len(self.layout.params), where)

    # ---- Closing.

    def opened(self):
        if self.core is None:
            raise UsageError("the optimizer is closed; make a new one with resume=True to go on")
        return self.core

    def close(self):
        """Carries the last step's commit through, unless a step is in progress, and lets the devices go. Several
        ranks wait for each other's answer to that, which needs none of them to be here."""
        with self.turn:
            core, self.core = self.core, None
            overwritten = self.updating_early
            phase, self.phase = self.phase, Phase.CLOSED
            for hook in self.hooks:
                hook.remove()
            self.hooks = []
            if core is None:
                return
            try:
                if overwritten:
                    core.abort()
                    self._load_weights(core)
                if self.late is not None and phase is Phase.IDLE:
                    self.late.take(core, self.layout, None)
                if self.stepped and phase is Phase.IDLE and self.ranks.world == 1:
                    core.wait_commit()
                    self.write_residual(core)
            finally:
                if self.late is not None:
                    self.late.forget(self.layout)
                if self.stream is not None:
                    self.stream.close_trained(core)
                core.close()
                _pass_remarks_on()
                self.layout.wait_copies()

    def abandon(self):
        """Lets the devices go as they are; opening them again decides on the step."""
        self.phase = Phase.FAILED
        with contextlib.suppress(Error):
            self.close()

    # ---- The last step's commit, and going back behind it.

    def wait_commit(self):
        """Errors: of the commit, the same on all ranks."""
        begin = time.monotonic()
        try:
            self.core.wait_commit()
        except Error:
            if self.ranks.world > 1 and not self._abandoned_as_unknown():
                self.phase = Phase.ABORTED
            raise
        finally:
            self.waited_s += time.monotonic() - begin

    def _abandoned_as_unknown(self):
        """After a commit of several ranks has failed: all have aborted it, unless this one does not know that."""
        try:
            self.core.abort()
        except Error:
            self.abandon()
            return True
        return False

    def take_weights(self, wanted=None):
        """Waits for new weights of parameters (by index; None: all) that a step has left behind, and hands
        them over. Goes back to the step before where its update failed."""
        if self.late is None or not self.late.pending:
            return
        with self.turn:
            try:
                self._take_weights(wanted)
            except Error as error:
                self.recover_after(error)
                raise

    def _take_weights(self, wanted=None):
        begin = time.monotonic()
        self.late.take(self.opened(), self.layout, wanted)
        self.waited_s += time.monotonic() - begin

    def synchronize(self):
        """Waits for the last step's commit, and goes back to the step before where it fails. Collective."""
        self.opened()
        if self.phase in (Phase.UPDATING, Phase.FAILED, Phase.ABORTED):
            self.recover()
        self.take_weights()
        try:
            self.wait_commit()
        except Error as error:
            self.recover_after(error)
            raise

    def ready(self):
        """synchronize(), and the state on the devices is the one that is meant. Collective."""
        self.synchronize()
        here, wanted, path = self.lineage, self.expected, self.devices[0]["path"]
        if wanted is not None:
            raise MismatchError(
                f"the loaded state dict refers to update {wanted['updates']} of run "
                f"{wanted['run'][:8]}, but {path} holds update {here.updates} of run "
                f"{here.run[:8]}. Load the checkpoint folder that was written with it "
                "(load_checkpoint, or smartinf.hf.CheckpointCallback with Trainer)."
            )
        if self.unclaimed:
            raise UsageError(
                f"{path} holds the state of run {here.run[:8]}, which has "
                f"made {here.updates} steps; it is not taken over unasked. Make the optimizer "
                "with resume=True to continue that run with its weights, with resume=False to discard its "
                "state and train this model, or load the checkpoint that is meant before the first step. "
                "Another folder keeps both."
            )

    def claim(self):
        """The state on the devices is the one that is meant from now on."""
        self.unclaimed, self.expected = False, None

    def recover_after(self, error):
        """recover() while `error` is on its way to the user, who hears of both."""
        try:
            self.recover()
        except Error as failed:
            error.add_note(f"Going back to the step before failed as well: {failed}")
            self.ranks.gave_up(error)

    def recover(self):
        """After a failure or an interruption: weights and state of the last committed step."""
        if self.phase is Phase.CLOSED:
            return
        if self.ranks.world > 1 and self.phase is not Phase.ABORTED:
            self._recover_alone()
            return
        reload = self.phase in (Phase.UPDATING, Phase.ABORTED) or self.updating_early
        if self.phase is not Phase.ABORTED:
            self.phase = Phase.UPDATING if reload else Phase.FAILED
        self._forget_gradients()
        with contextlib.suppress(Error):  # its failure is on its way to the user
            self.core.wait_commit()
        self.core.abort()
        stored = self._stored_lineage()
        if reload or stored.identity() != self.lineage.identity():
            self.phase = Phase.ABORTED
            self.lineage = stored
            self.load_weights()
        elif self.late is not None and self.late.pending:
            self._take_weights()
        self.phase = Phase.IDLE

    def _recover_alone(self):
        """After a failure that the other ranks do not know of. Nothing collective happens here, and
        what others may have committed is not aborted."""
        if self.phase is Phase.UPDATING or (self.gradients.collective and self.step_in_progress):
            self.abandon()
            raise DeviceError(
                "the ranks are no longer in step, so the optimizer was closed; start the job again with "
                "resume=True"
            )
        self._forget_gradients()
        if self.phase is not Phase.IDLE:
            self.phase = Phase.FAILED
            self.core.abort()
        self.phase = Phase.IDLE

    # ---- A step.

    @contextlib.contextmanager
    def step_taken(self):
        """Around a step, and around what a hook of backward hands over."""
        with self.turn:
            before, self.stepping = self.stepping, threading.get_ident()
            try:
                yield
            finally:
                self.stepping = before

    def reject_signal_handler(self, what):
        """A signal handler may have interrupted this thread's step, which is neither made nor not made then."""
        if self.stepping == threading.get_ident():
            raise UsageError(
                f"{what} by a signal handler that has interrupted step() or backward: let it set a flag, and call {what} behind "
                "step()"
            )

    @property
    def step_begun(self):
        """The core takes gradients, or has all of them."""
        return self.phase in (Phase.COLLECTING, Phase.COLLECTED)

    @property
    def updating_early(self):
        """The parameters may hold weights of the step in progress."""
        return self.overlap == "early" and self.step_begun

    @property
    def step_in_progress(self):
        return self.step_begun or self.gradients.pending or (self.tables is not None and bool(self.tables.pending))

    def reject_step_in_progress(self, what):
        if self.step_in_progress:
            raise UsageError(f"{what} between backward and step(): finish the step or call zero_grad()")

    def _forget_gradients(self):
        self.gradients.forget()
        if self.tables is not None:
            self.tables.forget()

    def begin_step(self):
        """The core takes gradients from here on. Collective when it is the first call of a step."""
        if self.step_begun:
            return
        self.ready()
        self.adopt_changes()
        self.core.begin_step()
        self.phase = Phase.COLLECTING
        self.overlap = "none" if self.late is None else "late"
        expected = self.expected_update()
        if expected is not None:
            *update, norm_max = expected
            self._guess = self._for_core(*update)
            self.overlap = "early"
            self.layout.wait_copies()
            self.core.start_early_update(*self._guess, norm_max)

    def _for_core(self, after, scale, group_options):
        """What the core's updates are given; see update()."""
        layout = self.layout
        by_segment = [group_options.get(segment.param) for segment in layout.segments]
        return after.updates, scale, by_segment, layout.type_name, layout.owned_address

    def committing(self):
        """The next begin_step() would wait."""
        return self.core.committing()

    def collect(self):
        """Hands over what the core does not have yet of the step's gradients. Returns for each parameter
        whether it takes part, on any rank. Collective."""
        if self.phase is Phase.COLLECTED:
            return self.taking_part
        if self.step_begun and self.options.release:
            self._reject_writes_since_backward()
        taking_part = self.gradients.hand_over(self)
        if any(taking_part):
            if self.tables is not None:
                self.tables.hand_over(self.core, self.ranks.world)
            self.taking_part, self.phase = taking_part, Phase.COLLECTED
        return taking_part

    def gradient_norm(self, unscale):
        """(norm, finite, name of the first that is not) of what was handed over, on all ranks. Collective."""
        return self.core.finish_gradients(unscale)

    def update(self, after, scale, group_options, lr):
        """Updates with the gradients collected, times `scale`; the parameters then hold the new weights.
        after: the lineage that the step leads to. group_options: for each parameter. lr: of tables. Collective."""
        core, layout, taking_part = self.core, self.layout, self.taking_part
        update = self._for_core(after, scale, group_options)
        self.phase = Phase.UPDATING
        self.wrong_guess = self.overlap == "early" and update != self._guess
        layout.wait_copies()
        core.start_update(*update, layout.kept_spans, [] if self.tables is None else self.tables.rates(lr))
        begin = time.monotonic()
        if self.late is not None:
            held = self.late.begin(layout, taking_part)
            core.start_commit(after.to_json())
            if held:
                self.options.warn_once(
                    "held elsewhere",
                    "overlap: step() waits for the new weights of %d of %d parameters, among them %s, because other tensors "
                    "have their memory (a state_dict() that was kept, p.data, a view), or a module of TorchScript has them, "
                    "and nothing says when those are read.",
                    len(held),
                    len(layout.params),
                    layout.names[min(held)],
                )
                self.late.take(core, layout, held)
        elif not self.ranks.together or layout.mesh is not None:
            for segment in layout.segments:
                if taking_part[segment.param] and layout.kept[segment.param]:
                    core.wait_weights(segment.first, segment.count)
                    layout.copy_back(segment.param)
            layout.copied_back()
            core.start_commit(after.to_json())
            if self.stream is not None:
                self.stream.updated()
        else:
            core.wait_weights(0, layout.owned_count)
            core.start_commit(after.to_json())
            self.ranks.all_gather_weights(layout, [i for i, taking in enumerate(taking_part) if taking])
            layout.copied_back()
        self.waited_s += time.monotonic() - begin
        self.lineage, self.stepped = after, True
        self._forget_gradients()
        if self.late is None:
            layout.snapshot([i for i, taking in enumerate(taking_part) if taking])
        self.phase = Phase.IDLE

    def _reject_writes_since_backward(self):
        """Backward began the step, which found what had been written until then. Collective."""
        early = set() if self.late is None else self.late.early  # guarded
        layout = self.layout
        here = layout.changed(set(range(len(layout.params))) - early, moved=False)
        written = self.ranks.union(here, len(layout.params))
        if written:
            self.drop_step()
            raise UsageError(
                f"{layout.names[min(written)]} was written between backward and step(), and the step would undo that: with "
                "release_gradients=True the devices have had its gradient since backward. Write weights after step() or "
                "before backward."
            )

    def drop_step(self):
        """Forgets the step in progress, before its update has begun. Collective where gradients are
        averaged as they leave."""
        self.gradients.drop(self)
        self._forget_gradients()
        if self.step_begun:
            overwritten = self.updating_early
            if overwritten:
                self.phase = Phase.UPDATING
            self.core.abort()
            if overwritten:
                self.load_weights()
            self.phase = Phase.IDLE

    # ---- Weights and state.

    def load_weights(self):
        """Parameters from the master weights. Collective."""
        self._load_weights(self.core)

    def _load_weights(self, core):
        layout = self.layout
        if self.late is not None:
            self.late.forget(layout)
        layout.wait_copies()
        core.load_weights(layout.type_name, layout.owned_address, layout.kept_spans)
        if self.stream is not None and core is self.core:
            self._stream_from_core()
        with torch.no_grad():
            self.ranks.all_gather_weights(layout, range(len(layout.params)))
        layout.copied_back()
        layout.snapshot()

    def adopt_changes(self):
        """Master weights from parameters that were written from outside, e.g. by model.load_state_dict(). No step is
        in progress. Collective."""
        changed = self.ranks.union(self.layout.changed(), len(self.layout.params))
        if changed:
            self.adopt_weights(changed)

    def adopt_weights(self, changed):
        """Where a parameter still is what came up, the master stays; of other elements the residual is dropped.
        Collective."""
        layout, values = self.layout, {}
        wanted = {i for i in changed if layout.kept[i]}  # nobody can write one that is streamed
        sent = residual = None
        if compression.has_residual(self.options.compress):
            self.wait_commit()  # all ranks, also one that owns nothing
        if self.core.step_ahead():
            sent = torch.empty(layout.owned_count, dtype=layout.dtype)
            self.core.load_weights(layout.type_name, sent.data_ptr())
            residual = self.residual().clone()

        def edit(segment, start, stop, planes):
            if segment.param not in wanted:
                return False
            if segment.param not in values:
                values.clear()  # pieces come in order
                values[segment.param] = layout.values(segment.param)
            given = values[segment.param][start:stop]
            at = slice(segment.first + start - segment.start, segment.first + stop - segment.start)
            differs = (planes[0] if sent is None else sent[at]).to(given.dtype) != given
            if not bool(differs.any()):
                return False
            if residual is not None:
                residual[at].masked_fill_(differs, 0)
            torch.where(differs, given.float(), planes[0], out=planes[0])
            return True

        self.edit(edit, self.lineage, residual)
        if self.ranks.world == 1 or layout.mesh is not None:
            # Nothing is left to be written, and in the middle of a backward nothing may be.
            layout.snapshot(changed)
        else:
            self.load_weights()

    def edit(self, edit, lineage, residual=None, ahead=()):
        """Rewrites state: edit(segment, start, stop, planes) changes f32 tensors [stop - start] in
        place and returns whether it did. `lineage` becomes true with it, or nothing does. residual:
        bf16 tensor [owned], the new one; None: it stays as it is. ahead: the core's
        step_ahead() of where that comes from. Collective."""

        def visit(first, count, views):
            tensors = [torch.frombuffer(view, dtype=torch.float32) for view in views]
            written = False
            with torch.no_grad():
                for segment, start, stop, offset in self.layout.pieces(first, count):
                    planes = [tensor[offset : offset + stop - start] for tensor in tensors]
                    written |= edit(segment, start, stop, planes)
            return written

        self.synchronize()
        if self.stream is not None:
            self.stream.updated(values_change=False)
        address = 0 if residual is None else residual.data_ptr()
        try:
            self.core.edit_state(visit, lineage.to_json(), address, list(ahead))
        except BaseException:
            if self.ranks.world > 1:
                self._abandoned_as_unknown()  # else nothing has changed
            raise
        self.lineage = lineage

    def read(self, take, master=False, whole=True):
        """take(index, planes) for each parameter, planes f32 and in its shape: the state's, with the master weights
        before them if asked for. whole: of the whole parameter, on all ranks, and parameters in order; otherwise of
        what this rank holds of a DTensor, and also where nobody has said that the state is meant. Collective."""
        if whole:
            self.ready()
        else:
            self.synchronize()
        self.reject_step_in_progress("reading state")
        layout, alone = self.layout, self.ranks.world == 1 or not whole
        shapes = [param.shape for param in layout.params] if whole else layout.shapes
        offsets = layout.offsets if whole else [0] * len(shapes)
        wanted = range(0 if master else 1, 1 + len(self.options.state_keys))
        building, taken = {}, set()

        def finish(i, planes):
            taken.add(i)
            take(i, [plane.view(shapes[i]) for plane in planes])

        def visit(first, count, views):
            tensors = [torch.frombuffer(views[p], dtype=torch.float32) for p in wanted]
            for segment, start, stop, at in layout.pieces(first, count):
                i = segment.param
                if i not in building:
                    building[i] = [torch.zeros(shapes[i].numel()) for _ in wanted]
                for plane, piece in zip(building[i], tensors, strict=True):
                    plane[offsets[i] + start : offsets[i] + stop].copy_(piece[at : at + stop - start])
                if alone and stop == layout.shapes[i].numel():
                    finish(i, building.pop(i))

        self.core.read_state(sum(1 << p for p in wanted), visit)
        for i in sorted(set(range(len(shapes))) - taken):
            planes = building.pop(i, None) or [torch.zeros(shapes[i].numel()) for _ in wanted]
            if not alone:
                for plane in planes:
                    self.ranks.all_reduce(plane)
            finish(i, planes)

    # ---- The residual of compressed gradients.

    def write_residual(self, core):
        """To the devices, where they have it only every now and then. No step is in progress."""
        if self.stepped and compression.writes_residual_at_close(self.options.compress):
            core.edit_state(None, self.lineage.to_json(), core.residual())

    def empty_residual(self):
        """Zeros, for states that come without a residual; None where compression has none."""
        if not compression.has_residual(self.options.compress):
            return None
        return torch.zeros(self.layout.owned_count, dtype=torch.bfloat16)

    def residual(self):
        """bf16 [owned], in the core's memory until the next step; None without compression. The last step
        has been synchronized."""
        address = self.opened().residual()
        if address == 0:
            return None
        memory = (ctypes.c_char * (2 * self.layout.owned_count)).from_address(address)
        return torch.frombuffer(memory, dtype=torch.bfloat16)
