"""What all optimizers of the package share: torch's API over a session of the devices."""

import inspect
import math
import sys
import weakref
from collections.abc import Callable
from typing import Unpack

import torch

from smartinf import _core, checkpoint, relayout, sharded_parameters, state_io, streamed_model, tables, trainer_arguments
from smartinf.amp import ScalerSignal
from smartinf.averaged_gradients import AveragedGradients
from smartinf.early_updates import EarlyUpdates
from smartinf.errors import NonFiniteGradientError, UsageError
from smartinf.gradients import HeldGradients
from smartinf.options import Options
from smartinf.released_gradients import ReleasedGradients
from smartinf.session import Session
from smartinf.storage_options import Path, StorageOptions, absolute, unknown


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


class StorageOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer whose state is kept and updated on storage devices. The keywords' types and defaults are
    those of smartinf.storage_options.StorageOptions.

    params: as for any torch optimizer: tensors, (name, tensor) pairs, or groups. Names given here
        appear in messages and checkpoints. Parameters that do not require gradients when the
        optimizer is made take no place on the devices and must stay frozen.

    devices: directories or block devices; each an str or path, or a dict with ``path`` and
        optionally ``name``, ``threads``, ``bandwidth`` (bytes per second), ``capacity_bytes``. Under
        several ranks ``{rank}`` in a path is replaced; without it each rank uses a folder ``rankN``
        below the path. ``grpc://HOST:PORT/NAME`` is a device of another machine (docs/remote.md).
    remote: for those, a dict with the files ``certificate``, ``key`` and ``ca``, each of which may also be in
        the environment (SMARTINF_REMOTE_CERTIFICATE, _KEY, _CA), and optionally ``reconnect_seconds``,
        ``deadline_seconds`` and ``window``, as in a recipe.
    resume: what to do with devices that hold state. True: take weights and state from them and go
        on (empty devices are begun). False: discard it. None: the first step raises UsageError unless
        load_state_dict() or load_checkpoint() has said which state is meant.
    state_format: format of momentum and variance: "f32" (exact), "bf16", "q8" or "q4".
    master: format of the master weights: "f32" (exact), "m24" (the upper 24 bits of an f32) or "bf16". Parameters of
        a wider type are rounded when the state begins; docs/numerics.md has the rounding.
    compress: density of compressed gradients (0.08 sends the signs of the largest 8 %, and adds the rest, the
        residual, to the next gradient), or a dict with density and any of values, error_feedback,
        residual_every, warmup_steps, as in a recipe (docs/smartcomp.md). Takes 4 bytes per parameter in host
        memory, in place of the gradients.
        Clipping, GradScaler and accumulation are applied before the residual is added; a step that is skipped
        or fails does not change it; resume and checkpoints carry it. None: gradients are sent dense.
    memory_budget: bytes (or "512MiB", the default) for the buffers of engine and devices; gradients come on top.
    gradient_budget: bytes of gradients held in memory between backward and update; the rest is
        spilled to the devices. None: all stay in memory.
    state_cache: bytes (or "24GB") of the state, in each process, that stay in host memory as well and are not
        read from the devices again; on top of memory_budget. Every step is still written, but with
        durability "none" only for a checkpoint and when closed. None: none.
    gradient_type: type of gradients on their way to the devices, "f32" or "bf16". None: "f32" unless every
        parameter is bfloat16.
    durability: "step": every step survives a power cut. "none": the state takes half the space, and a crash
        loses it.
    max_grad_norm: clips by the global L2 norm, found while gradients are handed over: no extra pass.
        0 and float("inf") clip nothing, and say that this is meant.
    nonfinite: what a step does with an infinity or NaN in a gradient: "raise" NonFiniteGradientError, "skip"
        the step, or "apply" it as torch does. The first two change nothing.
    release_gradients: backward hands each gradient over as soon as it is complete and frees it. With
        accumulation_steps=k the sum over k backward passes is kept in host memory, in f32, and handed
        over in the k-th. p.grad is None after backward then, so clip with max_grad_norm. GradScaler works
        (leave scaler.unscale_ out). Under several ranks gradients are averaged on the way, bucket by
        bucket, each to the rank that owns it; do not wrap the model in DistributedDataParallel then.
    overlap: computation that runs beside the update; same weights, bit for bit. One process only; docs/python.md
        has the rules.
        "late": the next forward. step() returns at once, and each module of `model` waits for its own parameters'
        new weights before it computes with them. "early": backward too, with release_gradients=True: each device
        updates a part as soon as its gradients are there, by the guess that nothing is clipped, and once more where
        that was wrong. "auto": "early" in steps where it pays and the guess is likely to be right, else "late".
        Whatever else uses a parameter's values between step() and the next forward waits for that parameter.
        overlap=model is short for overlap="late", model=model. None: step() waits.
    model: with overlap, the module in whose modules all parameters of the optimizer are.
    where: place of the update: "device" (SmartUpdate) or "host" (the baseline: state crosses the host link).
    subgroup_elements: elements that are read, updated and written at once; 0: chosen from memory_budget.
    checksums: whether every block on the devices has a checksum, checked at every read. False saves a little time.
    seed: seed of stochastic rounding (all formats but "f32").
    process_group: the ranks that share the state. None: all of them under torch.distributed, or those among which
        fully_shard (FSDP2) has divided the parameters; each then updates the rows that it holds.
    fused, foreach: taken from configurations written for torch.optim, and without effect: they choose
        among torch's own loops. capturable, differentiable: must be False.

    After a step: ``grad_norm`` is the global L2 norm of its gradients before clipping; ``exposed_s`` the seconds
    since the step before for which training waited for new weights or a commit; ``overlap`` the step's ("none",
    "late" or "early"), and ``wrong_guess`` whether an early update was made again.

    ``with smartinf.AdamW(...) as optimizer:`` closes it at the end of the block.

    Errors: see smartinf.errors. A failed or interrupted step has not happened: weights and state are
    those of the step before. Threads: one at a time. Not usable in a forked child.
    """

    _rule = ""
    _state_keys = ()
    _torch_counts_steps = True

    def __init__(self, params, defaults, **storage: Unpack[StorageOptions]):
        _reject_wrapper()
        self._session = None
        for keyword in storage:
            if keyword not in StorageOptions.__annotations__:
                own = inspect.signature(type(self).__init__).parameters
                known = {*own, *StorageOptions.__annotations__} - {"self", "storage"}
                raise TypeError(unknown(f"{type(self).__name__}()", keyword, known))
        self.grad_norm, self.exposed_s, self.overlap, self.wrong_guess = None, 0.0, "none", False
        self._scaler_signal = ScalerSignal()
        super().__init__(params, defaults)
        params = [param for group in self.param_groups for param in group["params"]]
        streamed, of_model = streamed_model.of(params), tables.of(params)
        mesh = sharded_parameters.mesh_of(self._trainable())
        self._options = Options(storage, self._rule, self._state_keys, self._torch_counts_steps, streamed, mesh, of_model)
        self.max_grad_norm, self.nonfinite = self._options.max_grad_norm, self._options.nonfinite
        trainer_arguments.check_making(self.param_groups, self._options, self.max_grad_norm)
        shapes = [[name, list(param.shape)] for name, param in self._trainable()]
        self._options.ranks.check_parameters(shapes)
        self._open(self._options.resume)

    def _make(self, here):
        """The __init__ of a class of this kind. here: its locals(), with torch's own options, whose errors have its texts."""
        if here.get("amsgrad"):
            raise ValueError("amsgrad is not supported: it would need a fourth array of state")
        given = {name: here[name] for name in here if name not in ("self", "params", "storage", "amsgrad")}
        for name, value in given.items():
            if name in ("lr", "weight_decay", "eps", "momentum", "lr_decay", "initial_accumulator_value") and not value >= 0:
                what = {"lr": "learning rate", "eps": "epsilon value"}.get(name, f"{name} value")
                raise ValueError(f"Invalid {what}: {value}")
        if "betas" in given:
            given["betas"] = betas = tuple(given["betas"])
            if len(betas) != 2:
                raise ValueError(f"betas must be two numbers, got {betas}")
            for i, beta in enumerate(betas):
                if not 0 <= beta < 1:
                    raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
        StorageOptimizer.__init__(self, here["params"], given, **here["storage"])

    @staticmethod
    def _rule_options(group):
        """What a group says of the rule, by the core's names."""
        made = {key: float(group[key]) for key in ("eps", "lr_decay", "initial_accumulator_value") if key in group}
        if "betas" in group:
            made["beta1"], made["beta2"] = map(float, group["betas"])
        return made

    # ---- Opening and closing.

    def _open(self, resume):
        rule_options = self._rule_options(self.param_groups[0])
        self._session = Session(
            self._options, self._gradient_source, self._trainable(), rule_options, resume
        )
        if self._options.streamed is not None:
            self._options.streamed.optimizer = weakref.ref(self)
            self._options.streamed.session = self._session
        if self._options.tables is not None:
            self._options.tables.optimizer = weakref.ref(self)
        self._early_updates = EarlyUpdates(self._options.overlap)
        expected = weakref.WeakMethod(self._expected_update)
        self._session.expected_update = lambda: expected()()
        return self._session

    def _gradient_source(self, session):
        options = self._options
        if not options.release:
            return HeldGradients(session.layout)
        if not session.ranks.together or options.mesh is not None:
            return ReleasedGradients(session, options.accumulation_steps, collective=session.ranks.world > 1)
        return AveragedGradients(options.accumulation_steps, session)

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

    def close(self) -> None:
        """Carries the last step's commit through and lets the devices go. Raises what that commit
        failed with; the state is then that of the step before. A second call does nothing. A step
        that another thread is in ends first."""
        if self._session is not None:
            self._session.reject_signal_handler("close()")
            self._session.close()

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.close()

    def synchronize(self) -> None:
        """Waits until the last step is durable on all devices. Collective. Errors: of its commit."""
        self._session.reject_signal_handler("synchronize()")
        with self._options.ranks.at("synchronize()"):
            self._session.synchronize()

    def wait_weights(self) -> None:
        """With overlap: waits until all parameters hold the last step's weights. Else they do already. Errors:
        UsageError between backward and step(), when an early update may be overwriting them."""
        if self._session.updating_early:
            raise UsageError("wait_weights() while an early update is under way: call step() or zero_grad() first")
        self._session.take_weights()

    def add_param_group(self, param_group: dict) -> None:
        """As in torch. After the optimizer was made the devices are laid out anew: state that is
        there already is kept, by way of a checkpoint beside the first device of this machine. After a crash in between
        that checkpoint is still there, and opening the devices says how to bring it back."""
        if self._session is not None and self._session.stream is not None:
            raise UsageError(
                "add_param_group() of a streamed model's optimizer is not possible: close() it and make one with all groups "
                "and resume=True"
            )
        _as_written(torch.optim.Optimizer.add_param_group)(self, param_group)
        if self._session is None or self._session.core is None:
            return

        def reopen():
            self.close()
            return self._open(False)

        try:
            self._session.reject_step_in_progress("add_param_group")
            with self._options.ranks.at("add_param_group()"):
                relayout.lay_out_anew(self._session, self.param_groups, reopen)
        except BaseException:
            if self._session.core is not None:
                self.param_groups.pop()
            raise

    def _reject_tables(self, call):
        if self._session.tables is not None:
            raise UsageError(f"{call} has no rows of tables (move_tables): save_checkpoint() and load_checkpoint() have them")

    # ---- A step.

    @torch.no_grad()
    def step(self, closure=None):
        """One step with the gradients that the parameters hold (or that backward handed over).

        closure: evaluates the model and returns the loss, as in torch. Returns what it returned.
        On return the parameters hold the new weights (but see overlap); moments are still being written, and that
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
        self._session.reject_signal_handler("step()")
        with self._session.step_taken():
            try:
                self._step()
            except BaseException as error:
                self._session.recover_after(error)
                raise
            finally:
                self._scaler_signal.clear()
        return loss

    def _step(self):
        session, options = self._session, self._options
        session.opened()
        self._reject_gradients_without_state()
        scale = self._scaler_signal.scale(self) if options.release else 1.0
        if scale is None:  # GradScaler has seen an infinity and lowers its scale
            session.drop_step()
            return
        taking_part = session.collect()
        if not any(taking_part):
            options.warn_once(
                "no gradient",
                "no parameter of the optimizer has a gradient, so step() changed nothing. Was backward "
                "called, and are these still the model's own parameters?",
            )
            return
        norm, finite, first_bad = session.gradient_norm(1.0 / scale)
        self.grad_norm = norm
        if options.release and self.max_grad_norm is None:
            options.warn_once(
                "no clipping",
                "no gradient is clipped: release_gradients=True and the optimizer has no max_grad_norm. "
                "clip_grad_norm_ and Trainer's own clipping find no gradients and return 0. Give "
                'max_grad_norm=1.0, or max_grad_norm=float("inf") when none are to be clipped.',
            )
        if not finite and self.nonfinite != "apply":
            session.drop_step()
            if self.nonfinite == "skip":
                return
            raise NonFiniteGradientError(
                f"the gradient of {first_bad or 'a parameter of another rank'} is not finite; the step "
                'was not made. Lower the learning rate or clip; nonfinite="skip" leaves such steps out.'
            )
        clip = _core.clip_factor(norm, float(self.max_grad_norm or 0))
        after = session.lineage.advanced(taking_part)
        session.update(after, clip / scale, self._group_options(after, taking_part), float(self.param_groups[0]["lr"]))
        self.exposed_s, session.waited_s = session.waited_s, 0.0
        if session.stream is not None:
            self.exposed_s += session.stream.waited_s
            session.stream.waited_s = 0.0
        self.overlap, self.wrong_guess = session.overlap, session.wrong_guess
        self._early_updates.stepped(session, norm, scale, self.exposed_s)

    def _expected_update(self):
        """Session.update()'s arguments as they are likely to be at the end of backward: nothing is clipped, and the
        same parameters take part as before; and the norm up to which that is so, before unscaling (0: any). None:
        the update waits for all gradients."""
        session, early = self._session, self._early_updates
        limit = float(self.max_grad_norm or 0)
        limit = limit if math.isfinite(limit) else 0.0
        if not early.wanted(limit, session.early_possible):
            return None
        taking_part = early.taking_part or [True] * len(session.layout.params)
        after, scale = session.lineage.advanced(taking_part), early.loss_scale
        return after, 1.0 / scale, self._group_options(after, taking_part), limit * scale

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
                i = self._session.layout.index_of.get(id(param))
                if i is not None and taking_part[i]:
                    by_parameter[i] = {**options, "step": after.steps[i]}
        return by_parameter

    def _reject_gradients_without_state(self):
        index_of = self._session.layout.index_of
        for group in self.param_groups:
            for i, param in enumerate(group["params"]):
                if param.grad is not None and param.numel() > 0 and id(param) not in index_of:
                    name = f"number {i} of its group, of shape {list(param.shape)},"
                    if "param_names" in group:
                        name = group["param_names"][i]
                    if sharded_parameters.is_sharded(param) and self._options.mesh is None:
                        raise UsageError(
                            f"parameter {name} was divided by fully_shard after the optimizer was made. Make the "
                            "optimizer with the divided model's parameters; docs/python.md says how with Accelerate."
                        )
                    raise UsageError(
                        f"parameter {name} has a gradient but was frozen when the optimizer was made, so "
                        "the devices hold no state for it. Set requires_grad before making the "
                        "optimizer, or leave it out of the groups and give it to add_param_group() when it thaws."
                    )

    @property
    def _step_supports_amp_scaling(self):
        # GradScaler reads it at the beginning of its own step(), and only there.
        if self._session.tables is not None and not self._options.release:
            raise UsageError("GradScaler unscales no gradients of tables: make the optimizer with release_gradients=True")
        return self._scaler_signal.show(self._session)

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; also drops gradients that backward has handed over already."""
        self._session.reject_signal_handler("zero_grad()")
        _as_written(torch.optim.Optimizer.zero_grad)(self, set_to_none)
        if self._session.core is not None and self._session.step_in_progress:
            self._session.drop_step()

    # ---- State in and out.

    @property
    def updates(self) -> int:
        """Steps that the state has made, those before it was resumed included."""
        return self._session.lineage.updates

    @property
    def state(self):
        """Empty; asking for a parameter's state raises UsageError, which says what to call instead."""
        if self._session is not None and self._options.mesh is not None:
            return state_io.StateOfDivided(state_io.keys_of_divided(self._session))
        return state_io.StateOnDevices()

    @state.setter
    def state(self, given):
        if len(given) > 0:  # torch's own __init__ sets an empty one
            state_io.StateOnDevices.refuse()

    def state_dict(self) -> dict:
        """A small dict: param_groups as in torch, and which state on the devices it belongs to. The
        state itself stays there; save_checkpoint() or full_state_dict() copy it. Load it into an
        optimizer over the same devices at the same step, or load the checkpoint written with it.

        With FSDP2 (fully_shard) it holds the state, as torch.distributed.checkpoint wants it: DTensors, of which each
        rank has its part in CPU memory (f32, with the master weights of parameters that are not). Collective then."""
        made = _as_written(torch.optim.Optimizer.state_dict)(self)
        if self._options.mesh is not None:
            with self._options.ranks.at("state_dict()"):
                return state_io.divided_dict(self._session, made, self.param_groups)
        return state_io.small_dict(self._session, made)

    def full_state_dict(self) -> dict:
        """torch's own state dict of this rule, in CPU memory (4 bytes per parameter and moment, f32):
        torch.optim's class of the same name loads it. Collective: under several ranks every rank
        calls it and gets all of it. Parameters that have not been stepped yet have no entry."""
        self._session.reject_signal_handler("full_state_dict()")
        self._reject_tables("full_state_dict()")
        made = _as_written(torch.optim.Optimizer.state_dict)(self)
        with self._options.ranks.at("full_state_dict()"):
            return state_io.full_dict(self._session, made, self.param_groups)

    def visit_full_state(self, visit: Callable[[str, torch.Tensor, dict], None]) -> None:
        """Streams the state: visit(name, parameter, {"step": int, "master": tensor, "exp_avg": ...})
        for one parameter after another, f32 in CPU memory, so no more than one is held at a time.
        One rank only; several write a checkpoint."""
        self._session.reject_signal_handler("visit_full_state()")
        state_io.visit(self._session, visit)

    def load_state_dict(self, state_dict: dict) -> None:
        """Takes either form: the small dict of state_dict(), or a full one, also of torch.optim's
        class of the same rule. A small one whose state the devices do not hold is remembered, and
        the first step asks for the checkpoint that was written with it."""
        self._session.opened()
        self._session.reject_signal_handler("load_state_dict()")
        self._session.reject_step_in_progress("load_state_dict")
        groups = state_io.without_state(state_dict)
        if "smartinf" not in state_dict:
            self._reject_tables("load_state_dict() of torch's own form")
        state_io.check_groups(groups["param_groups"], self.param_groups)
        _as_written(torch.optim.Optimizer.load_state_dict)(self, groups)
        with self._options.ranks.at("load_state_dict()"):
            state_io.load_state(self._session, state_dict, self.param_groups)

    def save_checkpoint(self, folder: Path, replace: bool = False) -> None:
        """Copies the whole state into a folder of its own (made if missing), as `smartinf checkpoint` does:
        every block with a checksum, durable when the call returns. Collective. The folder can be moved,
        and loaded by any number of ranks over any devices; `smartinf restore`, fsck and reshard take it, or
        with several ranks each of its parts. One that holds a checkpoint is refused unless `replace` is
        true; the old one is then there until the new one is whole."""
        self._session.reject_signal_handler("save_checkpoint()")
        with self._options.ranks.at("save_checkpoint()"):
            self._session.ready()
            if self._session.step_begun:  # sums of passes that are still in memory do not matter
                self._session.reject_step_in_progress("save_checkpoint")
            self._options.never_warn("state_dict")
            checkpoint.save(self._session, self.param_groups, folder, replace)

    def load_checkpoint(self, folder: Path) -> None:
        """Replaces state and weights by those of save_checkpoint(), or of a checkpoint that the command
        made of a model with the same names. Collective. Errors: MismatchError for another rule or model,
        or when a small state dict was loaded that belongs to another checkpoint; CorruptError for a
        damaged block. State is then unchanged."""
        self._session.opened()
        self._session.reject_signal_handler("load_checkpoint()")
        self._session.reject_step_in_progress("load_checkpoint")
        with self._options.ranks.at("load_checkpoint()"):
            checkpoint.load(self._session, folder, strict=True)
            if absolute(folder) == relayout.folder(self._options):
                relayout.discard(self._options)

    # ---- What it costs.

    def traffic(self) -> dict:
        """Bytes since the devices were opened, of this rank: {"host_up", "host_down", "read",
        "written", "cached"}, each by kind; "cached" was in the state cache and not read."""
        return self._session.opened().traffic()

    def compression(self) -> dict:
        """Of the last step, this rank's part: {"elements" that took part, "values" sent of them, "bytes"
        of messages, "density" of the step, "residual_norm"}. All 0 without compress."""
        return self._session.opened().compression()

    def describe_devices(self) -> list[str]:
        """One line per device of this rank."""
        return self._session.opened().describe_devices()

    def memory_bytes(self) -> int:
        """Buffers of engine and devices, with gradients and the state cache."""
        core = self._session.opened()
        return core.memory_bytes() + core.gradient_memory_bytes() + core.state_cache_bytes()

    def __getstate__(self):
        raise UsageError(
            "an optimizer over devices cannot be pickled or copied; save state_dict() or a checkpoint"
        )


def session_of(optimizer):
    """For the package's own modules: the session of an optimizer."""
    return optimizer._session
