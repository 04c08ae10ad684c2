"""What all optimizers of the package share: parameters in, steps over devices, state in and out."""

import contextlib
import ctypes
import difflib
import inspect
import logging
import math
import os
import shutil
import sys
import threading
from collections.abc import Callable

import torch

from smartinf import _core, checkpoint, compression, open_optimizers, trainer_arguments
from smartinf.averaging import Averaging
from smartinf.errors import (
    DeviceError,
    Error,
    MismatchError,
    NonFiniteGradientError,
    UsageError,
)
from smartinf.layout import TYPE_NAMES, Layout
from smartinf.lineage import Lineage
from smartinf.ranks import Ranks
from smartinf.sizes import parse_bytes
from smartinf.storage_options import Path

_FORMAT = 1  # of the small state dict
# What stands in the small dict in place of a state, so that torch's optimizers refuse it instead of
# starting without moments. Those that count steps read "step" as a number, and their error then holds this
# text: bytes, because torch copies a str as an iterator. The others look at nothing but the number of
# groups.
_NO_STATE_TEXT = b"""no state is in this file: it is on the devices of a smartinf optimizer, and in the checkpoint \
written with this file, if there is one. What torch.optim takes is made of that checkpoint by `python -m smartinf \
torch-state`, of a live optimizer by full_state_dict()"""
_NO_STATE = "smartinf_note"
_BLOCK_ELEMENTS = 1 << 16  # of the devices' checksummed blocks, the least a device can hold
_WORTH_MEASURING_BYTES = 1 << 30
_log = logging.getLogger("smartinf")


def _pass_remarks_on():
    """What the core has to say goes to Python's logger "smartinf"."""
    for level, text in _core.take_remarks():
        _log.log(logging.getLevelNamesMapping()[level.upper()], text)


class _StateOnDevices(dict):
    """What ``optimizer.state`` is: it has no entries, and asking for one is an error."""

    @staticmethod
    def refuse(*_):
        raise UsageError(
            "optimizer.state is empty: the state is on the devices. visit_full_state() shows it parameter by "
            "parameter, full_state_dict() makes a copy in memory, load_state_dict() takes such a copy, "
            "save_checkpoint() is for files. torch.distributed.checkpoint cannot save it."
        )

    __missing__ = __setitem__ = setdefault = update = refuse
    # torch.distributed.checkpoint asks this, and makes a step where there is no state.
    __bool__ = refuse


def _reject_wrapper():
    """ZeroRedundancyOptimizer makes an inner optimizer on each rank with other parameters. Sharded here
    once more, each rank would wait for elements that no other has."""
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    frame = sys._getframe(1)
    while zero is not None and frame is not None:
        if isinstance(frame.f_locals.get("self"), zero.ZeroRedundancyOptimizer):
            raise UsageError(
                "ZeroRedundancyOptimizer cannot wrap these optimizers: under torchrun each rank keeps a "
                "part of the state on its own devices by itself. Make the optimizer with the model's "
                "parameters, without the wrapper."
            )
        frame = frame.f_back


def _as_written(method):
    """A method of torch's Optimizer without the wrapper that hides it from torch.compile, whose first
    call imports the compiler: 150 MB and a second that nobody needs who does not compile."""
    return getattr(method, "__wrapped__", method)


def _unexpected(kind, keyword):
    """What Python says of a keyword that a class does not take, with the nearest that it does."""
    known = {
        name
        for cls in (kind, StorageOptimizer)
        for name, p in inspect.signature(cls.__init__).parameters.items()
        if name not in ("self", "defaults") and p.kind != p.VAR_KEYWORD
    }
    near = difflib.get_close_matches(keyword, sorted(known), 1)
    text = f"{kind.__name__}() got an unexpected keyword argument {keyword!r}"
    return f"{text}; did you mean {near[0]!r}?" if near else text


class StorageOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer whose state is kept and updated on storage devices.

    params: as for any torch optimizer: tensors, (name, tensor) pairs, or groups. Names given here
        appear in messages and checkpoints. Parameters that do not require gradients when the
        optimizer is made take no place on the devices and must stay frozen.

    devices: directories or block devices; each an str or path, or a dict with ``path`` and
        optionally ``name``, ``threads``, ``bandwidth`` (bytes per second), ``capacity_bytes``. Under
        several ranks ``{rank}`` in a path is replaced; without it each rank uses a folder ``rankN``
        below the path.
    resume: what to do with devices that hold state. True: take weights and state from them and go
        on (empty devices are begun). False: discard it. None: the first step raises UsageError unless
        load_state_dict() or load_checkpoint() has said which state is meant.
    state_format: "f32" (exact), "bf16" or "q8": how momentum and variance are kept.
    compress: sends the largest elements of each gradient instead of all, and keeps the rest for later
        steps: a ratio (0.02 sends the signs of 8 %), a codec ("topk", "randomk", "dense"), or a dict
        with any of codec, ratio, values, feedback, feedback_decay, variance, step_ahead,
        warmup_steps, keep_every, as in a recipe (docs/smartcomp.md). 4 bytes per parameter in host
        memory, in place of the gradients'.
        Clipping, GradScaler and accumulation come before anything is kept; a step that is skipped or
        fails changes nothing of it; resume and checkpoints carry it. None: gradients go whole.
    memory_budget: bytes (or "512MiB") for the buffers of engine and devices; gradients come on top.
    gradient_budget: bytes of gradients held in memory between backward and update; the rest is
        spilled to the devices. None: all stay in memory.
    state_cache: bytes (or "24GB") of the state that stay in host memory as well and are not read from
        the devices again, of each process; on top of memory_budget. Every step is written as ever, but
        with durability "none" only for a checkpoint and when closed. None: none.
    gradient_type: "f32" or "bf16", how gradients travel to the devices. None: "f32" unless every
        parameter is bfloat16.
    durability: "step": every step survives a power cut. "none": scratch runs; nothing is promised.
    max_grad_norm: clips by the global L2 norm, found while gradients are handed over: no extra pass.
        float("inf") clips nothing, and says that this is meant.
    nonfinite: on a gradient with an infinity or NaN "raise" NonFiniteGradientError, "skip" the step,
        or "apply" it as torch does. Before the first two nothing has changed.
    release_gradients: backward hands each gradient over as soon as it is complete and frees it. With
        accumulation_steps=k the sum over k backward passes is kept in host memory, in f32, and handed
        over in the k-th. p.grad is None after backward then, so clip with max_grad_norm. GradScaler works
        (leave scaler.unscale_ out). Under several ranks gradients are averaged on the way, bucket by
        bucket, each to the rank that owns it; do not wrap the model in DistributedDataParallel then.
    where: "device" (SmartUpdate) or "host" (the baseline: state crosses the host link).
    subgroup_elements: of the unit that is read, updated and written at once; 0: chosen.
    checksums: of every block on the devices, checked when it is read. False saves a little time.
    seed: of stochastic rounding (state_format "bf16" and "q8") and of the codec "randomk".
    process_group: the ranks that share the state. None: all of them under torch.distributed.
    fused, foreach: taken from configurations written for torch.optim, and without effect: they choose
        among torch's own loops. capturable, differentiable: must be False.

    After a step: ``grad_norm`` is the global L2 norm of its gradients before clipping.

    ``with smartinf.AdamW(...) as optimizer:`` closes it at the end of the block.

    Errors: see smartinf.errors. A failed or interrupted step has not happened: weights and state are
    those of the step before. Threads: one at a time. Not usable in a forked child.
    """

    _rule = ""
    _state_keys = ()
    _torch_counts_steps = True

    def __init__(
        self,
        params,
        defaults,
        *,
        devices=None,
        resume=None,
        state_format="f32",
        compress=None,
        memory_budget="512MiB",
        gradient_budget=None,
        state_cache=None,
        gradient_type=None,
        durability="step",
        max_grad_norm=None,
        nonfinite="raise",
        release_gradients=False,
        accumulation_steps=1,
        where="device",
        subgroup_elements=0,
        checksums=True,
        seed=0,
        process_group=None,
        fused=None,
        foreach=None,
        capturable=False,
        differentiable=False,
        **unknown,
    ):
        _reject_wrapper()
        self._core = None
        self._turn = threading.RLock()  # held while a step, a hook of backward or close() works with the core
        self._broken = self._begun = self._stepped = self._said_nothing_moves = False
        self._said_nothing_is_clipped = False
        if unknown:
            raise TypeError(_unexpected(type(self), next(iter(unknown))))
        for name, given in (("capturable", capturable), ("differentiable", differentiable)):
            if given:
                raise UsageError(
                    f"{name}={given!r} is not supported: a step leaves the GPU and the autograd graph. "
                    "Leave it out."
                )
        if devices is None or isinstance(devices, (str, os.PathLike, dict)):
            devices = [] if devices is None else [devices]
        if not devices:
            raise UsageError(
                'no device given: say where the state is to live, e.g. devices=["/nvme/run1"]. A '
                "directory is made if it is missing."
            )
        self._compress = compression.parse(compress)
        if resume not in (None, True, False):
            raise UsageError(f"resume={resume!r}: known are True, False and None")
        if nonfinite not in ("raise", "skip", "apply"):
            raise UsageError(f'nonfinite={nonfinite!r}: known are "raise", "skip" and "apply"')
        if self._compress is not None and nonfinite == "apply":
            raise UsageError(
                'nonfinite="apply" does not go together with compress, which would keep the infinity for '
                'all later steps; choose "raise" or "skip"'
            )
        if max_grad_norm is not None and not float(max_grad_norm) > 0:
            raise UsageError(f"max_grad_norm={max_grad_norm!r} must be positive, or None")
        if accumulation_steps < 1 or int(accumulation_steps) != accumulation_steps:
            raise UsageError(f"accumulation_steps={accumulation_steps!r} must be a positive integer")
        self.max_grad_norm = max_grad_norm
        self.nonfinite = nonfinite
        self.grad_norm = None
        self._resume = resume
        self._state_is_saved = False  # by a checkpoint, so that a small state dict is enough
        self._release = bool(release_gradients)
        self._accumulation_steps = int(accumulation_steps)
        self._ranks = Ranks(process_group)
        self._given_devices = [self._ranks.device(device) for device in devices]
        self._gradient_type = gradient_type
        self._core_options = {
            "rule": self._rule,
            "state_format": state_format,
            "memory_budget_bytes": parse_bytes(memory_budget, "memory_budget"),
            "durability": durability,
            "where": where,
            "subgroup_elements": int(subgroup_elements),
            "checksums": bool(checksums),
            "seed": int(seed),
            "hold_commit": self._ranks.world > 1,  # see _settle
        }
        if self._compress is not None:
            self._core_options["compress"] = self._compress
        if gradient_budget is not None:
            self._core_options["gradient_budget_bytes"] = parse_bytes(
                gradient_budget, "gradient_budget"
            )
        if state_cache is not None:
            self._core_options["state_cache_bytes"] = parse_bytes(state_cache, "state_cache")
        self._hooks = []
        if self._release and self._ranks.world > 1:
            self._ranks.begin_averaging()
        super().__init__(params, defaults)
        trainer_arguments.check_making(self)
        self._ranks.check_parameters([[name, list(param.shape)] for name, param in self._trainable()])
        self._open(resume)

    # ---- Opening and closing.

    def _open(self, resume):
        named = self._trainable()
        self._layout = Layout(named, self._ranks.rank, self._ranks.world)
        self._index_of = {id(param): i for i, param in enumerate(self._layout.params)}
        self._segment_of = {segment.param: segment.index for segment in self._layout.segments}
        gradient_type = self._gradient_type
        if gradient_type is None:
            gradient_type = "bf16" if self._layout.dtype == torch.bfloat16 else "f32"
        self._leave_out_devices()
        if resume is False:
            with open_optimizers.named_when_busy(self._devices):
                for device in self._devices:
                    _core.erase(device["path"])
        else:
            self._reject_relayed()
        options = {
            **self._core_options,
            "gradient_type": gradient_type,
            "devices": self._devices,
            **self._rule_options(self.param_groups[0]),
        }
        if 4 * self._layout.total * (1 + len(self._state_keys)) < _WORTH_MEASURING_BYTES:
            # Measuring the devices takes seconds; so little state gains nothing from it.
            options |= {"io_bytes": 4 << 20, "io_depth": 8}
            options["devices"] = [{"bandwidth": 1.0, **device} for device in self._devices]
        self._check_shares(options)
        paths = [device["path"] for device in self._devices]
        recover_to = self._ranks.recovery(paths, _core.peek, _core.erase)
        if recover_to is not None:
            options["recover_to"] = recover_to
        self._layout.settle()
        failure = None
        try:
            with open_optimizers.named_when_busy(self._devices):
                self._core = _core.Updater(
                    options, self._layout.range_names(), self._layout.range_shapes()
                )
        except Error as error:
            failure = error
        _pass_remarks_on()
        self._stand_or_fall(failure)
        self._begun = False
        self._broken = False
        self._prepared = False  # several ranks: the last step is still to be committed
        self._all_failed = False  # several ranks: the step was taken back on all of them
        self._stepped = False  # something is kept that may not be on the devices
        self._taking = None  # which parameters take part, once all gradients are handed over
        self._receipt = None  # the parameter that shows GradScaler what the gradients held
        self._averaging = None
        if self._release and self._ranks.world > 1:
            self._averaging = Averaging(self._layout, self._ranks, self._put_averaged)
        # While gradients are released, by parameter: handed over; sum of the passes so far; passes.
        self._received = set()
        self._kept = {}
        self._passes = {}
        self._weights_in_doubt = False
        self._expected = None  # the state that a small state dict referred to and is not here
        self._undecided = False
        self._lineage = Lineage(len(self._layout.params))
        if self._core.fresh():
            self._lineage.run = self._lineage.branch = self._ranks.same(self._lineage.run)
            if self._averaging is not None:
                self._start_alike()
            values = [None]  # keeps alive what the core reads

            def provide(index):
                segment = self._layout.segments[index]
                values[0] = self._layout.values(segment.param)[segment.start : segment.stop]
                return values[0].data_ptr(), TYPE_NAMES[values[0].dtype]

            try:
                self._core.initialize(provide, self._lineage.to_json())
            except Error as error:
                failure = error
            self._stand_or_fall(failure)
            self._layout.remember()
        else:
            self._lineage = self._stored_lineage()
            self._ranks.check_same(self._lineage.identity())
            if resume:
                self._take_weights()
            else:
                self._undecided = True
        if self._release:
            self._hooks = [
                param.register_post_accumulate_grad_hook(self._take_gradient)
                for param in self._layout.params
            ]
        open_optimizers.add(self)

    def _stand_or_fall(self, failure):
        try:
            self._ranks.stand_or_fall(failure)
        except BaseException:
            self._abandon()
            raise

    def _start_alike(self):
        """Rank 0's weights on all ranks, as DistributedDataParallel does it."""
        layout = self._layout
        for i, param in enumerate(layout.params):
            values = layout.values(i).clone()
            self._ranks.spread(values)
            with torch.no_grad():
                param.copy_(values.view(param.shape))

    def _leave_out_devices(self):
        """A small model, as of LoRA adapters, may have no block for the last devices."""
        owned = self._layout.owned[1] - self._layout.owned[0]
        enough = -(-owned // _BLOCK_ELEMENTS)
        if enough < len(self._given_devices):
            left_out = [device["path"] for device in self._given_devices[enough:]]
            _log.info(
                "%d elements are too few for %d devices, each of which holds %d at least; left out: %s",
                owned,
                len(self._given_devices),
                _BLOCK_ELEMENTS,
                ", ".join(left_out),
            )
        self._devices = self._given_devices[:enough]

    def _check_shares(self, options):
        """Every device gets some of the state, also of a small model."""
        owned, devices = self._layout.owned[1] - self._layout.owned[0], len(self._devices)
        if devices > 1 and options["subgroup_elements"] == 0 and "io_bytes" in options:
            blocks = -(-owned // _BLOCK_ELEMENTS)
            options["subgroup_elements"] = max(blocks // (4 * devices), 1) * _BLOCK_ELEMENTS

    def _trainable(self):
        named, seen = [], set()
        for g, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for i, param in enumerate(group["params"]):
                if param.requires_grad and param.numel() > 0 and id(param) not in seen:
                    seen.add(id(param))
                    named.append((names[i] if names else f"group{g}.param{i}", param))
        if not named:
            raise UsageError("none of the parameters requires a gradient: there is nothing to optimize")
        return named

    def _stored_lineage(self):
        where = ", ".join(device["path"] for device in self._devices)
        return Lineage.from_json(self._core.blob(), len(self._layout.params), where)

    def close(self) -> None:
        """Carries the last step's commit through and lets the devices go. Raises what that commit
        failed with; the state is then that of the step before. A second call does nothing. A step
        that another thread is in ends first."""
        with self._turn:
            core, self._core = self._core, None
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            if core is None:
                return
            try:
                whole = self._stepped and not (self._broken or self._begun)
                if whole and self._ranks.world == 1:
                    core.wait_commit()
                    self._write_residual(core)
            finally:
                core.close()
                _pass_remarks_on()

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.close()

    def _write_residual(self, core):
        """To the devices, where they have it only every now and then. No step is in progress."""
        if self._stepped and compression.keeps_at_close(self._compress):
            core.edit_state(None, self._lineage.to_json(), core.residual())
            self._prepared = self._ranks.world > 1

    def _abandon(self):
        """Lets the devices go as they are; opening them again decides on the step."""
        self._broken = True
        with contextlib.suppress(Error):
            self.close()

    def _opened(self):
        if self._core is None:
            raise UsageError("the optimizer is closed; make a new one with resume=True to go on")
        return self._core

    def synchronize(self) -> None:
        """Waits until the last step is durable on all devices. Collective. Errors: of its commit."""
        self._opened()
        try:
            self._settle()
        except Error as error:
            self._recover_after(error)
            raise

    def add_param_group(self, param_group: dict) -> None:
        """As in torch. After the optimizer was made the devices are laid out anew: state that is
        there already is kept, by way of a checkpoint beside the first device. After a crash in between
        that checkpoint is still there, and opening the devices says how to bring it back."""
        _as_written(torch.optim.Optimizer.add_param_group)(self, param_group)
        if self._core is None:
            return
        try:
            self._reject_step_in_progress("add_param_group")
            self._relay()
        except BaseException:
            if self._core is not None:
                self.param_groups.pop()
            raise

    def _relay(self):
        if self._lineage.updates == 0 and not self._undecided:
            self.close()
            self._open(False)
            return
        self._ready()
        folder = self._relay_folder()
        checkpoint.save(self, folder, replace=True)
        self.close()
        try:
            self._open(False)
            checkpoint.load(self, folder, strict=False)
        except BaseException as error:
            error.add_note(f"The state before add_param_group is in {folder}: load_checkpoint() reads it.")
            raise
        self._forget_relayed()

    def _relay_folder(self):
        """Where the state is while add_param_group lays the devices out anew."""
        return self._ranks.same(f"{os.path.abspath(self._given_devices[0]['path'])}-add_param_group.checkpoint")

    def _forget_relayed(self):
        self._ranks.barrier()
        if self._ranks.rank == 0:
            shutil.rmtree(self._relay_folder(), ignore_errors=True)

    def _reject_relayed(self):
        """After a crash in add_param_group the devices may be empty, or hold a beginning, while the state
        is in its checkpoint. Where they hold that very state it is of no use any more."""
        folder, failure = self._relay_folder(), None
        if self._ranks.same(not os.path.isdir(folder)):
            return
        try:
            kept = checkpoint.identity(folder)
            paths = [device["path"] for device in self._devices]
            here = [_core.peek(path) for path in paths]
            if all(state is not None and state[0] for state in here):
                here = checkpoint.identity_of_devices(paths)
            if here != kept:
                failure = MismatchError(
                    f"add_param_group was interrupted: the state of update {kept['updates']} is in {folder}, "
                    f"and not on {paths[0]}. Bring it back: make the optimizer with resume=False, and call "
                    f'load_checkpoint("{folder}") before the first step. If it is not needed, delete it.'
                )
        except Error as error:
            failure = error
        self._ranks.stand_or_fall(failure)
        self._forget_relayed()

    # ---- A step.

    @torch.no_grad()
    def step(self, closure=None):
        """One step with the gradients that the parameters hold (or that backward handed over).

        closure: evaluates the model and returns the loss, as in torch. Returns what it returned.
        On return the parameters hold the new weights; moments are still being written, and that
        write becomes real while the next forward runs (synchronize() waits for it).
        """
        if "torch._dynamo" in sys.modules:
            # torch.compile(optimizer.step) would compile what works on addresses, for each parameter anew.
            return torch.compiler.disable(self._step_after)(closure)
        return self._step_after(closure)

    def _step_after(self, closure):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._turn:
            try:
                self._step()
            except BaseException as error:
                self._recover_after(error)
                raise
            finally:
                self._take_receipt()
        return loss

    def _step(self):
        layout = self._layout
        core = self._opened()
        self._reject_thawed()
        scale = self._scaled_by()
        if scale is None:  # GradScaler has seen an infinity and lowers its scale
            self._drop()
            return
        taking_part = self._hand_over()
        if not any(taking_part):
            if not self._said_nothing_moves:
                self._said_nothing_moves = True
                _log.warning(
                    "no parameter of the optimizer has a gradient, so step() changed nothing. Was backward "
                    "called, and are these still the model's own parameters?"
                )
            return
        norm, finite, first_bad = self._sum_up(1.0 / scale)
        self.grad_norm = norm
        if self._release and self.max_grad_norm is None and not self._said_nothing_is_clipped:
            self._said_nothing_is_clipped = True
            _log.warning(
                "no gradient is clipped: release_gradients=True and the optimizer has no max_grad_norm. "
                "clip_grad_norm_ and Trainer's own clipping find no gradients and return 0. Give "
                'max_grad_norm=1.0, or max_grad_norm=float("inf") when none are to be clipped.'
            )
        if not finite and self.nonfinite != "apply":
            self._drop()
            if self.nonfinite == "skip":
                return
            raise NonFiniteGradientError(
                f"the gradient of {first_bad or 'a parameter of another rank'} is not finite; the step "
                'was not made. Lower the learning rate or clip; nonfinite="skip" leaves such steps out.'
            )
        clip = 1.0
        if self.max_grad_norm is not None and math.isfinite(norm):
            clip = min(1.0, float(self.max_grad_norm) / (norm + 1e-6))

        after = self._lineage.advanced(taking_part)
        self._weights_in_doubt = True
        core.start_update(
            after.updates,
            clip / scale,
            self._group_options(after, taking_part),
            layout.type_name,
            layout.owned_address,
        )
        if self._ranks.world == 1:
            for segment in layout.segments:
                if taking_part[segment.param]:
                    core.wait_weights(segment.first, segment.count)
                    layout.deliver(segment.param)
            core.start_commit(after.to_json())
        else:
            core.wait_weights(0, layout.owned[1] - layout.owned[0])
            core.start_commit(after.to_json())
            self._ranks.gather(layout)
            for i, taking in enumerate(taking_part):
                if taking:
                    layout.deliver(i)
            self._prepared = True
        self._lineage = after
        self._stepped = True
        self._forget()
        self._begun = False
        layout.remember()
        self._weights_in_doubt = False

    def _forget(self):
        """No gradient has been handed over."""
        self._received.clear()
        self._kept.clear()
        self._passes.clear()
        self._taking = None

    def _hand_over(self):
        """All gradients of the step to the devices. Which parameters take part, on any rank."""
        if self._taking is not None:
            return self._taking
        layout = self._layout
        taking_part = [
            param.grad is not None or i in self._received or i in self._kept
            for i, param in enumerate(layout.params)
        ]
        if self._averaging is not None:
            self._begin()
            here = [i for i, taking in enumerate(taking_part) if taking]
            anywhere = set(self._ranks.any_of(here, len(taking_part)))
            taking_part = [i in anywhere for i in range(len(taking_part))]
        if not any(taking_part):
            return taking_part
        self._begin()
        if self._averaging is None:
            self._send_gradients(taking_part)
        else:
            self._average_the_rest(taking_part)
        self._taking = taking_part
        return taking_part

    def _sum_up(self, unscale):
        """(norm, finite, name of the first that is not) of what was handed over, on all ranks."""
        norm, finite, first_bad = self._core.finish_gradients(unscale)
        norm, finite = self._ranks.norm(norm, finite)
        return norm, finite, first_bad

    # ---- GradScaler, where gradients were released.

    @property
    def _step_supports_amp_scaling(self):
        """GradScaler.step() asks for this, looks for infinities in what p.grad holds, then calls step()
        with `grad_scale` and `found_inf` set. Released gradients are with the devices by then, so they
        are summed up here, and a gradient of one element says what they held."""
        if not self._release or self._core is None or not (self._begun or self._passes):
            return False
        try:
            taking_part = self._hand_over()
            if not any(taking_part):
                return False
            _, finite, _ = self._sum_up(1.0)
            param = self._layout.params[taking_part.index(True)]
            place = torch.zeros((param.dim(), 1), dtype=torch.int64, device=param.device)
            value = torch.full(
                (1,), 0.0 if finite else math.inf, dtype=param.dtype, device=param.device
            )
            self._take_receipt()
            self._receipt = param
            param.grad = torch.sparse_coo_tensor(place, value, param.shape, check_invariants=False)
        except BaseException as error:
            self._recover_after(error)
            raise
        return True

    def _take_receipt(self):
        if self._receipt is not None:
            self._receipt.grad = None
            self._receipt = None

    def _scaled_by(self):
        """What GradScaler multiplied released gradients by, 1 without one; None: skip the step."""
        found = getattr(self, "found_inf", None)
        self._take_receipt()
        if not self._release or found is None:
            return 1.0
        scale = getattr(self, "grad_scale", None)
        if scale is None or not isinstance(found, torch.Tensor):
            raise UsageError(
                "scaler.unscale_() finds no gradients with release_gradients: leave it out, scaler.step() "
                "does what is needed, and clip with max_grad_norm."
            )
        return None if found.item() != 0 else float(scale)

    def _group_options(self, after, taking_part):
        by_parameter = {}
        for group in self.param_groups:
            options = {
                **self._rule_options(group),
                "lr": float(group["lr"]),
                "weight_decay": float(group["weight_decay"]),
                "maximize": bool(group.get("maximize", False)),
            }
            for param in group["params"]:
                i = self._index_of.get(id(param))
                if i is not None and taking_part[i]:
                    by_parameter[i] = {**options, "step": after.steps[i]}
        return [by_parameter.get(segment.param) for segment in self._layout.segments]

    def _begin(self):
        if self._begun:
            return
        core = self._ready()
        changed = self._ranks.any_of(self._layout.changed(), len(self._layout.params))
        if changed:
            self._adopt_weights(changed)
        core.begin_step()
        self._begun = True

    def _ready(self):
        core = self._opened()
        if self._broken:
            self._recover()
        try:
            self._settle()
        except Error as error:
            self._recover_after(error)
            raise
        if self._expected is not None:
            here, wanted = self._lineage, self._expected
            raise MismatchError(
                f"the loaded state dict refers to update {wanted['updates']} of run "
                f"{wanted['run'][:8]}, but {self._devices[0]['path']} holds update {here.updates} of run "
                f"{here.run[:8]}. Load the checkpoint folder that was written with it "
                "(load_checkpoint, or smartinf.hf.CheckpointCallback with Trainer)."
            )
        if self._undecided:
            raise UsageError(
                f"{self._devices[0]['path']} holds the state of run {self._lineage.run[:8]}, which has "
                f"made {self._lineage.updates} steps; it is not taken over unasked. Make the optimizer "
                "with resume=True to continue that run with its weights, with resume=False to discard its "
                "state and train this model, or load the checkpoint that is meant before the first step. "
                "Another folder keeps both."
            )
        return core

    def _send_gradients(self, taking_part):
        ranges, addresses, types = [], [], []
        for segment in self._layout.segments:
            i = segment.param
            if not taking_part[i]:
                self._core.skip_gradient(segment.index)
                continue
            if i in self._received:
                continue
            param = self._layout.params[i]
            gradient = self._kept[i] if i in self._kept else self._host_gradient(i)
            piece = gradient[segment.start : segment.stop]
            entry = (segment.index, piece.data_ptr(), TYPE_NAMES[piece.dtype])
            if param.grad is not None and gradient.data_ptr() == param.grad.data_ptr():
                for to, value in zip((ranges, addresses, types), entry, strict=True):
                    to.append(value)
            else:  # a copy is handed over at once, so that there is never more than one
                self._core.put_gradients(*([value] for value in entry))
        if ranges:
            self._core.put_gradients(ranges, addresses, types)

    def _host_gradient(self, i):
        """[numel] in CPU memory, in the parameter's order; the gradient itself where it can be."""
        grad = self._layout.params[i].grad
        if grad.layout is not torch.strided:
            raise UsageError(
                f"the gradient of {self._layout.names[i]} is sparse; only dense gradients are supported. "
                "Make the embedding with sparse=False."
            )
        if grad.dtype not in TYPE_NAMES:
            raise UsageError(
                f"the gradient of {self._layout.names[i]} is {grad.dtype}; known are float32, bfloat16 "
                "and float16"
            )
        return grad.detach().to("cpu").contiguous().view(-1)

    @torch.no_grad()
    def _take_gradient(self, param):
        """The hook of release_gradients: a backward pass has completed the gradient of `param`."""
        i = self._index_of[id(param)]
        with self._turn:
            try:
                self._take_gradient_of(i, param)
            except BaseException as error:
                self._recover_after(error)
                raise
        param.grad = None

    def _take_gradient_of(self, i, param):
        if i in self._received:
            raise UsageError(
                f"a second gradient of {self._layout.names[i]} came before step(). Say how many "
                "backward passes make a step with accumulation_steps."
            )
        gradient = self._host_gradient(i)
        kept = self._kept.pop(i, None)
        if kept is not None:
            gradient = kept.add_(gradient)
        self._passes[i] = self._passes.get(i, 0) + 1
        if self._passes[i] < self._accumulation_steps:
            # In f32: many sums rounded to bf16 would lose what a single pass adds.
            self._kept[i] = gradient if kept is not None else gradient.to(torch.float32, copy=True)
        else:
            self._begin()
            if self._averaging is not None:
                self._averaging.add(i, gradient)
            else:
                self._core.put_gradients(
                    [self._segment_of[i]], [gradient.data_ptr()], [TYPE_NAMES[gradient.dtype]]
                )
            self._received.add(i)

    def _put_averaged(self, param, within, values):
        segment = self._segment_of[param]
        self._core.put_gradient_part(segment, within, values.data_ptr(), "f32", values.numel())

    def _average_the_rest(self, taking_part):
        """What backward has not handed over: sums of fewer passes than said, gradients set by hand."""
        for i, param in enumerate(self._layout.params):
            if i in self._received:
                if param.grad is not None:
                    raise UsageError(
                        "gradients are there again after release_gradients has taken them. If the model "
                        "is wrapped in DistributedDataParallel, give the plain model instead: gradients "
                        "are averaged over the ranks as they leave."
                    )
            elif i in self._kept:
                self._averaging.add(i, self._kept[i])
            elif param.grad is not None:
                self._averaging.add(i, self._host_gradient(i))
        self._averaging.finish(taking_part)
        for segment in self._layout.segments:
            if not taking_part[segment.param]:
                self._core.skip_gradient(segment.index)

    def _reject_thawed(self):
        for group in self.param_groups:
            for i, param in enumerate(group["params"]):
                if param.grad is not None and param.numel() > 0 and id(param) not in self._index_of:
                    name = f"number {i} of its group, of shape {list(param.shape)},"
                    if "param_names" in group:
                        name = group["param_names"][i]
                    raise UsageError(
                        f"parameter {name} has a gradient but was frozen when the optimizer was made, so "
                        "the devices hold no state for it. Set requires_grad before making the "
                        "optimizer, or keep it frozen."
                    )

    def _reject_step_in_progress(self, what):
        if self._begun or self._passes:
            raise UsageError(f"{what} between backward and step(): finish the step or call zero_grad()")

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; also drops gradients that backward has handed over already."""
        _as_written(torch.optim.Optimizer.zero_grad)(self, set_to_none)
        if self._core is not None and (self._begun or self._passes):
            self._drop()

    def _drop(self):
        """Forgets the step in progress, before its update has begun. Collective where gradients are
        averaged as they leave."""
        if self._averaging is not None and self._taking is None:
            self._begin()
            if self._ranks.any_of([0] if self._averaging.started else [], 1):
                self._averaging.finish()
        self._forget()
        if self._begun:
            self._core.take_back()
            self._begun = False

    def _recover_after(self, error):
        """_recover() while `error` is on its way to the user, who hears of both."""
        try:
            self._recover()
        except Error as failed:
            error.add_note(f"Going back to the step before failed as well: {failed}")

    def _recover(self):
        """After a failure or an interruption: weights and state of the last committed step."""
        if self._core is None:
            return
        self._broken = True  # until this has come to its end
        if self._ranks.world > 1 and not self._all_failed:
            self._recover_alone()
            return
        self._all_failed = False
        self._forget()
        if self._core.fresh() and not self._core.blob():
            return
        if self._begun or self._lineage.updates > 0:
            try:
                self._core.wait_commit()
            except Error:
                pass  # the step before stands, and its failure is on its way to the user
            self._core.take_back()
            self._begun = False
            stored = self._stored_lineage()
            if self._weights_in_doubt or stored.identity() != self._lineage.identity():
                self._lineage = stored
                self._take_weights()
        self._broken = False

    def _recover_alone(self):
        """After a failure that the other ranks do not know of. Nothing collective happens here, and
        what others may have committed is not taken back."""
        if self._weights_in_doubt or self._averaging is not None and (self._begun or self._passes):
            self._abandon()
            raise DeviceError(
                "the ranks are no longer in step, so the optimizer was closed; start the job again with "
                "resume=True"
            )
        self._forget()
        if self._begun:
            self._core.take_back()
            self._begun = False
        self._broken = False

    # ---- Committing.

    def _settle(self, failure=None):
        """Waits for the last step's commit. With several ranks it is prepared on all of them, then
        committed on all of them or on none; a rank that dies in between leaves it prepared, and opening
        again rolls it forward or back everywhere. failure: of this rank, before it could prepare."""
        core = self._core
        if self._ranks.world == 1:
            if failure is not None:
                raise failure
            core.wait_commit()
            return
        if not self._prepared:
            return
        if failure is None:
            try:
                core.wait_commit()
            except Error as error:
                failure = error
        try:
            agreed = self._ranks.all_agree(failure is None)
        except BaseException:
            self._abandon()  # others may have committed
            raise
        self._prepared = False
        if agreed:
            core.finish_commit()
            return
        core.take_back()
        self._all_failed = self._weights_in_doubt = True
        raise failure or DeviceError("another rank could not write its part of the step: it was taken back")

    # ---- Weights.

    def _take_weights(self):
        """Parameters from the master weights."""
        layout = self._layout
        self._core.load_weights(layout.type_name, layout.owned_address)
        self._ranks.gather(layout)
        with torch.no_grad():
            for i in range(len(layout.params)):
                layout.deliver(i)
        layout.remember()
        self._weights_in_doubt = False

    def _adopt_weights(self, changed):
        """Master weights from parameters that were written from outside, e.g. by
        model.load_state_dict(). Where a parameter still is what came up, the master stays; elsewhere
        nothing that compression kept is left to come."""
        wanted = set(changed)
        layout = self._layout
        values = {}
        sent = residual = None
        if compression.keeps(self._compress):
            self._settle()  # all ranks, also one that owns nothing
        if self._core.step_ahead():
            sent = torch.empty(layout.owned[1] - layout.owned[0], dtype=layout.dtype)
            self._core.load_weights(layout.type_name, sent.data_ptr())
            residual = self._residual().clone()

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

        self._edit(edit, self._lineage, residual)
        self._take_weights()

    # ---- State in and out.

    @property
    def state(self):
        """Empty; asking for a parameter's state raises UsageError, which says what to call instead."""
        return _StateOnDevices()

    @state.setter
    def state(self, given):
        if len(given) > 0:  # torch's own __init__ sets an empty one
            _StateOnDevices.refuse()

    def _pieces(self, first, count):
        """(segment, start, stop, offset in the piece) for each parameter in elements [first, first +
        count) of this rank's space; start and stop count within the parameter."""
        for segment in self._layout.segments:
            low = max(first, segment.first)
            high = min(first + count, segment.first + segment.count)
            if low < high:
                start = segment.start + low - segment.first
                yield segment, start, start + high - low, low - first

    def _edit(self, edit, lineage, residual=None, ahead=()):
        """Rewrites state: edit(segment, start, stop, planes) changes f32 tensors [stop - start] in
        place and returns whether it did. `lineage` becomes true with it, or nothing does. residual:
        bf16 tensor [owned], what compression is to keep; None: what it keeps. ahead: the core's
        step_ahead() of where that comes from."""

        def visit(first, count, views):
            tensors = [torch.frombuffer(view, dtype=torch.float32) for view in views]
            written = False
            with torch.no_grad():
                for segment, start, stop, offset in self._pieces(first, count):
                    planes = [tensor[offset : offset + stop - start] for tensor in tensors]
                    written |= edit(segment, start, stop, planes)
            return written

        self._settle()
        failure = None
        try:
            address = 0 if residual is None else residual.data_ptr()
            self._core.edit_state(visit, lineage.to_json(), address, list(ahead))
        except BaseException as error:
            failure = error
        self._prepared = self._ranks.world > 1
        try:
            self._settle(failure)
        except BaseException:
            self._weights_in_doubt = self._all_failed = False  # nothing has changed
            raise
        self._lineage = lineage

    def _no_residual(self):
        """Nothing kept, for states that come without; None when nothing is ever kept."""
        if not compression.keeps(self._compress):
            return None
        return torch.zeros(self._layout.owned[1] - self._layout.owned[0], dtype=torch.bfloat16)

    def _residual(self):
        """What compression keeps, bf16 [owned], in the core's memory until the next step; None without.
        The last step has been settled."""
        memory = self._residual_memory()
        return None if memory is None else torch.frombuffer(memory, dtype=torch.bfloat16)

    def _residual_memory(self):
        address = self._opened().residual()
        count = self._layout.owned[1] - self._layout.owned[0]
        return None if address == 0 else (ctypes.c_char * (2 * count)).from_address(address)

    def state_dict(self) -> dict:
        """A small dict: param_groups as in torch, and which state on the devices it belongs to. The
        state itself stays there; save_checkpoint() or full_state_dict() copy it. Load it into an
        optimizer over the same devices at the same step, or load the checkpoint written with it."""
        made = _as_written(torch.optim.Optimizer.state_dict)(self)
        made["state"] = {}
        if self._lineage.updates > 0 and not (self._undecided or self._state_is_saved):
            self._state_is_saved = True  # said once
            _log.warning(
                "state_dict() holds no optimizer state: that stays on the devices, and this dict is of use "
                "only while they stand at update %d. save_checkpoint(folder) copies the state, "
                "full_state_dict() gives torch's own form in memory; with Trainer and Accelerate see "
                "smartinf.hf.",
                self._lineage.updates,
            )
        if self._torch_counts_steps:
            made["state"] = {0: {"step": _NO_STATE_TEXT}}
        else:
            note = {**made["param_groups"][0], "params": [], _NO_STATE: _NO_STATE_TEXT}
            made["param_groups"].append(note)
        if self._expected is not None:
            refers_to = self._expected
        elif self._undecided:
            # Whoever loads this back, as accelerate does it, has not said that the state is meant.
            refers_to = {"undecided": True}
        else:
            refers_to = self._lineage.identity()
        made["smartinf"] = {"format": _FORMAT, **refers_to}
        return made

    def full_state_dict(self) -> dict:
        """torch's own state dict of this rule, in CPU memory (4 bytes per parameter and moment, f32):
        torch.optim's class of the same name loads it. Collective: under several ranks every rank
        calls it and gets all of it. Parameters that have not been stepped yet have no entry."""
        tensors = {}

        def take(index, planes):
            tensors[index] = planes

        self._visit(take)
        made = _as_written(torch.optim.Optimizer.state_dict)(self)
        numbers = self._numbers()
        made["state"] = {}
        for i, planes in sorted(tensors.items()):
            if self._lineage.steps[i] == 0:
                continue
            entry = {}
            if self._torch_counts_steps:
                entry["step"] = torch.tensor(float(self._lineage.steps[i]))
            for key, plane in zip(self._state_keys, planes, strict=True):
                entry[key] = plane
            made["state"][numbers[i]] = entry
        return made

    def visit_full_state(self, visit: Callable[[str, torch.Tensor, dict], None]) -> None:
        """Streams the state: visit(name, parameter, {"step": int, "master": tensor, "exp_avg": ...})
        for one parameter after another, f32 in CPU memory, so no more than one is held at a time.
        One rank only; several write a checkpoint."""
        if self._ranks.world > 1:
            raise UsageError("visit_full_state is for one rank; use save_checkpoint under several")
        keys = ("master", *self._state_keys)

        def take(index, planes):
            entry = {"step": self._lineage.steps[index], **dict(zip(keys, planes, strict=True))}
            visit(self._layout.names[index], self._layout.params[index], entry)

        self._visit(take, master=True)

    def _visit(self, take, master=False):
        """take(index, planes) for each parameter in order, planes whole and in its shape."""
        core = self._ready()
        self._reject_step_in_progress("reading state")
        layout = self._layout
        wanted = range(0 if master else 1, 1 + len(self._state_keys))
        building = {}

        def visit(first, count, views):
            tensors = [torch.frombuffer(views[p], dtype=torch.float32) for p in wanted]
            for segment, start, stop, offset in self._pieces(first, count):
                i = segment.param
                if i not in building:
                    param = layout.params[i]
                    building[i] = [torch.zeros(param.numel()) for _ in wanted]
                for whole, piece in zip(building[i], tensors, strict=True):
                    whole[start:stop].copy_(piece[offset : offset + stop - start])
                if self._ranks.world == 1 and stop == layout.params[i].numel():
                    done = building.pop(i)
                    take(i, [plane.view(layout.params[i].shape) for plane in done])

        core.read_state(sum(1 << p for p in wanted), visit)
        if self._ranks.world > 1:
            for i, param in enumerate(layout.params):
                planes = building.pop(i, None) or [torch.zeros(param.numel()) for _ in wanted]
                for plane in planes:
                    self._ranks.sum(plane)
                take(i, [plane.view(param.shape) for plane in planes])

    def _numbers(self):
        """torch's number of each parameter of the layout: its place over all groups."""
        params = [param for group in self.param_groups for param in group["params"]]
        return [next(n for n, p in enumerate(params) if p is param) for param in self._layout.params]

    def load_state_dict(self, state_dict: dict) -> None:
        """Takes either form: the small dict of state_dict(), or a full one, also of torch.optim's
        class of the same rule. A small one whose state the devices do not hold is remembered, and
        the first step asks for the checkpoint that was written with it."""
        self._opened()
        self._reject_step_in_progress("load_state_dict")
        own = state_dict.get("smartinf")
        if own is not None and own.get("format") != _FORMAT:
            raise MismatchError(f"the state dict has format {own.get('format')}, known is {_FORMAT}")
        groups = {key: value for key, value in state_dict.items() if key != "smartinf"}
        groups["param_groups"] = [g for g in groups["param_groups"] if _NO_STATE not in g]
        _as_written(torch.optim.Optimizer.load_state_dict)(self, {**groups, "state": {}})
        if own is None and state_dict.get("state"):
            self._import_full(state_dict["state"])
        elif own is not None and own.get("undecided"):
            pass  # saved before it was said which state is meant: only groups are in it
        elif own is not None:
            wanted = {key: own[key] for key in ("run", "branch", "updates")}
            if wanted == self._lineage.identity():
                self._expected = None
                if self._undecided:
                    self._undecided = False
                    self._take_weights()
            else:
                self._expected = wanted
        else:
            raise MismatchError(
                "the state dict holds no optimizer state. One that torch.optim saved before its first "
                "step is of no use here: leave it out."
            )

    def _import_full(self, state):
        numbers = self._numbers()
        lineage = Lineage(len(self._layout.params))
        lineage.run = lineage.branch = self._ranks.same(lineage.run)
        entries = {}
        for i, number in enumerate(numbers):
            entry = state.get(number)
            if entry is None:
                continue
            for key in self._state_keys:
                value = entry.get(key)
                if value is None and key == "momentum_buffer":
                    continue  # torch keeps none without momentum
                if value is None or value.numel() != self._layout.params[i].numel():
                    raise MismatchError(
                        f"the state dict's {key} of {self._layout.names[i]} is "
                        f"{'missing' if value is None else tuple(value.shape)}, expected "
                        f"{tuple(self._layout.params[i].shape)}: it belongs to another rule or model"
                    )
            entries[i] = entry
            lineage.steps[i] = int(entry.get("step", 1))
        lineage.updates = max(lineage.steps)

        def edit(segment, start, stop, planes):
            entry = entries.get(segment.param, {})
            for key, plane in zip(("master", *self._state_keys), planes, strict=True):
                value = entry.get(key)
                if value is not None:
                    plane.copy_(value.detach().reshape(-1)[start:stop])
                elif key != "master":
                    plane.zero_()
            return True

        self._edit(edit, lineage, self._no_residual())
        self._undecided = False
        self._expected = None
        self._adopt_weights(range(len(self._layout.params)))

    def save_checkpoint(self, folder: Path, replace: bool = False) -> None:
        """Copies the whole state into a folder of its own (made if missing), as `smartinf checkpoint` does:
        every block with a checksum, durable when the call returns. Collective. The folder can be moved,
        and loaded by any number of ranks over any devices; `smartinf restore`, fsck and reshard take it, or
        with several ranks each of its parts. One that holds a checkpoint is refused unless `replace` is
        true; the old one is then there until the new one is whole."""
        self._ready()
        self._reject_step_in_progress("save_checkpoint")
        self._state_is_saved = True
        checkpoint.save(self, folder, replace)

    def load_checkpoint(self, folder: Path) -> None:
        """Replaces state and weights by those of save_checkpoint(), or of a checkpoint that the command
        made of a model with the same names. Collective. Errors: MismatchError for another rule or model,
        or when a small state dict was loaded that belongs to another checkpoint; CorruptError for a
        damaged block. State is then unchanged."""
        self._opened()
        self._reject_step_in_progress("load_checkpoint")
        checkpoint.load(self, folder, strict=True)
        if os.path.abspath(os.fspath(folder)) == self._relay_folder():
            self._forget_relayed()

    # ---- What it costs.

    def traffic(self) -> dict:
        """Bytes since the devices were opened, of this rank: {"host_up", "host_down", "read",
        "written", "cached"}, each by kind; "cached" was in the state cache and not read."""
        return self._opened().traffic()

    def compression(self) -> dict:
        """Of the last step, this rank's part: {"elements" that took part, "values" sent of them, "bytes"
        of messages, "ratio" in force, "residual_norm" of what is kept}. All 0 without compress."""
        return self._opened().compression()

    def describe_devices(self) -> list[str]:
        """One line per device of this rank."""
        return self._opened().describe_devices()

    def memory_bytes(self) -> int:
        """Buffers of engine and devices, with gradients and the state cache."""
        core = self._opened()
        return core.memory_bytes() + core.gradient_memory_bytes() + core.state_cache_bytes()

    def __getstate__(self):
        raise UsageError(
            "an optimizer over devices cannot be pickled or copied; save state_dict() or a checkpoint"
        )
