"""Hugging Face: an optimizer by TrainingArguments, and its state in Trainer's checkpoint folders and in
Accelerate's.

Trainer writes our small state dict to checkpoint-N/optimizer.pt; the state itself goes into
checkpoint-N/smartinf/ beside it, so save_total_limit, moving a folder and resume_from_checkpoint work
as they do with any optimizer.
"""

import contextlib
import functools
import logging
import os

import torch
import transformers
from transformers.trainer import DEFAULT_CALLBACKS

from smartinf import checkpoint, layer_major, streamed_model, trainer_arguments
from smartinf.errors import MismatchError, UsageError
from smartinf.optimizers import AdamW
from smartinf.storage_optimizer import StorageOptimizer, session_of
from smartinf.storage_options import absolute, device_list

_FOLDER = "smartinf"
_log = logging.getLogger("smartinf")


def attach(trainer, *, devices=None, optimizer_class=None, **options):
    """Lets `trainer` keep its optimizer's state on `devices`. Call it before trainer.train():

        smartinf.hf.attach(trainer, devices=["/nvme0", "/nvme1"])

    trainer: transformers' Trainer or a descendant, such as all of TRL's, with or without peft_config. Learning rate,
    betas, epsilon and weight decay (by Trainer's own rule: no biases and norms), and with release_gradients=True
    clipping and accumulation, are those of its TrainingArguments. It makes the optimizer itself when training begins,
    from the model as it is then (PEFT's adapters, model_init), and parameters keep the model's names.

    devices: not needed for a streamed model, whose own they are.
    optimizer_class: smartinf.AdamW unless given.
    options: any keyword of StorageOptimizer, or of the class, that TrainingArguments do not decide. overlap="auto",
        "late" or "early" needs no `model`: it is the trainer's.
    Returns trainer. Errors: UsageError for an option that has its place in TrainingArguments, and for a trainer that
        has another optimizer.
    """
    given = optimizer(trainer.args, devices=devices, optimizer_class=optimizer_class, **options)
    there = trainer.optimizer
    if unwrap(there) is not None and session_of(unwrap(there)).core is None:
        there = trainer.optimizer = None  # closed; the next train() makes another one
    before, _ = trainer.optimizer_cls_and_kwargs or (_Maker, None)
    if there is not None or before is not _Maker or trainer.is_deepspeed_enabled:
        have = type(there).__name__ if there is not None else getattr(before, "__name__", before)
        raise UsageError(
            f"this {type(trainer).__name__} has an optimizer already "
            f"({'DeepSpeed' if trainer.is_deepspeed_enabled else have}). Make it without one (no optimizers=, "
            "optimizer_cls_and_kwargs= or deepspeed=), and attach before train(). One that smartinf has made goes on with "
            "the next train(), or is closed by smartinf.hf.unwrap(trainer.optimizer).close()"
        )
    trainer.optimizer_cls_and_kwargs = given["optimizer_cls_and_kwargs"]
    if not any(map(_is_ours, trainer.callback_handler.callbacks)):
        trainer.add_callback(CheckpointCallback())
    return trainer


def optimizer(args, *, devices=None, optimizer_class=None, callbacks=(), **options):
    """What attach() does, as keyword arguments for a Trainer whose constructor takes them (transformers' own, TRL's
    SFTTrainer and RewardTrainer):

        trainer = Trainer(model, args, ..., **smartinf.hf.optimizer(args, devices=["/nvme0", "/nvme1"]))

    callbacks: further ones for Trainer. The rest is as for attach().
    """
    made = AdamW if optimizer_class is None else optimizer_class
    for key, fields in trainer_arguments.fields(made._rule).items():
        if key in options:
            raise UsageError(f"{key}={options[key]!r}: set {' and '.join(fields)} in TrainingArguments instead")
    optim = str(getattr(args.optim, "value", args.optim))
    if optim not in ("adamw_torch", "adamw_torch_fused"):  # the default, by torch's version
        raise UsageError(
            f"optim={optim!r} in TrainingArguments names another optimizer than "
            f"smartinf.{made.__name__}: leave it out"
        )
    devices = None if devices is None else device_list(devices)  # also when the script changes its folder meanwhile
    return {
        "optimizer_cls_and_kwargs": (
            _Maker,
            {"args": args, "optimizer_class": made, "options": {"devices": devices, **options}},
        ),
        "callbacks": [*([] if any(map(_is_ours, callbacks)) else [CheckpointCallback()]), *callbacks],
    }


def _is_ours(callback):
    return callback is CheckpointCallback or isinstance(callback, CheckpointCallback)


class _Maker:
    """Trainer calls it with the model, as it does for optimizers that are no single class: that brings the
    parameters' names, which groups that Trainer makes do not have."""

    def __call__(self, model, args, optimizer_class, options):
        trainer = trainer_arguments.running("create_optimizer")  # a subclass may have a rule of its own
        kind = transformers.Trainer if trainer is None else type(trainer)
        if trainer is not None:
            _close_the_one_before(trainer, options)
        accelerator = getattr(trainer, "accelerator", None)
        if accelerator is not None and accelerator.is_fsdp2:
            model = _divided(accelerator, model)
        decaying = set(kind.get_decay_parameter_names(trainer, model))
        trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        groups = []
        for decay in (True, False):  # in Trainer's order, so that its checkpoints fit
            named = [(name, param) for name, param in trained if (name in decaying) == decay]
            groups.append(
                {
                    "params": [param for _, param in named],
                    "param_names": [name for name, _ in named],
                    "weight_decay": args.weight_decay if decay else 0.0,
                }
            )
        by_args = trainer_arguments.values(args, optimizer_class._rule)
        streamed = streamed_model.of(param for _, param in trained)
        if streamed is not None or options.get("release_gradients"):
            # Trainer's own clipping finds no gradients then; otherwise it clips, as ever.
            by_args["max_grad_norm"] = args.max_grad_norm or float("inf")
            by_args["accumulation_steps"] = args.gradient_accumulation_steps
        if options.get("overlap") is not None:
            by_args["model"] = model
        return optimizer_class(groups, **options | by_args)


def _close_the_one_before(trainer, options):
    """With model_init every train() is a run of its own, whose optimizer takes the devices over from the last one's."""
    before = unwrap(trainer.callback_handler.optimizer)
    if before is None:
        return
    before.close()
    if options.get("resume") and trainer.model_init is not None:
        raise UsageError(
            "resume=True would give the new model of this train() or trial the weights of the one before. Say resume=False, "
            "which discards that run's state; train(resume_from_checkpoint=...) needs neither"
        )


def _divided(accelerator, model):
    """The model divided as accelerator.prepare() would do it with FSDP2, which finds that done then."""
    plugin = accelerator.state.fsdp_plugin
    if plugin.activation_checkpointing:
        raise UsageError(
            "activation_checkpointing of FSDP2 has to be applied before the model is divided, and the optimizer needs "
            "the divided model: set gradient_checkpointing in TrainingArguments instead"
        )
    from accelerate.utils import fsdp2_prepare_model

    return fsdp2_prepare_model(accelerator, model)


def unwrap(optimizer):
    """Our optimizer inside what Accelerate wraps around it; None when it is not one of ours.
    unwrap(trainer.optimizer).close() lets Trainer's devices go."""
    while optimizer is not None and not isinstance(optimizer, StorageOptimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


class _Watch(transformers.TrainerCallback):
    """Of every Trainer of the process; does nothing unless its optimizer is ours."""

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        ours = unwrap(optimizer)
        if ours is None:
            return
        options = session_of(ours).options
        if options.stream is not None and args.load_best_model_at_end:
            raise UsageError(
                "load_best_model_at_end=True would write to a streamed model at the end. Leave it out, and load the best "
                "checkpoint's folder with smartinf.from_pretrained()"
            )
        trainer_arguments.check_clipping(args, options, ours.max_grad_norm)
        for text in trainer_arguments.differences(args, ours.param_groups, options):
            _log.warning(
                "TrainingArguments and the optimizer disagree: %s. The optimizer's value counts.", text
            )

    def on_log(self, args, state, control, logs=None, optimizer=None, **kwargs):
        ours = unwrap(optimizer)
        if ours is None or ours.grad_norm is None or "grad_norm" not in (logs or {}):
            return
        if not session_of(ours).options.release:
            return
        # Trainer looked for gradients after they had gone, and found a norm of 0.
        logs["grad_norm"] = ours.grad_norm
        if state.log_history and "grad_norm" in state.log_history[-1]:
            state.log_history[-1]["grad_norm"] = ours.grad_norm


# Trainer calls what reports (report_to) before the callbacks that it is given, so what they are to report
# has to be right before that: only a default callback comes first.
if _Watch not in DEFAULT_CALLBACKS:
    DEFAULT_CALLBACKS.append(_Watch)


class CheckpointCallback(transformers.TrainerCallback):
    """Checks that Trainer has one of our optimizers, which a class with a create_optimizer() of its own may not have, and
    names the folder whose state is to be loaded where that is neither in the checkpoint that Trainer resumes from nor in
    TrainingArguments.resume_from_checkpoint nor below output_dir. Which state is meant is checked in any case."""

    def __init__(self, resume_from=None):
        self._resume_from = None if resume_from is None else absolute(resume_from)

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        ours = unwrap(optimizer)
        if ours is None:
            raise UsageError(
                f"the Trainer has {type(getattr(optimizer, 'optimizer', optimizer)).__name__}, and not the optimizer of "
                "smartinf that was meant: a class that makes its optimizer itself (create_optimizer) needs "
                "optimizers=(smartinf.AdamW(...), None)"
            )
        folders = [
            self._resume_from,
            args.resume_from_checkpoint if isinstance(args.resume_from_checkpoint, str) else None,
            os.path.join(args.output_dir, f"checkpoint-{state.global_step}"),
        ]
        _load_state(ours, *folders)
        if session_of(ours).expected is None:
            return
        there = [name for name in os.listdir(args.output_dir) if os.path.isdir(os.path.join(args.output_dir, name, _FOLDER))]
        raise MismatchError(
            f"the checkpoint of step {state.global_step} refers to an optimizer state that is neither on the devices nor in "
            f"a folder {_FOLDER}/ of {' or '.join(filter(None, folders))}: it was written without the state, or parted from "
            f"it. Resume from a checkpoint that has it (in {args.output_dir}: {', '.join(sorted(there)) or 'none'}), or name "
            "the one that has this state: callbacks=[smartinf.hf.CheckpointCallback(resume_from=...)]"
        )


def _load_state(ours, *folders):
    """Loads the state that Trainer's optimizer.pt has referred to, where one of the checkpoint folders has it."""
    session = session_of(ours)
    for folder in filter(None, folders):
        if session.expected is None:
            return
        if os.path.isdir(inner := os.path.join(folder, _FOLDER)):
            if checkpoint.identity(inner) == session.expected:
                ours.load_checkpoint(inner)


def _carries_state(optimizer):
    """Our optimizer, unless it is None or Trainer saves and loads its state itself (FSDP2)."""
    ours = unwrap(optimizer)
    return None if ours is None or session_of(ours).options.mesh is not None else ours


# A Trainer's checkpoint has our state whoever asks for it: the schedule, a callback that has seen SIGTERM
# (enable_jit_checkpoint), a script. Only the first of these tells callbacks (on_save), so Trainer's own methods do it.


def _around(name):
    """Puts the function in the place of Trainer's method of this name, which it is given."""

    def replace(function):
        plain = getattr(transformers.Trainer, name)

        @functools.wraps(plain)
        def method(self, *args, **kwargs):
            return function(plain, self, *args, **kwargs)

        setattr(transformers.Trainer, name, method)

    return replace


@_around("_save_checkpoint")
def _save_checkpoint(plain, trainer, model, trial):
    ours = unwrap(trainer.optimizer)
    if ours is None or not (session_of(ours).step_begun or session_of(ours).stepping):
        return plain(trainer, model, trial)
    # The last backward has been, or a signal handler asks in the middle of a step: the devices have gradients, and an
    # update may have overwritten weights, so that neither the step before nor this one can be saved now. Trainer makes it
    # next.
    trainer.control.should_save = True
    step = trainer.state.global_step
    _log.warning(
        "a checkpoint was asked for between backward and step(): it is made behind the step, as checkpoint-%d", step + 1
    )
    folder = os.path.join(trainer._get_output_dir(trial=trial), f"checkpoint-{step}")
    with contextlib.suppress(OSError):  # what enable_jit_checkpoint has begun there
        os.remove(os.path.join(folder, "checkpoint-is-incomplete.txt"))
        os.rmdir(folder)
    return None


@_around("_save_optimizer_and_scheduler")
def _save_optimizer_and_scheduler(plain, trainer, output_dir):
    ours = _carries_state(trainer.optimizer)
    if ours is not None:  # over an older one of that step if need be
        ours.save_checkpoint(os.path.join(output_dir, _FOLDER), replace=True)
    return plain(trainer, output_dir)


@_around("_load_optimizer_and_scheduler")
def _load_optimizer_and_scheduler(plain, trainer, checkpoint):
    made = plain(trainer, checkpoint)
    ours = _carries_state(trainer.optimizer)
    if ours is not None:
        _load_state(ours, checkpoint)
    return made


@_around("_load_best_model")
def _load_best_model(plain, trainer):
    made = plain(trainer)
    ours = _carries_state(trainer.optimizer)
    if ours is not None and session_of(ours).tables is not None:  # the model's own files have no rows
        ours.load_checkpoint(os.path.join(trainer.state.best_model_checkpoint, _FOLDER))
    return made


def register(accelerator, optimizer):
    """Makes accelerator.save_state() and load_state() carry the state of `optimizer` (ours, wrapped by
    prepare() or not), in a folder smartinf/ inside theirs. With FSDP2 they do so by themselves. Returns nothing."""
    ours = unwrap(optimizer)
    if ours is None:
        raise UsageError("smartinf.hf.register needs a smartinf optimizer")
    if session_of(ours).options.mesh is not None:
        return
    session_of(ours).options.never_warn("state_dict")

    def save(models, weights, folder):
        ours.save_checkpoint(os.path.join(folder, _FOLDER), replace=True)

    def load(models, folder):
        # Before Accelerate loads the small state dict, which then finds what it refers to.
        ours.load_checkpoint(os.path.join(folder, _FOLDER))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


class StreamedTrainer:
    """A mixin for Trainer and its descendants, before them: class MyTrainer(StreamedTrainer, Trainer). The micro batches
    of gradient_accumulation_steps pass through a streamed model together, block by block
    (smartinf.layer_major.run_together), so that weights are brought to memory twice a step, and not twice a batch. The
    losses and gradients have the same bits. Trainer's log has the loss as ever. Trainers that make the inputs of a batch
    when its turn comes, as TRL's GRPOTrainer does with completions, go on batch by batch, with a warning."""

    def train(self, *args, **kwargs):
        self._waiting_inputs = []  # a call that was interrupted may have left some
        self._one_by_one = type(self)._prepare_inputs is not transformers.Trainer._prepare_inputs
        if self._one_by_one and self.args.gradient_accumulation_steps > 1:
            _log.warning(
                "%s makes the inputs of a batch when its turn comes, so the batches of a step do not pass through the model "
                "together: weights are read twice for each of them",
                type(self).__name__,
            )
        return super().train(*args, **kwargs)

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.current_gradient_accumulation_steps == 1 or self._one_by_one:
            return super().training_step(model, inputs, num_items_in_batch)
        waiting = self._waiting_inputs
        waiting.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        make = super().training_step
        steps = [functools.partial(make, model, batch, num_items_in_batch) for batch in waiting]
        waiting.clear()
        return sum(layer_major.run_together(model, steps))
