"""Hugging Face: an optimizer by TrainingArguments, and its state in Trainer's checkpoint folders and in
Accelerate's.

Trainer writes our small state dict to checkpoint-N/optimizer.pt; the state itself goes into
checkpoint-N/smartinf/ beside it, so save_total_limit, moving a folder and resume_from_checkpoint work
as they do with any optimizer.
"""

import functools
import logging
import os

import torch
import transformers
from transformers.trainer import DEFAULT_CALLBACKS

from smartinf import checkpoint, layer_major, streamed_model, trainer_arguments
from smartinf.errors import MismatchError, UsageError
from smartinf.optimizers import Adam, AdamW
from smartinf.storage_optimizer import StorageOptimizer, session_of

_FOLDER = "smartinf"
_log = logging.getLogger("smartinf")
# Where TrainingArguments say what an optimizer's keyword says.
_FIELDS = {
    "lr": "learning_rate",
    "weight_decay": "weight_decay",
    "max_grad_norm": "max_grad_norm",
    "accumulation_steps": "gradient_accumulation_steps",
}
_ADAM_FIELDS = {"betas": "adam_beta1 and adam_beta2", "eps": "adam_epsilon"}


def optimizer(args, *, devices=None, optimizer_class=None, callbacks=(), **options):
    """Trainer's keyword arguments for an optimizer whose state lives on `devices`:

        trainer = Trainer(model, args, ..., **smartinf.hf.optimizer(args, devices=["/nvme0", "/nvme1"]))

    also for SFTTrainer and other subclasses. Learning rate, betas, epsilon and weight decay (by Trainer's
    own rule: no biases and norms), and with release_gradients=True clipping and accumulation, are those
    of `args`, a TrainingArguments. Trainer makes the optimizer itself when training begins, from the model
    as it is then (PEFT's adapters, model_init), and parameters keep the model's names. CheckpointCallback
    comes with it.

    devices: not needed for a streamed model, whose own they are.
    optimizer_class: smartinf.AdamW unless given. callbacks: further ones for Trainer.
    options: any keyword of StorageOptimizer, or of the class, that `args` do not decide. overlap="auto", "late" or
        "early" needs no `model`: it is Trainer's.
    Errors: UsageError for an option that has its place in TrainingArguments.
    """
    made = AdamW if optimizer_class is None else optimizer_class
    fields = _FIELDS | _ADAM_FIELDS if issubclass(made, (Adam, AdamW)) else _FIELDS
    for key, field in fields.items():
        if key in options:
            raise UsageError(f"{key}={options[key]!r}: set {field} in TrainingArguments instead")
    optim = str(getattr(args.optim, "value", args.optim))
    if optim not in ("adamw_torch", "adamw_torch_fused"):  # the default, by torch's version
        raise UsageError(
            f"optim={optim!r} in TrainingArguments names another optimizer than "
            f"smartinf.{made.__name__}: leave it out"
        )
    return {
        "optimizer_cls_and_kwargs": (
            _Maker,
            {"args": args, "optimizer_class": made, "options": {"devices": devices, **options}},
        ),
        "callbacks": [CheckpointCallback(), *callbacks],
    }


class _Maker:
    """Trainer calls it with the model, as it does for optimizers that are no single class: that brings the
    parameters' names, which groups that Trainer makes do not have."""

    def __call__(self, model, args, optimizer_class, options):
        trainer = trainer_arguments.maker()  # a subclass may have a rule of its own
        kind = transformers.Trainer if trainer is None else type(trainer)
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
        by_args = {"lr": args.learning_rate}
        if issubclass(optimizer_class, (Adam, AdamW)):
            by_args |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
        streamed = streamed_model.of(param for _, param in trained)
        if streamed is not None or options.get("release_gradients"):
            # Trainer's own clipping finds no gradients then; otherwise it clips, as ever.
            by_args["max_grad_norm"] = args.max_grad_norm or float("inf")
            by_args["accumulation_steps"] = args.gradient_accumulation_steps
        if options.get("overlap") is not None:
            by_args["model"] = model
        return optimizer_class(groups, **options | by_args)


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
    """Give it to Trainer(callbacks=[...]): every checkpoint-N then holds the optimizer's state, and
    resume_from_checkpoint takes it from there.

    resume_from: the checkpoint folder, when it is neither below output_dir nor
        TrainingArguments.resume_from_checkpoint. Which state is meant is checked in any case.
    """

    def __init__(self, resume_from=None):
        self._resume_from = resume_from

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        ours = unwrap(optimizer)
        if ours is None:
            raise UsageError("smartinf.hf.CheckpointCallback needs a smartinf optimizer in the Trainer")
        session = session_of(ours)
        session.options.never_warn("state_dict")
        wanted = session.expected
        if wanted is None:
            return
        name = f"checkpoint-{state.global_step}"
        given = args.resume_from_checkpoint
        candidates = [
            self._resume_from,
            given if isinstance(given, str) else None,
            os.path.join(args.output_dir, name),
        ]
        looked = []
        for folder in filter(None, candidates):
            inner = os.path.join(folder, _FOLDER)
            looked.append(inner)
            if os.path.isdir(inner) and checkpoint.identity(inner) == wanted:
                ours.load_checkpoint(inner)
                return
        raise MismatchError(
            f"the optimizer state of step {state.global_step} was not found in {', '.join(looked)}. Give "
            "the folder: smartinf.hf.CheckpointCallback(resume_from=...)."
        )

    def on_save(self, args, state, control, optimizer=None, **kwargs):
        ours = unwrap(optimizer)
        if session_of(ours).options.mesh is not None:
            return  # with FSDP2 Trainer saves what state_dict() gives, and loads it
        folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}", _FOLDER)
        # Trainer has just written the rest of the folder, over an older one of that step if need be.
        ours.save_checkpoint(folder, replace=True)


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
    """A mixin for Trainer and its descendants, before them: class MyTrainer(StreamedTrainer, Trainer). The micro-batches
    of gradient_accumulation_steps pass through a streamed model together, block by block
    (smartinf.layer_major.run_together), so that weights are brought to memory twice a step, and not twice a batch. The
    losses and gradients have the same bits. Trainer's log has the loss as ever."""

    def train(self, *args, **kwargs):
        self._waiting_inputs = []  # a call that was interrupted may have left some
        return super().train(*args, **kwargs)

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.current_gradient_accumulation_steps == 1:
            return super().training_step(model, inputs, num_items_in_batch)
        waiting = self._waiting_inputs
        waiting.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        make = super().training_step
        steps = [functools.partial(make, model, batch, num_items_in_batch) for batch in waiting]
        waiting.clear()
        return sum(layer_major.run_together(model, steps))
